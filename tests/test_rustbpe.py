"""rustbpe: trainer against a naive one, encoder against tiktoken, scanner against a regex engine;
errors, run time, threads and signals."""

import collections
import contextlib
import importlib.metadata
import itertools
import logging
import multiprocessing
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
import tomllib
from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest
import tiktoken
from hypothesis import given, settings
from hypothesis import strategies as st

import rustbpe
from nanochat.common import REPOSITORY

GPT4_BY_TIKTOKEN = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+"
    r"|\s++$|\s*[\r\n]|\s+(?!\S)|\s"
)
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
SCANNED = [
    rustbpe.DEFAULT_PATTERN,
    rustbpe.DEFAULT_PATTERN.replace("{1,3}", "{1,2}"),
    GPT4_BY_TIKTOKEN,
    GPT2,
]

# Characters at the boundaries of the pattern's classes
EDGES = "aSsTdlLvVeErR''  \n\r\t\v\x00019._!\u017f\u00e9\u0416\u4e2d\u0301\u0663\u2167\u00bd"
EDGES += "\u00a0\u0085\u2028\u3000\u200d\U0001f600\U0001d400\U0010ffff"
TEXTS = st.text(st.sampled_from(EDGES) | st.characters(exclude_categories=["Cs"]), max_size=60)


def naive_train(words: dict[bytes, int], vocab_size: int) -> list[bytes]:
    """Train by definition: count all pairs, merge the most frequent, repeat. Returns the tokens."""
    tokens = [bytes([b]) for b in range(256)]
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


def ranks_of(tokens: list[bytes]) -> list[tuple[bytes, int]]:
    return [(token, i) for i, token in enumerate(tokens)]


def reference(tokenizer: rustbpe.Tokenizer) -> tiktoken.Encoding:
    return tiktoken.Encoding(
        "reference",
        pat_str=tokenizer.get_pattern(),
        mergeable_ranks=dict(tokenizer.get_mergeable_ranks()),
        special_tokens={},
    )


def flat(tokenizer: rustbpe.Tokenizer, texts, **options) -> list[list[int]]:
    """`encode_flat`, split into one list per text."""
    ids, offsets = tokenizer.encode_flat(texts, **options)
    ids, offsets = np.frombuffer(ids, np.uint32), np.frombuffer(offsets, np.int64)
    return [ids[a:b].tolist() for a, b in itertools.pairwise(offsets)]


def random_text(rng: random.Random, alphabet: str, words: int) -> str:
    return " ".join("".join(rng.choices(alphabet, k=rng.randrange(9))) for _ in range(words))


def hub_texts(hub: Path, every: int) -> list[str]:
    """Every n-th document of mini-pretrain."""
    shards = sorted((hub / "datasets/local/mini-pretrain").glob("*.parquet"))
    columns = [pyarrow.parquet.read_table(s, columns=["text"])["text"] for s in shards]
    return [text.as_py() for column in columns for text in column[::every]]


@pytest.fixture(scope="module")
def mixed() -> rustbpe.Tokenizer:
    """A tokenizer trained on many scripts, punctuation and whitespace."""
    rng = random.Random(0)
    scripts = [
        "etaoinshr",
        "ETAOIN",
        "\u0430\u0431\u0432\u0433",
        "\u4e2d\u6587\u5b57",
        "0123456789",
    ]
    scripts += ["\u00e9\u00e8\u00fc\u0301", ".,!?'-", "\U0001f600\U0001f601\u200d", " \t\n", "'s't"]
    texts = [random_text(rng, rng.choice(scripts), 200) for _ in range(300)]
    return trained(texts, 2000)


@pytest.mark.parametrize("seed", range(50))
def test_P2_merges_match_naive_trainer_for_any_thread_count(seed):
    rng = random.Random(seed)
    alphabet = ["ab", "abc", "abcdefgh", "aA'1 \n.", "\u00e9\u4e2d\U0001f600x"][seed % 5]
    texts = [random_text(rng, alphabet, rng.randrange(40)) for _ in range(rng.randrange(1, 12))]
    words = collections.Counter(w.encode() for t in texts for w in rustbpe.split(t, engine=True))
    expected = ranks_of(naive_train(words, 330))
    for num_threads, buffer_size in [(1, 8192), (2, 1), (5, 3)]:
        rng.shuffle(texts)
        tokenizer = trained(texts, 330, num_threads=num_threads, buffer_size=buffer_size)
        assert tokenizer.get_mergeable_ranks() == expected
        assert tokenizer.vocab_size == len(expected)


def test_P2_ties_go_to_the_lowest_ids():
    words = [(b"zy", 5), (b"ab", 5), (b"ac", 5), (b"bb", 6)]
    assert rustbpe.train_words(words, 260) == [(98, 98), (97, 98), (97, 99), (122, 121)]


def test_P2_train_words_matches_naive_trainer():
    rng = random.Random(0)
    words = {bytes(rng.choices(range(256), k=9)): rng.randrange(9) for _ in range(200)}
    words |= {b"a" * n: 1 + n % 3 for n in range(1, 30)}
    tokens = [bytes([b]) for b in range(256)]
    for left, right in rustbpe.train_words(list(words.items()), 600):
        tokens.append(tokens[left] + tokens[right])
    assert tokens == naive_train({w: n for w, n in words.items() if n}, 600)


@settings(max_examples=500)
@given(TEXTS, st.sampled_from(SCANNED))
def test_scanner_matches_regex_engine(text, pattern):
    words = rustbpe.split(text, pattern)
    assert words == rustbpe.split(text, pattern, engine=True)
    assert "".join(words) == text


@pytest.mark.slow
@pytest.mark.timeout(1200)
@settings(max_examples=20_000)
@given(TEXTS, st.sampled_from(SCANNED))
def test_scanner_matches_regex_engine_on_many_texts(text, pattern):
    assert rustbpe.split(text, pattern) == rustbpe.split(text, pattern, engine=True)


def test_scanner_matches_regex_engine_on_real_text(hub):
    for text in hub_texts(hub, 200):
        assert rustbpe.split(text) == rustbpe.split(text, engine=True)


def check_round_trip(tokenizer: rustbpe.Tokenizer, text: str):
    ids = tokenizer.encode(text)
    assert tokenizer.decode_bytes(ids) == text.encode()
    assert tokenizer.decode(ids) == text


@settings(max_examples=1000)
@given(text=TEXTS, data=st.binary(max_size=40))
def test_P1_text_and_bytes_roundtrip(mixed, text, data):
    check_round_trip(mixed, text)
    ids = list(data)  # the first 256 ids are the bytes
    assert mixed.decode_bytes(ids) == data
    assert mixed.decode(ids) == data.decode(errors="replace")


@pytest.mark.slow
@pytest.mark.timeout(1200)
@settings(max_examples=100_000)
@given(text=st.text(max_size=200) | TEXTS, data=st.binary(max_size=200))
def test_P1_text_and_bytes_roundtrip_100_000_times(mixed, text, data):
    check_round_trip(mixed, text)
    assert mixed.decode_bytes(list(data)) == data
    assert mixed.decode(list(data)) == data.decode(errors="replace")


@pytest.mark.parametrize("unit", ["a", "\0", "\u4e2d", "e\u0301", "\U0001f600", "\x7f\x80"])
def test_P1_megabyte_without_spaces_roundtrips(mixed, unit):
    check_round_trip(mixed, unit * (1_000_000 // len(unit.encode())))


def test_P1_lone_surrogate_raises_unicode_encode_error(mixed):
    for attempt, number in [
        (lambda: mixed.encode("a\ud800b"), 0),
        (lambda: mixed.batch_encode(["fine", "a\ud800b"]), 1),
        (lambda: mixed.encode_flat(["fine", "a\ud800b"]), 1),
        (lambda: trained(["fine", "a\ud800b"]), 1),
        (lambda: trained(["fine"] * 70 + ["a\ud800b"], buffer_size=8), 70),
        (lambda: rustbpe.split("a\ud800b"), 0),
    ]:
        with pytest.raises(UnicodeEncodeError, match="surrogates not allowed") as found:
            attempt()
        assert isinstance(found.value, ValueError) and found.value.object == "a\ud800b"
        assert (found.value.start, found.value.end) == (1, 2)
        assert found.value.__notes__ == [f"text {number} is not valid Unicode"]


@settings(max_examples=500)
@given(text=TEXTS)
def test_P3_ids_match_tiktoken(mixed, text):
    assert mixed.encode(text) == reference_of_mixed(mixed).encode_ordinary(text)


REFERENCES: dict[int, tiktoken.Encoding] = {}


def reference_of_mixed(tokenizer: rustbpe.Tokenizer) -> tiktoken.Encoding:
    """`reference`, cached because hypothesis calls a test hundreds of times."""
    return REFERENCES.setdefault(id(tokenizer), reference(tokenizer))


@pytest.mark.parametrize("seed", range(30))
def test_P3_ids_match_tiktoken_with_untrained_vocabulary(seed):
    rng = random.Random(seed)
    source = "".join(rng.choices("abcde", k=500))
    tokens = {source[i : i + rng.randrange(2, 7)].encode() for i in range(0, 400, 3)}
    tokens = [*tokens, *(bytes([b]) for b in range(256))]
    rng.shuffle(tokens)
    tokenizer = rustbpe.Tokenizer.from_ranks(ranks_of(tokens), SCANNED[seed % len(SCANNED)])
    expected = reference(tokenizer)
    for length in [5, 20, 90, 110, 2000]:
        for _ in range(20):
            text = "".join(rng.choices("abcdef", k=length))
            assert tokenizer.encode(text) == expected.encode_ordinary(text)


def check_real_text(texts: list[str]):
    tokenizer = trained(texts, 8192 - 9)
    expected = reference(tokenizer).encode_ordinary_batch(texts, num_threads=2)
    assert flat(tokenizer, texts, num_threads=2) == expected


def test_P3_ids_match_tiktoken_on_sample_of_real_text(hub):
    check_real_text(hub_texts(hub, 60))


@pytest.mark.slow
def test_P3_ids_match_tiktoken_on_all_of_mini_pretrain(hub):
    check_real_text(hub_texts(hub, 1))


@pytest.mark.parametrize("unit", ["a", " ", "\n", "-", "'", "\u4e2d", "ab", " \n", "1", "x\u0301"])
def test_P4_encoding_repeated_characters_is_not_quadratic(unit):
    text = unit * (1_000_000 // len(unit.encode()))
    tokenizer = trained([text], 300)
    start = time.process_time()
    ids = tokenizer.encode(text)
    assert time.process_time() - start < 60  # takes 0.1 s; quadratic: hours
    assert tokenizer.decode_bytes(ids) == text.encode()


def test_P4_training_is_not_quadratic_in_word_length():
    start = time.process_time()
    tokenizer = trained(["abc" * 700_000], 1000)
    assert time.process_time() - start < 60  # takes 0.5 s; quadratic: hours
    assert max(len(token) for token, _ in tokenizer.get_mergeable_ranks()) > 1_000_000


@settings(max_examples=200)
@given(texts=st.lists(TEXTS, max_size=8), num_threads=st.sampled_from([None, 1, 3]))
def test_all_encode_methods_return_the_same_ids(mixed, texts, num_threads):
    expected = [mixed.encode(text) for text in texts]
    assert mixed.batch_encode(texts) == expected
    assert flat(mixed, texts, num_threads=num_threads) == expected
    assert flat(mixed, iter(texts), prefix=70_000) == [[70_000, *ids] for ids in expected]


def test_threads_do_not_change_ids_of_long_texts(mixed):
    rng = random.Random(0)
    texts = [random_text(rng, "etao'1 \n\u00e9", n) for n in [300_000, 0, 5, 120_000]]
    assert flat(mixed, texts, num_threads=4) == flat(mixed, texts, num_threads=1)


def test_flat_ids_are_wrapped_without_copy(mixed):
    buffer, offsets = mixed.encode_flat(["some text", "more"])
    ids = np.frombuffer(buffer, np.uint32)
    assert ids.ctypes.data == np.frombuffer(buffer, np.uint8).ctypes.data
    assert not ids.flags.writeable
    expected = mixed.encode("some text") + mixed.encode("more")
    del buffer, offsets  # the array keeps the buffer alive
    assert ids.tolist() == expected


def test_custom_pattern_skips_unmatched_text():
    tokenizer = trained(["one two three " * 5], 300, pattern=r"[a-z]+")
    assert tokenizer.get_pattern() == r"[a-z]+"
    assert rustbpe.split("one, two", r"[a-z]+|x*") == ["one", "two"]
    text = "three two 1 one"
    assert tokenizer.decode(tokenizer.encode(text)) == "threetwoone"
    assert tokenizer.encode(text) == reference(tokenizer).encode_ordinary(text)


def test_tokenizer_roundtrips_through_ranks(mixed):
    ranks = mixed.get_mergeable_ranks()
    again = rustbpe.Tokenizer.from_ranks(ranks[::-1], mixed.get_pattern())
    assert again.get_mergeable_ranks() == ranks
    assert again.get_pattern() == mixed.get_pattern()
    assert again.encode("It's 2026, isn't it?") == mixed.encode("It's 2026, isn't it?")


# Output of rustbpe 0.1.0 from PyPI. Some pairs in the texts have equal counts.
PUBLIC_PATTERN = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
)
PUBLIC_TEXTS = ["hello hello world 12345 12345"] * 5 + ["It's 2026, isn't it?\n", "\u4e2d\u6587 x"]
PUBLIC_TOKENS = [
    *(b"12", b"45", b"el", b"hel", b"lo", b"123", b"hello", b" w", b" hello", b"ld", b"or"),
    *(b" wor", b" world", b" i", b" x", b"'s", b"'t", b"02", b"202", b"?\n", b"It", b"sn"),
    *(b"\x96\x87", b"\xad\xe6", b"\xb8\xad\xe6", b"\xe4\xb8\xad\xe6", b" it", b" isn"),
    b"\xe4\xb8\xad\xe6\x96\x87",
]
PUBLIC_IDS = [262, 32, 261, 257, 54]


def test_defaults_reproduce_the_public_package():
    tokenizer = rustbpe.Tokenizer()
    tokenizer.train_from_iterator(iterator=PUBLIC_TEXTS, vocab_size=290, buffer_size=3)
    assert tokenizer.get_pattern() == rustbpe.DEFAULT_PATTERN == PUBLIC_PATTERN
    ranks = tokenizer.get_mergeable_ranks()
    assert [token for token, _ in ranks[256:]] == PUBLIC_TOKENS
    assert [rank for _, rank in ranks] == list(range(tokenizer.vocab_size))
    assert tokenizer.batch_encode(texts=("hello 123456", "")) == [PUBLIC_IDS, []]
    assert tokenizer.encode(text="hello 123456") == PUBLIC_IDS
    assert tokenizer.decode(ids=PUBLIC_IDS) == "hello 123456"


def test_progress_is_logged_to_logger_rustbpe(caplog, capfd):
    rng = random.Random(0)
    texts = [random_text(rng, "abcdefgh", 300) for _ in range(20)]
    trained(texts, 1300)
    assert not caplog.records, "progress is only logged at level INFO"
    with caplog.at_level(logging.INFO, logger="rustbpe"):
        trained(texts, 1300)
    messages = [record.getMessage() for record in caplog.records]
    assert {(record.name, record.levelname) for record in caplog.records} == {("rustbpe", "INFO")}
    assert messages[0] == "counted 20 texts" and messages[-1] == "training finished: 1044 merges"
    assert "training: 49% (512 of 1044 merges)" in messages and len(messages) == 11
    assert capfd.readouterr() == ("", "")


def test_log_handler_error_aborts_training(monkeypatch):
    class Broken(logging.Handler):
        def emit(self, record):
            raise KeyError("the handler broke")

    logger, handler = logging.getLogger("rustbpe"), Broken()
    monkeypatch.setattr(logger, "level", logging.INFO)
    monkeypatch.setattr(logger, "handlers", [handler])
    with pytest.raises(KeyError, match="the handler broke"):
        trained(["some text"], 260)


def test_version_is_local_and_pinned():
    ours = tomllib.loads((REPOSITORY / "rustbpe" / "pyproject.toml").read_text())["project"]
    wanted = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["dependencies"]
    assert f"rustbpe=={ours['version']}" in wanted and "+" in ours["version"]
    assert importlib.metadata.version("rustbpe") == ours["version"]


def test_public_rustbpe_package_gives_a_clear_error(tmp_path):
    (tmp_path / "rustbpe.py").write_text("class Tokenizer: pass\n")
    command = [sys.executable, "-c", "import nanochat.tokenizer"]
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, cwd=REPOSITORY, env=env, capture_output=True, text=True)
    assert done.returncode and "pip install ./rustbpe" in done.stderr


def test_untrained_tokenizer_has_only_bytes():
    tokenizer = rustbpe.Tokenizer()
    assert tokenizer.vocab_size == 256
    assert tokenizer.get_pattern() == rustbpe.DEFAULT_PATTERN
    assert tokenizer.encode("h\u00e9") == list("h\u00e9".encode())


def test_training_without_pairs_keeps_only_bytes():
    for texts in [[], [""], ["a", "b"]]:
        assert trained(texts, 300).vocab_size == 256


BYTES = [bytes([b]) for b in range(256)]


@pytest.mark.parametrize(
    ("attempt", "message"),
    [
        (lambda: trained(["a"], 255), "255"),
        (lambda: trained(["a"], -1), "-1"),
        (lambda: trained(["a"], 1 << 40), str(1 << 40)),
        (lambda: trained(["a"], buffer_size=0), "0"),
        (lambda: trained(["a"], num_threads=0), "num_threads is 0"),
        (lambda: trained(["a"], pattern="a(b"), r"a\(b"),
        (lambda: rustbpe.train_words([(b"ab", 1)], 100), "100"),
        (lambda: rustbpe.train_words([(b"abc", (1 << 64) - 1)], 300), "64 bits"),
        (lambda: rustbpe.split("a", "["), r"\["),
        (lambda: rustbpe.Tokenizer().decode([97, 256]), "256"),
        (lambda: rustbpe.Tokenizer().decode_bytes([-1]), "-1"),
        (lambda: rustbpe.Tokenizer().decode([1 << 40]), str(1 << 40)),
        (lambda: rustbpe.Tokenizer().encode_flat(["a"], num_threads=-2), "-2"),
        (lambda: rustbpe.Tokenizer.from_ranks([]), "byte 0"),
        (lambda: rustbpe.Tokenizer.from_ranks(ranks_of(BYTES[:-1])), "byte 255"),
        (lambda: rustbpe.Tokenizer.from_ranks([*ranks_of(BYTES), (b"ab", 257)]), "257"),
        (lambda: rustbpe.Tokenizer.from_ranks([*ranks_of(BYTES), (b"ab", 7)]), "7"),
        (lambda: rustbpe.Tokenizer.from_ranks([*ranks_of(BYTES), (b"", 256)]), "256"),
        (lambda: rustbpe.Tokenizer.from_ranks(ranks_of([*BYTES, b"ab", b"ab"])), "256"),
        (lambda: rustbpe.Tokenizer.from_ranks(ranks_of(BYTES), "("), r"\("),
    ],
)
def test_invalid_value_raises_value_error(attempt, message):
    with pytest.raises(ValueError, match=message):
        attempt()


def test_input_that_is_not_text_raises_type_error(mixed):
    for attempt in [
        lambda: trained([b"bytes"]),
        lambda: mixed.encode_flat(["a", None]),
        lambda: mixed.encode(3),
        lambda: mixed.batch_encode("hi"),
        lambda: mixed.encode_flat("hi"),
    ]:
        with pytest.raises(TypeError):
            attempt()


def test_iterator_error_propagates_and_keeps_tokenizer():
    def texts():
        yield "some text " * 100
        raise KeyError("the source broke")

    tokenizer = rustbpe.Tokenizer()
    with pytest.raises(KeyError, match="the source broke"):
        tokenizer.train_from_iterator(texts(), 300, buffer_size=1)
    assert tokenizer.vocab_size == 256


FOREVER = {
    "counting": "rustbpe.Tokenizer().train_from_iterator(itertools.repeat('some text '), 300)",
    "merging": "rustbpe.train_words([(random.Random(0).randbytes(20_000_000), 1)], 1_000_000)",
    "encoding": "rustbpe.Tokenizer().encode_flat(['some text ' * 1000] * 1_000_000)",
}


@pytest.mark.parametrize("work", FOREVER)
def test_ctrl_c_interrupts(work):
    # Background processes of a shell ignore SIGINT, and children inherit that
    setup = "signal.signal(signal.SIGINT, signal.default_int_handler); print('ready', flush=True)"
    code = f"import itertools, random, rustbpe, signal; {setup}; {FOREVER[work]}"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        time.sleep(0.5)
        child.send_signal(signal.SIGINT)
        try:
            _, errors = child.communicate(timeout=120)  # the work would take hours
        finally:
            child.kill()
    assert "KeyboardInterrupt" in errors


def test_gil_is_released_while_working(mixed):
    rng = random.Random(0)
    words = [(rng.randbytes(3_000_000), 1)]
    texts = [random_text(rng, "abcdefgh", 200_000)]
    for work in [
        lambda: rustbpe.train_words(words, 3000),
        lambda: trained(texts * 20, 300, num_threads=1),
        lambda: mixed.encode_flat(texts * 20, num_threads=1),
    ]:
        done = threading.Event()
        thread = threading.Thread(target=lambda work=work, done=done: (work(), done.set()))
        thread.start()
        ticks = 0
        while not done.is_set():
            time.sleep(0.001)
            ticks += 1
        thread.join()
        assert ticks > 5


def test_training_memory_is_independent_of_text_size():
    words = random_text(random.Random(0), "abcdefgh", 30_000).split(" ")

    def texts():
        rng = random.Random(1)
        for _ in range(400):
            yield " ".join(rng.choices(words, k=40_000))

    trained(itertools.islice(texts(), 40), 1000, num_threads=2)
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    trained(texts(), 1000, num_threads=2)  # 90 MB
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 30_000


def encode_in_child(tokenizer: rustbpe.Tokenizer, text: str, results) -> None:
    results.put(flat(tokenizer, [text], num_threads=2))


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_forked_process_can_encode_with_threads(mixed):
    text = random_text(random.Random(0), "abcdefgh", 100_000)
    expected = flat(mixed, [text], num_threads=2)
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    child = context.Process(target=encode_in_child, args=(mixed, text, results))
    child.start()
    assert results.get() == expected
    child.join()
