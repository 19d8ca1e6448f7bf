"""
What a request must satisfy before anything reads it, as ASGI middleware.

    connection -> PatientProtocol (too slow: closed) -> Gate (host, origin, key, type, size) -> app

Requests for a host name that an attacker points at this machine (DNS rebinding), from a page of
another origin, with headers that two programs could understand in two ways, or with a body that is
too large or never ends, are rejected here, as are clients that do not read. Pages of other origins
cannot read replies, as no CORS header is sent unless --allow_origins lists them.
"""

import asyncio
import hmac
import ipaddress
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from nanochat.serve.openai_api import ApiError

Scope = dict[str, Any]
PROTECTED = ("/v1/", "/metrics")
HOST = re.compile(r"(\[[0-9a-fA-F:.]+\]|[^\s:\[\]/?#@,]+)(:\d{1,5})?")
ORIGIN = re.compile(rf"https?://{HOST.pattern}")
SINGLE = {"host", "origin", "authorization", "content-type", "content-length"}


@dataclass(frozen=True)
class GateConfig:
    allowed_hosts: tuple[str, ...] = ()
    """Host names by which this server may be called, besides localhost and IP addresses."""
    allow_origins: tuple[str, ...] = ()
    """Origins, such as https://my.page:3000, whose pages may use this server from a browser (CORS);
    '*' for all. Default: only its own."""
    max_body_bytes: int = 2**20
    """Largest body of a request."""
    request_seconds: float = 10.0
    """A request whose head, or whose body, takes longer to arrive is dropped."""
    send_seconds: float = 30.0
    """A client that does not take what it was sent for so long is dropped."""

    def __post_init__(self) -> None:
        for name in ("max_body_bytes", "request_seconds", "send_seconds"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0, got {getattr(self, name)}")
        for name in self.allowed_hosts:
            if not HOST.fullmatch(name) or hostname(name) != name.lower():
                raise ValueError(f"allowed_hosts has {name!r}; use a name without scheme and port")
        for origin in self.allow_origins:
            default_port = origin.startswith("http://") and origin.endswith(":80")
            default_port |= origin.startswith("https://") and origin.endswith(":443")
            is_sent_so = origin == origin.lower() and not default_port  # by browsers
            if origin != "*" and not (ORIGIN.fullmatch(origin) and is_sent_so):
                raise ValueError(
                    f"allow_origins has {origin!r}; use scheme://host or scheme://host:port, in "
                    "lower case and without the scheme's own port, as browsers send it"
                )


class Gate:
    """
    Wraps `app`. `key`, where there is one, must be borne by requests for what is PROTECTED.

    on_response: called with the path and the status of every answer.
    """

    def __init__(
        self,
        app: Callable[..., Any],
        cfg: GateConfig,
        key: str | None = None,
        on_response: Callable[[str, int], None] = lambda *_: None,
    ):
        self.app, self.cfg, self.key, self.on_response = app, cfg, key, on_response

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        try:
            self.check(scope)
            body = await self.read_body(receive)
        except ApiError as error:
            self.on_response(scope["path"], error.status)
            return await refuse(error, send)
        if body is None:
            return  # the client left
        replayed = False

        async def replay() -> dict[str, Any]:
            nonlocal replayed
            if replayed:
                return await receive()
            replayed = True
            return {"type": "http.request", "body": body, "more_body": False}

        async def tell(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.start":
                self.on_response(scope["path"], message["status"])
                message = {**message, "headers": [*message["headers"], *SECURITY_HEADERS]}
            await send(message)

        if scope["method"] == "HEAD":  # as GET; the connection leaves the body out
            scope = {**scope, "method": "GET"}
        await self.app(scope, replay, tell)

    def check(self, scope: Scope) -> None:
        """Raises ApiError for a request that is none of ours to answer."""
        names = Counter(k.decode("latin-1") for k, _ in scope["headers"])
        if repeated := sorted(name for name in SINGLE if names[name] > 1):
            raise ApiError(400, f"the header {repeated[0]} is there {names[repeated[0]]} times")
        if names["content-length"] and names["transfer-encoding"]:
            raise ApiError(400, "Content-Length and Transfer-Encoding exclude each other")
        headers = {k.decode("latin-1"): v.decode("latin-1") for k, v in scope["headers"]}
        host = headers.get("host", "").lower()
        if host and not HOST.fullmatch(host):
            raise ApiError(400, f"Host is not a host name with a port: {host!r:.80}")
        if not self.is_ours(host):
            raise ApiError(
                403,
                f"host {hostname(host)!r} is not allowed; start the server with "
                f"--allowed_hosts={hostname(host)}",
                "host_not_allowed",
            )
        origin = headers.get("origin")
        if origin is not None and origin.lower().partition("://")[2] != host:
            if not {"*", origin} & set(self.cfg.allow_origins):
                raise ApiError(403, f"pages of {origin} may not use this server", "foreign_origin")
        if self.key and scope["path"].startswith(PROTECTED) and scope["method"] != "OPTIONS":
            kind, _, given = headers.get("authorization", "").partition(" ")
            if kind.lower() != "bearer" or not hmac.compare_digest(
                given.strip().encode("latin-1"), self.key.encode()
            ):
                raise ApiError(
                    401,
                    "this server requires a key: Authorization: Bearer <key>",
                    "invalid_api_key",
                    headers={"WWW-Authenticate": "Bearer"},
                )
        if scope["method"] == "POST":
            media = headers.get("content-type", "").partition(";")[0].strip().lower()
            if media != "application/json":
                raise ApiError(415, f"Content-Type must be application/json, not {media!r}")

    def is_ours(self, host: str) -> bool:
        """An address, localhost or an allowed name: none that an attacker could point here."""
        name = hostname(host)
        if name == "localhost" or name in map(str.lower, self.cfg.allowed_hosts):
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True

    async def read_body(self, receive: Any) -> bytes | None:
        """
        The whole body; None where the client left. Raises ApiError for too much, too slow.

        What is too much is read to its end, but not kept: a client that is still sending would not
        see our answer.
        """
        most, size, body = self.cfg.max_body_bytes, 0, bytearray()
        try:
            async with asyncio.timeout(self.cfg.request_seconds):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    size += len(message["body"])
                    if size <= most:
                        body += message["body"]
                    if not message["more_body"]:
                        break
        except TimeoutError as error:
            raise ApiError(408, "the body did not arrive in time", "timeout") from error
        if size > most:
            raise ApiError(413, f"the body has {size:,} bytes; {most:,} are allowed", "too_large")
        return bytes(body)


SECURITY_HEADERS = [
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
]


def hostname(host: str) -> str:
    """The name in a Host header, without its port and without the brackets of an IPv6 address."""
    found = HOST.fullmatch(host)
    return found[1].strip("[]").lower() if found else ""


async def refuse(error: ApiError, send: Any) -> None:
    """Answer with an error, and take no more on this connection."""
    body = json.dumps(error.body).encode()
    headers: Iterable[tuple[str, str]] = {
        "content-type": "application/json",
        "content-length": str(len(body)),
        "connection": "close",
        **error.headers,
    }.items()
    raw = [(name.lower().encode(), value.encode()) for name, value in headers]
    start = {"type": "http.response.start", "status": error.status}
    await send({**start, "headers": [*raw, *SECURITY_HEADERS]})
    await send({"type": "http.response.body", "body": body})


class PatientProtocol(H11Protocol):
    """
    uvicorn's connection, closed when the head of a request does not come within a time, or what
    was sent is not taken.
    """

    cfg = GateConfig()

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.await_request(self.cycle)

    def on_response_complete(self) -> None:
        ended = self.cycle
        super().on_response_complete()  # may begin with a request that was sent ahead
        self.await_request(ended)

    def await_request(self, last: Any) -> None:
        """Look again after a while whether a request came since the `last` one."""
        self.loop.call_later(self.cfg.request_seconds, self.close_idle, last)

    def close_idle(self, last: Any) -> None:
        if self.cycle is last and not self.transport.is_closing():
            self.transport.close()

    def pause_writing(self) -> None:
        super().pause_writing()
        self.impatience = self.loop.call_later(self.cfg.send_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self.impatience.cancel()


def protocol(cfg: GateConfig) -> type[PatientProtocol]:
    """The class of connections with these settings."""
    return type("PatientProtocol", (PatientProtocol,), {"cfg": cfg})
