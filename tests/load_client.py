"""
Load test client: concurrent users that send chat requests in a loop.

    python -m tests.load_client URL USERS SECONDS TOKENS -> one line of JSON

Each user, a thread, sends its next request after the answer, for SECONDS and until each has two
answers. Tokens that arrive after that are not counted. Reads streams with http.client; token counts
are the server's `usage`. An error, a full queue too, ends the load test.
"""

import json
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from typing import Any

PATIENCE_SECONDS = 120  # to wait for the second answers


def ask(host: str, text: str, tokens: int) -> Iterator[int]:
    """Number of tokens after each event of an answer."""
    body = {
        "messages": [{"role": "user", "content": text}],
        "max_tokens": tokens,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    connection = HTTPConnection(host, timeout=PATIENCE_SECONDS)
    head = {"Content-Type": "application/json", "Connection": "close"}
    connection.request("POST", "/v1/chat/completions", json.dumps(body), head)
    with connection.getresponse() as response:
        assert response.status == 200, response.read()
        for line in response:
            if line.startswith(b"data: {"):
                yield json.loads(line[6:])["usage"]["completion_tokens"]


def load(host: str, num_users: int, seconds: float, most: int) -> dict[str, Any]:
    """Run all users (see above); return tokens of the users and latency."""
    tokens, answers, first = [0] * num_users, [0] * num_users, []
    started = time.perf_counter()

    def is_going() -> bool:
        late = time.perf_counter() - started - seconds
        return late < 0 or (min(answers) < 2 and late < PATIENCE_SECONDS)

    def run(user: int) -> None:
        while is_going():
            sent, before, now = time.perf_counter(), tokens[user], 0
            for num_tokens in ask(host, f"User {user}, {answers[user]}", most):
                if num_tokens and not now:
                    first.append(time.perf_counter() - sent)
                if not is_going():
                    return
                now, tokens[user] = num_tokens, before + num_tokens
            answers[user] += now > 0

    with ThreadPoolExecutor(num_users) as pool:
        list(pool.map(run, range(num_users)))
    first.sort()
    return {"least": min(tokens), "most": max(tokens), "first_p99": first[len(first) * 99 // 100]}


if __name__ == "__main__":
    print(json.dumps(load(sys.argv[1].removeprefix("http://"), *map(int, sys.argv[2:5]))))
