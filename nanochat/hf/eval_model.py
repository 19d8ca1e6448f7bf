"""
Causal language models of Hugging Face, for the few-shot scorer.

    name or folder -> find -> Found: revision -> load -> EvalModel

Any architecture that transformers loads is scored by the code that scores ours. Knows no suite.
The only file that needs the packages of the group `interop`.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from nanochat.attention import CacheView
from nanochat.common import fingerprint, sha256_file
from nanochat.distributed import DistContext
from nanochat.eval_core import EvalModel

LOGIT_BYTES = 2**30  # of the logits of one forward pass: these models give them for every token


class HFEncoder:
    """A tokenizer of transformers. Raises ValueError where none of its tokens can open a text."""

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        ids = (tokenizer.bos_token_id, tokenizer.eos_token_id)
        known = [number for number in ids if number is not None]
        if not known:
            raise ValueError(
                f"the tokenizer of {tokenizer.name_or_path} has neither bos_token nor eos_token, "
                "so there is nothing to open a text with; name one in its tokenizer_config.json"
            )
        self.bos_id: int = known[0]

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)


class HFLanguageModel:
    """
    The two halves that the scorer asks for. The states are the logits already: what lies between
    the last layer and the logits (caps, scales, norms) is each architecture's own.
    """

    def __init__(self, model: Any):
        self.model = model

    def hidden(self, tokens: Tensor, cache: CacheView | None = None) -> Tensor:
        """tokens (B, T) -> logits (B, T, V)."""
        assert cache is None, "options are read from their beginning"
        return self.model(input_ids=tokens, use_cache=False).logits

    def logits(self, hidden: Tensor) -> Tensor:
        """(N, V), as they are."""
        return hidden


@dataclass(frozen=True)
class Found:
    """A model that is there, not loaded yet."""

    path: str
    trust_remote_code: bool
    context: int
    """The most tokens it reads at once."""
    revision: str
    """Its commit on the hub, or a fingerprint of the files of its folder."""

    def load(self, machine: DistContext) -> EvalModel:
        """Load it in the machine's compute dtype."""
        options = {"trust_remote_code": self.trust_remote_code}
        encoder = HFEncoder(AutoTokenizer.from_pretrained(self.path, **options))
        loader: Any = AutoModelForCausalLM
        model = loader.from_pretrained(self.path, dtype=machine.dtype, **options)
        model = model.to(machine.device).eval().requires_grad_(False)
        per_token = model.config.vocab_size * torch.finfo(machine.dtype).bits // 8
        most = max(self.context, LOGIT_BYTES // per_token)
        scored = HFLanguageModel(model)
        return EvalModel(scored, encoder, self.context, None, most, machine.device)


def find(path: str, trust_remote_code: bool = False) -> Found:
    """
    Look at a model's configuration. Raises OSError or ValueError naming a model that is not there,
    that would have to run its own code, or that does not say how many tokens it reads.
    """
    config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    context = getattr(config, "max_position_embeddings", None)
    if not isinstance(context, int):
        raise ValueError(f"the configuration of {path} has no max_position_embeddings")
    folder = Path(path)
    if folder.is_dir():
        files = sorted(f for f in folder.iterdir() if f.is_file())
        revision = fingerprint({file.name: sha256_file(file) for file in files})
    else:
        revision = config._commit_hash or path
    return Found(path, trust_remote_code, context, revision)
