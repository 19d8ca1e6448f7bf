"""
Peer libraries for benchmarks: transformers and EleutherAI's lm-evaluation-harness.

    GPT, Tokenizer -> load_in_transformers -> their model -> training step, generation, scoring

They use the same weights in a plain architecture that transformers implements natively, so none
of our code runs. Requires the dependency group `interop`.
"""

import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from nanochat.bench.engine import TOP_K, GenerateFn
from nanochat.bench.evals import BATCH, TimeFn
from nanochat.dist import DistContext
from nanochat.eval_core import Question
from nanochat.gpt import GPT
from nanochat.hf.export import write_hf
from nanochat.tokenizer import Tokenizer


def load_in_transformers(model: GPT, tokenizer: Tokenizer, dtype: torch.dtype) -> Any:
    """Load the weights into a native transformers model."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    loader: Any = AutoModelForCausalLM
    with tempfile.TemporaryDirectory() as folder:
        write_hf(Path(folder), model, tokenizer)
        return loader.from_pretrained(folder, dtype=dtype).to(model.device)


def make_generate(model: GPT, tokenizer: Tokenizer, dist: DistContext) -> GenerateFn:
    """For `bench_engine`: transformers' generate with left-padded prompts."""
    theirs = load_in_transformers(model, tokenizer, dist.dtype).eval()
    theirs.generation_config.eos_token_id = None
    options = {"do_sample": True, "top_k": TOP_K, "pad_token_id": 0}

    @torch.inference_mode()
    def generate(prompts: Sequence[Sequence[int]], new_tokens: int) -> float:
        T = max(map(len, prompts))
        ids = torch.tensor([[*[0] * (T - len(p)), *p] for p in prompts])
        mask = torch.tensor([[*[0] * (T - len(p)), *[1] * len(p)] for p in prompts])
        ids, mask = ids.to(dist.device), mask.to(dist.device)
        started = time.perf_counter()
        found = theirs.generate(ids, attention_mask=mask, max_new_tokens=new_tokens, **options)
        dist.synchronize()
        assert found.shape == (len(prompts), T + new_tokens)
        return time.perf_counter() - started

    return generate


def make_train_step(
    model: GPT, tokenizer: Tokenizer, dist: DistContext, compiled: bool
) -> Callable[[torch.Tensor], float]:
    """A training step of the transformers model with PyTorch AdamW: ids (B, T + 1) -> seconds."""
    theirs = load_in_transformers(model, tokenizer, torch.float32).train()
    theirs.config.use_cache = False
    optimizer = torch.optim.AdamW(theirs.parameters(), lr=1e-3, fused=True)

    def loss_of(ids: torch.Tensor) -> torch.Tensor:
        logits = theirs(input_ids=ids[:, :-1]).logits.float()
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())

    forward = torch.compile(loss_of, dynamic=False) if compiled else loss_of

    def step(ids: torch.Tensor) -> float:
        started = time.perf_counter()
        with torch.autocast(dist.device.type, dist.dtype, dist.dtype != torch.float32):
            loss = forward(ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.synchronize()
        return time.perf_counter() - started

    return step


def make_scorer(model: GPT, tokenizer: Tokenizer, dist: DistContext) -> TimeFn:
    """For `bench_evaluation`: the harness's HFLM class on the same token ids."""
    from lm_eval.models.huggingface import HFLM

    with tempfile.TemporaryDirectory() as folder:
        write_hf(Path(folder), model, tokenizer)
        loader: Any = HFLM
        harness = loader(
            pretrained=folder,
            dtype=str(dist.dtype).removeprefix("torch."),
            device=str(dist.device),
            batch_size=BATCH,
        )

    def score(questions: Sequence[Question]) -> tuple[float, list[list[float]]]:
        requests = [
            ((str(q.number), str(n)), ids[:start], ids[start:])
            for q in questions
            for n, (ids, start) in enumerate(zip(q.options, q.starts, strict=True))
        ]
        started = time.perf_counter()
        found = harness._loglikelihood_tokens(requests, disable_tqdm=True)
        seconds = time.perf_counter() - started
        nats = iter(-value for value, _ in found)
        return seconds, [[next(nats) for _ in q.options] for q in questions]

    return score
