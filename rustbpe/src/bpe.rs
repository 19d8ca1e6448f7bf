//! BPE training: words with counts -> merges in rank order.
//!
//! Byte pair encoding (Sennrich et al., arXiv:1508.07909) starts from single bytes and repeatedly
//! merges the most frequent pair of adjacent tokens. The exact rule: the count of a pair is the
//! sum, over the distinct words, of the word's count times the pair's occurrences in the word
//! (`aa` occurs twice in `aaa`); of the pairs with the highest count, the one with the lowest
//! ids wins, left id first; its occurrences in a word are replaced from left to right; training
//! ends early when no pair is left.
//!
//! Work is proportional to the changes. A pair that contains a new token can only arise in the
//! step that creates the token, so its list of positions is complete from the start and its count
//! only decreases. Lists are therefore written once, into one arena, and checked against the
//! symbols when used; counts in the queue may be too high and are corrected when popped.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use rustc_hash::FxHashMap;

use crate::error::{invalid, Error};

/// Two token ids, left and right.
pub type Pair = (u32, u32);

/// Marks cells of `symbols` where no token starts or ends: between words and inside tokens.
const NONE: u32 = u32::MAX;

/// Distinct words with their counts, in the trainer's layout.
///
/// `symbols` has one cell per byte of each word, and NONE before and after every word. A token
/// covers one cell per byte; its first and last cells hold its id. Its neighbors
/// therefore follow from its position and the token lengths.
pub struct Words {
    symbols: Vec<u32>,
    counts: Vec<u64>,
    total: u128, // bytes, repetitions included: an upper bound on pair counts
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

/// Position of a pair: the cell of its first token, and the word.
#[derive(Clone, Copy)]
struct Position {
    cell: u32,
    word: u32,
}

/// Current count of a pair, and its initial positions: `arena[first..first + num]`.
#[derive(Clone, Copy, Default)]
struct PairState {
    count: u64,
    first: usize,
    num: usize,
}

/// Learns merges until there are `vocab_size` tokens, including the 256 bytes, or no pair is left.
///
/// `stop` is called regularly with the number of merges so far; returning true aborts. Fails if
/// `vocab_size` is below 256, the distinct words exceed 4 GB in total, or counts exceed 64 bits.
pub fn train(
    words: Words,
    vocab_size: u32,
    mut stop: impl FnMut(usize) -> bool,
) -> Result<Vec<Pair>, Error> {
    check_vocab_size(vocab_size)?;
    if words.symbols.len() >= NONE as usize {
        return Err(invalid!("distinct words exceed 4 GB: {} bytes", words.symbols.len()));
    }
    if words.total > u128::from(u64::MAX) {
        return Err(invalid!("the sum of word counts times lengths exceeds 64 bits"));
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

/// Fails if `vocab_size` is below 256.
pub fn check_vocab_size(vocab_size: u32) -> Result<(), Error> {
    if vocab_size < 256 {
        return Err(invalid!("vocab_size must be at least 256, got {vocab_size}"));
    }
    Ok(())
}

struct Trainer {
    symbols: Vec<u32>,
    counts: Vec<u64>,
    lengths: Vec<u32>, // bytes of each token
    pairs: FxHashMap<Pair, PairState>,
    queue: BinaryHeap<(u64, Reverse<Pair>)>, // upper bounds of the counts
    arena: Vec<Position>,
    left: PairUpdates,
    right: PairUpdates,
}

impl Trainer {
    fn new(words: Words) -> Self {
        let Words { symbols, counts, .. } = words;
        let mut trainer = Trainer {
            lengths: vec![1; 256],
            pairs: FxHashMap::default(),
            queue: BinaryHeap::new(),
            arena: Vec::new(),
            left: PairUpdates::default(),
            right: PairUpdates::default(),
            symbols,
            counts,
        };
        trainer.count_bytes();
        trainer
    }

    /// Adds all byte pairs, with a counting sort of their positions.
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
        self.arena = vec![Position { cell: 0, word: 0 }; first];
        let mut word = 0;
        for (cell, pair) in self.symbols.windows(2).enumerate() {
            if pair[1] == NONE {
                word += 1;
            } else if pair[0] != NONE {
                let state = &mut states[index(pair)];
                self.arena[state.first + state.num] = Position { cell: cell as u32, word };
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

    /// Subtracts `lost` from a pair's count, unless it is the pair being merged.
    fn reduce(&mut self, pair: Pair, lost: u64) {
        if let Some(state) = self.pairs.get_mut(&pair) {
            state.count -= lost;
        }
    }

    /// Returns the next pair to merge.
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

    /// Replaces every occurrence of `pair` with a new token.
    fn merge(&mut self, pair: Pair) {
        let (a, b) = pair;
        let new = self.lengths.len() as u32;
        let (a_len, b_len) = (self.lengths[a as usize], self.lengths[b as usize]);
        self.lengths.push(a_len + b_len);
        self.left.make_room(new);
        self.right.make_room(new);
        let state = self.pairs.remove(&pair).expect("queued pairs are in the map");
        for i in state.first..state.first + state.num {
            let Position { cell, word } = self.arena[i];
            let start = cell as usize;
            let middle = start + a_len as usize;
            if self.symbols[start] != a || self.symbols[middle] != b {
                continue; // already merged with another token
            }
            let end = middle + b_len as usize;
            let (before, after) = (self.symbols[start - 1], self.symbols[end]);
            self.symbols[middle] = NONE;
            self.symbols[start] = new;
            self.symbols[end - 1] = new;

            let count = self.counts[word as usize];
            if before != NONE {
                let cell = cell - self.lengths[before as usize];
                self.left.add_new(before, count, Position { cell, word });
                if before == new {
                    self.right.remove_new(a, count); // was counted as (new, a), now (new, new)
                } else {
                    self.left.remove_old(before, count);
                }
            }
            if after != NONE {
                self.right.add_new(after, count, Position { cell, word });
                self.right.remove_old(after, count);
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

/// Changes in pair counts on one side of the new token, summed per adjacent token, so the maps are
/// updated once per token instead of once per position.
#[derive(Default)]
struct PairUpdates {
    sums: Vec<PairUpdate>,           // by id of the adjacent token
    seen: Vec<u32>,                  // the ids with entries in `sums`
    positions: Vec<(u32, Position)>, // of new pairs, with the adjacent id
}

#[derive(Clone, Copy, Default)]
struct PairUpdate {
    lost: u64,    // decrease of the old pair's count
    gained: u64,  // count of the new pair
    first: usize, // its positions in the arena
    num: usize,
}

impl PairUpdates {
    /// Grows `sums` to hold ids up to `last`.
    fn make_room(&mut self, last: u32) {
        self.sums.resize(last as usize + 1, PairUpdate::default());
    }

    #[inline]
    fn add_new(&mut self, id: u32, count: u64, position: Position) {
        let sum = &mut self.sums[id as usize];
        if sum.num == 0 {
            self.seen.push(id);
        }
        sum.num += 1;
        sum.gained += count;
        self.positions.push((id, position));
    }

    #[inline]
    fn remove_new(&mut self, id: u32, count: u64) {
        self.sums[id as usize].gained -= count;
    }

    #[inline]
    fn remove_old(&mut self, id: u32, count: u64) {
        self.sums[id as usize].lost += count;
    }

    /// Sorts the positions into the arena and resets itself. Yields, for each adjacent token, its
    /// id, the decrease in the old pair's count and the state of the new pair.
    fn drain<'n>(
        &'n mut self,
        arena: &mut Vec<Position>,
    ) -> impl Iterator<Item = (u32, u64, PairState)> + use<'n> {
        let mut end = arena.len();
        for &id in &self.seen {
            let sum = &mut self.sums[id as usize];
            sum.first = end;
            end += sum.num;
            sum.num = 0;
        }
        arena.resize(end, Position { cell: 0, word: 0 });
        for (id, position) in self.positions.drain(..) {
            let sum = &mut self.sums[id as usize];
            arena[sum.first + sum.num] = position;
            sum.num += 1;
        }
        let sums = &mut self.sums;
        self.seen.drain(..).map(|id| {
            let sum = std::mem::take(&mut sums[id as usize]);
            (id, sum.lost, PairState { count: sum.gained, first: sum.first, num: sum.num })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Random;

    /// Direct implementation of the rule in the module documentation.
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
    fn merges_match_the_naive_trainer() {
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
    fn counts_above_32_bits_are_compared() {
        let words = [(b"ab".to_vec(), 1 << 40), (b"cd".to_vec(), (1 << 40) + 1)];
        assert_eq!(fast(&words, 257).unwrap(), [(99, 100)]);
    }

    #[test]
    fn invalid_input_fails_and_stop_interrupts() {
        assert!(fast(&[], 255).unwrap_err().to_string().contains("255"));
        let words = [(b"abc".to_vec(), u64::MAX)];
        assert!(fast(&words, 256).unwrap_err().to_string().contains("count"));
        assert_eq!(train(Words::default(), 257, |_| true), Err(Error::Interrupted));
    }
}
