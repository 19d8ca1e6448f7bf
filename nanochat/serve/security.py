"""
ASGI middleware that validates every request before the application sees it.

    connection -> TimeoutProtocol (closes slow connections)
    -> SecurityMiddleware (host, origin, key, media type, size) -> app

Rejects DNS rebinding (a foreign host name that resolves to this machine), cross-origin requests,
ambiguous headers, and oversized or incomplete bodies; drops clients that do not read.
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
ORIGIN = re.compile(rf"(?!http:.*:80$|https:.*:443$)https?://{HOST.pattern}")
SINGLE = ("authorization", "content-length", "content-type", "host", "origin")
SECURITY_HEADERS = [
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
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
            if not HOST.fullmatch(name) or hostname(name) != name.lower():
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

        async def secure_send(message: Any) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], *SECURITY_HEADERS]}
            await send(message)

        try:
            self.check(scope)
            body = await self.read_body(receive)
        except ApiError as error:
            headers = {"Connection": "close", **error.headers}
            response = JSONResponse(error.body, error.status, headers)
            return await response(scope, receive, secure_send)
        if body is None:
            return  # the client disconnected
        messages = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> dict[str, Any]:
            return messages.pop() if messages else await receive()

        if scope["method"] == "HEAD":  # handled as GET; h11 omits the body
            scope = {**scope, "method": "GET"}
        await self.app(scope, replay, secure_send)

    def check(self, scope: Scope) -> None:
        """Raise ApiError if the request must be rejected."""
        headers = Headers(scope=scope)
        for name in SINGLE:
            if (count := len(headers.getlist(name))) > 1:
                raise ApiError(400, f"header {name} is repeated ({count} times)")
        if "content-length" in headers and "transfer-encoding" in headers:
            raise ApiError(400, "Content-Length and Transfer-Encoding are mutually exclusive")
        host = headers.get("host", "").lower()
        if host and not HOST.fullmatch(host):
            raise ApiError(400, f"invalid Host header {host!r:.80}")
        if not self.is_allowed(name := hostname(host)):
            message = f"host {name!r} is not allowed; start the server with --allowed_hosts={name}"
            raise ApiError(403, message, "host_not_allowed")
        origin = headers.get("origin")
        if origin is not None and origin.lower().partition("://")[2] != host:
            if not {"*", origin} & set(self.cfg.allow_origins):
                message = f"origin {origin} is not allowed; add it to --allow_origins"
                raise ApiError(403, message, "foreign_origin")
        if self.key and scope["path"].startswith(PROTECTED) and scope["method"] != "OPTIONS":
            kind, _, given = headers.get("authorization", "").partition(" ")
            given = given.strip().encode("latin-1")
            if kind.lower() != "bearer" or not hmac.compare_digest(given, self.key.encode()):
                message = "missing or wrong API key; send Authorization: Bearer <key>"
                headers = {"WWW-Authenticate": "Bearer"}
                raise ApiError(401, message, "invalid_api_key", headers=headers)
        if scope["method"] == "POST":
            media = headers.get("content-type", "").partition(";")[0].strip().lower()
            if media != "application/json":
                raise ApiError(415, f"Content-Type must be application/json, not {media!r}")

    def is_allowed(self, name: str) -> bool:
        """Whether a host is localhost, an IP address or an allowed name (blocks DNS rebinding)."""
        if name == "localhost" or name in map(str.lower, self.cfg.allowed_hosts):
            return True
        try:
            return bool(ipaddress.ip_address(name))
        except ValueError:
            return False

    async def read_body(self, receive: Any) -> bytes | None:
        """
        Return the body; None if the client disconnected. Raises ApiError if too large or too slow.

        A body that is too large is received to the end and discarded: a client that is still
        sending would not see the response.
        """
        most, size, body, more = self.cfg.max_body_bytes, 0, bytearray(), True
        try:
            async with asyncio.timeout(self.cfg.request_seconds):
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    size, more = size + len(message["body"]), message["more_body"]
                    if size <= most:
                        body += message["body"]
        except TimeoutError as error:
            raise ApiError(408, "timed out receiving the request body", "timeout") from error
        if size > most:
            raise ApiError(413, f"the body has {size:,} bytes; the limit is {most:,}", "too_large")
        return bytes(body)


def hostname(host: str) -> str:
    """Host name in a Host header, without the port and the brackets of an IPv6 address."""
    found = HOST.fullmatch(host)
    return found[1].strip("[]").lower() if found else ""


class TimeoutProtocol(H11Protocol):
    """
    A uvicorn connection that closes if request headers do not arrive in time or the client does
    not read. Of more than `most_connections`, those that have waited longest for a request close.
    """

    cfg = SecurityConfig()
    most_connections = 1000
    is_reported = False

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.await_request(self.cycle)
        present: Any = [c for c in self.connections if not c.transport.is_closing()]
        if len(present) > self.most_connections:
            idle = [c for c in present if c.cycle is None or c.cycle.response_complete]
            min(idle, key=lambda c: c.idle_since).transport.abort()
            if not self.is_reported:
                print(
                    f"more than {self.most_connections} connections; closing idle ones", flush=True
                )
                type(self).is_reported = True

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
