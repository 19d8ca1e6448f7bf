"""
The checkpoints that can be asked: listed from the disk, loaded when first asked for.

    base_dir() -> names, stage:tag -> ModelLibrary.get -> ServedModel with an engine of its own

Only what is listed can be asked for, so no name reaches the file system. When one more is wanted
than may be in memory, the one that was asked least recently, and is idle, makes room.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import torch

from nanochat.checkpoint import FOLDERS, Checkpoint, load_model, referred, stage_folder
from nanochat.distributed import Machine
from nanochat.engine import Engine, Sampling, Tool
from nanochat.gpt import GPT, for_inference
from nanochat.hardware import free_memory_bytes
from nanochat.tokenizer import Tokenizer

MOST_SLOTS = 64
CACHE_SHARE = 0.25  # of the free memory, for the keys and values of one model


class UnknownModel(LookupError):
    """There is no such checkpoint."""


class NoRoom(RuntimeError):
    """As many models as may be are in memory, and all of them are at work."""


@dataclass(frozen=True, eq=False)
class ServedModel:
    """A model in memory. `name` is what requests call it by: stage:tag, or stage:tag:step."""

    name: str
    engine: Engine
    checkpoint: Checkpoint

    @property
    def stage(self) -> str:
        return self.name.partition(":")[0]

    @property
    def context(self) -> int:
        """Tokens of a prompt and its answer together."""
        return self.engine.cache.capacity


class ModelLibrary:
    """
    Models by name; `default` is what is asked when a request names none.

    slots: answers written at once, per model; None: as many as a share of the free memory holds.
    most: so many models in memory at most. compiled: their engines are fused, when they are loaded.
    """

    def __init__(
        self,
        machine: Machine,
        default: str,
        tool: Tool | None = None,
        slots: int | None = None,
        most: int = 4,
        compiled: bool = False,
    ):
        self.machine, self.default, self.tool = machine, default, tool
        self.compiled = compiled
        self.slots, self.most = slots, most
        self.loaded: dict[str, ServedModel] = {}  # the one asked last stands last
        self.loading = asyncio.Lock()

    def listed(self) -> dict[str, int]:
        """
        What can be asked for, and when it was saved (seconds since 1970): the default first, then
        the last stage first, the newest tag first.
        """
        found = {self.default: 0}
        for stage in reversed(FOLDERS):
            marks = stage_folder(stage).glob("*/latest")
            times = {f"{stage}:{mark.parent.name}": int(mark.stat().st_mtime) for mark in marks}
            found |= {name: times[name] for name in sorted(times, key=lambda n: -times[n])}
        return found

    async def get(self, name: str | None, busy: Callable[[Engine], bool]) -> ServedModel:
        """
        The model of that name, the default for None; the first time, this loads it.

        Raises UnknownModel; NoRoom; whatever a damaged checkpoint raises.
        """
        name = name or self.default
        if name not in self.loaded:
            if name not in await asyncio.to_thread(self.listed):
                raise UnknownModel(name)
            async with self.loading:
                if name not in self.loaded:
                    self.make_room(busy)
                    self.loaded[name] = await asyncio.to_thread(self.load, name)
        model = self.loaded.pop(name)
        self.loaded[name] = model
        return model

    def make_room(self, busy: Callable[[Engine], bool]) -> None:
        """Forget an idle model where there are as many as may be."""
        while len(self.loaded) >= self.most:
            idle = [name for name, model in self.loaded.items() if not busy(model.engine)]
            if not idle:
                raise NoRoom(f"{', '.join(self.loaded)} are in memory and at work; try again later")
            del self.loaded[idle[0]]

    def load(self, name: str) -> ServedModel:
        """Read a checkpoint and warm its engine up."""
        checkpoint = referred(name)
        tokenizer = Tokenizer.read(checkpoint.folder / "tokenizer.json")
        model = for_inference(load_model(checkpoint, self.machine))
        slots = self.slots or fitting_slots(model, self.machine.device)
        engine = Engine(model, tokenizer, slots, tool=self.tool, compiled=self.compiled)
        prompt, settings = [tokenizer.bos_id] * 2, Sampling(max_new_tokens=2)
        for num in (1, min(2, slots)):  # one sequence and several are compiled apart
            engine.generate([prompt] * num, settings)
        return ServedModel(name, engine, checkpoint)


def fitting_slots(model: GPT, device: torch.device) -> int:
    """How many answers at once: MOST_SLOTS, or fewer where memory is short, but at least one."""
    free = int(CACHE_SHARE * free_memory_bytes(device))
    return max(1, min(MOST_SLOTS, free // model.new_cache(1).nbytes))
