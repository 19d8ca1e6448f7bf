"""
The speed of generation: how fast prompts are read and answers written.

    shape -> untrained model -> prompts of noise -> tokens/s of prefill and decode, by batch size

Beside it, transformers generates with the same weights, exported, in turn with us. What tokens are
makes no difference to the time, so this needs neither data nor a trained model.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from nanochat.bench.table import Findings, Rate
from nanochat.bench.train import read_bandwidth
from nanochat.checkpoint import build_model
from nanochat.distributed import Machine
from nanochat.engine import Engine, Sampling
from nanochat.gpt import GPT, GPTConfig, for_inference
from nanochat.hardware import peak_memory_bytes
from nanochat.tokenizer import Tokenizer

PATH = "Generation"
PEER = "transformers"
PROMPT_TOKENS = 128
NEW_TOKENS = 128
BATCHES = (1, 8, 64)
USERS = (16, 64, 256)  # asking at once, of 64 slots
TOP_K = 50

# Ids of prompts, tokens of each answer -> seconds: what a peer's generation is to us
Generate = Callable[[Sequence[Sequence[int]], int], float]


class EngineTimes(NamedTuple):
    """Seconds until all prompts were read and had their first token, and for the tokens after."""

    first: float
    rest: float


def bench_engine(
    cfg: GPTConfig,
    machine: Machine,
    repeats: int,
    found: Findings,
    peer: Callable[[GPT, Tokenizer], Generate] | None = None,
) -> None:
    """
    Prefill and decode by batch, ragged prompts, and many users; `peer` makes another's generation
    out of the same weights.
    """
    plain = build_model(cfg, machine.device, machine.dtype, seed=0)
    model = for_inference(plain)
    tokenizer = Tokenizer.train(["noise"], 265)  # only its special tokens are used
    theirs = peer(plain, tokenizer) if peer else None
    read = sum(p.nbytes for n, p in model.named_parameters() if "embed" not in n)
    read_rate = read_bandwidth(machine)
    found.note(
        f"Generation: depth {cfg.n_layer}, width {cfg.d_model}, {read / 2**20:,.0f} MiB of weights "
        f"in {str(machine.dtype).removeprefix('torch.')}; prompts of {PROMPT_TOKENS} tokens, "
        f"answers of {NEW_TOKENS}, top_k {TOP_K}. Our step is compiled where it does not say "
        "eager, as with --compile_engine=True and by default on a GPU and in long runs of RL and "
        "evaluation; chat on a CPU is eager, and so is transformers' generate. The ceiling is to "
        f"read weights and cache once a step at {read_rate / 1e9:.0f} GB/s, which caches of the "
        "processor may exceed"
    )

    def engine_of(slots: int, compiled: bool = True) -> Engine:
        engine = Engine(model, tokenizer, slots, PROMPT_TOKENS + NEW_TOKENS, compiled=compiled)
        engine.ends = set()  # every answer has its full length
        return engine

    for batch in BATCHES:
        engine, prompts = engine_of(batch), noise([PROMPT_TOKENS] * batch)
        unfused, lengths = engine_of(batch, compiled=False), [NEW_TOKENS] * batch
        times, eager, others = [], [], []
        for _ in range(repeats + 1):  # the first warms up
            times.append(time_answers(engine, prompts, lengths))
            eager.append(time_answers(unfused, prompts, lengths))
            if theirs:
                others.append(EngineTimes(theirs(prompts, 1), theirs(prompts, NEW_TOKENS)))
        times, eager, others = times[1:], eager[1:], others[1:]
        tokens = batch * (NEW_TOKENS - 1)
        decode = Rate.of(tokens / t.rest for t in times)
        other = Rate.of(tokens / (t.rest - t.first) for t in others) if others else None
        stored = engine.cache.nbytes * (PROMPT_TOKENS + NEW_TOKENS / 2) / engine.cache.room
        share = decode.median / batch * (read + stored) / read_rate
        found.line(PATH, f"written, batch {batch}", "tokens/s", decode, PEER, other, share)
        simple = Rate.of(tokens / t.rest for t in eager)
        found.line(PATH, f"written, batch {batch}, eager", "tokens/s", simple, PEER, other)
        first = Rate.of(batch * PROMPT_TOKENS / t.first for t in times)
        other = Rate.of(batch * PROMPT_TOKENS / t.first for t in others) if others else None
        found.line(PATH, f"prompts read, batch {batch}", "tokens/s", first, PEER, other)
        if batch == 1:
            milliseconds = 1e3 * statistics.median(t.first for t in times)
            found.note(f"Generation: first token after {milliseconds:.1f} ms at batch 1")
        step = statistics.median(t.rest for t in times) / (NEW_TOKENS - 1)
        found.point("sequences: a step of generation", batch, step, engine.cache.nbytes / 2**20)

    # 64 requests of all lengths, answers too: a batch that is padded waits for the longest
    prompts = noise([16 + 7 * n % (PROMPT_TOKENS - 16) for n in range(64)])
    lengths = [16 + 37 * n % (NEW_TOKENS - 16) for n in range(64)]
    engine, ours, others = engine_of(64), [], []
    for _ in range(repeats + 1):
        ours.append(sum(lengths) / sum(time_answers(engine, prompts, lengths)))
        if theirs:
            others.append(sum(lengths) / theirs(prompts, max(lengths)))
    ragged = "64 prompts and answers of all lengths"
    other = Rate.of(others[1:]) if others else None
    found.line(PATH, ragged, "tokens/s", Rate.of(ours[1:]), PEER, other)

    for users in USERS:
        prompts, lengths = noise([32] * users), [64] * users
        seconds = [sum(time_answers(engine, prompts, lengths)) for _ in range(repeats)]
        found.point(
            "users asking at once, 64 slots: all answers", users, statistics.median(seconds)
        )
    print(f"memory  {peak_memory_bytes(machine.device) / 2**20:,.0f} MiB at its peak")


def noise(lengths: Sequence[int]) -> list[list[int]]:
    """Prompts of these lengths, all different."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(250, (n,), generator=generator).tolist() for n in lengths]


def time_answers(
    engine: Engine, prompts: Sequence[Sequence[int]], lengths: Sequence[int]
) -> EngineTimes:
    """Answer the prompts together, each with so many tokens."""
    for prompt, length in zip(prompts, lengths, strict=True):
        engine.submit(prompt, Sampling(length, top_k=TOP_K))
    started = time.perf_counter()
    engine.step()
    first = time.perf_counter()
    while engine.busy:
        engine.step()
    return EngineTimes(first - started, time.perf_counter() - first)
