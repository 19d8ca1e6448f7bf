"""Micro-batch size and memory: what fits is found, what does not is an error with its fix."""

import pytest
import torch

from nanochat.dist import peak_flops
from tests.faulty import crowd, during_step
from tests.training_runs import SMALL, curve, folder, losses, python, saved_steps, torchrun

pytestmark = pytest.mark.usefixtures("one_thread")


SHORT = [*SMALL, "--num_iterations=2", "--model_tag=short"]


def allocate(now, model, tokens, loss):
    """PyTorch's allocator for CPUs fails for more than two rows."""
    if len(tokens) > 2:
        torch.empty(1 << 50)


def test_B16_error_names_a_device_batch_size_that_divides(trained, command):
    text = command.rejects("base_train", *SHORT, "--device_batch_size=5")
    assert "device_batch_size 5" in text and "use 4" in text
    for rows in (2, 64):  # at most all rows of a step
        command.works("base_train", *SHORT, f"--device_batch_size={rows}")
    assert len(losses(trained, "short")) == 2


@pytest.mark.parametrize("fault", [crowd, allocate])
def test_R17_rows_that_do_not_fit_are_halved(trained, command, monkeypatch, fault):
    with monkeypatch.context() as patch:
        during_step(fault, patch.setattr)
        text = command.rejects("base_train", *SHORT, "--device_batch_size=4")
        assert "device_batch_size=4" in text and "omit --device_batch_size" in text
        text = command.works("base_train", *SHORT)
        assert "out of memory" in text and "device_batch_size=2" in text
    assert saved_steps(folder(trained, "short")) == [2]


def test_R17_row_that_does_not_fit_is_an_error_with_a_fix(trained, command, monkeypatch):
    def full(*_):
        raise torch.OutOfMemoryError

    during_step(full, monkeypatch.setattr)
    text = command.rejects("base_train", *SHORT)
    assert "device_batch_size=1" in text and "smaller --depth" in text


def test_R17_ranks_agree_on_rows_that_fit_on_each(trained):
    words = [*torchrun(2), "-m", "tests.faulty", "crowd", "1", "base_train", *SMALL]
    text = python(trained, *words, "--model_tag=crowded")
    assert "device_batch_size=2" in text
    for name in ("loss", "grad_norm"):
        found, want = (curve(folder(trained, tag), name) for tag in ("crowded", "one"))
        assert found == pytest.approx(want, rel=1e-4)


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA A100-SXM4-40GB", 312e12),
        ("NVIDIA L40", 181e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA RTX A1000", None),
        ("NVIDIA A10G", None),
    ],
)
def test_peak_flops_are_those_of_the_named_gpu(name, peak):
    assert peak_flops(name) == peak
