"""
Load test client: concurrent users that send chat requests in a loop.

    python -m tests.load_client URL USERS SECONDS TOKENS -> one line of JSON

Each user sends its next request after the answer, or after Retry-After on status 429, for SECONDS
and until each has two answers. Tokens that arrive after that are not counted.
Reads streams from raw sockets; token counts are the server's `usage`.
"""

import asyncio
import json
import sys
import time
from collections.abc import Callable
from typing import Any


class User:
    """One user: token count, time to first token of each answer (seconds), and errors."""

    def __init__(self, number: int, host: str, port: int, tokens: int):
        self.number, self.host, self.port, self.most = number, host, port, tokens
        self.tokens, self.answers, self.refused = 0, 0, 0
        self.first: list[float] = []
        self.errors: list[str] = []

    async def ask_while(self, going: Callable[[], bool]) -> None:
        while going():
            try:
                await self.ask(going)
            except (OSError, ValueError, asyncio.IncompleteReadError) as error:
                self.errors.append(repr(error))
                return

    async def ask(self, going: Callable[[], bool]) -> None:
        """Send one request and count its tokens."""
        body = json.dumps(
            {
                "messages": [{"role": "user", "content": f"User {self.number}, {self.answers}"}],
                "max_tokens": self.most,
                "stream": True,
                "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            }
        )
        reader, writer = await asyncio.open_connection(self.host, self.port)
        head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        started, before, first = time.perf_counter(), self.tokens, None
        writer.write((head + body).encode())
        try:
            status, wait = await self.read_head(reader)
            if status == 429:
                self.refused += 1
                await asyncio.sleep(wait)
                return
            if status != 200:
                raise ValueError(f"status {status}")
            while line := await reader.readline():
                if not line.startswith(b"data: {"):
                    continue
                event: dict[str, Any] = json.loads(line[6:])
                if "error" in event:
                    raise ValueError(event["error"]["message"])
                now, num_tokens = time.perf_counter(), event["usage"]["completion_tokens"]
                if num_tokens and first is None:
                    first = now - started
                    self.first.append(first)
                if not going():
                    return
                self.tokens = before + num_tokens
            self.answers += 1
        finally:
            writer.close()

    async def read_head(self, reader: asyncio.StreamReader) -> tuple[int, float]:
        """Return the status and Retry-After in seconds (default 1)."""
        status = int((await reader.readline()).split()[1])
        wait = 1.0
        while (line := await reader.readline()) != b"\r\n":
            name, _, value = line.decode("latin-1").partition(":")
            if name.lower() == "retry-after":
                wait = float(value)
        return status, wait


async def load(url: str, users: int, seconds: float, tokens: int) -> dict[str, Any]:
    """Run all users (see above); return throughput, latency and errors."""
    host, _, port = url.removeprefix("http://").partition(":")
    all_users = [User(i, host, int(port), tokens) for i in range(users)]
    started = time.perf_counter()

    def going() -> bool:
        behind = min(user.answers for user in all_users) < 2
        return (
            behind
            and not any(user.errors for user in all_users)
            or (time.perf_counter() < started + seconds)
        )

    await asyncio.gather(*(user.ask_while(going) for user in all_users))
    seconds = time.perf_counter() - started
    first = sorted(wait for user in all_users for wait in user.first)
    got = [user.tokens for user in all_users]
    return {
        "users": users,
        "tokens_per_second": sum(got) / seconds,
        "least": min(got),
        "most": max(got),
        "answers": sum(user.answers for user in all_users),
        "refused": sum(user.refused for user in all_users),
        "errors": [error for user in all_users for error in user.errors],
        "first_p50": first[len(first) // 2],
        "first_p99": first[min(len(first) - 1, len(first) * 99 // 100)],
    }


if __name__ == "__main__":
    print(json.dumps(asyncio.run(load(sys.argv[1], *map(int, sys.argv[2:5])))))
