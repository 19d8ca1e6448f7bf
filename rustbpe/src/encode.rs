//! Text to ids and back.
//!
//!     text -> words -> (cache, or whole token, or merging) -> ids
//!
//! Merging joins, of all neighbouring parts whose bytes together are a token, the two with the
//! lowest id, leftmost first, until none are left: tiktoken's rule, for any vocabulary. For a
//! trained one it is the same as replaying the merges.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::Mutex;

use rayon::prelude::*;
use rayon::ThreadPool;
use rustc_hash::FxHashMap;

use crate::bpe::Pair;
use crate::error::{invalid, Error};
use crate::regex::{Splitter, BATCH};
use crate::table::WordTable;

/// No token.
const NONE: u32 = u32::MAX;

/// Words longer than this are merged with a heap: O(n log n) instead of O(n^2).
const HEAP_FROM: usize = 100;

/// A cache starts anew when it has this many words, ...
const CACHED_WORDS: usize = 1 << 19; // 32 MB

/// ... or this many ids and bytes beside them.
const CACHED_EXTRA: usize = 1 << 21; // at most 8 MB, but for the last word

/// One thread takes texts in jobs of at least this many bytes, and cuts longer texts.
const JOB: usize = 1 << 18;

/// Jobs per thread between two looks at `stop`.
const ROUND: usize = 64;

/// A vocabulary, ready to encode and decode. Ids are ranks: 0, 1, 2, ...
pub struct Vocab {
    bytes: Vec<u8>,      // of all tokens, one after the other
    ends: Vec<usize>,    // where each token's bytes end
    ids: WordTable<u32>, // token -> id + 1
    byte_ids: [u32; 256],
    byte_pairs: Vec<u32>,       // two bytes -> id
    pairs: FxHashMap<u64, u32>, // two ids -> id
    caches: Mutex<Vec<Cache>>,  // of threads that are not encoding now
}

/// The ids of many texts: text i is `ids[offsets[i]..offsets[i + 1]]`.
#[derive(Default)]
pub struct Flat {
    pub ids: Vec<u32>,
    pub offsets: Vec<i64>,
}

/// Groups neighbouring parts into jobs of about equal size.
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

/// What one thread has encoded before.
#[derive(Default)]
struct Cache {
    words: WordTable<Known>,
    ids: Vec<u32>, // of words with more than INLINE of them
    extra: usize,  // ids and bytes kept outside the table
}

/// The ids of a cached word: `ids[..num]`, or, when they are more than INLINE, `num` from
/// `ids[0]` on in the cache's own list. A new entry has none.
#[derive(Clone, Copy, Default)]
struct Known {
    num: u32,
    ids: [u32; INLINE],
}

/// As many ids as fit a slot of the table.
const INLINE: usize = 3;

impl Vocab {
    /// The 256 bytes and what `merges` makes of them.
    pub fn from_merges(merges: &[Pair]) -> Result<Self, Error> {
        let mut tokens: Vec<Vec<u8>> = (0..=255).map(|byte| vec![byte]).collect();
        for &(a, b) in merges {
            tokens.push([tokens[a as usize].as_slice(), &tokens[b as usize]].concat());
        }
        Self::from_tokens(&tokens)
    }

    /// Tokens in the order of their ids. Fails unless they are distinct, not empty, and include
    /// the 256 single bytes.
    pub fn from_tokens(tokens: &[impl AsRef<[u8]>]) -> Result<Self, Error> {
        let mut vocab = Vocab {
            bytes: Vec::new(),
            ends: Vec::new(),
            ids: WordTable::default(),
            byte_ids: [NONE; 256],
            byte_pairs: vec![NONE; 1 << 16],
            pairs: FxHashMap::default(),
            caches: Mutex::default(),
        };
        for (id, token) in tokens.iter().enumerate() {
            let token = token.as_ref();
            if token.is_empty() {
                return Err(invalid!("token {id} is empty"));
            }
            let entry = vocab.ids.entry(token, 0, token.len());
            if *entry != 0 {
                return Err(invalid!(
                    "tokens {} and {id} are both {token:?}",
                    *entry - 1
                ));
            }
            *entry = id as u32 + 1;
            vocab.bytes.extend_from_slice(token);
            vocab.ends.push(vocab.bytes.len());
            if let [byte] = *token {
                vocab.byte_ids[usize::from(byte)] = id as u32;
            }
        }
        if let Some(byte) = vocab.byte_ids.iter().position(|&id| id == NONE) {
            return Err(invalid!("no token is the single byte {byte}"));
        }
        for (id, token) in tokens.iter().enumerate() {
            vocab.enter_pairs(id as u32, token.as_ref());
        }
        Ok(vocab)
    }

    /// Notes every way to put the token together from two others.
    fn enter_pairs(&mut self, id: u32, token: &[u8]) {
        if let [a, b] = *token {
            self.byte_pairs[usize::from(a) << 8 | usize::from(b)] = id;
        }
        for middle in 1..token.len() {
            let left = self.id(token, 0, middle);
            let right = self.id(token, middle, token.len());
            if left != NONE && right != NONE {
                self.pairs
                    .insert(u64::from(left) << 32 | u64::from(right), id);
            }
        }
    }

    pub fn len(&self) -> usize {
        self.ends.len()
    }

    /// The bytes of a token.
    pub fn token(&self, id: u32) -> Option<&[u8]> {
        let end = *self.ends.get(id as usize)?;
        let start = if id == 0 {
            0
        } else {
            self.ends[id as usize - 1]
        };
        Some(&self.bytes[start..end])
    }

    /// The bytes of `ids`, joined. Fails on an id that is no token's.
    pub fn decode(&self, ids: &[u32]) -> Result<Vec<u8>, Error> {
        let mut bytes = Vec::with_capacity(4 * ids.len());
        for &id in ids {
            let token = self.token(id).ok_or_else(|| {
                invalid!(
                    "unknown token id {id}: the vocabulary has ids 0 to {}",
                    self.len() - 1
                )
            })?;
            bytes.extend_from_slice(token);
        }
        Ok(bytes)
    }

    /// The id of the token `text[start..end]`, or NONE.
    fn id(&self, text: &[u8], start: usize, end: usize) -> u32 {
        self.ids.get(text, start, end).unwrap_or(0).wrapping_sub(1)
    }

    /// The id of two neighbouring parts joined, or NONE.
    fn join(&self, left: u32, right: u32) -> u32 {
        let pair = u64::from(left) << 32 | u64::from(right);
        self.pairs.get(&pair).copied().unwrap_or(NONE)
    }

    /// Appends the ids of `text`.
    pub fn encode(&self, text: &str, splitter: &Splitter, out: &mut Vec<u32>) -> Result<(), Error> {
        let mut cache = self.take_cache();
        let result = self.encode_with(&mut cache, text, splitter, out);
        self.return_cache(cache);
        result
    }

    fn encode_with(
        &self,
        cache: &mut Cache,
        text: &str,
        splitter: &Splitter,
        out: &mut Vec<u32>,
    ) -> Result<(), Error> {
        let bytes = text.as_bytes();
        splitter.split_batches(text, |words| {
            let Cache {
                words: known_words,
                ids: more_ids,
                extra,
            } = cache;
            let mut buffer = [0; INLINE * BATCH];
            let mut len = 0;
            known_words.entries(bytes, words, |i, known| {
                let num = known.num as usize;
                if num.wrapping_sub(1) < INLINE {
                    // Always copies INLINE ids: cheaper than asking how many there are
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
                self.encode_word(bytes, start, end, out);
                let ids = &out[old..];
                known.num = ids.len() as u32;
                if ids.len() <= INLINE {
                    known.ids[..ids.len()].copy_from_slice(ids);
                } else {
                    known.ids[0] = more_ids.len() as u32;
                    more_ids.extend_from_slice(ids);
                    *extra += ids.len() + (end - start);
                }
            });
            out.extend_from_slice(&buffer[..len]);
            if known_words.len() >= CACHED_WORDS || *extra >= CACHED_EXTRA {
                *cache = Cache::default();
            }
        })
    }

    /// The ids of many texts, each with `prefix` in front, in the order of the texts.
    ///
    /// Without a pool all work is done here. `stop` is asked now and then whether to give up.
    pub fn encode_many(
        &self,
        texts: &[&str],
        prefix: Option<u32>,
        splitter: &Splitter,
        pool: Option<&ThreadPool>,
        mut stop: impl FnMut() -> bool,
    ) -> Result<Flat, Error> {
        let mut parts = Vec::with_capacity(texts.len());
        for text in texts {
            parts.push((true, &text[..0])); // a part of its own, because a text may be empty
            parts.extend(splitter.parts(text, JOB).map(|part| (false, part)));
        }
        let jobs = jobs(&parts);
        let run = |job: &&[(bool, &str)]| {
            let mut done = Flat::default();
            for &(is_start, part) in *job {
                if is_start {
                    done.offsets.push(done.ids.len() as i64);
                    done.ids.extend(prefix);
                }
                self.encode(part, splitter, &mut done.ids)?;
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
                flat.offsets
                    .extend(part.offsets.iter().map(|start| total + start));
                flat.ids.extend_from_slice(&part.ids);
            }
        }
        flat.offsets.push(flat.ids.len() as i64);
        Ok(flat)
    }

    fn take_cache(&self) -> Cache {
        // try_lock: in a process forked while another thread held the lock, it stays held
        self.caches
            .try_lock()
            .ok()
            .and_then(|mut caches| caches.pop())
            .unwrap_or_default()
    }

    fn return_cache(&self, cache: Cache) {
        if let Ok(mut caches) = self.caches.try_lock() {
            caches.push(cache);
        }
    }

    /// Appends the ids of one word.
    fn encode_word(&self, text: &[u8], start: usize, end: usize, out: &mut Vec<u32>) {
        let id = self.id(text, start, end);
        if id != NONE {
            out.push(id);
        } else if end - start < HEAP_FROM {
            self.merge_short(&text[start..end], out);
        } else {
            self.merge_long(&text[start..end], out);
        }
    }

    /// Merges by searching all parts for the lowest id each time.
    fn merge_short(&self, word: &[u8], out: &mut Vec<u32>) {
        let mut parts = [(NONE, NONE); HEAP_FROM]; // id, id when joined with the next
        let mut len = word.len();
        for (i, &byte) in word.iter().enumerate() {
            let joined = match word.get(i + 1) {
                Some(&next) => self.byte_pairs[usize::from(byte) << 8 | usize::from(next)],
                None => NONE,
            };
            parts[i] = (self.byte_ids[usize::from(byte)], joined);
        }
        loop {
            let (mut best, mut at) = (NONE, 0);
            for (i, &(_, joined)) in parts[..len].iter().enumerate() {
                if joined < best {
                    (best, at) = (joined, i);
                }
            }
            if best == NONE {
                break;
            }
            parts.copy_within(at + 2..len, at + 1);
            len -= 1;
            let next = if at + 1 < len {
                self.join(best, parts[at + 1].0)
            } else {
                NONE
            };
            parts[at] = (best, next);
            if at > 0 {
                parts[at - 1].1 = self.join(parts[at - 1].0, best);
            }
        }
        out.extend(parts[..len].iter().map(|&(id, _)| id));
    }

    /// Merges with a heap of candidates and a linked list of parts.
    fn merge_long(&self, word: &[u8], out: &mut Vec<u32>) {
        // By the first byte's position: the part's id (NONE inside a part) and its length; at its
        // last byte, its length again, to find the part before another.
        let mut ids: Vec<u32> = word
            .iter()
            .map(|&byte| self.byte_ids[usize::from(byte)])
            .collect();
        let mut lens = vec![1u32; word.len()];
        let mut heap: BinaryHeap<Reverse<(u32, u32, u32, u32)>> = word
            .windows(2)
            .enumerate()
            .filter_map(|(at, pair)| {
                let joined = self.byte_pairs[usize::from(pair[0]) << 8 | usize::from(pair[1])];
                (joined != NONE).then(|| Reverse((joined, at as u32, ids[at], ids[at + 1])))
            })
            .collect::<Vec<_>>()
            .into();
        while let Some(Reverse((joined, at, left, right))) = heap.pop() {
            let start = at as usize;
            let middle = start + lens[start] as usize;
            if ids[start] != left || ids.get(middle) != Some(&right) {
                continue; // one of the two has been joined with another since
            }
            let end = middle + lens[middle] as usize;
            ids[middle] = NONE;
            ids[start] = joined;
            lens[start] = (end - start) as u32;
            lens[end - 1] = (end - start) as u32;
            if start > 0 {
                let before = start - lens[start - 1] as usize;
                let next = self.join(ids[before], joined);
                if next != NONE {
                    heap.push(Reverse((next, before as u32, ids[before], joined)));
                }
            }
            if end < word.len() {
                let next = self.join(joined, ids[end]);
                if next != NONE {
                    heap.push(Reverse((next, at, joined, ids[end])));
                }
            }
        }
        out.extend(ids.into_iter().filter(|&id| id != NONE));
    }
}
