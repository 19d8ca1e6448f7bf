"""
HTTP server for the OpenAI-compatible API and the chat page.

    request -> SecurityMiddleware -> FastAPI -> RequestHandler -> Reply -> respond

Routes: / is the chat page, ui.html; /v1 has chat completions, completions, models, and Markdown for
the page; /health is for monitoring. On shutdown, running completions have
DRAIN_SECONDS to finish, then their streams end with an error.
"""

import asyncio
import base64
import re
import resource
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any, Literal

import uvicorn
from fastapi import FastAPI, Request
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import HTMLResponse, JSONResponse, Response

from nanochat.common import printable
from nanochat.config import require_at_least, short
from nanochat.serve.handler import RequestHandler
from nanochat.serve.markdown import render_answers
from nanochat.serve.models import newest_of
from nanochat.serve.openai_api import (
    ApiError,
    Asked,
    ChatRequest,
    TextRequest,
    Writer,
    model_entry,
    read_request,
)
from nanochat.serve.responses import respond
from nanochat.serve.security import (
    SECURITY_HEADERS,
    SecurityConfig,
    SecurityMiddleware,
    TimeoutProtocol,
)

PAGE = Path(__file__).with_name("ui.html")
BACKLOG = 32  # connections that asyncio accepts in a round; after about three, one is closed
DRAIN_SECONDS = 5.0  # time for running completions to finish on shutdown
CLOSE_SECONDS = 8  # wait before closing open connections on shutdown


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

    def key(self) -> str | None:
        """Read the API key; None: no key. Raises OSError, or ValueError for an invalid key."""
        if self.api_key_file is None:
            return None
        key = Path(self.api_key_file).expanduser().read_text("utf-8", "replace").strip()
        if not key or not key.isascii():
            raise ValueError(f"{self.api_key_file} must contain a non-empty ASCII key")
        return key


# ---- the application ---------------------------------------------------------------------------


def build_app(handler: RequestHandler, suggestions: Sequence[str] = ()) -> FastAPI:
    """Build the app that SecurityMiddleware wraps. `suggestions`: prompts the page offers."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        handler.worker.start()
        yield
        handler.worker.stop()

    app = FastAPI(title="nanochat", lifespan=lifespan, openapi_url=None)
    add_api(app, handler, suggestions)
    add_pages(app, handler)
    add_errors(app)
    return app


def add_api(app: FastAPI, handler: RequestHandler, suggestions: Sequence[str]) -> None:
    """Add the routes of the OpenAI API."""

    async def complete(kind: type[Asked], request: Request) -> Response:
        asked = await asyncio.to_thread(read_request, kind, await request.body())
        name = asked.model or handler.library.default
        engine = await handler.library.get(name, handler.worker.busy)
        writer = Writer(asked, name, engine.tokenizer)
        reply = await handler.submit(asked, engine)
        response = await respond(reply, writer, asked, request, lambda: handler.worker.close(reply))
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
        return {"html": await asyncio.to_thread(render_answers, await request.body())}

    @app.get("/v1/models")
    def models() -> dict[str, Any]:
        data = [model_entry(name, newest_of(name)) for name in handler.library.listed()]
        sampling = handler.defaults
        defaults = {"temperature": sampling.temperature, "top_p": sampling.top_p}
        defaults |= {"top_k": sampling.top_k or 0, "max_tokens": sampling.max_new_tokens}
        extensions = {"defaults": defaults, "suggestions": list(suggestions)}
        return {"object": "list", "data": data, **extensions}

    @app.get("/v1/models/{name}")
    def model(name: str) -> dict[str, Any]:
        for entry in models()["data"]:
            if entry["id"] == name:
                return entry
        raise ApiError(404, f"model {name!r} not found", "model_not_found", "model")


def add_pages(app: FastAPI, handler: RequestHandler) -> None:
    """Add the routes for the chat page and monitoring."""
    page = PAGE.read_text("utf-8")
    headers = {"Content-Security-Policy": page_policy(page), "Cache-Control": "no-cache"}

    @app.get("/")
    def chat_page() -> Response:
        return HTMLResponse(page, headers=headers)

    @app.get("/health")
    def health() -> JSONResponse:
        status = "ok" if handler.worker.deadline is None else "stopping"
        running, waiting = handler.worker.counts()
        content = {"status": status, "running": running, "waiting": waiting}
        return JSONResponse(content, 200 if status == "ok" else 503)


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
        message = f"{error.detail}: {request.method} {request.url.path}"
        body = ApiError(error.status_code, message).body
        return JSONResponse(body, error.status_code, error.headers)

    for status in (404, 405):  # raised by the framework itself
        app.add_exception_handler(status, unknown_path)


# ---- running the server ------------------------------------------------------------------------


class Server(uvicorn.Server):
    """uvicorn server that lets running completions finish on shutdown."""

    def __init__(self, handler: RequestHandler, cfg: ServerConfig, suggestions: Sequence[str] = ()):
        self.handler = handler
        app: Any = build_app(handler, suggestions)
        app = SecurityMiddleware(app, cfg.security, cfg.key())
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

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.handler.worker.drain(DRAIN_SECONDS)
        await super().shutdown(sockets)


def listen(cfg: ServerConfig) -> socket.socket:
    """Return the bound server socket. Raises ValueError if binding fails."""
    family = socket.AF_INET6 if ":" in cfg.host else socket.AF_INET
    # asyncio sets TCP_NODELAY only if the protocol is explicit; otherwise answers wait for 40 ms
    found = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind((cfg.host, cfg.port))
    except OSError as error:
        found.close()
        address, fix = f"{cfg.host}:{cfg.port}", f"--port={cfg.port + 1} or --host=127.0.0.1"
        message = f"cannot listen on {address} ({error.strerror}); try {fix}"
        raise ValueError(message) from error
    return found


def server_url(bound: socket.socket) -> str:
    """URL of the server for a browser on this machine."""
    host, port = map(str, bound.getsockname()[:2])
    if host in ("0.0.0.0", "::"):
        host = "localhost"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
