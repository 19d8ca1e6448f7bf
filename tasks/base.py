"""
Tasks: indexed conversations with reference answers for training, evaluation and RL.

    Task[i] -> Conversation -> train on it, or prompt a model and `score` its answer
    Subset, Mixture: tasks made of tasks

Also the two answer formats that several tasks share: an option letter, and a number after `####`.
Tasks work on text only, independent of tokenizer and model.
"""

import bisect
import itertools
import random
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from decimal import Decimal
from typing import Any, ClassVar, Literal, NamedTuple

from nanochat.common import fingerprint

Message = dict[str, Any]
Conversation = list[Message]
ContentPart = dict[str, str]
TaskKind = Literal["choice", "generate", "talk"]

LETTERS = tuple("ABCDEFGHIJKLMNOPQRSTUVWXYZ")
BY_LETTER = "Answer with the letter only."
SAMPLE = 8  # conversations hashed into `identity` to detect wording changes
TOOL_USE = re.compile(r"<\|(python|output)_start\|>.*?(<\|\1_end\|>|$)", re.DOTALL)
SPECIAL = re.compile(r"<\|\w+\|>")
CALCULATION = re.compile(r"<<([^<>=]*)=([^<>=]*)>>")
FINAL_NUMBER = re.compile(r"#### *\$?(-?\d[\d,]*(?:\.\d+)?|-?\.\d+)")


ALIASES = {
    "gpqadiamond": "gpqa",
    "haeraebench": "haerae",
    "kobalt700": "kobalt",
    "lcb": "livecodebench",
    "mclm": "mclmko",
    "mtmath100": "mclmko",
}
"""Other names of benchmarks -> name, both as `plain_name` gives them."""


def plain_name(name: str) -> str:
    """A name in lower case without spaces and punctuation; that of the benchmark for an alias."""
    plain = re.sub(r"[\W_]", "", name.lower())
    return ALIASES.get(plain, plain)


def user(words: str) -> Message:
    """A user message."""
    return {"role": "user", "content": words}


def assistant(content: str | list[ContentPart]) -> Message:
    """An assistant message: a string, or parts made by `text` and `tool_call`."""
    return {"role": "assistant", "content": content}


def text(words: str) -> ContentPart:
    """A text part of an assistant message."""
    return {"type": "text", "text": words}


def tool_call(code: str, output: str) -> list[ContentPart]:
    """Two parts: the code passed to the tool and its output."""
    return [{"type": "python", "text": code}, {"type": "python_output", "text": output}]


def with_tool_calls(notation: str) -> list[ContentPart]:
    """Split GSM8K notation into parts; `<<3*4=12>>` becomes a calculator call."""
    kinds = itertools.cycle(("text", "python", "python_output"))
    pieces = zip(kinds, CALCULATION.split(notation), strict=False)
    return [{"type": kind, "text": piece} for kind, piece in pieces if piece]


def find_error(messages: Any) -> str | None:
    """Why `messages` is not a valid training conversation; None if it is valid."""
    if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
        return 'expected a list of messages or {"messages": [...]}'
    roles = [message.get("role") for message in messages]
    turns = roles[1:] if roles[:1] == ["system"] else roles
    if not turns or turns != ["user", "assistant"] * (len(turns) // 2):
        return f"roles must alternate user/assistant and end with assistant; got {roles}"
    for number, message in enumerate(messages, 1):
        content = message.get("content")
        parts = content if isinstance(content, list) and message["role"] == "assistant" else None
        if not (isinstance(content, str) if parts is None else all(map(is_part, parts))):
            return f"message {number}: content must be a string or, for assistant, a list of parts"
        if not content:
            return f"message {number} is empty"
        try:
            "".join(part["text"] for part in parts or [{"text": content}]).encode()
        except UnicodeEncodeError:  # JSON allows lone surrogates
            return f"message {number} contains a lone surrogate, which UTF-8 cannot encode"
    return None


def is_part(part: Any) -> bool:
    """Whether `part` is a valid part of an assistant message."""
    known = isinstance(part, dict) and part.get("type") in ("text", "python", "python_output")
    return known and isinstance(part.get("text"), str)


def answer_text(message: Message) -> str:
    """The text of a message; its text parts joined if it has parts."""
    content = message["content"]
    if isinstance(content, str):
        return content
    return "".join(part["text"] for part in content if part["type"] == "text")


def visible(answer: str) -> str:
    """A completion without tool calls, tool outputs or special tokens."""
    return SPECIAL.sub("", TOOL_USE.sub("", answer))


def final_number(answer: str) -> Decimal | None:
    """The number after the last `####`, without commas or dollar sign; None if there is none."""
    found = FINAL_NUMBER.findall(answer)
    return Decimal(found[-1].replace(",", "")) if found else None


def choice_question(
    question: str, options: Sequence[str], letters: Sequence[str], instruction: str = BY_LETTER
) -> str:
    """
    Format a multiple-choice question. The default instruction asks for the letter only.

    The letter follows `=` without a space, because an answer begins without one. A large vocabulary
    may merge `=A` into one token.
    """
    lines = [f"- {option}={letter}" for option, letter in zip(options, letters, strict=True)]
    return "\n".join([question, *lines, "", instruction])


class Task(ABC):
    """
    Conversations 0 to len - 1 of a split, in the same order on every machine.

    Data is downloaded on first use, not at construction. Raises ValueError for an unknown split.
    """

    name: str
    """Name in reports."""
    kind: TaskKind
    """choice: scored by the logits of the letters right after <|assistant_start|>; generate: by
    the generated answer; talk: training only."""
    splits: ClassVar[tuple[str, ...]]
    """Available splits. Fine-tuning trains only on "train", RL on `rl_split`."""
    rl_split: ClassVar[str] = "train"
    """Split whose questions RL trains on."""
    baseline: float = 0.0
    """Chance accuracy."""

    def __init__(self, split: str):
        if split not in self.splits:
            raise ValueError(f"{self.name} has no split {split!r}; it has {', '.join(self.splits)}")
        self.split = split

    @property
    def origin(self) -> dict[str, Any]:
        """What determines the conversations besides the split: commit, digests, options."""
        return {}

    @property
    def identity(self) -> dict[str, Any]:
        """A JSON value that changes with the data, the options and the wording."""
        wording = fingerprint([self.conversation(i) for i in range(min(SAMPLE, len(self)))])
        return {
            "task": self.name,
            "split": self.split,
            "conversations": len(self),
            "wording": wording,
            **self.origin,
        }

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def conversation(self, i: int) -> Conversation:
        """Conversation i, 0 <= i < len; the last message is the reference answer."""

    def __getitem__(self, i: int) -> Conversation:
        """Conversation i. Raises IndexError if i is out of range."""
        if not 0 <= i < len(self):
            raise IndexError(f"{self.name} has no conversation {i}, only 0 to {len(self) - 1}")
        return self.conversation(i)

    def __iter__(self) -> Iterator[Conversation]:
        return map(self.conversation, range(len(self)))

    def locate(self, i: int) -> tuple["Task", int]:
        """The task of conversation i and its index there; a Mixture or Subset has other tasks."""
        return self, i

    def letters(self, i: int) -> tuple[str, ...]:
        """The option letters of question i; empty without options."""
        return ()

    def cluster(self, i: int) -> str:
        """
        Group of question i for standard errors; answers within a group are correlated, such as
        those about one fact. Default: its own group.
        """
        return str(i)

    def material(self, i: int) -> str:
        """Content of conversation i without instructions, for overlap.py."""
        return "\n".join(answer_text(message) for message in self.conversation(i))

    def asked(self, i: int) -> str:
        """The question of conversation i without its options; empty for tasks without options."""
        return ""

    def score(self, conversation: Conversation, answer: str) -> float:
        """
        Return 1.0 if `answer` is right, else 0.0: the evaluation metric and the RL reward.

        answer: a completion with special tokens as text. Raises ValueError for a task of kind
        "talk".
        """
        raise ValueError(f"{self.name} is training-only: it has no reference answers to score")

    def answered(self, answer: str) -> bool:
        """Whether `answer` has the required format, right or wrong."""
        return True


class ChoiceTask(Task):
    """A task whose answers are a single option letter."""

    kind = "choice"

    def score(self, conversation: Conversation, answer: str) -> float:
        return float(visible(answer).strip() == answer_text(conversation[-1]))

    def answered(self, answer: str) -> bool:
        return visible(answer).strip() in LETTERS


class MCQuestion(NamedTuple):
    """A multiple-choice question: text, options and the index of the correct option."""

    text: str
    options: tuple[str, ...]
    right: int


class QuestionTask(ChoiceTask):
    """A choice task made of `MCQuestion`s with options lettered by position."""

    @abstractmethod
    def question(self, i: int) -> MCQuestion:
        """Question i."""

    def conversation(self, i: int) -> Conversation:
        text, options, right = self.question(i)
        asked = choice_question(text, options, LETTERS[: len(options)])
        return [user(asked), assistant(LETTERS[right])]

    def letters(self, i: int) -> tuple[str, ...]:
        return LETTERS[: len(self.question(i).options)]

    def material(self, i: int) -> str:
        asked = self.question(i)
        return "\n".join([asked.text, *asked.options])

    def asked(self, i: int) -> str:
        return self.question(i).text


class NumberTask(Task):
    """A task whose answers end in `####` and a number."""

    kind = "generate"

    def score(self, conversation: Conversation, answer: str) -> float:
        right = final_number(answer_text(conversation[-1]))
        assert right is not None, f"{self.name}: a reference answer has no number"
        return float(final_number(visible(answer)) == right)

    def answered(self, answer: str) -> bool:
        return final_number(visible(answer)) is not None


class Subset(Task):
    """
    The first `count` conversations of a task, or all if it has fewer. For letters and scores of a
    question, use the task returned by `locate`.
    """

    def __init__(self, task: Task, count: int):
        self.task, self.count = task, count
        self.name, self.kind, self.split = task.name, task.kind, task.split
        self.baseline = task.baseline

    @property
    def identity(self) -> dict[str, Any]:
        return {"subset": self.task.identity, "start": 0, "stop": self.count}

    def __len__(self) -> int:
        return min(self.count, len(self.task))

    def locate(self, i: int) -> tuple[Task, int]:
        return self.task.locate(i)

    def conversation(self, i: int) -> Conversation:
        return self.task.conversation(i)


class Mixture(Task):
    """
    Several tasks as one, their conversations shuffled by `seed`.

    A task given twice is repeated. For letters and scores of a question, use the task returned by
    `locate`. Raises ValueError for an empty list of tasks.
    """

    kind = "talk"

    def __init__(self, tasks: Sequence[Task], seed: int = 0):
        if not tasks:
            raise ValueError("a mixture needs at least one task")
        self.tasks, self.seed = tuple(tasks), seed
        self.name = "+".join(task.name for task in tasks)
        self.split = "+".join(sorted({task.split for task in tasks}))
        self.ends: list[int] = []  # cumulative lengths; empty until `len` is called
        self.order: list[int] = []

    def __len__(self) -> int:
        if not self.ends:
            self.ends = list(itertools.accumulate(map(len, self.tasks)))
            self.order = shuffled(self.ends[-1], self.seed)
        return self.ends[-1]

    def locate(self, i: int) -> tuple[Task, int]:
        assert i < len(self), f"{self.name} has no conversation {i}"
        number = self.order[i]
        part = bisect.bisect_right(self.ends, number)
        return self.tasks[part].locate(number - (self.ends[part - 1] if part else 0))

    @property
    def identity(self) -> dict[str, Any]:
        return {"mixture": [task.identity for task in self.tasks], "seed": self.seed}

    def conversation(self, i: int) -> Conversation:
        task, number = self.locate(i)
        return task.conversation(number)


def shuffled(n: int, seed: int) -> list[int]:
    """0 to n - 1 in random order. Only `random()` is stable across Python versions."""
    rng = random.Random(seed)
    return sorted(range(n), key=lambda _: rng.random())
