"""
The speed of generation: how fast prompts are read and answers written.

    shape -> untrained model -> prompts of noise -> tokens/s of prefill and decode, by batch size

What tokens are makes no difference to the time, so this needs neither data nor a trained model.
"""

import statistics
import time
from typing import NamedTuple

import torch

from nanochat.engine import Engine
from nanochat.gpt import GPTConfig, build_model, for_inference
from nanochat.hardware import peak_memory_bytes
from nanochat.machine import Machine
from nanochat.sampling import Sampling
from nanochat.tokenizer import Tokenizer

PROMPT_TOKENS = 128
NEW_TOKENS = 128
BATCHES = (1, 8, 64)


class EngineTimes(NamedTuple):
    """Seconds until all prompts were read and had their first token, and for the tokens after."""

    first: float
    rest: float


def bench_engine(cfg: GPTConfig, machine: Machine, repeats: int) -> None:
    """Print a table of prefill and decode rates; medians of `repeats` with their range."""
    model = for_inference(build_model(cfg, machine.device, machine.dtype, seed=0))
    tokenizer = Tokenizer.train(["noise"], 265)  # only its special tokens are used
    weights = sum(p.nbytes for p in model.parameters())
    print(
        f"device  {machine.device_name}, {str(machine.dtype).removeprefix('torch.')}\n"
        f"model   depth {cfg.n_layer}, width {cfg.d_model}, {weights / 2**20:,.0f} MiB of weights; "
        f"prompts of {PROMPT_TOKENS}, answers of {NEW_TOKENS} tokens, top_k 50"
    )
    for batch in BATCHES:
        engine = Engine(model, tokenizer, slots=batch, capacity=PROMPT_TOKENS + NEW_TOKENS, compiled=True)
        engine.ends = set()  # every answer has its full length
        times = [time_batch(engine, batch) for _ in range(repeats + 1)][1:]
        prefill = sorted(batch * PROMPT_TOKENS / t.first for t in times)
        decode = sorted(batch * (NEW_TOKENS - 1) / t.rest for t in times)
        first = statistics.median(t.first for t in times)
        print(
            f"batch {batch:>3}  decode {statistics.median(decode):>8,.0f} tok/s "
            f"({decode[0]:,.0f} to {decode[-1]:,.0f})   prefill "
            f"{statistics.median(prefill):>8,.0f} tok/s   first token after {first * 1e3:.1f} ms   "
            f"cache {engine.cache.nbytes / 2**20:,.1f} MiB"
        )
    print(f"memory  {peak_memory_bytes(machine.device) / 2**20:,.0f} MiB at its peak")


def time_batch(engine: Engine, batch: int) -> EngineTimes:
    """Answer `batch` different prompts together."""
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(250, (batch, PROMPT_TOKENS), generator=generator).tolist()
    settings = Sampling(NEW_TOKENS, top_k=50)
    for prompt in prompts:
        engine.submit(prompt, settings)
    started = time.perf_counter()
    engine.step()
    first = time.perf_counter()
    while engine.busy:
        engine.step()
    return EngineTimes(first - started, time.perf_counter() - first)
