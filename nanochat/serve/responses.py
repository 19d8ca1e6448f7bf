"""
A reply as HTTP: one JSON object when it is whole, or server-sent events as it comes.

    Reply.news() -> pieces, joined -> Writer -> data: {...}

Whichever way it goes, `done` is called when nobody needs the reply any more; a client that leaves
ends it at once.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from itertools import groupby
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from nanochat.chat_format import Transcript
from nanochat.engine import TokenLogprob
from nanochat.serve.openai_api import ApiError, ChatRequest, TextRequest, Writer, usage
from nanochat.serve.scheduler import Closing, Failed, Piece, Reply, Said

HEARTBEAT_SECONDS = 15.0  # a stream without news says so, or what stands between would close it
CLIENT_LEFT = 499  # a status nobody sees


async def respond(
    reply: Reply,
    writer: Writer,
    asked: ChatRequest | TextRequest,
    request: Request,
    done: Callable[[Reply], None],
) -> Response:
    """The response to a request that was handed to the engines."""
    if asked.stream:
        return EventStream(events(reply, writer, asked), lambda: done(reply))
    try:
        pieces = await all_pieces(reply, request)
    except (Failed, Closing) as error:
        raise failure(error) from error
    finally:
        done(reply)
    if pieces is None:
        return Response(status_code=CLIENT_LEFT)
    choices = [
        whole(reply, index, [p for p in pieces if p.index == index], writer, asked)
        for index in range(reply.total)
    ]
    return JSONResponse(writer.envelope(choices, spent(reply, asked)))


def failure(error: Failed | Closing) -> ApiError:
    """How a reply that broke off is told."""
    if isinstance(error, Closing):
        return ApiError(503, str(error), "shutting_down")
    return ApiError(500, str(error), "generation_failed")


def spent(reply: Reply, asked: ChatRequest | TextRequest) -> dict[str, int]:
    """What was read and written so far."""
    return usage(reply.prompt_tokens, 0 if asked.max_tokens == 0 else reply.completion_tokens)


# ---- whole -------------------------------------------------------------------------------------


async def all_pieces(reply: Reply, request: Request) -> list[Piece] | None:
    """Everything, when it is there; None where the client left before."""

    async def read() -> list[Piece]:
        pieces = []
        while reply.unfinished:
            pieces += await reply.news()
        return pieces

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


def whole(
    reply: Reply,
    index: int,
    pieces: Sequence[Piece],
    writer: Writer,
    asked: ChatRequest | TextRequest,
) -> dict[str, Any]:
    """One answer as a choice."""
    parts = [
        {"type": kind, "text": "".join(p.text for p in group)}
        for kind, group in groupby((p for p in pieces if p.text), key=lambda p: p.kind)
    ]
    said = [one for piece in pieces for one in piece.said]
    if isinstance(asked, TextRequest) and asked.max_tokens == 0:
        parts, said = [], []
    if isinstance(asked, TextRequest) and asked.echo:
        text, read = echoed(reply, index, writer)
        parts = [{"type": "text", "text": text}, *parts]
        said = [*read, *(Said(one.logprob, one.start + len(text)) for one in said)]
    wanted = reply.answers[index].ask.settings.logprobs is not None
    logprobs = writer.logprobs(said) if wanted else None
    return writer.whole(index, parts, pieces[-1].finish, logprobs)


def echoed(reply: Reply, index: int, writer: Writer) -> tuple[str, list[Said]]:
    """The prompt of an answer as it was given, as text, and how likely its tokens were."""
    answer = reply.answers[index]
    ask, noted = answer.ask, answer.completion.prompt_logprobs
    transcript, text, said = Transcript(writer.tokenizer), "", []
    for i, token in list(enumerate(ask.prompt))[ask.hidden :]:
        if ask.settings.prompt_logprobs:
            said.append(Said(noted[i - 1] if i else TokenLogprob(token, None, []), len(text)))
        if token == writer.tokenizer.bos_id and i == 0:
            continue
        text += "".join(shown for _, shown in transcript.add(token))
    return text + "".join(shown for _, shown in transcript.close()), said


# ---- as it comes -------------------------------------------------------------------------------


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


async def events(
    reply: Reply, writer: Writer, asked: ChatRequest | TextRequest
) -> AsyncIterator[str]:
    """The chunks of a reply, then what it cost where that was asked for, and the end."""
    options = asked.stream_options
    often = options is not None and options.continuous_usage_stats

    def chunk(choices: list[Any], tell: bool = often) -> str:
        cost = spent(reply, asked) if tell else None
        return event(writer.envelope(choices, cost, chunk=True))

    if isinstance(asked, ChatRequest):
        yield "".join(chunk([writer.opening(i)]) for i in range(reply.total))
    begun: set[int] = set()
    try:
        while reply.unfinished:
            pieces = await reply.news(HEARTBEAT_SECONDS)
            if not pieces:
                yield ": nothing new yet\n\n"
            chunks = []
            for piece in joined(pieces):
                if isinstance(asked, TextRequest):
                    piece = with_echo(piece, reply, writer, asked, begun)
                wanted = reply.answers[piece.index].ask.settings.logprobs is not None
                logprobs = writer.logprobs(piece.said) if wanted and piece.said else None
                chunks.append(chunk([writer.chunk(piece, logprobs)]))
            if chunks:
                yield "".join(chunks)
        if options is not None and options.include_usage:
            yield chunk([], tell=True)
    except (Failed, Closing) as error:
        yield event(failure(error).body)
    yield "data: [DONE]\n\n"


def event(data: Any) -> str:
    """A server-sent event."""
    return f"data: {json.dumps(data, ensure_ascii=False, separators=(',', ':'))}\n\n"


def joined(pieces: Sequence[Piece]) -> list[Piece]:
    """Pieces of one answer and kind that came together, as one."""
    found: list[Piece] = []
    for piece in sorted(pieces, key=lambda p: p.index):  # keeps the order within an answer
        last = found[-1] if found else None
        same_kind = last and (last.kind == piece.kind or not piece.text)
        if last and last.index == piece.index and same_kind:
            text, said = last.text + piece.text, [*last.said, *piece.said]
            found[-1] = Piece(last.index, last.kind, text, said, piece.finish)
        else:
            found.append(piece)
    return found


def with_echo(
    piece: Piece, reply: Reply, writer: Writer, asked: TextRequest, begun: set[int]
) -> Piece:
    """A piece behind the prompt, where that is to be told, or nothing but the prompt."""
    if asked.max_tokens == 0:
        piece = piece._replace(text="", said=())
    if not asked.echo:
        return piece
    text, read = echoed(reply, piece.index, writer)
    said = [Said(one.logprob, one.start + len(text)) for one in piece.said]
    if piece.index in begun:
        return piece._replace(said=said)
    begun.add(piece.index)
    return piece._replace(text=text + piece.text, said=[*read, *said])
