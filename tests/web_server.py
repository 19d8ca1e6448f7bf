"""Runs a chat server with a tiny model in a thread, on a free loopback port."""

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import httpx
import pytest
import torch

from nanochat import engine as generation
from nanochat.checkpoint import build_model, find_checkpoint, save_checkpoint, stage_folder
from nanochat.dist import DistContext
from nanochat.engine import Engine, Sampling
from nanochat.sandbox import Tools
from nanochat.serve.models import LoadedModel, ModelLibrary
from nanochat.serve.security import SecurityConfig
from nanochat.serve.server import Server, ServerConfig, listen, server_url
from nanochat.tokenizer import SPECIAL_TOKENS, Tokenizer
from tests.conftest import TINY, lively

CPU = DistContext(0, 0, 1, torch.device("cpu"), torch.float32)
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "Hello"}]
PRODUCT = ["<|python_start|>", "6*7", "<|python_end|>", "<|output_start|>", "42", "<|output_end|>"]
HELLO_PROMPT = ["<|bos|>", "<|user_start|>", "Hello", "<|user_end|>", "<|assistant_start|>"]


@dataclass
class Choice:
    """One choice of an answer: its text and finish reason."""

    text: str = ""
    finish: str | None = None


@dataclass
class Site:
    """A running server. `client`: httpx client with the server's base URL."""

    url: str
    server: Server
    client: httpx.Client

    @property
    def engine(self) -> Engine:
        """The engine of the default model."""
        library = self.server.library
        return library.loaded[library.default].engine

    def ids(self, *pieces: str | bytes) -> list[int]:
        """Token ids of texts, special tokens and single bytes."""
        tokenizer, found = self.engine.tokenizer, []
        for piece in pieces:
            if piece in SPECIAL_TOKENS:
                found.append(tokenizer.special(piece))
            else:
                found += piece if isinstance(piece, bytes) else tokenizer.encode(piece)
        return found

    def ask(self, messages: Any = HELLO, **body: Any) -> httpx.Response:
        """Post to completions if there is a prompt, else to chat completions."""
        path, asked = (TEXT, body) if "prompt" in body else (CHAT, {"messages": messages, **body})
        data = json.dumps(asked, separators=(",", ":"))
        return self.client.post(path, content=data, headers={"Content-Type": "application/json"})

    def events(self, **body: Any) -> list[Any]:
        """Events of a streamed answer, without the final [DONE]."""
        answered = self.ask(stream=True, **body)
        assert answered.status_code == 200, answered.text
        *found, last = answered.iter_lines()
        assert last == "" and found.pop() == "data: [DONE]"
        return [json.loads(line[6:]) for line in found if line.startswith("data: ")]

    def answers(self, stream: bool = False, **body: Any) -> list[Choice]:
        """The choices of an answer, joined if it is streamed."""
        events = self.events(**body) if stream else [self.ask(**body).json()]
        found: dict[int, Choice] = {}
        for choice in sum((event["choices"] for event in events), []):
            one = found.setdefault(choice["index"], Choice())
            said = choice.get("delta", choice.get("message", choice))
            one.text += said.get("content", said.get("text", ""))
            one.finish = choice["finish_reason"] or one.finish
        return [found[index] for index in sorted(found)]

    def content(self, **body: Any) -> str:
        """The text of the first choice."""
        return self.answers(**body)[0].text

    def load(self) -> tuple[int, int]:
        """Numbers of running and of waiting completions."""
        health = self.client.get("/health").json()
        return health["running"], health["waiting"]

    def wait_until_idle(self) -> None:
        until(lambda: self.load() == (0, 0))

    def raw(self, sent: bytes = b"") -> socket.socket:
        """A raw socket connected to the server, on which `sent` was sent."""
        host, port = self.url.removeprefix("http://").split(":")
        connection = socket.create_connection((host, int(port)), timeout=60)
        connection.sendall(sent)
        return connection


def until(holds: Callable[[], bool]) -> None:
    """Wait until a condition holds."""
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline  # timed out otherwise
        time.sleep(0.01)


def post(body: dict[str, Any]) -> bytes:
    """A chat request as bytes."""
    data = json.dumps(body)
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(data)}\r\n\r\n{data}".encode()


def write_model(
    name: str = "sft:tiny", context: int = 256, *, step: int = 1, seed: int = 3, **changes: Any
) -> None:
    """Save a tiny untrained byte-level model as a checkpoint."""
    tokenizer = Tokenizer.train(["a b"], 265)
    cfg = replace(TINY, vocab_size=tokenizer.vocab_size, max_seq_len=context, **changes)
    model = lively(build_model(cfg, CPU.device, CPU.dtype, seed=seed))
    stage, tag = name.split(":")
    state = {"source": {"dataset": "embedded"}}
    save_checkpoint(stage_folder(stage) / tag, step, model, None, tokenizer, state)


@contextmanager
def serving(
    name: str = "sft:tiny",
    security: SecurityConfig | None = None,
    endless: bool = True,
    port: int = 0,
    **settings: Any,
) -> Iterator[Site]:
    """Serve a saved checkpoint; `endless`: completions end only at max_tokens."""
    cfg = ServerConfig(port=port, security=security or SecurityConfig(), **settings)
    library = ModelLibrary(CPU, name, Tools(), cfg.slots or 8, cfg.max_models)
    checkpoint = find_checkpoint(name)
    library.loaded[name] = LoadedModel(library.load(checkpoint), checkpoint.state)
    if endless:
        library.loaded[name].engine.ends = set()
    server = Server(library, Sampling(1000, temperature=1.0), cfg)
    bound = listen(cfg)
    thread = threading.Thread(target=server.run, args=([bound],), daemon=True)
    thread.start()
    until(lambda: server.started or not thread.is_alive())
    url = server_url(bound)
    with httpx.Client(base_url=url, timeout=60) as client:
        yield Site(url, server, client)
    server.should_exit = True
    thread.join(60)
    assert not thread.is_alive()  # it stopped


def says(patch: pytest.MonkeyPatch, site: Site, *pieces: str | bytes) -> None:
    """
    Make the default model generate these texts, special tokens and single bytes, then end its turn.
    Tool results, which the server injects, are part of the script.
    """
    engine, script, plain = site.engine, site.ids(*pieces, "<|assistant_end|>"), generation.sample
    turns = {engine.tokenizer.special(name) for name in generation.TURN_TOKENS}

    def sample(logits: Any, *settings: Any) -> list[int]:
        if len(engine.active) != len(logits):  # a step of another model
            return plain(logits, *settings)
        return [script[min(len(row.ids), len(script) - 1)] for row in engine.active]

    patch.setattr(engine, "ends", turns)
    patch.setattr("nanochat.engine.sample", sample)


def slow_down(patch: pytest.MonkeyPatch, seconds: float) -> list[int]:
    """Delay every token; returns a list that collects the number of tokens of each step."""
    plain, taken = generation.sample, []

    def sample(logits: Any, *settings: Any) -> list[int]:
        time.sleep(seconds)
        taken.append(len(logits))
        return plain(logits, *settings)

    patch.setattr("nanochat.engine.sample", sample)
    return taken
