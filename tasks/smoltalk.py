"""
SmolTalk: general conversations with the columns `messages` and `source`.

Source: Ben Allal et al., "SmolLM2", arXiv:2502.02737.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from tasks.base import Conversation, find_error, shuffled
from tasks.hub import ROW_ORDER, HubTask


class SmolTalk(HubTask):
    """
    `repo`: any repository with a `messages` column, in the format of `tasks.hub.load_split`.

    Invalid rows are skipped and counted in `left_out`.
    """

    name = "SmolTalk"
    kind = "talk"
    splits = ("train", "test")
    stems = {"train": "train", "test": "test"}
    columns = ("messages",)

    def __init__(self, split: str, repo: str = "HuggingFaceTB/smol-smoltalk"):
        super().__init__(split)
        self.repo = repo

    @cached_property
    def order(self) -> Sequence[int]:
        kept = [n for n, row in enumerate(self.data.rows) if find_error(row["messages"]) is None]
        if not kept:
            raise ValueError(f"{self.repo}: no valid conversations in split {self.split}")
        return [kept[n] for n in shuffled(len(kept), ROW_ORDER)]

    @property
    def left_out(self) -> int:
        """Number of skipped rows."""
        return len(self.data.rows) - len(self)

    @property
    def origin(self) -> dict[str, Any]:
        return super().origin | {"left_out": self.left_out}

    def conversation(self, i: int) -> Conversation:
        return [{"role": m["role"], "content": m["content"]} for m in self.row(i)["messages"]]
