"""
ASGI middleware that validates every request before the application sees it.

    connection -> TimeoutProtocol (closes slow connections)
    -> SecurityMiddleware (host, origin, key, size) -> app

Rejects DNS rebinding (a foreign host name that resolves to this machine), cross-origin requests,
ambiguous headers, and bodies that are too large or too slow; drops clients that do not read.
Cross-origin pages cannot read responses: no CORS header is sent unless --allow_origins lists them.
"""

import asyncio
import hmac
import ipaddress
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fastapi.datastructures import Headers
from fastapi.responses import JSONResponse
from uvicorn.protocols.http.h11_impl import H11Protocol

from nanochat.config import require_positive
from nanochat.serve.openai_api import ApiError

Scope = dict[str, Any]
PROTECTED = "/v1/"
HOST = re.compile(r"(\[[0-9a-fA-F:.]+\]|[^\s:\[\]/?#@,]+)(:\d{1,5})?")
ORIGIN = re.compile(rf"(?!http:.*:80$|https:.*:443$)[a-z][a-z0-9+.-]*://{HOST.pattern}")
SECURITY_HEADERS = [
    ("X-Content-Type-Options", "nosniff"),
    ("Referrer-Policy", "no-referrer"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
]


@dataclass(frozen=True)
class SecurityConfig:
    allowed_hosts: tuple[str, ...] = ()
    """Host names accepted in the Host header, besides localhost and IP addresses."""
    allow_origins: tuple[str, ...] = ()
    """Origins, such as https://my.page:3000, whose pages may call this server from a browser
    (CORS); '*' = all. Default: same origin only."""
    max_body_bytes: int = 2**20
    """Maximum size of a request body in bytes."""
    request_seconds: float = 10.0
    """Timeout in seconds for receiving the request headers, and again for the body."""
    send_seconds: float = 30.0
    """Seconds after which a client that does not read is disconnected."""

    def __post_init__(self) -> None:
        require_positive(self, "max_body_bytes", "request_seconds", "send_seconds")
        for name in self.allowed_hosts:
            found = HOST.fullmatch(name)
            if not found or found[2]:
                raise ValueError(f"invalid allowed_hosts {name!r}; omit the scheme and the port")
        for origin in self.allow_origins:
            if origin != "*" and not (ORIGIN.fullmatch(origin) and origin == origin.lower()):
                raise ValueError(
                    f"invalid allow_origins {origin!r}; use scheme://host or scheme://host:port, "
                    "in lower case and without the default port"
                )


@dataclass(eq=False)
class SecurityMiddleware:
    """Wraps `app`. Requests for PROTECTED paths must send `key`; None: no authentication."""

    app: Callable[..., Any]
    cfg: SecurityConfig
    key: str | None = field(repr=False)

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)

        try:
            self.check(scope)
            body = await self.read_body(receive)
        except ApiError as error:
            headers = {"Connection": "close", **error.headers}
            response = JSONResponse(error.body, error.status, headers)
            return await response(scope, receive, send)
        messages = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> dict[str, Any]:
            return messages.pop() if messages else await receive()

        if scope["method"] == "HEAD":  # handled as GET; h11 omits the body
            scope = {**scope, "method": "GET"}
        await self.app(scope, replay, send)

    def check(self, scope: Scope) -> None:
        """Raise ApiError if the request must be rejected."""
        headers = Headers(scope=scope)
        host, origin = headers.get("host", "").lower(), headers.get("origin")
        # h11 rejects other ambiguities
        has_two_lengths = "content-length" in headers and "transfer-encoding" in headers
        is_repeated = any(len(headers.getlist(name)) > 1 for name in ("authorization", "origin"))
        if not host:
            raise ApiError(400, "the request has no Host header; send one, such as Host: localhost")
        if has_two_lengths or is_repeated or not (found := HOST.fullmatch(host)):
            raise ApiError(400, "ambiguous headers: Host, Origin, Authorization or Content-Length")
        if not self.is_allowed(name := found[1].strip("[]")):
            message = f"host {name!r} is not allowed; start the server with --allowed_hosts={name}"
            raise ApiError(403, message, "host_not_allowed")
        if origin is not None and origin.lower().partition("://")[2] != host:
            if not {"*", origin} & set(self.cfg.allow_origins):
                fix = f"; add {origin} to --allow_origins of the server"
                if not ORIGIN.fullmatch(origin):  # null, or file://
                    fix = "; a page from a file has no origin: open the page of this server"
                raise ApiError(403, f"origin {origin} is not allowed{fix}", "foreign_origin")
        if self.key and scope["path"].startswith(PROTECTED) and scope["method"] != "OPTIONS":
            kind, _, given = headers.get("authorization", "").partition(" ")
            given = given.strip().encode("latin-1")
            if kind.lower() != "bearer" or not hmac.compare_digest(given, self.key.encode()):
                message = "missing or wrong API key; send Authorization: Bearer <key>"
                headers = {"WWW-Authenticate": "Bearer"}
                raise ApiError(401, message, "invalid_api_key", headers=headers)

    def is_allowed(self, name: str) -> bool:
        """Whether a host is localhost, an IP address or an allowed name (blocks DNS rebinding)."""
        if name == "localhost" or name in map(str.lower, self.cfg.allowed_hosts):
            return True
        try:
            return bool(ipaddress.ip_address(name))
        except ValueError:
            return False

    async def read_body(self, receive: Any) -> bytes:
        """
        Return the body. Raises ApiError if it is too large or too slow; a client that disconnects
        ends it early.

        A body that is too large is received to the end and discarded: a client that is still
        sending would not see the response.
        """
        most, size, body, message = self.cfg.max_body_bytes, 0, bytearray(), {"more_body": True}
        try:
            async with asyncio.timeout(self.cfg.request_seconds):
                while message.get("more_body"):  # a disconnect has neither body nor more
                    message = await receive()
                    piece = message.get("body", b"")
                    size += len(piece)
                    if size <= most:
                        body += piece
        except TimeoutError as error:
            raise ApiError(408, "timed out receiving the request body", "timeout") from error
        if size > most:
            raise ApiError(413, f"the body has {size:,} bytes; the limit is {most:,}", "too_large")
        return bytes(body)


class TimeoutProtocol(H11Protocol):
    """
    A uvicorn connection that closes if request headers do not arrive in time or the client does
    not read. Of more than `most_connections`, the one that has waited longest for a request closes.
    """

    cfg = SecurityConfig()
    most_connections = 16
    is_reported = False

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.await_request(self.cycle)
        present: Any = [c for c in self.connections if not c.transport.is_closing()]
        if len(present) > self.most_connections:
            idle = [c for c in present if c.cycle is None or c.cycle.response_complete]
            min(idle, key=lambda c: c.idle_since).transport.abort()
            if not self.is_reported:
                type(self).is_reported = True
                print(f"over {self.most_connections} connections: closing idle ones", flush=True)

    def on_response_complete(self) -> None:
        ended = self.cycle
        super().on_response_complete()  # may start a pipelined request
        self.await_request(ended)

    def await_request(self, last: Any) -> None:
        """Close the connection after a timeout unless another request follows `last`."""
        self.idle_since = self.loop.time()
        self.loop.call_later(self.cfg.request_seconds, self.close_idle, last)

    def close_idle(self, last: Any) -> None:
        if self.cycle is last and not self.transport.is_closing():
            self.transport.close()

    def pause_writing(self) -> None:
        super().pause_writing()
        self.send_timeout = self.loop.call_later(self.cfg.send_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self.send_timeout.cancel()
