"""Matmuls in fp8, computed by the same kernel call on a CPU."""

from dataclasses import replace

import pytest
import torch

from nanochat.checkpoint import build_model
from nanochat.common import UsageError
from nanochat.dataloader import diff_recipe
from nanochat.distributed import DistConfig, init_distributed
from nanochat.fp8 import E4M3, E5M2, fp8_linear, quantize
from nanochat.gpt import Linear, inference_copy
from nanochat.preflight import enable_fp8
from nanochat.train import train, train_step
from scripts.chat_dpo import ChatDPO
from scripts.chat_rl import ChatRL
from tests.conftest import TINY
from tests.test_train import make_run

N, K, M = 64, 96, 80


@pytest.fixture(autouse=True)
def memory_order_of_a_gpu(monkeypatch):
    """Reject operands that a CPU accepts and a GPU does not."""
    multiply = torch._scaled_mm

    def checked(a, b, **settings):
        assert a.is_contiguous() and b.t().is_contiguous()
        assert E4M3 in (a.dtype, b.dtype)
        return multiply(a, b, **settings)

    monkeypatch.setattr(torch, "_scaled_mm", checked)


def operands(scale=1.0):
    generator = torch.Generator().manual_seed(0)
    x = (scale * torch.randn(N, K, generator=generator)).bfloat16().requires_grad_()
    return x, torch.randn(M, K, generator=generator).requires_grad_()


def relative_error(got, want):
    return float((got.detach().double() - want).norm() / want.norm())


@pytest.mark.parametrize(("dtype", "mantissa_bits"), [(E4M3, 3), (E5M2, 2)])
@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e12])
def test_quantization_error_is_half_a_unit_in_the_last_place(dtype, mantissa_bits, scale):
    x = scale * torch.rand(1000, generator=torch.Generator().manual_seed(0)) + scale
    values, factor = quantize(x, dtype)
    error = (values.float() * factor / x - 1).abs().max()
    assert 2.0 ** -(mantissa_bits + 3) < error <= 2.0 ** -(mantissa_bits + 1) * (1 + 1e-5)
    assert values.float().abs().max() == torch.finfo(dtype).max


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e4])
def test_results_and_gradients_differ_by_no_more_than_rounding(scale):
    x, weight = operands(scale)
    y = fp8_linear(x, weight)
    exact_x, exact_weight = (t.detach().double().requires_grad_() for t in (x, weight))
    exact = exact_x @ exact_weight.T
    generator = torch.Generator().manual_seed(1)
    grad = torch.randn(N, M, generator=generator).bfloat16()
    y.backward(grad)
    exact.backward(grad.double())
    assert (y.dtype, x.grad.dtype, weight.grad.dtype) == (x.dtype, x.dtype, weight.dtype)
    # Rounding errors are independent: relative to the result, each operand adds at most that of
    # one value, 2^-4 (e4m3) or 2^-3 (e5m2); on average, it is less than half
    assert 0.01 < relative_error(y, exact.detach()) < 2**-4
    assert 0.01 < relative_error(x.grad, exact_x.grad) < 2**-3
    assert 0.01 < relative_error(weight.grad, exact_weight.grad) < 2**-3


def test_zeros_give_zeros_and_non_finite_values_stay_visible():
    x, weight = operands()
    assert torch.equal(fp8_linear(torch.zeros_like(x), weight), torch.zeros(N, M).bfloat16())
    for bad in (float("inf"), float("nan")):
        spoiled = x.detach().clone()
        spoiled[0, 0] = bad
        assert not fp8_linear(spoiled, weight).isfinite().all()


def test_matmul_compiles_without_a_graph_break():
    x, weight = operands()
    compiled = torch.compile(fp8_linear, fullgraph=True, backend="aot_eager")
    y = compiled(x, weight)
    assert torch.equal(y, fp8_linear(x, weight))
    y.float().sum().backward()
    assert weight.grad is not None


def test_layers_and_head_train_in_fp8_and_inference_is_unchanged(machine):
    model = build_model(TINY, torch.device("cpu"), torch.float32, 0)
    tokens = torch.arange(2 * TINY.max_seq_len).view(2, -1) % TINY.vocab_size
    with torch.no_grad():
        before = model(tokens)
    enable_fp8(model, machine)
    for name, layer in model.named_modules():
        if isinstance(layer, Linear):
            assert layer.fp8 is ("gate" not in name), name
    with torch.no_grad():
        assert torch.equal(model(tokens), before)
    twin = inference_copy(model)
    assert not any(isinstance(layer, Linear) and layer.fp8 for layer in twin.modules())


def test_training_in_fp8_learns_like_training_without(machine):
    def losses(fp8):
        run, *_ = make_run(machine, num_steps=20)
        if fp8:
            enable_fp8(run.model, machine)
        return [train_step(run, step).loss for step in range(20)]

    exact, rounded = losses(False), losses(True)
    assert rounded[0] == pytest.approx(exact[0], rel=1e-3)
    assert rounded[1:] != exact[1:]
    assert rounded[-1] < 0.5 * rounded[0] and rounded[-1] == pytest.approx(exact[-1], rel=0.1)


def test_infinite_activation_in_fp8_skips_the_step(machine):
    run, *_ = make_run(machine)
    enable_fp8(run.model, machine)
    run.model.embed.weight.data[:] = float("inf")
    before = {k: v.clone() for k, v in run.model.state_dict().items()}
    assert not torch.isfinite(torch.tensor(train_step(run, 0).norm))
    assert all(torch.equal(v, before[k]) for k, v in run.model.state_dict().items())


@pytest.mark.parametrize("fp8", [False, True])
def test_R6_resume_with_another_fp8_setting_is_rejected(machine, base, monkeypatch, fp8):
    run, *_ = make_run(machine, num_steps=1)

    def begin(manager, identity, *rest):
        raise RuntimeError(diff_recipe({}, {"fp8": identity.get("fp8")}))

    monkeypatch.setattr("nanochat.train.CheckpointManager.begin", begin)
    with pytest.raises(RuntimeError) as raised:
        train(replace(run, machine=replace(run.machine, fp8=fp8)))
    assert raised.value.args[0] == (["fp8: was None, now True"] if fp8 else [])


@pytest.mark.parametrize("settings", [ChatRL(), ChatDPO()])
def test_stages_with_rows_of_any_length_reject_fp8(settings):
    machine = DistConfig(dtype="fp8")
    with pytest.raises(ValueError, match="fp8 needs rows of one length"):
        replace(settings, train=replace(settings.train, machine=machine))


@pytest.mark.parametrize("dtype", ["fp8", "bfloat16"])
def test_flag_reaches_the_training_stages(dtype):
    machine = init_distributed(DistConfig("cpu", dtype))
    assert (machine.dtype, machine.fp8) == (torch.bfloat16, dtype == "fp8")


def test_device_without_fp8_is_rejected_with_a_fix(machine, monkeypatch):
    def fails(*args, **settings):
        raise RuntimeError("needs compute capability 8.9\ndetails")

    monkeypatch.setattr(torch, "_scaled_mm", fails)
    model = build_model(TINY, torch.device("cpu"), torch.float32, 0)
    with pytest.raises(UsageError, match="does not work on cpu: needs compute capability 8.9"):
        enable_fp8(model, machine)
    assert not any(isinstance(layer, Linear) and layer.fp8 for layer in model.modules())
