//! Hash table from words to small values, for the two hot loops: counting and encoding.
//!
//! Nearly every word has at most 15 bytes and is stored as one 128-bit integer, which takes a few
//! instructions and one cache line to hash and compare. Longer words are in an ordinary map.

use std::hash::BuildHasher;

use rustc_hash::{FxBuildHasher, FxHashMap};

use crate::regex::BATCH;

/// The longest word that fits a `Key`, in bytes.
const SHORT: usize = 15;

/// A word of at most `SHORT` bytes: its bytes in little-endian order, its length in the top byte.
/// Zero marks an empty slot, because no word is empty.
type Key = u128;

/// `text[start..end]` as a key. The word must be short.
#[inline(always)]
fn key(text: &[u8], start: usize, end: usize) -> Key {
    let len = end - start;
    let bytes = match text.get(start..start + 16) {
        Some(window) => u128::from_le_bytes(window.try_into().unwrap()),
        None => {
            let mut window = [0; 16];
            window[..len].copy_from_slice(&text[start..end]);
            u128::from_le_bytes(window)
        }
    };
    (bytes & MASKS[len]) | (len as u128) << 120
}

/// `MASKS[n]` keeps the lowest n bytes.
const MASKS: [u128; SHORT + 1] = {
    let mut masks = [0; SHORT + 1];
    let mut len = 1;
    while len <= SHORT {
        masks[len] = masks[len - 1] << 8 | 0xff;
        len += 1;
    }
    masks
};

/// 64 well-mixed bits: one wide multiplication, folded. The constants are digits of pi.
#[inline(always)]
fn hash(key: Key) -> u64 {
    let low = key as u64 ^ 0x243f_6a88_85a3_08d3;
    let high = (key >> 64) as u64 ^ 0x1319_8a2e_0370_7344;
    let product = u128::from(low) * u128::from(high);
    product as u64 ^ (product >> 64) as u64
}

/// Prefetches `value` into the CPU cache, on x86-64 only.
#[inline(always)]
fn prefetch<T>(value: &T) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch is only a hint, and SSE is part of every x86-64.
    unsafe {
        use std::arch::x86_64::{_mm_prefetch, _MM_HINT_T0};
        _mm_prefetch::<_MM_HINT_T0>(std::ptr::from_ref(value).cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = value;
}

/// One slot of a `ShortTable`; with a `V` of up to 16 bytes, two fill a cache line.
#[derive(Clone, Copy, Default)]
#[repr(align(32))]
struct Slot<V> {
    key: Key,
    value: V,
}

/// Open addressing with linear probing, at most three quarters full.
struct ShortTable<V> {
    slots: Vec<Slot<V>>, // the length is a power of two
    len: usize,
}

impl<V: Copy + Default> ShortTable<V> {
    fn with_size(size: usize) -> Self {
        ShortTable { slots: vec![Slot::default(); size], len: 0 }
    }

    /// The preferred slot of a hash: its low bits.
    #[inline(always)]
    fn home(&self, hash: u64) -> usize {
        hash as usize & (self.slots.len() - 1)
    }

    /// The slot that holds `key`, or the empty slot for it.
    #[inline(always)]
    fn find(&self, key: Key) -> usize {
        let mask = self.slots.len() - 1;
        let mut at = self.home(hash(key));
        while self.slots[at].key != key && self.slots[at].key != 0 {
            at = (at + 1) & mask;
        }
        at
    }

    #[inline(always)]
    fn get(&self, key: Key) -> Option<V> {
        let slot = &self.slots[self.find(key)];
        (slot.key != 0).then_some(slot.value)
    }

    #[inline(always)]
    fn entry(&mut self, key: Key) -> &mut V {
        let mut at = self.find(key);
        if self.slots[at].key == 0 {
            at = self.occupy(at, key);
        }
        &mut self.slots[at].value
    }

    /// Inserts a new key into the empty slot `at`; a table that is three quarters full grows first.
    #[cold]
    fn occupy(&mut self, mut at: usize, key: Key) -> usize {
        if 4 * self.len >= 3 * self.slots.len() {
            let mut larger = Self::with_size(2 * self.slots.len());
            for slot in self.slots.iter().filter(|slot| slot.key != 0) {
                let to = larger.find(slot.key);
                larger.slots[to] = *slot;
            }
            self.slots = larger.slots;
            at = self.find(key);
        }
        self.slots[at].key = key;
        self.len += 1;
        at
    }
}

/// A map from words (non-empty byte strings) to `V`.
pub struct WordTable<V> {
    short: ShortTable<V>,
    long: FxHashMap<Box<[u8]>, V>,
}

impl<V: Copy + Default> Default for WordTable<V> {
    fn default() -> Self {
        WordTable::with_capacity(0)
    }
}

impl<V: Copy + Default> WordTable<V> {
    /// Reserves room for `num` words. Required when filling a table in the iteration order of
    /// another one: in a growing table such words would cluster.
    pub fn with_capacity(num: usize) -> Self {
        let size = (num + num / 2).next_power_of_two().max(16);
        WordTable { short: ShortTable::with_size(size), long: FxHashMap::default() }
    }

    /// The number of words.
    pub fn len(&self) -> usize {
        self.short.len + self.long.len()
    }

    /// Returns the value of the word `text[start..end]`.
    #[inline(always)]
    pub fn get(&self, text: &[u8], start: usize, end: usize) -> Option<V> {
        if end - start <= SHORT {
            self.short.get(key(text, start, end))
        } else {
            self.long.get(&text[start..end]).copied()
        }
    }

    /// Returns the value of the word `text[start..end]`; a new word gets the default.
    ///
    /// Takes the surrounding text because reading 16 bytes at once is faster than reading the
    /// word alone.
    #[inline(always)]
    pub fn entry(&mut self, text: &[u8], start: usize, end: usize) -> &mut V {
        if end - start <= SHORT {
            self.short.entry(key(text, start, end))
        } else {
            self.long_entry(&text[start..end])
        }
    }

    fn long_entry(&mut self, word: &[u8]) -> &mut V {
        if !self.long.contains_key(word) {
            self.long.insert(word.into(), V::default());
        }
        self.long.get_mut(word).unwrap()
    }

    /// Calls `visit` for each of `words` in `text`, in order, with its index and value; a new word
    /// gets the default.
    #[inline(always)]
    pub fn entries(
        &mut self,
        text: &[u8],
        words: &[(usize, usize)],
        mut visit: impl FnMut(usize, &mut V),
    ) {
        let mut keys = [0; BATCH];
        let mut homes = [0; BATCH];
        for (i, &(start, end)) in words.iter().enumerate() {
            if end - start <= SHORT {
                keys[i] = key(text, start, end);
                homes[i] = self.short.home(hash(keys[i]));
                prefetch(&self.short.slots[homes[i]]);
            }
        }
        for (i, &(start, end)) in words.iter().enumerate() {
            let slot = &mut self.short.slots[homes[i]];
            if slot.key == keys[i] && slot.key != 0 {
                visit(i, &mut slot.value);
            } else {
                visit(i, self.entry(text, start, end));
            }
        }
    }

    /// Calls `visit` with every word and its value, in no particular order.
    pub fn for_each(&self, visit: impl FnMut(&[u8], V)) {
        self.for_each_in(0, 0, visit);
    }

    /// `for_each` over one of 2^`bits` shares; a word is in the same share in every table.
    pub fn for_each_in(&self, share: u64, bits: u32, mut visit: impl FnMut(&[u8], V)) {
        let is_in = |hash: u64| hash.checked_shr(64 - bits).unwrap_or(0) == share;
        for slot in self.short.slots.iter() {
            if slot.key != 0 && is_in(hash(slot.key)) {
                let bytes = slot.key.to_le_bytes();
                visit(&bytes[..usize::from(bytes[SHORT])], slot.value);
            }
        }
        for (word, &value) in &self.long {
            if is_in(FxBuildHasher.hash_one(word)) {
                visit(word, value);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;
    use crate::random::Random;

    /// Uses `entries` to count the given words of `text`.
    fn count(text: &[u8], words: &[(usize, usize)]) -> WordTable<u64> {
        let mut table = WordTable::default();
        for batch in words.chunks(BATCH) {
            table.entries(text, batch, |_, count| *count += 1);
        }
        table
    }

    fn contents(table: &WordTable<u64>, share: u64, bits: u32) -> HashMap<Vec<u8>, u64> {
        let mut found = HashMap::new();
        table.for_each_in(share, bits, |word, count| {
            assert_eq!(found.insert(word.to_vec(), count), None, "{word:?} occurs twice");
        });
        found
    }

    #[test]
    fn counts_match_the_standard_map() {
        let mut random = Random(1);
        let text: Vec<u8> = (0..5000).map(|_| random.below(3) as u8).collect();
        let mut expected = HashMap::new();
        let mut words = Vec::new();
        for _ in 0..40_000 {
            let start = random.below(text.len());
            let end = (start + 1 + random.below(40)).min(text.len());
            words.push((start, end));
            *expected.entry(text[start..end].to_vec()).or_insert(0) += 1;
        }
        let table = count(&text, &words);
        assert_eq!(contents(&table, 0, 0), expected);
        assert_eq!(table.len(), expected.len());
        for &(start, end) in &words {
            let word = &text[start..end];
            assert_eq!(table.get(&text, start, end), Some(expected[word]));
            assert_eq!(table.get(word, 0, word.len()), Some(expected[word]));
        }
        assert_eq!(table.get(b"not there", 0, 9), None);
    }

    #[test]
    fn shares_partition_the_words() {
        let text: Vec<u8> = (0..=255).cycle().take(4096).collect();
        let words: Vec<_> = (0..3000).map(|i| (i, i + 1 + i % 30)).collect();
        let table = count(&text, &words);
        let mut joined = HashMap::new();
        for share in 0..8 {
            let part = contents(&table, share, 3);
            assert!(part.len() > table.len() / 16, "share {share} has {} words", part.len());
            joined.extend(part);
        }
        assert_eq!(joined, contents(&table, 0, 0));
    }
}
