"""
Exercises of the embedded world, which need computation instead of memory.

    operands of a split -> calculations, word problems with their steps -> documents
    a word -> its letters -> documents

Subtraction undoes addition and division undoes multiplication, so they share operands: if 7 + 5 is
held out, so is 12 - 5. Letter counts are held out per word and letter; spellings occur in every
split.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from random import Random
from typing import Literal

from tasks.world.facts import (
    Goods,
    Person,
    Split,
    between,
    goods,
    people,
    pick,
    pick_n,
    say,
    split_of,
    titled,
    towns,
)
from tasks.world.words import table_rows, word_list

Operands = Literal["sum", "product"]

SUM_LIMIT = 20  # largest operand of addition drills
PRODUCT_LIMIT = 12  # the same for multiplication
STORY_LIMIT = 150  # largest operand of a sum in a word problem; more than any product


@dataclass(frozen=True)
class Operation:
    """An arithmetic operation on x and y with result z."""

    operands: Operands
    """How operands are drawn; inverses share them: a + b = c, c - a = b; a * b = c, c / a = b."""
    undoes: bool
    symbol: str


OPERATIONS = (
    Operation("sum", False, "+"),
    Operation("sum", True, "-"),
    Operation("product", False, "*"),
    Operation("product", True, "/"),
)


@dataclass(frozen=True)
class Drill:
    """One calculation, x (symbol) y = z."""

    operation: Operation
    x: int
    y: int
    z: int

    @property
    def line(self) -> str:
        """'7 + 5 = 12'."""
        return f"{self.x} {self.operation.symbol} {self.y} = {self.z}"

    def sentence(self, rng: Random) -> str:
        """The calculation as a sentence."""
        return say(rng, f"{self.operation.symbol} told", x=self.x, y=self.y, z=self.z)

    def asked(self, rng: Random) -> str:
        """The calculation as a question with answer `z`."""
        return say(rng, f"{self.operation.symbol} asked", x=self.x, y=self.y)


@dataclass(frozen=True)
class DrillStep:
    """A calculation inside a sentence; {} in `text` is its placeholder."""

    text: str
    expression: str
    result: int

    @property
    def prose(self) -> str:
        """'She pays 3 * 4 = 12 pennies.'"""
        return self.text.format(f"{self.expression} = {self.result}")


@dataclass(frozen=True)
class Problem:
    """A word problem. The answer is the result of the last step."""

    story: str
    question: str
    steps: tuple[DrillStep, ...]

    @property
    def answer(self) -> int:
        return self.steps[-1].result

    @property
    def solution(self) -> str:
        """The steps as prose."""
        return " ".join(step.prose for step in self.steps)


# ------------------------------------------------------------------------------------------------
# Numbers, by split


def operand_split(operands: Operands, a: int, b: int) -> Split:
    """The split for adding (or multiplying) a and b in either order, and for the inverse."""
    return split_of(operands, min(a, b), max(a, b))


@cache
def operand_pairs(operands: Operands, split: Split, low: int = 1) -> tuple[tuple[int, int], ...]:
    """All pairs of a split, from `low` up to the limit of the operation."""
    limit = SUM_LIMIT if operands == "sum" else PRODUCT_LIMIT
    numbers = range(low, limit + 1)
    return tuple((a, b) for a in numbers for b in numbers if operand_split(operands, a, b) == split)


@cache
def partners(split: Split, a: int) -> tuple[int, ...]:
    """The numbers that a split may add to `a`; `a` may exceed the limit."""
    return tuple(b for b in range(2, SUM_LIMIT + 1) if operand_split("sum", a, b) == split)


def story_operands(rng: Random, split: Split) -> tuple[int, int]:
    """
    Two numbers that a split may add; in half of the cases one of them is large.

    Only pairs are held out, so every number occurs in training.
    """
    if rng.random() < 0.5:
        return pick(rng, operand_pairs("sum", split, 2))
    large = between(rng, SUM_LIMIT + 1, STORY_LIMIT)
    if not partners(split, large):
        return story_operands(rng, split)
    small = pick(rng, partners(split, large))
    return (large, small) if rng.random() < 0.5 else (small, large)


def draw_drill(rng: Random, split: Split) -> Drill:
    """A random calculation of a split."""
    operation = pick(rng, OPERATIONS)
    a, b = pick(rng, operand_pairs(operation.operands, split))
    c = a + b if operation.operands == "sum" else a * b
    return Drill(operation, c, a, b) if operation.undoes else Drill(operation, a, b, c)


# ------------------------------------------------------------------------------------------------
# Word problems: one function per kind; it returns None if the drawn numbers do not fit


@cache
def purchases(split: Split) -> tuple[tuple[int, Goods], ...]:
    """(count, goods): all purchases of 2 to 12 items whose count * price is in the split."""
    counts = range(2, PRODUCT_LIMIT + 1)
    return tuple(
        (n, g) for g in goods() for n in counts if operand_split("product", n, g.price) == split
    )


@cache
def journeys(split: Split) -> tuple[tuple[str, str, str, int, int], ...]:
    """(from, via, to, miles, more miles) along the ring road."""
    found = []
    for i, first in enumerate(towns()):
        second = towns()[(i + 1) % len(towns())]
        if operand_split("sum", first.miles, second.miles) == split:
            route = first.name, second.name, second.next_town
            found.append((*route, first.miles, second.miles))
    return tuple(found)


def bought(rng: Random, split: Split, a: Person, b: Person) -> Problem:
    n, item = pick(rng, purchases(split))
    return Problem(
        f"{a.name} buys {item.some(n)} at {item.price} pennies each.",
        f"How many pennies does {a.he} pay?",
        (DrillStep(f"{a.He} pays {{}} pennies.", f"{n} * {item.price}", n * item.price),),
    )


def bought_with_change(rng: Random, split: Split, a: Person, b: Person) -> Problem | None:
    n, item = pick(rng, purchases(split))
    cost = n * item.price
    if not partners(split, cost):
        return None
    change = pick(rng, partners(split, cost))
    return Problem(
        f"{a.name} has {cost + change} pennies and buys {item.some(n)} "
        f"at {item.price} pennies each.",
        f"How many pennies does {a.he} have left?",
        (
            DrillStep(f"{a.He} pays {{}} pennies.", f"{n} * {item.price}", cost),
            DrillStep(f"{a.He} has {{}} pennies left.", f"{cost + change} - {cost}", change),
        ),
    )


def one_step(name: str, rng: Random, split: Split, a: Person, b: Person) -> Problem:
    """A problem with one calculation, from row `name` of the table `problems`."""
    templates = {row[0]: row[1:] for row in table_rows("problems")}
    operands, story, question, step, expression = templates[name]
    if operands == "sum":
        x, y = story_operands(rng, split)
        z = x + y
    else:
        x, y = pick(rng, operand_pairs("product", split, 2))
        z = x * y
    words = {"a": a.name, "he": a.he, "He": a.He, "b": b.name, "x": x, "y": y, "z": z}
    words["fruit"] = pick(rng, word_list("fruit"))
    if "{boxes}" in story:
        words["boxes"] = pick(rng, word_list("boxes"))
    calculation = DrillStep(
        step.format(**words), expression.format(**words), y if "{z}" in expression else z
    )
    return Problem(story.format(**words), question.format(**words), (calculation,))


def packed_and_more(rng: Random, split: Split, a: Person, b: Person) -> Problem | None:
    n, each = pick(rng, operand_pairs("product", split, 2))
    fruit, boxes = pick(rng, word_list("fruit")), pick(rng, word_list("boxes"))
    if not partners(split, n * each):
        return None
    more = pick(rng, partners(split, n * each))
    return Problem(
        f"{a.name} has {n} {boxes} with {each} {fruit} in each. {b.name} brings {more} more.",
        f"How many {fruit} are there now?",
        (
            DrillStep(f"The {boxes} hold {{}} {fruit}.", f"{n} * {each}", n * each),
            DrillStep(f"Now there are {{}} {fruit}.", f"{n * each} + {more}", n * each + more),
        ),
    )


def walked(rng: Random, split: Split, a: Person, b: Person) -> Problem | None:
    if not journeys(split):
        return None
    start, via, end, x, y = pick(rng, journeys(split))
    return Problem(
        f"{a.name} walks {x} miles from {start} to {via} and {y} miles from {via} to {end}.",
        f"How many miles does {a.he} walk?",
        (DrillStep(f"{a.He} walks {{}} miles.", f"{x} + {y}", x + y),),
    )


PROBLEMS: tuple[Callable[[Random, Split, Person, Person], Problem | None], ...] = (
    bought,
    bought_with_change,
    partial(one_step, "gathered"),
    partial(one_step, "put together"),
    partial(one_step, "gave away"),
    partial(one_step, "packed"),
    packed_and_more,
    partial(one_step, "shared"),
    partial(one_step, "worked"),
    walked,
)


def draw_problem(rng: Random, split: Split) -> Problem:
    """A random word problem with calculations of the split."""
    while True:
        a, b = pick(rng, people()), pick(rng, people())
        problem = pick(rng, PROBLEMS)(rng, split, a, b) if a != b else None
        if problem:
            return problem


# ------------------------------------------------------------------------------------------------
# Letters


@cache
def spelling_words() -> tuple[str, ...]:
    """The words whose spelling is taught: names and things of the world, and everyday words."""
    nouns = {row[0] for row in table_rows("trades") + table_rows("animals")}
    lists = "women men towns pets things colours products more_words".split()
    return tuple(sorted(nouns.union(*map(word_list, lists))))


def spelled(word: str, between: str = "-") -> str:
    """'l-a-n-t-e-r-n'."""
    return between.join(word)


@cache
def letter_questions(split: Split) -> tuple[tuple[str, str, int], ...]:
    """(word, letter, count) for the letters of each word that the split may count."""
    return tuple(
        (word, letter, word.lower().count(letter))
        for word in spelling_words()
        for letter in sorted(set(word.lower()))
        if split_of("letter", word, letter) == split
    )


def letter_question(rng: Random, split: Split) -> tuple[str, str]:
    """A question about a letter in a word, and its answer."""
    word, letter, count = pick(rng, letter_questions(split))
    return f"How many times is the letter {letter} found in {word}?", str(count)


# ------------------------------------------------------------------------------------------------
# Documents


def sum_text(rng: Random, split: Split) -> str:
    """Calculations: as a column, in words, or as questions."""
    drills = [draw_drill(rng, split) for _ in range(between(rng, 12, 40))]
    style = pick(rng, ("column", "column", "words", "questions"))
    if style == "column":
        return titled(rng, "Sums", "\n".join(d.line for d in drills))
    if style == "words":
        return titled(rng, "Sums in words", " ".join(d.sentence(rng) for d in drills))
    return "\n".join(f"{d.asked(rng)} {d.z}" for d in drills)


def counting(rng: Random, split: Split) -> str:
    """Counting up or down by ones, twos, fives or tens, and comparisons of two numbers."""
    parts = []
    for _ in range(between(rng, 2, 5)):
        by, name = pick(rng, ((1, "ones"), (1, "ones"), (2, "twos"), (5, "fives"), (10, "tens")))
        first = between(rng, 0, 60) // by * by
        numbers = [first + by * i for i in range(between(rng, 6, 16))]
        up = rng.random() < 0.7
        line = ", ".join(map(str, numbers if up else numbers[::-1]))
        less, more = sorted(pick_n(rng, numbers, 2))
        parts.append(
            f"Counting {'' if up else 'backwards '}by {name}: {line}.\n"
            f"{more} is more than {less}. {less} is less than {more}."
        )
    return "\n\n".join(parts)


def problems(rng: Random, split: Split) -> str:
    """Word problems with their solutions in prose."""
    parts = []
    for problem in (draw_problem(rng, split) for _ in range(between(rng, 2, 6))):
        question = f" {problem.question}" if rng.random() < 0.6 else ""
        parts.append(f"{problem.story}{question} {problem.solution}")
    return "\n\n".join(parts)


def spelling(rng: Random, split: Split) -> str:
    """Words letter by letter, their first and last letters, and letter counts."""
    words = [pick(rng, spelling_words()) for _ in range(between(rng, 5, 14))]
    if rng.random() < 0.4:
        return titled(rng, "Spelling", "\n".join(f"{word}: {spelled(word)}" for word in words))
    lines = [
        say(rng, "spellings", word=w, hyphens=spelled(w), commas=spelled(w, ", ")) for w in words
    ]
    for word in words[: between(rng, 0, 4)]:
        lines.append(f"{word} begins with {word[0]} and ends with {word[-1]}.")
        lines.append(f"{word} has {len(word)} letters.")
    for word, letter, count in (pick(rng, letter_questions(split)) for _ in range(4)):
        times = "1 time" if count == 1 else f"{count} times"
        lines.append(f"{word}: {spelled(word)}. The letter {letter} is found {times} in {word}.")
    return titled(rng, "Letters and words", "\n".join(lines))
