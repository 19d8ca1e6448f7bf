"""Engine output equals that of the plain model and does not depend on the rest of the batch."""

import os
import subprocess
import sys
import threading
from concurrent.futures import Future
from dataclasses import replace

import pytest
import torch

from nanochat import engine as engine_module
from nanochat.checkpoint import build_model
from nanochat.common import REPOSITORY
from nanochat.engine import Engine, Sampling, most_slots, sample
from nanochat.gpt import copy_weights, inference_copy
from nanochat.serve.scheduler import cancel_all
from nanochat.tokenizer import Tokenizer
from tests.conftest import GOLF_CHANGES, RECURSIVE_CHANGES, TINY, lively, shaped

GREEDY = Sampling(max_new_tokens=12, temperature=0.0)
OPTIONS = {
    "default": {},
    "classic": None,
    "windows": {"window_pattern": "SL", "max_seq_len": 256},
    "one kv head": {"n_kv_head": 1},
    "no value embeddings": {"value_every": 0},
    "no residual scalars": {"residual_scalars": False},
    "no smear": {"smear": False},
    "golf": GOLF_CHANGES,
    "recursive": RECURSIVE_CHANGES,
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """A tokenizer of bytes and special tokens only."""
    return Tokenizer.train(["a b"], 265)


def model_of(tokenizer, **changes):
    cfg = replace(TINY, vocab_size=tokenizer.vocab_size, max_seq_len=48)
    cfg = cfg.classic() if changes.pop("classic", False) else shaped(cfg, **changes)
    return lively(build_model(cfg, torch.device("cpu"), torch.float32, seed=0))


def decode_without_cache(model, prompt, settings, ends):
    """Greedy decoding with a full forward pass per token."""
    ids = list(prompt)
    while len(ids) - len(prompt) < settings.max_new_tokens and len(ids) < model.cfg.max_seq_len:
        token = int(model(torch.tensor([ids]))[0, -1].argmax())
        if token in ends:
            break
        ids.append(token)
    return ids[len(prompt) :]


@pytest.mark.parametrize("option", OPTIONS)
def test_greedy_decoding_equals_full_forward_without_cache(tokenizer, option):
    changes = OPTIONS[option]
    model = model_of(tokenizer, classic=True) if changes is None else model_of(tokenizer, **changes)
    engine = Engine(model, tokenizer, slots=3)
    lengths = (1, 3, 11, 20, 200) if option == "windows" else (1, 3, 11, 20, 7)
    prompts = [[(7 * i + j) % 250 for j in range(n)] for i, n in enumerate(lengths)]
    for prompt, (got,) in zip(prompts, engine.generate(prompts, GREEDY), strict=True):
        assert got.ids == decode_without_cache(model, prompt, GREEDY, engine.ends)


def test_completions_do_not_depend_on_the_batch(tokenizer):
    model = model_of(tokenizer)
    prompts = [[i + 1, 2 * i + 5, 9] for i in range(9)]
    settings = [
        Sampling(
            max_new_tokens=3 + 2 * i, temperature=0.8 + 0.1 * i, top_k=(None, 40)[i % 2], seed=i
        )
        for i in range(9)
    ]
    alone = [
        Engine(model, tokenizer, slots=1).generate([p], s)[0][0].ids
        for p, s in zip(prompts, settings, strict=True)
    ]
    engine = Engine(
        model, tokenizer, slots=4
    )  # fewer slots than prompts, whose completions end at different steps
    rows = [engine.submit(p, s)[0] for p, s in zip(prompts, settings, strict=True)]
    while engine.busy:
        engine.step()
    assert [row.ids for row in rows] == alone
    assert len({len(ids) for ids in alone}) > 3


def test_samples_share_a_prefill_but_not_the_first_token(tokenizer):
    model = model_of(tokenizer)
    engine = Engine(model, tokenizer, slots=5)
    shapes = []
    engine.model.hidden = lambda tokens, view, plain=model.hidden: (
        shapes.append(tuple(tokens.shape)) or plain(tokens, view)
    )
    (samples,) = engine.generate([[5, 6, 7, 8]], Sampling(max_new_tokens=4, seed=3), n=40)
    assert sum(1 for shape in shapes if shape[1] > 1) < 10  # not one prefill per sample
    assert len({row.ids[0] for row in samples if row.ids}) > 10
    again = Engine(model, tokenizer).generate(
        [[5, 6, 7, 8]], Sampling(max_new_tokens=4, seed=3), 40
    )
    assert [row.ids for row in samples] == [row.ids for row in again[0]]


class Scripted:
    """Replaces `sample`: returns scripted tokens; a prompt's first token selects its script."""

    def __init__(self, engine, scripts):
        self.engine, self.scripts = engine, scripts

    def __call__(self, logits, settings, uniform):
        rows = self.engine.active
        tokens = [self.scripts[row.prompt[0]][len(row.ids)] for row in rows]
        return tokens


def test_tool_results_are_injected_and_marked_as_not_sampled(tokenizer, monkeypatch):
    special = tokenizer.special
    call = [special("<|python_start|>"), *tokenizer.encode("6*7"), special("<|python_end|>")]
    answer = [special("<|output_start|>"), *tokenizer.encode("42"), special("<|output_end|>")]
    rest = [*tokenizer.encode("ok"), special("<|assistant_end|>")]
    script = call + [0] * len(answer) + rest
    engine = Engine(model_of(tokenizer), tokenizer, slots=2, tool={"6*7": "42"}.get)
    scripts = {1: script, 2: [*tokenizer.encode("abcd"), special("<|assistant_end|>")]}
    monkeypatch.setattr("nanochat.engine.sample", Scripted(engine, scripts))
    (with_tool,), (plain,) = engine.generate([[1, 3], [2, 4]], Sampling(max_new_tokens=40))
    assert with_tool.ids == call + answer + tokenizer.encode("ok")
    assert with_tool.sampled == [True] * len(call) + [False] * len(answer) + [True] * 2
    assert (with_tool.finish, plain.finish) == ("stop", "stop")
    assert tokenizer.decode(plain.ids) == "abcd"


def test_tool_call_without_a_result_injects_nothing(tokenizer, monkeypatch):
    special = tokenizer.special
    script = [special("<|python_start|>"), 1, 2, special("<|python_end|>"), 3, tokenizer.bos_id]
    engine = Engine(model_of(tokenizer), tokenizer, tool=lambda code: None)
    monkeypatch.setattr("nanochat.engine.sample", Scripted(engine, {1: script}))
    (row,) = engine.generate([[1, 3]], Sampling(max_new_tokens=40))[0]
    assert row.ids == script[:-1] and all(row.sampled)


def test_slow_tool_call_frees_the_slot(tokenizer, monkeypatch):
    special = tokenizer.special
    call = [special("<|python_start|>"), *tokenizer.encode("6*7"), special("<|python_end|>")]
    answer = [special("<|output_start|>"), *tokenizer.encode("42"), special("<|output_end|>")]
    script = call + [0] * len(answer) + [*tokenizer.encode("ok"), special("<|assistant_end|>")]
    later: Future[str | None] = Future()
    engine = Engine(model_of(tokenizer), tokenizer, slots=1, tool=lambda code: later)
    scripts = {1: script, 2: [*tokenizer.encode("abcd"), special("<|assistant_end|>")]}
    monkeypatch.setattr("nanochat.engine.sample", Scripted(engine, scripts))
    (slow,), (other,) = (engine.submit(p, Sampling(max_new_tokens=40)) for p in ([1, 3], [2, 4]))
    while other.finish is None:
        engine.step()
    assert slow.ids == call and slow.finish is None and engine.busy
    assert engine.step() == [] and engine.cache.lengths == [0]
    later.set_result("42")
    while engine.busy:
        engine.step()
    assert slow.ids == call + answer + tokenizer.encode("ok") and slow.finish == "stop"


def test_failed_tool_call_injects_nothing(tokenizer, monkeypatch, capsys):
    special = tokenizer.special
    script = [special("<|python_start|>"), 1, special("<|python_end|>"), 3, tokenizer.bos_id]
    broken: Future[str | None] = Future()
    broken.set_exception(MemoryError("no room"))
    engine = Engine(model_of(tokenizer), tokenizer, tool=lambda code: broken)
    monkeypatch.setattr("nanochat.engine.sample", Scripted(engine, {1: script}))
    (row,) = engine.generate([[1, 3]], Sampling(max_new_tokens=40))[0]
    assert row.ids == script[:-1] and row.finish == "stop"
    assert "tool call failed: MemoryError: no room" in capsys.readouterr().out


def test_slow_and_instant_tools_give_the_same_completion(tokenizer, monkeypatch):
    model = model_of(tokenizer)
    call = [tokenizer.special("<|python_start|>"), 65, tokenizer.special("<|python_end|>")]

    def complete(tool):
        engine = Engine(model, tokenizer, tool=tool)
        engine.ends = set()

        def call_first(logits, settings, uniform):
            n = len(engine.active[0].ids)
            return [call[n]] if n < len(call) else sample(logits, settings, uniform)

        monkeypatch.setattr("nanochat.engine.sample", call_first)
        return engine.generate([[1, 2, 3]], Sampling(max_new_tokens=30, seed=1))[0][0].ids

    done: Future[str | None] = Future()
    done.set_result("xyz")
    ids = complete(lambda code: done)
    assert ids == complete(lambda code: "xyz") and len(ids) == 30
    assert tokenizer.encode("xyz") == ids[4:7]


def test_cancel_all_drops_pending_tool_calls(tokenizer):
    engine = Engine(model_of(tokenizer), tokenizer)
    row, waiting = (engine.submit([1, 2], Sampling())[0] for _ in range(2))
    engine.step()
    row.pending_tool_call = Future()
    engine.evict()
    assert engine.calling == [row]
    cancel_all(engine)
    assert not engine.busy and row.finish == waiting.finish == "cancelled"


def test_completion_stops_at_max_new_tokens_or_context_end(tokenizer):
    engine = Engine(model_of(tokenizer), tokenizer, capacity=16)
    engine.ends = set()
    (short,) = engine.generate([[1, 2]], Sampling(max_new_tokens=5))[0]
    (long,) = engine.generate([[1, 2]], Sampling(max_new_tokens=500))[0]
    assert (len(short.ids), short.finish) == (5, "length")
    assert (len(long.ids), long.finish) == (14, "length")
    with pytest.raises(ValueError, match="16"):
        engine.submit([1] * 16, Sampling())
    with pytest.raises(ValueError, match="must have 1 to"):
        engine.submit([], Sampling())


def test_cancelled_completion_frees_its_slot(tokenizer):
    engine = Engine(model_of(tokenizer), tokenizer)
    (gone,), (stays,) = (engine.submit([4, n], Sampling(max_new_tokens=9)) for n in (5, 6))
    engine.step()
    engine.cancel(gone)
    assert engine.active == [stays] and gone.finish == "cancelled" and len(gone.ids) <= 1


@pytest.mark.parametrize("option", ["default", "no smear"])
def test_inference_copy_in_compute_dtype_gives_equal_logits(tokenizer, option):
    model = model_of(tokenizer, **OPTIONS[option])
    model.dtype = torch.bfloat16
    twin = inference_copy(model)
    assert twin.blocks[0].mlp.up.weight.dtype == torch.bfloat16
    tokens = torch.randint(250, (3, 20), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(model(tokens), twin(tokens))
        for weight in model.parameters():
            weight.mul_(1.25)
        assert not torch.equal(model(tokens), twin(tokens))
        addresses = [weight.data_ptr() for weight in twin.parameters()]
        copy_weights(twin, model)
        assert torch.equal(model(tokens), twin(tokens))
    assert addresses == [weight.data_ptr() for weight in twin.parameters()]


def test_B14_the_cache_has_the_compute_dtype(tokenizer):
    model = model_of(tokenizer)
    model.dtype = torch.bfloat16
    engine = Engine(inference_copy(model), tokenizer)
    assert engine.cache.keys[0].dtype == torch.bfloat16
    (row,) = engine.generate([[1, 2, 3]], Sampling(max_new_tokens=4))[0]
    assert row.finish


@pytest.mark.parametrize("compiler", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_float16_generation_agrees_with_float32(tokenizer, monkeypatch, compiler):
    if not compiler:  # which takes a minute
        plain = engine_module.next_logits
        monkeypatch.setattr(engine_module, "compiled_next_logits", lambda: plain)
    model, prompts = model_of(tokenizer), [[1, 2, 3], [4] * 9]
    tokens = torch.randint(250, (3, 20), generator=torch.Generator().manual_seed(0))
    want, results = model(tokens).detach(), []
    for dtype in (torch.float32, torch.float16):
        model.dtype = dtype
        twin = inference_copy(model)
        torch.testing.assert_close(twin(tokens), want, rtol=0, atol=0.02)
        engine = Engine(twin, tokenizer, compiled=True)
        assert engine.cache.keys[0].dtype == dtype
        results.append([row.ids for (row,) in engine.generate(prompts, GREEDY)])
        assert engine.decode_step.compiled
    assert results[0] == results[1]


# ---- sampling ----------------------------------------------------------------------------------


def frequencies(settings, n=4000):
    """Sampling frequency of each of 5 tokens, and their logits."""
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0, 1.5]]).repeat(n, 1)
    drawn = sample(
        logits, [settings] * n, torch.rand(n, generator=torch.Generator().manual_seed(1))
    )
    return torch.bincount(torch.tensor(drawn), minlength=5) / n, logits[0]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_sampling_matches_softmax_at_the_temperature(temperature):
    got, logits = frequencies(Sampling(temperature=temperature))
    torch.testing.assert_close(got, (logits / temperature).softmax(0), atol=0.03, rtol=0)


def test_top_k_and_top_p_keep_the_right_tokens():
    p = torch.tensor([2.0, 1.0, 0.0, -1.0, 1.5]).softmax(0)  # .47 .17 .06 .02 .28
    assert set(frequencies(Sampling(top_k=2))[0].nonzero().flatten().tolist()) == {0, 4}
    assert set(frequencies(Sampling(top_p=0.5))[0].nonzero().flatten().tolist()) == {0, 4}
    assert set(frequencies(Sampling(top_p=0.4))[0].nonzero().flatten().tolist()) == {0}
    got, _ = frequencies(Sampling(top_k=2))
    assert got[0] == pytest.approx(float(p[0] / (p[0] + p[4])), abs=0.03)


@pytest.mark.parametrize("temperature", [1e-37, 1e-42, 1e-300])
@pytest.mark.parametrize("top_k", [None, 5])
def test_tiny_temperatures_sample_greedily(temperature, top_k):
    logits = 10 * torch.randn(5, 30, generator=torch.Generator().manual_seed(2))
    drawn = sample(logits, [Sampling(temperature=temperature, top_k=top_k)] * 5, [0.99] * 5)
    assert drawn == logits.argmax(1).tolist()


def test_each_row_uses_its_own_settings():
    logits = torch.randn(4, 30, generator=torch.Generator().manual_seed(2))
    settings = [
        Sampling(temperature=0),
        Sampling(top_k=1, temperature=3),
        Sampling(top_p=0.01),
        Sampling(top_k=5),
    ]
    drawn = sample(logits, settings, [0.99] * 4)
    assert drawn[:3] == logits[:3].argmax(1).tolist()
    assert drawn[3] in logits[3].topk(5).indices.tolist()
    assert drawn[3] != int(logits[3].argmax())


def test_deterministic_sampling_avoids_float_cumsum(monkeypatch):
    """Float cumsum raises on CUDA in deterministic mode; sampled tokens stay the same."""
    plain = torch.Tensor.cumsum

    def as_on_cuda(x, *args, **kwargs):
        if x.is_floating_point() and torch.are_deterministic_algorithms_enabled():
            raise RuntimeError("cumsum_cuda_kernel does not have a deterministic implementation")
        return plain(x, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "cumsum", as_on_cuda)
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(1, 5000, generator=generator).mul(3).expand(500, -1)
    uniform = torch.rand(500, generator=generator).tolist()
    for settings in (Sampling(), Sampling(top_p=0.9), Sampling(top_k=50)):
        want = sample(logits, [settings] * 500, uniform)
        torch.use_deterministic_algorithms(True)
        try:
            got = sample(logits, [settings] * 500, uniform)
        finally:
            torch.use_deterministic_algorithms(False)
        differ = sum(one != other for one, other in zip(want, got, strict=True))
        assert differ < 5  # a uniform number may lie within rounding error of a boundary
        assert max(got) < 5000


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"top_k": 0},
        {"top_p": 0.0},
        {"max_new_tokens": 0},
    ],
)
def test_invalid_settings_raise_and_name_the_field(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        Sampling(**bad)


# ---- the compiled step -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "option",
    ["default", *(pytest.param(o, marks=pytest.mark.slow) for o in ("windows", "recursive"))],
)
def test_compiled_step_equals_eager_with_a_changing_batch(tokenizer, option):
    model = inference_copy(model_of(tokenizer, **OPTIONS[option]))
    prompts = [[(7 * i + j) % 250 for j in range(n)] for i, n in enumerate((1, 20, 3, 11, 7))]
    results = []
    for compiled in (False, True):
        engine = Engine(model, tokenizer, slots=3, compiled=compiled)
        results.append([row.ids for (row,) in engine.generate(prompts, GREEDY)])
        assert engine.decode_step.compiled == compiled
    assert results[0] == results[1]


def test_captured_steps_equal_eager_with_a_changing_batch(tokenizer, monkeypatch):
    """A stand-in for a CUDA graph: each replay uses the captured tensors."""
    sizes = []

    def record(self, tokens, positions, key_positions):
        sizes.append((len(tokens), len(key_positions)))
        logits = self.run_fused(tokens, positions, key_positions).clone()

        def replay(new_tokens, new_positions):
            tokens.copy_(new_tokens)
            positions.copy_(new_positions)
            return logits.copy_(self.run_fused(tokens, positions, key_positions))

        return replay

    monkeypatch.setattr(engine_module, "compiled_next_logits", lambda: engine_module.next_logits)
    monkeypatch.setattr(engine_module.DecodeStep, "record", record)
    model = inference_copy(model_of(tokenizer, max_seq_len=128))
    prompts = [[(7 * i + j) % 250 for j in range(n)] for i, n in enumerate((1, 3, 7, 40, 66))]
    want = Engine(model, tokenizer, slots=3).generate(prompts, GREEDY)
    engine = Engine(model, tokenizer, slots=3, compiled=True)
    engine.decode_step.recorded = True
    got = engine.generate(prompts, GREEDY)
    assert [row.ids for (row,) in got] == [row.ids for (row,) in want]
    assert engine.decode_step.compiled and len(set(sizes)) == len(sizes)
    assert {rows for rows, _ in sizes} <= {1, 2, 3} and {seen for _, seen in sizes} == {32, 64, 128}


IN_THREADS = """
import ctypes, threading
import torch
import nanochat.engine
from nanochat.engine import Engine
from nanochat.checkpoint import build_model
from nanochat.gpt import GPTConfig, inference_copy
from nanochat.engine import Sampling
from nanochat.tokenizer import Tokenizer

# The null GPU computes no values: turn off everything that depends on them
torch.backends.cuda.enable_cudnn_sdp(False)
nanochat.engine.LOGIT_TOLERANCE = {torch.bfloat16: float("inf")}
nanochat.engine.sample = lambda logits, settings, uniform: [int(u * 200) for u in uniform]
cfg = GPTConfig(265, 2, 64, 2, 1, 32, 128)
model = inference_copy(build_model(cfg, torch.device("cuda"), torch.bfloat16, 0))
replays = ctypes.CDLL(None).nullgpu_replays
engine = Engine(model, Tokenizer.train(["noise"], 265), 4, compiled=True)

def work():
    before = replays()
    engine.generate([[1, 2, 3]], Sampling(20))
    engine.generate([[1, 2], [4, 5], [7]], Sampling(20))
    print("compiled", engine.decode_step.compiled, "replays", replays() - before, flush=True)

work()
thread = threading.Thread(target=work)
thread.start()
thread.join()
"""


@pytest.mark.slow
def test_gpu_engine_replays_graphs_in_every_thread(null_gpu):
    """On the null GPU, every step of every thread is a graph replay; none falls back to eager."""
    preloaded = {
        "LD_LIBRARY_PATH": str(null_gpu),
        "LD_PRELOAD": f"{null_gpu}/nullgpu.so:{null_gpu}/nullblas.so",
        "TRITON_LIBCUDA_PATH": str(null_gpu),
    }
    done = subprocess.run(
        [sys.executable, "-c", IN_THREADS],
        cwd=REPOSITORY, env={**os.environ, **preloaded}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split("\n") == ["compiled True replays 40"] * 2 + [""], done.stdout


@pytest.mark.slow
def test_models_of_the_same_shape_share_a_compilation(tokenizer):
    counters = torch._dynamo.utils.counters["stats"]
    for seed in (1, 2):
        model = inference_copy(model_of(tokenizer))
        engine = Engine(model, tokenizer, slots=2, compiled=True)
        engine.generate([[1, 2], [3]], replace(GREEDY, seed=seed))
        engine.generate([[4]], GREEDY)
        if seed == 1:
            compiled = counters["unique_graphs"]
    assert counters["unique_graphs"] == compiled > 0


def test_each_thread_may_compile_many_model_shapes(tokenizer, monkeypatch):
    """PyTorch's limit of recompilations is set per thread."""
    limits = []

    def step(*args):
        limits.append(torch._dynamo.config.recompile_limit)
        return engine_module.next_logits(*args)

    monkeypatch.setattr(engine_module, "compiled_next_logits", lambda: step)
    engine = Engine(model_of(tokenizer), tokenizer, compiled=True)
    for _ in range(2):
        thread = threading.Thread(target=engine.generate, args=([[1, 2]], GREEDY))
        thread.start()
        thread.join()
    assert min(limits) == 64


def test_compile_failure_is_reported_and_falls_back_to_eager(tokenizer, monkeypatch, capsys):
    def broken(*args):
        raise RuntimeError("no compiler")

    monkeypatch.setattr(engine_module, "compiled_next_logits", lambda: broken)
    model = model_of(tokenizer)
    want = Engine(model, tokenizer).generate([[1, 2, 3]], GREEDY)[0][0].ids
    engine = Engine(model, tokenizer, compiled=True)
    assert engine.generate([[1, 2, 3]], GREEDY)[0][0].ids == want
    assert "not compiled: RuntimeError: no compiler" in capsys.readouterr().out
    assert not engine.decode_step.compiled


def test_wrong_compiled_logits_fall_back_to_eager(tokenizer, monkeypatch, capsys):
    step = engine_module.next_logits
    monkeypatch.setattr(engine_module, "compiled_next_logits", lambda: lambda *a: step(*a) + 1)
    model = model_of(tokenizer)
    want = Engine(model, tokenizer).generate([[1, 2, 3]], GREEDY)[0][0].ids
    got = Engine(model, tokenizer, compiled=True).generate([[1, 2, 3]], GREEDY)[0][0].ids
    assert got == want and "logits differ by 1" in capsys.readouterr().out


def test_compiled_step_wrong_only_for_several_rows_is_detected(tokenizer, monkeypatch, capsys):
    def broken(*args):
        logits = engine_module.next_logits(*args)
        return logits + 5 if len(logits) > 1 else logits

    monkeypatch.setattr(engine_module, "compiled_next_logits", lambda: broken)
    model, prompts = model_of(tokenizer), [[1, 2, 3], [4, 5]]
    want = Engine(model, tokenizer).generate(prompts, GREEDY)
    engine = Engine(model, tokenizer, compiled=True)
    engine.generate(prompts[:1], GREEDY)
    assert engine.decode_step.compiled and not capsys.readouterr().out
    got = engine.generate(prompts, GREEDY)
    assert [row.ids for (row,) in got] == [row.ids for (row,) in want]
    assert "logits differ by 5" in capsys.readouterr().out
    assert not engine.decode_step.compiled


def test_fused_qkv_equals_separate_projections(tokenizer):
    model = model_of(tokenizer, n_kv_head=1)
    twin = inference_copy(model)
    tokens = torch.tensor([[1, 2, 3, 4]])
    torch.testing.assert_close(twin(tokens), model(tokens))
    attention = twin.blocks[0].attention
    assert attention.qkv_weight is not None and model.blocks[0].attention.qkv_weight is None
    assert attention.k.weight.data_ptr() != model.blocks[0].attention.k.weight.data_ptr()


def test_cache_takes_at_most_a_quarter_of_the_memory(tokenizer):
    model = model_of(tokenizer)
    one = model.new_cache(1).nbytes
    assert most_slots(model, 4 * one * 7 + 3) == 7
    assert most_slots(model, 1) == 1 and most_slots(model, 10**15) == 64
    assert Engine(model, tokenizer).slots == 64
