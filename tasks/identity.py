"""
Who the model is: conversations about its name, its maker and what it cannot do.

    identity.txt: a block per topic, with question variants and answers -> Identity

Edit identity.txt to give your model another name or character. For a model with its own
conversations, use jsonl:<file> instead.
"""

from functools import cache
from pathlib import Path
from random import Random
from typing import Any

from nanochat.common import fingerprint
from tasks.base import Conversation, Tags, Task, assistant, user
from tasks.world.facts import blocks

SIZES = {"train": 2_000, "val": 200}
GREETINGS = ("Hello! ", "Hi! ", "Hey, ", "Good morning! ")


@cache
def topics() -> list[list[str]]:
    """Lines of each topic: question variants separated by |, then answers."""
    return blocks((Path(__file__).parent / "identity.txt").read_text(encoding="utf-8"))


class Identity(Task):
    """One to three questions about the model; sometimes the first one follows a greeting."""

    name, kind = "Identity", "talk"
    tags = Tags("chat", "en", "synthetic", "MIT", "free", "identity")
    splits = ("train", "val")  # the last variant of each question is held out for "val"

    @property
    def origin(self) -> dict[str, Any]:
        return {"topics": fingerprint(topics())}

    def __len__(self) -> int:
        return SIZES[self.split]

    def conversation(self, i: int) -> Conversation:
        rng = Random(f"identity-{self.split}-{i}")
        messages = []
        for questions, *answers in rng.sample(topics(), rng.choice((1, 1, 2, 3))):
            *variants, last = questions.split(" | ")
            variants = variants if self.split == "train" else [last]
            greeting = "" if messages or rng.random() < 0.7 else rng.choice(GREETINGS)
            messages += [user(greeting + rng.choice(variants)), assistant(rng.choice(answers))]
        return messages
