"""Text mixtures: opening, reopening from a record, packing by bucket, invalid input."""

import json

import numpy as np
import pytest

from nanochat.dataset import DataConfig
from nanochat.mixture import MixConfig, open_corpus, open_texts
from nanochat.tokenizer import Tokenizer
from tasks.builtin import ensure_written

TOKENIZER = Tokenizer.train(["what is it"], 265)


@pytest.fixture
def own(tmp_path):
    """Return a function that writes a mixture file of two texts, one three times as large."""
    declared = {}
    for name, count in (("big", 300), ("small", 100)):
        folder = tmp_path / name
        folder.mkdir()
        for shard in ("a", "b"):
            lines = [json.dumps({"text": f"{name[0] * 40} {i}"}) for i in range(count)]
            (folder / f"{shard}.jsonl").write_text("\n".join(lines))
        declared[name] = {"dataset": str(folder), "language": name}

    def write(mixture):
        path = tmp_path / "own.json"
        path.write_text(json.dumps({"mixture": mixture, "buckets": declared}))
        return MixConfig(str(path))

    return write


def corpus_of(own, mixture):
    texts = open_texts(DataConfig(), own(mixture))
    return open_corpus(texts, TOKENIZER, 63)


def test_every_step_has_the_shares_of_the_mixture(own, machine):
    corpus = corpus_of(own, "big=75%,small=25%")
    mixed, needed = corpus.resolve_amounts(200, machine)
    assert needed == {"big": 150, "small": 50}
    corpus.pack(needed, machine)
    rows = corpus.mixed(needed)
    for step in range(10):
        ids = rows.batch(step, 20, seed=0)
        of_small = (ids == TOKENIZER.encode("s")[0]).sum(axis=1) > 5
        assert 4 <= of_small.sum() <= 6
    assert mixed.shares_by("language") == {"big": 0.75, "small": 0.25}


def test_texts_without_amount_are_weighted_by_size(own, machine, capsys):
    corpus = corpus_of(own, "big,small")
    mixed, needed = corpus.resolve_amounts(80, machine)
    assert "packing all of big, small" in capsys.readouterr().out
    assert needed == pytest.approx({"big": 60, "small": 20}, abs=2)
    assert all(bucket.available for bucket in mixed.buckets)
    alike = corpus_of(own, "big,small@^0")
    assert alike.resolve_amounts(80, machine)[1] == {"big": 40, "small": 40}


def test_recorded_mixture_reopens_identically(own):
    texts = open_texts(DataConfig(), own("small=25%,big=75%"))
    recorded = json.loads(json.dumps(texts.describe(), sort_keys=True))  # as in saved records
    again = open_texts(DataConfig(), recorded=recorded)
    assert again.fingerprint == texts.fingerprint and again.tags == texts.tags
    assert list(again.sources) == list(texts.sources)  # amounts are in this order
    other = open_texts(DataConfig(), own("small=30%,big=70%"))
    assert other.fingerprint != texts.fingerprint
    one, two = (open_corpus(t, TOKENIZER, 63) for t in (texts, other))
    assert [r.folder for r in one.rows.values()] == [r.folder for r in two.rows.values()]


def test_single_text_is_used_without_mixing(machine):
    data = DataConfig(dataset="embedded", num_shards=1)
    texts = open_texts(data, prepare=ensure_written)
    corpus = open_corpus(texts, TOKENIZER, 63)
    assert texts.describe()["dataset"] == "embedded"
    assert corpus.resolve_amounts(5, machine) == (None, {"embedded": 5})
    assert corpus.fingerprint == corpus.rows["embedded"].fingerprint
    assert corpus.mixed({"embedded": 5}) is corpus.rows["embedded"]
    corpus.pack({"embedded": 5}, machine)
    assert np.asarray(corpus.rows["embedded"].batch(0, 4, 0)).shape == (4, 64)


@pytest.mark.parametrize(
    "mixture, data, message",
    [
        ("embedded=50%,big=50%", DataConfig(dataset="embedded"), "--mixture selects the text"),
        ("nowhere", DataConfig(), "--dataset=nowhere"),
        ("big=80%,small=80%", DataConfig(), "add up to 160.0%: too much"),
        ("big=100%,small", DataConfig(), "add up to 100.0%: too much"),
    ],
)
def test_invalid_text_mixture_is_rejected(own, mixture, data, message):
    with pytest.raises(ValueError, match=message):
        open_texts(data, own(mixture))
