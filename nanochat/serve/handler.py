"""
Submits validated requests to the engines; collects metrics.

    ChatRequest or TextRequest, Engine -> prompts, Sampling -> Worker.submit -> Reply
    steps, replies -> Metrics -> GET /metrics in the Prometheus text format

A conversation that exceeds the context loses its oldest turns, unless `truncation` is "error".
A completion ends when the context is full.
"""

import asyncio
import secrets

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from nanochat.engine import Engine, Sampling
from nanochat.serve.models import ModelLibrary
from nanochat.serve.openai_api import ApiError, ChatRequest, TextRequest
from nanochat.serve.scheduler import GenerationRequest, Reply, Worker

ROUTES = ("chat/completions", "completions", "markdown", "models")
PATHS = {"/", "/health", "/metrics", *(f"/v1/{route}" for route in ROUTES)}
SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class RequestHandler:
    """`defaults` apply to unset request fields; `max_waiting` as in `Worker`."""

    def __init__(self, library: ModelLibrary, defaults: Sampling, max_waiting: int):
        self.library, self.defaults = library, defaults
        self.metrics = Metrics()
        self.worker = Worker(max_waiting, self.metrics.count_step)

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

    def close(self, reply: Reply) -> None:
        """Free the slots of a finished or aborted reply and count it."""
        self.worker.close(reply)
        self.metrics.count_reply(reply)


class Metrics:
    """Prometheus metrics of one server."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = Counter(
            "nanochat_requests", "HTTP requests", ["path", "status"], registry=registry
        )
        self.prompt_tokens = Counter("nanochat_prompt_tokens", "Prompt tokens", registry=registry)
        self.tokens = Counter("nanochat_completion_tokens", "Generated tokens", registry=registry)
        self.steps = Counter("nanochat_steps", "Engine steps", registry=registry)
        self.step_seconds = Counter("nanochat_step_seconds", "Engine step time", registry=registry)
        self.first_token = Histogram(
            "nanochat_first_token_seconds", "First-token time", buckets=SECONDS, registry=registry
        )
        self.running = Gauge("nanochat_running", "Running completions", registry=registry)
        self.waiting = Gauge("nanochat_waiting", "Queued completions", registry=registry)

    def count_request(self, path: str, status: int) -> None:
        """Count an HTTP response; unknown paths share one label."""
        self.requests.labels(path if path in PATHS else "other", status).inc()

    def count_step(self, tokens: int, seconds: float) -> None:
        """Record one engine step. Called on the generation thread."""
        self.steps.inc()
        self.tokens.inc(tokens)
        self.step_seconds.inc(seconds)

    def count_reply(self, reply: Reply) -> None:
        """Record a finished or aborted reply."""
        self.prompt_tokens.inc(reply.prompt_tokens)
        if reply.first_seconds is not None:
            self.first_token.observe(reply.first_seconds)

    def render(self, running: int, waiting: int) -> bytes:
        """All metrics in the Prometheus text format."""
        self.running.set(running)
        self.waiting.set(waiting)
        return generate_latest(self.registry)
