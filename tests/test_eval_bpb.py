"""Bits per byte: every token once, bytes exact, and the same whatever the batching."""

import math
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nanochat import eval_bpb
from nanochat.checkpoint import build_model
from nanochat.common import UsageError
from nanochat.distributed import DistContext
from nanochat.eval_bpb import (
    bits_per_byte,
    document_bpb,
    row_batches,
    windows,
)
from nanochat.loss import IGNORE
from nanochat.tokenizer import Tokenizer
from tasks.world import corpus
from tests.conftest import TINY, lively

TOKEN_BYTES = np.array([0, 1, 2, 3, 4, 0, 6, 7])  # tokens 0 and 5 are special


def uniform(tokens, targets):
    """Losses of ln 2 nats for every target, so that bits are counted targets."""
    return torch.where(targets == IGNORE, 0.0, math.log(2.0))


def broken(tokens, targets):
    """Losses that are not finite."""
    return torch.full(targets.shape, math.nan)


@given(n=st.integers(1, 60), T=st.integers(1, 12), data=st.data())
def test_windows_score_every_token_once_with_the_promised_context(n, T, data):
    stride = data.draw(st.integers(1, T))
    ids = np.arange(n + 1)  # ids are positions, so that what is scored names itself
    scored = []
    for tokens, targets in windows(ids, T, stride):
        assert tokens.shape == targets.shape == (T,)
        (places,) = np.nonzero(targets != IGNORE)
        for i in places:
            position = int(targets[i])
            assert tokens[i] == position - 1
            context = i  # tokens in front of tokens[i] in this window
            assert context >= min(position - 1, T - stride)
            scored.append(position)
    assert scored == list(range(1, n + 1))


def test_plain_windows_are_consecutive_pieces_that_start_anew():
    got = [t[t2 != IGNORE].tolist() for t, t2 in windows(np.arange(8), 3, 3)]
    assert got == [[0, 1, 2], [3, 4, 5], [6]]


def test_specials_and_ignored_targets_are_outside_both_sums(machine):
    targets = np.array([[1, 5, 7, IGNORE, 0, 2]])
    [result] = bits_per_byte(uniform, [(targets * 0, targets)], TOKEN_BYTES, machine)
    assert (result.tokens, result.bytes) == (3, 1 + 7 + 2)
    assert result.value == pytest.approx(3 / 10)


def test_R34_nothing_scored_and_broken_models_give_no_figure(machine):
    with pytest.raises(UsageError, match="no token of the text could be scored"):
        _ = bits_per_byte(uniform, [], TOKEN_BYTES, machine)[0].value
    targets = np.array([[1, 2]])
    with pytest.raises(UsageError, match="loss on 2 tokens is nan"):
        bits_per_byte(broken, [(targets, targets)], TOKEN_BYTES, machine)


def test_R24_B9_bpb_is_the_same_for_any_batch_size_and_any_number_of_ranks(machine, tiny_gpt):
    rng = np.random.default_rng(0)
    rows = rng.integers(0, 64, (13, 17))
    sizes, losses = rng.integers(0, 5, 64), tiny_gpt.token_losses

    def measure(size, ranks):
        nats = num_bytes = 0.0
        for rank in range(ranks):
            mine = rows[len(rows) * rank // ranks : len(rows) * (rank + 1) // ranks]
            pieces = [mine[i : i + size] for i in range(0, len(mine), size)]
            [part] = bits_per_byte(losses, row_batches(pieces, size), sizes, machine)
            nats, num_bytes = nats + part.nats, num_bytes + part.bytes
        return nats / math.log(2) / num_bytes

    reference = measure(1, 1)
    for size in (1, 2, 5, 13):
        for ranks in (1, 2, 4):
            assert measure(size, ranks) == pytest.approx(reference, abs=1e-6)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(corpus.documents(0, 0, "train"), 300)


TEXTS = ["Zoë walks \N{SNOWMAN} home, slowly, to 1,234 \t letters.\n" * 2, "a", "Tom is here. " * 9]


def model_of(tokenizer):
    cfg = replace(TINY, vocab_size=tokenizer.vocab_size)
    return lively(build_model(cfg, torch.device("cpu"), torch.float32, seed=0))


@dataclass(frozen=True)
class Together(DistContext):
    """One of several ranks that are threads of this process."""

    box: list = field(kw_only=True)
    all_here: threading.Barrier = field(kw_only=True)

    def sum(self, *values):
        self.box[self.rank] = values
        self.all_here.wait(timeout=60)
        return [sum(each) for each in zip(*self.box, strict=True)]


@pytest.mark.parametrize(("ranks", "rows"), [(3, 2), (2, 4), (7, 1)])
def test_documents_are_scored_the_same_by_any_number_of_ranks(tokenizer, machine, ranks, rows):
    model, shared = model_of(tokenizer), {"box": [()] * ranks, "all_here": threading.Barrier(ranks)}

    def measure(rank):
        one = Together(rank, rank, ranks, machine.device, machine.dtype, **shared)
        return document_bpb(model, TEXTS, tokenizer, 8, rows, one)

    want = document_bpb(model, TEXTS, tokenizer, 8, 4, machine)
    with ThreadPoolExecutor(ranks) as pool:
        for found in pool.map(measure, range(ranks)):
            assert found[1:] == want[1:] and found.nats == pytest.approx(want.nats, rel=1e-6)


@pytest.mark.parametrize(("stride", "rows"), [(16, 1), (16, 4), (8, 3), (1, 7), (3, 2)])
def test_documents_are_scored_as_if_token_by_token_and_bytes_are_those_of_the_text(
    stride, rows, tokenizer, machine
):
    """Against the definition: each token from its own window, alone, with the context promised."""
    model, nats = model_of(tokenizer), 0.0
    for text in TEXTS:
        ids = [tokenizer.bos_id, *tokenizer.encode(text)]
        for place in range(1, len(ids)):  # the first 16 share a window, then each `stride`
            late = max(0, place - 16)
            begin = 0 if not late else -(-late // stride) * stride
            seen = torch.tensor([ids[begin:place]])
            nats -= float(model(seen)[0, -1].detach().log_softmax(-1)[ids[place]])
    found = document_bpb(model, TEXTS, tokenizer, stride, rows, machine)
    assert found.bytes == sum(len(text.encode()) for text in TEXTS)
    assert found.nats == pytest.approx(nats, rel=1e-5)


def test_a_token_that_was_not_scored_is_noticed(tokenizer, machine, monkeypatch):
    """As upstream's sliding window did the other way round: it scored its tail twice."""
    whole = eval_bpb.windows
    monkeypatch.setattr(eval_bpb, "windows", lambda *args: list(whole(*args))[:-1])
    with pytest.raises(AssertionError, match="the texts have"):
        document_bpb(model_of(tokenizer), TEXTS, tokenizer, 8, 4, machine)


@pytest.mark.parametrize("stride", [0, 17])
def test_a_stride_outside_the_window_is_refused(stride, tokenizer, machine):
    with pytest.raises(ValueError, match=str(stride)):
        document_bpb(model_of(tokenizer), TEXTS, tokenizer, stride, 2, machine)
