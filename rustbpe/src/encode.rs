//! Parallel encoding of texts to token ids.
//!
//!     texts -> parts -> words -> (cache, or vocabulary) -> ids -> one flat array
//!
//! Words repeat, so each thread caches the ids of words it has encoded.

use std::sync::Mutex;

use rayon::prelude::*;
use rayon::ThreadPool;

use crate::error::{invalid, Error};
use crate::regex::{Splitter, BATCH};
use crate::table::WordTable;
use crate::vocab::Vocab;

/// Maximum number of ids that a cached word stores in its table slot.
const INLINE: usize = 3;

/// A cache is cleared when it has this many words, ...
const CACHED_WORDS: usize = 3 << 17; // 16 MB

/// ... or this many bytes and ids in total.
const CACHED_SIZE: usize = 1 << 23; // at most 16 MB

/// Minimum bytes of text per job; longer texts are split.
const JOB: usize = 1 << 18;

/// Jobs per thread between checks of `stop`.
const ROUND: usize = 64;

/// Encodes text to ids.
pub struct Encoder {
    pub vocab: Vocab,
    splitter: Splitter,
    caches: Mutex<Vec<Cache>>, // of threads that are idle
}

/// The ids of many texts: text i is `ids[offsets[i]..offsets[i + 1]]`.
#[derive(Default)]
pub struct Flat {
    pub ids: Vec<u32>,
    pub offsets: Vec<i64>,
}

/// Words that a thread has encoded.
#[derive(Default)]
struct Cache {
    words: WordTable<Known>,
    ids: Vec<u32>, // of words with more than INLINE of them
    size: usize,   // bytes and ids of all words
}

/// The ids of a cached word: `ids[..num]` or, if `num` exceeds INLINE, `num` ids of the cache's
/// own list starting at index `ids[0]`. A new entry has `num` 0.
#[derive(Clone, Copy, Default)]
struct Known {
    num: u32,
    ids: [u32; INLINE],
}

impl Encoder {
    pub fn new(vocab: Vocab, splitter: Splitter) -> Self {
        Encoder { vocab, splitter, caches: Mutex::default() }
    }

    /// Encodes texts, in order.
    ///
    /// Without a pool, runs on the calling thread. `stop` is called regularly; if it returns
    /// true, encoding aborts. Fails on a text above 4 GB or if the splitter fails.
    pub fn encode_many(
        &self,
        texts: &[&str],
        pool: Option<&ThreadPool>,
        mut stop: impl FnMut() -> bool,
    ) -> Result<Flat, Error> {
        let mut parts = Vec::with_capacity(2 * texts.len());
        for text in texts {
            if text.len() > u32::MAX as usize {
                return Err(invalid!("a text has {} bytes; the limit is 4 GB", text.len()));
            }
            parts.push((true, &text[..0])); // a separate part, because a text may be empty
            parts.extend(self.splitter.parts(text, JOB).map(|part| (false, part)));
        }
        let jobs = jobs(&parts);
        let run = |job: &&[(bool, &str)]| {
            let mut done = Flat::default();
            for &(is_start, part) in *job {
                if is_start {
                    done.offsets.push(done.ids.len() as i64);
                }
                self.encode(part, &mut done.ids)?;
            }
            Ok(done)
        };
        let mut flat = Flat::default();
        for round in jobs.chunks(ROUND * pool.map_or(1, ThreadPool::current_num_threads)) {
            if stop() {
                return Err(Error::Interrupted);
            }
            let done: Vec<Flat> = match pool {
                Some(pool) => pool.install(|| round.par_iter().map(run).collect::<Result<_, _>>()),
                None => round.iter().map(run).collect(),
            }?;
            for part in done {
                let total = flat.ids.len() as i64;
                flat.offsets.extend(part.offsets.iter().map(|start| total + start));
                flat.ids.extend_from_slice(&part.ids);
            }
        }
        flat.offsets.push(flat.ids.len() as i64);
        Ok(flat)
    }

    /// Appends the ids of `text`.
    fn encode(&self, text: &str, out: &mut Vec<u32>) -> Result<(), Error> {
        let mut cache = self.take_cache();
        let result = self.encode_with(&mut cache, text, out);
        self.return_cache(cache);
        result
    }

    fn encode_with(&self, cache: &mut Cache, text: &str, out: &mut Vec<u32>) -> Result<(), Error> {
        let bytes = text.as_bytes();
        self.splitter.split_batches(text, |words| {
            let Cache { words: known_words, ids: more_ids, size } = cache;
            let mut buffer = [0; INLINE * BATCH];
            let mut len = 0;
            known_words.entries(bytes, words, |i, known| {
                let num = known.num as usize;
                if num.wrapping_sub(1) < INLINE {
                    // Always copies INLINE ids: cheaper than a variable number
                    buffer[len..len + INLINE].copy_from_slice(&known.ids);
                    len += num;
                    return;
                }
                out.extend_from_slice(&buffer[..len]);
                len = 0;
                if num > 0 {
                    let first = known.ids[0] as usize;
                    out.extend_from_slice(&more_ids[first..first + num]);
                    return;
                }
                let (start, end) = words[i];
                let old = out.len();
                self.vocab.encode_word(bytes, start, end, out);
                let ids = &out[old..];
                known.num = ids.len() as u32;
                if ids.len() <= INLINE {
                    known.ids[..ids.len()].copy_from_slice(ids);
                } else {
                    known.ids[0] = more_ids.len() as u32;
                    more_ids.extend_from_slice(ids);
                }
                *size += ids.len() + (end - start);
            });
            out.extend_from_slice(&buffer[..len]);
            if known_words.len() >= CACHED_WORDS || *size >= CACHED_SIZE {
                *cache = Cache::default();
            }
        })
    }

    fn take_cache(&self) -> Cache {
        // try_lock: a lock held by another thread during a fork stays locked in the child
        self.caches.try_lock().ok().and_then(|mut caches| caches.pop()).unwrap_or_default()
    }

    fn return_cache(&self, cache: Cache) {
        if let Ok(mut caches) = self.caches.try_lock() {
            caches.push(cache);
        }
    }
}

/// Groups consecutive parts into jobs of about equal size.
fn jobs<'p, 't>(parts: &'p [(bool, &'t str)]) -> Vec<&'p [(bool, &'t str)]> {
    let mut jobs = Vec::new();
    let (mut first, mut size) = (0, 0);
    for (i, (_, part)) in parts.iter().enumerate() {
        size += part.len();
        if size >= JOB {
            jobs.push(&parts[first..=i]);
            (first, size) = (i + 1, 0);
        }
    }
    if first < parts.len() {
        jobs.push(&parts[first..]);
    }
    jobs
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Random;
    use crate::regex::DEFAULT_PATTERN;
    use crate::vocab::tests::{naive, trained};

    fn encoder(vocab: Vocab) -> Encoder {
        Encoder::new(vocab, Splitter::new(DEFAULT_PATTERN).unwrap())
    }

    #[test]
    fn encode_many_matches_naive_encoding() {
        let mut random = Random(6);
        let encoder = encoder(trained(&random.text(&["a", "b", "c", " "], 2000), 300));
        let letters = ["a", "b", "c", "abc", " a", " b", "1", "\n", "\u{e9}"];
        let mut texts: Vec<String> = (0..200).map(|_| random.text(&letters, 2000)).collect();
        texts.push(random.text(&["ab ", "c "], 600_000)); // split into parts
        texts.push(String::new());
        let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
        let pool = rayon::ThreadPoolBuilder::new().num_threads(3).build().unwrap();
        let flat = encoder.encode_many(&texts, Some(&pool), || false).unwrap();
        assert_eq!(flat.offsets.len(), texts.len() + 1);
        for (i, text) in texts.iter().enumerate() {
            let mut expected = Vec::new();
            encoder
                .splitter
                .split(text, |start, end| {
                    expected.extend(naive(&encoder.vocab, &text.as_bytes()[start..end]))
                })
                .unwrap();
            let row = flat.offsets[i] as usize..flat.offsets[i + 1] as usize;
            assert!(flat.ids[row] == expected, "text {i}");
        }
        let stopped = encoder.encode_many(&texts, None, || true);
        assert_eq!(stopped.err(), Some(Error::Interrupted));
    }

    #[test]
    fn clearing_the_cache_does_not_change_ids() {
        let encoder = encoder(trained("ab abc bcd", 260));
        let mut cache = Cache::default();
        let mut random = Random(7);
        for _ in 0..20 {
            let word = random.text(&["a", "b", "c", "d"], 40);
            let (mut first, mut second) = (Vec::new(), Vec::new());
            encoder.encode_with(&mut cache, &word, &mut first).unwrap();
            cache.size += CACHED_SIZE / 3;
            encoder.encode_with(&mut cache, &word, &mut second).unwrap();
            assert_eq!(first, naive(&encoder.vocab, word.as_bytes()));
            assert_eq!(first, second);
        }
    }
}
