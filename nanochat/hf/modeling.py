"""
GPT and its subclasses behind the interface of a causal model in transformers.

    input ids, attention mask, cache -> GPT.prepare -> GPT.final_state -> logits, loss, states

hf/export.py copies this file and the modules that it imports into every exported folder whose
architecture transformers does not have; `trust_remote_code=True` runs them there.
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
            # Of the cache: keys and values by layer, then tokens where the one in front counts
            self.num_hidden_layers = len(shape.order) + bool(shape.bigram_rows)
            self.num_attention_heads = shape.n_head
            self.num_key_value_heads = shape.n_kv_head
            self.head_dim = shape.head_dim
            self.max_position_embeddings = shape.max_seq_len
        kwargs.setdefault("tie_word_embeddings", False)
        super().__init__(**kwargs)


class StoredTokens:
    """
    What attention.CacheView is to our own cache, over a Cache of transformers or none at all.

    segments: (B, M), 0 for padding and else the number of the document, of all tokens there is
    room for, at least the past and the new ones. slots: (T,), where among them the new ones lie.
    positions: (B, T), of the new ones, for the rotary embedding.
    """

    def __init__(
        self,
        cache: Cache | None,
        segments: Tensor,
        slots: Tensor,
        positions: Tensor,
        last_layer: int,
        fresh: bool,
    ):
        self.cache, self.segments, self.slots, self.fresh = cache, segments, slots, fresh
        self.positions, self.last_layer = positions, last_layer
        self.stored: tuple[Tensor, Tensor] | None = None

    def preceding(self, tokens: Tensor) -> Tensor:
        """
        The token in front of each new one (B, T), -1 where a document begins; padding is skipped.
        A cache stores the tokens as keys of its last layer, so that whoever sorts or shortens the
        cache does so with them. Raises ValueError for a cache that would not store them exactly.
        """
        known = tokens
        if self.cache is not None:
            new = tokens[:, None, :, None]  # (B, 1, T, 1)
            keys = self.cache.update(new, new, self.last_layer)[0]
            exact = type(self.cache.layers[self.last_layer]) in (DynamicLayer, StaticLayer)
            if not exact or keys.dtype != tokens.dtype:
                raise ValueError(
                    "hash-bigram embeddings need a cache that keeps token ids as they are: a "
                    "DynamicCache or a StaticCache that is not initialized early, not "
                    f"{type(self.cache).__name__}"
                )
            known = keys[:, 0, :, 0]  # (B, M)
        slot = torch.arange(known.size(1), device=tokens.device)
        last = torch.where(self.segments > 0, slot, -1).cummax(dim=1).values  # no padding up to it
        before = F.pad(last, (1, 0), value=-1)[:, self.slots]  # (B, T)
        found, at = before >= 0, before.clamp(min=0)
        same = self.segments.gather(1, at) == self.segments[:, self.slots]
        return known.gather(1, at).masked_fill(~(found & same), -1)

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Store the new tokens' keys and values of a layer, (B, T, G, D) each."""
        assert self.cache is not None
        self.stored = self.cache.update(k.transpose(1, 2), v.transpose(1, 2), layer)

    def read(self, layer: int) -> tuple[Tensor, Tensor]:
        """All that the layer just written holds: keys (B, G, D, M), values (B, G, M, D)."""
        assert self.stored is not None
        keys, values = self.stored
        return keys.mT, values

    def mask(self, window: int | None) -> Tensor | None:
        """(B, 1, T, M) bool: what each new token sees. None: simply its row's past."""
        if self.fresh:
            return None
        key = torch.arange(self.segments.size(1), device=self.segments.device)
        distance = self.slots[:, None] - key  # (T, M)
        segments = self.segments[:, None]  # (B, 1, M)
        seen = (distance >= 0) & (segments > 0) & (segments == segments[..., self.slots].mT)
        if window is not None:
            seen &= distance <= window
        return (seen | (distance == 0))[:, None]  # padding sees itself, so that nothing is NaN


class NanochatForCausalLM(PreTrainedModel, GenerationMixin):
    """A GPT with the calls of transformers."""

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
        if self.gpt.device.type != "meta":  # not loaded from a file
            self.gpt.init_weights()
            for weight in self.parameters():
                weight._is_hf_initialized = True  # type: ignore
        self.post_init()

    @torch.no_grad()
    def _init_weights(self, module: torch.nn.Module) -> None:
        """Weights that a file lacks, and new ones of a larger vocabulary."""
        for weight in module.parameters(recurse=False):
            if not getattr(weight, "_is_hf_initialized", False):
                weight.normal_(std=weight.size(-1) ** -0.5)

    def _set_gradient_checkpointing(
        self,
        enable: bool = True,
        gradient_checkpointing_func: Any = torch.utils.checkpoint.checkpoint,
        every_n_layers: int = 1,
    ) -> None:
        """Every layer, non-reentrant. Raises ValueError where something else is asked for."""
        plain = torch.utils.checkpoint.checkpoint
        chosen = getattr(gradient_checkpointing_func, "keywords", {})
        if getattr(gradient_checkpointing_func, "func", gradient_checkpointing_func) is not plain:
            raise ValueError("activations cannot be offloaded here: leave out offload=True")
        if every_n_layers != 1:
            raise ValueError(f"every_n_layers={every_n_layers}: here every layer is checkpointed")
        unknown = chosen.keys() - {"use_reentrant", "preserve_rng_state"}  # same gradients
        if unknown:
            raise ValueError(f"gradient_checkpointing_kwargs has no effect here: {sorted(unknown)}")
        self.gradient_checkpointing = enable

    # ---- embeddings --------------------------------------------------------------------------

    def get_input_embeddings(self) -> torch.nn.Module:
        return self.gpt.embed

    def set_input_embeddings(self, value: Any) -> None:
        self.gpt.embed = value

    def get_output_embeddings(self) -> torch.nn.Module | None:
        """None where the input embeddings score the tokens too."""
        return self.gpt.head

    def set_output_embeddings(self, new_embeddings: Any) -> None:
        self.gpt.head = new_embeddings

    def resize_token_embeddings(
        self,
        new_num_tokens: int | None = None,
        pad_to_multiple_of: int | None = None,
        mean_resizing: bool = True,
    ) -> Any:
        """As for any model; the value embeddings are resized with the others."""
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
        """As for any model, but a prompt given as vectors keeps its ids where it has them."""
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
        """Of a static cache: (B, M), of the same shape at every step."""
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
        input_ids (B, T), attention_mask (B, past + T) with 0 for padding -> logits (B, T, V), or of
        the last `logits_to_keep` tokens. `labels` (B, T), -100 where none counts.

        position_ids: (B or 1, T), by default counted by the attention mask. Without a mask and a
        past, a position that does not follow the one before it begins a new document, which does
        not see those before it.
        inputs_embeds: (B, T, C) in place of the vectors of input_ids; a model that looks up tokens
        elsewhere too, in value embeddings or by hash of bigrams, needs both.
        hidden_states: the embedded tokens, then the state after each layer, as often as a token
        visits it; the last one normalized, as the head sees it.

        Raises ValueError naming an argument that does not fit or that the model does not have.
        """
        config = self.config
        known = ("num_items_in_batch", "shift_labels", "ignore_index")
        for name, value in loss_kwargs.items():
            if name not in known and value is not None:
                raise ValueError(f"NanochatForCausalLM has no argument {name}; leave it out")
        if config.output_attentions if output_attentions is None else output_attentions:
            raise ValueError(
                "output_attentions=True: attention weights are never formed here, the kernels are "
                "fused; leave it out"
            )
        tokens = self.tokens(input_ids, inputs_embeds)

        self.gpt.dtype = self.gpt.embed.weight.dtype
        recompute = self.gradient_checkpointing and self.training and torch.is_grad_enabled()
        self.gpt.checkpoint_activations = recompute
        view: Any = self.view(tokens, attention_mask, position_ids, past_key_values, use_cache)
        if recompute and view.cache is not None:
            raise ValueError("gradient checkpointing cannot use a cache: use_cache=False")
        ctx = self.gpt.prepare(tokens, view, embeds=inputs_embeds)
        if output_hidden_states is None:
            output_hidden_states = config.output_hidden_states
        stored = None if view.cache is None else view
        ctx = ctx._replace(cache=stored, outputs=[] if output_hidden_states else None)
        hidden = self.gpt.final_state(ctx)  # (B, T, C)
        states = None if ctx.outputs is None else (ctx.x0, *ctx.outputs[:-1], hidden)

        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        head = self.get_output_embeddings()  # called, not only read: an adapter may wrap it
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
        The ids (B, T), zeros where the model does without. Raises ValueError where it does not, and
        for vectors of another shape.
        """
        if input_ids is None and inputs_embeds is None:
            raise ValueError("give input_ids, or inputs_embeds")
        if input_ids is None and (self.gpt.bigrams is not None or len(self.gpt.value_embeds)):
            raise ValueError(
                "inputs_embeds alone are not enough: this model also looks up each token's id in "
                "its value embeddings or hash-bigram embedding; give input_ids of the same shape "
                "as well"
            )
        given: Any = inputs_embeds if input_ids is None else input_ids
        tokens = given.new_zeros(given.shape[:2], dtype=torch.long) if input_ids is None else given
        expected = (*tokens.shape, self.gpt.cfg.d_model)
        if inputs_embeds is not None and inputs_embeds.shape != expected:
            raise ValueError(f"inputs_embeds are {tuple(inputs_embeds.shape)}, not {expected}")
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
        Where the new tokens (B, T) lie and what they see. Raises ValueError naming an argument of
        the wrong shape.
        """
        B, T = tokens.shape
        past: Any = cache.get_seq_length() if cache is not None else 0  # an int or a tensor
        begins = cache is None or (isinstance(past, int) and past == 0)
        if position_ids is not None:
            if position_ids.shape not in ((B, T), (1, T)):
                raise ValueError(f"position_ids are {tuple(position_ids.shape)}, not {(B, T)}")
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
                "position_ids begin a new document within a row, which no cache can continue; "
                "use_cache=False, or an attention_mask for padding"
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
                    f"attention_mask is {shape}, expected 1 for each past and new token and 0 for "
                    f"padding, {(B, size)}"
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
    """How many tokens a static cache has room for; 0 for one that grows."""
    return getattr(cache.layers[0], "max_cache_len", 0) if cache.layers else 0
