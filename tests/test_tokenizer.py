"""The tokenizer: file format, special tokens, bytes per token."""

import json
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanochat.common import MissingInput
from nanochat.tokenizer import SPECIAL_TOKENS, Tokenizer, tokenizer_dir

ALPHABETS = ["etaoin", "\u00e9\u00e8\u00ea", "\u4e2d\u4e2e\u4e2f", "\U0001f600\U0001f601", "019.!"]
PIECES = st.sampled_from([*SPECIAL_TOKENS, "<|", "|>", " ", "bos", "\n"]) | st.text()


def sample_texts() -> list[str]:
    """Words of 1- to 4-byte characters, so that some merges split characters."""
    rng = random.Random(0)
    words = ["".join(rng.choices(rng.choice(ALPHABETS), k=4)) for _ in range(5000)]
    return [" ".join(words[i : i + 100]) for i in range(0, 5000, 100)]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(sample_texts(), 600)


def test_ids_are_bytes_then_merges_then_special_tokens(tokenizer, capsys):
    assert (tokenizer.vocab_size, tokenizer.bos_id) == (600, 591)
    assert [tokenizer.special(name) for name in SPECIAL_TOKENS] == list(range(591, 600))
    assert tokenizer.decode_bytes(range(256)) == bytes(range(256))
    assert tokenizer.decode([591, 104, 105]) == "<|bos|>hi"
    assert Tokenizer.train(["any text"], 265).encode("any") == [97, 110, 121]
    assert not capsys.readouterr().out
    assert Tokenizer.train(["abab"], 5000).vocab_size == 267
    assert "267 of 5000" in capsys.readouterr().out


@settings(max_examples=100)
@given(st.lists(PIECES).map("".join))
def test_P5_user_text_never_becomes_a_special_token(tokenizer, text):
    ids = tokenizer.encode(text)
    assert max(ids, default=0) < tokenizer.bos_id and tokenizer.decode(ids) == text


def test_P5_special_names_in_training_text_stay_plain_text():
    tokenizer = Tokenizer.train(["<|assistant_start|> " * 100], 320)
    assert max(tokenizer.encode("<|assistant_start|>")) < tokenizer.bos_id


def test_P6_training_and_its_file_are_deterministic(tokenizer, monkeypatch):
    texts = sample_texts()
    path = tokenizer.save(tokenizer_dir("small"))
    for num_threads in "13":
        texts.reverse()
        monkeypatch.setenv("RAYON_NUM_THREADS", num_threads)
        again = Tokenizer.train(iter(texts), 600).save(path.parent / "again")
        assert again.read_bytes() == path.read_bytes()
    content = json.loads(path.read_text())
    assert list(content) == sorted(content)
    read = Tokenizer.load("small")
    assert read.fingerprint == tokenizer.fingerprint == content["fingerprint"]
    assert read.encode(texts[0]) == tokenizer.encode(texts[0])
    for other in (Tokenizer.train(texts, 599), Tokenizer.train(texts[1:], 600)):
        assert other.fingerprint != tokenizer.fingerprint


@pytest.mark.parametrize(
    "change", [{}, {"format": 2}, {"special_tokens": ["<|bos|>"]}, {"fingerprint": "0"}]
)
def test_missing_or_damaged_file_names_the_command(change):
    with pytest.raises(MissingInput, match="scripts.tok_train --tokenizer_tag=x --dataset="):
        Tokenizer.load("x")
    path = Tokenizer.train([], 265).save(tokenizer_dir("x"))
    content = json.loads(path.read_text())
    del content["fingerprint"]
    path.write_text(json.dumps({**content, **change}) if change else "")
    with pytest.raises(ValueError, match=rf"(?s){path}.*scripts.tok_train --tokenizer_tag=x"):
        Tokenizer.load("x")


def test_R25_B8_token_bytes_add_up_to_the_length_of_any_text(tokenizer):
    lengths, rng = tokenizer.token_bytes(), random.Random(0)
    # Tokens that split characters count their bytes, not the three of U+FFFD
    pieces = [tokenizer.decode_bytes([i]) for i in range(591)]

    assert lengths.tolist() == [*map(len, pieces), *[0] * 9] and lengths.dtype == np.int32
    for n in range(1000):
        text = "".join(chr(rng.randrange(0xD800)) for _ in range(n % 50))
        assert lengths[[591, *tokenizer.encode(text)]].sum() == len(text.encode())
