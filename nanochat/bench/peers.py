"""
Peer libraries for benchmarks: transformers and EleutherAI's lm-evaluation-harness.

    GPT -> export -> their model -> training step, generation, scoring

They use the same weights in a plain architecture that transformers implements natively, so none
of our code runs. Requires the dependency group `interop`.
"""

import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from lm_eval.models.huggingface import HFLM
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from nanochat.dist import DistContext
from nanochat.eval_core import Question
from nanochat.gpt import GPT
from nanochat.hf.export import write_hf
from nanochat.tokenizer import Tokenizer

BATCH = 32  # options per batch of the harness; fastest of 16 to 128


def load_exported(model: GPT, loader: Any, **options: Any) -> Any:
    """Export the weights and load them with `loader(folder, **options)`."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        write_hf(Path(folder), model, Tokenizer.train(["noise"], 265))
        return loader(folder, **options)


def make_generate(
    model: GPT, dist: DistContext, top_k: int
) -> Callable[[Sequence[Sequence[int]], int], float]:
    """transformers' generate with left-padded prompts: prompts, number of tokens -> seconds."""
    loader = AutoModelForCausalLM.from_pretrained
    theirs = load_exported(model, loader, dtype=dist.dtype).to(dist.device).eval()
    theirs.generation_config.update(eos_token_id=None, pad_token_id=0)

    @torch.inference_mode()
    def generate(prompts: Sequence[Sequence[int]], new_tokens: int) -> float:
        rows = [torch.tensor([1 + token for token in prompt]) for prompt in prompts]
        padded = pad_sequence(rows, batch_first=True, padding_side="left").to(dist.device)
        ids, mask = (padded - 1).clamp(min=0), (padded > 0).long()
        options = {"do_sample": True, "top_k": top_k, "max_new_tokens": new_tokens}
        started = time.perf_counter()
        theirs.generate(ids, attention_mask=mask, **options)
        dist.synchronize()
        return time.perf_counter() - started

    return generate


def make_train_step(model: GPT, dist: DistContext, compiled: bool) -> Callable[[Tensor], float]:
    """A training step of the transformers model with PyTorch AdamW: ids (B, T + 1) -> seconds."""
    loader = AutoModelForCausalLM.from_pretrained
    theirs = load_exported(model, loader, dtype=torch.float32).to(dist.device).train()
    theirs.config.use_cache = False
    optimizer = torch.optim.AdamW(theirs.parameters(), lr=1e-3, fused=True)

    def loss_of(ids: Tensor) -> Tensor:
        logits = theirs(input_ids=ids[:, :-1]).logits.float()
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())

    forward = torch.compile(loss_of, dynamic=False) if compiled else loss_of

    def step(ids: Tensor) -> float:
        started = time.perf_counter()
        with torch.autocast(dist.device.type, dist.dtype, dist.dtype != torch.float32):
            loss = forward(ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.synchronize()
        return time.perf_counter() - started

    return step


def make_scorer(model: GPT, dist: DistContext) -> Callable[[Sequence[Question]], float]:
    """The harness's HFLM class: questions -> seconds to score all options."""
    dtype = str(dist.dtype).removeprefix("torch.")
    options = {"dtype": dtype, "device": str(dist.device), "batch_size": BATCH}
    harness = load_exported(model, HFLM, **options)

    def score(questions: Sequence[Question]) -> float:
        requests = [
            ((str(q.number), str(n)), ids[:start], ids[start:])
            for q in questions
            for n, (ids, start) in enumerate(zip(q.options, q.starts, strict=True))
        ]
        started = time.perf_counter()
        harness._loglikelihood_tokens(requests, disable_tqdm=True)
        return time.perf_counter() - started

    return score
