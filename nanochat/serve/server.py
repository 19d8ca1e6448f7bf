"""
HTTP server for the OpenAI-compatible API and the chat page.

    request -> SecurityMiddleware -> FastAPI -> prepare -> Worker.submit -> Reply -> response

Routes: / is the chat page, ui.html; /report the training report, unless there is an API key; /v1
has chat completions, completions, models, and Markdown for the page; /health is for monitoring. A
response is one JSON object when the reply is complete, or a stream of server-sent events. On
shutdown, running completions have DRAIN_SECONDS to finish, then their streams end with an error.
"""

import asyncio
import base64
import json
import re
import resource
import secrets
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any, Literal

import uvicorn
from fastapi import FastAPI, Request
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import HTMLResponse, JSONResponse, Response, StreamingResponse

from nanochat.common import printable
from nanochat.config import require_at_least, short
from nanochat.engine import Engine, Sampling
from nanochat.records import report_home
from nanochat.serve.markdown import render_answers
from nanochat.serve.models import ModelLibrary
from nanochat.serve.openai_api import (
    ApiError,
    Asked,
    ChatRequest,
    Delta,
    Prompt,
    StreamOptions,
    TextRequest,
    Writer,
    bad_field,
    check_ids,
    model_entry,
    read_request,
)
from nanochat.serve.scheduler import Reply, Worker
from nanochat.serve.security import (
    SECURITY_HEADERS,
    SecurityConfig,
    SecurityMiddleware,
    TimeoutProtocol,
)

PAGE = Path(__file__).with_name("ui.html")
REPORT_MARK = "<!-- link to the report -->"
REPORT_LINK = '<p class="bar"><a href="report" target="_blank">Training report</a></p>'
STATIC = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; frame-ancestors 'none'"
BACKLOG = 32  # connections that asyncio accepts in a round; after about three, one is closed
DRAIN_SECONDS = 5.0  # time for running completions to finish on shutdown
CLOSE_SECONDS = 8  # wait before closing open connections on shutdown
HEARTBEAT_SECONDS = 15.0  # proxies close idle streams
CHECK_SECONDS = 0.2  # at most between checks whether the client is still there


@dataclass(frozen=True)
class ServerConfig:
    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 = all interfaces (consider --api_key_file)."""
    port: Annotated[int, short("p")] = 8000
    """Port to listen on; 0 = any free port."""
    api_key_file: str | None = None
    """File with the API key required for /v1. Default: no key."""
    slots: int | None = None
    """Concurrent completions per model. Default: 64, or fewer if a quarter of free memory holds
    fewer."""
    max_waiting: int = 64
    """Maximum number of queued completions per model; more are rejected with status 429."""
    truncation: Literal["auto", "error"] = "auto"
    """auto: drop the oldest turns of a conversation that is too long; error: reject it."""
    max_models: int = 4
    """Maximum number of loaded models."""
    security: SecurityConfig = field(default_factory=SecurityConfig)

    def __post_init__(self) -> None:
        require_at_least(self, port=0, slots=1, max_waiting=0, max_models=1)
        if self.port >= 2**16:
            raise ValueError(f"port must be below {2**16}, got {self.port}")

    @cached_property  # read once: the file may be a pipe
    def key(self) -> str | None:
        """The API key; None: no key. Raises OSError, or ValueError for an invalid key."""
        if self.api_key_file is None:
            return None
        key = Path(self.api_key_file).expanduser().read_text("utf-8", "replace").strip()
        if not re.fullmatch("[!-~]+", key):
            raise ValueError(f"{self.api_key_file} must contain one key of ASCII letters and signs")
        return key


# ---- requests and responses ----------------------------------------------------------------------


def prepare(
    asked: Asked, engine: Engine, defaults: Sampling, truncation: str
) -> list[tuple[Prompt, Sampling]]:
    """
    Prompts of a request with their settings. Slow for long prompts, so call it off the event loop.

    A conversation longer than three quarters of the context loses its oldest turns, unless
    `truncation` is "error". A completion ends when the context is full. Raises ApiError for an
    overlong prompt.
    """
    context, jobs = engine.cache.capacity, []
    check_ids("logit_bias", asked.logit_bias or (), engine.tokenizer.vocab_size)
    try:
        prompts = asked.prompts(engine.tokenizer, context, truncation)
    except ValueError as error:
        raise bad_field(asked.prompt_field, str(error)) from error
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
        jobs.append((prompt, asked.sampling(defaults, length, secrets.randbits(48))))
    return jobs


async def whole_answer(reply: Reply, writer: Writer, request: Request) -> Response:
    """Wait for the end of a reply, or until the client disconnects; return the response."""
    found: list[list[Delta]] = [[] for _ in range(reply.total)]
    async for deltas in reply.news(CHECK_SECONDS):
        for delta in deltas:
            found[delta.index].append(delta)
        if await request.is_disconnected():
            return Response()  # for a client that has left
    return JSONResponse(writer.envelope(list(map(writer.choice, found)), reply.usage))


class EventStream(StreamingResponse):
    """A reply as server-sent events; closes it at the end, even if no event was sent."""

    def __init__(self, worker: Worker, reply: Reply, writer: Writer):
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        super().__init__(events(reply, writer), media_type="text/event-stream", headers=headers)
        self.worker, self.reply = worker, reply

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.worker.close(self.reply)


async def events(reply: Reply, writer: Writer) -> AsyncIterator[str]:
    """Yield the chunks of a reply, its usage if requested, and the end marker."""
    options = reply.asked.stream_options or StreamOptions()

    def chunk(choices: list[Any], has_usage: bool | None = options.continuous_usage_stats) -> str:
        return event(writer.envelope(choices, reply.usage if has_usage else None, is_chunk=True))

    if writer.kind == "chat":
        yield "".join(chunk([writer.opening(i)]) for i in range(reply.total))
    try:
        async for deltas in reply.news(HEARTBEAT_SECONDS):
            chunks = [chunk([writer.choice([delta], is_chunk=True)]) for delta in deltas]
            yield "".join(chunks) or ": keep-alive\n\n"
        if options.include_usage:
            yield chunk([], has_usage=True)
    except ApiError as error:
        yield event(error.body)
    yield "data: [DONE]\n\n"


def event(data: Any) -> str:
    """
    Format a server-sent event. It is ASCII, because some clients also end a line at U+2028 or
    U+0085, which JSON allows within a string.
    """
    return f"data: {json.dumps(data, separators=(',', ':'))}\n\n"


# ---- the application -----------------------------------------------------------------------------


def add_api(
    app: FastAPI,
    library: ModelLibrary,
    worker: Worker,
    defaults: Sampling,
    truncation: str,
    suggestions: Sequence[str],
) -> None:
    """Add the routes of the OpenAI API."""
    rendering = asyncio.Semaphore()

    async def complete(kind: type[Asked], request: Request) -> Response:
        asked = await asyncio.to_thread(read_request, kind, await request.body())
        name = asked.model or library.default
        engine = await library.get(name, worker.is_busy)
        if await request.is_disconnected():
            return Response()
        jobs = await asyncio.to_thread(prepare, asked, engine, defaults, truncation)
        writer, reply = Writer(asked, name), worker.submit(engine, asked, jobs)
        if asked.stream:
            response = EventStream(worker, reply, writer)
        else:
            try:
                response = await whole_answer(reply, writer, request)
            finally:
                worker.close(reply)
        if dropped := sum(prompt.num_dropped for prompt, _ in reply.prompts):
            print(f"{printable(name)}: left out {dropped} tokens of the oldest turns", flush=True)
            response.headers["X-Dropped-Tokens"] = str(dropped)
        return response

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        return await complete(ChatRequest, request)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await complete(TextRequest, request)

    @app.post("/v1/markdown")
    async def markdown(request: Request) -> dict[str, list[str]]:
        body = await request.body()
        async with rendering:  # one at a time: it shares the interpreter with generation
            if await request.is_disconnected():
                return {"html": []}
            return {"html": await asyncio.to_thread(render_answers, body)}

    @app.get("/v1/models")
    def models() -> dict[str, Any]:
        data = [model_entry(*model) for model in library.available().items()]
        shown = {"temperature": defaults.temperature, "top_p": defaults.top_p}
        shown |= {"top_k": defaults.top_k or 0, "max_tokens": defaults.max_new_tokens}
        extensions = {"defaults": shown, "suggestions": list(suggestions)}
        return {"object": "list", "data": data, **extensions}

    @app.get("/v1/models/{name}")
    def model(name: str) -> dict[str, Any]:
        found = library.available()
        if name not in found:
            raise ApiError(404, f"model {name!r} not found", "model_not_found", "model")
        return model_entry(name, found[name])


def add_pages(app: FastAPI, worker: Worker, report: Path | None) -> None:
    """
    Add the routes for the chat page, which links to the training report in the file `report` if
    there is one, and monitoring.
    """
    page = PAGE.read_text("utf-8")
    headers = {"Content-Security-Policy": page_policy(page), "Cache-Control": "no-cache"}

    @app.get("/")
    def chat_page() -> Response:
        link = REPORT_LINK if report and report.exists() else ""
        return HTMLResponse(page.replace(REPORT_MARK, link), headers=headers)

    @app.get("/report")
    def report_page() -> Response:
        if report is None or not report.exists():
            raise ApiError(404, "no report; python -m scripts.report writes it", "not_found")
        return HTMLResponse(report.read_text("utf-8"), headers={"Content-Security-Policy": STATIC})

    @app.get("/health")
    def health() -> dict[str, Any]:
        running, waiting = worker.counts()
        return {"status": "ok", "running": running, "waiting": waiting}


def page_policy(page: str) -> str:
    """
    Content security policy that allows the page's own script and style, by their digests, and calls
    of its own server. Nothing else runs: no other script, no handler or style in an element.
    """
    allowed = {}
    for tag in ("script", "style"):
        found = re.search(f"<{tag}[^>]*>(.*?)</{tag}>", page, re.DOTALL)
        assert found, f"no <{tag}> in {PAGE}"
        allowed[tag] = base64.b64encode(sha256(found[1].encode()).digest()).decode()
    return (
        f"default-src 'none'; script-src 'sha256-{allowed['script']}'; "
        f"style-src 'sha256-{allowed['style']}'; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types markdown"
    )


def add_errors(app: FastAPI) -> None:
    """Format all errors as OpenAI clients expect."""

    @app.exception_handler(ApiError)
    async def rejected(request: Request, error: ApiError) -> JSONResponse:
        return JSONResponse(error.body, error.status, error.headers)

    @app.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> JSONResponse:
        return JSONResponse(ApiError(500, f"{type(error).__name__}: see the server log").body, 500)

    async def unknown_path(request: Request, error: Any) -> Response:
        path = request.url.path
        message = f"{error.detail}: {request.method} {path}"
        if path.startswith(("/chat/", "/completions", "/models")):
            message += f"; use /v1{path}, as a base URL that ends with /v1"
        body = ApiError(error.status_code, message).body
        return JSONResponse(body, error.status_code, error.headers)

    for status in (404, 405):  # raised by the framework itself
        app.add_exception_handler(status, unknown_path)


# ---- running the server --------------------------------------------------------------------------


class Server(uvicorn.Server):
    """
    uvicorn server that lets running completions finish on shutdown.

    defaults: of request fields that are not set. suggestions: prompts that the page offers.
    """

    def __init__(
        self,
        library: ModelLibrary,
        defaults: Sampling,
        cfg: ServerConfig,
        suggestions: Sequence[str] = (),
    ):
        self.library, self.worker = library, Worker(cfg.max_waiting)
        api = FastAPI(title="nanochat", lifespan=self.run_worker, openapi_url=None)
        add_api(api, library, self.worker, defaults, cfg.truncation, suggestions)
        page = report_home() / "report.html"
        add_pages(api, self.worker, None if cfg.key else page)  # a browser sends no key
        add_errors(api)
        app: Any = SecurityMiddleware(api, cfg.security, cfg.key)
        if cfg.security.allow_origins:
            app = CORSMiddleware(
                app,
                cfg.security.allow_origins,
                allow_methods=["GET", "POST"],
                allow_headers=["*"],
                allow_private_network=True,
                expose_headers=["Retry-After", "X-Dropped-Tokens"],
            )
        most = max(16, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2 - 3 * BACKLOG)
        limits = {"cfg": cfg.security, "most_connections": most}
        super().__init__(
            uvicorn.Config(
                app,
                http=type("ConfiguredProtocol", (TimeoutProtocol,), limits),
                ws="none",
                lifespan="on",
                log_level="warning",
                access_log=False,
                server_header=False,
                headers=SECURITY_HEADERS,
                proxy_headers=False,
                backlog=BACKLOG,
                timeout_graceful_shutdown=CLOSE_SECONDS,
            )
        )

    @asynccontextmanager
    async def run_worker(self, app: FastAPI) -> AsyncIterator[None]:
        self.worker.start()
        yield
        self.worker.stop()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.worker.drain(DRAIN_SECONDS)
        await super().shutdown(sockets)


def listen(cfg: ServerConfig) -> socket.socket:
    """Return the bound server socket. Raises ValueError if binding fails."""
    family = socket.AF_INET6 if ":" in cfg.host else socket.AF_INET
    # asyncio sets TCP_NODELAY only if the protocol is explicit; otherwise answers wait for 40 ms
    found = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind((cfg.host, cfg.port))
        found.listen()  # else a second server could bind the port while this one loads its model
    except OSError as error:
        found.close()
        address, fix = f"{cfg.host}:{cfg.port}", "--port=0 (any that is free) or --host=127.0.0.1"
        message = f"cannot listen on {address} ({error.strerror}); try {fix}"
        raise ValueError(message) from error
    return found


def server_url(bound: socket.socket) -> str:
    """URL of the server for a browser on this machine."""
    host, port = map(str, bound.getsockname()[:2])
    if host in ("0.0.0.0", "::"):
        host = "localhost"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
