//! The trainer: words with counts in, merges in rank order out.
//!
//! Byte pair encoding (Sennrich et al., arXiv:1508.07909) starts from single bytes and merges the
//! most frequent pair of neighbouring tokens, again and again. The rule here, in full: the count
//! of a pair is the sum, over the distinct words, of the word's count times the number of places
//! where the pair stands in it (in `aaa` the pair `aa` stands twice); of the pairs with the highest
//! count the one with the lowest ids wins, left id first; its places in a word are replaced from
//! left to right; and training ends early when no pair is left.
//!
//! Work is proportional to what changes. A pair of which one half is the token just made can only
//! arise in the step that makes it, so the list of a pair's places is complete at birth and its
//! count only falls afterwards. Hence lists are written once, in one arena, and checked against
//! the symbols when used; and the queue may hold counts that are too high, corrected when they
//! reach the top.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use rustc_hash::FxHashMap;

use crate::error::{invalid, Error};

/// Two token ids, left and right.
pub type Pair = (u32, u32);

/// Stands in the symbols where no token starts or ends: between words and inside tokens.
const NONE: u32 = u32::MAX;

/// Distinct words with their counts, laid out for the trainer.
///
/// `symbols` has one cell per byte of each word, and a NONE before and after every word. A token
/// covers as many cells as it has bytes; its id stands in the first and in the last of them.
/// So both neighbours of a token are found from its place and the lengths of tokens alone.
pub struct Words {
    symbols: Vec<u32>,
    counts: Vec<u64>,
    total: u128, // bytes, repetitions included: no pair can count more
}

impl Default for Words {
    fn default() -> Self {
        Words { symbols: vec![NONE], counts: Vec::new(), total: 0 }
    }
}

impl Words {
    /// The number of distinct words.
    pub fn len(&self) -> usize {
        self.counts.len()
    }

    pub fn push(&mut self, word: &[u8], count: u64) {
        self.symbols.extend(word.iter().map(|&byte| u32::from(byte)));
        self.symbols.push(NONE);
        self.counts.push(count);
        self.total += word.len() as u128 * u128::from(count);
    }
}

/// Where a pair stands: the cell of its first token, and the word.
#[derive(Clone, Copy)]
struct Place {
    cell: u32,
    word: u32,
}

/// A pair's count now, and its places at birth: `arena[first..first + num]`.
#[derive(Clone, Copy, Default)]
struct PairState {
    count: u64,
    first: usize,
    num: usize,
}

/// Learns merges until there are `vocab_size` tokens, the 256 bytes included, or no pair is left.
///
/// `stop` is asked now and then, with the number of merges so far, whether to give up. Fails on a
/// `vocab_size` below 256, on distinct words of more than 4 GB together, and on counts beyond 64
/// bits.
pub fn train(
    words: Words,
    vocab_size: u32,
    mut stop: impl FnMut(usize) -> bool,
) -> Result<Vec<Pair>, Error> {
    check_vocab_size(vocab_size)?;
    if words.symbols.len() >= NONE as usize {
        return Err(invalid!("the distinct words have {} bytes, over 4 GB", words.symbols.len()));
    }
    if words.total > u128::from(u64::MAX) {
        return Err(invalid!("the counts of words times their lengths do not fit 64 bits"));
    }
    let mut trainer = Trainer::new(words);
    let mut merges = Vec::new();
    while trainer.lengths.len() < vocab_size as usize {
        if merges.len() % 64 == 0 && stop(merges.len()) {
            return Err(Error::Interrupted);
        }
        let Some(pair) = trainer.pop() else { break };
        trainer.merge(pair);
        merges.push(pair);
    }
    Ok(merges)
}

/// Fails on a `vocab_size` that has no room for the 256 bytes.
pub fn check_vocab_size(vocab_size: u32) -> Result<(), Error> {
    if vocab_size < 256 {
        return Err(invalid!("vocab_size is {vocab_size}, but the 256 bytes need 256 ids"));
    }
    Ok(())
}

struct Trainer {
    symbols: Vec<u32>,
    counts: Vec<u64>,
    lengths: Vec<u32>, // bytes of each token
    pairs: FxHashMap<Pair, PairState>,
    queue: BinaryHeap<(u64, Reverse<Pair>)>, // no pair's count is higher than here
    arena: Vec<Place>,
    left: Neighbours,
    right: Neighbours,
}

impl Trainer {
    fn new(words: Words) -> Self {
        let Words { symbols, counts, .. } = words;
        let mut trainer = Trainer {
            lengths: vec![1; 256],
            pairs: FxHashMap::default(),
            queue: BinaryHeap::new(),
            arena: Vec::new(),
            left: Neighbours::default(),
            right: Neighbours::default(),
            symbols,
            counts,
        };
        trainer.count_bytes();
        trainer
    }

    /// Enters all pairs of bytes: a counting sort of their places.
    fn count_bytes(&mut self) {
        let mut states = vec![PairState::default(); 1 << 16];
        let index = |pair: &[u32]| (pair[0] << 8 | pair[1]) as usize;
        for pair in self.symbols.windows(2).filter(|pair| !pair.contains(&NONE)) {
            states[index(pair)].num += 1;
        }
        let mut first = 0;
        for state in &mut states {
            state.first = first;
            first += std::mem::take(&mut state.num);
        }
        self.arena = vec![Place { cell: 0, word: 0 }; first];
        let mut word = 0;
        for (cell, pair) in self.symbols.windows(2).enumerate() {
            if pair[1] == NONE {
                word += 1;
            } else if pair[0] != NONE {
                let state = &mut states[index(pair)];
                self.arena[state.first + state.num] = Place { cell: cell as u32, word };
                state.num += 1;
                state.count += self.counts[word as usize];
            }
        }
        for (index, state) in states.into_iter().enumerate() {
            self.enter((index as u32 >> 8, index as u32 & 0xff), state);
        }
    }

    fn enter(&mut self, pair: Pair, state: PairState) {
        if state.count > 0 {
            self.pairs.insert(pair, state);
            self.queue.push((state.count, Reverse(pair)));
        }
    }

    /// Takes `lost` off a pair's count. A pair being merged is no longer known, and needs none.
    fn reduce(&mut self, pair: Pair, lost: u64) {
        if let Some(state) = self.pairs.get_mut(&pair) {
            state.count -= lost;
        }
    }

    /// The pair to merge next.
    fn pop(&mut self) -> Option<Pair> {
        loop {
            let (queued, Reverse(pair)) = self.queue.pop()?;
            let count = self.pairs[&pair].count;
            if count == queued {
                return Some(pair);
            }
            if count > 0 {
                self.queue.push((count, Reverse(pair)));
            } else {
                self.pairs.remove(&pair);
            }
        }
    }

    /// Makes a new token of `pair`, everywhere.
    fn merge(&mut self, pair: Pair) {
        let (a, b) = pair;
        let new = self.lengths.len() as u32;
        let (a_len, b_len) = (self.lengths[a as usize], self.lengths[b as usize]);
        self.lengths.push(a_len + b_len);
        self.left.make_room(new);
        self.right.make_room(new);
        let state = self.pairs.remove(&pair).expect("the queue holds known pairs");
        for i in state.first..state.first + state.num {
            let Place { cell, word } = self.arena[i];
            let start = cell as usize;
            let middle = start + a_len as usize;
            if self.symbols[start] != a || self.symbols[middle] != b {
                continue; // merged with another neighbour since
            }
            let end = middle + b_len as usize;
            let (before, after) = (self.symbols[start - 1], self.symbols[end]);
            self.symbols[middle] = NONE;
            self.symbols[start] = new;
            self.symbols[end - 1] = new;

            let count = self.counts[word as usize];
            if before != NONE {
                let cell = cell - self.lengths[before as usize];
                self.left.appear(before, count, Place { cell, word });
                if before == new {
                    self.right.vanish(a, count); // (new, a) from the step before, now (new, new)
                } else {
                    self.left.lose(before, count);
                }
            }
            if after != NONE {
                self.right.appear(after, count, Place { cell, word });
                self.right.lose(after, count);
            }
        }
        let mut left = std::mem::take(&mut self.left);
        let mut right = std::mem::take(&mut self.right);
        for (x, lost, state) in left.drain(&mut self.arena) {
            self.reduce((x, a), lost);
            self.enter((x, new), state);
        }
        for (x, lost, state) in right.drain(&mut self.arena) {
            self.reduce((b, x), lost);
            self.enter((new, x), state);
        }
        (self.left, self.right) = (left, right);
    }
}

/// What a merge changes on one side of the new token, gathered per neighbouring token, so that
/// the maps are touched once per neighbour and not once per place.
#[derive(Default)]
struct Neighbours {
    sums: Vec<NeighbourSum>,   // by token id
    seen: Vec<u32>,            // the ids with entries in `sums`
    places: Vec<(u32, Place)>, // of the pairs that appear, by neighbour
}

#[derive(Clone, Copy, Default)]
struct NeighbourSum {
    lost: u64,     // count the old pair with this neighbour loses
    appeared: u64, // count of the new pair
    first: usize,  // its places in the arena
    num: usize,
}

impl Neighbours {
    /// Lets the ids up to `last` be neighbours.
    fn make_room(&mut self, last: u32) {
        self.sums.resize(last as usize + 1, NeighbourSum::default());
    }

    #[inline]
    fn appear(&mut self, id: u32, count: u64, place: Place) {
        let sum = &mut self.sums[id as usize];
        if sum.num == 0 {
            self.seen.push(id);
        }
        sum.num += 1;
        sum.appeared += count;
        self.places.push((id, place));
    }

    #[inline]
    fn vanish(&mut self, id: u32, count: u64) {
        self.sums[id as usize].appeared -= count;
    }

    #[inline]
    fn lose(&mut self, id: u32, count: u64) {
        self.sums[id as usize].lost += count;
    }

    /// Sorts the places into the arena. Gives each neighbour with what the old pair lost and the
    /// new pair has, and forgets everything.
    fn drain<'n>(
        &'n mut self,
        arena: &mut Vec<Place>,
    ) -> impl Iterator<Item = (u32, u64, PairState)> + use<'n> {
        let mut end = arena.len();
        for &id in &self.seen {
            let sum = &mut self.sums[id as usize];
            sum.first = end;
            end += sum.num;
            sum.num = 0;
        }
        arena.resize(end, Place { cell: 0, word: 0 });
        for (id, place) in self.places.drain(..) {
            let sum = &mut self.sums[id as usize];
            arena[sum.first + sum.num] = place;
            sum.num += 1;
        }
        let sums = &mut self.sums;
        self.seen.drain(..).map(|id| {
            let sum = std::mem::take(&mut sums[id as usize]);
            (id, sum.lost, PairState { count: sum.appeared, first: sum.first, num: sum.num })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Random;

    /// The rule of this file's head, word for word.
    fn naive(words: &[(Vec<u8>, u64)], vocab_size: u32) -> Vec<Pair> {
        let mut words: Vec<(Vec<u32>, u64)> = words
            .iter()
            .map(|(word, count)| (word.iter().map(|&byte| u32::from(byte)).collect(), *count))
            .collect();
        let mut merges = Vec::new();
        for new in 256..vocab_size {
            let mut counts = std::collections::BTreeMap::new();
            for (word, count) in &words {
                for pair in word.windows(2) {
                    *counts.entry((pair[0], pair[1])).or_insert(0) += count;
                }
            }
            let best = counts.into_iter().max_by_key(|&(pair, count)| (count, Reverse(pair)));
            let Some((pair, 1..)) = best else { break };
            for (word, _) in &mut words {
                let mut i = 0;
                while i + 1 < word.len() {
                    if (word[i], word[i + 1]) == pair {
                        word.splice(i..i + 2, [new]);
                    }
                    i += 1;
                }
            }
            merges.push(pair);
        }
        merges
    }

    fn fast(words: &[(Vec<u8>, u64)], vocab_size: u32) -> Result<Vec<Pair>, Error> {
        let mut laid_out = Words::default();
        words.iter().for_each(|(word, count)| laid_out.push(word, *count));
        train(laid_out, vocab_size, |_| false)
    }

    #[test]
    fn merges_are_those_of_the_naive_trainer() {
        let mut random = Random(4);
        for _ in 0..300 {
            let letters = 1 + random.below(4);
            let words: Vec<(Vec<u8>, u64)> = (0..random.below(12))
                .map(|_| {
                    let len = random.below(20);
                    let word = (0..len).map(|_| b'a' + random.below(letters) as u8).collect();
                    (word, random.below(4) as u64)
                })
                .collect();
            assert_eq!(fast(&words, 300).unwrap(), naive(&words, 300), "{words:?}");
        }
    }

    #[test]
    fn counts_beyond_32_bits_decide() {
        let words = [(b"ab".to_vec(), 1 << 40), (b"cd".to_vec(), (1 << 40) + 1)];
        assert_eq!(fast(&words, 257).unwrap(), [(99, 100)]);
    }

    #[test]
    fn wrong_sizes_and_counts_are_errors_and_stop_is_obeyed() {
        assert!(fast(&[], 255).unwrap_err().to_string().contains("255"));
        let words = [(b"abc".to_vec(), u64::MAX)];
        assert!(fast(&words, 256).unwrap_err().to_string().contains("count"));
        assert_eq!(train(Words::default(), 257, |_| true), Err(Error::Interrupted));
    }
}
