//! Hand-written splitter for GPT-4's pattern, with numbers of up to a given number of digits.
//!
//!     text, start of a word -> end of that word
//!
//! The first one or two characters decide which alternative of the pattern matches; a loop then
//! finds the end of the word. `regex.rs` lists the patterns; tests compare the scanner with the
//! regex engine on all character classes.

use std::sync::LazyLock;

use regex_syntax::hir::{Class as HirClass, HirKind};

/// Character classes of the patterns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Class {
    /// `\p{L}`
    Letter,
    /// `\p{N}`
    Number,
    /// `\s` except newlines
    Space,
    /// `[\r\n]`
    Newline,
    /// everything else
    Other,
}
use Class::{Letter, Newline, Number, Other, Space};

/// Class of every code point, in two levels: blocks of 128 characters, with identical blocks
/// stored once. Filled from the tables of the regex engine.
struct Classes {
    ascii: [Class; 256],
    block_of: Vec<u16>,
    blocks: Vec<[Class; BLOCK]>,
}

const BLOCK: usize = 128;

static CLASSES: LazyLock<Classes> = LazyLock::new(|| {
    let mut flat = vec![Other; 0x11_0000];
    for (pattern, class) in
        [(r"\p{L}", Letter), (r"\p{N}", Number), (r"\s", Space), (r"[\r\n]", Newline)]
    {
        let hir = regex_syntax::parse(pattern).expect("a valid class");
        let HirKind::Class(HirClass::Unicode(ranges)) = hir.into_kind() else {
            unreachable!("{pattern} is a class of code points")
        };
        for range in ranges.iter() {
            flat[range.start() as usize..=range.end() as usize].fill(class);
        }
    }
    let mut blocks: Vec<[Class; BLOCK]> = Vec::new();
    let mut block_of = Vec::with_capacity(flat.len() / BLOCK);
    for block in flat.chunks_exact(BLOCK) {
        let known = blocks.iter().position(|known| known == block);
        block_of.push(known.unwrap_or(blocks.len()) as u16);
        if known.is_none() {
            blocks.push(block.try_into().unwrap());
        }
    }
    let mut ascii = [Other; 256];
    ascii[..BLOCK].copy_from_slice(&flat[..BLOCK]);
    Classes { ascii, block_of, blocks }
});

/// Splits text into letters after at most one other character, numbers of at most `digits` digits,
/// punctuation with the newlines after it, and whitespace up to its last newline.
#[derive(Clone, Copy)]
pub struct Scanner {
    digits: usize,
    classes: &'static Classes,
}

impl Scanner {
    pub fn new(digits: usize) -> Self {
        Scanner { digits, classes: &CLASSES }
    }

    /// Calls `word(start, end)` for the words of `text`, in order; they cover the text.
    #[inline(always)]
    pub fn split(&self, text: &str, mut word: impl FnMut(usize, usize)) {
        let text = text.as_bytes();
        let mut start = 0;
        while start < text.len() {
            let end = self.word_end(text, start);
            word(start, end);
            start = end;
        }
    }

    /// Returns the end of the word that starts at `start`.
    #[inline(always)]
    fn word_end(&self, text: &[u8], start: usize) -> usize {
        let (first, second) = self.class(text, start);
        match first {
            Letter => self.letters(text, second),
            Number => {
                let mut end = second;
                for _ in 1..self.digits {
                    match self.class_or_end(text, end) {
                        Some((Number, next)) => end = next,
                        _ => break,
                    }
                }
                end
            }
            Newline => self.white_space(text, start),
            Space | Other => {
                if let Some(end) = contraction(text, start) {
                    return end;
                }
                match self.class_or_end(text, second) {
                    Some((Letter, third)) => self.letters(text, third),
                    Some((Other, third)) if first == Other || text[start] == b' ' => {
                        self.newlines(text, self.run(Other, text, third))
                    }
                    _ if first == Other => self.newlines(text, second),
                    _ => self.white_space(text, start),
                }
            }
        }
    }

    /// `\s*[\r\n]|\s+(?!\S)|\s+`: up to the last newline. Without a newline: the whole run
    /// if it ends the text or has one character; else all but its last character, which starts
    /// the next word.
    #[inline(never)]
    fn white_space(&self, text: &[u8], start: usize) -> usize {
        let (mut end, mut last, mut after_newline) = (start, start, None);
        while let Some((class @ (Space | Newline), next)) = self.class_or_end(text, end) {
            if class == Newline {
                after_newline = Some(next);
            }
            (last, end) = (end, next);
        }
        match after_newline {
            Some(after_newline) => after_newline,
            None if end == text.len() || last == start => end,
            None => last,
        }
    }

    /// Returns the end of the letters starting at `at`; ASCII is scanned eight bytes at a time.
    #[inline(always)]
    fn letters(&self, text: &[u8], mut at: usize) -> usize {
        while let Some(window) = text.get(at..at + 8) {
            let others = !ascii_letters(u64::from_le_bytes(window.try_into().unwrap())) & HIGH_BITS;
            at += (others.trailing_zeros() / 8) as usize; // 8 if all are letters
            if others != 0 {
                match self.class(text, at) {
                    (Letter, next) => at = next, // a non-ASCII letter
                    _ => return at,
                }
            }
        }
        self.run(Letter, text, at)
    }

    /// Returns the end of the run of `class` characters starting at `at`.
    #[inline(always)]
    fn run(&self, class: Class, text: &[u8], mut at: usize) -> usize {
        while let Some((found, next)) = self.class_or_end(text, at) {
            if found != class {
                break;
            }
            at = next;
        }
        at
    }

    /// `[\r\n]*`
    #[inline(always)]
    fn newlines(&self, text: &[u8], mut at: usize) -> usize {
        while matches!(text.get(at), Some(b'\r' | b'\n')) {
            at += 1;
        }
        at
    }

    #[inline(always)]
    fn class_or_end(&self, text: &[u8], at: usize) -> Option<(Class, usize)> {
        (at < text.len()).then(|| self.class(text, at))
    }

    /// Returns the class of the character at `at` and the start of the next one.
    #[inline(always)]
    fn class(&self, text: &[u8], at: usize) -> (Class, usize) {
        let byte = text[at];
        if byte < 128 {
            (self.classes.ascii[usize::from(byte)], at + 1)
        } else {
            self.wide_class(text, at)
        }
    }

    /// `class` for characters of two to four bytes.
    #[inline(never)]
    fn wide_class(&self, text: &[u8], at: usize) -> (Class, usize) {
        let tail = |i: usize| usize::from(text[at + i] & 0x3f);
        let lead = usize::from(text[at]);
        let (code, width) = match lead {
            0..0xe0 => ((lead & 0x1f) << 6 | tail(1), 2),
            0xe0..0xf0 => ((lead & 0x0f) << 12 | tail(1) << 6 | tail(2), 3),
            _ => ((lead & 0x07) << 18 | tail(1) << 12 | tail(2) << 6 | tail(3), 4),
        };
        let block = &self.classes.blocks[usize::from(self.classes.block_of[code / BLOCK])];
        (block[code % BLOCK], at + width)
    }
}

/// The highest bit of each of eight bytes.
const HIGH_BITS: u64 = 0x8080_8080_8080_8080;

/// Sets the highest bit of each byte that is an ASCII letter; other bits are undefined.
#[inline(always)]
fn ascii_letters(bytes: u64) -> u64 {
    let every = |byte: u8| u64::from_ne_bytes([byte; 8]);
    let lower = (bytes | every(0x20)) & !HIGH_BITS; // seven bits each: sums cannot carry over
    let from_a = lower + every(0x80 - b'a');
    let beyond_z = lower + every(0x80 - b'z' - 1);
    from_a & !beyond_z & !bytes
}

/// Returns the end of a contraction such as `'s`, `'t` or `'re` at `start`, if there is one.
#[inline(always)]
fn contraction(text: &[u8], start: usize) -> Option<usize> {
    if text[start] != b'\'' {
        return None;
    }
    let first = text.get(start + 1)?.to_ascii_lowercase();
    let second = text.get(start + 2).map(u8::to_ascii_lowercase);
    match (first, second) {
        (b's' | b'd' | b'm' | b't', _) => Some(start + 2),
        (b'l', Some(b'l')) | (b'v' | b'r', Some(b'e')) => Some(start + 3),
        // U+017F, the long s, is an s to a pattern that ignores case
        (0xc5, Some(0xbf)) => Some(start + 3),
        _ => None,
    }
}

/// Returns the first index >= `from` where a text can be cut without changing its words: between an
/// ASCII letter and a space or newline. If there is none: the end of the text.
pub fn safe_cut(text: &str, from: usize) -> usize {
    let bytes = text.as_bytes();
    let from = from.max(1);
    (from..bytes.len())
        .find(|&at| matches!(bytes[at], b' ' | b'\n') && bytes[at - 1].is_ascii_alphabetic())
        .unwrap_or(bytes.len())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Random;

    #[test]
    fn ascii_letters_are_found_in_every_byte() {
        for byte in 0..=255u8 {
            for i in 0..8 {
                let mut bytes = [b'-'; 8];
                bytes[i] = byte;
                let found = ascii_letters(u64::from_le_bytes(bytes)) & HIGH_BITS;
                let expected = u64::from(byte.is_ascii_alphabetic()) << (8 * i + 7);
                assert_eq!(found, expected, "byte {byte} at {i}");
            }
        }
    }

    #[test]
    fn safe_cut_preserves_words() {
        let alphabet = ["a", "s", " ", "'", "\n", "\r", "1", "!", "\u{e9}", "\u{a0}"];
        let mut random = Random(2);
        let scanner = Scanner::new(2);
        let words = |text: &str, offset: usize| {
            let mut words = Vec::new();
            scanner.split(text, |start, end| words.push((offset + start, offset + end)));
            words
        };
        let mut cuts = 0;
        for _ in 0..3000 {
            let text = random.text(&alphabet, 30);
            let at = safe_cut(&text, random.below(20));
            let (left, right) = text.split_at(at);
            cuts += usize::from(!right.is_empty());
            assert_eq!([words(left, 0), words(right, at)].concat(), words(&text, 0), "{text:?}");
        }
        assert!(cuts > 300, "only {cuts} texts were cut");
    }
}
