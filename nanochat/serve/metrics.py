"""
What the server counts, for Prometheus.

    steps of the engines, requests and their answers -> Metrics -> text of GET /metrics
"""

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)

MEDIA_TYPE = CONTENT_TYPE_LATEST
PATHS = {"/", "/health", "/metrics", "/v1/chat/completions", "/v1/completions", "/v1/models"}
SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class Metrics:
    """The counters of one server."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = Counter(
            "nanochat_requests", "Answers to requests", ["path", "status"], registry=registry
        )
        self.prompt_tokens = Counter("nanochat_prompt_tokens", "Tokens read", registry=registry)
        self.tokens = Counter("nanochat_completion_tokens", "Tokens written", registry=registry)
        self.steps = Counter("nanochat_steps", "Steps of the engines", registry=registry)
        self.step_seconds = Counter("nanochat_step_seconds", "Their time", registry=registry)
        self.first_token = Histogram(
            "nanochat_first_token_seconds",
            "From a request to the first token of its answer",
            buckets=SECONDS,
            registry=registry,
        )
        self.running = Gauge("nanochat_running", "Answers being written", registry=registry)
        self.waiting = Gauge("nanochat_waiting", "Answers in the queue", registry=registry)

    def request(self, path: str, status: int) -> None:
        """A request that was answered or refused; unknown paths are counted as one."""
        self.requests.labels(path if path in PATHS else "other", status).inc()

    def step(self, tokens: int, seconds: float) -> None:
        """A step of an engine. Called on the thread of the engines."""
        self.steps.inc()
        self.tokens.inc(tokens)
        self.step_seconds.inc(seconds)

    def answered(self, prompt_tokens: int, first_seconds: float | None) -> None:
        """A request that ended, one way or another; None: before its first piece."""
        self.prompt_tokens.inc(prompt_tokens)
        if first_seconds is not None:
            self.first_token.observe(first_seconds)

    def text(self, running: int, waiting: int) -> bytes:
        """All of it in Prometheus' text format."""
        self.running.set(running)
        self.waiting.set(waiting)
        return generate_latest(self.registry)
