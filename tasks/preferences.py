"""
Preference pairs: a chosen and a rejected answer to the same prompt, from a file or the Hub.

    {"prompt": "...", "chosen": "...", "rejected": "..."}       one pair per line
    {"chosen": [{"role": "user", ...}, ...], "rejected": [...]}    lists of messages

A prompt is a string or a list of messages. An answer is a string, or a list of messages that may
include the prompt. Of a file, the pairs of about one prompt in 20 are held out for validation.
"""

from pathlib import Path
from typing import Any, NamedTuple

from tasks.base import Conversation, assistant, check_conversation, user
from tasks.chats import Chats


class Preference(NamedTuple):
    """Two conversations that differ in their last message."""

    chosen: Conversation
    rejected: Conversation


class Preferences(Chats):
    """
    Preference pairs of a JSON Lines file or of <owner>/<name> on the Hub; the conversations are
    those with the chosen answer. Raises ValueError naming an invalid line of a file; invalid rows
    from the Hub are counted and skipped.
    """

    name = "Preferences"

    def __init__(self, split: str, source: str):
        super().__init__(split, source)
        path = Path(source).expanduser()
        if path.suffix == ".jsonl" or path.is_file():
            self.path = path
        else:  # named as in UltraFeedback Binarized
            self.repo = source
            self.splits = {"train": "data/train_prefs-*", "val": "data/test_prefs-*"}

    def parse(self, row: Any) -> Preference:
        answers = row["chosen"], row["rejected"]
        pair = Preference(
            *(check_conversation(complete(row.get("prompt"), answer)) for answer in answers)
        )
        if pair.chosen[:-1] != pair.rejected[:-1] or pair.chosen == pair.rejected:
            raise ValueError("chosen and rejected are equal, or have different prompts")
        return pair

    def messages(self, item: Preference) -> Conversation:
        return item.chosen


def complete(prompt: Any, answer: Any) -> Any:
    """The conversation of an answer: a string or one message needs the prompt before it."""
    if isinstance(answer, str):
        answer = [assistant(answer)]
    if len(answer) > 1:
        return answer
    return [*([user(prompt)] if isinstance(prompt, str) else prompt), *answer]
