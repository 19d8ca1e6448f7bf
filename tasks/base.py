"""
What a task is: conversations by number, with a right answer, for training, evaluation and RL.

    Task[i] -> Conversation -> train on it, or ask it and `score` what comes back
    Subset, Mixture: tasks made of tasks

Here are also the two forms of answer that several tasks share: the letter of an option, and a
number after `####`. Text in, text out: a task knows nothing of tokens or models.
"""

import bisect
import itertools
import random
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from decimal import Decimal
from typing import Any, ClassVar, Literal, NamedTuple

from nanochat.common import fingerprint

Message = dict[str, Any]
Conversation = list[Message]
Part = dict[str, str]
Kind = Literal["choice", "generate", "talk"]

LETTERS = tuple("ABCDEFGHIJKLMNOPQRSTUVWXYZ")
BY_LETTER = "Answer with the letter only."
SAMPLE = 8  # conversations that stand in `identity` for the wording of all
TOOL_USE = re.compile(r"<\|(python|output)_start\|>.*?(<\|\1_end\|>|$)", re.DOTALL)
SPECIAL = re.compile(r"<\|\w+\|>")
CALCULATION = re.compile(r"<<([^<>=]*)=([^<>=]*)>>")
FINAL_NUMBER = re.compile(r"#### *\$?(-?\d[\d,]*(?:\.\d+)?|-?\.\d+)")


def user(words: str) -> Message:
    """What the user says."""
    return {"role": "user", "content": words}


def assistant(content: str | list[Part]) -> Message:
    """What the assistant says: a text, or parts made by `text` and `tool_call`."""
    return {"role": "assistant", "content": content}


def text(words: str) -> Part:
    """A part of the assistant's answer that is said."""
    return {"type": "text", "text": words}


def tool_call(code: str, output: str) -> list[Part]:
    """Two parts: what is given to the tool, and what it answers."""
    return [{"type": "python", "text": code}, {"type": "python_output", "text": output}]


def with_tool_calls(notation: str) -> list[Part]:
    """Parts of a text in GSM8K's notation, where `<<3*4=12>>` is a call of the calculator."""
    parts: list[Part] = []
    end = 0
    for call in CALCULATION.finditer(notation):
        parts += [text(notation[end : call.start()]), *tool_call(call[1], call[2])]
        end = call.end()
    return [part for part in [*parts, text(notation[end:])] if part["text"]]


def flaw(messages: Any) -> str | None:
    """What keeps something from being a conversation to train on, or None."""
    if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
        return 'neither a list of messages nor {"messages": [...]}'
    roles = [message.get("role") for message in messages]
    turns = roles[1:] if roles[:1] == ["system"] else roles
    if not turns or turns != ["user", "assistant"] * (len(turns) // 2):
        return f"user and assistant must speak in turn, the assistant last; roles are {roles}"
    for number, message in enumerate(messages, 1):
        content = message.get("content")
        parts = content if isinstance(content, list) and message["role"] == "assistant" else None
        if not (isinstance(content, str) if parts is None else all(map(is_part, parts))):
            return f"message {number}: the content must be text, or parts of an answer"
        if not content:
            return f"message {number} is empty"
        if any(is_torn(part["text"]) for part in parts or [{"text": content}]):
            return (
                f"message {number} holds half of a character (a lone surrogate), which is no text"
            )
    return None


def is_torn(text: str) -> bool:
    """Whether a string is no text: JSON can hold halves of characters, UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


def is_part(part: Any) -> bool:
    """Whether something is a part of an assistant's answer."""
    known = isinstance(part, dict) and part.get("type") in ("text", "python", "python_output")
    return known and isinstance(part.get("text"), str)


def answer_text(message: Message) -> str:
    """The text of a message; of one in parts, its text parts joined."""
    content = message["content"]
    if isinstance(content, str):
        return content
    return "".join(part["text"] for part in content if part["type"] == "text")


def spoken(answer: str) -> str:
    """A completion without tool calls, their outputs and special tokens: what a user reads."""
    return SPECIAL.sub("", TOOL_USE.sub("", answer))


def final_number(answer: str) -> Decimal | None:
    """The number after the last `####`, commas and a dollar sign aside."""
    found = FINAL_NUMBER.findall(answer)
    return Decimal(found[-1].replace(",", "")) if found else None


def choice_question(
    question: str, options: Sequence[str], letters: Sequence[str], instruction: str = BY_LETTER
) -> str:
    """
    A multiple-choice question, by default one to be answered by a letter and nothing else.

    The letter follows `=` without a space, so that it is the same token here and in the answer.
    """
    lines = [f"- {option}={letter}" for option, letter in zip(options, letters, strict=True)]
    return "\n".join([question, *lines, "", instruction])


class Task(ABC):
    """
    Conversations 0 to len - 1 of a split, the same ones in the same order on every machine.

    Making one costs nothing: what has to be downloaded is when it is first needed. Raises
    ValueError for a split that the task does not have.
    """

    name: str
    """As the report prints it."""
    kind: Kind
    """choice: scored by the logits of the letters right after <|assistant_start|>; generate: by
    what the model writes; talk: only trained on."""
    splits: ClassVar[tuple[str, ...]]
    """All there are. Only "train" is ever trained on."""
    baseline: float = 0.0
    """Accuracy of guessing."""

    def __init__(self, split: str):
        if split not in self.splits:
            raise ValueError(f"{self.name} has no split {split!r}; it has {', '.join(self.splits)}")
        self.split = split

    @property
    def where(self) -> str:
        """Which data this is, in words for the report."""
        return self.split

    @property
    def origin(self) -> dict[str, Any]:
        """What decides the conversations beside the split: commit, digests, options."""
        return {}

    @property
    def identity(self) -> dict[str, Any]:
        """JSON-ready; changes with the data, the options and the wording of the conversations."""
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
        """Conversation i, for i from 0 to len - 1; the last message is the right answer."""

    def __getitem__(self, i: int) -> Conversation:
        """Conversation i. Raises IndexError outside of 0 to len - 1."""
        if not 0 <= i < len(self):
            raise IndexError(f"{self.name} has conversations 0 to {len(self) - 1}, not {i}")
        return self.conversation(i)

    def __iter__(self) -> Iterator[Conversation]:
        return map(self.conversation, range(len(self)))

    def locate(self, i: int) -> tuple["Task", int]:
        """The task that conversation i is of, and its number there: a mixture has several."""
        return self, i

    def letters(self, i: int) -> tuple[str, ...]:
        """The letters of the options of question i; none where there are no options."""
        return ()

    def material(self, i: int) -> str:
        """What conversation i is made of, without instructions: what overlap.py compares."""
        return "\n".join(answer_text(message) for message in self.conversation(i))

    def asked(self, i: int) -> str:
        """The question of conversation i without its options, where it has some; else nothing."""
        return ""

    def score(self, conversation: Conversation, answer: str) -> float:
        """
        1.0 where `answer` is right, else 0.0: the measure of evaluation and the reward of RL.

        answer: a completion as the assistant wrote it, special tokens by their names. Raises
        ValueError for a task that has no right answers.
        """
        raise ValueError(f"{self.name} is only trained on: it has no right answers to score")

    def answered(self, answer: str) -> bool:
        """Whether `answer` has the form that a right one must have, right or wrong."""
        return True


class ChoiceTask(Task):
    """A task whose answers are the letter of an option and nothing else."""

    kind = "choice"

    def score(self, conversation: Conversation, answer: str) -> float:
        return float(spoken(answer).strip() == answer_text(conversation[-1]))

    def answered(self, answer: str) -> bool:
        return spoken(answer).strip() in LETTERS


class Question(NamedTuple):
    """A multiple-choice question: what is asked, the options, and which of them is right."""

    text: str
    options: tuple[str, ...]
    right: int


class QuestionTask(ChoiceTask):
    """A choice task made of questions, whose options are lettered by their place."""

    @abstractmethod
    def question(self, i: int) -> Question:
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
    """A task whose answers end in `####` and a number, after whatever leads to it."""

    kind = "generate"

    def score(self, conversation: Conversation, answer: str) -> float:
        right = final_number(answer_text(conversation[-1]))
        assert right is not None, f"{self.name}: a right answer without a number"
        return float(final_number(spoken(answer)) == right)

    def answered(self, answer: str) -> bool:
        return final_number(spoken(answer)) is not None


class Subset(Task):
    """
    Conversations `start` to `stop` - 1 of a task, as far as it has them; its name and rules.

    Raises ValueError for a range that is none.
    """

    def __init__(self, task: Task, start: int, stop: int):
        if not 0 <= start <= stop:
            raise ValueError(f"no subset of {task.name} goes from {start} to {stop}")
        self.task, self.start, self.stop = task, start, stop
        self.name, self.kind, self.split = task.name, task.kind, task.split
        self.baseline = task.baseline

    @property
    def where(self) -> str:
        return self.task.where

    @property
    def identity(self) -> dict[str, Any]:
        return {"subset": self.task.identity, "start": self.start, "stop": self.stop}

    def __len__(self) -> int:
        return max(0, min(self.stop, len(self.task)) - self.start)

    def conversation(self, i: int) -> Conversation:
        return self.task.conversation(self.start + i)

    def letters(self, i: int) -> tuple[str, ...]:
        return self.task.letters(self.start + i)

    def material(self, i: int) -> str:
        return self.task.material(self.start + i)

    def asked(self, i: int) -> str:
        return self.task.asked(self.start + i)

    def score(self, conversation: Conversation, answer: str) -> float:
        return self.task.score(conversation, answer)

    def answered(self, answer: str) -> bool:
        return self.task.answered(answer)


class Mixture(Task):
    """
    Several tasks as one, their conversations shuffled together by `seed`.

    A task that is given twice comes twice. `locate` finds the task behind a conversation, which
    alone can score an answer to it. Raises ValueError where there is no task.
    """

    kind = "talk"

    def __init__(self, tasks: Sequence[Task], seed: int = 0):
        if not tasks:
            raise ValueError("a mixture needs at least one task")
        self.tasks, self.seed = tuple(tasks), seed
        self.name = "+".join(task.name for task in tasks)
        self.split = "+".join(sorted({task.split for task in tasks}))
        self.ends: list[int] = []  # where each task ends; empty until a length is asked for
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
        return self.tasks[part], number - (self.ends[part - 1] if part else 0)

    def composition(self) -> dict[str, int]:
        """Task and data -> how many conversations of it there are, repeats included."""
        counts = Counter()
        for task in self.tasks:
            counts[f"{task.name} ({task.where})"] += len(task)
        return dict(counts)

    @property
    def identity(self) -> dict[str, Any]:
        return {"mixture": [task.identity for task in self.tasks], "seed": self.seed}

    def conversation(self, i: int) -> Conversation:
        task, number = self.locate(i)
        return task.conversation(number)

    def letters(self, i: int) -> tuple[str, ...]:
        task, number = self.locate(i)
        return task.letters(number)

    def material(self, i: int) -> str:
        task, number = self.locate(i)
        return task.material(number)

    def asked(self, i: int) -> str:
        task, number = self.locate(i)
        return task.asked(number)


def shuffled(n: int, seed: int) -> list[int]:
    """0 to n - 1 in random order. Only `random()` is promised to be the same in every Python."""
    rng = random.Random(seed)
    return sorted(range(n), key=lambda _: rng.random())
