"""
Wraps GPT and its subclasses as a transformers causal language model.

    input ids, attention mask, cache -> GPT.prepare -> GPT.final_state -> logits, loss, states

If transformers lacks the architecture, hf/export.py copies this file and the modules that it
imports into the exported folder; `trust_remote_code=True` runs them.
"""

import dataclasses
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor
from transformers import Cache, DynamicCache, GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer, StaticLayer
from transformers.modeling_outputs import CausalLMOutputWithPast

from nanochat.golf.model import new_model, read_config
from nanochat.loss import cap


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
            # Layers of the cache: keys and values, plus one with the ids of previous tokens
            self.num_hidden_layers = len(shape.order) + shape.uses_previous_token
            self.num_attention_heads = shape.n_head
            self.num_key_value_heads = shape.n_kv_head
            self.head_dim = shape.head_dim
            self.max_position_embeddings = shape.max_seq_len
        kwargs.setdefault("tie_word_embeddings", False)
        super().__init__(**kwargs)


@dataclasses.dataclass(eq=False)
class StoredTokens:
    """The counterpart of attention.CacheView for a transformers Cache or for no cache."""

    cache: Cache | None
    segments: Tensor
    """(B, M): document number of each slot (past, new and free ones), 0 for padding."""
    slots: Tensor
    """(T,): slots of the new tokens."""
    positions: Tensor
    """(B, T): their rotary positions."""
    last_layer: int
    """Layer of the cache that stores token ids, if the model needs them."""
    fresh: bool
    """No past, padding or packing: plain causal attention suffices."""
    stored: tuple[Tensor, Tensor] | None = None
    """Keys and values of the layer just written."""

    def preceding(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """
        Return the two tokens before each new one, latest first, (B, T) each, -1 before a document
        start; padding is skipped.

        The cache stores token ids as keys of its last layer, so that they are reordered and
        cropped with it. Raises ValueError for a cache that does not store them exactly.
        """
        known = tokens
        if self.cache is not None:
            new = tokens[:, None, :, None]  # (B, 1, T, 1)
            keys = self.cache.update(new, new, self.last_layer)[0]
            exact = type(self.cache.layers[self.last_layer]) in (DynamicLayer, StaticLayer)
            if not exact or keys.dtype != tokens.dtype:
                raise ValueError(
                    f"{type(self.cache).__name__} cannot store token ids, but this model needs "
                    "those of previous tokens; use a DynamicCache, or a StaticCache without "
                    "early initialization"
                )
            known = keys[:, 0, :, 0]  # (B, M)
        slot = torch.arange(known.size(1), device=tokens.device)
        last = torch.where(self.segments > 0, slot, -1).cummax(dim=1).values  # last real token
        previous = F.pad(last, (1, 0), value=-1)  # (B, M + 1), slot of the token before each slot
        before = previous[:, self.slots]  # (B, T)
        earlier = previous.gather(1, before.clamp(min=0)).masked_fill(before < 0, -1)

        def tokens_at(slots: Tensor) -> Tensor:
            at = slots.clamp(min=0)
            same = self.segments.gather(1, at) == self.segments[:, self.slots]
            return known.gather(1, at).masked_fill(~((slots >= 0) & same), -1)

        return tokens_at(before), tokens_at(earlier)

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Store keys and values of the new tokens in a layer, (B, T, G, D) each."""
        assert self.cache is not None
        self.stored = self.cache.update(k.transpose(1, 2), v.transpose(1, 2), layer)

    def read(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return all keys (B, G, D, M) and values (B, G, M, D) of the layer just written."""
        assert self.stored is not None
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


class NanochatForCausalLM(PreTrainedModel, GenerationMixin):
    """GPT with the interface of transformers."""

    config_class = NanochatConfig
    base_model_prefix = "gpt"
    supports_gradient_checkpointing = True
    _no_split_modules = ["Block"]
    _skip_keys_device_placement = ["past_key_values"]
    _supports_sdpa = True

    def __init__(self, config: NanochatConfig):
        super().__init__(config)
        self.gpt = new_model(read_config(config.gpt))
        self.gradient_checkpointing = False
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

    def _set_gradient_checkpointing(
        self,
        enable: bool = True,
        gradient_checkpointing_func: Any = torch.utils.checkpoint.checkpoint,
        every_n_layers: int = 1,
    ) -> None:
        """Checkpoint every layer, non-reentrant. Raises ValueError for any other setting."""
        plain = torch.utils.checkpoint.checkpoint
        chosen = getattr(gradient_checkpointing_func, "keywords", {})
        if getattr(gradient_checkpointing_func, "func", gradient_checkpointing_func) is not plain:
            raise ValueError("activation offloading is not supported; omit offload=True")
        if every_n_layers != 1:
            raise ValueError(f"every_n_layers={every_n_layers} is not supported; use 1")
        unknown = chosen.keys() - {"use_reentrant", "preserve_rng_state"}  # no effect on gradients
        if unknown:
            raise ValueError(f"unsupported gradient_checkpointing_kwargs: {sorted(unknown)}")
        self.gradient_checkpointing = enable

    # ---- embeddings --------------------------------------------------------------------------

    def get_input_embeddings(self) -> torch.nn.Module:
        return self.gpt.embed

    def set_input_embeddings(self, value: Any) -> None:
        self.gpt.embed = value

    def get_output_embeddings(self) -> torch.nn.Module | None:
        """The LM head; None if it is tied to the input embeddings."""
        return self.gpt.head

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
        resize: Any = self._get_resized_embeddings
        for name, table in self.gpt.value_embeds.items():
            self.gpt.value_embeds[name] = resize(table, size, mean_resizing=mean_resizing)
        self.gpt.cfg = dataclasses.replace(self.gpt.cfg, vocab_size=size)
        self.config.gpt["vocab_size"] = self.config.vocab_size = size
        return embed

    # ---- generation --------------------------------------------------------------------------

    def prepare_inputs_for_generation(
        self, input_ids: Tensor, inputs_embeds: Tensor | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        """Keep `input_ids` together with `inputs_embeds`, as the model may need both."""
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
        attention_mask: Tensor | None, past_key_values: Cache, **kwargs: Any
    ) -> Tensor | None:
        """Pad the mask to the size of a static cache, (B, M): the same shape at every step."""
        if attention_mask is None:
            return None
        return F.pad(attention_mask, (0, room(past_key_values) - attention_mask.size(1)), value=1)

    # ---- computation -------------------------------------------------------------------------

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
        return_dict: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **loss_kwargs: Any,
    ) -> CausalLMOutputWithPast | tuple[Any, ...]:
        """
        input_ids (B, T), attention_mask (B, past + T) with 0 for padding -> logits (B, T, V), or
        only those of the last `logits_to_keep` tokens. `labels`: (B, T), -100 is ignored.

        position_ids: (B or 1, T), by default derived from the attention mask. Without a mask or
        past, each position that is not its predecessor plus 1 starts a new packed document;
        attention does not cross documents.
        inputs_embeds: (B, T, C), replaces the embeddings of input_ids; a model that looks up ids
        otherwise (see GPT.looks_up_ids) needs both.
        hidden_states: the input of the first layer, then the output of each layer, once per pass
        through a looped layer; the last one is normalized.

        Raises ValueError for unsupported arguments and wrong shapes.
        """
        config = self.config
        known = ("num_items_in_batch", "shift_labels", "ignore_index")
        for name, value in loss_kwargs.items():
            if name not in known and value is not None:
                raise ValueError(f"NanochatForCausalLM has no argument {name}; omit it")
        if config.output_attentions if output_attentions is None else output_attentions:
            raise ValueError(
                "output_attentions=True is not supported: fused attention does not compute the "
                "weights; omit it"
            )
        tokens = self.tokens(input_ids, inputs_embeds)

        self.gpt.dtype = self.gpt.embed.weight.dtype
        recompute = self.gradient_checkpointing and self.training and torch.is_grad_enabled()
        self.gpt.checkpoint_activations = recompute
        view: Any = self.view(tokens, attention_mask, position_ids, past_key_values, use_cache)
        if recompute and view.cache is not None:
            raise ValueError("gradient checkpointing does not support a cache; use use_cache=False")
        ctx = self.gpt.prepare(tokens, view, embeds=inputs_embeds)
        if output_hidden_states is None:
            output_hidden_states = config.output_hidden_states
        stored = None if view.cache is None else view
        ctx = ctx._replace(cache=stored, outputs=[] if output_hidden_states else None)
        hidden = self.gpt.final_state(ctx)  # (B, T, C)
        states = None if ctx.outputs is None else (ctx.x0, *ctx.outputs[:-1], hidden)

        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        head = self.get_output_embeddings()  # call it: an adapter may wrap it
        logits = self.gpt.logits(hidden[:, kept]) if head is None else head(hidden[:, kept])
        logits = logits if head is None else cap(logits)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, logits.size(-1), **loss_kwargs)
        output: Any = CausalLMOutputWithPast
        output = output(loss=loss, logits=logits, past_key_values=view.cache, hidden_states=states)
        in_full = config.return_dict if return_dict is None else return_dict
        return output if in_full else output.to_tuple()

    def tokens(self, input_ids: Tensor | None, inputs_embeds: Tensor | None) -> Tensor:
        """
        Return the token ids (B, T), zeros if only `inputs_embeds` is given. Raises ValueError if
        the model needs ids or a shape is wrong.
        """
        if input_ids is None and inputs_embeds is None:
            raise ValueError("input_ids and inputs_embeds are both missing; pass one of them")
        if input_ids is None and self.gpt.looks_up_ids:
            raise ValueError(
                "inputs_embeds without input_ids: this model needs token ids for value "
                "embeddings, a hash-bigram embedding or previous-token keys; pass input_ids of the "
                "same shape as well"
            )
        given: Any = inputs_embeds if input_ids is None else input_ids
        tokens = given.new_zeros(given.shape[:2], dtype=torch.long) if input_ids is None else given
        expected = (*tokens.shape, self.gpt.cfg.d_model)
        if inputs_embeds is not None and inputs_embeds.shape != expected:
            raise ValueError(f"inputs_embeds: shape {tuple(inputs_embeds.shape)}, not {expected}")
        return tokens

    def view(
        self,
        tokens: Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        cache: Cache | None,
        use_cache: bool | None,
    ) -> StoredTokens:
        """
        Build the cache view of the new tokens (B, T). Raises ValueError for a wrong shape, and for
        packed documents with a cache.
        """
        B, T = tokens.shape
        past: Any = cache.get_seq_length() if cache is not None else 0  # an int or a tensor
        begins = cache is None or (isinstance(past, int) and past == 0)
        if position_ids is not None:
            if position_ids.shape not in ((B, T), (1, T)):
                raise ValueError(f"position_ids: shape {tuple(position_ids.shape)}, not {(B, T)}")
            position_ids = position_ids.expand(B, T)
        packed = False
        segments = torch.ones_like(tokens)
        if attention_mask is None and begins and position_ids is not None:
            segments = 1 + (F.pad(position_ids.diff(dim=1), (1, 0), value=1) != 1).cumsum(dim=1)
            packed = bool((segments > 1).any())
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
        if attention_mask is not None:
            shape = tuple(attention_mask.shape)
            if shape != (B, size) and (len(shape) != 2 or not (cache and room(cache) > shape[1])):
                raise ValueError(
                    f"attention_mask has shape {shape}, expected {(B, size)}: past and new tokens, "
                    "0 for padding"
                )
            segments = (attention_mask != 0).long().to(tokens.device)
        elif not packed:
            segments = tokens.new_ones((B, size))
        segments = F.pad(segments, (0, size - segments.size(1)), value=1)
        slots = past + torch.arange(T, device=tokens.device)
        fresh = begins and not packed and bool((segments[:, :T] > 0).all())
        if position_ids is None:
            position_ids = ((segments > 0).cumsum(dim=1) - 1).clamp(min=0)[:, slots]
        last = self.config.num_hidden_layers - 1
        return StoredTokens(cache, segments, slots, position_ids, last, fresh)


def room(cache: Cache) -> int:
    """Capacity of a static cache in tokens; 0 for a cache that grows."""
    return getattr(cache.layers[0], "max_cache_len", 0) if cache.layers else 0
