"""
Our tokenizer in Hugging Face's format, both ways, and the chat template that renders as we do.

    Tokenizer -> write_tokenizer -> tokenizer.json, chat_template.jinja -> read_tokenizer

The same ids for every text, which the tests hold over real text; a conversation becomes the ids of
chat_format.render. Needs no package of Hugging Face.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nanochat.common import read_json, write_atomic, write_json
from nanochat.tokenizer import SPECIAL_TOKENS, Tokenizer

BOS, END = "<|bos|>", "<|assistant_end|>"


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


def read_tokenizer(file: Path) -> Tokenizer:
    """Our tokenizer of a tokenizer.json. Raises ValueError where it is of another kind."""
    content = read_object(file)
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


def read_object(file: Path) -> dict[str, Any]:
    """A JSON object. Raises FileNotFoundError or ValueError naming the file."""
    if not file.is_file():
        raise FileNotFoundError(f"there is no {file}: not a folder of a Hugging Face model")
    content = read_json(file)
    if not isinstance(content, dict):
        raise ValueError(f"{file} holds no JSON object")
    return content
