//! The Python module `rustbpe`: only converts types and errors.
//!
//!     training: scan, regex (text -> words), count, bpe (counts -> merges)
//!     encoding: scan, regex, vocab (word -> ids), encode (texts -> ids)

mod bpe;
mod count;
mod encode;
mod error;
#[cfg(test)]
mod random;
mod regex;
mod scan;
mod table;
mod vocab;

use std::sync::{Arc, RwLock};

use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyString};
use rayon::{ThreadPool, ThreadPoolBuilder};

use bpe::Words;
use count::WordCounter;
use encode::{Encoder, Flat};
use error::Error;
use regex::{Splitter, DEFAULT_PATTERN};
use vocab::Vocab;

/// Characters of text each thread counts between checks for Ctrl-C in training.
const BUFFER_CHARS: usize = 1 << 22;

/// Inputs below this many bytes are encoded on the calling thread.
const SERIAL_BYTES: usize = 1 << 16;

impl From<Error> for PyErr {
    fn from(error: Error) -> Self {
        PyValueError::new_err(error.to_string())
    }
}

/// A ValueError with a formatted message.
macro_rules! value_error {
    ($($words:tt)*) => { PyValueError::new_err(format!($($words)*)) };
}

/// State of a tokenizer, replaced as a whole by training.
struct State {
    pattern: String,
    encoder: Encoder,
}

impl State {
    fn new(pattern: String, splitter: Splitter, vocab: Vocab) -> Arc<Self> {
        Arc::new(State { pattern, encoder: Encoder::new(vocab, splitter) })
    }
}

/// Byte pair encoding tokenizer: trains, encodes and decodes. Thread-safe.
#[pyclass(frozen, module = "rustbpe")]
struct Tokenizer {
    state: RwLock<Arc<State>>,
}

impl Tokenizer {
    fn state(&self) -> Arc<State> {
        self.state.read().expect("the lock is never poisoned").clone()
    }
}

#[pymethods]
impl Tokenizer {
    /// An untrained tokenizer with the 256 bytes.
    #[new]
    fn new() -> PyResult<Self> {
        Self::from_ranks((0..=255).map(|byte| (vec![byte], i64::from(byte))).collect(), None)
    }

    /// A tokenizer from `(bytes, id)` pairs, as returned by `get_mergeable_ranks`, in any order.
    #[staticmethod]
    #[pyo3(signature = (ranks, pattern=None))]
    fn from_ranks(ranks: Vec<(Vec<u8>, i64)>, pattern: Option<String>) -> PyResult<Self> {
        let pattern = pattern.unwrap_or_else(|| DEFAULT_PATTERN.into());
        let splitter = Splitter::new(&pattern)?;
        let vocab = Vocab::from_ranks(ranks)?;
        Ok(Tokenizer { state: RwLock::new(State::new(pattern, splitter, vocab)) })
    }

    /// Learns `vocab_size` tokens, including the 256 bytes, from an iterable of str.
    ///
    /// Reads `buffer_size` texts at a time and keeps none. The result does not depend on the
    /// number of threads, the buffer size or the order of texts. With little text the vocabulary
    /// may be smaller. Releases the GIL; Ctrl-C interrupts. Progress is logged to the logger
    /// `rustbpe` at level INFO.
    #[pyo3(signature = (iterator, vocab_size, buffer_size=8192, pattern=None, num_threads=None))]
    fn train_from_iterator(
        &self,
        py: Python<'_>,
        iterator: &Bound<'_, PyAny>,
        vocab_size: i64,
        buffer_size: i64,
        pattern: Option<String>,
        num_threads: Option<i64>,
    ) -> PyResult<()> {
        let vocab_size = checked_vocab_size(vocab_size)?;
        if buffer_size < 1 {
            return Err(value_error!("buffer_size must be at least 1, got {buffer_size}"));
        }
        let pattern = pattern.unwrap_or_else(|| DEFAULT_PATTERN.into());
        let splitter = Splitter::new(&pattern)?;
        let pool = pool(checked_num_threads(num_threads)?)?;
        let mut counter = WordCounter::new(pool.current_num_threads());
        let mut texts = iterator.try_iter()?;
        let mut num_texts = 0;
        loop {
            let buffer =
                take(&mut texts, buffer_size as usize, BUFFER_CHARS * pool.current_num_threads())?;
            if buffer.is_empty() {
                break;
            }
            let strs = as_strs(&buffer, num_texts)?;
            num_texts += buffer.len();
            py.detach(|| counter.add(&strs, &splitter, &pool))?;
            py.check_signals()?;
        }
        log(py, &format!("counted {num_texts} texts"))?;
        let words = py.detach(|| {
            let mut words = Words::default();
            for table in counter.finish(&pool) {
                table.for_each(|word, count| words.push(word, count));
            }
            words
        });
        let wanted = vocab_size as usize - 256;
        log(py, &format!("training: {} distinct words, {wanted} merges requested", words.len()))?;
        let mut logged = 0;
        let progress = |py: Python<'_>, done: usize| {
            let percent = 100 * done / wanted.max(1);
            if percent < logged + 10 {
                return Ok(());
            }
            logged = percent;
            log(py, &format!("training: {percent}% ({done} of {wanted} merges)"))
        };
        let merges = interruptible(py, progress, |stop| bpe::train(words, vocab_size, stop))?;
        log(py, &format!("training finished: {} merges", merges.len()))?;
        let vocab = py.detach(|| Vocab::from_merges(&merges))?;
        *self.state.write().expect("the lock is never poisoned") =
            State::new(pattern, splitter, vocab);
        Ok(())
    }

    /// Returns `(bytes, id)` of every token, ordered by id.
    fn get_mergeable_ranks<'py>(&self, py: Python<'py>) -> Vec<(Bound<'py, PyBytes>, u32)> {
        let vocab = &self.state().encoder.vocab;
        (0..vocab.len() as u32)
            .filter_map(|id| Some((PyBytes::new(py, vocab.token(id)?), id)))
            .collect()
    }

    /// Returns the split pattern.
    fn get_pattern(&self) -> String {
        self.state().pattern.clone()
    }

    /// The number of tokens.
    #[getter]
    fn vocab_size(&self) -> usize {
        self.state().encoder.vocab.len()
    }

    /// Encodes a text to a list of ids.
    fn encode(&self, py: Python<'_>, text: &Bound<'_, PyString>) -> PyResult<Vec<u32>> {
        let text = [as_str(text, 0)?];
        let flat = self.encode_texts(py, &text, None)?;
        Ok(flat.ids)
    }

    /// Encodes texts to lists of ids.
    #[pyo3(signature = (texts, num_threads=None))]
    fn batch_encode(
        &self,
        py: Python<'_>,
        texts: &Bound<'_, PyAny>,
        num_threads: Option<i64>,
    ) -> PyResult<Vec<Vec<u32>>> {
        let texts = take_all(texts)?;
        let flat = self.encode_texts(py, &as_strs(&texts, 0)?, num_threads)?;
        let rows = flat.offsets.windows(2);
        Ok(rows.map(|row| flat.ids[row[0] as usize..row[1] as usize].to_vec()).collect())
    }

    /// Encodes texts to one flat array of ids.
    ///
    /// Returns `(ids, offsets)`, uint32 and int64 as bytes for `numpy.frombuffer`: text i is
    /// `ids[offsets[i]:offsets[i + 1]]`. Releases the GIL; Ctrl-C interrupts.
    #[pyo3(signature = (texts, num_threads=None))]
    fn encode_flat<'py>(
        &self,
        py: Python<'py>,
        texts: &Bound<'py, PyAny>,
        num_threads: Option<i64>,
    ) -> PyResult<(Bound<'py, PyBytes>, Bound<'py, PyBytes>)> {
        let texts = take_all(texts)?;
        let flat = self.encode_texts(py, &as_strs(&texts, 0)?, num_threads)?;
        let ids = as_bytes(py, &flat.ids, u32::to_ne_bytes)?;
        Ok((ids, as_bytes(py, &flat.offsets, i64::to_ne_bytes)?))
    }

    /// Decodes `ids` to text; invalid UTF-8 becomes U+FFFD.
    fn decode(&self, ids: Vec<i64>) -> PyResult<String> {
        Ok(String::from_utf8_lossy(&self.state().encoder.vocab.decode(&ids)?).into_owned())
    }

    /// Decodes `ids` to bytes.
    fn decode_bytes<'py>(&self, py: Python<'py>, ids: Vec<i64>) -> PyResult<Bound<'py, PyBytes>> {
        Ok(PyBytes::new(py, &self.state().encoder.vocab.decode(&ids)?))
    }
}

impl Tokenizer {
    fn encode_texts(
        &self,
        py: Python<'_>,
        texts: &[&str],
        num_threads: Option<i64>,
    ) -> PyResult<Flat> {
        let state = self.state();
        let num_threads = checked_num_threads(num_threads)?;
        let size: usize = texts.iter().map(|text| text.len()).sum();
        let serial = num_threads == 1 || size < SERIAL_BYTES;
        let pool = (!serial).then(|| pool(num_threads)).transpose()?;
        let quiet = |_: Python<'_>, _| Ok(());
        interruptible(py, quiet, |stop| state.encoder.encode_many(texts, pool.as_ref(), || stop(0)))
    }
}

/// The bytes of numbers.
fn as_bytes<'py, T: Copy, const N: usize>(
    py: Python<'py>,
    numbers: &[T],
    bytes_of: impl Fn(T) -> [u8; N],
) -> PyResult<Bound<'py, PyBytes>> {
    PyBytes::new_with(py, N * numbers.len(), |out| {
        for (place, &number) in out.chunks_exact_mut(N).zip(numbers) {
            place.copy_from_slice(&bytes_of(number));
        }
        Ok(())
    })
}

/// Splits a text into words. `engine` forces the regex engine even if the scanner would do.
#[pyfunction]
#[pyo3(signature = (text, pattern=None, engine=false))]
fn split(text: &Bound<'_, PyString>, pattern: Option<&str>, engine: bool) -> PyResult<Vec<String>> {
    let pattern = pattern.unwrap_or(DEFAULT_PATTERN);
    let splitter = if engine { Splitter::engine(pattern) } else { Splitter::new(pattern) }?;
    let text = as_str(text, 0)?;
    let mut words = Vec::new();
    splitter.split(text, |start, end| words.push(text[start..end].to_owned()))?;
    Ok(words)
}

/// Validates `vocab_size` as `bpe::train` does, but before any text is read.
fn checked_vocab_size(vocab_size: i64) -> PyResult<u32> {
    let size = u32::try_from(vocab_size)
        .map_err(|_| value_error!("vocab_size {vocab_size} is not a 32-bit size"))?;
    bpe::check_vocab_size(size)?;
    Ok(size)
}

/// Starts threads for one call: a persistent pool would not survive a fork.
fn pool(num_threads: usize) -> PyResult<ThreadPool> {
    ThreadPoolBuilder::new()
        .num_threads(num_threads)
        .build()
        .map_err(|e| value_error!("cannot start {num_threads} threads: {e}"))
}

/// None becomes 0: RAYON_NUM_THREADS or the number of cores.
fn checked_num_threads(num_threads: Option<i64>) -> PyResult<usize> {
    match num_threads {
        None => Ok(0),
        Some(num @ 1..=1024) => Ok(num as usize),
        Some(num) => Err(value_error!("num_threads is {num}, must be 1 to 1024")),
    }
}

/// Takes up to `max_texts` texts or `max_chars` characters from an iterator.
fn take<'py>(
    texts: &mut Bound<'py, pyo3::types::PyIterator>,
    max_texts: usize,
    max_chars: usize,
) -> PyResult<Vec<Bound<'py, PyString>>> {
    let mut taken = Vec::new();
    let mut chars = 0;
    while taken.len() < max_texts && chars < max_chars {
        let Some(text) = texts.next() else { break };
        let text = text?.cast_into::<PyString>().map_err(|e| {
            PyTypeError::new_err(format!("texts must be str, not {}", e.into_inner().get_type()))
        })?;
        chars += text.len()?;
        taken.push(text);
    }
    Ok(taken)
}

/// Takes all texts. Rejects a single str, which would iterate over its characters.
fn take_all<'py>(texts: &Bound<'py, PyAny>) -> PyResult<Vec<Bound<'py, PyString>>> {
    if texts.is_instance_of::<PyString>() {
        return Err(PyTypeError::new_err("texts must be an iterable of str, not a str"));
    }
    take(&mut texts.try_iter()?, usize::MAX, usize::MAX)
}

/// Borrows the UTF-8 of each text without copying. `first` is the index of the first text, for
/// error messages.
fn as_strs<'t>(texts: &'t [Bound<'_, PyString>], first: usize) -> PyResult<Vec<&'t str>> {
    texts.iter().enumerate().map(|(i, text)| as_str(text, first + i)).collect()
}

/// Borrows the UTF-8 of a text. A lone surrogate raises the UnicodeEncodeError of `str.encode`,
/// with a note that contains the index of the text.
fn as_str<'t>(text: &'t Bound<'_, PyString>, number: usize) -> PyResult<&'t str> {
    text.to_str().map_err(|error| {
        let py = text.py();
        let note = format!("text {number} is not valid Unicode");
        error.value(py).call_method1("add_note", (note,)).err().unwrap_or(error)
    })
}

/// Logs a message to the Python logger `rustbpe` at level INFO.
fn log(py: Python<'_>, message: &str) -> PyResult<()> {
    let logger = py.import("logging")?.call_method1("getLogger", ("rustbpe",))?;
    logger.call_method1("info", (message,)).map(|_| ())
}

/// Runs `work` without the GIL. `work` passes the number of steps done to `stop`, which checks for
/// signals and calls `progress`; an error from either becomes the result.
fn interruptible<T: Send>(
    py: Python<'_>,
    mut progress: impl FnMut(Python<'_>, usize) -> PyResult<()> + Send,
    work: impl FnOnce(&mut (dyn FnMut(usize) -> bool + Send)) -> Result<T, Error> + Send,
) -> PyResult<T> {
    let mut raised = None;
    let result = py.detach(|| {
        work(&mut |done| {
            let checked = Python::attach(|py| py.check_signals().and_then(|()| progress(py, done)));
            raised = checked.err();
            raised.is_some()
        })
    });
    match raised {
        Some(error) => Err(error),
        None => Ok(result?),
    }
}

#[pymodule]
fn rustbpe(m: &Bound<'_, PyModule>) -> PyResult<()> {
    m.add("DEFAULT_PATTERN", DEFAULT_PATTERN)?;
    m.add_class::<Tokenizer>()?;
    m.add_function(wrap_pyfunction!(split, m)?)
}
