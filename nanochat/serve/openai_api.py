"""
OpenAI API schema: requests, responses and errors.

    body -> read_request -> ChatRequest, TextRequest -> prompts, Sampling
    deltas -> Writer -> stream chunks or one response object

Fields in IGNORED do not affect the response. Any other field that is not supported is accepted only
with a neutral value; otherwise the error names it. Messages are validated by chat_format.py.
Extensions: `top_k`, `min_p`, `repetition_penalty`, `truncation`, `parts` in messages,
`continuous_usage_stats`. If the last message is from the assistant, the model continues it.
Source: OpenAI API reference, chat completions and (legacy) completions, 2025.
"""

import time
import uuid
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self, TypeVar

from pydantic import (
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from nanochat.chat_format import render_fitting, render_prompt
from nanochat.engine import PenalizedSampling, Sampling
from nanochat.tokenizer import Tokenizer

R = TypeVar("R", bound=BaseModel)
FinishReason = Literal["stop", "length"]
TEXT_TOKENS = 16  # OpenAI's default max_tokens for text completions
LARGEST_COUNT = 2**31 - 1
TokenIds = Annotated[list[int], Field(fail_fast=True)]
NO_LIMIT = BeforeValidator(lambda given: LARGEST_COUNT if given == -1 else given)
Limit = Annotated[int | None, NO_LIMIT]
MOST_BIASES = 300  # as OpenAI's


def read_biases(given: Any) -> Any:
    """
    Integer keys of a `logit_bias`, None for an empty one (of Open WebUI, also ""); too many are
    rejected before each of them is validated.
    """
    if not isinstance(given, dict):
        return given or None
    if len(given) > MOST_BIASES:
        raise ValueError(f"has {len(given)} tokens; use at most {MOST_BIASES}")
    return {int(token): bias for token, bias in given.items()}


Biases = Annotated[
    dict[int, Annotated[float, Field(ge=-100, le=100)]] | None, BeforeValidator(read_biases)
]
IGNORED = {
    *("user", "metadata", "store", "service_tier", "safety_identifier", "verbosity"),
    *("prompt_cache_key", "prompt_cache_retention", "prompt_cache_options"),
    *("parallel_tool_calls", "reasoning_effort", "think", "tools", "functions"),
    *("num_ctx", "keep_alive", "cache_prompt", "chat_template_kwargs", "session_id", "chat_id"),
    *("skip_special_tokens", "add_generation_prompt", "continue_final_message"),
    *("num_keep", "num_batch", "num_thread", "num_gpu", "use_mmap", "use_mlock"),
    *("mirostat_eta", "mirostat_tau"),  # mirostat itself is refused unless it is 0
    "repeat_last_n",  # penalties apply to the whole answer
}
# Values that ask for nothing, whatever the field; 0 equals False
NEUTRAL = (None, False, "", [], {}, "none", "auto", {"type": "text"}, ["text"])


# ---- errors --------------------------------------------------------------------------------------


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
        super().__init__(message)
        self.status, self.headers = status, dict(headers or {})
        kinds = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
        kind = kinds.get(status, "server_error" if status >= 500 else "invalid_request_error")
        error = {"message": message[:1000], "type": kind, "param": param, "code": code}
        self.body = {"error": error}
        """JSON body of the response."""


def bad_field(name: str, message: str) -> ApiError:
    """Error 400 for a field."""
    name = name[:80]
    return ApiError(400, f"{name}: {message}", param=name)


# ---- requests ------------------------------------------------------------------------------------


def read_request(kind: type[R], body: bytes) -> R:
    """
    Parse a request body. Slow for large bodies, so call it off the event loop.

    Raises ApiError (status 400) for the first field with an error.
    """
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        errors = error.errors(include_url=False, include_context=False, include_input=False)
        where = errors[0]["loc"][:1]  # several errors if a field may have several types
        reasons = dict.fromkeys(one["msg"] for one in errors if one["loc"][:1] == where)
        raise bad_field(str(where[0]) if where else "body", " or ".join(reasons)) from error


def check_ids(name: str, ids: Iterable[int], vocab_size: int) -> None:
    """Raise ApiError if a token id is not in the vocabulary."""
    if any(not 0 <= token < vocab_size for token in ids):
        raise bad_field(name, f"token ids must lie in [0, {vocab_size})")


def as_list(given: Any) -> Any:
    """Put a single string or prompt of token ids into a list. Null becomes an empty list."""
    if given is None:
        return []
    is_ids = isinstance(given, list) and given and isinstance(given[0], int)
    return [given] if is_ids or isinstance(given, str) else given


class StreamOptions(BaseModel):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Generation(BaseModel):
    """Fields of both request types. None: the server's default."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)
    kind: ClassVar[Literal["chat", "text"]]
    prompt_field: ClassVar[str]

    model: str | None = None
    n: int | None = Field(None, ge=1, le=128)
    max_tokens: Limit = Field(None, ge=1, le=LARGEST_COUNT)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=LARGEST_COUNT)
    min_p: float | None = Field(None, ge=0, le=1)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(
        None, ge=0.01, le=100, validation_alias=AliasChoices("repetition_penalty", "repeat_penalty")
    )
    logit_bias: Biases = None
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: Annotated[list[str], BeforeValidator(as_list)] = Field([], max_length=16, fail_fast=True)
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @model_validator(mode="after")
    def reject_unsupported(self) -> Self:
        for name, value in (self.model_extra or {}).items():
            neutral = {"best_of": (1, self.n), "tfs_z": (1,)}.get(name, ())
            is_neutral = value in NEUTRAL or value in neutral
            if name == "logprobs" and type(value) is int:  # 0 asks for those of the answer
                is_neutral = False
            if name not in IGNORED and not is_neutral:
                raise bad_field(name, "not supported; omit this field")
        return self

    def sampling(self, defaults: Sampling, length: int, seed: int) -> Sampling:
        """Sampling settings for `length` new tokens; unset fields take `defaults` and `seed`."""
        given = self.model_dump(include=set(vars(PenalizedSampling())), exclude_none=True)
        if given.get("top_k", 1) < 1:
            given["top_k"] = None  # all tokens
        if "top_p" in given:
            given["top_p"] = max(given["top_p"], 1e-6)  # 0 means greedy
        given = {**vars(defaults), "seed": seed, **given, "max_new_tokens": length}
        plain = Sampling(**{name: given[name] for name in vars(defaults)})
        penalized = PenalizedSampling(**given)
        return plain if penalized == PenalizedSampling(**vars(plain)) else penalized


class Prompt(NamedTuple):
    """Token ids of a prompt."""

    ids: list[int]
    num_dropped: int = 0
    """Tokens of the oldest turns that were left out."""


class ChatRequest(Generation):
    """POST /v1/chat/completions."""

    kind, prompt_field = "chat", "messages"

    messages: list[dict[str, Any]] = Field(min_length=1, max_length=4096, fail_fast=True)
    max_completion_tokens: Limit = Field(None, ge=1, le=LARGEST_COUNT)
    truncation: Literal["auto", "error"] | None = None

    @property
    def length(self) -> int | None:
        """Maximum number of new tokens; None: up to the context length."""
        return self.max_completion_tokens or self.max_tokens

    def prompts(self, tokenizer: Tokenizer, context: int, truncation: str) -> list[Prompt]:
        """
        Return the prompts. Raises ValueError if the messages cannot be rendered.

        truncation: of a request that sets none; "auto" drops the oldest turns of a long one.
        """
        messages = [read_message(i, message) for i, message in enumerate(self.messages)]
        whole = render_prompt(tokenizer, messages, continue_last=True)
        if (self.truncation or truncation) != "auto":
            return [Prompt(whole)]
        ids = render_fitting(tokenizer, messages, context * 3 // 4)
        return [Prompt(ids, len(whole) - len(ids))]


def read_message(i: int, message: Mapping[str, Any]) -> dict[str, Any]:
    """A message for chat_format.py. `parts` take precedence over `content`; metadata is dropped."""
    for name in ("tool_calls", "function_call", "audio"):
        if message.get(name):
            raise bad_field(f"messages.{i}.{name}", "not supported; omit this field")
    role, content = message.get("role"), message.get("parts") or message.get("content")
    return {"role": role, "content": "" if content is None and role == "assistant" else content}


class TextRequest(Generation):
    """POST /v1/completions. Special tokens are allowed as ids, never parsed from text."""

    kind, prompt_field = "text", "prompt"

    prompt: Annotated[list[str | TokenIds], BeforeValidator(as_list)] = Field(
        min_length=1, max_length=1024, fail_fast=True
    )

    @property
    def length(self) -> int:
        return self.max_tokens or TEXT_TOKENS

    def prompts(self, tokenizer: Tokenizer, context: int, truncation: str) -> list[Prompt]:
        """Like `ChatRequest.prompts`; adds BOS if a prompt does not begin with it."""
        found = []
        for prompt in self.prompt:
            ids = tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
            check_ids("prompt", ids, tokenizer.vocab_size)
            missing = [] if ids[:1] == [tokenizer.bos_id] else [tokenizer.bos_id]
            found.append(Prompt([*missing, *ids]))
        return found


Asked = ChatRequest | TextRequest


# ---- responses -----------------------------------------------------------------------------------


class Delta(NamedTuple):
    """
    New text of one completion; `finish` is set in its last delta. A tool's call or result begins
    with a delta without text.
    """

    index: int
    kind: str = "text"
    text: str = ""
    finish: FinishReason | None = None


class Writer:
    """Formats deltas as chat completions or text completions."""

    def __init__(self, asked: Asked, model: str):
        self.kind, self.model = asked.kind, model
        prefix = "chatcmpl" if self.kind == "chat" else "cmpl"
        self.id, self.created = f"{prefix}-{uuid.uuid4().hex}", int(time.time())
        self.kinds: dict[int, list[str]] = defaultdict(list)  # of the streamed parts, by index

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
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def choice(self, deltas: Sequence[Delta], is_chunk: bool = False) -> dict[str, Any]:
        """
        Format deltas of a completion as a choice of a chunk, or all deltas as a whole one. All text
        of a chat is in `parts`, numbered so that clients can merge them; `content` has no tool
        calls and results.
        """
        index, finish = deltas[-1].index, deltas[-1].finish
        kinds, parts = self.kinds[index], []
        for _, kind, text, _ in deltas:
            begins = kind != "text" and not text  # a tool's call or result
            if begins or (text and kinds[-1:] != [kind]):
                kinds.append(kind)
            if (begins or text) and (not parts or parts[-1]["index"] != len(kinds) - 1):
                parts.append({"index": len(kinds) - 1, "type": kind, "text": ""})
            if text:
                parts[-1]["text"] += text
        text = "".join(part["text"] for part in parts if part["type"] == "text")
        content = {"text": text}
        if self.kind == "chat" and is_chunk:
            content = {"delta": {"content": text, "parts": parts}}
        elif self.kind == "chat":
            content = {"message": {"role": "assistant", "content": text, "parts": parts}}
        return {"index": index, **content, "logprobs": None, "finish_reason": finish}


def model_entry(name: str, state: Mapping[str, Any]) -> dict[str, Any]:
    """
    A model's entry in /v1/models; state: of its checkpoint. Beyond OpenAI's fields: stage,
    description, and the context length in tokens under the names of vLLM and llama.cpp.
    """
    stage, context = name.partition(":")[0], state["model"]["max_seq_len"]
    return {
        "id": name,
        "object": "model",
        "owned_by": "nanochat",
        "created": int(state["saved_at"]),
        "stage": stage,
        "description": "continues text" if stage == "base" else "answers in chats",
        "max_model_len": context,
        "meta": {"n_ctx_train": context},
    }
