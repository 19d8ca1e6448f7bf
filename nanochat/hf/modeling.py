"""
Wraps GPT and its subclasses as a transformers causal language model.

    input ids, attention mask, cache -> CacheAdapter -> layers of GPT -> logits, loss, hidden states

If transformers lacks the architecture, hf/export.py copies this file and the modules that it
imports into the exported folder; `trust_remote_code=True` runs them.
"""

import dataclasses
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Cache, DynamicCache, GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils.generic import can_return_tuple

from nanochat.golf.model import TiedHead
from nanochat.gpt import Block, Shared, norm
from nanochat.hf.models import new_model, read_config
from nanochat.loss import cap
from nanochat.recursion.model import Inputs, RecursiveGPT

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


@dataclasses.dataclass(eq=False)
class CacheAdapter:
    """The counterpart of attention.CacheView for a transformers Cache or for no cache."""

    cache: Any
    """A transformers Cache, or None."""
    segments: Tensor
    """(B, M): document number of each slot (past, new and free ones), 0 for padding."""
    slots: Tensor
    """(T,): slots of the new tokens."""
    positions: Tensor
    """(B, T): their rotary positions."""
    smear_layer: int
    """Layer of the cache that stores embeddings, one half as keys and one as values."""
    fresh: bool
    """No past, padding or packing: plain causal attention suffices."""
    stored: Any = None
    """Keys and values of the layer just written."""

    def previous(self, x: Tensor) -> Tensor:
        """
        Store the embeddings x (B, T, C) of the new tokens. Returns those of the token before each
        in its document, zeros at its start; padding is skipped.
        """
        halves: Any = x[:, None].chunk(2, dim=-1)  # (B, 1, T, C / 2) each
        if self.cache is not None:
            halves = self.cache.update(*halves, self.smear_layer)  # (B, 1, M, C / 2) each
        slot = torch.arange(self.segments.size(1), device=x.device)
        last = torch.where(self.segments > 0, slot, -1).cummax(dim=1).values  # last real token
        before = F.pad(last, (1, 0), value=-1)[:, self.slots]  # (B, T)
        at = before.clamp(min=0)
        starts = (before < 0) | (self.segments.gather(1, at) != self.segments[:, self.slots])
        found = [half[:, 0].take_along_dim(at[..., None], 1) for half in halves]
        return torch.cat(found, -1).masked_fill(starts[..., None], 0.0)

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Store keys and values of the new tokens in a layer, (B, T, G, D) each."""
        self.stored = self.cache.update(k.transpose(1, 2), v.transpose(1, 2), layer)

    def read(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return all keys (B, G, D, M) and values (B, G, M, D) of the layer just written."""
        keys, values = self.stored
        return keys.mT, values

    def mask(self, window: int | None) -> Tensor | None:
        """Attention mask (B, 1, T, M), True = visible. None: plain causal attention."""
        if self.fresh:
            return None
        key = torch.arange(self.segments.size(1), device=self.segments.device)
        distance = self.slots[:, None] - key  # (T, M)
        segments = self.segments[:, None]  # (B, 1, M)
        seen = (distance >= 0) & (segments > 0) & (segments == segments[..., self.slots].mT)
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
    gradient_checkpointing = False

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

    @torch.no_grad()
    def _init_weights(self, module: torch.nn.Module) -> None:
        """Initialize weights missing from a checkpoint, and rows added for new tokens."""
        for weight in module.parameters(recurse=False):
            if not getattr(weight, "_is_hf_initialized", False):
                weight.normal_(std=weight.size(-1) ** -0.5)

    # ---- embeddings --------------------------------------------------------------------------

    def get_input_embeddings(self) -> torch.nn.Module:
        return self.gpt.embed

    def set_input_embeddings(self, value: Any) -> None:
        self.gpt.embed = value
        if isinstance(self.gpt.head, TiedHead):
            self.gpt.head.tied = [value]

    def get_output_embeddings(self) -> torch.nn.Module | None:
        """The LM head; None if it is tied to the input embeddings."""
        return None if isinstance(self.gpt.head, TiedHead) else self.gpt.head

    def set_output_embeddings(self, new_embeddings: Any) -> None:
        self.gpt.head = new_embeddings

    def resize_token_embeddings(
        self,
        new_num_tokens: int | None = None,
        pad_to_multiple_of: int | None = None,
        mean_resizing: bool = True,
    ) -> Any:
        """Resize the token embeddings, the LM head and the value embeddings."""
        embed = super().resize_token_embeddings(new_num_tokens, pad_to_multiple_of, mean_resizing)
        size = embed.weight.size(0)
        if self.gpt.value_embeds is not None:
            resize: Any = self._get_resized_embeddings
            self.gpt.value_embeds = resize(self.gpt.value_embeds, size, mean_resizing=mean_resizing)
        self.gpt.cfg = dataclasses.replace(self.gpt.cfg, vocab_size=size)
        self.config.gpt["vocab_size"] = self.config.vocab_size = size
        return embed

    # ---- generation --------------------------------------------------------------------------

    def prepare_inputs_for_generation(
        self, input_ids: Tensor, inputs_embeds: Tensor | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        """Keep `input_ids` together with `inputs_embeds`, as value embeddings need them."""
        parent: Any = super()
        given = parent.prepare_inputs_for_generation(
            input_ids, inputs_embeds=inputs_embeds, **kwargs
        )
        embeds = given.get("inputs_embeds")
        if embeds is not None and embeds.shape[:2] == input_ids.shape:
            given["input_ids"] = input_ids
        return given

    @staticmethod
    def create_masks_for_generate(
        attention_mask: Tensor | None,
        past_key_values: Cache | None = None,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> Tensor | None:
        """Pad the mask to the size of a static cache, (B, M): the same shape at every step."""
        cache = cache or past_key_values
        if attention_mask is None or cache is None:
            return attention_mask
        free = max(0, room(cache) - attention_mask.size(1))
        return F.pad(attention_mask, (0, free), value=1)

    # ---- computation -------------------------------------------------------------------------

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        cache: Cache | None = None,
        **loss_kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """
        input_ids (B, T), attention_mask (B, past + T) with 0 for padding -> logits (B, T, V), or
        only those of the last `logits_to_keep` tokens. `labels`: (B, T), -100 is ignored.

        cache: another name of past_key_values, used by transformers 5.24.
        position_ids: (B or 1, T), by default derived from the attention mask. Without a mask or
        past, each position that is not its predecessor plus 1 starts a new packed document;
        attention and smear do not cross documents.
        inputs_embeds: (B, T, C), replaces the embeddings of input_ids; a model with value
        embeddings needs both.
        hidden_states: the input of the first layer, then the output of each layer (of a recursive
        model: of the prelude, each loop and the coda); the last one is the input of the head.

        Raises ValueError for unsupported arguments and wrong shapes.
        """
        config, gpt = self.config, self.gpt
        known = ("num_items_in_batch", "shift_labels", "ignore_index")
        for name, value in loss_kwargs.items():
            if name not in known and value is not None:
                raise ValueError(f"NanochatForCausalLM has no argument {name}; omit it")
        if config.output_attentions if output_attentions is None else output_attentions:
            raise ValueError(
                "output_attentions=True is not supported: fused attention does not compute the "
                "weights; omit it"
            )
        tokens: Any = input_ids
        if tokens is None:
            if inputs_embeds is None or gpt.value_embeds is not None:
                raise ValueError(
                    "input_ids are missing; only a model without value embeddings accepts "
                    "inputs_embeds instead"
                )
            tokens = inputs_embeds.new_zeros(inputs_embeds.shape[:2], dtype=torch.long)
        past = past_key_values if cache is None else cache
        adapter: Any = self.adapter(tokens, attention_mask, position_ids, past, use_cache)
        cache = adapter.cache
        recompute = self.gradient_checkpointing and self.training and torch.is_grad_enabled()
        if recompute and cache is not None:
            raise ValueError("gradient checkpointing does not support a cache; use use_cache=False")

        gpt.dtype = gpt.embed.weight.dtype
        embeds = gpt.embed(tokens) if inputs_embeds is None else inputs_embeds
        x0 = gpt.smear_embeddings(norm(embeds.to(gpt.dtype)), adapter)
        shared = gpt.prepare(tokens, adapter)
        if cache is None:
            shared = shared._replace(cache=None)
        if output_hidden_states is None:
            output_hidden_states = config.output_hidden_states
        outputs = self.layer_outputs(x0, shared)
        states = deque(outputs, maxlen=None if output_hidden_states else 1)

        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        hidden = states[-1][:, kept]
        head = self.get_output_embeddings()  # call it: an adapter may wrap it
        logits = gpt.logits(hidden) if head is None else cap(head(hidden))
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, logits.size(-1), **loss_kwargs)
        output: Any = CausalLMOutputWithPast
        return output(
            loss=loss,
            logits=logits,
            **dict.fromkeys(CACHE, cache),
            hidden_states=tuple(states) if output_hidden_states else None,
        )

    def layer_outputs(self, x0: Tensor, shared: Shared) -> Iterator[Tensor]:
        """Yield the `hidden_states` of `forward`, (B, T, C) each, from the embedded tokens."""
        gpt, cfg = self.gpt, self.gpt.cfg
        x = middle = x0
        if isinstance(gpt, RecursiveGPT):
            yield x0
            inputs = Inputs(x0, gpt.run_layers(gpt.cfg.prelude, x0, x0, shared, 0), shared)
            yield inputs.e
            for x in gpt.states(inputs, gpt.cfg.n_loops):
                yield x
            yield gpt.read_out(inputs, x, gpt.cfg.n_loops)
            return
        for layer in range(cfg.n_layer):
            yield x
            x = gpt.run_layer(layer, x, x0, shared)
            if layer == cfg.n_layer // 2:
                middle = x
        yield gpt.finish(x, middle)

    def adapter(
        self,
        tokens: Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        cache: Cache | None,
        use_cache: bool | None,
    ) -> CacheAdapter:
        """
        Describe the new tokens (B, T) to the layers. Raises ValueError for a wrong shape, and for
        packed documents with a cache.
        """
        B, T = tokens.shape
        past: Any = cache.get_seq_length() if cache is not None else 0  # an int or a tensor
        begins = isinstance(past, int) and past == 0
        packed, breaks = False, None
        if position_ids is not None:
            position_ids = position_ids.expand(B, T)
            breaks = position_ids.diff(dim=1) != 1  # (B, T - 1)
            packed = attention_mask is None and begins and bool(breaks.any())
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training and not packed
        if packed and use_cache:
            raise ValueError(
                "position_ids pack several documents into one sequence, which a cache does not "
                "support; use use_cache=False, or pass attention_mask if this is padding"
            )
        if use_cache and cache is None:
            cache = DynamicCache()
        elif not use_cache and begins:
            cache = None
        size = T if cache is None else room(cache) or past + T
        segments = tokens.new_ones((B, size))
        if packed and breaks is not None:
            segments[:, 1:] += breaks.cumsum(dim=1)
        if attention_mask is not None:
            shape = tuple(attention_mask.shape)
            if shape != (B, size) and (len(shape) != 2 or not (cache and room(cache) > shape[1])):
                raise ValueError(
                    f"attention_mask has shape {shape}, expected {(B, size)}: past and new tokens, "
                    "0 for padding"
                )
            segments[:, : shape[1]] = attention_mask != 0
        slots = past + torch.arange(T, device=tokens.device)
        fresh = begins and bool((segments[:, :T] == 1).all())
        if position_ids is None:
            position_ids = ((segments > 0).cumsum(dim=1) - 1).clamp(min=0)[:, slots]
        last = self.config.num_hidden_layers - 1
        return CacheAdapter(cache, segments, slots, position_ids, last, fresh)


def room(cache: Cache) -> int:
    """Capacity of a static cache in tokens; 0 for a cache that grows."""
    return getattr(cache.layers[0], "max_cache_len", 0) if cache.layers else 0
