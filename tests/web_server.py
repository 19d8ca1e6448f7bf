"""Runs a chat server with a tiny model in a thread, on a free loopback port."""

import json
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import httpx
import pytest
import torch

from nanochat.checkpoint import build_model, save_checkpoint, stage_folder
from nanochat.distributed import DistContext
from nanochat.engine import Sampling
from nanochat.engine import sample as plain
from nanochat.gpt import GPTConfig
from nanochat.sandbox import Tools
from nanochat.serve.handler import RequestHandler
from nanochat.serve.models import ModelLibrary
from nanochat.serve.security import SecurityConfig
from nanochat.serve.server import Server, ServerConfig, listen, server_url
from nanochat.tokenizer import Tokenizer
from tests.conftest import TINY, lively

CPU = DistContext(0, 0, 1, torch.device("cpu"), torch.float32)
HELLO = [{"role": "user", "content": "Hello"}]


@dataclass
class Site:
    """A running server. `client`: httpx client with the server's base URL."""

    url: str
    server: Server
    client: httpx.Client

    @property
    def worker(self):
        return self.server.handler.worker

    @property
    def engine(self):
        """The engine of the default model."""
        library = self.server.handler.library
        return library.loaded[library.default]

    @property
    def tokenizer(self) -> Tokenizer:
        return self.engine.tokenizer

    def chat(self, messages: Any = HELLO, **settings: Any) -> httpx.Response:
        return self.client.post("/v1/chat/completions", json={"messages": messages, **settings})

    def content(self, messages: Any = HELLO, **settings: Any) -> str:
        answered = self.chat(messages, **settings)
        assert answered.status_code == 200, answered.text
        return answered.json()["choices"][0]["message"]["content"]

    def stream(self, path: str = "/v1/chat/completions", **body: Any) -> list[Any]:
        """Events of a streamed response, without the final [DONE]."""
        body.setdefault("messages", HELLO)
        if path == "/v1/completions":
            del body["messages"]
        found = []
        with self.client.stream("POST", path, json={"stream": True, **body}) as response:
            assert response.status_code == 200, response.read()
            found = [line[6:] for line in response.iter_lines() if line.startswith("data: ")]
        assert found.pop() == "[DONE]"
        return [json.loads(line) for line in found]

    def is_idle(self) -> bool:
        """Whether no slot is used, the queue is empty and no request state is left."""
        engine, worker = self.engine, self.worker
        return not (
            engine.busy or any(engine.cache.lengths) or worker.owners or worker.load or worker.inbox
        )

    def seconds_until_idle(self, patience: float = 60.0) -> float:
        started = time.perf_counter()
        while not self.is_idle():
            assert time.perf_counter() - started < patience, "the server is still busy"
            time.sleep(0.002)
        return time.perf_counter() - started

    def raw(self) -> socket.socket:
        """A raw socket connected to the server."""
        host, port = self.url.removeprefix("http://").split(":")
        return socket.create_connection((host, int(port)), timeout=60)


def post(path: str, body: Any, *more: str) -> bytes:
    """A POST request as bytes; `more`: extra header lines."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = [f"POST {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json"]
    head += [f"Content-Length: {len(data)}", *more]
    return "\r\n".join(head).encode() + b"\r\n\r\n" + data


def write_model(name: str = "sft:tiny", context: int = 256, **changes: Any) -> None:
    """Save a tiny untrained byte-level model as a checkpoint."""
    tokenizer = Tokenizer.train(["a b"], 265)
    cfg = replace(TINY, vocab_size=tokenizer.vocab_size, max_seq_len=context, **changes)
    write_checkpoint(name, cfg, tokenizer)


def write_checkpoint(name: str, cfg: GPTConfig, tokenizer: Tokenizer) -> None:
    model = lively(build_model(cfg, CPU.device, CPU.dtype, seed=3))
    stage, tag = name.split(":")
    save_checkpoint(stage_folder(stage) / tag, 1, model, None, tokenizer, {"source": {}})


@contextmanager
def serving(
    name: str = "sft:tiny",
    security: SecurityConfig | None = None,
    tools: Tools | None = None,
    endless: bool = True,
    port: int = 0,
    **settings: Any,
) -> Iterator[Site]:
    """Serve a saved checkpoint; `endless`: completions end only at max_tokens."""
    cfg = ServerConfig(port=port, security=security or SecurityConfig(), **settings)
    tool = tools or Tools()
    library = ModelLibrary(CPU, name, tool, cfg.slots or 8, cfg.max_models)
    library.loaded[name] = library.load(name)
    if endless:
        library.loaded[name].ends = set()
    server = Server(RequestHandler(library, Sampling(1000, temperature=1.0), cfg.max_waiting), cfg)
    bound = listen(cfg)
    thread = threading.Thread(target=server.run, args=([bound],), daemon=True)
    thread.start()
    deadline = time.monotonic() + 30
    while not server.started:
        assert thread.is_alive() and time.monotonic() < deadline, "the server did not start"
        time.sleep(0.01)
    url = server_url(bound)
    with httpx.Client(base_url=url, timeout=30) as client:
        yield Site(url, server, client)
    server.should_exit = True
    thread.join(60)
    assert not thread.is_alive(), "the server did not stop"


def product(site: Site) -> list[int]:
    """Token ids of the tool call 6*7 and its result."""
    special, encode = site.tokenizer.special, site.tokenizer.encode
    call = [special("<|python_start|>"), *encode("6*7"), special("<|python_end|>")]
    return [*call, special("<|output_start|>"), *encode("42"), special("<|output_end|>")]


def says(patch: pytest.MonkeyPatch, site: Site, tokens: Sequence[int]) -> None:
    """Make the default model generate these tokens, including injected ones (tool results)."""
    script = list(tokens)

    def sample(logits: Any, settings: Any, uniform: Any) -> list[int]:
        if len(site.engine.active) != len(logits):  # a step of another model
            return plain(logits, settings, uniform)
        return [script[min(len(row.ids), len(script) - 1)] for row in site.engine.active]

    patch.setattr("nanochat.engine.sample", sample)
