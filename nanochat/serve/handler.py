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
from nanochat.serve.openai_api import ApiError, Asked, bad_field, check_ids
from nanochat.serve.scheduler import Reply, Worker


class RequestHandler:
    """`defaults`, `truncation` apply to unset request fields; `max_waiting` as in `Worker`."""

    def __init__(
        self, library: ModelLibrary, defaults: Sampling, max_waiting: int, truncation: str = "auto"
    ):
        self.library, self.defaults, self.truncation = library, defaults, truncation
        self.worker = Worker(max_waiting)

    async def submit(self, asked: Asked, engine: Engine) -> Reply:
        """Queue a request. Raises ApiError for an overlong prompt or too many completions."""
        context, jobs = engine.cache.capacity, []
        check_ids("logit_bias", asked.logit_bias or (), engine.tokenizer.vocab_size)
        try:
            prompts = await asyncio.to_thread(
                asked.prompts, engine.tokenizer, context, self.truncation
            )
        except ValueError as error:
            raise bad_field(asked.prompt_field, str(error)) from error
        total, limit = (asked.n or 1) * len(prompts), engine.slots + self.worker.max_waiting
        if total > limit:
            raise bad_field("n", f"{total} completions requested; the limit is {limit}")
        for prompt in prompts:
            room = context - len(prompt.ids)
            if room < 1:
                raise ApiError(
                    400,
                    f"the prompt has {len(prompt.ids)} tokens; the model's context length is "
                    f"{context}, of which the prompt may use {context - 1}",
                    "context_length_exceeded",
                    asked.prompt_field,
                )
            length = min(asked.length or room, room)
            sampling = asked.sampling(self.defaults, length, secrets.randbits(48))
            jobs.append((prompt, sampling))
        return self.worker.submit(engine, asked, jobs)
