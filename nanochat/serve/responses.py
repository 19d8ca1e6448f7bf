"""
HTTP responses: one JSON object when the reply is complete, or a stream of server-sent events.

    Reply.news() -> deltas -> join_chunks -> Writer -> data: {...}

`done` is called when the response ends or the client disconnects.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from nanochat.serve.openai_api import ApiError, Delta, Generation, StreamOptions, Writer
from nanochat.serve.scheduler import Reply

HEARTBEAT_SECONDS = 15.0  # proxies close idle streams
CLIENT_LEFT = 499  # nginx's status for "client closed request"


async def respond(
    reply: Reply, writer: Writer, asked: Generation, request: Request, done: Callable[[], None]
) -> Response:
    """Return the response to a request; its `reply` is still being generated."""
    if asked.stream:
        return EventStream(events(reply, writer, asked.stream_options or StreamOptions()), done)
    try:
        deltas = await all_deltas(reply, request)
    finally:
        done()
    if deltas is None:
        return Response(status_code=CLIENT_LEFT)
    joined = join_chunks(deltas)
    choices = [writer.whole([d for d in joined if d.index == i]) for i in range(reply.total)]
    return JSONResponse(writer.envelope(choices, reply.usage))


async def all_deltas(reply: Reply, request: Request) -> list[Delta] | None:
    """Collect all deltas of a reply; None if the client disconnects first."""

    async def read() -> list[Delta]:
        deltas = []
        while reply.unfinished:
            deltas += await reply.news()
        return deltas

    # the body was read, so only the disconnect is left to receive
    reading, leaving = asyncio.create_task(read()), asyncio.ensure_future(request.receive())
    try:
        await asyncio.wait((reading, leaving), return_when=asyncio.FIRST_COMPLETED)
        return reading.result() if reading.done() else None
    finally:
        reading.cancel()
        leaving.cancel()


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

    def chunk(choices: list[Any], has_usage: bool = options.continuous_usage_stats) -> str:
        return event(writer.envelope(choices, reply.usage if has_usage else None, is_chunk=True))

    if writer.kind == "chat":
        yield "".join(chunk([writer.opening(i)]) for i in range(reply.total))
    try:
        while reply.unfinished:
            deltas = join_chunks(await reply.news(HEARTBEAT_SECONDS))
            chunks = [chunk([writer.chunk(delta)]) for delta in deltas]
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


def join_chunks(deltas: Sequence[Delta]) -> list[Delta]:
    """Merge consecutive deltas of the same completion and kind."""
    found: list[Delta] = []
    for delta in sorted(deltas, key=lambda d: d.index):  # stable: keeps each completion's order
        last = found[-1] if found else None
        if last and last.index == delta.index and (last.kind == delta.kind or not delta.text):
            text, tokens = last.text + delta.text, [*last.tokens, *delta.tokens]
            found[-1] = Delta(last.index, last.kind, text, tokens, delta.finish)
        else:
            found.append(delta)
    return found
