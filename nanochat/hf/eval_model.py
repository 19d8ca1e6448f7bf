"""
Wraps Hugging Face causal language models for few-shot evaluation.

    Hub name or folder -> find_hf_model -> load -> EvalModel

Every architecture that transformers loads is scored by the same code as ours. Requires the packages
of the `interop` group.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from nanochat.common import fingerprint, sha256_file
from nanochat.distributed import DistContext
from nanochat.eval_core import EvalModel

LOGIT_BYTES = 2**30  # logits of one forward pass; these models return them for every token


class HFEncoder:
    """A transformers tokenizer. Raises ValueError if it has no token to start a text with."""

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        ids = (tokenizer.bos_token_id, tokenizer.eos_token_id)
        known = [number for number in ids if number is not None]
        if not known:
            raise ValueError(
                f"the tokenizer of {tokenizer.name_or_path} has neither bos_token nor eos_token; "
                "set one in its tokenizer_config.json"
            )
        self.bos_id: int = known[0]

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)


class HFLanguageModel:
    """
    A transformers model with the `hidden` and `logits` methods of GPT. `hidden` returns the logits,
    because the steps after the last layer (caps, scales, norms) differ by architecture.
    """

    def __init__(self, model: Any):
        self.model = model

    def hidden(self, tokens: Tensor, cache: None = None) -> Tensor:
        """tokens (B, T) -> logits (B, T, V)."""
        return self.model(input_ids=tokens, use_cache=False).logits

    def logits(self, hidden: Tensor) -> Tensor:
        """Return `hidden` (N, V) unchanged."""
        return hidden


def find_hf_model(
    path: str, machine: DistContext, trust_remote_code: bool = False
) -> tuple[str, Callable[[], EvalModel]]:
    """
    Read a model's configuration. Returns its revision (the commit on the Hub, or a fingerprint of
    the files in the folder) and a function that loads it on the machine's device in its compute
    dtype.

    Raises OSError or ValueError if the model does not exist, requires remote code, or does not
    declare its context length.
    """
    options = {"trust_remote_code": trust_remote_code}
    config = AutoConfig.from_pretrained(path, **options)
    context = getattr(config, "max_position_embeddings", None)
    if not isinstance(context, int):
        raise ValueError(f"max_position_embeddings is missing in the configuration of {path}")
    folder = Path(path)
    if folder.is_dir():
        files = sorted(f for f in folder.iterdir() if f.is_file())
        revision = fingerprint({file.name: sha256_file(file) for file in files})
    else:
        revision = config._commit_hash or path

    def load() -> EvalModel:
        encoder = HFEncoder(AutoTokenizer.from_pretrained(path, **options))
        loader: Any = AutoModelForCausalLM
        model = loader.from_pretrained(path, dtype=machine.dtype, **options)
        model = model.to(machine.device).eval().requires_grad_(False)
        per_token = model.config.vocab_size * torch.finfo(machine.dtype).bits // 8
        most = max(context, LOGIT_BYTES // per_token)
        return EvalModel(HFLanguageModel(model), encoder, context, None, most, machine.device)

    return revision, load
