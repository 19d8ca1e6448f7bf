//! Vocabulary: token ids to bytes, and words to token ids.
//!
//!     word -> whole token, or merging -> ids
//!
//! Merging repeatedly joins the two adjacent parts that form the token with the lowest id, leftmost
//! first, until no two parts form a token: tiktoken's rule, for any vocabulary. For a trained
//! vocabulary this equals replaying the merges.

use std::cmp::Reverse;
use std::collections::{BTreeSet, BinaryHeap};

use rustc_hash::FxHashMap;

use crate::bpe::Pair;
use crate::error::{invalid, Error};
use crate::table::WordTable;

/// No token.
const NONE: u32 = u32::MAX;

/// Words of at least this many bytes are merged with a heap: O(n log n) instead of O(n^2).
const HEAP_FROM: usize = 100;

/// Tokens with ids 0, 1, 2, ...
pub struct Vocab {
    bytes: Vec<u8>,      // of all tokens, concatenated
    ends: Vec<usize>,    // end offset of each token
    ids: WordTable<u32>, // token -> id + 1
    byte_ids: [u32; 256],
    byte_pairs: Vec<u32>,       // two bytes -> id
    pairs: FxHashMap<u64, u32>, // two ids -> id
}

impl Vocab {
    /// The 256 bytes and the tokens that `merges` form.
    pub fn from_merges(merges: &[Pair]) -> Result<Self, Error> {
        let mut tokens: Vec<Vec<u8>> = (0..=255).map(|byte| vec![byte]).collect();
        for &(a, b) in merges {
            tokens.push([tokens[a as usize].as_slice(), &tokens[b as usize]].concat());
        }
        Self::from_tokens(&tokens)
    }

    /// Tokens with their ids, in any order. Fails if the ids are not 0, 1, 2, ..., each exactly
    /// once, or if `from_tokens` fails.
    pub fn from_ranks(mut ranks: Vec<(Vec<u8>, i64)>) -> Result<Self, Error> {
        ranks.sort_by_key(|&(_, id)| id);
        if let Some((expected, &(_, id))) = (0..).zip(&ranks).find(|(i, (_, id))| i != id) {
            return Err(match id < expected {
                true => invalid!("id {id} is duplicated or negative"),
                false => invalid!("id {expected} is missing; the next id is {id}"),
            });
        }
        Self::from_tokens(&ranks.into_iter().map(|(token, _)| token).collect::<Vec<_>>())
    }

    /// Tokens in the order of their ids. Fails unless they are distinct, non-empty and include
    /// the 256 single bytes.
    pub fn from_tokens(tokens: &[impl AsRef<[u8]>]) -> Result<Self, Error> {
        let mut vocab = Vocab {
            bytes: Vec::new(),
            ends: Vec::new(),
            ids: WordTable::default(),
            byte_ids: [NONE; 256],
            byte_pairs: vec![NONE; 1 << 16],
            pairs: FxHashMap::default(),
        };
        for (id, token) in tokens.iter().enumerate() {
            let token = token.as_ref();
            if token.is_empty() {
                return Err(invalid!("token {id} is empty"));
            }
            let entry = vocab.ids.entry(token, 0, token.len());
            if *entry != 0 {
                return Err(invalid!("tokens {} and {id} are both {token:?}", *entry - 1));
            }
            *entry = id as u32 + 1;
            vocab.bytes.extend_from_slice(token);
            vocab.ends.push(vocab.bytes.len());
            if let [byte] = *token {
                vocab.byte_ids[usize::from(byte)] = id as u32;
            }
        }
        if let Some(byte) = vocab.byte_ids.iter().position(|&id| id == NONE) {
            return Err(invalid!("there is no token for byte {byte}"));
        }
        let lengths: BTreeSet<usize> = tokens.iter().map(|token| token.as_ref().len()).collect();
        for (id, token) in tokens.iter().enumerate() {
            vocab.enter_pairs(id as u32, token.as_ref(), &lengths);
        }
        Ok(vocab)
    }

    /// Records every split of a token into two other tokens; `lengths` are the token lengths.
    fn enter_pairs(&mut self, id: u32, token: &[u8], lengths: &BTreeSet<usize>) {
        if let [a, b] = *token {
            self.byte_pairs[usize::from(a) << 8 | usize::from(b)] = id;
        }
        let middles = lengths.range(..token.len());
        for &middle in middles.filter(|&middle| lengths.contains(&(token.len() - middle))) {
            let left = self.id(token, 0, middle);
            let right = self.id(token, middle, token.len());
            if left != NONE && right != NONE {
                self.pairs.insert(u64::from(left) << 32 | u64::from(right), id);
            }
        }
    }

    pub fn len(&self) -> usize {
        self.ends.len()
    }

    /// Returns the bytes of a token.
    pub fn token(&self, id: u32) -> Option<&[u8]> {
        let end = *self.ends.get(id as usize)?;
        let start = if id == 0 { 0 } else { self.ends[id as usize - 1] };
        Some(&self.bytes[start..end])
    }

    /// Returns the concatenated bytes of `ids`. Fails on an unknown id.
    pub fn decode(&self, ids: &[i64]) -> Result<Vec<u8>, Error> {
        let mut bytes = Vec::with_capacity(4 * ids.len());
        for &id in ids {
            let token = u32::try_from(id).ok().and_then(|id| self.token(id));
            bytes.extend_from_slice(token.ok_or_else(|| {
                invalid!("unknown token id {id}: the vocabulary has ids 0 to {}", self.len() - 1)
            })?);
        }
        Ok(bytes)
    }

    /// Returns the id of the token `text[start..end]`, or NONE.
    fn id(&self, text: &[u8], start: usize, end: usize) -> u32 {
        self.ids.get(text, start, end).unwrap_or(0).wrapping_sub(1)
    }

    /// Returns the id of two joined parts, or NONE.
    fn join(&self, left: u32, right: u32) -> u32 {
        let pair = u64::from(left) << 32 | u64::from(right);
        self.pairs.get(&pair).copied().unwrap_or(NONE)
    }

    /// Appends the ids of the word `text[start..end]`.
    pub fn encode_word(&self, text: &[u8], start: usize, end: usize, out: &mut Vec<u32>) {
        let id = self.id(text, start, end);
        if id != NONE {
            out.push(id);
        } else if end - start < HEAP_FROM {
            self.merge_short(&text[start..end], out);
        } else {
            self.merge_long(&text[start..end], out);
        }
    }

    /// Merges by searching all parts for the lowest id in each step.
    fn merge_short(&self, word: &[u8], out: &mut Vec<u32>) {
        let mut parts = [(NONE, NONE); HEAP_FROM]; // id, id if joined with the next
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
            let next = if at + 1 < len { self.join(best, parts[at + 1].0) } else { NONE };
            parts[at] = (best, next);
            if at > 0 {
                parts[at - 1].1 = self.join(parts[at - 1].0, best);
            }
        }
        out.extend(parts[..len].iter().map(|&(id, _)| id));
    }

    /// Merges with a heap of candidates and a linked list of parts.
    fn merge_long(&self, word: &[u8], out: &mut Vec<u32>) {
        // At the first byte of a part: its id (NONE elsewhere) and length. At the last byte:
        // the length again, to find the preceding part.
        let mut ids: Vec<u32> = word.iter().map(|&byte| self.byte_ids[usize::from(byte)]).collect();
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
                continue; // one of the two was already joined
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

#[cfg(test)]
pub mod tests {
    use super::*;
    use crate::bpe::{train, Words};
    use crate::random::Random;

    pub fn trained(text: &str, vocab_size: u32) -> Vocab {
        let mut words = Words::default();
        text.split_inclusive(' ').for_each(|word| words.push(word.as_bytes(), 1));
        Vocab::from_merges(&train(words, vocab_size, |_| false).unwrap()).unwrap()
    }

    /// Direct implementation of the rule in the module documentation.
    pub fn naive(vocab: &Vocab, word: &[u8]) -> Vec<u32> {
        let mut parts: Vec<&[u8]> = word.chunks(1).collect();
        loop {
            let joined = |i: usize| word_at(word, parts[i], parts[i + 1]);
            let best = (0..parts.len().saturating_sub(1))
                .map(|i| (vocab.id(joined(i), 0, joined(i).len()), i))
                .filter(|&(id, _)| id != NONE)
                .min();
            let Some((_, i)) = best else { break };
            parts[i] = joined(i);
            parts.remove(i + 1);
        }
        parts.iter().map(|part| vocab.id(part, 0, part.len())).collect()
    }

    /// Joins two adjacent slices of `word`.
    fn word_at<'w>(word: &'w [u8], left: &[u8], right: &[u8]) -> &'w [u8] {
        let start = left.as_ptr() as usize - word.as_ptr() as usize;
        &word[start..start + left.len() + right.len()]
    }

    #[test]
    fn short_and_long_merges_match_naive() {
        let mut random = Random(5);
        for round in 0..100 {
            let vocab = trained(&random.text(&["a", "b", "c", " "], 300), 256 + round);
            for _ in 0..30 {
                let word = random.text(&["a", "b", "c", "x"], HEAP_FROM - 1);
                let (mut short, mut long) = (Vec::new(), Vec::new());
                vocab.merge_short(word.as_bytes(), &mut short);
                vocab.merge_long(word.as_bytes(), &mut long);
                let expected = naive(&vocab, word.as_bytes());
                assert_eq!(short, expected, "{word:?}");
                assert_eq!(long, expected, "{word:?}");
            }
        }
    }

    #[test]
    fn untrained_vocabulary_encodes() {
        let mut tokens: Vec<Vec<u8>> = (0..=255).rev().map(|byte| vec![byte]).collect();
        tokens.extend([b"abcd".to_vec(), b"cd".to_vec(), b"ab".to_vec()]);
        let vocab = Vocab::from_tokens(&tokens).unwrap();
        let mut ids = Vec::new();
        vocab.encode_word(b"abcd", 0, 4, &mut ids); // whole tokens take precedence over merging
        vocab.encode_word(b"xabcd", 0, 5, &mut ids);
        assert_eq!(ids, [256, 255 - 120, 256]);
        for wrong in [vec![b"ab".to_vec()], vec![vec![]]] {
            assert!(Vocab::from_tokens(&[tokens.clone(), wrong].concat()).is_err());
        }
        assert!(Vocab::from_tokens(&tokens[1..]).is_err());
    }
}
