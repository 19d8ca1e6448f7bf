"""
HTTP responses: one JSON object when the reply is complete, or a stream of server-sent events.

    Reply.news() -> deltas -> Writer -> data: {...}

`done` is called when the response ends or the client disconnects.
"""

import json
from collections.abc import AsyncIterator, Callable
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from nanochat.serve.openai_api import ApiError, Delta, Generation, StreamOptions, Writer
from nanochat.serve.scheduler import Reply

HEARTBEAT_SECONDS = 15.0  # proxies close idle streams
CHECK_SECONDS = 0.2  # at most between checks whether the client is still there
CLIENT_LEFT = 499  # nginx's status for "client closed request"


async def respond(
    reply: Reply, writer: Writer, asked: Generation, request: Request, done: Callable[[], None]
) -> Response:
    """Return the response to a request; its `reply` is still being generated."""
    if asked.stream:
        return EventStream(events(reply, writer, asked.stream_options or StreamOptions()), done)
    found: list[list[Delta]] = [[] for _ in range(reply.total)]
    try:
        async for deltas in reply.news(CHECK_SECONDS):
            for delta in deltas:
                found[delta.index].append(delta)
            if await request.is_disconnected():
                return Response(status_code=CLIENT_LEFT)
    finally:
        done()
    return JSONResponse(writer.envelope(list(map(writer.choice, found)), reply.usage))


class EventStream(StreamingResponse):
    """Server-sent events; always calls `done` at the end, even if no event was sent."""

    def __init__(self, content: AsyncIterator[str], done: Callable[[], None]):
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        super().__init__(content, media_type="text/event-stream", headers=headers)
        self.done = done

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.done()


async def events(reply: Reply, writer: Writer, options: StreamOptions) -> AsyncIterator[str]:
    """Yield the chunks of a reply, its usage if requested, and the end marker."""

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
