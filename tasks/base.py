"""
Tasks: indexed conversations with reference answers for training, evaluation and RL.

    Task[i] -> Conversation -> train on it, or prompt a model and `score` its answer
    Mixture: a task made of tasks, or of the first conversations of one

Also the two answer formats that several tasks share: an option letter, and a number after `####`.
Tasks work on text only, independent of tokenizer and model.
"""

import inspect
import random
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

from nanochat.chat_format import merge_turns
from nanochat.common import code_digest, fingerprint

Message = dict[str, Any]
Conversation = list[Message]
ContentPart = dict[str, str]

LETTERS = tuple("ABCDEFGHIJKLMNOPQRSTUVWXYZ")
BY_LETTER = "Answer with the letter only."
TOOL_USE = re.compile(r"<\|(python|output)_start\|>.*?(<\|\1_end\|>|$)", re.DOTALL)
SPECIAL = re.compile(r"<\|\w+\|>")
# A word in a text; the label of an option in `MCQuestion.ask`
WORD, LABEL = re.compile(r"[^\W_]+"), re.compile(r"=[A-Z]$", re.MULTILINE)
NUMBER_AND_UNIT = re.compile(  # 12 x and 12ab have no unit: a unit is listed or has three letters
    r"""([+-]? (?=\.?\d) (?: \d{1,3}(?:,\d{3})+ | \d* ) (?: \.\d+ )?) \s*
    (?: \\?% | (?: ° | \^?\{?\\circ\}? ) [CF]? | ℃
      | (?: \\(?:text|mathrm)\{[^{}\d]*\} | [mck]?m | [mk]?g | m?[lL] | s | h | km/h | m/s
          | in | ft | yd | mi | oz | lb | hr | [a-zA-Z]{3} [a-zA-Z\s]* ) (?: \^\{?[23]\}? | [²³] )?
    )? \s* \(? \s* (?: (?![십백천만억조]) [가-힣.\s]+ )? \)?""",
    re.VERBOSE,
)


@dataclass(frozen=True)
class Tags:
    """Properties of a task or bucket; empty if not declared."""

    domain: str = ""
    language: str = ""
    origin: str = ""
    """native, translated, synthetic or mixed."""
    licence: str = ""
    """As stated by the owner of the dataset."""
    parent: str = ""
    """Datasets it was derived from, separated by +. Evaluations that share one are in the same
    family."""
    answer_format: str = ""
    """letter, number, marker, code or free; of a task, `Task.answer_format`."""
    teacher: str = ""
    """Model that generated the answers, if any."""
    waived: str = ""
    """Final benchmarks of its family, separated by +, that do not block training on it."""


def plain_name(name: str) -> str:
    """A name in lower case without spaces and punctuation."""
    return re.sub(r"[\W_]", "", name.lower())


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


def check_conversation(messages: Any, is_answered: bool = True) -> Conversation:
    """
    Return `messages`. Raises ValueError if they are not a training conversation: from a user
    message, or a system message before it, to an assistant message (unless not `is_answered`).
    """
    turns = merge_turns(messages)  # checks roles and contents
    roles = [message["role"] for message in messages]
    spoken = roles[roles[0] in ("system", "developer") :]
    alternate = spoken == (["user", "assistant"] * len(spoken))[: len(spoken)]
    if not spoken or not alternate or (is_answered and spoken[-1] != "assistant"):
        raise ValueError(f"roles must alternate user/assistant and end with assistant: {roles}")
    if not all(turn.parts for turn in turns):
        raise ValueError("a message is empty")
    "".join(part["text"] for turn in turns for part in turn.parts).encode()  # no lone surrogates
    return messages


def answer_text(message: Message) -> str:
    """The text of a message; its text parts joined if it has parts."""
    content = message["content"]
    if isinstance(content, str):
        return content
    return "".join(part["text"] for part in content if part["type"] == "text")


def visible(answer: str) -> str:
    """A completion without tool calls, tool outputs or special tokens."""
    return SPECIAL.sub("", TOOL_USE.sub("", answer))


def final_value(answer: str) -> Decimal | str | None:
    """
    What follows the last `####` on its line; None without one.

    A number, without currency, unit, commas and bold type (`**18**`); or any other text, such as a
    formula, without spaces and dollar signs.
    """
    _, marker, rest = answer.rpartition("####")
    if not marker:
        return None
    line = " ".join(rest.strip().partition("\n")[0].split())  # else matching takes n^4 steps
    line = re.sub(r"\\boxed\{(.*)\}", r"\1", line)
    line = re.sub(r"₩|\\?\$", "", line).replace("−", "-").lstrip(" *").rstrip(" *.,")
    if amount := NUMBER_AND_UNIT.fullmatch(line):
        return Decimal(amount[1].replace(",", ""))
    plain = re.sub(r"\s|\\[!,;]|\\(left|right)", "", line)
    return re.sub(r"\\[dt]frac", r"\\frac", plain)


def split_words(text: str) -> tuple[str, ...]:
    """The words of a text in lower case, without option labels."""
    return tuple(WORD.findall(LABEL.sub("", text).lower()))


class Task:
    """
    Conversations 0 to len - 1 of a split, in the same order on every machine.

    Data is downloaded on first use, not at construction. Raises ValueError for an unknown split, or
    for a source that it does not take.
    """

    name: str
    """Name in reports."""
    kind: Literal["choice", "generate", "talk"]
    """choice: scored by the logits of the letters right after <|assistant_start|>; generate: by
    the generated answer; talk: training only."""
    splits: Collection[str]
    """Available splits. Fine-tuning trains only on "train", RL on `rl_split`."""
    answer_format = "free"
    """letter, number, marker, code or free."""
    rl_split = "train"
    """Split whose questions RL trains on."""
    baseline = 0.0
    """Chance accuracy."""
    unsafe = False
    """If the machine has no sandbox, run generated programs unsandboxed instead of raising
    SandboxUnavailable when scoring."""
    tags = Tags()
    """Properties of its data, reported for mixtures."""

    def __init__(self, split: str, source: str | None = None):
        if split not in self.splits:
            raise ValueError(f"{self.name} has no split {split!r}; it has {', '.join(self.splits)}")
        if source:
            raise ValueError(f"{self.name} takes no data source; remove {source!r}")
        self.split = split

    def require_input(self) -> None:
        """Raise SandboxUnavailable or MissingInput if this machine cannot score the task."""

    @property
    def origin(self) -> dict[str, Any]:
        """
        What determines the conversations besides split and code: commit, digests, options. Empty if
        unknown; `identity` then reads all conversations.
        """
        return {}

    @property
    def identity(self) -> dict[str, Any]:
        """A JSON value that changes with the data, the options, the wording and the code."""
        files = dict.fromkeys(inspect.getfile(kind) for kind in type(self).__mro__[:-1])
        return {
            "task": self.name,
            "split": self.split,
            "conversations": len(self),
            # all of them, unless something else says what they are: then the first show the wording
            "wording": fingerprint(list(islice(self, 8 if self.origin else None))),
            "code": [code_digest(Path(file).read_text()) for file in files],
            **self.origin,
        }

    def __len__(self) -> int:
        raise NotImplementedError

    def __getitem__(self, i: int) -> Conversation:
        """Conversation i, 0 <= i < len; the last message is the reference answer."""
        raise NotImplementedError

    def __iter__(self) -> Iterator[Conversation]:
        return map(self.__getitem__, range(len(self)))

    def locate(self, i: int) -> tuple["Task", int]:
        """The task of conversation i and its index there; a Mixture has other tasks."""
        return self, i

    def cluster(self, i: int) -> str:
        """
        Group of question i for standard errors; answers within a group are correlated, such as
        those about one fact. Default: its own group.
        """
        return str(i)

    def extract(self, answer: str) -> Any:
        """
        What an answer without tool calls says, in a form that can be compared; None if it lacks the
        required format. Default: the whole answer.
        """
        return answer.strip()

    def score(self, i: int, answer: str) -> float:
        """
        Return 1.0 if `answer` is right, else 0.0: the evaluation metric and the RL reward.

        answer: a completion with special tokens as text. Not for a task of kind "talk".
        """
        right = self.extract(answer_text(self[i][-1]))
        assert right is not None, f"{self.name}: a reference answer has the wrong format"
        return float(self.extract(visible(answer)) == right)


class MCQuestion(NamedTuple):
    """A multiple-choice question: text, options, index of the correct one, and its rationale."""

    text: str
    options: tuple[str, ...]
    right: int
    rationale: str = ""

    def ask(self, instruction: str = BY_LETTER) -> str:
        """
        The question, its options and an instruction, which by default asks for the letter only.

        The letter follows `=` without a space, because an answer begins without one. A large
        vocabulary may merge `=A` into one token.
        """
        lines = [f"- {option}={LETTERS[n]}" for n, option in enumerate(self.options)]
        return "\n".join([self.text, *lines, "", instruction])


class QuestionTask(Task):
    """Multiple-choice questions with options lettered by position, answered by the letter."""

    kind, answer_format = "choice", "letter"

    def question(self, i: int) -> MCQuestion:
        """Question i."""
        raise NotImplementedError

    def __getitem__(self, i: int) -> Conversation:
        asked = self.question(i)
        return [user(asked.ask()), assistant(LETTERS[asked.right])]

    def letters(self, i: int) -> tuple[str, ...]:
        """The option letters of question i."""
        return LETTERS[: len(self.question(i).options)]

    def extract(self, answer: str) -> str | None:
        letter = answer.strip()
        return letter if letter in LETTERS else None


class NumberTask(Task):
    """A task whose answers end in `####` and a number."""

    kind, answer_format = "generate", "number"

    def extract(self, answer: str) -> Decimal | str | None:
        found = final_value(answer)
        return found if isinstance(found, Decimal) else None


class Mixture(Task):
    """
    Several tasks as one, their conversations in order, or shuffled by `seed`; of these, the first
    `count`, or all if there are fewer.

    A task given twice is repeated. Split, kind and baseline are those of the first task. For the
    letters and scores of a question, use the task returned by `locate`.
    """

    def __init__(self, tasks: Sequence[Task], seed: int | None = None, count: int | None = None):
        self.tasks, self.seed, self.count, first = tasks, seed, count, tasks[0]
        self.name = "+".join(task.name for task in tasks)
        self.split, self.kind, self.baseline = first.split, first.kind, first.baseline

    @cached_property
    def order(self) -> list[tuple[Task, int]]:
        """Task and index of each conversation."""
        every = [task.locate(i) for task in self.tasks for i in range(len(task))]
        return (every if self.seed is None else shuffled(every, self.seed))[: self.count]

    @property
    def origin(self) -> dict[str, Any]:
        return {"of": [task.identity for task in self.tasks], "seed": self.seed}

    def __len__(self) -> int:
        return len(self.order)

    def locate(self, i: int) -> tuple[Task, int]:
        return self.order[i]

    def __getitem__(self, i: int) -> Conversation:
        task, number = self.order[i]
        return task[number]


class LaterTurns(Mixture):
    """
    The questions of a task, at most `count`, as they are asked later in a chat: after other ones
    with their reference answers, drawn from `earlier`. turns: numbers of these to choose from.
    """

    def __init__(self, task: Task, earlier: Task, turns: Sequence[int], count: int | None = None):
        super().__init__([task], count=count)
        self.earlier, self.turns = earlier, turns
        self.name = f"{task.name} after {max(turns)} turns"

    def __getitem__(self, i: int) -> Conversation:
        rng, before, (task, number) = random.Random(i), [], self.order[i]
        own = task.cluster(number)  # an answer about the same fact gives it away
        count = self.turns[int(rng.random() * len(self.turns))]
        for _ in range(count + 10):  # more than wanted, to replace those of one cluster
            other, n = self.earlier.locate(int(rng.random() * len(self.earlier)))
            if len(before) < 2 * count and other.cluster(n) != own:
                before += other[n][:2]
        return before + task[number]


def shuffled(values: Sequence[Any], seed: int | str) -> list[Any]:
    """The values in random order. Only `random()` is stable across Python versions."""
    rng = random.Random(seed)
    return sorted(values, key=lambda _: rng.random())
