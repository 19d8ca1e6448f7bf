"""
The desk: turns a checked request into work for the engines.

    ChatRequest or TextRequest, ServedModel -> prompts, Sampling -> Worker.submit -> Reply

Prompts that do not fit are refused (`context_length_exceeded`), or with `truncation: "auto"` lose
their oldest turns. Answers end where the context does. Text never becomes a special token; a prompt
of ids is taken as it is. What cannot be done raises ApiError.
"""

import asyncio
import secrets
from collections.abc import Sequence

from nanochat.chat_format import render_fitting, render_prompt
from nanochat.common import printable
from nanochat.engine import Sampling
from nanochat.serve.metrics import Metrics
from nanochat.serve.models import ModelLibrary, NoRoom, ServedModel, UnknownModel
from nanochat.serve.openai_api import ApiError, ChatRequest, TextRequest
from nanochat.serve.scheduler import Ask, Busy, Closing, Reply, Worker

TEXT_TOKENS = 16  # of a text completion, where the request does not say


class Desk:
    """`defaults` hold where a request is silent; `max_waiting` as in `Worker`."""

    def __init__(self, library: ModelLibrary, defaults: Sampling, max_waiting: int):
        self.library, self.defaults = library, defaults
        self.metrics = Metrics()
        self.worker = Worker(max_waiting, self.metrics.step)

    async def model(self, name: str | None) -> ServedModel:
        """The model of that name."""
        try:
            return await self.library.get(name, self.worker.busy)
        except UnknownModel as error:
            known = ", ".join(self.library.listed())
            message = f"there is no model {name!r}; there are: {known}"
            raise ApiError(404, message, "model_not_found", "model") from error
        except NoRoom as error:
            raise ApiError(503, str(error), headers={"Retry-After": "5"}) from error
        except (ValueError, OSError, RuntimeError) as error:  # damaged, gone, or too large
            print(printable(f"{name} cannot be loaded: {error}"), flush=True)
            message = f"{name} cannot be loaded; the server's output says why"
            raise ApiError(503, message, "model_unavailable") from error

    async def chat(self, request: ChatRequest, model: ServedModel) -> Reply:
        """Queue the answer to a conversation."""
        prompt = await asyncio.to_thread(self.chat_ids, request, model)
        most = request.max_completion_tokens or request.max_tokens
        return self.submit(request, model, [(prompt, 1)], most, request.wanted_logprobs)

    async def text(self, request: TextRequest, model: ServedModel) -> Reply:
        """Queue the continuations of texts."""
        prompts = await asyncio.to_thread(self.text_ids, request, model)
        most = TEXT_TOKENS if request.max_tokens is None else max(1, request.max_tokens)
        return self.submit(request, model, prompts, most, request.logprobs, bool(request.echo))

    def chat_ids(self, request: ChatRequest, model: ServedModel) -> list[int]:
        """A conversation up to where the assistant speaks, or goes on."""
        tokenizer = model.engine.tokenizer
        try:
            if request.truncation == "auto":
                return render_fitting(tokenizer, request.messages, model.context * 3 // 4)
            return render_prompt(tokenizer, request.messages, continue_last=True)
        except ValueError as error:
            raise ApiError(400, str(error), param="messages") from error

    def text_ids(self, request: TextRequest, model: ServedModel) -> list[tuple[list[int], int]]:
        """Prompts that begin with BOS, and how many tokens of each we put in front: one or none."""
        tokenizer = model.engine.tokenizer
        try:
            found = []
            for prompt in request.prompt:
                ids = tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
                if ids and not 0 <= min(ids) <= max(ids) < tokenizer.vocab_size:
                    raise ValueError(f"token ids are 0 to {tokenizer.vocab_size - 1}")
                missing = [] if ids[:1] == [tokenizer.bos_id] else [tokenizer.bos_id]
                found.append(([*missing, *ids], len(missing)))
            return found
        except ValueError as error:
            raise ApiError(400, str(error), param="prompt") from error

    def submit(
        self,
        request: ChatRequest | TextRequest,
        model: ServedModel,
        prompts: Sequence[tuple[list[int], int]],
        most: int | None,
        logprobs: int | None,
        echo: bool = False,
    ) -> Reply:
        """Hand over to the engines: `most` new tokens each, or as many as the context holds."""
        n, seed = request.n or 1, secrets.randbits(48)
        chat, echoed = isinstance(request, ChatRequest), echo and logprobs is not None
        limit = model.engine.slots + self.worker.max_waiting
        if n * len(prompts) > limit:
            message = f"{n * len(prompts)} answers were asked for; {limit} is the most at once"
            raise ApiError(400, message, param="n")
        asks = []
        for prompt, hidden in prompts:
            room = model.context - len(prompt)
            if room < 1:
                raise ApiError(
                    400,
                    f"the prompt has {len(prompt)} tokens, and the context of {model.name} only "
                    f"{model.context}, for prompt and answer together",
                    "context_length_exceeded",
                    "messages" if chat else "prompt",
                )
            length = min(most or room, room)
            settings = request.sampling(self.defaults, length, seed, logprobs, echoed)
            asks.append(Ask(prompt, settings, n, request.stop, parts=chat, hidden=hidden))
        try:
            reply = self.worker.submit(model.engine, asks)
        except Busy as error:
            wait = {"Retry-After": str(error.seconds)}
            raise ApiError(429, str(error), "rate_limit_exceeded", headers=wait) from error
        except Closing as error:
            raise ApiError(503, str(error), "shutting_down") from error
        return reply

    def done(self, reply: Reply) -> None:
        """However a request ended: free what it held, and count it."""
        self.worker.close(reply)
        self.metrics.answered(reply.prompt_tokens, reply.first_seconds)
