"""
Models in Hugging Face's format, both ways: weights, configuration, and the code of our own.

    GPT, Tokenizer -> write_hf -> a folder for AutoModelForCausalLM and AutoTokenizer -> read_hf

The plain architecture (`GPTConfig.classic`) becomes transformers' own NanoChat classes; any other
brings the classes of its model as remote code, behind hf/modeling.py. Both keep
the tokenizer exact: same ids, same rendering of conversations. Needs no package of Hugging Face.
"""

import re
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from nanochat.common import write_atomic, write_json
from nanochat.golf.model import read_config
from nanochat.golf.size import code_of, source_of
from nanochat.gpt import GPT, GPTConfig
from nanochat.hf.tokenizer import BOS, END, read_object, read_tokenizer, write_tokenizer
from nanochat.loss import SOFTCAP
from nanochat.tokenizer import Tokenizer

NATIVE, REMOTE = "nanochat", "nanochat_remote"  # model_type in config.json
MODELING = "hf.modeling"  # the module that the remote code begins with
CARD = """---
library_name: transformers
pipeline_tag: text-generation
tags:
- nanochat
---

A model trained with nanochat: {params:,} parameters, {layers} layers, {vocab:,} token ids, rows of
{context:,} tokens.

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("<this folder>"{remote})
model = AutoModelForCausalLM.from_pretrained("<this folder>"{remote})
inputs = tokenizer.apply_chat_template(
    [{{"role": "user", "content": "Hello!"}}],
    add_generation_prompt=True,
    return_dict=True,
    return_tensors="pt",
)
output = model.generate(**inputs, max_new_tokens=64)
print(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
```

## Texts and conversations

- Every text begins with `{bos}`. `tokenizer(text)` puts it in front, and so does the chat template.
  A conversation rendered with `tokenize=False` has it already, which no tokenizer.json can notice:
  pass it on with `tokenizer(rendered, add_special_tokens=False)`, or it has two.
- Messages have the roles system, user and assistant, in any order; other roles raise an error.
  System text is read as the user's, and neighboring messages of one speaker become one turn.
- With `add_generation_prompt=True`, an answer at the end is left out; `continue_final_message=True`
  continues it instead. `return_assistant_tokens_mask=True` marks the tokens that nanochat trains.
- The name of a special token typed in a message becomes that token, unlike in nanochat itself.
  Recent versions of transformers keep it as text: `apply_chat_template(...,
  sanitize_control_tokens=True)`. Otherwise take such names out of what strangers write.
- Padding is `{bos}`, on the left. It is the end of a document too, so pass the attention mask on.

## What loads it

{loads}
"""
NATIVE_LOADS = """\
- transformers 5: yes, by its own NanoChat classes, without remote code.
- vLLM: not tried.
- llama.cpp: no. The gguf package (0.19.0) lists no architecture of this kind to convert it to.
"""
REMOTE_LOADS = """\
- transformers 5: yes, with the code in this folder (`trust_remote_code=True`). Beams, static
  caches, gradient checkpointing, packed rows by `position_ids`, adapters and a resized vocabulary
  work. There are no attention weights to return (`output_attentions`).
  {embeds}
- vLLM: not tried; it has no such architecture, and this code does not use its attention.
- llama.cpp: no. The gguf package (0.19.0) lists no architecture of this kind to convert it to.
- A model trained with `--arch=classic` needs no remote code.
"""
EMBEDS_NEED_IDS = """\
The model also looks up each token's id (value embeddings, hash of bigrams), so `inputs_embeds` only
  replace the vectors of `input_ids`: give both."""
EMBEDS_ALONE = "`inputs_embeds` can take the place of `input_ids`."

# ------------------------------------------------------------------------------------------------
# Writing


def write_hf(
    folder: Path,
    model: GPT,
    tokenizer: Tokenizer,
    dtype: torch.dtype = torch.float32,
    origin: Mapping[str, Any] | None = None,
) -> None:
    """
    Write a model and its tokenizer; files of an earlier export in the folder are replaced.

    origin: whence the model comes, in types that JSON has; `read_hf` gives it back.
    """
    folder.mkdir(parents=True, exist_ok=True)
    native = is_native(model.cfg)
    names = native_names(model.cfg) if native else {n: f"gpt.{n}" for n in model.state_dict()}
    tensors = {
        names[name]: p.detach().to("cpu", dtype).contiguous()
        for name, p in model.state_dict().items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    describe = native_config if native else remote_config
    config = {**describe(model.cfg), "dtype": str(dtype).removeprefix("torch.")}
    ends = [tokenizer.special(END), tokenizer.bos_id]  # of an answer, and of a document
    ids = {"bos_token_id": tokenizer.bos_id, "eos_token_id": ends}
    history = {"nanochat": dict(origin)} if origin else {}
    # The class of transformers does not train the embedding of a padding token, and ours is BOS
    write_json(folder / "config.json", {**config, **ids, "pad_token_id": None, **history})
    write_json(folder / "generation_config.json", {**ids, "pad_token_id": tokenizer.bos_id})
    write_tokenizer(folder, tokenizer, model.cfg.max_seq_len)
    if not native:
        for name in (MODELING, *code_of("golf.model")):
            write_atomic(folder / f"{flat(name)}.py", relative_imports(source_of(name)))
    looks_up_ids = bool(model.cfg.bigram_rows or len(model.value_embeds))
    embeds = EMBEDS_NEED_IDS if looks_up_ids else EMBEDS_ALONE
    card = CARD.format(
        params=model.num_params(),
        layers=model.cfg.n_layer,
        vocab=model.cfg.vocab_size,
        context=model.cfg.max_seq_len,
        remote="" if native else ", trust_remote_code=True",
        bos=BOS,
        loads=(NATIVE_LOADS if native else REMOTE_LOADS.format(embeds=embeds)).rstrip(),
    )
    write_atomic(folder / "README.md", card)


def is_native(cfg: GPTConfig) -> bool:
    """Whether transformers has this architecture itself."""
    return type(cfg) is GPTConfig and cfg == cfg.classic()


def native_names(cfg: GPTConfig) -> dict[str, str]:
    """Our name of every tensor of the plain architecture -> that of transformers."""
    parts = {f"attention.{n}": f"self_attn.{n}_proj" for n in ("q", "k", "v")}
    parts |= {"attention.out": "self_attn.o_proj", "mlp.up": "mlp.fc1", "mlp.down": "mlp.fc2"}
    names = {"embed.weight": "model.embed_tokens.weight", "head.weight": "lm_head.weight"}
    for i in range(cfg.n_layer):
        for ours, theirs in parts.items():
            names[f"blocks.{i}.{ours}.weight"] = f"model.layers.{i}.{theirs}.weight"
    return names


def native_config(cfg: GPTConfig) -> dict[str, Any]:
    """The configuration of transformers' NanoChatForCausalLM."""
    return {
        "architectures": ["NanoChatForCausalLM"],
        "model_type": NATIVE,
        "vocab_size": cfg.vocab_size,
        "hidden_size": cfg.d_model,
        "intermediate_size": int(cfg.mlp_ratio * cfg.d_model),
        "num_hidden_layers": cfg.n_layer,
        "num_attention_heads": cfg.n_head,
        "num_key_value_heads": cfg.n_kv_head,
        "head_dim": cfg.head_dim,
        "max_position_embeddings": cfg.max_seq_len,
        "hidden_act": "relu2",
        "rms_norm_eps": torch.finfo(torch.float32).eps,  # what torch's rms_norm takes
        "rope_parameters": {"rope_type": "default", "rope_theta": cfg.rope_theta},
        "final_logit_softcapping": SOFTCAP,
        "attention_bias": False,
        "tie_word_embeddings": False,
    }


def remote_config(cfg: GPTConfig) -> dict[str, Any]:
    """The configuration of the remote code; `gpt` is ours, field by field."""
    return {
        "architectures": ["NanochatForCausalLM"],
        "model_type": REMOTE,
        "auto_map": {
            "AutoConfig": f"{flat(MODELING)}.NanochatConfig",
            "AutoModelForCausalLM": f"{flat(MODELING)}.NanochatForCausalLM",
        },
        "gpt": asdict(cfg),
    }


# ------------------------------------------------------------------------------------------------
# Code that travels with the weights


def relative_imports(text: str) -> str:
    """A module as part of an exported folder, which also holds the modules that it imports."""
    ours = re.compile(r"^from nanochat\.([\w.]+) import", re.MULTILINE)
    return ours.sub(lambda found: f"from .{flat(found[1])} import", text)


def flat(module: str) -> str:
    """The name of a module in an exported folder, where no packages are."""
    return module.replace(".", "_")


# ------------------------------------------------------------------------------------------------
# Reading


class Imported(NamedTuple):
    """What a folder holds."""

    cfg: GPTConfig
    weights: dict[str, Tensor]
    """By our names, float32."""
    tokenizer: Tokenizer
    origin: Mapping[str, Any] | None
    """What `write_hf` was told of it; None for a model that others wrote."""


def read_hf(folder: Path) -> Imported:
    """
    Read a folder that `write_hf` wrote, or another of transformers' NanoChat classes.

    Raises FileNotFoundError, or ValueError naming the file and what in it is not ours.
    """
    config = read_object(folder / "config.json")
    kind = config.get("model_type")
    if kind == REMOTE:
        cfg = read_config(config["gpt"])
        names = None
    elif kind == NATIVE:
        cfg = from_native(config, folder)
        names = native_names(cfg)
    else:
        raise ValueError(
            f"{folder / 'config.json'} is of the type {kind!r}; only {NATIVE} and {REMOTE} can "
            "become one of our checkpoints. Others can be scored: scripts.base_eval --hf_path"
        )
    found: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(file)
    if not found:
        raise FileNotFoundError(f"{folder} holds no weights (*.safetensors)")
    names = names or {name.removeprefix("gpt."): name for name in found}
    lacking = sorted(set(names.values()) ^ found.keys())
    if lacking:
        raise ValueError(f"{folder}: tensors missing or too many: {', '.join(lacking[:5])}")
    weights = {ours: found[theirs].float() for ours, theirs in names.items()}
    tokenizer = read_tokenizer(folder / "tokenizer.json")
    return Imported(cfg, weights, tokenizer, config.get("nanochat"))


def from_native(config: Mapping[str, Any], folder: Path) -> GPTConfig:
    """Our configuration of a NanoChat model. Raises ValueError where it is not the plain one."""
    width, heads = config["hidden_size"], config["num_attention_heads"]
    plain = GPTConfig(
        vocab_size=config["vocab_size"],
        n_layer=config["num_hidden_layers"],
        d_model=width,
        n_head=heads,
        n_kv_head=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or width // heads,
        max_seq_len=config["max_position_embeddings"],
        mlp_ratio=config["intermediate_size"] / width,
    ).classic()
    written = native_config(plain)
    same = ("hidden_act", "final_logit_softcapping", "attention_bias", "tie_word_embeddings")
    for name in same:
        if config.get(name, written[name]) != written[name]:
            raise ValueError(
                f"{folder / 'config.json'}: {name} is {config[name]}, ours has {written[name]}"
            )
    theta = (config.get("rope_parameters") or {}).get("rope_theta", plain.rope_theta)
    if theta != plain.rope_theta:
        raise ValueError(f"{folder / 'config.json'}: rope_theta is {theta}, not {plain.rope_theta}")
    return plain
