"""Fine-tuning on conversations: packing changes neither losses nor gradients."""

import re

import numpy as np
import pytest
import torch

from nanochat.common import UsageError
from nanochat.eval_bpb import Validation, ValidationConfig
from nanochat.finetune import FEW_STEPS, few_steps_warning, fit_batch
from nanochat.loss import IGNORE
from nanochat.rows import ChatPart, inputs_and_targets
from nanochat.train import document_segments
from tests.conftest import byte_model
from tests.test_rows import CHAT_TOKENIZER as TOKENIZER
from tests.test_rows import chat, mixed_rows, packed_chats


def gradient(model, batches):
    """Mean loss over non-ignored targets of `batches`, and its gradient."""
    model.zero_grad()
    count = sum((targets != IGNORE).sum() for _, targets in batches)
    total = 0.0
    for tokens, targets in batches:
        x, y = torch.from_numpy(tokens), torch.from_numpy(targets)
        loss = model.loss(x, y, document_segments(x, TOKENIZER.bos_id)) / count
        loss.backward()
        total += loss.item()
    return total, torch.cat([p.grad.flatten() for p in model.parameters()])


@pytest.mark.parametrize("changes", [{}, {"window_pattern": "SL"}])
def test_packed_step_equals_separate_chats(changes):
    chats = [chat("q" * (3 + i % 7), "a" * (1 + i)) for i in range(14)]
    packed = packed_chats(chats).open("rows")
    starts = np.flatnonzero(packed == ~TOKENIZER.bos_id)
    separate = [each for each in np.split(packed.flatten(), starts) if len(each) > 1]
    assert len(packed) < len(separate)  # several per row
    model = byte_model(max_seq_len=63, **changes)
    loss, grad = gradient(model, [inputs_and_targets(packed)])
    alone = [inputs_and_targets(each[None]) for each in separate]
    loss_alone, grad_alone = gradient(model, alone)
    assert loss == pytest.approx(loss_alone, rel=1e-5)
    assert (grad - grad_alone).norm() < 1e-5 * grad_alone.norm()
    plain = model.loss(*(torch.from_numpy(x) for x in inputs_and_targets(packed)))
    count = (packed[:, 1:] >= 0).sum()
    assert abs(plain.item() / count - loss) > 1e-4  # else the mask has no effect


def test_R34_a_bucket_without_scorable_answers_is_rejected(dist):
    model = byte_model(max_seq_len=63)

    def score(x, y):
        return model.token_losses(x, y, document_segments(x, TOKENIZER.bos_id))

    def answer_loss(**answers):
        cfg = ValidationConfig(8 * 63)
        parts = {n: ChatPart([chat("q", a) for a in own], {"n": n}) for n, own in answers.items()}
        rows = {name: mixed_rows({name: part}) for name, part in parts.items()}
        return Validation(cfg, rows, TOKENIZER, dist).score(score, 1)

    good = ["a" * 9] * 9
    figures = answer_loss(good=good)
    assert figures and np.isfinite(list(figures.values())).all()
    with pytest.raises(UsageError, match="no scorable token"):
        answer_loss(good=good, empty=[""] * 9)


def test_short_stage_uses_smaller_batches():
    assert fit_batch(524_288, None, 1e9, 2048) == 524_288
    assert fit_batch(524_288, None, 10e6, 2048) == 32_768
    assert fit_batch(524_288, None, 1e6, 2048) == 16_384  # not below 8 rows
    assert fit_batch(524_288, 50, 1e6, 2048) == 524_288  # explicit num_iterations
    assert fit_batch(255 * 2048, None, 10e6, 2048) == 15 * 2048  # of 3 or 5 GPUs


def test_few_steps_warning_names_enough_epochs():
    warning = few_steps_warning(1, batch_tokens=4096, epoch_tokens=1536)
    assert "only 1 step of 4,096 tokens" in warning
    [epochs] = re.findall(r"--num_epochs=(\d+)", warning)
    assert round(int(epochs) * 1536 / 4096) == FEW_STEPS
