"""
The words of OpenAI's API: what a request may say, and what answers and errors look like.

    JSON -> ChatRequest, TextRequest -> Sampling;  pieces -> Writer -> chunks or one whole object

Fields we cannot honour are refused unless they ask for nothing; fields that change nothing in an
answer are passed over; all others are refused by name. Ours beyond theirs: `top_k`, `min_p`,
`truncation`, `parts` of a message, `continuous_usage_stats`. Knows no engine and no HTTP.
Source: the API reference of OpenAI, chat completions and (legacy) completions, 2025.
"""

import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from nanochat.sampling import Sampling, TokenLogprob
from nanochat.serving import Piece, Said
from nanochat.tokenizer import Tokenizer

LARGEST_COUNT = 2**31 - 1
LEAST_LOGPROB = -9999.0  # JSON has no infinity
# Fields that change nothing in what is answered here
PASSED_OVER = {
    *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"),
    *("parallel_tool_calls", "verbosity", "reasoning_effort"),
}
# Fields that can only be left as they are: what is allowed beside null
UNSUPPORTED: dict[str, list[Any]] = {
    "presence_penalty": [0],
    "frequency_penalty": [0],
    "logit_bias": [{}],
    "tools": [[]],
    "tool_choice": ["none", "auto"],
    "functions": [[]],
    "function_call": ["none", "auto"],
    "response_format": [{"type": "text"}],
    "modalities": [["text"]],
    "audio": [],
    "prediction": [],
    "web_search_options": [],
    "suffix": [""],
    "best_of": [1],
}
# What a message that we sent may carry when it comes back
EMPTY_IN_MESSAGES = (
    *("refusal", "annotations", "audio", "function_call", "tool_calls", "name", "parsed"),
)


class Strict(BaseModel):
    """Of the JSON types that are asked for, finite, and without unknown fields."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class TextPart(Strict):
    """A part of a content; in an assistant's message also a call of the tool and its answer."""

    type: Literal["text", "python", "python_output"]
    text: str
    index: int | None = None
    """Of a part that was streamed, its place; not looked at."""


class ChatMessage(Strict):
    """One message. `parts`, where a message has them, say more exactly what `content` says."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart] | None = None
    parts: list[TextPart] | None = None

    @model_validator(mode="before")
    @classmethod
    def drop_empty(cls, value: Any) -> Any:
        """Take back what our own answers contain."""
        if not isinstance(value, dict):
            return value
        kept = {k: v for k, v in value.items() if k not in EMPTY_IN_MESSAGES or v}
        kept.pop("name", None)
        return kept

    def as_message(self) -> dict[str, Any]:
        """In the form of chat_format.py."""
        role = "system" if self.role == "developer" else self.role
        content = self.content if self.parts is None else self.parts
        if content is None:
            content = ""
        if isinstance(content, list):
            content = [part.model_dump(exclude={"index"}) for part in content]
            if role != "assistant":
                if any(part["type"] != "text" for part in content):
                    raise ValueError(f"a message of the {role} has only parts of type text")
                content = "".join(part["text"] for part in content)
        return {"role": role, "content": content}


class StreamOptions(Strict):
    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False


class Generation(Strict):
    """What both kinds of request have in common. None: as the server was started."""

    model: str | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=LARGEST_COUNT)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: str | Annotated[list[str], Field(max_length=16)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @model_validator(mode="before")
    @classmethod
    def refuse_or_pass_over(cls, value: Any) -> Any:
        """Drop the fields that ask for nothing. Raises ValueError for those we cannot honour."""
        if not isinstance(value, dict):
            return value
        for name, harmless in UNSUPPORTED.items():
            given = value.get(name)
            if given is not None and given not in harmless:
                raise ValueError(f"{name} is not supported here; leave it out")
        return {k: v for k, v in value.items() if k not in PASSED_OVER and k not in UNSUPPORTED}

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def sampling(
        self, defaults: Sampling, most: int, seed: int, logprobs: int | None, prompt: bool
    ) -> Sampling:
        """The settings, with the server's where the request is silent; `most` new tokens."""

        def chosen(value: Any, default: Any) -> Any:
            return default if value is None else value

        top_k = chosen(self.top_k, defaults.top_k)
        return Sampling(
            max_new_tokens=most,
            temperature=chosen(self.temperature, defaults.temperature),
            top_k=top_k if top_k and top_k > 0 else None,
            top_p=max(chosen(self.top_p, defaults.top_p), 1e-6),  # 0 is meant: the likeliest
            min_p=chosen(self.min_p, defaults.min_p),
            seed=chosen(self.seed, seed),
            logprobs=logprobs,
            prompt_logprobs=prompt,
        )


class ChatRequest(Generation):
    """POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=4096)]
    max_tokens: Annotated[int, Field(ge=1, le=LARGEST_COUNT)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, le=LARGEST_COUNT)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    truncation: Literal["auto", "disabled"] | None = None

    @property
    def wanted_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class TextRequest(Generation):
    """POST /v1/completions. A prompt of ids is taken as it is, a text never has special tokens."""

    prompt: str | list[str] | list[int] | list[list[int]]
    max_tokens: Annotated[int, Field(ge=0, le=LARGEST_COUNT)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool | None = None

    @property
    def prompts(self) -> list[Any]:
        """One or many, each a text or a list of ids."""
        prompt: Any = self.prompt
        if isinstance(prompt, str) or any(isinstance(one, int) for one in prompt[:1]):
            return [prompt]
        return prompt


# ---- errors ------------------------------------------------------------------------------------


class ApiError(Exception):
    """A refusal, with all that OpenAI's clients expect of one."""

    def __init__(
        self,
        status: int,
        message: str,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message)
        self.status, self.headers = status, dict(headers or {})
        self.body = error_body(status, message, code, param)


def error_body(
    status: int, message: str, code: str | None = None, param: str | None = None
) -> dict[str, Any]:
    """The JSON of an error."""
    kinds = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
    kind = kinds.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def explain(errors: Sequence[Any]) -> tuple[str, str | None]:
    """Pydantic's findings in a sentence, and the field they are about."""
    first = errors[0]
    where = ".".join(str(part) for part in first["loc"] if part != "body")
    if first["type"] == "extra_forbidden":
        return f"Unrecognized request argument supplied: {where}", where
    if first["type"] == "json_invalid":
        return f"the body is not valid JSON: {first.get('ctx', {}).get('error', '')}", None
    message = first["msg"].removeprefix("Value error, ")
    return (f"{where}: {message}" if where else message), where or None


# ---- answers -----------------------------------------------------------------------------------


class Writer:
    """Puts the pieces of a reply into the shape of chat completions or of text completions."""

    def __init__(self, kind: Literal["chat", "text"], model: str, tokenizer: Tokenizer):
        self.kind, self.model, self.tokenizer = kind, model, tokenizer
        prefix = {"chat": "chatcmpl", "text": "cmpl"}[kind]
        self.id, self.created = f"{prefix}-{uuid.uuid4().hex}", int(time.time())
        self.parts: dict[int, list[dict[str, str]]] = {}  # of each streamed answer, so far

    def envelope(
        self, choices: list[Any], usage: Mapping[str, Any] | None = None, chunk: bool = False
    ) -> dict[str, Any]:
        """What stands around the choices."""
        kind = {"chat": "chat.completion", "text": "text_completion"}[self.kind]
        found = {
            "id": self.id,
            "object": f"{kind}.chunk" if chunk and self.kind == "chat" else kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }
        return found if usage is None else {**found, "usage": usage}

    def opening(self, index: int) -> dict[str, Any]:
        """The first chunk of a chat's answer."""
        return self.chat_delta(index, {"role": "assistant", "content": ""})

    def chunk(self, piece: Piece, logprobs: Any) -> dict[str, Any]:
        """A piece as a choice of a chunk; calls of the tool are no content, but among `parts`."""
        if self.kind == "text":
            return {
                "index": piece.index,
                "text": piece.text,
                "logprobs": logprobs,
                "finish_reason": piece.finish,
            }
        delta: dict[str, Any] = {}
        if piece.text and piece.kind == "text":
            delta["content"] = piece.text
        if piece.text and (parts := self.new_parts(piece)):
            delta["parts"] = parts
        return self.chat_delta(piece.index, delta, logprobs, piece.finish)

    def new_parts(self, piece: Piece) -> list[dict[str, Any]]:
        """
        What a piece adds to the parts of its message, by their index, as clients put a list
        together. They are told from the first call of a tool on, then all there was before too.
        """
        parts = self.parts.setdefault(piece.index, [])
        called = any(part["type"] != "text" for part in parts)
        if not parts or parts[-1]["type"] != piece.kind:
            parts.append({"type": piece.kind, "text": ""})
        parts[-1]["text"] += piece.text
        if called:
            return [{"index": len(parts) - 1, "type": piece.kind, "text": piece.text}]
        if piece.kind == "text":
            return []
        return [{"index": index, **part} for index, part in enumerate(parts)]

    def chat_delta(
        self, index: int, delta: Any, logprobs: Any = None, finish: str | None = None
    ) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}

    def whole(
        self, index: int, parts: Sequence[Mapping[str, str]], finish: str | None, logprobs: Any
    ) -> dict[str, Any]:
        """A finished answer as a choice."""
        text = "".join(part["text"] for part in parts if part["type"] == "text")
        choice: dict[str, Any] = {"index": index, "logprobs": logprobs, "finish_reason": finish}
        if self.kind == "text":
            return {**choice, "text": text}
        message = {"role": "assistant", "content": text, "refusal": None}
        if any(part["type"] != "text" for part in parts):
            message["parts"] = list(parts)
        return {**choice, "message": message}

    # ---- likelihoods -------------------------------------------------------------------------

    def logprobs(self, said: Sequence[Said]) -> dict[str, Any]:
        """Those of some tokens, in the form of this kind of answer."""
        if self.kind == "chat":
            content = [
                {
                    **self.entry(one.logprob.token, one.logprob.logprob),
                    "top_logprobs": [self.entry(*pair) for pair in one.logprob.top],
                }
                for one in said
            ]
            return {"content": content, "refusal": None}
        return {
            "tokens": [self.name(one.logprob.token) for one in said],
            "token_logprobs": [finite(one.logprob.logprob) for one in said],
            "top_logprobs": [self.top(one.logprob) for one in said],
            "text_offset": [one.start for one in said],
        }

    def entry(self, token: int, logprob: float | None) -> dict[str, Any]:
        data = self.tokenizer.decode_bytes([token])
        return {
            "token": data.decode("utf-8", "replace"),
            "logprob": finite(logprob),
            "bytes": list(data),
        }

    def name(self, token: int) -> str:
        """A token's text; where it is no whole text, its bytes spelled out, as theirs."""
        data = self.tokenizer.decode_bytes([token])
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def top(self, said: TokenLogprob) -> dict[str, float | None] | None:
        """The likeliest tokens, and the one that was said."""
        if said.logprob is None:
            return None
        pairs = [*said.top, (said.token, said.logprob)]
        return {self.name(token): finite(logprob) for token, logprob in pairs}


def model_entry(name: str, created: int) -> dict[str, Any]:
    """A model as /v1/models lists it; its stage is ours."""
    stage = name.partition(":")[0]
    owned = {"id": name, "object": "model", "created": created, "owned_by": "nanochat"}
    return {**owned, "stage": stage}


def finite(logprob: float | None) -> float | None:
    return None if logprob is None else max(logprob, LEAST_LOGPROB)


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    """What was read and written, in tokens."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }
