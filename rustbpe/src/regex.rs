//! Splits text by a pattern: the scanner handles two patterns, a regex engine the rest.

use fancy_regex::Regex;

use crate::error::{invalid, Error};
use crate::scan::{safe_cut, Scanner};

/// GPT-4's pattern as first published; also the default of the public package `rustbpe`.
pub const DEFAULT_PATTERN: &str = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+";

/// Lengths of numbers, at most, for which the scanner supports the default pattern.
const DIGITS: [usize; 2] = [3, 2];

/// The default pattern with numbers of at most `digits` digits.
fn default_pattern(digits: usize) -> String {
    DEFAULT_PATTERN.replace("{1,3}", &format!("{{1,{digits}}}"))
}

/// Words per batch.
pub const BATCH: usize = 64;

/// Splits text into words.
pub enum Splitter {
    Scanner(Scanner),
    Regex(Box<Regex>),
}

impl Splitter {
    /// Fails on an invalid pattern.
    pub fn new(pattern: &str) -> Result<Self, Error> {
        match DIGITS.into_iter().find(|&digits| default_pattern(digits) == pattern) {
            Some(digits) => Ok(Splitter::Scanner(Scanner::new(digits))),
            None => Self::engine(pattern),
        }
    }

    /// Uses the regex engine even if the scanner supports the pattern.
    pub fn engine(pattern: &str) -> Result<Self, Error> {
        let regex =
            Regex::new(pattern).map_err(|e| invalid!("invalid pattern {pattern:?}: {e}"))?;
        Ok(Splitter::Regex(Box::new(regex)))
    }

    /// Calls `words` with batches of words of `text`, in order, as `(start, end)`.
    ///
    /// If scanning and table lookups alternated word by word, the scanner's branches and the
    /// table's cache misses would stall each other; in batches, each loop runs at its own speed.
    #[inline(always)]
    pub fn split_batches(
        &self,
        text: &str,
        mut words: impl FnMut(&[(usize, usize)]),
    ) -> Result<(), Error> {
        let mut batch = [(0, 0); BATCH];
        let mut len = 0;
        self.split(text, |start, end| {
            batch[len] = (start, end);
            len += 1;
            if len == BATCH {
                words(&batch);
                len = 0;
            }
        })?;
        words(&batch[..len]);
        Ok(())
    }

    /// Calls `word(start, end)` for the words of `text`, in order. Text that the pattern does not
    /// match is skipped, as in tiktoken. Fails if the regex engine fails.
    #[inline(always)]
    pub fn split(&self, text: &str, mut word: impl FnMut(usize, usize)) -> Result<(), Error> {
        match self {
            Splitter::Scanner(scanner) => scanner.split(text, word),
            Splitter::Regex(regex) => {
                for found in regex.find_iter(text) {
                    let found = found.map_err(|e| invalid!("the pattern failed on a text: {e}"))?;
                    if found.start() < found.end() {
                        word(found.start(), found.end());
                    }
                }
            }
        }
        Ok(())
    }
}

impl Splitter {
    /// Cuts a text into parts of about `size` bytes without changing its words. Returns the whole
    /// text if there is no safe cut or the pattern needs the regex engine.
    pub fn parts<'t>(&self, text: &'t str, size: usize) -> impl Iterator<Item = &'t str> {
        let size = match self {
            Splitter::Scanner(_) => size,
            Splitter::Regex(_) => usize::MAX,
        };
        let mut rest = text;
        std::iter::from_fn(move || {
            let at = if rest.len() > size { safe_cut(rest, size) } else { rest.len() };
            let (part, after) = rest.split_at(at);
            rest = after;
            (!part.is_empty()).then_some(part)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Random;

    /// Characters of every class, those in the patterns, and edge cases: letters of two to four
    /// bytes, the long s, combining marks, numbers other than digits, non-ASCII spaces, line ends
    /// outside `[\r\n]`, unassigned characters.
    const ALPHABET: &str =
        "a|s|S|t|d|m|l|L|v|e|R|z|'|'| | |  |\n|\r|\r\n|\t|\u{b}|0|7|12|.|!|_|-|\0|\
        \u{17f}|\u{e9}|\u{df}|\u{416}|\u{4e2d}|\u{ac00}|\u{1d400}|\u{301}|\u{660}|\u{2167}|\u{bd}|\
        \u{a0}|\u{85}|\u{2028}|\u{3000}|\u{1f600}|\u{200d}|\u{10ffff}";

    fn words<'t>(splitter: &Splitter, text: &'t str) -> Vec<&'t str> {
        let mut words = Vec::new();
        splitter.split(text, |start, end| words.push(&text[start..end])).unwrap();
        words
    }

    #[test]
    fn scanner_matches_regex_engine() {
        let mut random = Random(3);
        let alphabet: Vec<&str> = ALPHABET.split('|').collect();
        for pattern in DIGITS.map(default_pattern) {
            let (scanner, engine) =
                (Splitter::new(&pattern).unwrap(), Splitter::engine(&pattern).unwrap());
            assert!(
                matches!(scanner, Splitter::Scanner(_)) && matches!(engine, Splitter::Regex(_))
            );
            for _ in 0..3000 {
                let text = random.text(&alphabet, 24);
                assert_eq!(words(&scanner, &text), words(&engine, &text), "{pattern}: {text:?}");
            }
        }
    }

    #[test]
    fn code_point_classes_match_regex_engine() {
        let scanner = Splitter::new(DEFAULT_PATTERN).unwrap();
        let engine = Splitter::engine(DEFAULT_PATTERN).unwrap();
        // All assigned code points and some of the others
        let codes = (0..0x3_3500_u32).chain(0xe_0000..0xe_0200).chain((0..0x11_0000).step_by(997));
        for block in codes.collect::<Vec<_>>().chunks(1024) {
            // With these neighbors, each class is split differently
            let chars = block.iter().filter_map(|&code| char::from_u32(code));
            let text: String = chars.flat_map(|c| ['x', c, ' ', c, '!']).collect();
            assert_eq!(words(&scanner, &text), words(&engine, &text));
        }
    }

    #[test]
    fn parts_preserve_words() {
        let text = "It's a long text, isn't it?\n ".repeat(50);
        let scanner = Splitter::new(DEFAULT_PATTERN).unwrap();
        let parts: Vec<_> = scanner.parts(&text, 100).collect();
        assert!(parts.len() > 10 && parts.concat() == text);
        let of_parts: Vec<_> = parts.iter().flat_map(|part| words(&scanner, part)).collect();
        assert_eq!(of_parts, words(&scanner, &text));
        assert_eq!(Splitter::engine("x").unwrap().parts(&text, 100).count(), 1);
    }

    #[test]
    fn invalid_pattern_is_in_the_error() {
        let error = Splitter::new("a(b").err().unwrap().to_string();
        assert!(error.contains("a(b"), "{error}");
    }
}
