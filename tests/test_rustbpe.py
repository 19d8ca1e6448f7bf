"""rustbpe: trainer against a naive one, encoder against tiktoken, scanner against a regex."""

import collections
import itertools
import os
import random
import signal
import subprocess
import sys
import threading
import time

import pyarrow.parquet
import pytest
import tiktoken
from hypothesis import given, settings
from hypothesis import strategies as st

import rustbpe
from nanochat.common import REPOSITORY

TWO_DIGITS = rustbpe.DEFAULT_PATTERN.replace("{1,3}", "{1,2}")
SCANNED = [rustbpe.DEFAULT_PATTERN, TWO_DIGITS]
# Characters at the boundaries of the pattern's classes
EDGES = "aSsTdlLvVeErR''  \n\r\t\v\x00019._!\u017f\u00e9\u0416\u4e2d\u0301\u0663\u2167\u00bd"
EDGES += "\u00a0\u0085\u2028\u3000\u200d\U0001f600\U0001d400\U0010ffff"
TEXTS = st.text(st.sampled_from(EDGES) | st.characters(exclude_categories=["Cs"]), max_size=60)
SCRIPTS = ["etaoinshr", "ETAOIN", "\u0430\u0431\u0432\u0433", "\u4e2d\u6587\u5b57", "0123456789"]
SCRIPTS += ["\u00e9\u00e8\u00fc\u0301", ".,!?'-", "\U0001f600\U0001f601\u200d", " \t\n", "'s't"]
BYTES = [bytes([b]) for b in range(256)]
LONE = "a\ud800b"
LETTERS = random.Random(0).randbytes(5_000_000).translate(bytes(97 + i % 8 for i in range(256)))


def naive_train(words: dict[bytes, int], vocab_size: int) -> list[bytes]:
    """Train by definition: count all pairs, merge the most frequent, repeat. Returns the tokens."""
    tokens = list(BYTES)
    parts = {word: list(word) for word in words}
    while len(tokens) < vocab_size:
        counts: collections.Counter = collections.Counter()
        for word, ids in parts.items():
            for pair in itertools.pairwise(ids):
                counts[pair] += words[word]
        if not counts:
            break
        best = min(counts, key=lambda pair: (-counts[pair], pair))
        for ids in parts.values():
            i = 0
            while i + 1 < len(ids):
                if (ids[i], ids[i + 1]) == best:
                    ids[i : i + 2] = [len(tokens)]
                i += 1
        tokens.append(tokens[best[0]] + tokens[best[1]])
    return tokens


def trained(texts, vocab_size=400, **options) -> rustbpe.Tokenizer:
    tokenizer = rustbpe.Tokenizer()
    tokenizer.train_from_iterator(texts, vocab_size, **options)
    return tokenizer


def tokens_of(tokenizer: rustbpe.Tokenizer) -> list[bytes]:
    return [token for token, _ in tokenizer.get_mergeable_ranks()]


def reference(tokenizer: rustbpe.Tokenizer) -> tiktoken.Encoding:
    ranks = dict(tokenizer.get_mergeable_ranks())
    return tiktoken.Encoding(
        "x", pat_str=tokenizer.get_pattern(), mergeable_ranks=ranks, special_tokens={}
    )


def random_text(rng: random.Random, alphabet: str, words: int) -> str:
    return " ".join("".join(rng.choices(alphabet, k=rng.randrange(9))) for _ in range(words))


RNG = random.Random(0)
MIXED = trained([random_text(RNG, RNG.choice(SCRIPTS), 200) for _ in range(300)], 2000)
TIKTOKEN = reference(MIXED)


@pytest.mark.parametrize("seed", range(50))
def test_P2_merges_and_ties_match_naive_trainer_for_any_threads(seed):
    rng = random.Random(seed)
    alphabet = ["ab", "abc", "abcdefgh", "aA'1 \n.", "\u00e9\u4e2d\U0001f600x"][seed % 5]
    texts = [random_text(rng, alphabet, rng.randrange(40)) for _ in range(rng.randrange(1, 12))]
    words = collections.Counter(w.encode() for t in texts for w in rustbpe.split(t, engine=True))
    expected = naive_train(words, 330)
    for num_threads, buffer_size in [(1, 8192), (2, 1), (5, 3)]:
        rng.shuffle(texts)
        tokenizer = trained(texts, 330, num_threads=num_threads, buffer_size=buffer_size)
        assert tokens_of(tokenizer) == expected and tokenizer.vocab_size == len(expected)


def check_text(text: str, data: bytes, pattern: str) -> None:
    """The scanner splits as the regex engine; ids equal tiktoken's; text and bytes round-trip."""
    words = rustbpe.split(text, pattern)
    assert words == rustbpe.split(text, pattern, engine=True) and "".join(words) == text
    ids = MIXED.encode(text)
    assert ids == TIKTOKEN.encode_ordinary(text) and MIXED.decode(ids) == text
    assert MIXED.decode_bytes(list(data)) == data  # the first 256 ids are the bytes
    assert MIXED.decode(list(data)) == data.decode(errors="replace")


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("count", [300, pytest.param(100_000, marks=pytest.mark.slow)])
def test_P1_P3_any_text_round_trips_with_the_ids_of_tiktoken(count):
    cases = given(st.text(max_size=200) | TEXTS, st.binary(max_size=200), st.sampled_from(SCANNED))
    settings(max_examples=count)(cases(check_text))()


@pytest.mark.parametrize("every", [60, pytest.param(1, marks=pytest.mark.slow)])
def test_P3_ids_match_tiktoken_on_mini_pretrain(hub, every):
    shards = sorted((hub / "datasets/local/mini-pretrain").glob("*.parquet"))
    columns = [pyarrow.parquet.read_table(s, columns=["text"])["text"] for s in shards]
    texts = [text.as_py() for column in columns for text in column[::every]]
    tokenizer = trained(texts, 8192 - 9)
    assert tokenizer.batch_encode(texts) == reference(tokenizer).encode_ordinary_batch(texts)


@pytest.mark.parametrize("unit", ["a", " ", "\n", "-'", "\u4e2d", "ab", "1", "e\u0301"])
def test_P1_P4_megabyte_without_words_is_not_quadratic(unit):
    text = unit * (1_000_000 // len(unit.encode()))
    start = time.process_time()
    for tokenizer in (trained([text], 300), MIXED):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert time.process_time() - start < 60  # takes 1 s; quadratic: hours


def test_custom_pattern_skips_unmatched_text_and_is_kept():
    tokenizer = trained(["one two three " * 5], 300, pattern=r"[a-z]+")
    again = rustbpe.Tokenizer.from_ranks(tokenizer.get_mergeable_ranks()[::-1], r"[a-z]+")
    ids = again.encode("three two 1 one")
    assert tokenizer.decode(ids) == "threetwoone"


def test_public_rustbpe_package_gives_a_clear_error(tmp_path):
    (tmp_path / "rustbpe.py").write_text("class Tokenizer: pass\n")
    command = [sys.executable, "-c", "import nanochat.tokenizer"]
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, cwd=REPOSITORY, env=env, capture_output=True, text=True)
    assert done.returncode and "pip install ./rustbpe" in done.stderr


@pytest.mark.parametrize(
    ("attempt", "message"),
    [
        (lambda: trained(["a"], 255), "255"),
        (lambda: MIXED.decode([97, 9999]), "9999"),
        (lambda: MIXED.encode(LONE), "surrogates"),
    ],
)
def test_invalid_value_raises_value_error(attempt, message):
    with pytest.raises(ValueError, match=message):
        attempt()


@pytest.mark.parametrize("method", [MIXED.batch_encode, MIXED.encode_flat, trained])
def test_P1_text_that_is_not_unicode_is_an_error_with_its_number(method):
    with pytest.raises(ValueError, match="surrogates not allowed") as found:
        method(["fine"] * 70 + [LONE])
    assert found.value.__notes__ == ["text 70 is not valid Unicode"]
    for wrong in (3, [b"bytes"], ["a", None]):
        with pytest.raises(TypeError):
            method(wrong)


@pytest.mark.parametrize(
    "work",
    [  # counting, merging, encoding
        lambda: trained(itertools.repeat("some text "), 300),
        lambda: trained([LETTERS.decode()], 1_000_000),
        lambda: MIXED.encode_flat(["some text " * 1000] * 1_000_000),
    ],
)
def test_signal_of_another_thread_interrupts_hours_of_work(work):
    before = signal.signal(signal.SIGUSR1, signal.default_int_handler)
    timer = threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGUSR1))
    timer.start()
    with pytest.raises(KeyboardInterrupt):  # needs the GIL, so the work must release it
        work()
    signal.signal(signal.SIGUSR1, before)
