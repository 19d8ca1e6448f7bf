"""
Talk to your models in a browser, and serve them by OpenAI's API.

    python -m scripts.chat_web                      # then open the address it prints
    python -m scripts.chat_web -i sft -p 8001       # another stage first, another port

Every stage that has a checkpoint can be picked on the page, or as `model` of the API; the last one
is asked where nothing is picked. Ctrl-C or SIGTERM ends it.

Reads   the checkpoints of all stages (base, mid, sft, rl)
"""

import os
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal

import torch

from nanochat.checkpoint import Checkpoint, find_checkpoint, newest_stage
from nanochat.config import short, start
from nanochat.distributed import DistConfig, init_distributed
from nanochat.engine import Sampling
from nanochat.preflight import choose_fused_engine
from nanochat.sandbox import Tools
from nanochat.serve.handler import RequestHandler
from nanochat.serve.models import ModelLibrary
from nanochat.serve.server import Server, ServerConfig, listen, url_of
from tasks.world.task import WorldFacts, WorldProblems, WorldSpelling


@dataclass(frozen=True)
class ChatWeb:
    source: Literal["base", "mid", "sft", "rl"] | None = short("i", None)
    """Whose checkpoint is asked first. Default: the last stage that has one."""
    model_tag: str | None = short("g", None)
    """Folder of the checkpoint. Default: the one written last."""
    step: int | None = short("s", None)
    """Step of the checkpoint. Default: the last good one."""
    temperature: float = short("t", 0.6)
    """Sampling temperature of requests that give none; 0 is greedy."""
    top_k: int | None = short("k", 50)
    """Sample from the k most likely tokens. Default: all."""
    top_p: float = 1.0
    """Only among the likeliest tokens that together reach this probability."""
    max_tokens: int = short("m", 256)
    """Longest answer the page asks for, in tokens; the API's longest is what the context holds."""
    python: bool = False
    """Run python that the model calls, in the sandbox; without it, it only has a calculator."""
    unsafe_exec: bool = False
    """Run what the model wrote with all your rights where this machine has no sandbox."""
    compile_engine: bool | None = None
    """Fuse the step that writes a token: faster answers, a slower start. Default: on a GPU."""
    server: ServerConfig = field(default_factory=ServerConfig)
    machine: DistConfig = field(default_factory=DistConfig)


def main(cfg: ChatWeb) -> None:
    key, bound = cfg.server.key(), listen(cfg.server)
    machine = init_distributed(cfg.machine, steady=False)
    # Leave a core to the event loop. On 2 cores, served tokens/s with one core left against none:
    # of one user 1.6 times (depth 4) and 1.25 times (depth 10), of 64 users 0.97 and 0.84 times
    # (bf16, 2026-11)
    torch.set_num_threads(max(1, min(torch.get_num_threads(), (os.cpu_count() or 1) - 1)))
    source = cfg.source or newest_stage()
    checkpoint = find_checkpoint(source, cfg.model_tag, cfg.step)
    step = "" if cfg.step is None else f":{cfg.step}"
    name = f"{source}:{checkpoint.folder.parent.name}{step}"

    tools = Tools(cfg.python, cfg.unsafe_exec, threads=4)
    fused = choose_fused_engine(cfg.compile_engine, machine, most_tokens=0)
    library = ModelLibrary(machine, name, tools, cfg.server.slots, cfg.server.max_models, fused)
    engine = library.loaded[name] = library.load(name)
    defaults = Sampling(cfg.max_tokens, cfg.temperature, cfg.top_k, cfg.top_p)
    handler = RequestHandler(library, defaults, cfg.server.max_waiting)
    server = Server(handler, cfg.server, suggestions(checkpoint))

    if key is None and cfg.server.host not in ("127.0.0.1", "::1", "localhost"):
        print("note   whoever reaches this machine can use it; --api_key_file asks for a key")
    about = f"context of {engine.cache.capacity} tokens, {engine.slots} answers at once"
    print(f"model  {name}, step {checkpoint.step}: {about}, {machine.device_name}")
    print(f"page   {url_of(bound)}\nAPI    {url_of(bound)}/v1", flush=True)
    with suppress(KeyboardInterrupt):
        server.run([bound])


def suggestions(checkpoint: Checkpoint) -> list[str]:
    """Held-out questions that a model of the embedded world may answer; none for others."""
    if checkpoint.state.get("source", {}).get("dataset") != "embedded":
        return []
    tasks = (WorldFacts("test"), WorldProblems("test"), WorldSpelling("test"))
    return [task.conversation(3)[0]["content"] for task in tasks]


if __name__ == "__main__":
    start(main, ChatWeb(), __doc__)
