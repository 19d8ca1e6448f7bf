"""Kernel selection: kernels are probed, and skipped with a reason if they fail."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch

from nanochat import attention, preflight
from nanochat.checkpoint import build_model
from nanochat.common import UsageError
from nanochat.gpt import inference_copy
from nanochat.preflight import (
    KernelConfig,
    choose_attention,
    choose_compile,
    choose_engine_compile,
    probe_attention,
    set_kernels,
)
from scripts.chat_cli import ChatCli
from scripts.chat_web import ChatWeb
from tests.conftest import TINY, lively

LAST_HEAD = torch.tensor([[0.0], [1.0]])  # of the two of TINY's keys
BROKEN = {
    "raises": lambda q, k, v, mask, s: (_ for _ in ()).throw(RuntimeError("no kernel image")),
    "wrong": lambda q, k, v, mask, s: attention.attend_plain(q, k, v, None, s, mask) + 1.0,
    "not causal": lambda q, k, v, mask, s: (
        v.float().mean(1, True).expand(-1, v.size(1), q.size(2), -1)
    ),
    "another dtype": lambda q, k, v, mask, s: attention.attend_plain(
        q, k, v, None, s, mask
    ).double(),
    "no gradient": lambda q, k, v, mask, s: attention.attend_plain(q, k, v, None, s, mask).detach(),
    "wrong gradients": lambda q, k, v, mask, s: attention.attend_plain(
        q, k + 0.2 * (k - k.detach()), v, None, s, mask
    ),
    "wrong gradients of the last head": lambda q, k, v, mask, s: attention.attend_plain(
        q, k + 0.2 * (k - k.detach()) * LAST_HEAD, v, None, s, mask
    ),
    "ignores masks": lambda q, k, v, mask, s: attention.attend_plain(q, k, v, None, s),
    "one mask for all rows": lambda q, k, v, mask, s: attention.attend_plain(
        q, k, v, None, s, None if mask is None else mask[:1]
    ),
    "wrong beyond 256 tokens": lambda q, k, v, mask, s: beyond(
        attention.attend_plain(q, k, v, None, s, mask), 256
    ),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_B13_broken_kernel_fails_its_probe(kind, machine, monkeypatch, capsys):
    cfg = replace(TINY, max_seq_len=300)
    assert choose_attention(cfg, machine) == "sdpa"
    monkeypatch.setattr(attention, "attend_sdpa", BROKEN[kind])
    assert choose_attention(cfg, machine) == "plain"
    assert "skipping attention kernel sdpa: " in capsys.readouterr().out


def beyond(y, T):
    """Attention output with infinite values from token T on."""
    return torch.cat((y[:, :T], y[:, T:] * math.inf), dim=1) if y.size(1) > T else y


def rounded(x):
    """Round to the 10-bit mantissa of TF32."""
    whole = (x.contiguous().view(torch.int32) + 0x1000) & ~0x1FFF
    return x + (whole.view(torch.float32) - x).detach()


def test_float32_kernel_may_round_to_tf32_if_allowed(machine, monkeypatch):
    def tf32(q, k, v, mask, scale):
        return attention.attend_plain(*map(rounded, (q, k, v)), None, scale, mask)

    monkeypatch.setattr(attention, "attend_sdpa", tf32)
    cfg = replace(TINY, n_head=2, head_dim=4096)  # many values, some of them large
    assert "differs" in (probe_attention("sdpa", cfg, machine) or "")
    torch.set_float32_matmul_precision("high")
    try:
        assert probe_attention("sdpa", cfg, machine) is None
    finally:
        torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize("shape", [TINY, replace(TINY, n_kv_head=TINY.n_head)])
def test_gradients_of_flash_attention_3_are_compared(machine, monkeypatch, shape):
    loaded, factor = [], 1.0

    def attend_fa3(q, k, v, window, scale):
        k = k + (factor - 1) * (k - k.detach())  # the same keys, other gradients
        return attention.attend_plain(q, k, v, window, scale)

    monkeypatch.setattr(preflight, "load_fa3", loaded.append)
    monkeypatch.setattr(attention, "attend_fa3", attend_fa3)
    monkeypatch.setattr(attention, "segment_block_mask", attention.segment_mask)
    assert probe_attention("fa3", shape, machine) is None
    assert set(loaded) == {machine.device}
    factor = 1.2
    assert "has gradients that differ" in (probe_attention("fa3", shape, machine) or "")


def test_kernel_is_compared_with_float64_attention(machine, monkeypatch):
    seen = set()

    def recorded(q, *rest):
        seen.add((q.dtype, q.size(2)))
        return attention.attend_plain(q, *rest)

    monkeypatch.setattr(preflight, "attend_plain", recorded)
    assert probe_attention("sdpa", TINY, machine) is None
    assert seen == {(torch.float64, 2)}  # one group of heads at a time


def test_R17_kernel_is_skipped_if_probe_runs_out_of_memory(machine, monkeypatch, capsys):
    def out_of_memory(*args):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(preflight, "attend_plain", out_of_memory)
    assert choose_attention(TINY, machine) == "plain"
    assert "OutOfMemoryError: CUDA out of memory" in capsys.readouterr().out


def test_kernel_that_ignores_masks_is_skipped_entirely(machine, monkeypatch, capsys):
    monkeypatch.setattr(attention, "attend_sdpa", BROKEN["ignores masks"])
    assert choose_attention(TINY, machine) == "plain"
    assert "with a segment mask" in capsys.readouterr().out


def test_deterministic_run_does_not_use_flash_attention_3(machine, monkeypatch):
    gpu = replace(machine, device=torch.device("cuda"))
    monkeypatch.setattr(preflight, "probe_works", lambda *args: True)
    assert choose_attention(TINY, gpu) == "fa3"
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert choose_attention(TINY, gpu) == "flex"


def test_compiled_cpu_model_uses_blockwise_attention(machine):
    assert choose_attention(TINY, machine, compiled=True) == "blocks"
    assert choose_attention(TINY, machine) == "sdpa"


def test_blockwise_losses_match_and_engine_uses_sdpa(machine):
    models = [build_model(TINY, machine.device, machine.dtype, 0) for _ in range(2)]
    tokens = torch.randint(64, (3, TINY.max_seq_len), generator=torch.Generator().manual_seed(0))
    segments = (tokens % 16 == 0).cumsum(1)
    for block in models[1].blocks:
        torch.nn.init.normal_(block.attention.out.weight, std=0.1, generator=seeded())
        block.attention.backend = "blocks"
    for block in models[0].blocks:
        torch.nn.init.normal_(block.attention.out.weight, std=0.1, generator=seeded())
    for own in (None, segments):
        ours, theirs = (model.token_losses(tokens, tokens, own) for model in models)
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    assert inference_copy(models[1]).blocks[0].attention.backend == "sdpa"


@torch.no_grad()
def test_layers_share_flex_masks_and_engine_uses_none(machine, monkeypatch):
    from torch.nn.attention import flex_attention

    monkeypatch.setattr(attention, "compiled_flex", partial(getattr, flex_attention))
    counters = torch._dynamo.utils.counters["stats"]
    cfg = replace(TINY, n_layer=5, max_seq_len=150, window_pattern="SL")
    model = lively(build_model(cfg, machine.device, machine.dtype, 0))
    tokens = torch.randint(64, (1, 150), generator=seeded())
    segments = (tokens % 16 == 0).cumsum(1)
    want, apart = model.hidden(tokens), model.hidden(tokens, segments=segments)
    for block in model.blocks:
        block.attention.backend = "flex"
    model.compile(backend="eager")
    attention.block_mask.cache_clear()
    torch._dynamo.reset()
    for _ in range(2):
        torch.testing.assert_close(model.hidden(tokens), want, rtol=1e-4, atol=1e-4)
        found = model.hidden(tokens, segments=segments)
        torch.testing.assert_close(found, apart, rtol=1e-4, atol=1e-4)
    assert attention.block_mask.cache_info().misses == 1  # full attention has no mask
    twin, graphs = inference_copy(model), counters["unique_graphs"]
    for T in (3, 4, 5):
        torch.testing.assert_close(twin.hidden(tokens[:, :T]), want[:, :T], rtol=1e-4, atol=1e-4)
    assert counters["unique_graphs"] == graphs > 0


def seeded():
    return torch.Generator().manual_seed(1)


def test_compilation_is_skipped_for_short_runs(machine):
    assert not choose_compile(KernelConfig(), machine, train_seconds=5)
    assert choose_compile(KernelConfig(compile=True), machine, train_seconds=5)
    assert not choose_compile(KernelConfig(compile=False), machine, train_seconds=1e9)


def test_compilation_is_skipped_if_compiler_fails(machine, monkeypatch, capsys):
    def broken(*args, **kwargs):
        raise RuntimeError("no compiler")

    monkeypatch.setattr(preflight.torch, "compile", broken)
    assert not choose_compile(KernelConfig(), machine, train_seconds=1e9)
    assert "no compiler" in capsys.readouterr().out


def test_training_on_a_gpu_without_a_compiler_stops(tiny_gpt, machine, monkeypatch):
    def broken(device):
        raise RuntimeError("no compiler")

    gpu = replace(machine, device=torch.device("cuda"))
    monkeypatch.setattr(type(machine), "device_name", "NVIDIA H100")
    monkeypatch.setattr(preflight, "probe_compiler", broken)
    monkeypatch.setattr(preflight, "choose_attention", lambda *_: "plain")
    with pytest.raises(UsageError, match="does not work on this NVIDIA H100.*\n.*--compile=0"):
        set_kernels(KernelConfig(), tiny_gpt, gpu, 1e9, optimizer=object())
    assert not set_kernels(KernelConfig(compile=False), tiny_gpt, gpu, 1e9, optimizer=object())
    assert not set_kernels(KernelConfig(), tiny_gpt, gpu, 1e9)  # for evaluation


def test_engine_is_compiled_on_gpu_by_default(machine, monkeypatch):
    monkeypatch.setattr(preflight, "probe_compiler", lambda device: None)
    gpu = replace(machine, device=torch.device("cuda"))
    for flags in (ChatWeb(), ChatCli()):
        assert choose_engine_compile(flags.compile_engine, gpu, most_tokens=0)
        assert not choose_engine_compile(flags.compile_engine, machine, most_tokens=0)
    assert not choose_engine_compile(False, gpu, most_tokens=0)
