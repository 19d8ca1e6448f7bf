"""
Conversations from a dataset repository on the Hub, whatever its columns are called.

    hub:owner/name{prompt: question, answer: response} -> rows -> valid rows -> conversations

SmolTalk, OpenThoughts3 and others are such repositories with known columns. Rows that are not valid
conversations are skipped and counted. Without a file for validation, the rows of about one prompt
in 20 are held out.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from nanochat.common import base_dir, fingerprint
from tasks import hub
from tasks.base import Conversation, assistant, find_error, shuffled, user
from tasks.hub import AS_PARQUET, ROW_ORDER, HubTask, TaskData, TaskRow
from tasks.jsonl import select_split

SOURCE = re.compile(r"([^{}]+?)\s*(?:\{([^{}]*)\})?")
KEYS = ("messages", "prompt", "answer", "where", "train", "val", "revision")
ROLES = {"human": "user", "gpt": "assistant"}  # names in conversations of the form from, value


class HubChats(HubTask):
    """
    `source`: <owner>/<name>, then in braces what the columns and files are called.

    messages: column of messages, {role, content} or {from, value}; or prompt and answer: columns of
    text. where: column=value selects rows. train, val: file stems in the format of
    `tasks.hub.load_split`; default: train, and no file for val. revision: branch, tag or commit.
    """

    name = "Hub"
    kind = "talk"
    splits = ("train", "val")
    stems: Mapping[str, str] = {}
    mapping: Mapping[str, str] = {}

    def __init__(self, split: str, source: str | None = None):
        super().__init__(split)
        if source is None and not self.mapping:
            raise ValueError("hub needs a repository; use hub:<owner>/<name>{messages: <column>}")
        if source is not None:
            self.repo, given = parse_source(source)
            known = {} if given.keys() & {"messages", "prompt"} else self.mapping
            self.mapping = {**known, **given}
        named = self.mapping.keys() & {"messages", "prompt", "answer"}
        if named not in ({"messages"}, {"prompt", "answer"}):
            raise ValueError(
                f"{self.repo}: which columns hold the conversations? use {{messages: <column>}} or "
                "{prompt: <column>, answer: <column>}"
            )
        train = self.mapping.get("train", "train")
        self.stems = {"val": train, **self.stems, "train": train}
        if "val" in self.mapping:
            self.stems |= {name: self.mapping["val"] for name in self.splits if name != "train"}
        self.revision = self.mapping.get("revision")
        self.column, _, self.value = self.mapping.get("where", "").partition("=")
        columns = [self.mapping.get(key) for key in ("messages", "prompt", "answer")]
        self.columns = tuple(dict.fromkeys(filter(None, [*columns, self.column])))

    def selects(self, row: TaskRow) -> bool:
        return not self.column or str(row[self.column]) == self.value

    def find_problem(self, row: TaskRow) -> str | None:
        return find_error(self.parse(row))

    def hint(self) -> str:
        if not self.column:
            return ""
        values = Counter(str(row[self.column]) for row in self.data.rows)
        usual = ", ".join(value for value, _ in values.most_common(20))
        return f" among those with {self.column}={self.value}; the most frequent values are {usual}"

    @cached_property
    def data(self) -> TaskData:
        stem = self.stems[self.split]
        return load_shared(base_dir(), self.repo, stem, self.columns, self.revision)

    @cached_property
    def order(self) -> Sequence[int]:
        rows = self.kept
        if "val" in self.splits and self.stems["val"] == self.stems["train"]:
            every, kept = enumerate(self.data.rows), set(rows)
            prints = [fingerprint(self.parse(row)[:-1]) for n, row in every if n in kept]
            rows = select_split(rows, prints, self.split, self.where, "prompt")
        return [rows[n] for n in shuffled(len(rows), ROW_ORDER)]

    @property
    def origin(self) -> dict[str, Any]:
        own = {} if self.mapping == type(self).mapping else {"mapping": dict(self.mapping)}
        return {**super().origin, "left_out": self.left_out, **own}

    def conversation(self, i: int) -> Conversation:
        return self.parse(self.row(i))

    def parse(self, row: TaskRow) -> Conversation:
        """Conversation of a row, which may be invalid."""
        if "messages" in self.mapping:
            found = row[self.mapping["messages"]]
            return [rename(each) for each in found] if isinstance(found, list) else []
        return [user(row[self.mapping["prompt"]]), assistant(row[self.mapping["answer"]])]


@lru_cache(maxsize=16)
def load_shared(
    folder: Path, repo: str, stem: str, columns: Sequence[str], revision: str | None
) -> TaskData:
    """`load_split`, once for both splits and all buckets of a file. folder: base directory."""
    return hub.load_split(repo, stem, columns, revision)


class OpenThoughts3(HubChats):
    """
    Reasoning traces of math, code and science: the first 10 of 120 files, 100,000 conversations.

    Source: Guha et al., "OpenThoughts: Data Recipes for Reasoning Models", arXiv:2506.04178.
    """

    name = "OpenThoughts3"
    repo = "open-thoughts/OpenThoughts3-1.2M"
    mapping = {"messages": "conversations", "train": "data/train-0000*"}


class RStarCoder(HubChats):
    """
    Programming problems, and reasoning traces whose code passed all tests: the first 10 files.

    Source: Liu et al., "rStar-Coder", arXiv:2505.21297.
    """

    name = "rStar-Coder"
    repo = "microsoft/rStar-Coder"
    mapping = {
        **{"prompt": "question", "answer": "response"},
        **{"train": "seed_sft/data-0000*", "where": "is_passed=True"},
    }


class YiSang(HubChats):
    """
    Korean prompts from the web with reasoning traces: code, exams, science and OpenThoughts. The
    other categories are in KOREAson/YiSang-3.7M. The columns are those that the first author's
    scripts read (guijinSON/ko-reason, prepare_dataset.py); the data were not at hand.

    Source: Son et al., "Pushing on Multilingual Reasoning Models", arXiv:2510.04230.
    """

    name = "YiSang"
    repo = "KOREAson/YiSang-HighQuality"
    mapping = {
        **{"prompt": "instruction", "answer": "response"},
        # the Hub converts the first 5 GB of a larger dataset, to default/partial-train
        **{"train": "default/*train/*", "revision": AS_PARQUET},
    }


def rename(message: Any) -> Any:
    """A message with the keys role and content; what is not a message unchanged."""
    if not isinstance(message, dict):
        return message
    role: Any = message.get("role", message.get("from"))
    known = ROLES.get(role, role) if isinstance(role, str) else role
    return {"role": known, "content": message.get("content", message.get("value"))}


def parse_source(source: str) -> tuple[str, dict[str, str]]:
    """Parse "owner/name{key: value, ...}". Raises ValueError for an unknown key."""
    found = SOURCE.fullmatch(source)
    pairs = [pair.partition(":") for pair in (found and found[2] or "").split(",") if pair.strip()]
    given = {key.strip(): value.strip() for key, _, value in pairs}
    if found is None or not all(given.values()) or given.keys() - set(KEYS):
        raise ValueError(
            f"invalid source {source!r}; use <owner>/<name>{{key: value, ...}} with the keys "
            f"{', '.join(KEYS)}"
        )
    return found[1], given
