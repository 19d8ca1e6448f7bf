"""
Benchmark generation: prefill and decode throughput in tokens per second.

    shape -> untrained model -> random prompts -> tokens/s of prefill and decode, by batch size

Our engine and transformers alternate, using the same exported weights. Timing does not depend on
token values, so this needs neither data nor a trained model.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch

from nanochat.bench.table import BenchLog, TableLine, alternate
from nanochat.bench.train import read_bandwidth
from nanochat.checkpoint import build_model
from nanochat.dist import DistContext
from nanochat.engine import Engine, Sampling
from nanochat.gpt import GPT, GPTConfig, inference_copy
from nanochat.tokenizer import Tokenizer

DECODE, PREFILL, MIXED = "Decode", "Prefill", "Generation with mixed lengths"
PEER = "transformers"
PROMPT_TOKENS = 128
NEW_TOKENS = 128
BATCHES = (1, 8, 64)
TOP_K = 50

# Prompt token ids, tokens per answer -> seconds that a peer takes to generate
GenerateFn = Callable[[Sequence[Sequence[int]], int], float]
MakeGenerate = Callable[[GPT, Tokenizer, DistContext], GenerateFn]


class EngineTimes(NamedTuple):
    """Seconds until all prompts have their first token, and for the remaining tokens."""

    first: float
    rest: float


def bench_engine(
    cfg: GPTConfig, dist: DistContext, repeats: int, found: BenchLog, peer: MakeGenerate | None
) -> None:
    """
    Time prefill and decode by batch size, for ragged prompts, and for many users. `peer` builds
    another library's generate function with the same weights.
    """
    plain = build_model(cfg, dist.device, dist.dtype, seed=0)
    model = inference_copy(plain)
    tokenizer = Tokenizer.train(["noise"], 265)  # only its special tokens are used
    theirs = peer(plain, tokenizer, dist) if peer else None
    read = sum(p.nbytes for n, p in model.named_parameters() if "embed" not in n)
    read_rate = read_bandwidth(dist)
    dtype = str(dist.dtype).removeprefix("torch.")
    found.note(
        DECODE,
        "Generated tokens per second after the first token, compared with transformers' generate "
        "(eager) on the same weights: plain architecture, "
        f"depth {cfg.n_layer}, width {cfg.d_model}, {read / 2**20:,.0f} MiB in {dtype}; prompts of "
        f"{PROMPT_TOKENS} tokens, answers of {NEW_TOKENS}, top_k {TOP_K}. Compiled: our decode "
        "step as with --compile_engine=True, the default on GPUs and in long RL and evaluation "
        "runs. Eager: the default of chat on a CPU. "
        f"Roofline: {read_rate / 1e9:.0f} GB/s of memory bandwidth.",
    )
    found.note(
        PREFILL,
        "Prompt tokens per second until every sequence has its first token; same model, prompts "
        "and peer as Decode.",
    )

    def engine_of(slots: int, compiled: bool = True) -> Engine:
        engine = Engine(model, tokenizer, slots, PROMPT_TOKENS + NEW_TOKENS, compiled=compiled)
        engine.ends = set()  # no answer stops early
        return engine

    def time_peer(generate: GenerateFn, prompts: list[list[int]], new_tokens: int) -> EngineTimes:
        first = generate(prompts, 1)
        return EngineTimes(first, generate(prompts, new_tokens) - first)

    for batch in BATCHES:
        engine, eager = engine_of(batch), engine_of(batch, compiled=False)
        prompts, lengths = random_prompts([PROMPT_TOKENS] * batch), [NEW_TOKENS] * batch
        times, eager_times, others = alternate(
            repeats,
            partial(time_answers, engine, prompts, lengths),
            partial(time_answers, eager, prompts, lengths),
            theirs and partial(time_peer, theirs, prompts, NEW_TOKENS),
        )
        tokens = batch * (NEW_TOKENS - 1)
        decode, simple, other = (
            [tokens / t.rest for t in each] for each in (times, eager_times, others)
        )
        stored = engine.cache.nbytes * (PROMPT_TOKENS + NEW_TOKENS / 2) / engine.cache.room
        share = statistics.median(decode) / batch * (read + stored) / read_rate
        label = f"batch {batch}"
        found.line(TableLine(DECODE, f"{label}, compiled", "tokens/s", decode, PEER, other, share))
        found.line(TableLine(DECODE, f"{label}, eager", "tokens/s", simple, PEER, other))
        first, other = ([batch * PROMPT_TOKENS / t.first for t in each] for each in (times, others))
        found.line(TableLine(PREFILL, label, "tokens/s", first, PEER, other))
        if batch == 1:
            milliseconds = 1e3 * statistics.median(t.first for t in times)
            found.note(PREFILL, f"Time to first token at batch 1: {milliseconds:.1f} ms (ours).")

    # 64 prompts and answers of different lengths: a padded batch waits for the longest
    prompts = random_prompts([16 + 7 * n % (PROMPT_TOKENS - 16) for n in range(64)])
    lengths = [16 + 37 * n % (NEW_TOKENS - 16) for n in range(64)]
    engine = engine_of(64)
    ours, others = alternate(
        repeats,
        lambda: sum(time_answers(engine, prompts, lengths)),
        theirs and (lambda: theirs(prompts, max(lengths))),
    )
    ours, others = ([sum(lengths) / seconds for seconds in each] for each in (ours, others))
    found.note(
        MIXED,
        "Answer tokens per second of a batch whose prompts and answers differ in length, prefill "
        "included; transformers pads prompts and decodes until the longest answer ends. Same "
        "model as Decode.",
    )
    shortest, longest = min(lengths), max(lengths)
    label = f"64 requests, answers of {shortest} to {longest} tokens, compiled"
    found.line(TableLine(MIXED, label, "tokens/s", ours, PEER, others))
    print(f"memory  {dist.peak_memory_bytes() / 2**20:,.0f} MiB peak")


def random_prompts(lengths: Sequence[int]) -> list[list[int]]:
    """Random prompts of the given lengths."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(250, (n,), generator=generator).tolist() for n in lengths]


def time_answers(
    engine: Engine, prompts: Sequence[Sequence[int]], lengths: Sequence[int]
) -> EngineTimes:
    """Time the batched generation of answers with the given numbers of tokens."""
    for prompt, length in zip(prompts, lengths, strict=True):
        engine.submit(prompt, Sampling(length, top_k=TOP_K))
    started = time.perf_counter()
    engine.step()
    first = time.perf_counter()
    while engine.busy:
        engine.step()
    return EngineTimes(first - started, time.perf_counter() - first)
