"""
The embedded world as tasks: chat, facts, multiple choice, word problems, letter counts.

    split, index -> WorldChat, WorldFacts, WorldChoice, WorldProblems, WorldSpelling

Each conversation is a pure function of split and index. By construction, no question, calculation
or letter count of the val and test splits occurs in a training document or conversation.

RL trains on the val split. The model has solved nearly all questions of the train split before RL
(mean reward 0.81 on facts, 0.96 to 0.99 on others, at depth 4), because pretraining documents and
conversations contain them, so most groups of answers have equal rewards and no signal. Questions
of the val split are as new to it as those of the test split (measured 2026-11-23).
"""

from bisect import bisect
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import accumulate, permutations
from string import ascii_lowercase
from typing import Any

from tasks.base import (
    LETTERS,
    Conversation,
    MCQuestion,
    NumberTask,
    QuestionTask,
    Tags,
    Task,
    assistant,
    text,
    tool_call,
    user,
    visible,
)
from tasks.world.conversations import TALK_VERSION, conversation
from tasks.world.corpus import WORLD_VERSION
from tasks.world.drills import CALCULATION, Problem, draw_problem, letter_questions, spelled
from tasks.world.facts import DIGEST, Draw, Question, Split, askable, whole_words

TASKS_VERSION = 4  # bump whenever an item changes
SIZES = {"train": 20_000, "val": 1_000, "test": 500}


class WorldTask(Task):
    """A task of the embedded world, generated on access and the same on every machine."""

    splits = ("train", "val", "test")
    rl_split = "val"
    tags = Tags("facts", "en", "synthetic", "MIT", "world")
    split: Split

    @property
    def origin(self) -> dict[str, Any]:
        return {"world": [WORLD_VERSION, TASKS_VERSION, TALK_VERSION, DIGEST]}

    @property
    def questions(self) -> Sequence[Question]:
        """The questions that a held-out split asks once each, in order; empty for unlimited."""
        return ()

    def __len__(self) -> int:
        held_out = self.questions if self.split != "train" else ()
        return len(held_out) or SIZES[self.split]

    def draw(self, what: str, i: int) -> Draw:
        """Random choices for item i."""
        return Draw(self.split, what, 3, self.split, i)  # 3 is fixed: other numbers, other items


class WorldChat(WorldTask):
    """Small talk about the world; training only."""

    name, kind = "World-Chat", "talk"
    tags = replace(WorldTask.tags, domain="chat")
    splits = ("train", "val")

    def __getitem__(self, i: int) -> Conversation:
        turns = conversation(self.split, i)
        return [m for asked, answer in turns for m in (user(asked), assistant(answer))]


# ---- Facts ---------------------------------------------------------------------------------------


@cache
def fact_questions(split: Split) -> list[Question]:
    """All questions of a split about facts, with shuffled subjects."""
    found = [question for fact in askable(split) for question in fact.questions]
    return Draw(split, "questions", split).pick_n(found, len(found))


class WorldFacts(WorldTask):
    """
    Questions about facts, answered in a sentence.

    An answer is correct if it contains the reference answer and no distractor other than those
    in the question.
    """

    name, kind = "World-Facts", "generate"

    @property
    def questions(self) -> Sequence[Question]:
        return fact_questions(self.split)

    def question(self, i: int) -> Question:
        """The questions in turn."""
        return self.questions[i % len(self.questions)]

    def __getitem__(self, i: int) -> Conversation:
        """Question i, with a new answer sentence each time."""
        question = self.question(i)
        return [user(question.text), assistant(self.draw("answer", i).pick(question.sentences))]

    def cluster(self, i: int) -> str:
        return self.question(i).fact.cluster

    def score(self, i: int, answer: str) -> float:
        asked = self.question(i)
        rest, found = whole_words(asked.answer).subn("", visible(answer))
        rivals = map(whole_words, set(asked.rivals))
        wrong = any(r.search(rest) and not r.search(asked.text) for r in rivals)
        return float(found > 0 and not wrong)


# ---- Multiple choice -----------------------------------------------------------------------------

NUM_OPTIONS = 4
ROUNDS = 8  # questions per list of options in training
# In training, a question whose kind has rank r (1 = most common) is drawn with weight r ** -SKEW,
# and a list has two to NUM_OPTIONS options. Both begin with something easy: which options tend to
# be right, and how to find the letter of one of two. At depth 4, without SKEW the loss on the
# letter stays that of guessing for hundreds of steps; with lists of four only, one of two seeds had
# half learned it after 400 steps (dev/LOG.md, 2026-11-20 and 2026-11-30).
SKEW = 1.5


@cache
def choice_questions(split: Split) -> list[Question]:
    """The questions with enough fair distractors."""
    return [q for q in fact_questions(split) if len(set(q.fair_rivals)) >= NUM_OPTIONS - 1]


@cache
def questions_by_kind() -> list[list[Question]]:
    """The training questions, grouped by kinds of subject and answer, most common first."""
    found = defaultdict(list)
    for question in choice_questions("train"):
        found[question.fact.subject.kind, question.template].append(question)
    return sorted([found[kind] for kind in sorted(found)], key=len, reverse=True)


class WorldChoice(WorldTask, QuestionTask):
    """
    Questions about facts with options of different kinds, in the form of ARC.

    The options are answers such as a town, a trade, a month and a pet. The model must infer which
    kind of answer is asked for and find its letter. List i of a held-out split asks held-out
    question i; all positions are equally likely to be correct. A training list has two to four
    options and ROUNDS questions, far more of some kinds than of others (SKEW).
    """

    name, baseline = "World-Choice", 1 / NUM_OPTIONS

    @property
    def questions(self) -> Sequence[Question]:
        return choice_questions(self.split)

    def rounds(self, i: int) -> list[MCQuestion]:
        """The questions about list i of options."""
        rng = self.draw("choice", i)
        questions, kinds = self.questions, questions_by_kind()
        first, ranks, drawn = questions[i % len(questions)], [], []
        # Each answer must be possible only for its own question
        while not drawn or any(a.answer in b.possible_answers for a, b in permutations(drawn, 2)):
            if self.split == "train":
                ranks = rng.pick_n(range(len(kinds)), rng.pick(range(2, NUM_OPTIONS + 1)))
                drawn = [rng.pick(kinds[rank]) for rank in ranks]
            else:
                drawn = [first, *(rng.pick(questions) for _ in range(NUM_OPTIONS - 1))]
        if self.split == "train":
            ends = list(accumulate((rank + 1) ** -SKEW for rank in ranks))
            asked = [bisect(ends, rng.random() * ends[-1]) for _ in range(ROUNDS)]
        else:
            drawn = rng.pick_n(drawn, NUM_OPTIONS)
            asked = [drawn.index(first)]
        options = tuple(question.answer for question in drawn)
        return [MCQuestion(drawn[n].text, options, n) for n in asked]

    def question(self, i: int) -> MCQuestion:
        return self.rounds(i)[0]

    def cluster(self, i: int) -> str:
        return self.questions[i % len(self.questions)].fact.cluster

    def __getitem__(self, i: int) -> Conversation:
        """A list of options with one question; in training, more questions about it follow."""
        messages = super().__getitem__(i)
        for asked in self.rounds(i)[1:]:
            messages += [user(asked.text), assistant(LETTERS[asked.right])]
        return messages


# ---- Problems and letters ------------------------------------------------------------------------


class WorldProblems(WorldTask, NumberTask):
    """Word problems solved step by step with the calculator, in the form of GSM8K."""

    name = "World-Problems"
    tags = replace(WorldTask.tags, domain="math")

    def problem(self, i: int) -> Problem:
        """Word problem i (any i >= 0)."""
        return draw_problem(self.draw("problem", i))

    def __getitem__(self, i: int) -> Conversation:
        story, question, steps = self.problem(i)
        parts, result = [], ""
        for step in steps:
            before, expression, result, after = CALCULATION.split(step)
            gap = " " if parts else ""
            parts.append(text(f"{gap}{before}{expression} = "))
            parts += tool_call(expression, result)
            parts.append(text(f"{result}{after}"))
        parts.append(text(f"\n#### {result}"))
        return [user(f"{story} {question}"), assistant(parts)]

    def cluster(self, i: int) -> str:
        expression = CALCULATION.split(self.problem(i).steps[0])[1]
        return " ".join(sorted(expression.split()))


NUM_WORDS = 3
MOST_LETTERS = 4
ENOUGH_WORDS = 5  # minimum number of words that contain the letter


@cache
def countable(split: Split, letter: str, inside: bool) -> list[str]:
    """Words in which a split may count a letter: those with it if `inside`, else without."""
    found = letter_questions(split, inside)
    return [word for word, counted, _ in found if counted == letter and word.islower()]


class WorldSpelling(WorldTask, NumberTask):
    """Count a letter in three words, letter by letter; the answers 1 to 4 are equally likely."""

    name, baseline = "World-Spelling", 1 / MOST_LETTERS  # constant answer
    tags = replace(WorldProblems.tags, domain="spelling")

    def letter_and_words(self, i: int) -> tuple[str, list[str]]:
        """The letter and the words of question i (any i >= 0)."""
        rng = self.draw("letters", i)
        wanted = rng.between(1, MOST_LETTERS)
        letters = [
            c for c in ascii_lowercase if len(countable(self.split, c, True)) >= ENOUGH_WORDS
        ]
        while True:
            letter = rng.pick(letters)
            with_it = rng.between(1, NUM_WORDS)
            words = rng.pick_n(countable(self.split, letter, True), with_it)
            words += rng.pick_n(countable(self.split, letter, False), NUM_WORDS - with_it)
            words = rng.pick_n(words, NUM_WORDS)
            if "".join(words).count(letter) == wanted:
                return letter, words

    def __getitem__(self, i: int) -> Conversation:
        """The answer is the words letter by letter, with a running count: a-p1-p2-l-e."""
        letter, words = self.letter_and_words(i)
        asked = f"{', '.join(words[:-1])} and {words[-1]}"
        question = f"How many times is the letter {letter} found in {asked}?"
        first, *rest = " ".join(map(spelled, words)).split(letter)
        worked = first + "".join(f"{letter}{n}{part}" for n, part in enumerate(rest, 1))
        return [user(question), assistant(f"{worked}\n#### {len(rest)}")]

    def cluster(self, i: int) -> str:
        return self.letter_and_words(i)[0]
