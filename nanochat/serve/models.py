"""
Models that clients can request: discovered on disk, loaded on first use.

    base_dir() -> names (stage:tag) -> ModelLibrary.get -> one Engine per model

Only listed models can be requested, so a name from a request never becomes a path. At the maximum
number of loaded models, the least recently used idle one is unloaded.
"""

import asyncio
import gc
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from nanochat.checkpoint import (
    FOLDERS,
    load_inference,
    newest_state,
    parse_checkpoint_ref,
    saved_tags,
    stage_folder,
)
from nanochat.common import printable
from nanochat.dist import DistContext, memory_bytes
from nanochat.engine import Engine, Sampling, Tool, most_slots
from nanochat.serve.openai_api import ApiError


@dataclass(eq=False)
class ModelLibrary:
    """Models by name (stage:tag or stage:tag:step)."""

    dist: DistContext
    default: str
    """Model of requests that name none."""
    tool: Tool | None = None
    slots: int | None = None
    """Concurrent completions per model. Default: as many as fit in CACHE_SHARE of free memory, at
    most MAX_SLOTS."""
    most: int = 4
    """Maximum number of loaded models."""
    compiled: bool = False
    """Compile the engines."""
    loaded: dict[str, Engine] = field(default_factory=dict, init=False)
    """Least recently used first."""
    saved_at: dict[str, Any] = field(default_factory=dict, init=False)
    """State of the checkpoint that each loaded model is from."""
    loading: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)

    def listed(self) -> list[str]:
        """Names of all models: the default, then the latest stage first, its newest tag first."""
        names = [f"{stage}:{tag}" for stage in reversed(FOLDERS) for tag in saved_tags(stage)]
        return list(dict.fromkeys([self.default, *names]))

    async def get(self, name: str, busy: Callable[[Engine], bool]) -> Engine:
        """
        Return a model's engine, loading the model on first use, and again when it is idle and its
        tag was trained further.

        Raises ApiError for an unknown name, for a checkpoint that fails to load, and if all loaded
        models are busy.
        """
        if name not in self.loaded:
            known = await asyncio.to_thread(self.listed)
            if name not in known:
                message = f"model {name!r} not found; available: {', '.join(known)}"
                raise ApiError(404, message, "model_not_found", "model")
        newest = await asyncio.to_thread(saved_at, name)
        loaded = self.loaded.get(name)
        if loaded and self.saved_at[name] != newest and not busy(loaded):
            print(printable(f"{name} was saved again; loading it"), flush=True)
            del self.loaded[name]
        async with self.loading:
            if name not in self.loaded:
                self.make_room(busy)
                try:
                    self.loaded[name] = await asyncio.to_thread(self.load, name)
                except (ValueError, OSError, RuntimeError) as error:
                    print(printable(f"failed to load {name}: {error}"), flush=True)
                    message = f"failed to load {name}; see the server log"
                    raise ApiError(503, message, "model_unavailable") from error
        engine = self.loaded.pop(name)
        self.loaded[name] = engine
        return engine

    def make_room(self, busy: Callable[[Engine], bool]) -> None:
        """Unload idle models until one more fits. Raises ApiError if all of them are busy."""
        while len(self.loaded) >= self.most:
            idle = [name for name, engine in self.loaded.items() if not busy(engine)]
            if not idle:
                message = f"all loaded models are busy ({', '.join(self.loaded)}); try again later"
                raise ApiError(503, message, headers={"Retry-After": "5"})
            del self.loaded[idle[0]]
            gc.collect()  # an engine is part of reference cycles

    def load(self, name: str) -> Engine:
        """Load a checkpoint and warm up its engine. Raises if the checkpoint is damaged."""
        self.saved_at[name] = saved_at(name)
        model, tokenizer = load_inference(parse_checkpoint_ref(name), self.dist)
        slots = self.slots or most_slots(model, memory_bytes(self.dist.device)[0])
        engine = Engine(model, tokenizer, slots, tool=self.tool, compiled=self.compiled)
        for num in (1, min(2, slots)):  # batch size 1 and larger ones compile separately
            engine.generate([[tokenizer.bos_id] * 2] * num, Sampling(max_new_tokens=2))
        return engine


def newest_of(name: str) -> dict[str, Any]:
    """Newest readable state of a model's tag; empty if there is none."""
    stage, tag = name.split(":")[:2]
    return newest_state(stage_folder(stage) / tag) or {}


def saved_at(name: str) -> tuple[Any, Any]:
    """Step and time of the newest readable state of a model's tag."""
    state = newest_of(name)
    return state.get("step"), state.get("saved_at")
