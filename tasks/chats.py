"""
Conversations from a file, or from a dataset repository on the Hub, whatever its columns are called.

    jsonl:mine.jsonl -> rows -> conversations (layouts.py)
    hub:owner/name{prompt: inquiry, answer: reply} -> rows -> valid rows -> conversations
    identity.txt: a block per topic, with question variants and answers -> Identity

SmolTalk, OpenThoughts3 and others are such repositories with known columns. Rows that are not valid
conversations are skipped and counted; in a file, they are errors. Without a file for validation,
the conversations of about one prompt in 20, and of at least one, are held out.
"""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

from nanochat.common import fingerprint, is_main_process, printable
from tasks.base import Conversation, Tags, Task, assistant, user
from tasks.hub import HubTask, NotSelected
from tasks.layouts import read_conversation, unread_fields
from tasks.world.facts import blocks

HOLD_OUT_EVERY = 20  # hold out one prompt in 20
KEYS = {"messages", "prompt", "answer", "where", "train", "val", "revision"}
OF_HUB = {"train", "val", "revision"}  # keys that say nothing about a file
FILES = (".jsonl", ".ndjson", ".json", ".jsonl.gz")


class Chats(HubTask):
    """
    `source`: a file of JSON Lines or with a JSON array, or <owner>/<name>; then, in braces, what
    the fields and files are called, if they have no usual name (`layouts.read_conversation`).

    messages: field of messages; or prompt and answer. where: field=value selects rows. train, val:
    file stems in the format of `tasks.hub.match_files`; default: train, and no file for val.
    revision: branch, tag or commit. What the source of a class says of these holds for its own
    repository only.

    If "train" and "val" share a file, about one prompt in 20, and at least one, is held out, chosen
    by a hash. Raises ValueError naming an invalid line of a file.
    """

    name, kind = "Hub", "talk"
    splits = {"train": "train", "val": "train"}
    is_file = False
    """Whether every source is a file."""
    names: Mapping[str, str] = {}
    """What the source calls its columns and files."""
    default = ""
    """Source that a subclass knows."""

    def __init__(self, split: str, source: str | None = None):
        super().__init__(split)
        self.unread: set[str] = set()
        self.repo, names = parse_source(source or self.default)
        path = Path(self.repo).expanduser()
        if source and (self.is_file or path.name.lower().endswith(FILES) or path.is_file()):
            if wrong := sorted(names.keys() & OF_HUB):
                raise ValueError(f"{source}: {', '.join(wrong)} is for repositories; remove it")
            self.path, self.names = path, names
            return
        own, known = parse_source(self.default or self.repo)
        if self.repo == own and not names.keys() & {"messages", "prompt"}:
            names = known | names
        train = names.get("train", "train")
        self.splits = {"train": train, "val": names.get("val", train)}
        self.names, self.revision = names, names.get("revision")

    def parse(self, row: Any) -> Any:
        column, _, value = self.names.get("where", "").partition("=")
        if column and str(row[column]) != value:
            raise NotSelected(f"{column} is {str(row[column])[:40]}")
        self.unread |= unread_fields(row, self.names)
        return self.read(row)

    def read(self, row: Any) -> Any:
        """The item of a row. Raises ValueError if it has none."""
        return read_conversation(row, self.names)

    def select(self, items: list[Any]) -> list[Any]:
        if self.unread and self.path and self.split == "train" and is_main_process():
            listed = ", ".join(sorted(self.unread)[:10])
            print(printable(f"{self.path}: fields that are not read: {listed}"), flush=True)
        if self.splits["val"] != self.splits["train"]:
            return items
        names = [fingerprint(self.messages(item)[:-1]) for item in items]  # of all but the answer
        different = sorted(set(names))
        if len(different) < 2:
            raise ValueError(
                f"{self.path or self.repo} has one prompt; at least two are needed, because one is "
                "held out for validation"
            )
        last = different[max(1, len(different) // HOLD_OUT_EVERY) - 1]  # least hashes are held out
        pairs = zip(items, names, strict=True)
        return [item for item, name in pairs if (name <= last) == (self.split == "val")]

    def messages(self, item: Any) -> Conversation:
        """The conversation of an item."""
        return item

    def __getitem__(self, i: int) -> Conversation:
        return self.messages(self.items[i])


class JSONL(Chats):
    """Conversations of your own, in a file of any name."""

    name, is_file = "JSONL", True


class SmolTalk(Chats):
    """General conversations. Source: Ben Allal et al., "SmolLM2", arXiv:2502.02737."""

    name = "SmolTalk"
    tags = Tags("chat", "en", "synthetic", "Apache-2.0", "smoltalk", teacher="several")
    default = "HuggingFaceTB/smol-smoltalk{val: test}"


class OpenThoughts3(Chats):
    """
    Reasoning traces of math, code and science: the first 10 of 120 files, 100,000 conversations.

    Source: Guha et al., "OpenThoughts: Data Recipes for Reasoning Models", arXiv:2506.04178.
    """

    name = "OpenThoughts3"
    tags = Tags("reasoning", "en", "mixed", "Apache-2.0", "openthoughts3", teacher="QwQ-32B")
    default = "open-thoughts/OpenThoughts3-1.2M{train: data/train-0000*}"


class RStarCoder(Chats):
    """
    Programming problems, and reasoning traces whose code passed all tests: the first 10 files.

    Source: Liu et al., "rStar-Coder", arXiv:2505.21297.
    """

    name, answer_format = "rStar-Coder", "code"
    tags = Tags("code", "en", "synthetic", "CC BY 4.0", "rstar-coder", teacher="QwQ-32B")
    default = (
        "microsoft/rStar-Coder{prompt: question, answer: response, train: seed_sft/data-0000*, "
        "where: is_passed=True}"
    )


class YiSang(Chats):
    """
    Korean prompts from the web with reasoning traces: code, exams, science and OpenThoughts. The
    other categories are in KOREAson/YiSang-3.7M. The columns are those that the first author's
    scripts read (guijinSON/ko-reason, prepare_dataset.py); the data were not at hand. The Hub
    converts the first 5 GB of a larger dataset, to default/partial-train.

    Source: Son et al., "Pushing on Multilingual Reasoning Models", arXiv:2510.04230.
    """

    name = "YiSang"
    tags = Tags("reasoning", "ko", "native", "Apache-2.0", "yisang", teacher="Qwen3-32B")
    default = (
        "KOREAson/YiSang-HighQuality{prompt: instruction, answer: response, "
        "train: default/*train/*, revision: refs/convert/parquet}"
    )


def parse_source(source: str) -> tuple[str, dict[str, str]]:
    """Parse "owner/name{key: value, ...}". Raises ValueError for an unknown key."""
    repo, _, listed = source.removesuffix("}").partition("{")
    pairs = [pair.partition(":") for pair in listed.split(",") if listed]
    names = {key.strip(): value.strip() for key, _, value in pairs}
    if not repo or not all(names.values()) or names.keys() - KEYS:
        raise ValueError(
            f"invalid source {source!r}; use jsonl:<path>, or <owner>/<name>{{key: value, ...}} "
            f"with the keys {', '.join(sorted(KEYS))}"
        )
    return repo, names


# ---- Who the model is: its name, its maker and what it cannot do ---------------------------------
#
# Edit identity.txt to give your model another name or character. For a model with its own
# conversations, use jsonl:<file> instead.

IDENTITY_SIZES = {"train": 2_000, "val": 200}
GREETINGS = ("Hello! ", "Hi! ", "Hey, ", "Good morning! ")


@cache
def topics() -> list[list[str]]:
    """
    Lines of each topic: question variants separated by |, then answers. Raises ValueError for a
    topic with fewer than two variants or without answers.
    """
    path = Path(__file__).parent / "identity.txt"
    found = blocks(path.read_text(encoding="utf-8"))
    for lines in found:
        if len(lines) < 2 or " | " not in lines[0]:
            raise ValueError(
                f"{path}: a topic needs two ways to ask, separated by ' | ', and below them an "
                f"answer a line: {lines[:1]}"
            )
    return found


class Identity(Task):
    """One to three questions about the model; sometimes the first one follows a greeting."""

    name, kind = "Identity", "talk"
    tags = Tags("chat", "en", "synthetic", "MIT", "identity")
    splits = ("train", "val")  # the last variant of each question is held out for "val"

    @property
    def origin(self) -> dict[str, Any]:
        return {"topics": fingerprint(topics())}

    def __len__(self) -> int:
        return IDENTITY_SIZES[self.split]

    def __getitem__(self, i: int) -> Conversation:
        rng = Random(f"identity-{self.split}-{i}")
        messages = []
        for questions, *answers in rng.sample(
            topics(), min(len(topics()), rng.choice((1, 1, 2, 3)))
        ):
            *variants, last = questions.split(" | ")
            variants = variants if self.split == "train" else [last]
            greeting = "" if messages or rng.random() < 0.7 else rng.choice(GREETINGS)
            messages += [user(greeting + rng.choice(variants)), assistant(rng.choice(answers))]
        return messages
