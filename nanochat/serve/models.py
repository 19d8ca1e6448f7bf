"""
Models that clients can request: discovered on disk, loaded on first use.

    base_dir() -> names (stage:tag) -> ModelLibrary.get -> one Engine per model

Only listed models can be requested, so a name from a request never becomes a path. At the maximum
number of loaded models, the least recently used idle one is unloaded.
"""

import asyncio
import gc
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from nanochat.checkpoint import (
    FOLDERS,
    Checkpoint,
    find_checkpoint,
    load_inference,
    model_class,
    saved_state,
    saved_tags,
    stage_folder,
)
from nanochat.common import UsageError, printable
from nanochat.dist import DistContext, memory_bytes
from nanochat.engine import Engine, Sampling, Tool, most_slots
from nanochat.serve.openai_api import ApiError


class LoadedModel(NamedTuple):
    engine: Engine
    state: dict[str, Any]
    """State of its checkpoint, or of a newer one that failed to load."""


@dataclass(eq=False)
class ModelLibrary:
    """Models by name: stage:tag for the newest step of a tag, or stage:tag:step."""

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
    loaded: dict[str, LoadedModel] = field(default_factory=dict, init=False)
    """Least recently used first."""
    loading: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)

    def available(self) -> dict[str, dict[str, Any]]:
        """
        State of each model by name: the default, then the latest stage first, its newest tag first.
        Without models that `checkpoint.load_model` cannot load.
        """
        names = [f"{stage}:{tag}" for stage in reversed(FOLDERS) for tag in saved_tags(stage)]
        states = {name: state_of(name) for name in (self.default, *names)}
        for name, (_, state) in self.loaded.copy().items():
            states[name] = states.get(name) or state  # its checkpoint may be gone
        return {name: state for name, state in states.items() if is_loadable(state)}

    async def get(self, name: str, is_busy: Callable[[Engine], bool]) -> Engine:
        """
        Return a model's engine, loading the model on first use, and again when it is idle and was
        saved again. If that fails, the loaded one stays. A loaded model does not wait for another.

        Raises ApiError for an unknown name, for a checkpoint that fails to load, and if all loaded
        models are busy.
        """
        if self.loading.locked() and name in self.loaded:
            return self.loaded[name].engine
        async with self.loading:
            if name not in self.loaded:
                known = await asyncio.to_thread(self.available)
                if name not in known:
                    message = f"model {name!r} not found; available: {', '.join(known)}"
                    raise ApiError(404, message, "model_not_found", "model")
                self.make_room(is_busy)
            current, state = self.loaded.get(name), await asyncio.to_thread(state_of, name)
            is_new = state and current and state != current.state and not is_busy(current.engine)
            if is_new or not current:
                print(printable(f"loading {name}"), flush=True)
                try:
                    engine = await asyncio.to_thread(lambda: self.load(find_checkpoint(name)))
                except (ValueError, OSError, RuntimeError) as error:
                    print(printable(f"failed to load {name}: {error}"), flush=True)
                    if not current:
                        message = f"failed to load {name}; see the server log"
                        raise ApiError(503, message, "model_unavailable") from error
                    engine = current.engine
                # after a failure, too: it is not tried again before the next save
                self.loaded[name] = LoadedModel(engine, state)
            self.loaded[name] = model = self.loaded.pop(name)  # the last one
        return model.engine

    def make_room(self, is_busy: Callable[[Engine], bool]) -> None:
        """Unload idle models until one more fits. Raises ApiError if all of them are busy."""
        while len(self.loaded) >= self.most:
            idle = [name for name, model in self.loaded.items() if not is_busy(model.engine)]
            if not idle:
                message = f"all loaded models are busy ({', '.join(self.loaded)}); try again later"
                raise ApiError(503, message, headers={"Retry-After": "5"})
            del self.loaded[idle[0]]

    def load(self, checkpoint: Checkpoint) -> Engine:
        """Return an engine for a checkpoint's model, warmed up."""
        gc.collect()  # frees unloaded engines: compiled ones are part of reference cycles
        model, tokenizer = load_inference(checkpoint, self.dist)
        slots = self.slots or most_slots(model, memory_bytes(self.dist.device)[0])
        engine = Engine(model, tokenizer, slots, tool=self.tool, compiled=self.compiled)
        for num in (1, min(2, slots)):  # batch size 1 and larger ones compile separately
            engine.generate([[tokenizer.bos_id] * 2] * num, Sampling(max_new_tokens=2))
        return engine


def state_of(name: str) -> dict[str, Any]:
    """State of the checkpoint that a name stands for; empty if there is none or it is damaged."""
    stage, tag, *step = name.split(":")
    return saved_state(stage_folder(stage) / tag, *map(int, step)) or {}


def is_loadable(state: Mapping[str, Any]) -> bool:
    """Whether `checkpoint.load_model` knows the class of a model and its options."""
    with suppress(UsageError):
        return bool(state and model_class(state))
    return False
