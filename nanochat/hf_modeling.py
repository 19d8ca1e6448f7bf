"""
Our model as transformers sees one: gpt.py, refine.py behind its interface for causal models.

    input ids, attention mask, cache -> GPT.hidden -> GPT.logits -> CausalLMOutputWithPast

hf.py copies this file and the modules below gpt.py into every exported folder whose architecture
transformers does not have itself; `trust_remote_code=True` runs them there. No second model: what
generates is what was trained. Knows one cache, transformers' DynamicCache, and padding on the left.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DynamicCache, GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from nanochat.refine import read_config


class NanochatConfig(PretrainedConfig):
    """`gpt` holds the fields of GPTConfig; the rest repeats what transformers asks for by name."""

    model_type = "nanochat_remote"
    keys_to_ignore_at_inference = ["past_key_values"]

    def __init__(
        self, gpt: dict[str, Any] | None = None, use_cache: bool = True, **kwargs: Any
    ) -> None:
        self.gpt = dict(gpt or {})
        self.use_cache = use_cache
        if self.gpt:
            shape = read_config(self.gpt)
            self.vocab_size = shape.vocab_size
            self.hidden_size = shape.d_model
            # Of the cache: keys and values by visit, then tokens where the one in front counts
            self.num_hidden_layers = len(shape.order) + bool(shape.bigram_rows)
            self.num_attention_heads = shape.n_head
            self.num_key_value_heads = shape.n_kv_head
            self.head_dim = shape.head_dim
            self.max_position_embeddings = shape.max_seq_len
        kwargs.setdefault("tie_word_embeddings", False)
        super().__init__(**kwargs)


class StoredTokens:
    """
    What kv_cache.CacheView is to our own cache, over a DynamicCache of transformers.

    real: (B, M) bool, which of the past and new tokens are no padding.
    """

    def __init__(self, cache: DynamicCache, real: Tensor, T: int, last_layer: int):
        self.cache, self.real, self.T, self.last_layer = cache, real, T, last_layer
        places = (real.cumsum(dim=1) - 1).clamp(min=0)  # (B, M)
        self.positions = places[:, -T:]
        self.fresh = real.size(1) == T and bool(real.all())

    def preceding(self, tokens: Tensor) -> Tensor:
        """
        Store the new tokens (B, T), as keys of the last layer, so that whoever sorts or shortens
        the cache does so with them: the one in front of each, -1 where a sequence begins.
        """
        stored = tokens[:, None, :, None]  # (B, 1, T, 1)
        self.cache.update(stored, stored, self.last_layer)
        layer: Any = self.cache.layers[self.last_layer]
        before = F.pad(layer.keys[:, 0, :, 0], (1, 0), value=-1)[:, -self.T - 1 : -1]
        return before.masked_fill(self.positions == 0, -1)

    def write(self, visit: int, k: Tensor, v: Tensor) -> None:
        """Store the new tokens' keys and values at a visit to a layer, (B, T, G, D) each."""
        self.cache.update(k.transpose(1, 2), v.transpose(1, 2), visit)

    def read(self, visit: int) -> tuple[Tensor, Tensor]:
        """All that may be seen at it: keys (B, G, D, M) and values (B, G, M, D)."""
        stored: Any = self.cache.layers[visit]
        return stored.keys.mT, stored.values

    def mask(self, window: int | None) -> Tensor | None:
        """(B, 1, T, M) bool: what each new token sees. None: simply its row's past."""
        if self.fresh:
            return None
        key = torch.arange(self.real.size(1), device=self.real.device)
        distance = key[-self.T :, None] - key  # (T, M)
        seen = (distance >= 0) & self.real[:, None]  # (B, T, M)
        if window is not None:
            seen &= distance <= window
        return (seen | (distance == 0))[:, None]  # padding sees itself, so that nothing is NaN


class NanochatForCausalLM(PreTrainedModel, GenerationMixin):
    """A GPT with the calls of transformers."""

    config_class = NanochatConfig
    base_model_prefix = "gpt"
    _no_split_modules = ["Block"]
    _supports_sdpa = True

    def __init__(self, config: NanochatConfig):
        super().__init__(config)
        self.gpt = read_config(config.gpt).new()
        self.post_init()

    def _init_weights(self, module: torch.nn.Module) -> None:
        """Nothing: weights come from a file."""

    def get_input_embeddings(self) -> torch.nn.Module:
        return self.gpt.embed

    def get_output_embeddings(self) -> torch.nn.Module:
        return self.gpt.embed if self.gpt.head is None else self.gpt.head

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: DynamicCache | None = None,
        use_cache: bool | None = None,
        labels: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """
        input_ids (B, T), attention_mask (B, past + T) with 0 for padding on the left -> logits
        (B, T, V), or of the last `logits_to_keep` tokens. `labels` (B, T), -100 where none counts.
        """
        self.gpt.dtype = self.gpt.embed.weight.dtype
        B, T = input_ids.shape
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training
        past = past_key_values.get_seq_length() if past_key_values is not None else 0
        if attention_mask is None:
            attention_mask = torch.ones(B, past + T, device=input_ids.device)
        real = attention_mask.bool()
        view: Any = None
        if use_cache or past or not real.all():
            cache = past_key_values if past_key_values is not None else DynamicCache()
            view = StoredTokens(cache, real, T, self.config.num_hidden_layers - 1)
            past_key_values = cache if use_cache else None
        hidden = self.gpt.hidden(input_ids, view)  # (B, T, C)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.gpt.logits(hidden[:, kept])
        loss = None
        if labels is not None:
            targets = labels[:, 1:].flatten()
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), targets, ignore_index=-100)
        output: Any = CausalLMOutputWithPast
        return output(loss=loss, logits=logits, past_key_values=past_key_values)
