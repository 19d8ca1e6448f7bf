"""
Export to and import from the Hugging Face format: weights, config, tokenizer and remote code.

    GPT, Tokenizer -> write_hf -> folder for AutoModelForCausalLM and AutoTokenizer -> read_hf

The classic architecture (`GPTConfig.classic`) maps to transformers' NanoChat classes; all others
ship their model classes as remote code (hf/modeling.py). The tokenizer is exact: same ids, same
chat rendering. Writing and reading require no Hugging Face package except safetensors.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from nanochat.common import REPOSITORY, UsageError, code_digest, read_json, write_atomic, write_json
from nanochat.engine import TURN_TOKENS
from nanochat.golf.size import list_imported_modules, read_source
from nanochat.gpt import GPT, GPTConfig
from nanochat.hf.tokenizer import BOS, END, read_object, read_tokenizer, write_tokenizer
from nanochat.loss import SOFTCAP
from nanochat.recipe import require_same_code
from nanochat.recursion.model import new_model, read_config
from nanochat.tokenizer import Tokenizer

NATIVE, REMOTE = "nanochat", "nanochat_remote"  # model_type in config.json
MODELING = "hf.modeling"  # entry module of the remote code
MOST_DISTANCE = 1e-3  # between logits of an export and ours in float32, relative to the largest
CARD_MARK = "A model trained with nanochat:"
CARD = """---
library_name: transformers
pipeline_tag: text-generation
tags:
- nanochat
---

A model trained with nanochat: {params:,} parameters, {layers} layers, vocabulary size {vocab:,},
context length {context:,}.

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

## Tokenizer and chat template

- Every text must begin with `{bos}`. Both `tokenizer(text)` and the chat template add it. To
  tokenize a conversation that was rendered with `tokenize=False`, call
  `tokenizer(rendered, add_special_tokens=False)`; otherwise `{bos}` is added twice.
- Unlike in nanochat, a special token's name typed in a message is parsed as that token. Recent
  versions of transformers keep it as text with `apply_chat_template(...,
  sanitize_control_tokens=True)`. With older ones, remove such names from untrusted input.
- Padding is `{bos}`, on the left. `{bos}` also ends a document, so pass the attention mask.

## Compatibility

- transformers 5 (tried: 5.23 and 5.24): yes, {loads}.
- vLLM: not tested. llama.cpp: no; the gguf package (0.19.0) has no matching architecture.
"""
NATIVE_LOADS = "with its own NanoChat classes and no remote code"
REMOTE_LOADS = """\
with the code in this folder
  (`trust_remote_code=True`). Beam search, gradient checkpointing, packed sequences
  (`position_ids`) and adapters work; static caches, `inputs_embeds`, hidden states, attentions
  and a resized vocabulary do not. A model trained with `--arch=classic` needs no remote code"""

# ---- Writing -------------------------------------------------------------------------------------


def write_hf(
    folder: Path,
    model: GPT,
    tokenizer: Tokenizer,
    dtype: torch.dtype = torch.float32,
    origin: Mapping[str, Any] | None = None,
) -> None:
    """
    Write a model and its tokenizer, overwriting an earlier export in the folder.

    origin: JSON-serializable metadata on the model's training; returned by `read_hf`. Raises
    UsageError if the folder has other files.
    """
    require_own_folder(folder)
    folder.mkdir(parents=True, exist_ok=True)
    native = is_native(model)
    names = native_names(model.cfg) if native else {n: f"gpt.{n}" for n in model.state_dict()}
    tensors = {
        names[name]: p.detach().to("cpu", dtype, copy=True).contiguous()  # the format has no ties
        for name, p in model.state_dict().items()
    }
    describe = native_config if native else remote_config
    config = {**describe(model.cfg), "dtype": str(dtype).removeprefix("torch.")}
    ends = (END, *(name for name in TURN_TOKENS if name != END))
    ids = {"bos_token_id": tokenizer.bos_id, "eos_token_id": list(map(tokenizer.special, ends))}
    history = {"nanochat": dict(origin)} if origin else {}
    # With a pad_token_id, transformers would not train the embedding of that token (BOS)
    # It marks the folder as an export, so it is the first file
    write_json(folder / "config.json", {**config, **ids, "pad_token_id": None, **history})
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    write_json(folder / "generation_config.json", {**ids, "pad_token_id": tokenizer.bos_id})
    write_tokenizer(folder, tokenizer, model.cfg.max_seq_len)
    if not native:
        ours = re.compile(r"^from nanochat\.([\w.]+)", re.MULTILINE)
        for name in list_imported_modules(MODELING):
            # The exported folder is flat
            text = ours.sub(lambda found: f"from .{found[1].replace('.', '_')}", read_source(name))
            write_atomic(folder / f"{name.replace('.', '_')}.py", text)
    card = CARD.format(
        params=model.num_params(),
        layers=model.cfg.n_layer,
        vocab=model.cfg.vocab_size,
        context=model.cfg.max_seq_len,
        remote="" if native else ", trust_remote_code=True",
        bos=BOS,
        loads=NATIVE_LOADS if native else REMOTE_LOADS,
    )
    page = folder / "README.md"
    if not page.exists() or CARD_MARK in page.read_text(errors="replace"):  # not one's own
        write_atomic(page, card)


def require_own_folder(folder: Path) -> None:
    """Raise UsageError unless a folder is new, empty, or an earlier export."""
    visible = [x for x in folder.glob("*") if not x.name.startswith(".")]  # .git may be there
    config = folder / "config.json"
    kind = read_json(config).get("model_type") if config.is_file() else None
    if visible and kind not in (NATIVE, REMOTE):
        problem = f"{folder} has files that are not of an earlier export"
        raise UsageError(problem, "use a new or empty folder for --out")


def is_native(model: GPT) -> bool:
    """Whether transformers has a built-in class for this architecture, with the same weights."""
    cfg = model.cfg
    classic = type(cfg) is GPTConfig and cfg == cfg.classic()
    return classic and native_names(cfg).keys() == model.state_dict().keys()


def native_names(cfg: GPTConfig) -> dict[str, str]:
    """Map our tensor names to those of transformers, for the classic architecture."""
    parts = {f"attention.{n}": f"self_attn.{n}_proj" for n in ("q", "k", "v")}
    parts |= {"attention.out": "self_attn.o_proj", "mlp.up": "mlp.fc1", "mlp.down": "mlp.fc2"}
    names = {"embed.weight": "model.embed_tokens.weight", "head.weight": "lm_head.weight"}
    for i in range(cfg.n_layer):
        for ours, theirs in parts.items():
            names[f"blocks.{i}.{ours}.weight"] = f"model.layers.{i}.{theirs}.weight"
    return names


def native_config(cfg: GPTConfig) -> dict[str, Any]:
    """Config of transformers' NanoChatForCausalLM."""
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
        "rms_norm_eps": torch.finfo(torch.float32).eps,  # default of F.rms_norm
        "rope_parameters": {"rope_type": "default", "rope_theta": cfg.rope_theta},
        "final_logit_softcapping": SOFTCAP,
        "attention_bias": False,
        "tie_word_embeddings": False,
    }


def remote_config(cfg: GPTConfig) -> dict[str, Any]:
    """Config for the remote code; `gpt` has the fields of GPTConfig."""
    return {
        "architectures": ["NanochatForCausalLM"],
        "model_type": REMOTE,
        "auto_map": {
            "AutoConfig": f"{MODELING.replace('.', '_')}.NanochatConfig",
            "AutoModelForCausalLM": f"{MODELING.replace('.', '_')}.NanochatForCausalLM",
        },
        "gpt": asdict(cfg),
    }


# ---- Checks: an edited model is never exported as another one ------------------------------------


def require_model_code(what: str, recorded: Mapping[str, str]) -> None:
    """Raise UsageError if the model's code differs from the `recorded` one that trained `what`."""
    paths = [f"nanochat/{name.replace('.', '/')}.py" for name in list_imported_modules(MODELING)]
    texts = {path: (REPOSITORY / path).read_text() for path in paths if path in recorded}
    changed = [path for path, text in texts.items() if code_digest(text) != recorded[path]]
    require_same_code(what, changed, "check out the commit that trained it")


@torch.no_grad()
def check_logits(folder: Path) -> bool:
    """
    Compare the logits that transformers computes from an export with those of our code; returns
    False if it is not installed. Raises UsageError and removes the weights if they differ.
    """
    try:
        from transformers import AutoModelForCausalLM  # optional package
    except ModuleNotFoundError:
        return False
    loader: Any = AutoModelForCausalLM
    found = read_hf(folder)
    ours = new_model(found.cfg)
    ours.load_state_dict(found.weights)
    theirs = loader.from_pretrained(folder, dtype=torch.float32, trust_remote_code=True).eval()
    ids = torch.arange(64).view(2, 32) % found.cfg.vocab_size
    T = min(32, found.cfg.max_seq_len)
    right = ours(ids[:, :T])
    distance = float((theirs(ids[:, :T]).logits - right).abs().max())
    if not distance <= MOST_DISTANCE * right.abs().max():
        (folder / "model.safetensors").unlink()
        raise UsageError(
            f"{folder} computes other logits than this code, by up to {distance:.3g}; its weights "
            "were deleted",
            "a model with edited code is exported with it unless it was trained with "
            "--arch=classic, which transformers computes with its own code",
        )
    return True


# ---- Reading -------------------------------------------------------------------------------------


class HFModel(NamedTuple):
    """Contents of a Hugging Face model folder."""

    cfg: GPTConfig
    weights: dict[str, Tensor]
    """float32, under our names."""
    tokenizer: Tokenizer
    origin: Mapping[str, Any] | None
    """`origin` of `write_hf`; None for models exported by others."""


def read_hf(folder: Path) -> HFModel:
    """
    Read a folder written by `write_hf`, or any model of transformers' NanoChat classes.

    Raises FileNotFoundError, or ValueError with the file and the unsupported value.
    """
    file = folder / "config.json"
    if (folder / "adapter_config.json").exists() and not file.exists():
        fix = "merge it into its model (merge_and_unload of peft) and save that"
        raise ValueError(f"{folder} has an adapter, not a model; {fix}")
    config = read_object(file)
    kind = config.get("model_type")
    if kind not in (NATIVE, REMOTE):
        raise ValueError(
            f"{file} has model_type {kind!r}; only {NATIVE} and {REMOTE} can be imported; evaluate "
            "other models with scripts.base_eval --hf_path"
        )
    try:
        cfg = config_from_native(config, folder) if kind == NATIVE else read_config(config["gpt"])
    except (KeyError, TypeError) as error:
        why = f"{file} has a missing or unknown setting: {error}"
        raise ValueError(f"{why}; import it with the version that exported it") from error
    names = native_names(cfg) if kind == NATIVE else None
    found: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(file)
    if not found:
        raise FileNotFoundError(f"no weights (*.safetensors) in {folder}")
    names = names or {name.removeprefix("gpt."): name for name in found}
    mismatched = sorted(set(names.values()) ^ found.keys())
    if mismatched:
        raise ValueError(f"{folder}: missing or unexpected tensors: {', '.join(mismatched[:5])}")
    weights = {ours: found[theirs].float() for ours, theirs in names.items()}
    tokenizer = read_tokenizer(folder / "tokenizer.json")
    if tokenizer.vocab_size != cfg.vocab_size:
        raise ValueError(
            f"{folder}: vocab_size is {cfg.vocab_size}, but tokenizer.json has "
            f"{tokenizer.vocab_size} tokens"
        )
    return HFModel(cfg, weights, tokenizer, config.get("nanochat"))


def config_from_native(config: Mapping[str, Any], folder: Path) -> GPTConfig:
    """
    Convert a NanoChat config to ours; rms_norm_eps is ignored. Raises ValueError for settings that
    the model does not support.
    """
    width, heads = config["hidden_size"], config["num_attention_heads"]
    ratio = config["intermediate_size"] / width
    if int(ratio * width) < config["intermediate_size"]:
        ratio = math.nextafter(ratio, math.inf)  # GPTConfig rounds the product down
    plain = GPTConfig(
        vocab_size=config["vocab_size"],
        n_layer=config["num_hidden_layers"],
        d_model=width,
        n_head=heads,
        n_kv_head=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or width // heads,
        max_seq_len=config["max_position_embeddings"],
        mlp_ratio=ratio,
    ).classic()
    written = native_config(plain)
    rope = {**written["rope_parameters"], "rope_theta": config.get("rope_theta", plain.rope_theta)}
    rope |= (config.get("rope_scaling") or {}) | (config.get("rope_parameters") or {})
    found, file = {**written, **config, "rope_parameters": rope}, folder / "config.json"
    same = ("hidden_act", "final_logit_softcapping", "attention_bias", "tie_word_embeddings")
    for name in (*same, "rope_parameters"):
        if found[name] != written[name]:
            raise ValueError(f"{file}: {name} is {found[name]}, not {written[name]}")
    return plain
