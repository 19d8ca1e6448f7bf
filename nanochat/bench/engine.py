"""
Benchmark generation: prefill and decode throughput in tokens per second.

    shape -> untrained model -> random prompts -> tokens/s of prefill and decode, by batch size

Our engine and transformers alternate, using the same exported weights. Timing does not depend on
token values, so this needs neither data nor a trained model.
"""

import time
from collections.abc import Sequence
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import torch

from nanochat.bench.table import alternate, compare, print_table
from nanochat.checkpoint import build_model
from nanochat.dist import DistContext
from nanochat.engine import Engine, Sampling
from nanochat.gpt import GPTConfig, inference_copy
from nanochat.tokenizer import Tokenizer

PEER = "transformers"
PROMPT_TOKENS = 128
NEW_TOKENS = 128
BATCHES = (1, 8, 64)
TOP_K = 50
DECODE_NOTE = """\
After the first token; plain architecture, {size}; prompts and answers of 128 tokens. Peer:
transformers' generate (eager), which pads mixed lengths."""
PREFILL_NOTE = """\
Prompt tokens per second until every sequence has its first token; same model, prompts and peer as
Decode."""


class Times(NamedTuple):
    """Seconds until all prompts have their first token, and for the remaining tokens."""

    first: float
    rest: float


def bench_engine(cfg: GPTConfig, dist: DistContext, repeats: int, peers: ModuleType | None) -> None:
    """Time prefill and decode by batch size, then for requests of mixed lengths."""
    plain = build_model(cfg, dist.device, dist.dtype, seed=0)
    model = inference_copy(plain)
    tokenizer = Tokenizer.train(["noise"], 265)  # only its special tokens are used
    generate = peers and peers.make_generate(plain, dist, TOP_K)
    decode, prefill = [], []
    cases = [(f"batch {n}", [PROMPT_TOKENS] * n, [NEW_TOKENS] * n) for n in BATCHES]
    spread = range(BATCHES[-1])  # a padded batch waits for the longest
    mixed = [[16 + 37 * n % (most - 16) for n in spread] for most in (PROMPT_TOKENS, NEW_TOKENS)]
    for case, sizes, lengths in [*cases, ("mixed lengths", *mixed)]:
        generator = torch.Generator().manual_seed(0)
        prompts = [torch.randint(250, (n,), generator=generator).tolist() for n in sizes]
        room = PROMPT_TOKENS + NEW_TOKENS
        engines = [Engine(model, tokenizer, len(sizes), room, compiled=c) for c in (True, False)]
        works = [partial(time_answers, engine, prompts, lengths) for engine in engines]
        theirs = partial(time_peer, generate, prompts, max(lengths)) if generate else None
        *ours, others = alternate(repeats, *works, theirs)
        tokens = sum(lengths) - len(lengths)
        other = [tokens / t.rest for t in others]
        for name, times in zip(("compiled", "eager"), ours, strict=True):
            rates = [tokens / t.rest for t in times]
            decode.append(compare(f"{case}, {name}", "tokens/s", rates, PEER, other))
        first, other = ([sum(sizes) / t.first for t in each] for each in (ours[0], others))
        prefill.append(compare(case, "tokens/s", first, PEER, other))
    size = f"depth {cfg.n_layer}, width {cfg.d_model}, {dist.dtype}"
    print_table("Decode", DECODE_NOTE.format(size=size), decode)
    print_table("Prefill", PREFILL_NOTE, prefill)


def time_peer(generate: Any, prompts: Sequence[Sequence[int]], new_tokens: int) -> Times:
    """Time the generation of one token and of all by a function that returns seconds."""
    first = generate(prompts, 1)
    return Times(first, generate(prompts, new_tokens) - first)


def time_answers(engine: Engine, prompts: Sequence[Sequence[int]], lengths: Sequence[int]) -> Times:
    """Time the batched generation of answers with the given numbers of tokens."""
    engine.ends = set()  # no answer stops early
    for prompt, length in zip(prompts, lengths, strict=True):
        engine.submit(prompt, Sampling(length, top_k=TOP_K))
    started = time.perf_counter()
    engine.step()
    first = time.perf_counter()
    while engine.busy:
        engine.step()
    return Times(first - started, time.perf_counter() - first)
