"""Document bits per byte: each token scored once, enough context, any number of ranks."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nanochat.checkpoint import build_model
from nanochat.distributed import DistContext
from nanochat.golf import documents
from nanochat.golf.documents import document_bpb, make_windows
from nanochat.loss import IGNORE
from nanochat.tokenizer import Tokenizer
from tasks.world import corpus
from tests.conftest import TINY, lively


@given(n=st.integers(1, 60), T=st.integers(1, 12), data=st.data())
def test_windows_score_each_token_once_with_enough_context(n, T, data):
    stride = data.draw(st.integers(1, T))
    ids = np.arange(n + 1)  # ids are positions
    scored = []
    for tokens, targets in make_windows(ids, T, stride):
        assert tokens.shape == targets.shape == (T,)
        (scored_here,) = np.nonzero(targets != IGNORE)
        for i in scored_here:
            position = int(targets[i])
            assert tokens[i] == position - 1
            context = i  # tokens before tokens[i] in this window
            assert context >= min(position - 1, T - stride)
            scored.append(position)
    assert scored == list(range(1, n + 1))


def test_full_stride_windows_do_not_overlap():
    got = [t[t2 != IGNORE].tolist() for t, t2 in make_windows(np.arange(8), 3, 3)]
    assert got == [[0, 1, 2], [3, 4, 5], [6]]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(corpus.documents(0, 0, "train"), 300)


TEXTS = ["Zoë walks \N{SNOWMAN} home, slowly, to 1,234 \t letters.\n" * 2, "a", "Tom is here. " * 9]


def model_of(tokenizer):
    cfg = replace(TINY, vocab_size=tokenizer.vocab_size)
    return lively(build_model(cfg, torch.device("cpu"), torch.float32, seed=0))


@dataclass(frozen=True)
class Together(DistContext):
    """A rank that runs as a thread in this process."""

    box: list = field(kw_only=True)
    all_here: threading.Barrier = field(kw_only=True)

    def sum(self, *values):
        self.box[self.rank] = values
        self.all_here.wait(timeout=60)
        return [sum(each) for each in zip(*self.box, strict=True)]


@pytest.mark.parametrize(("ranks", "rows"), [(3, 2), (2, 4), (7, 1)])
def test_document_bpb_is_independent_of_number_of_ranks(tokenizer, machine, ranks, rows):
    model, shared = model_of(tokenizer), {"box": [()] * ranks, "all_here": threading.Barrier(ranks)}

    def measure(rank):
        one = Together(rank, rank, ranks, machine.device, machine.dtype, **shared)
        return document_bpb(model, TEXTS, tokenizer, 8, rows, one)

    want = document_bpb(model, TEXTS, tokenizer, 8, 4, machine)
    with ThreadPoolExecutor(ranks) as pool:
        for found in pool.map(measure, range(ranks)):
            assert (found.bytes, found.tokens) == (want.bytes, want.tokens)
            assert found == pytest.approx(want, rel=1e-6)


@pytest.mark.parametrize(("stride", "rows"), [(16, 1), (16, 4), (8, 3), (1, 7), (3, 2)])
def test_document_bpb_matches_token_by_token_reference(stride, rows, tokenizer, machine):
    """The reference scores each token separately, in its own window."""
    model, nats = model_of(tokenizer), 0.0
    for text in TEXTS:
        ids = [tokenizer.bos_id, *tokenizer.encode(text)]
        for i in range(1, len(ids)):  # one window for the first 16, then one per `stride` tokens
            late = max(0, i - 16)
            begin = 0 if not late else -(-late // stride) * stride
            seen = torch.tensor([ids[begin:i]])
            nats -= float(model(seen)[0, -1].detach().log_softmax(-1)[ids[i]])
    found = document_bpb(model, TEXTS, tokenizer, stride, rows, machine)
    assert found.bytes == sum(len(text.encode()) for text in TEXTS)
    assert found.nats == pytest.approx(nats, rel=1e-5)


def test_unscored_token_raises(tokenizer, machine, monkeypatch):
    """Upstream had the opposite bug: its sliding window scored the tail twice."""
    whole = documents.make_windows
    monkeypatch.setattr(documents, "make_windows", lambda *args: list(whole(*args))[:-1])
    with pytest.raises(AssertionError, match="the texts have"):
        document_bpb(model_of(tokenizer), TEXTS, tokenizer, 8, 4, machine)


@pytest.mark.parametrize("stride", [0, 17])
def test_stride_outside_window_is_rejected(stride, tokenizer, machine):
    with pytest.raises(ValueError, match=str(stride)):
        document_bpb(model_of(tokenizer), TEXTS, tokenizer, stride, 2, machine)
