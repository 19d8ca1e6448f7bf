"""
How the ranks of a run find each other: a place in the launcher's store for this attempt alone.

    launcher's store -> everybody greets rank 0 -> it names the attempt -> a store without a past

torchrun keeps one store for all attempts of a launch, with the addresses of dead ranks still in
it; who reads one of those waits for a dead process (pytorch#135712; seen with torch 2.15 at the
second restart). To count attempts does not help: a node that comes later counts from zero. So
each rank greets with a word nobody has used before, and believes only an answer that repeats it.
"""

import json
import time
import uuid
from typing import Any, Protocol

POLL_SECONDS = 0.02


class Store(Protocol):
    """What of torch.distributed's stores is used."""

    def set(self, key: str, value: str) -> Any: ...
    def get(self, key: str) -> bytes: ...
    def check(self, keys: list[str]) -> bool: ...


def name_attempt(store: Store, rank: int, world_size: int, timeout_seconds: float) -> str:
    """
    A name for this attempt, new and the same on every rank; returns when all ranks have it.

    Raises TimeoutError naming the ranks that did not come.
    """
    greeting, deadline = uuid.uuid4().hex, time.monotonic() + timeout_seconds
    store.set(f"greeting/{rank}", greeting)
    if rank == 0:
        return receive(store, greeting, world_size, deadline)
    while True:
        answer = json.loads(read(store, "answer") or "{}")
        if greeting in answer.get("greetings", ()):
            store.set(f"{answer['name']}/heard/{rank}", "")
            break
        wait(deadline, "rank 0 did not come")
    while not store.check([f"{answer['name']}/complete"]):
        wait(deadline, "not all ranks came")
    return answer["name"]


def receive(store: Store, name: str, world_size: int, deadline: float) -> str:
    """Rank 0: answer greetings, those of the dead too, until every living rank has heard it."""
    answered: list[str] = []
    while True:
        greetings = [read(store, f"greeting/{rank}") for rank in range(1, world_size)]
        if greetings != answered:
            store.set("answer", json.dumps({"name": name, "greetings": greetings}))
            answered = greetings
        missing = [r for r in range(1, world_size) if not store.check([f"{name}/heard/{r}"])]
        if not missing:
            store.set(f"{name}/complete", "")
            return name
        wait(deadline, f"rank {', '.join(map(str, missing))} of {world_size} did not come")


def read(store: Store, key: str) -> str:
    """What is under a key; nothing where it does not exist."""
    return store.get(key).decode() if store.check([key]) else ""


def wait(deadline: float, complaint: str) -> None:
    """Give the others a moment."""
    if time.monotonic() > deadline:
        raise TimeoutError(f"the ranks did not find each other: {complaint}")
    time.sleep(POLL_SECONDS)
