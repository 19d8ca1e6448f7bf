"""
Wraps GPT and its subclasses as a transformers causal language model.

    input ids, attention mask, cache -> GPT.hidden with a CacheAdapter -> logits, loss

If transformers lacks the architecture, hf/export.py copies this file and the modules that it
imports into the exported folder; `trust_remote_code=True` runs them.
"""

import dataclasses
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Cache, DynamicCache, GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils.generic import can_return_tuple

from nanochat.golf.model import TiedHead
from nanochat.gpt import Block
from nanochat.loss import cap
from nanochat.recursion.model import new_model, read_config

# Name of the cache in outputs: "cache" from transformers 5.24 on, "past_key_values" before
CACHE = {"cache", "past_key_values"} & {f.name for f in dataclasses.fields(CausalLMOutputWithPast)}


class NanochatConfig(PretrainedConfig):
    """`gpt` has the fields of GPTConfig; the other attributes are those transformers expects."""

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
            # Layers of the cache: keys and values, then the embeddings for smear
            self.num_hidden_layers = getattr(shape, "n_passes", shape.n_layer) + shape.smear
            self.num_attention_heads = shape.n_head
            self.num_key_value_heads = shape.n_kv_head
            self.head_dim = shape.head_dim
            self.max_position_embeddings = shape.max_seq_len
        kwargs.setdefault("tie_word_embeddings", False)
        super().__init__(**kwargs)


class CacheAdapter:
    """
    The counterpart of attention.CacheView for a transformers Cache.

    real: (B, M), which of the past and new tokens are not padding. T of them are new.
    smear_layer: of the cache; stores embeddings, one half as keys and one as values.
    """

    def __init__(self, cache: Cache, real: Tensor, T: int, smear_layer: int):
        M = real.size(1)
        self.cache, self.real, self.smear_layer = cache, real, smear_layer
        self.slots = torch.arange(M - T, M, device=real.device)  # of the new tokens
        self.positions = (real.cumsum(dim=1) - 1).clamp(min=0)[:, self.slots]  # rotary, (B, T)
        self.fresh = T == M and bool(real.all())  # plain causal attention suffices
        self.stored: Any = None  # keys and values of the layer just written

    def previous(self, x: Tensor) -> Tensor:
        """
        Store the embeddings x (B, T, C) of the new tokens. Returns those of the token before each,
        zeros for the first; padding is skipped.
        """
        halves: Any = x[:, None].chunk(2, dim=-1)  # (B, 1, T, C / 2) each
        halves = self.cache.update(*halves, self.smear_layer)  # (B, 1, M, C / 2) each
        slot = torch.arange(self.real.size(1), device=x.device)
        last = torch.where(self.real, slot, -1).cummax(dim=1).values  # last real token
        before = F.pad(last, (1, 0), value=-1)[:, self.slots, None]  # (B, T, 1)
        found = [half[:, 0].take_along_dim(before.clamp(min=0), 1) for half in halves]
        return torch.cat(found, -1).masked_fill(before < 0, 0.0)

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Store keys and values of the new tokens in a layer, (B, T, G, D) each."""
        self.stored = self.cache.update(k.transpose(1, 2), v.transpose(1, 2), layer)

    def read(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return all keys (B, G, D, M) and values (B, G, M, D) of the layer just written."""
        keys, values = self.stored
        return keys.mT, values

    def mask(self, window: int | None) -> Tensor:
        """Attention mask (B, 1, T, M), True = visible."""
        key = torch.arange(self.real.size(1), device=self.real.device)
        distance = self.slots[:, None] - key  # (T, M)
        seen = (distance >= 0) & self.real[:, None]  # (B, T, M)
        if window is not None:
            seen &= distance <= window
        return (seen | (distance == 0))[:, None]  # padding sees itself, to avoid NaN


class CheckpointedBlock(GradientCheckpointingLayer, Block):
    """A layer that supports transformers' gradient checkpointing."""


class NanochatForCausalLM(PreTrainedModel, GenerationMixin):
    """GPT with the interface of transformers."""

    config_class = NanochatConfig
    base_model_prefix = "gpt"
    supports_gradient_checkpointing = True
    _no_split_modules = ["CheckpointedBlock"]
    _skip_keys_device_placement = ["past_key_values"]
    _supports_sdpa = True

    def __init__(self, config: NanochatConfig):
        super().__init__(config)
        self.gpt = new_model(read_config(config.gpt))
        for block in self.gpt.blocks:
            block.__class__ = CheckpointedBlock
        if self.gpt.device.type != "meta":  # not loaded from a checkpoint
            self.gpt.init_weights()
            for weight in self.parameters():
                weight._is_hf_initialized = True  # type: ignore
        self.post_init()

    def get_input_embeddings(self) -> torch.nn.Module:
        return self.gpt.embed

    def get_output_embeddings(self) -> torch.nn.Module | None:
        """The LM head; None if it is tied to the input embeddings."""
        return None if isinstance(self.gpt.head, TiedHead) else self.gpt.head

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        cache: Cache | None = None,
        **loss_kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """
        input_ids (B, T), attention_mask (B, past + T) with 0 for padding -> logits (B, T, V), or
        only those of the last `logits_to_keep` tokens. `labels`: (B, T), -100 is ignored.

        cache: another name of past_key_values, used by transformers 5.24.
        position_ids: (B or 1, T). Without a mask or past, each position that is not its predecessor
        plus 1 starts a new packed document; attention and smear do not cross documents. Otherwise
        positions follow from the mask.

        Raises ValueError for a mask of a wrong shape, and for packed documents with a cache.
        """
        gpt, (B, T) = self.gpt, input_ids.shape
        past: Any = past_key_values if cache is None else cache
        num_past = 0 if past is None else past.get_seq_length()
        real = torch.ones(B, num_past + T, dtype=torch.bool, device=input_ids.device)
        if attention_mask is not None and attention_mask.shape != real.shape:
            raise ValueError(
                f"attention_mask has shape {tuple(attention_mask.shape)}, expected "
                f"{tuple(real.shape)}: past and new tokens, 0 for padding"
            )
        segments = None
        if attention_mask is not None:
            real = attention_mask != 0
            segments = None if real.all() else real.long()
        elif position_ids is not None and not num_past:
            starts = position_ids.expand(B, T).diff(dim=1) != 1
            segments = F.pad(starts.cumsum(dim=1), (1, 0)) if starts.any() else None
        packed = segments is not None and attention_mask is None
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training and not packed
        if packed and use_cache:
            raise ValueError(
                "position_ids pack several documents into one sequence, which a cache does not "
                "support; use use_cache=False, or pass attention_mask if this is padding"
            )
        gpt.dtype = gpt.embed.weight.dtype
        if use_cache or num_past:
            past = DynamicCache() if past is None else past
            adapter: Any = CacheAdapter(past, real, T, self.config.num_hidden_layers - 1)
            hidden = gpt.hidden(input_ids, adapter)
        else:
            past, hidden = None, gpt.hidden(input_ids, segments=segments)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        hidden = hidden[:, kept]
        head = self.get_output_embeddings()  # call it: an adapter may wrap it
        logits = gpt.logits(hidden) if head is None else cap(head(hidden))
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, logits.size(-1), **loss_kwargs)
        output: Any = CausalLMOutputWithPast
        return output(loss=loss, logits=logits, **dict.fromkeys(CACHE, past))
