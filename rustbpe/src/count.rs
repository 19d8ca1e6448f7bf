//! Parallel word counting.
//!
//!     texts -> parts -> one table per thread -> disjoint tables of (word, count)
//!
//! Texts are not kept. Counts are sums, so they do not depend on the number of threads or on how
//! texts are batched.

use std::sync::atomic::{AtomicUsize, Ordering};

use rayon::prelude::*;
use rayon::ThreadPool;

use crate::error::Error;
use crate::regex::Splitter;
use crate::table::WordTable;

/// Texts longer than this many bytes are split among threads.
const PART: usize = 1 << 16;

/// Counts of the distinct words.
pub struct WordCounter {
    tables: Vec<WordTable<u64>>, // one per thread
}

impl WordCounter {
    pub fn new(num_threads: usize) -> Self {
        WordCounter { tables: (0..num_threads).map(|_| WordTable::default()).collect() }
    }

    /// Adds the words of `texts`.
    pub fn add(
        &mut self,
        texts: &[&str],
        splitter: &Splitter,
        pool: &ThreadPool,
    ) -> Result<(), Error> {
        let parts: Vec<&str> = texts.iter().flat_map(|text| splitter.parts(text, PART)).collect();
        let taken = AtomicUsize::new(0);
        pool.install(|| {
            self.tables.par_iter_mut().try_for_each(|table| {
                while let Some(part) = parts.get(taken.fetch_add(1, Ordering::Relaxed)) {
                    splitter.split_batches(part, |words| {
                        table.entries(part.as_bytes(), words, |_, count| *count += 1);
                    })?;
                }
                Ok(())
            })
        })
    }

    /// Returns all words with their counts, in disjoint tables.
    pub fn finish(self, pool: &ThreadPool) -> Vec<WordTable<u64>> {
        if self.tables.len() == 1 {
            return self.tables;
        }
        let bits = self.tables.len().next_power_of_two().trailing_zeros();
        let capacity = self.tables.iter().map(WordTable::len).sum::<usize>() >> bits;
        let sum_share = |share| {
            let mut sum = WordTable::with_capacity(capacity);
            for table in &self.tables {
                table.for_each_in(share, bits, |word, count| {
                    *sum.entry(word, 0, word.len()) += count;
                });
            }
            sum
        };
        pool.install(|| (0..1 << bits).into_par_iter().map(sum_share).collect())
    }
}
