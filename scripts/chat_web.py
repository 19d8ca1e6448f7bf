"""
Serve models with a chat page and an OpenAI-compatible API.

    python -m scripts.chat_web                      # then open the printed URL
    python -m scripts.chat_web -i sft -p 8001       # another default model and port

Every stage that has a checkpoint can be selected on the page, or with `model` in the API. Ctrl-C or
SIGTERM stops the server.

Reads   the checkpoints of all stages (base, mid, sft, dpo, rl)
"""

import os
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Annotated

import torch

from nanochat.checkpoint import Checkpoint, CheckpointChoice
from nanochat.config import short, start
from nanochat.dist import DistConfig, init_dist
from nanochat.engine import Sampling, choose_engine_compile
from nanochat.sandbox import Tools
from nanochat.serve.models import LoadedModel, ModelLibrary
from nanochat.serve.server import Server, ServerConfig, listen, server_url
from tasks.world.task import WorldFacts, WorldProblems, WorldSpelling


@dataclass(frozen=True)
class ChatWeb(CheckpointChoice):
    temperature: Annotated[float, short("t")] = 0.6
    """Sampling temperature of requests that do not set one; 0 = greedy."""
    top_k: Annotated[int | None, short("k")] = 50
    """Sample from the k most likely tokens; None = all tokens."""
    top_p: float = 1.0
    """Sample from the smallest set of tokens whose probabilities sum to at least this."""
    max_tokens: Annotated[int, short("m")] = 256
    """Maximum number of tokens per answer on the page. API default: in chats, as many as fit the
    context; for texts, 16."""
    python: bool = False
    """Let models run Python in the sandbox; otherwise they have only a calculator."""
    unsafe_exec: bool = False
    """If no sandbox works, run the models' code unsandboxed, with your permissions."""
    server: ServerConfig = field(default_factory=ServerConfig)
    dist: DistConfig = field(default_factory=DistConfig)

    def __post_init__(self) -> None:
        if self.temperature > 2:
            raise ValueError(f"temperature must be at most 2, got {self.temperature}")


def main(cfg: ChatWeb) -> None:
    defaults = Sampling(cfg.max_tokens, cfg.temperature, cfg.top_k, cfg.top_p)
    key, bound = cfg.server.key, listen(cfg.server)
    dist = init_dist(cfg.dist, steady=False)
    # Leave one core to the event loop. Throughput on a 2-core machine, relative to using both cores
    # (bf16, measured 2026-11): 1 user 1.6x at depth 4, 1.25x at depth 10; 64 users 0.97x and 0.84x
    torch.set_num_threads(max(1, min(torch.get_num_threads(), (os.cpu_count() or 1) - 1)))
    source, checkpoint = cfg.find()
    step = "" if cfg.step is None else f":{cfg.step}"
    name = f"{source}:{checkpoint.folder.parent.name}{step}"

    tools = Tools(cfg.python, cfg.unsafe_exec, threads=4)
    compiled = choose_engine_compile(dist.device)
    library = ModelLibrary(dist, name, tools, cfg.server.slots, cfg.server.max_models, compiled)
    engine = library.load(checkpoint)
    library.loaded[name] = LoadedModel(engine, checkpoint.state)
    server = Server(library, defaults, cfg.server, suggestions(checkpoint))

    if key is None and cfg.server.host not in ("127.0.0.1", "::1", "localhost"):
        who = "anyone who can reach this host can use the models and read the report"
        print(f"note   {who}; consider --api_key_file")
    about = f"context {engine.cache.capacity} tokens, {engine.slots} concurrent completions"
    del engine  # only the library keeps it, and may unload it
    print(f"model  {name}, step {checkpoint.step}: {about}, {dist.device_name}")
    print(f"page   {server_url(bound)}\nAPI    {server_url(bound)}/v1", flush=True)
    with suppress(KeyboardInterrupt):
        server.run([bound])


def suggestions(checkpoint: Checkpoint) -> list[str]:
    """Held-out questions for models trained on the embedded dataset; empty for others."""
    if checkpoint.state.get("source", {}).get("dataset") != "embedded":
        return []
    tasks = (WorldFacts("test"), WorldProblems("test"), WorldSpelling("test"))
    return [task[3][0]["content"] for task in tasks]


if __name__ == "__main__":
    start(main, ChatWeb(), __doc__)
