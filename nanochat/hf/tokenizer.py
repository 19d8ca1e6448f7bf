"""
Converts our tokenizer to and from Hugging Face's tokenizer.json, with a chat template that matches
chat_format.render.

    Tokenizer -> write_tokenizer -> tokenizer.json, chat_template.jinja -> read_tokenizer

Both encode every text to the same ids (tested on real text). Requires no Hugging Face package.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nanochat.common import read_json, write_atomic, write_json
from nanochat.tokenizer import FORMAT, SPECIAL_TOKENS, Tokenizer

BOS, END = "<|bos|>", "<|assistant_end|>"


def byte_letters() -> dict[int, str]:
    """
    Map each byte to its letter in tokenizer.json: a printable byte to itself, any other byte to
    the next letter from U+0100 on. Source: GPT-2's byte-level tokenizer.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in printable]
    return {b: chr(b) for b in printable} | {b: chr(256 + n) for n, b in enumerate(hidden)}


def merge_pair(token: bytes, ranks: Mapping[bytes, int]) -> tuple[bytes, bytes]:
    """Return the two tokens that BPE merges into `token`. Raises ValueError if there are none."""
    parts = [bytes([byte]) for byte in token]
    while len(parts) > 2:
        merged = [parts[i] + parts[i + 1] for i in range(len(parts) - 1)]
        rank, i = min((ranks.get(pair, len(ranks)), i) for i, pair in enumerate(merged))
        if rank >= ranks[token]:
            break
        parts[i : i + 2] = [merged[i]]
    if len(parts) != 2:
        raise ValueError(f"token {token!r} is not a merge of two earlier tokens")
    return parts[0], parts[1]


def write_tokenizer(folder: Path, tokenizer: Tokenizer, context: int) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja."""
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
    """Return the contents of tokenizer.json (format of Hugging Face's tokenizers library)."""
    letters = byte_letters()
    ranks = tokenizer.ranks
    spelled = {token: "".join(letters[byte] for byte in token) for token in ranks}
    # A token's id is its rank, so the merges are the tokens of two bytes or more, in order
    merges = [merge_pair(token, ranks) for token in ranks if len(token) > 1]
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
            "ignore_merges": True,  # a word in the vocabulary is one token
            "vocab": {spelled[token]: rank for token, rank in ranks.items()},
            "merges": [[spelled[a], spelled[b]] for a, b in merges],
        },
    }


# chat_format in Jinja: `render`, and `render_prompt` if a generation prompt is added or the last
# message is continued (transformers then appends a tag to the message's text). Consecutive text
# with loss is one generation block, from which transformers computes the assistant mask. It finds a
# block by its first and last character: if the last one spans several tokens, which can happen only
# right before python_output, the mask misses all but the first of them. Special token names are
# spelled out so that transformers can tell the template's tokens from those a user types
# (sanitize_control_tokens).
CHAT_TEMPLATE = """\
{%- set tag = "CONTINUE_FINAL_MESSAGE_TAG " -%}
{%- set state = namespace(speaker="", trained="", filled=false, gap=false, asked=0, tag="") -%}
{%- for message in messages -%}
    {%- if message["role"] not in ["system", "developer", "user", "assistant"] -%}
        {{- raise_exception("message " ~ loop.index0 ~ " has role " ~ message["role"]
            ~ ", not system, developer, user or assistant") -}}
    {%- elif message["role"] != "assistant" -%}
        {%- set state.asked = loop.index -%}
    {%- endif -%}
{%- endfor -%}
{%- set shown = messages[:state.asked] if add_generation_prompt and state.asked else messages -%}
{{- bos_token -}}
{%- for message in shown -%}
    {%- set message_loop = loop -%}
    {%- set assistant = message["role"] == "assistant" -%}
    {%- set content = message["content"] -%}
    {%- if content is string -%}
        {%- set content = [{"type": "text", "text": content}] -%}
    {%- elif content is not defined or content is mapping or content is not sequence -%}
        {{- raise_exception("message " ~ loop.index0
            ~ ": content is neither text nor a list of parts") -}}
    {%- endif -%}
    {%- if loop.first or assistant != (state.speaker == "assistant") -%}
        {{- "<|assistant_start|>" if assistant else "<|user_start|>" -}}
        {%- set state.speaker = "assistant" if assistant else "user" -%}
        {%- set state.filled = false -%}
    {%- endif -%}
    {%- set state.gap = state.filled -%}
    {%- for part in content -%}
        {%- set type = part["type"] if part is mapping else "" -%}
        {%- if type != "text" and not (assistant and type in ["python", "python_output"])
            or part["text"] is not string -%}
            {{- raise_exception("message " ~ message_loop.index0 ~ " of the " ~ message["role"]
                ~ " has a part that is not known: " ~ part) -}}
        {%- endif -%}
        {%- set text = part["text"] -%}
        {%- if loop.last and message_loop.last and text.endswith(tag) -%}
            {%- set text = text[:text | length - tag | length] -%}
            {%- set state.tag = tag -%}
        {%- endif -%}
        {%- if text or type != "text" -%}
            {%- set gap = "\n\n" if state.gap else "" -%}
            {%- set state.gap = false -%}
            {%- set state.filled = true -%}
            {%- if not assistant -%}
                {{- gap + text -}}
            {%- elif type == "text" -%}
                {%- set state.trained = state.trained + gap + text -%}
            {%- elif type == "python" -%}
                {%- set state.trained = state.trained + gap + "<|python_start|>" + text
                    + "<|python_end|>" -%}
            {%- else -%}
                {%- set state.trained = state.trained + gap -%}
                {%- if state.trained -%}
                    {%- generation -%}{{- state.trained -}}{%- endgeneration -%}
                {%- endif -%}
                {{- "<|output_start|>" + text + "<|output_end|>" -}}
                {%- set state.trained = "" -%}
            {%- endif -%}
        {%- endif -%}
    {%- endfor -%}
    {%- if loop.last or assistant != (loop.nextitem["role"] == "assistant") -%}
        {%- if not assistant -%}
            {{- "<|user_end|>" -}}
        {%- elif state.tag -%}
            {{- state.trained -}}
        {%- else -%}
            {%- generation -%}{{- state.trained + "<|assistant_end|>" -}}{%- endgeneration -%}
        {%- endif -%}
        {%- set state.trained = "" -%}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt or state.tag and state.speaker == "user" -%}
    {{- "<|assistant_start|>" -}}
{%- endif -%}
{{- state.tag -}}
"""


def read_tokenizer(file: Path) -> Tokenizer:
    """Load our tokenizer from a tokenizer.json. Raises ValueError for any other kind."""
    content = read_object(file)
    try:
        model, special = content["model"], content["added_tokens"]
        split = content["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"]
        numbers = {letter: byte for byte, letter in byte_letters().items()}
        vocabulary: Sequence[str] = sorted(model["vocab"], key=model["vocab"].__getitem__)
        tokens = ["".join(chr(numbers[letter]) for letter in word) for word in vocabulary]
        names = [t["content"] for t in sorted(special, key=lambda t: t["id"])]
        ids = [*sorted(model["vocab"].values()), *sorted(t["id"] for t in special)]
    except (KeyError, TypeError, IndexError) as error:
        raise ValueError(f"{file} is not a nanochat byte-level BPE ({error!r})") from error
    if ids != list(range(len(ids))):
        raise ValueError(f"{file}: ids must be 0 to {len(ids) - 1}, special tokens last")
    try:
        content = {"format": FORMAT, "pattern": split, "special_tokens": names}
        return Tokenizer({**content, "tokens": tokens})
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error


def read_object(file: Path) -> dict[str, Any]:
    """Read a JSON object. Raises FileNotFoundError, or ValueError for anything else."""
    if not file.is_file():
        fix = "pass a Hugging Face model folder"
        if file.name == "tokenizer.json" and file.with_name("config.json").exists():
            fix = "save the tokenizer there, too (tokenizer.save_pretrained)"
        raise FileNotFoundError(f"{file} not found; {fix}")
    content = read_json(file)
    if not isinstance(content, dict):
        raise ValueError(f"{file} is not a JSON object")
    return content
