"""
The models that can be requested: listed from the disk, loaded on first use.

    base_dir() -> names, stage:tag -> ModelLibrary.get -> an engine for each model

Only what is listed can be requested, so no name reaches the file system. When memory is full, the
least recently used model that is idle is unloaded.
"""

import asyncio
from collections.abc import Callable

from nanochat.checkpoint import FOLDERS, load_model, parse_checkpoint_ref, stage_folder
from nanochat.common import printable
from nanochat.distributed import DistContext
from nanochat.engine import Engine, Sampling, Tool
from nanochat.gpt import for_inference
from nanochat.hardware import free_memory_bytes
from nanochat.serve.openai_api import ApiError
from nanochat.tokenizer import Tokenizer

MAX_SLOTS = 64
CACHE_SHARE = 0.25  # of the free memory, for the keys and values of one model


class ModelLibrary:
    """
    Models by name (stage:tag, or stage:tag:step); `default` is for requests that name none.

    slots: answers generated at once, per model; None: as many as a share of free memory holds.
    most: the most models in memory. compiled: whether their engines are compiled when loaded.
    """

    def __init__(
        self,
        machine: DistContext,
        default: str,
        tool: Tool | None = None,
        slots: int | None = None,
        most: int = 4,
        compiled: bool = False,
    ):
        self.machine, self.default, self.tool = machine, default, tool
        self.compiled = compiled
        self.slots, self.most = slots, most
        self.loaded: dict[str, Engine] = {}  # the least recently used first
        self.loading = asyncio.Lock()

    def listed(self) -> dict[str, int]:
        """
        The names of all models, and when they were saved (seconds since 1970): the default first,
        then the last stage first, the newest tag first.
        """
        found = {self.default: 0}
        for stage in reversed(FOLDERS):
            marks = stage_folder(stage).glob("*/latest")
            times = {f"{stage}:{mark.parent.name}": int(mark.stat().st_mtime) for mark in marks}
            found |= {name: times[name] for name in sorted(times, key=lambda n: -times[n])}
        return found

    async def get(self, name: str, busy: Callable[[Engine], bool]) -> Engine:
        """
        The engine of a model, which is loaded when it is first requested.

        Raises ApiError for an unknown name, a checkpoint that cannot be loaded, and where all
        models in memory are busy.
        """
        if name not in self.loaded:
            known = await asyncio.to_thread(self.listed)
            if name not in known:
                message = f"there is no model {name!r}; there are: {', '.join(known)}"
                raise ApiError(404, message, "model_not_found", "model")
            async with self.loading:
                if name not in self.loaded:
                    self.make_room(busy)
                    try:
                        self.loaded[name] = await asyncio.to_thread(self.load, name)
                    except (ValueError, OSError, RuntimeError) as error:
                        print(printable(f"{name} cannot be loaded: {error}"), flush=True)
                        message = f"{name} cannot be loaded; the server's output says why"
                        raise ApiError(503, message, "model_unavailable") from error
        engine = self.loaded.pop(name)
        self.loaded[name] = engine
        return engine

    def make_room(self, busy: Callable[[Engine], bool]) -> None:
        """Unload idle models while memory is full. Raises ApiError where there are none."""
        while len(self.loaded) >= self.most:
            idle = [name for name, engine in self.loaded.items() if not busy(engine)]
            if not idle:
                message = f"{', '.join(self.loaded)} are in memory and busy; try again later"
                raise ApiError(503, message, headers={"Retry-After": "5"})
            del self.loaded[idle[0]]

    def load(self, name: str) -> Engine:
        """Load a checkpoint and warm up its engine. Raises whatever a damaged one raises."""
        checkpoint = parse_checkpoint_ref(name)
        tokenizer = Tokenizer.read(checkpoint.folder / "tokenizer.json")
        model = for_inference(load_model(checkpoint, self.machine))
        free = int(CACHE_SHARE * free_memory_bytes(self.machine.device))
        slots = self.slots or max(1, min(MAX_SLOTS, free // model.new_cache(1).nbytes))
        engine = Engine(model, tokenizer, slots, tool=self.tool, compiled=self.compiled)
        for num in (1, min(2, slots)):  # one sequence and several are compiled separately
            engine.generate([[tokenizer.bos_id] * 2] * num, Sampling(max_new_tokens=2))
        return engine
