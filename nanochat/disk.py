"""
Sharing a disk: locks between processes, and whether there is room.

Locks are the operating system's, so the one held by a process that died is free again.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from nanochat.common import free_bytes

SPARE_BYTES = 256 << 20  # what a download or a packed shard must leave free


@contextmanager
def locked(path: Path, what: str) -> Iterator[None]:
    """Hold a lock file; when another process has it, say `what` is waited for."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path)
    try:
        lock.acquire(timeout=2)
    except Timeout:
        print(f"waiting for another process: {what}", flush=True)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


@contextmanager
def claimed(path: Path) -> Iterator[bool]:
    """True while holding a lock file; False, at once, when another process has it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path)
    try:
        lock.acquire(blocking=False)
    except Timeout:
        yield False
        return
    try:
        yield True
    finally:
        lock.release()


def require_free(folder: Path, needed_bytes: float, what: str) -> None:
    """Raise OSError naming both numbers unless `needed_bytes` and a reserve are free."""
    free = free_bytes(folder)
    if needed_bytes + SPARE_BYTES > free:
        raise OSError(
            f"{what} needs about {needed_bytes / 1e9:.2f} GB and a reserve of "
            f"{SPARE_BYTES / 1e9:.2f} GB, but {folder} has {free / 1e9:.2f} GB free; "
            "make room, set NANOCHAT_BASE_DIR to a larger disk, or lower --num_shards"
        )
