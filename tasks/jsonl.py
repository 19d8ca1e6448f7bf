"""
Custom conversations: a file with one conversation per line, e.g. about the model's identity.

    [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}, ...]
    {"messages": [...]}

The conversations of about one prompt in 20, and of at least one, are held out for validation.
"""

from pathlib import Path
from typing import Any

from tasks.base import Conversation, find_error
from tasks.hub_chats import Chats


class JSONL(Chats):
    """Conversations of the file `source`. Raises ValueError naming an invalid line."""

    name = "JSONL"

    def __init__(self, split: str, source: str | None = None):
        super().__init__(split)
        if source is None:
            raise ValueError("jsonl needs a file of conversations; use jsonl:<path>")
        self.path = Path(source).expanduser()

    def parse(self, row: Any) -> Conversation:
        messages: Any = row.get("messages") if isinstance(row, dict) else row
        if problem := find_error(messages):
            raise ValueError(problem)
        return messages
