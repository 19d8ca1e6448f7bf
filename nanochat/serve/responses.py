"""
A reply as HTTP: one JSON object when it is whole, or server-sent events as it comes.

    Reply.news() -> deltas, joined -> Writer -> data: {...}

`done` is called when nobody needs the reply any more; a client that disconnects ends it at once.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from nanochat.serve.openai_api import (
    ApiError,
    ChatRequest,
    Delta,
    StreamOptions,
    TextRequest,
    Writer,
)
from nanochat.serve.scheduler import Reply

HEARTBEAT_SECONDS = 15.0  # proxies close a stream that is silent for too long
CLIENT_LEFT = 499  # a status nobody sees


async def respond(
    reply: Reply,
    writer: Writer,
    asked: ChatRequest | TextRequest,
    request: Request,
    done: Callable[[], None],
) -> Response:
    """The response to a request whose `reply` is being generated."""
    if asked.stream:
        return EventStream(events(reply, writer, asked.stream_options or StreamOptions()), done)
    try:
        deltas = await all_deltas(reply, request)
    finally:
        done()
    if deltas is None:
        return Response(status_code=CLIENT_LEFT)
    joined = join(deltas)
    choices = [writer.whole([d for d in joined if d.index == i]) for i in range(reply.total)]
    return JSONResponse(writer.envelope(choices, reply.usage))


async def all_deltas(reply: Reply, request: Request) -> list[Delta] | None:
    """All deltas of a reply; None where the client left before its end."""

    async def read() -> list[Delta]:
        deltas = []
        while reply.unfinished:
            deltas += await reply.news()
        return deltas

    async def leave() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    reading, leaving = asyncio.create_task(read()), asyncio.create_task(leave())
    try:
        await asyncio.wait((reading, leaving), return_when=asyncio.FIRST_COMPLETED)
        return reading.result() if reading.done() else None
    finally:
        reading.cancel()
        leaving.cancel()


class EventStream(StreamingResponse):
    """Server-sent events; `done` is called however it ends, even before the first event."""

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
    """The chunks of a reply, then its usage where that was asked for, and the end."""

    def chunk(choices: list[Any], has_usage: bool = options.continuous_usage_stats) -> str:
        return event(writer.envelope(choices, reply.usage if has_usage else None, is_chunk=True))

    if writer.kind == "chat":
        yield "".join(chunk([writer.opening(i)]) for i in range(reply.total))
    try:
        while reply.unfinished:
            deltas = join(await reply.news(HEARTBEAT_SECONDS))
            chunks = [chunk([writer.chunk(delta)]) for delta in deltas]
            yield "".join(chunks) or ": nothing new yet\n\n"
        if options.include_usage:
            yield chunk([], has_usage=True)
    except ApiError as error:
        yield event(error.body)
    yield "data: [DONE]\n\n"


def event(data: Any) -> str:
    """A server-sent event."""
    return f"data: {json.dumps(data, ensure_ascii=False, separators=(',', ':'))}\n\n"


def join(deltas: Sequence[Delta]) -> list[Delta]:
    """Consecutive deltas of one answer and kind as one."""
    found: list[Delta] = []
    for delta in sorted(deltas, key=lambda d: d.index):  # keeps the order within an answer
        last = found[-1] if found else None
        if last and last.index == delta.index and (last.kind == delta.kind or not delta.text):
            text, tokens = last.text + delta.text, [*last.tokens, *delta.tokens]
            found[-1] = Delta(last.index, last.kind, text, tokens, delta.finish)
        else:
            found.append(delta)
    return found
