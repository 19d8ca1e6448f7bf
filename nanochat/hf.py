"""
Models in Hugging Face's format, both ways: weights, configuration, tokenizer, chat template.

    GPT, Tokenizer -> write_hf -> a folder for AutoModelForCausalLM and AutoTokenizer -> read_hf

The plain architecture (`GPTConfig.classic`) becomes transformers' own NanoChat classes; any other
carries gpt.py and what it imports along as remote code, behind hf_modeling.py. Both keep the
tokenizer exact: same ids, same rendering of conversations. Needs no package of Hugging Face.
"""

import ast
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import nanochat
from nanochat.common import read_json, write_atomic, write_json
from nanochat.gpt import GPT, GPTConfig
from nanochat.tokenizer import SPECIAL_TOKENS, Tokenizer

NATIVE, REMOTE = "nanochat", "nanochat_remote"  # model_type in config.json
MODELING = "hf_modeling"  # the module that the remote code begins with
BOS, END = "<|bos|>", "<|assistant_end|>"
CARD = """---
library_name: transformers
pipeline_tag: text-generation
---

A model trained with nanochat: {params:,} parameters, {layers} layers, {vocab:,} token ids, rows of
{context:,} tokens.

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("<this folder>"{remote})
model = AutoModelForCausalLM.from_pretrained("<this folder>"{remote})
ids = tokenizer.apply_chat_template(
    [{{"role": "user", "content": "Hello!"}}], add_generation_prompt=True, return_tensors="pt"
)
print(tokenizer.decode(model.generate(**ids, max_new_tokens=64)[0]))
```

Every text begins with `{bos}`, which the tokenizer puts in front. Unlike nanochat itself, the
tokenizers of transformers turn the name of a special token into that token wherever it is typed:
take it out of what strangers write.
"""

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
    ids = {"bos_token_id": tokenizer.bos_id, "pad_token_id": tokenizer.bos_id}
    ends = [tokenizer.special(END), tokenizer.bos_id]  # of an answer, and of a document
    history = {"nanochat": dict(origin)} if origin else {}
    write_json(folder / "config.json", {**config, **ids, "eos_token_id": ends, **history})
    write_json(folder / "generation_config.json", {**ids, "eos_token_id": ends})
    write_tokenizer(folder, tokenizer, model.cfg.max_seq_len)
    if not native:
        for name in (MODELING, *code_of("gpt")):
            write_atomic(folder / f"{name}.py", relative_imports(source_of(name)))
    card = CARD.format(
        params=model.num_params(),
        layers=model.cfg.n_layer,
        vocab=model.cfg.vocab_size,
        context=model.cfg.max_seq_len,
        remote="" if native else ", trust_remote_code=True",
        bos=BOS,
    )
    write_atomic(folder / "README.md", card)


def is_native(cfg: GPTConfig) -> bool:
    """Whether transformers has this architecture itself."""
    return cfg == cfg.classic()


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
        "final_logit_softcapping": cfg.softcap,
        "attention_bias": False,
        "tie_word_embeddings": False,
    }


def remote_config(cfg: GPTConfig) -> dict[str, Any]:
    """The configuration of the remote code; `gpt` is ours, field by field."""
    return {
        "architectures": ["NanochatForCausalLM"],
        "model_type": REMOTE,
        "auto_map": {
            "AutoConfig": f"{MODELING}.NanochatConfig",
            "AutoModelForCausalLM": f"{MODELING}.NanochatForCausalLM",
        },
        "gpt": asdict(cfg),
    }


# ------------------------------------------------------------------------------------------------
# Code that travels with the weights


def source_of(module: str) -> str:
    """The text of one of our modules."""
    return (Path(nanochat.__path__[0]) / f"{module}.py").read_text(encoding="utf-8")


def code_of(module: str) -> list[str]:
    """A module and all of ours that it imports, directly or not."""
    found, waiting = [], [module]
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.append(name)
            waiting += own_imports(source_of(name))
    return found


def own_imports(text: str) -> list[str]:
    """Which of our modules a module imports."""
    nodes = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.ImportFrom)]
    modules = [node.module or "" for node in nodes]
    return [name.split(".")[1] for name in modules if name.startswith("nanochat.")]


def relative_imports(text: str) -> str:
    """A module as part of an exported folder: what it imports of ours lies beside it."""
    return re.sub(r"^from nanochat\.(\w+) import", r"from .\1 import", text, flags=re.MULTILINE)


# ------------------------------------------------------------------------------------------------
# Tokenizer


def byte_letters() -> dict[int, str]:
    """
    The letter that stands for each byte in tokenizer.json: itself where it can be printed, else
    the next unused one from U+0100 on. Source: the byte-level tokenizer of GPT-2.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in printable]
    return {b: chr(b) for b in printable} | {b: chr(256 + n) for n, b in enumerate(hidden)}


def halves(token: bytes, ranks: Mapping[bytes, int]) -> tuple[bytes, bytes]:
    """The two tokens that merging makes `token` of. Raises ValueError where it makes none."""
    parts = [bytes([byte]) for byte in token]
    while len(parts) > 2:
        merged = [parts[i] + parts[i + 1] for i in range(len(parts) - 1)]
        rank, i = min((ranks.get(pair, len(ranks)), i) for i, pair in enumerate(merged))
        if rank >= ranks[token]:
            break
        parts[i : i + 2] = [merged[i]]
    if len(parts) != 2:
        raise ValueError(f"no two tokens before it make the token {token!r}")
    return parts[0], parts[1]


def write_tokenizer(folder: Path, tokenizer: Tokenizer, context: int) -> None:
    """tokenizer.json and what transformers reads beside it."""
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": END,
        "pad_token": BOS,
        "additional_special_tokens": [n for n in SPECIAL_TOKENS if n not in (BOS, END)],
        "padding_side": "left",
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    write_json(folder / "tokenizer.json", byte_level_bpe(tokenizer))
    write_json(folder / "tokenizer_config.json", settings)
    write_atomic(folder / "chat_template.jinja", CHAT_TEMPLATE)


def byte_level_bpe(tokenizer: Tokenizer) -> dict[str, Any]:
    """What tokenizer.json holds: how Hugging Face's tokenizers library does what ours does."""
    letters = byte_letters()
    ranks = tokenizer.ranks
    spelled = {token: "".join(letters[byte] for byte in token) for token in ranks}
    # A byte's id is its rank, so the merges are the tokens of two bytes or more, in order
    merges = [halves(token, ranks) for token in ranks if len(token) > 1]
    exactly = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    special = [
        {"content": name, "id": tokenizer.special(name), "special": True, **exactly}
        for name in SPECIAL_TOKENS
    ]
    bytewise = dict.fromkeys(("add_prefix_space", "trim_offsets", "use_regex"), True)
    unused = ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix")
    bos = {"SpecialToken": {"id": BOS, "type_id": 0}}
    first, second = ({"Sequence": {"id": name, "type_id": n}} for n, name in enumerate("AB"))
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": special,
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {
                    "type": "Split",
                    "pattern": {"Regex": tokenizer.pattern},
                    "behavior": "Isolated",
                    "invert": False,
                },
                {"type": "ByteLevel", **bytewise, "add_prefix_space": False, "use_regex": False},
            ],
        },
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [bos, first],
            "pair": [bos, first, second],
            "special_tokens": {BOS: {"id": BOS, "ids": [tokenizer.bos_id], "tokens": [BOS]}},
        },
        "decoder": {"type": "ByteLevel", **bytewise},
        "model": {
            **dict.fromkeys(unused),
            **dict.fromkeys(("fuse_unk", "byte_fallback"), False),
            "type": "BPE",
            "ignore_merges": True,  # a word that is a token is that token
            "vocab": {spelled[token]: rank for token, rank in ranks.items()},
            "merges": [[spelled[a], spelled[b]] for a, b in merges],
        },
    }


# What chat_format.render does, for transformers: roles in turn, a system message in front of the
# first user's, parts of an answer between the tokens of their kind.
CHAT_TEMPLATE = """\
{%- set found = namespace(opening="", count=0) -%}
{{- bos_token -}}
{%- for message in messages -%}
    {%- if loop.first and message["role"] == "system" -%}
        {%- if messages | length < 2 or messages[1]["role"] != "user" -%}
            {{- raise_exception("a system message must be followed by one of the user") -}}
        {%- endif -%}
        {%- set found.opening = message["content"] + "\\n\\n" -%}
    {%- else -%}
        {%- set turn = "assistant" if found.count % 2 else "user" -%}
        {%- if message["role"] != turn -%}
            {{- raise_exception(message["role"] + " speaks where it is the turn of " + turn) -}}
        {%- endif -%}
        {{- "<|" + turn + "_start|>" + found.opening -}}
        {%- set found.opening = "" -%}
        {%- set found.count = found.count + 1 -%}
        {%- if message["content"] is string -%}
            {{- message["content"] -}}
        {%- else -%}
            {%- for part in message["content"] -%}
                {%- if part["type"] == "python" -%}
                    {{- "<|python_start|>" + part["text"] + "<|python_end|>" -}}
                {%- elif part["type"] == "python_output" -%}
                    {{- "<|output_start|>" + part["text"] + "<|output_end|>" -}}
                {%- else -%}
                    {{- part["text"] -}}
                {%- endif -%}
            {%- endfor -%}
        {%- endif -%}
        {{- "<|" + turn + "_end|>" -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- "<|assistant_start|>" -}}
{%- endif -%}
"""


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
    config = read(folder / "config.json")
    kind = config.get("model_type")
    if kind == REMOTE:
        cfg = GPTConfig(**config["gpt"])
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


def read_tokenizer(file: Path) -> Tokenizer:
    """Our tokenizer of a tokenizer.json. Raises ValueError where it is of another kind."""
    content = read(file)
    try:
        model, special = content["model"], content["added_tokens"]
        split = content["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"]
        numbers = {letter: byte for byte, letter in byte_letters().items()}
        vocabulary: Sequence[str] = sorted(model["vocab"], key=model["vocab"].__getitem__)
        tokens = [bytes(numbers[letter] for letter in word) for word in vocabulary]
        names = [t["content"] for t in sorted(special, key=lambda t: t["id"])]
        ids = [*sorted(model["vocab"].values()), *sorted(t["id"] for t in special)]
    except (KeyError, TypeError, IndexError) as error:
        raise ValueError(f"{file} is not a byte-level BPE as we write it ({error!r})") from error
    if ids != list(range(len(ids))):
        raise ValueError(f"{file}: ids are not 0 to {len(ids) - 1}, special tokens last")
    try:
        return Tokenizer.of(split, tokens, names)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error


def read(file: Path) -> dict[str, Any]:
    """A JSON object. Raises FileNotFoundError or ValueError naming the file."""
    if not file.is_file():
        raise FileNotFoundError(f"there is no {file}: not a folder of a Hugging Face model")
    content = read_json(file)
    if not isinstance(content, dict):
        raise ValueError(f"{file} holds no JSON object")
    return content
