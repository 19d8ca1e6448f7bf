"""
Preference pairs: a chosen and a rejected answer to the same prompt, from a file or the Hub.

    {"prompt": "...", "chosen": "...", "rejected": "..."}       one pair per line
    {"chosen": [{"role": "user", ...}, ...], "rejected": [...]}    lists of messages

A prompt is a string or a list of messages. An answer is a string, or a list of messages that may
include the prompt. Of a file, the pairs of about one prompt in 20 are held out for validation.
"""

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from nanochat.common import fingerprint, sha256_file
from tasks.base import Conversation, Task, assistant, find_error, user
from tasks.hub import TaskData, load_split
from tasks.jsonl import read_file, select_split

STEMS = {"train": "data/train_prefs-*", "val": "data/test_prefs-*"}  # as UltraFeedback Binarized
COLUMNS = ("prompt", "chosen", "rejected")


class Preference(NamedTuple):
    """Two conversations that differ in their last message."""

    chosen: Conversation
    rejected: Conversation


class Preferences(Task):
    """
    Preference pairs of a JSON Lines file or of <owner>/<name> on the Hub; the conversations are
    those with the chosen answer. Raises ValueError naming an invalid line of a file; invalid rows
    from the Hub are counted and skipped.
    """

    name = "Preferences"
    kind = "talk"
    splits = ("train", "val")

    def __init__(self, split: str, source: str):
        super().__init__(split)
        self.source, self.path = source, Path(source).expanduser()
        self.is_file = self.path.suffix == ".jsonl" or self.path.is_file()
        self.num_skipped = 0

    @cached_property
    def pairs(self) -> list[Preference]:
        """
        Pairs of the split, in the order of their source. Raises ValueError for a file with fewer
        than two prompts.
        """
        if not self.is_file:
            return list(self.read_hub())
        every = read_file(self.path, parse_pair, "pairs")
        prints = [fingerprint(pair.chosen[:-1]) for pair in every]
        return select_split(every, prints, self.split, str(self.path), "prompt")

    def read_hub(self) -> Iterator[Preference]:
        """Yield the valid pairs of the split and count the others."""
        for row in self.data.rows:
            try:
                yield parse_pair(row)
            except ValueError:
                self.num_skipped += 1

    @cached_property
    def data(self) -> TaskData:
        return load_split(self.source, STEMS[self.split], COLUMNS)

    @property
    def origin(self) -> dict[str, Any]:
        if self.is_file:
            return {"sha256": sha256_file(self.path)}
        return {"dataset": self.source, "commit": self.data.commit, "sha256": self.data.sha256}

    def __len__(self) -> int:
        return len(self.pairs)

    def conversation(self, i: int) -> Conversation:
        return self.pairs[i].chosen


def parse_pair(row: Any, where: str = "") -> Preference:
    """Parse a line or row. Raises ValueError prefixed with `where` if it is not a valid pair."""
    if not isinstance(row, dict) or not {"chosen", "rejected"} <= row.keys():
        raise ValueError(f'{where}expected {{"prompt": ..., "chosen": ..., "rejected": ...}}')
    pair = Preference(*(complete(row.get("prompt"), row[name]) for name in Preference._fields))
    for name, messages in pair._asdict().items():
        if problem := find_error(messages):
            raise ValueError(f"{where}{name}: {problem}")
    if pair.chosen[:-1] != pair.rejected[:-1]:
        raise ValueError(f"{where}chosen and rejected have different prompts")
    if pair.chosen == pair.rejected:
        raise ValueError(f"{where}chosen and rejected are equal")
    return pair


def complete(prompt: Any, answer: Any) -> Any:
    """The conversation of an answer: a string or one message needs the prompt before it."""
    prompt = [user(prompt)] if isinstance(prompt, str) else prompt
    answer = [assistant(answer)] if isinstance(answer, str) else answer
    is_alone = isinstance(answer, list) and len(answer) == 1
    return [*prompt, *answer] if is_alone and isinstance(prompt, list) else answer
