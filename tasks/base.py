"""
Tasks: indexed conversations with reference answers for training, evaluation and RL.

    Task[i] -> Conversation -> train on it, or prompt a model and `score` its answer
    Subset, Mixture: tasks made of tasks

Also the two answer formats that several tasks share: an option letter, and a number after `####`.
Tasks work on text only, independent of tokenizer and model.
"""

import random
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import cached_property
from typing import Any, Literal, NamedTuple, TypeVar

from nanochat.common import fingerprint

X = TypeVar("X")

Message = dict[str, Any]
Conversation = list[Message]
ContentPart = dict[str, str]
TaskKind = Literal["choice", "generate", "talk"]

LETTERS = tuple("ABCDEFGHIJKLMNOPQRSTUVWXYZ")
BY_LETTER = "Answer with the letter only."
SAMPLE = 8  # conversations hashed into `identity` to detect wording changes
PART_TYPES = ("text", "python", "python_output")
SURROGATE = re.compile("[\ud800-\udfff]")  # JSON allows it, UTF-8 cannot encode it
TOOL_USE = re.compile(r"<\|(python|output)_start\|>.*?(<\|\1_end\|>|$)", re.DOTALL)
SPECIAL = re.compile(r"<\|\w+\|>")
# Not the beginning of a fraction or of another number
NUMBER = re.compile(r"[*\s]*((?:-\$?|\$-?)?(?:\d[\d,]*(?:\.\d+)?|\.\d+))(?![.,]?\d|\s*/\s*\d)")
ALIASES = {
    "gpqadiamond": "gpqa",
    "haeraebench": "haerae",
    "kobalt700": "kobalt",
    "lcb": "livecodebench",
    "mclm": "mclmko",
    "mtmath100": "mclmko",
}
"""Other names of benchmarks -> name, both as `plain_name` gives them."""


@dataclass(frozen=True)
class Tags:
    """Properties of a task or bucket; empty if not declared."""

    domain: str = ""
    language: str = ""
    origin: str = ""
    """native, translated, synthetic or mixed."""
    licence: str = ""
    """As stated by the owner of the dataset."""
    answer_format: str = ""
    """letter, number, marker, code or free."""
    parent: str = ""
    """Datasets it was derived from, separated by +. Evaluations that share one are in the same
    family."""
    teacher: str = ""
    """Model that generated the answers, if any."""
    augmented: str = ""
    """How its questions were modified: styles, order or options."""
    waived: str = ""
    """Final benchmarks of its family, separated by +, that do not block training on it."""


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
        is_list = isinstance(content, list) and message["role"] == "assistant"
        parts: Any = content if is_list else [{"type": "text", "text": content}]
        if not content or not all(map(is_part, parts)):
            return (
                f"message {number}: content must be text or, for assistant, a list of parts; not "
                "empty, and without lone surrogates"
            )
    return None


def is_part(part: Any) -> bool:
    """Whether `part` is a valid part of an assistant message."""
    known = isinstance(part, dict) and part.get("type") in PART_TYPES
    return known and isinstance(part.get("text"), str) and not SURROGATE.search(part["text"])


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
    """
    The number after the last `####`; None if there is none, or a fraction such as 5/2.

    Commas, a dollar sign and bold type (`**18**`) are ignored.
    """
    _, marker, rest = answer.rpartition("####")
    found = NUMBER.match(rest) if marker else None
    return Decimal(re.sub(r"[,$]", "", found[1])) if found else None


def choice_question(question: str, options: Sequence[str], instruction: str = BY_LETTER) -> str:
    """
    Format a multiple-choice question. The default instruction asks for the letter only.

    The letter follows `=` without a space, because an answer begins without one. A large vocabulary
    may merge `=A` into one token.
    """
    lines = [f"- {option}={letter}" for letter, option in zip(LETTERS, options, strict=False)]
    return "\n".join([question, *lines, "", instruction])


class Task:
    """
    Conversations 0 to len - 1 of a split, in the same order on every machine.

    Data is downloaded on first use, not at construction. Raises ValueError for an unknown split.
    """

    name: str
    """Name in reports."""
    kind: TaskKind
    """choice: scored by the logits of the letters right after <|assistant_start|>; generate: by
    the generated answer; talk: training only."""
    splits: Collection[str]
    """Available splits. Fine-tuning trains only on "train", RL on `rl_split`."""
    rl_split = "train"
    """Split whose questions RL trains on."""
    baseline = 0.0
    """Chance accuracy."""
    tags = Tags()
    """Properties of its data, reported for mixtures."""

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
        about = {"task": self.name, "split": self.split, "conversations": len(self)}
        return {**about, "wording": wording, **self.origin}

    def __len__(self) -> int:
        raise NotImplementedError

    def conversation(self, i: int) -> Conversation:
        """Conversation i, 0 <= i < len; the last message is the reference answer."""
        raise NotImplementedError

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

    def extract(self, answer: str) -> Any:
        """
        What an answer without tool calls says, in a form that can be compared; None if it lacks the
        required format. Default: the whole answer.
        """
        return answer.strip()

    def score(self, conversation: Conversation, answer: str) -> float:
        """
        Return 1.0 if `answer` is right, else 0.0: the evaluation metric and the RL reward.

        answer: a completion with special tokens as text. Raises ValueError for a task of kind
        "talk".
        """
        if self.kind == "talk":
            raise ValueError(f"{self.name} is training-only: it has no reference answers to score")
        right = self.extract(answer_text(conversation[-1]))
        assert right is not None, f"{self.name}: a reference answer has the wrong format"
        return float(self.extract(visible(answer)) == right)

    def answered(self, answer: str) -> bool:
        """Whether `answer` has the required format, right or wrong."""
        return self.extract(visible(answer)) is not None


class MCQuestion(NamedTuple):
    """A multiple-choice question: text, options, index of the correct one, and its rationale."""

    text: str
    options: tuple[str, ...]
    right: int
    rationale: str = ""


class QuestionTask(Task):
    """Multiple-choice questions with options lettered by position, answered by the letter."""

    kind = "choice"

    def question(self, i: int) -> MCQuestion:
        """Question i."""
        raise NotImplementedError

    def conversation(self, i: int) -> Conversation:
        asked = self.question(i)
        return [user(choice_question(*asked[:2])), assistant(LETTERS[asked.right])]

    def letters(self, i: int) -> tuple[str, ...]:
        return LETTERS[: len(self.question(i).options)]

    def material(self, i: int) -> str:
        asked = self.question(i)
        return "\n".join([asked.text, *asked.options])

    def extract(self, answer: str) -> str | None:
        letter = answer.strip()
        return letter if letter in LETTERS else None


class NumberTask(Task):
    """A task whose answers end in `####` and a number."""

    kind = "generate"

    def extract(self, answer: str) -> Decimal | None:
        return final_number(answer)


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

    @cached_property
    def order(self) -> list[tuple[Task, int]]:
        """Task and index of each conversation."""
        every = [task.locate(i) for task in self.tasks for i in range(len(task))]
        return shuffled(every, self.seed)

    @property
    def origin(self) -> dict[str, Any]:
        return {"of": [task.identity for task in self.tasks], "seed": self.seed}

    def __len__(self) -> int:
        return len(self.order)

    def locate(self, i: int) -> tuple[Task, int]:
        return self.order[i]

    def conversation(self, i: int) -> Conversation:
        task, number = self.order[i]
        return task.conversation(number)


class Subset(Mixture):
    """
    The first `count` conversations of a task, or all if it has fewer. For letters and scores of a
    question, use the task returned by `locate`.
    """

    def __init__(self, task: Task, count: int):
        super().__init__([task])
        self.count, self.kind, self.tags = count, task.kind, task.tags
        self.baseline = task.baseline

    @cached_property
    def order(self) -> list[tuple[Task, int]]:
        [task] = self.tasks
        return [task.locate(i) for i in range(min(self.count, len(task)))]


class LaterTurns(Mixture):
    """
    The questions of a task, at most `count`, as they are asked later in a chat: after other ones
    with their reference answers, drawn from `earlier`. turns: numbers of these to choose from.
    """

    def __init__(self, task: Task, earlier: Task, turns: Sequence[int], count: int | None = None):
        super().__init__(task.tasks if isinstance(task, Mixture) else [task])
        self.task, self.earlier, self.turns, self.count = task, earlier, turns, count
        self.name = f"{task.name} after {max(turns)} turns"
        self.kind, self.baseline = task.kind, task.baseline

    @cached_property
    def order(self) -> list[tuple[Task, int]]:
        return [self.task.locate(i) for i in range(len(self.task))][: self.count]

    def conversation(self, i: int) -> Conversation:
        asked, rng = super().conversation(i), random.Random(i)
        before: Conversation = []
        for _ in range(self.turns[int(rng.random() * len(self.turns))]):
            other = self.earlier.conversation(int(rng.random() * len(self.earlier)))[:2]
            before += other if other[0] != asked[0] else []
        return before + asked


def shuffled(values: Sequence[X], seed: int | str) -> list[X]:
    """The values in random order. Only `random()` is stable across Python versions."""
    rng = random.Random(seed)
    return sorted(values, key=lambda _: rng.random())
