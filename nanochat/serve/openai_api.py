"""
OpenAI API schema: requests, responses and errors.

    body -> read_request -> ChatRequest, TextRequest -> prompts, Sampling
    deltas -> Writer -> stream chunks or one response object

Fields that do not affect the response are ignored. An unsupported field is accepted only with a
neutral value; otherwise the error names the field. Parsing stops at the first error.
Extensions: `top_k`, `truncation`, `parts` in messages, `continuous_usage_stats`. If the
last message is from the assistant, the model continues it.
Source: OpenAI API reference, chat completions and (legacy) completions, 2025.
"""

import json
import time
import uuid
from collections.abc import Mapping, Sequence, Sized
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from nanochat.chat_format import render_fitting, render_prompt
from nanochat.engine import Sampling
from nanochat.tokenizer import Tokenizer

R = TypeVar("R", bound="Generation")
FinishReason = Literal["stop", "length"]
TEXT_TOKENS = 16  # OpenAI's default max_tokens for text completions
LARGEST_COUNT = 2**31 - 1
MAX_FIELDS, MAX_MESSAGES, MAX_PARTS, MAX_STOPS, MAX_PROMPTS = 128, 4096, 1024, 16, 1024
ROLES = {"developer": "system", "system": "system", "user": "user", "assistant": "assistant"}
NO_FUNCTIONS = "not supported; this model has no function calling"
# Fields that do not affect the response
IGNORED = {
    *("user", "metadata", "store", "service_tier", "safety_identifier", "verbosity"),
    *("prompt_cache_key", "prompt_cache_retention", "prompt_cache_options"),
    *("parallel_tool_calls", "reasoning_effort", "tools", "functions"),
    *("num_ctx", "keep_alive", "cache_prompt", "chat_template_kwargs", "session_id", "chat_id"),
}
# Unsupported fields, each with the values that change nothing (null never does)
NEUTRAL: dict[str, list[Any]] = {
    "presence_penalty": [0],
    "frequency_penalty": [0],
    "repetition_penalty": [1],
    "length_penalty": [1],
    "min_p": [0],
    "mirostat": [0],
    "logit_bias": [{}],
    "tool_choice": ["none", "auto"],
    "function_call": ["none", "auto"],
    "response_format": [{"type": "text"}],
    "modalities": [["text"]],
    "audio": [],
    "prediction": [],
    "web_search_options": [],
    "suffix": [""],
    "min_tokens": [0],
    "ignore_eos": [False],
    "use_beam_search": [False],
    "skip_special_tokens": [True],
    "add_generation_prompt": [True, False],
    "continue_final_message": [True, False],
}
# The same for messages; ignores the metadata that clients attach
IGNORED_IN_MESSAGES = {
    *("name", "id", "timestamp", "created", "created_at", "date", "model", "metadata", "parsed"),
    *("refusal", "annotations", "reasoning", "reasoning_content", "thinking", "cache_control"),
}
NEUTRAL_IN_MESSAGES: dict[str, list[Any]] = {"tool_calls": [[]], "function_call": [], "audio": []}
IGNORED_IN_PARTS = {"index", "id", "annotations", "cache_control", "logprobs"}


# ---- errors ------------------------------------------------------------------------------------


class ApiError(Exception):
    """An error response in OpenAI's format."""

    def __init__(
        self,
        status: int,
        message: str,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        message, param = escape_text(message), escape_text(param) if param else None
        super().__init__(message)
        self.status, self.headers = status, dict(headers or {})
        kinds = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
        kind = kinds.get(status, "server_error" if status >= 500 else "invalid_request_error")
        error = {"message": message, "type": kind, "param": param, "code": code}
        self.body = {"error": error}
        """JSON body of the response."""


def escape_text(text: str) -> str:
    """Escape lone surrogates and truncate; the text may quote a request."""
    return text.encode("utf-8", "backslashreplace").decode()[:1000]


def bad_field(where: str, message: str) -> ApiError:
    """Error 400 for a field; `where` is its path, such as messages.0.content."""
    return ApiError(400, f"{where}: {message}", param=where)


def check_count(where: str, values: Sized, most: int, what: str) -> None:
    """Raise ApiError if there are more than `most` values."""
    if len(values) > most:
        raise bad_field(where, f"at most {most} {what}, got {len(values):,}")


# ---- requests ----------------------------------------------------------------------------------


def read_request(kind: type[R], body: bytes) -> R:
    """
    Parse a request body. Slow for large bodies, so call it off the event loop.

    Raises ApiError (status 400) at the first error.
    """
    value = read_object(body)
    for name in ("max_tokens", "max_completion_tokens"):
        if value.get(name) == -1:  # as llama.cpp writes "no limit"
            del value[name]
    try:
        neutral = {**kind.neutral, "best_of": [1, value.get("n")]}  # best_of = n: no selection
        return kind.model_validate(drop_neutral_fields(value, "", IGNORED, neutral))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        if first["type"] == "extra_forbidden":
            raise unknown_field_error(where) from error
        raise bad_field(where, first["msg"].removeprefix("Value error, ")) from error


def read_object(body: bytes) -> dict[str, Any]:
    """Parse a JSON object. Raises ApiError (status 400) if it is none."""
    try:
        value = json.loads(body, parse_constant=reject_constant)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the request body is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ApiError(400, f"the request body must be a JSON object, not {json_type(value)}")
    return value


def reject_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def unknown_field_error(where: str) -> ApiError:
    return ApiError(400, f"Unrecognized request argument supplied: {where}", param=where)


def json_type(value: Any) -> str:
    """Name of a value's JSON type for error messages."""
    names = {dict: "an object", list: "an array", str: "a string", bool: "a boolean"}
    return "null" if value is None else names.get(type(value), "a number")


def drop_neutral_fields(
    value: Mapping[str, Any],
    where: str,
    ignored: set[str],
    neutral: Mapping[str, list[Any]],
    known: tuple[str, ...] | None = None,
) -> dict[str, Any]:
    """
    Drop null, ignored and neutral fields. Raises ApiError for a field with a non-neutral
    value, for too many fields and, if `known` is given, for unknown fields.
    """
    check_count(where or "body", value, MAX_FIELDS, "fields")
    kept = {}
    for name, given in value.items():
        if given is None or name in ignored:
            continue
        if name not in neutral:
            kept[name] = given
        elif given not in neutral[name]:
            path = f"{where}.{name}" if where else name
            calls = "tool" in name or "function" in name
            raise bad_field(path, NO_FUNCTIONS if calls else "not supported; omit this field")
    if known is not None and (unknown := kept.keys() - set(known)):
        raise unknown_field_error(f"{where}.{min(unknown)}")
    return kept


def read_messages(value: Any) -> list[dict[str, Any]]:
    """
    Parse messages into the format of chat_format.py. Raises ApiError with the path of the first
    invalid one.
    """
    if not isinstance(value, list) or not value:
        raise bad_field("messages", "must be an array of at least one message")
    check_count("messages", value, MAX_MESSAGES, "messages")
    return [read_message(message, f"messages.{i}") for i, message in enumerate(value)]


def read_message(message: Any, where: str) -> dict[str, Any]:
    """Parse one message; `parts` take precedence over `content`."""
    if not isinstance(message, dict):
        kind = json_type(message)
        raise bad_field(where, f"a message is an object with role and content, not {kind}")
    role = message.get("role")
    if role in ("tool", "function"):
        raise bad_field(f"{where}.role", f"{role!r} is {NO_FUNCTIONS}")
    if not isinstance(role, str) or role not in ROLES:
        raise bad_field(f"{where}.role", f"must be one of {', '.join(ROLES)}, not {role!r:.80}")
    known = ("role", "content", "parts") if role == "assistant" else ("role", "content")
    kept = drop_neutral_fields(message, where, IGNORED_IN_MESSAGES, NEUTRAL_IN_MESSAGES, known)
    name = "parts" if "parts" in kept else "content"
    content = kept.get(name, "" if role == "assistant" else None)
    at = f"{where}.{name}"
    if isinstance(content, list):
        content = read_parts(content, role, at)
    elif not isinstance(content, str):
        kind = json_type(content)
        raise bad_field(at, f"must be a string or an array of text parts, not {kind}")
    return {"role": ROLES[role], "content": content}


def read_parts(parts: Sequence[Any], role: str, where: str) -> list[dict[str, str]]:
    """Parse content parts: text and, for the assistant, also tool calls and their results."""
    check_count(where, parts, MAX_PARTS, "parts")
    kinds = ("text", "python", "python_output") if role == "assistant" else ("text",)
    found = []
    for i, part in enumerate(parts):
        at = f"{where}.{i}"
        if not isinstance(part, dict):
            raise bad_field(at, f"must be an object with type and text, not {json_type(part)}")
        kind, only = part.get("type"), ", ".join(kinds)
        if kind not in kinds:
            raise bad_field(at, f"parts of type {kind!r:.80} are not supported; use {only}")
        kept = drop_neutral_fields(part, at, IGNORED_IN_PARTS, {}, ("type", "text"))
        if not isinstance(kept.get("text"), str):
            raise bad_field(f"{at}.text", f"must be a string, not {json_type(kept.get('text'))}")
        found.append(kept)
    return found


def read_stop(value: Any) -> tuple[str, ...]:
    """Parse `stop`: one string or an array of strings."""
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list):
        raise bad_field("stop", f"must be a string or an array of strings, not {json_type(value)}")
    check_count("stop", stops, MAX_STOPS, "stop strings")
    return tuple(stops)


def read_prompts(value: Any) -> list[str | list[int]]:
    """Parse one or more prompts, each a string or an array of token ids."""
    if isinstance(value, str) or (isinstance(value, list) and value and is_id(value[0])):
        value = [value]
    if not isinstance(value, list) or not value:
        raise bad_field("prompt", "must be a string, an array of strings, or arrays of token ids")
    check_count("prompt", value, MAX_PROMPTS, "prompts")
    for i, prompt in enumerate(value):
        if not (isinstance(prompt, str) or isinstance(prompt, list) and all(map(is_id, prompt))):
            raise bad_field(f"prompt.{i}", "must be a string or an array of token ids")
    return value


def is_id(value: Any) -> bool:
    """Whether a JSON value can be a token id."""
    return isinstance(value, int) and not isinstance(value, bool)


class Strict(BaseModel):
    """Base class: exact JSON types, finite numbers, no unknown fields."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class StreamOptions(Strict):
    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False

    @model_validator(mode="before")
    @classmethod
    def drop_null(cls, value: Any) -> Any:
        is_object = isinstance(value, dict)
        return drop_neutral_fields(value, "stream_options", set(), {}) if is_object else value


class Generation(Strict):
    """Fields of both request types. None: the server's default."""

    kind: ClassVar[Literal["chat", "text"]]
    prompt_field: ClassVar[str]
    neutral: ClassVar[Mapping[str, list[Any]]] = NEUTRAL

    model: str | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=LARGEST_COUNT)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Annotated[tuple[str, ...], BeforeValidator(read_stop)] = ()
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    echo: bool = False

    def sampling(self, defaults: Sampling, length: int, seed: int) -> Sampling:
        """Sampling settings for `length` new tokens; unset fields take `defaults` and `seed`."""
        names = {"temperature", "top_k", "top_p", "seed"}
        given = {"seed": seed, **self.model_dump(include=names, exclude_none=True)}
        if given.get("top_k", 1) < 1:
            given["top_k"] = None  # all tokens
        if "top_p" in given:
            given["top_p"] = max(given["top_p"], 1e-6)  # 0 means greedy
        return replace(defaults, **given, max_new_tokens=length)


class Prompt(NamedTuple):
    """Token ids of a prompt, and how many of them were added at its start."""

    ids: list[int]
    num_added: int
    num_dropped: int = 0
    """Tokens of the oldest turns that were left out."""


class ChatRequest(Generation):
    """POST /v1/chat/completions."""

    kind, prompt_field = "chat", "messages"
    neutral: ClassVar[Mapping[str, list[Any]]] = {**NEUTRAL, "echo": [False]}

    messages: Annotated[list[Any], BeforeValidator(read_messages)]
    max_tokens: Annotated[int, Field(ge=1, le=LARGEST_COUNT)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, le=LARGEST_COUNT)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    truncation: Literal["auto", "disabled", "error"] | None = None

    @property
    def num_logprobs(self) -> int | None:
        """Number of alternatives to list per token; None for no log-probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def length(self) -> int | None:
        """Maximum number of new tokens; None: up to the context length."""
        return self.max_completion_tokens or self.max_tokens

    def prompts(self, tokenizer: Tokenizer, context: int) -> list[Prompt]:
        """Return the prompts. Raises ValueError if the messages cannot be rendered."""
        whole = render_prompt(tokenizer, self.messages, continue_last=True)
        if self.truncation in ("disabled", "error"):
            return [Prompt(whole, 1)]
        ids = render_fitting(tokenizer, self.messages, context * 3 // 4)
        return [Prompt(ids, 1, len(whole) - len(ids))]


class TextRequest(Generation):
    """POST /v1/completions. Special tokens are allowed as ids, never parsed from text."""

    kind, prompt_field = "text", "prompt"

    prompt: Annotated[list[Any], BeforeValidator(read_prompts)]
    max_tokens: Annotated[int, Field(ge=0, le=LARGEST_COUNT)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def length(self) -> int:
        return TEXT_TOKENS if self.max_tokens is None else max(1, self.max_tokens)

    def prompts(self, tokenizer: Tokenizer, context: int) -> list[Prompt]:
        """Like `ChatRequest.prompts`; adds BOS if a prompt does not begin with it."""
        found = []
        for prompt in self.prompt:
            ids = tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
            if ids and not 0 <= min(ids) <= max(ids) < tokenizer.vocab_size:
                raise ValueError(f"token ids must lie in [0, {tokenizer.vocab_size})")
            missing = [] if ids[:1] == [tokenizer.bos_id] else [tokenizer.bos_id]
            found.append(Prompt([*missing, *ids], len(missing)))
        return found


# ---- responses ---------------------------------------------------------------------------------


class TokenLogprob(NamedTuple):
    """
    A token id, its log-probability (nats), and the most likely alternatives with theirs. The first
    token of a prompt has None and an empty list instead.
    """

    token: int
    logprob: float | None
    top: list[tuple[int, float]]


class TokenInfo(NamedTuple):
    """A token of the text: its log-probability and the offset of its first character."""

    logprob: TokenLogprob
    start: int


class Delta(NamedTuple):
    """New text of one completion; `finish` is set in its last delta."""

    index: int
    kind: str = "text"
    text: str = ""
    tokens: Sequence[TokenInfo] = ()
    finish: FinishReason | None = None


class Writer:
    """Formats deltas as chat completions or text completions."""

    def __init__(self, asked: ChatRequest | TextRequest, model: str, tokenizer: Tokenizer):
        self.kind, self.model, self.tokenizer = asked.kind, model, tokenizer
        self.has_logprobs = asked.num_logprobs is not None
        prefix = "chatcmpl" if self.kind == "chat" else "cmpl"
        self.id, self.created = f"{prefix}-{uuid.uuid4().hex}", int(time.time())
        self.parts: dict[int, list[dict[str, str]]] = {}  # streamed so far, by index

    def envelope(
        self, choices: list[Any], usage: Mapping[str, int] | None, is_chunk: bool = False
    ) -> dict[str, Any]:
        """Return the response or chunk object that contains `choices`."""
        kind = "chat.completion" if self.kind == "chat" else "text_completion"
        return {
            "id": self.id,
            "object": f"{kind}.chunk" if is_chunk and self.kind == "chat" else kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        } | ({} if usage is None else {"usage": usage})

    def opening(self, index: int) -> dict[str, Any]:
        """Return the choice for the first chunk of a chat completion."""
        return choice_entry(index, None, None, delta={"role": "assistant", "content": ""})

    def chunk(self, delta: Delta) -> dict[str, Any]:
        """Format a delta as a chunk's choice; tool calls are in `parts`, not in `content`."""
        logprobs = self.logprobs(delta.tokens) if self.has_logprobs and delta.tokens else None
        if self.kind == "text":
            return choice_entry(delta.index, logprobs, delta.finish, text=delta.text)
        found: dict[str, Any] = {}
        if delta.text and delta.kind == "text":
            found["content"] = delta.text
        if delta.text and (parts := self.new_parts(delta)):
            found["parts"] = parts
        return choice_entry(delta.index, logprobs, delta.finish, delta=found)

    def new_parts(self, delta: Delta) -> list[dict[str, Any]]:
        """
        Return the parts that a delta extends, with their index (clients merge by it). Empty until
        the first tool call, which is sent with all parts before it.
        """
        parts = self.parts.setdefault(delta.index, [])
        called = any(part["type"] != "text" for part in parts)
        if not parts or parts[-1]["type"] != delta.kind:
            parts.append({"type": delta.kind, "text": ""})
        parts[-1]["text"] += delta.text
        if called:
            return [{"index": len(parts) - 1, "type": delta.kind, "text": delta.text}]
        if delta.kind == "text":
            return []
        return [{"index": index, **part} for index, part in enumerate(parts)]

    def whole(self, deltas: Sequence[Delta]) -> dict[str, Any]:
        """Format a finished completion as a choice; adjacent deltas must differ in kind."""
        last = deltas[-1]
        tokens = [token for delta in deltas for token in delta.tokens]
        logprobs = self.logprobs(tokens) if self.has_logprobs else None
        text = "".join(delta.text for delta in deltas if delta.kind == "text")
        if self.kind == "text":
            return choice_entry(last.index, logprobs, last.finish, text=text)
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        parts = [{"type": delta.kind, "text": delta.text} for delta in deltas if delta.text]
        if any(part["type"] != "text" for part in parts):
            message["parts"] = parts
        return choice_entry(last.index, logprobs, last.finish, message=message)

    # ---- log-probabilities -------------------------------------------------------------------

    def logprobs(self, tokens: Sequence[TokenInfo]) -> dict[str, Any]:
        """The `logprobs` object of a chat or text completion."""
        known = [token.logprob for token in tokens]
        if self.kind == "chat":
            content = [
                self.entry(one.token, one.logprob)
                | {"top_logprobs": [self.entry(*pair) for pair in one.top]}
                for one in known
            ]
            return {"content": content, "refusal": None}
        return {
            "tokens": [self.name(one.token) for one in known],
            "token_logprobs": [one.logprob for one in known],
            "top_logprobs": [self.top(one) for one in known],
            "text_offset": [token.start for token in tokens],
        }

    def entry(self, token: int, logprob: float | None) -> dict[str, Any]:
        data = self.tokenizer.decode_bytes([token])
        text = data.decode("utf-8", "replace")
        return {"token": text, "logprob": logprob, "bytes": list(data)}

    def name(self, token: int) -> str:
        """Text of a token, or its escaped bytes (OpenAI's format) if it is not valid UTF-8."""
        data = self.tokenizer.decode_bytes([token])
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def top(self, one: TokenLogprob) -> dict[str, float | None] | None:
        """The most likely tokens and the generated one."""
        if one.logprob is None:
            return None
        return {self.name(token): x for token, x in (*one.top, (one.token, one.logprob))}


def choice_entry(
    index: int, logprobs: dict[str, Any] | None, finish: FinishReason | None, **content: Any
) -> dict[str, Any]:
    return {"index": index, **content, "logprobs": logprobs, "finish_reason": finish}


def model_entry(name: str, created: int, context: int | None) -> dict[str, Any]:
    """
    A model's entry in /v1/models. Beyond OpenAI's fields: stage, description, and the context
    length in tokens under the names of vLLM and llama.cpp.
    """
    stage = name.partition(":")[0]
    kind = "continues text" if stage == "base" else "answers in chats"
    owned = {"id": name, "object": "model", "created": created, "owned_by": "nanochat"}
    lengths = {"max_model_len": context, "meta": {"n_ctx_train": context}}
    return {**owned, "stage": stage, "description": kind, **lengths}
