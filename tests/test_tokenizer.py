"""The tokenizer: file format, special tokens, bytes per token."""

import json
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanochat.common import MissingInput
from nanochat.hf.tokenizer import to_tiktoken
from nanochat.tokenizer import SPECIAL_TOKENS, Tokenizer

SMALLEST = 256 + len(SPECIAL_TOKENS)


def sample_texts() -> list[str]:
    """Words of 1- to 4-byte characters, so that some merges split characters."""
    rng = random.Random(0)
    alphabets = [
        "etaoin",
        "\u00e9\u00e8\u00ea",
        "\u4e2d\u4e2e\u4e2f",
        "\U0001f600\U0001f601",
        "019.!",
    ]
    return [
        " ".join("".join(rng.choices(rng.choice(alphabets), k=4)) for _ in range(100))
        for _ in range(50)
    ]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(sample_texts(), 600)


def test_ids_are_bytes_then_merges_then_special_tokens(tokenizer):
    assert tokenizer.vocab_size == 600
    assert [tokenizer.special(name) for name in SPECIAL_TOKENS] == list(range(591, 600))
    assert tokenizer.bos_id == 591
    assert [tokenizer.decode_bytes([i]) for i in range(256)] == [bytes([i]) for i in range(256)]
    assert tokenizer.decode([591, 104, 105]) == "<|bos|>hi"


def test_smallest_tokenizer_is_bytes_and_special_tokens():
    tokenizer = Tokenizer.train(["any text"], SMALLEST)
    assert tokenizer.vocab_size == SMALLEST
    assert tokenizer.encode("any") == [97, 110, 121]


def test_short_text_yields_smaller_vocabulary_and_message(capsys):
    tokenizer = Tokenizer.train(["abab"], 5000)
    assert tokenizer.vocab_size == SMALLEST + 2
    assert str(tokenizer.vocab_size) in (output := capsys.readouterr().out) and "5000" in output


@settings(max_examples=300)
@given(st.lists(st.sampled_from([*SPECIAL_TOKENS, "<|", "|>", " ", "bos", "\n"]) | st.text()))
def test_P5_user_text_never_becomes_a_special_token(tokenizer, pieces):
    text = "".join(pieces)
    ids = tokenizer.encode(text)
    assert all(i < tokenizer.bos_id for i in ids)
    assert tokenizer.decode(ids) == text
    flat, _ = tokenizer.encode_flat([text])
    assert flat.tolist() == ids


def test_P5_special_names_in_training_text_stay_plain_text():
    tokenizer = Tokenizer.train(["<|assistant_start|> " * 100], 320)
    assert all(i < tokenizer.bos_id for i in tokenizer.encode("<|assistant_start|>"))


def test_P6_training_is_deterministic(tmp_path, tokenizer, monkeypatch):
    texts = sample_texts()
    path = tokenizer.save(tmp_path / "a")
    for num_threads in "13":
        texts.reverse()
        monkeypatch.setenv("RAYON_NUM_THREADS", num_threads)
        again = Tokenizer.train(iter(texts), 600)
        assert again.save(tmp_path / "b").read_bytes() == path.read_bytes()
        assert again.fingerprint == tokenizer.fingerprint
    content = json.loads(path.read_text())
    assert list(content) == sorted(content)


def test_P6_fingerprint_depends_on_content(tokenizer):
    assert len(tokenizer.fingerprint) == 16
    assert Tokenizer.train(sample_texts(), 599).fingerprint != tokenizer.fingerprint
    assert Tokenizer.train(sample_texts()[1:], 600).fingerprint != tokenizer.fingerprint


def test_saved_tokenizer_round_trips(tmp_path, tokenizer):
    again = Tokenizer.read(tokenizer.save(tmp_path))
    assert again.fingerprint == tokenizer.fingerprint
    assert again.vocab_size == tokenizer.vocab_size
    text = "\u4e2d\u4e2d eat \U0001f601 9.1"
    assert again.encode(text) == tokenizer.encode(text)
    np.testing.assert_array_equal(again.token_bytes(), tokenizer.token_bytes())


def test_load_finds_tag_or_names_the_training_command(base, tokenizer):
    with pytest.raises(MissingInput, match="scripts.tok_train --dataset=embedded"):
        Tokenizer.load()
    with pytest.raises(MissingInput, match="tok_train --tokenizer_tag=small"):
        Tokenizer.load("small")
    tokenizer.save(base / "tokenizer" / "small")
    assert Tokenizer.load("small").fingerprint == tokenizer.fingerprint


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda content: content.update(format=2), "format"),
        (lambda content: content.pop("tokens"), "tokens"),
        (lambda content: content["special_tokens"].append("<|new|>"), "new"),
        (lambda content: content["tokens"].append(content["tokens"][300]), "300"),
        (lambda content: content["tokens"].pop(65), "65"),
        (lambda content: content["tokens"].append("\u4e2d"), "latin-1"),
        (lambda content: content["tokens"].append(7), "int"),
        (lambda content: content.update(pattern="("), r"\("),
    ],
)
def test_damaged_file_raises_with_its_path(tmp_path, tokenizer, change, named):
    path = tokenizer.save(tmp_path)
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=named) as caught:
        Tokenizer.read(path)
    assert str(path) in str(caught.value)


def test_file_that_is_not_json_raises_with_its_path(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match="tokenizer.json"):
        Tokenizer.read(tmp_path / "tokenizer.json")


def test_invalid_values_raise_with_the_value(tokenizer):
    for attempt, named in [
        (lambda: Tokenizer.train([], SMALLEST - 1), str(SMALLEST - 1)),
        (lambda: Tokenizer.train(["\ud800"], SMALLEST), "surrogates"),
        (lambda: tokenizer.encode("\ud800"), "surrogates"),
        (lambda: tokenizer.encode_flat(["a", "\ud800"]), "text 1"),
        (lambda: tokenizer.special("<|unknown|>"), "unknown"),
        (lambda: tokenizer.decode([600]), "id 600 "),
        (lambda: tokenizer.decode_bytes([-1]), "id -1 "),
    ]:
        with pytest.raises(ValueError, match=named):
            attempt()


def test_encode_flat_concatenates_texts(tokenizer):
    texts = ["", "eat", "\u4e2d\u4e2d", ""]
    ids, offsets = tokenizer.encode_flat(texts)
    assert ids.dtype == np.uint32 and offsets.dtype == np.int64
    rows = [ids[a:b].tolist() for a, b in zip(offsets, offsets[1:], strict=False)]
    assert rows == [tokenizer.encode(text) for text in texts]
    ids, offsets = tokenizer.encode_flat([])
    assert ids.tolist() == [] and offsets.tolist() == [0]


def test_R25_token_bytes_add_up_to_the_length_of_any_text(tokenizer):
    lengths = tokenizer.token_bytes()
    assert lengths.dtype == np.int32 and lengths.shape == (tokenizer.vocab_size,)
    assert lengths[: tokenizer.bos_id].min() == 1
    assert lengths[tokenizer.bos_id :].tolist() == [0] * len(SPECIAL_TOKENS)
    rng = random.Random(0)
    for i in range(1000):
        if i % 2:  # random ids, mostly not UTF-8
            ids = [rng.randrange(tokenizer.bos_id) for _ in range(50)]
            expected = len(tokenizer.decode_bytes(ids))
        else:
            text = "".join(chr(rng.randrange(0xD800)) for _ in range(rng.randrange(50)))
            ids = tokenizer.encode(text)
            expected = len(text.encode())
        assert lengths[ids].sum() == expected
        assert lengths[[tokenizer.bos_id, *ids]].sum() == expected


def test_B8_tokens_of_partial_characters_count_raw_bytes(tokenizer):
    lengths = tokenizer.token_bytes()
    partial = [
        i
        for i in range(256, tokenizer.bos_id)
        if "\ufffd" in tokenizer.decode([i]) and len(tokenizer.decode_bytes([i])) == 2
    ]
    assert partial, "the sample must yield tokens that split characters"
    assert all(lengths[i] == 2 for i in partial)  # U+FFFD would have 3
    for text in sample_texts():
        assert lengths[tokenizer.encode(text)].sum() == len(text.encode())


def test_P3_tiktoken_export_agrees(tokenizer):
    export = to_tiktoken(tokenizer)
    assert export.n_vocab == tokenizer.vocab_size
    for name in SPECIAL_TOKENS:
        assert export.encode_single_token(name) == tokenizer.special(name)
    for text in [*sample_texts(), "<|bos|>it's 12345\n\n  x", "\u0130\u017f's"]:
        assert export.encode_ordinary(text) == tokenizer.encode(text)
        assert export.encode(text, disallowed_special=()) == tokenizer.encode(text)
        assert export.decode_bytes(tokenizer.encode(text)) == text.encode()
