"""
Submits validated requests to the engines.

    ChatRequest or TextRequest, Engine -> prompts, Sampling -> Worker.submit -> Reply

A conversation that exceeds the context loses its oldest turns, unless `truncation` is "error".
A completion ends when the context is full.
"""

import asyncio
import secrets

from nanochat.engine import Engine, Sampling
from nanochat.serve.models import ModelLibrary
from nanochat.serve.openai_api import ApiError, ChatRequest, TextRequest
from nanochat.serve.scheduler import GenerationRequest, Reply, Worker


class RequestHandler:
    """`defaults` apply to unset request fields; `max_waiting` as in `Worker`."""

    def __init__(self, library: ModelLibrary, defaults: Sampling, max_waiting: int):
        self.library, self.defaults = library, defaults
        self.worker = Worker(max_waiting)

    async def submit(self, asked: ChatRequest | TextRequest, engine: Engine) -> Reply:
        """Queue a request. Raises ApiError for an overlong prompt or too many completions."""
        n, context = asked.n or 1, engine.cache.capacity
        try:
            prompts = await asyncio.to_thread(asked.prompts, engine.tokenizer, context)
        except ValueError as error:
            raise ApiError(400, str(error), param=asked.prompt_field) from error
        limit = engine.slots + self.worker.max_waiting
        if n * len(prompts) > limit:
            message = f"{n * len(prompts)} completions requested; the limit is {limit}"
            raise ApiError(400, message, param="n")
        requests = []
        for prompt, num_added, _ in prompts:
            room = context - len(prompt)
            if room < 1:
                raise ApiError(
                    400,
                    f"the prompt has {len(prompt)} tokens; the model's context length is "
                    f"{context}, of which the prompt may use {context - 1}",
                    "context_length_exceeded",
                    asked.prompt_field,
                )
            length = min(asked.length or room, room)
            request = GenerationRequest(
                prompt,
                asked.sampling(self.defaults, length, secrets.randbits(48)),
                n,
                asked.stop,
                parts=asked.kind == "chat",
                echo_from=num_added if asked.echo else None,
                only_prompt=asked.max_tokens == 0,
                logprobs=asked.num_logprobs,
            )
            requests.append(request)
        reply = self.worker.submit(engine, requests)
        reply.num_dropped = sum(prompt.num_dropped for prompt in prompts)
        return reply
