"""
Custom conversations: a file with one conversation per line, e.g. about the model's identity.

    [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}, ...]
    {"messages": [...]}

About one in 20 conversations, and at least one, is held out for validation, chosen by a hash of
its content.
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from nanochat.common import fingerprint, sha256_file
from nanochat.dataset import read_json_lines
from tasks.base import Conversation, Task, find_error

HOLD_OUT_EVERY = 20  # hold out one conversation in 20


class JSONL(Task):
    """Conversations of the file `source`. Raises ValueError naming an invalid line."""

    name = "JSONL"
    kind = "talk"
    splits = ("train", "val")

    def __init__(self, split: str, source: str | None = None):
        super().__init__(split)
        if source is None:
            raise ValueError("jsonl needs a file of conversations; use jsonl:<path>")
        self.path = Path(source).expanduser()

    @cached_property
    def conversations(self) -> list[Conversation]:
        """Conversations of the split, in file order."""
        every = read_file(self.path, parse_line, "conversations")
        prints = [fingerprint(conversation) for conversation in every]
        return select_split(every, prints, self.split, str(self.path))

    @property
    def origin(self) -> dict[str, Any]:
        return {"sha256": sha256_file(self.path)}

    def __len__(self) -> int:
        return len(self.conversations)

    def conversation(self, i: int) -> Conversation:
        return self.conversations[i]


def read_file(path: Path, parse: Callable[[Any, str], Any], what: str) -> list[Any]:
    """
    The lines of a file, parsed: `parse` takes a line and the prefix of its errors.

    Raises FileNotFoundError; ValueError for an invalid line, or for a file without lines (`what`).
    """
    rows = [parse(line, f"{path}, line {n}: ") for n, line in read_json_lines(path)]
    if not rows:
        raise ValueError(f"{path} contains no {what}")
    return rows


def parse_line(line: Any, where: str) -> Conversation:
    """Parse a line into a conversation. Raises ValueError prefixed with `where`."""
    messages: Any = line.get("messages") if isinstance(line, dict) else line
    if problem := find_error(messages):
        raise ValueError(f"{where}{problem}")
    return messages


def select_split(
    rows: Sequence[Any], prints: Sequence[str], split: str, where: str, what: str = "conversation"
) -> list[Any]:
    """
    The rows of "train" or "val", in order. prints: fingerprint of each row.

    About one in 20 different fingerprints, and at least one, is held out for "val", with all of its
    rows. Raises ValueError prefixed with `where` unless there are two different ones; `what` says
    what they identify.
    """
    first, different = min(prints), set(prints)
    if len(different) < 2:
        raise ValueError(
            f"{where} has one {what}; at least two are needed, because one is held out for "
            "validation"
        )
    held_out = {name for name in different if int(name, 16) % HOLD_OUT_EVERY == 0} or {first}
    held_out = held_out - {first} if held_out == different else held_out
    pairs = zip(rows, prints, strict=True)
    return [row for row, name in pairs if (name in held_out) == (split == "val")]
