"""
Exercises of the embedded world, which need computation instead of memory.

    operands of a split -> calculations, word problems with their steps -> documents
    a word -> its letters -> documents

Subtraction undoes addition and division undoes multiplication, so they share operands: if 7 + 5 is
held out, so is 12 - 5. Letter counts are held out per word and letter; spellings occur in every
split.
"""

import re
from functools import cache
from itertools import pairwise
from string import ascii_lowercase
from typing import NamedTuple

from tasks.world.facts import (
    Draw,
    Paragraphs,
    Split,
    split_of,
    subjects,
    table_rows,
    titled,
    word_list,
)

OPERANDS = {"+": "sum", "-": "sum", "*": "product", "/": "product"}  # inverses share them
SUM_LIMIT = 20  # largest operand of addition drills
PRODUCT_LIMIT = 12  # the same for multiplication
STORY_LIMIT = 150  # largest operand of a sum in a word problem; more than any product
SUMS = ("sum", "journey")  # the kinds of word problems that add x and y; the others multiply
CALCULATION = re.compile(r"(\d+ [-+*/] \d+) = (\d+)")


class Problem(NamedTuple):
    """A word problem. The last result is the answer."""

    story: str
    question: str
    steps: list[str]
    """Sentences with one CALCULATION each."""


# ---- Numbers, by split ---------------------------------------------------------------------------


def operand_split(operands: str, a: int, b: int) -> Split:
    """The split for adding (or multiplying) a and b in either order, and for the inverse."""
    return split_of(operands, min(a, b), max(a, b))


@cache
def operand_pairs(operands: str, split: Split, low: int = 1) -> list[tuple[int, int]]:
    """All pairs of a split for "sum" or "product", from `low` up to the limit."""
    limit = SUM_LIMIT if operands == "sum" else PRODUCT_LIMIT
    numbers = range(low, limit + 1)
    return [(a, b) for a in numbers for b in numbers if operand_split(operands, a, b) == split]


@cache
def partners(split: Split, a: int) -> list[int]:
    """The numbers that a split may add to `a`; `a` may exceed the limit."""
    return [b for b in range(2, SUM_LIMIT + 1) if operand_split("sum", a, b) == split]


def calculation(symbol: str, a: int, b: int) -> str:
    """'7 + 5 = 12', '12 - 7 = 5', '7 * 5 = 35' or '35 / 7 = 5' for 7 and 5."""
    c = a + b if OPERANDS[symbol] == "sum" else a * b
    return f"{a} {symbol} {b} = {c}" if symbol in "+*" else f"{c} {symbol} {a} = {b}"


def draw_drill(rng: Draw) -> str:
    """A random calculation of a split."""
    symbol = rng.pick([*OPERANDS])
    return calculation(symbol, *rng.pick(operand_pairs(OPERANDS[symbol], rng.split)))


def phrase(rng: Draw, drill: str, how: str) -> str:
    """A calculation in words: "told" with the result, or "asked" without."""
    x, symbol, y, _, z = drill.split()
    return rng.say(f"{symbol} {how}", x=x, y=y, z=z)


# ---- Word problems -------------------------------------------------------------------------------


def story_operands(rng: Draw) -> tuple[int, int]:
    """
    Two numbers that a split may add; in half of the cases one of them is large.

    Only pairs are held out, so every number occurs in training.
    """
    if rng.random() < 0.5:
        return rng.pick(operand_pairs("sum", rng.split, 2))
    large = rng.between(SUM_LIMIT + 1, STORY_LIMIT)
    if not partners(rng.split, large):
        return story_operands(rng)
    small = rng.pick(partners(rng.split, large))
    return (large, small) if rng.random() < 0.5 else (small, large)


@cache
def problem_numbers(kind: str, split: Split) -> list[tuple]:
    """Numbers x and y of a split for a kind of word problem, with the goods or towns."""
    counts, towns = range(2, PRODUCT_LIMIT + 1), subjects("town")
    found = {
        "sum": operand_pairs("sum", split, 2),
        "product": operand_pairs("product", split, 2),
        "purchase": [(x, g.price, g) for g in subjects("goods") for x in counts],
        "journey": [(a.miles, b.miles, a, b) for a, b in pairwise([*towns, towns[0]])],
    }[kind]
    operands = "sum" if kind in SUMS else "product"
    return [numbers for numbers in found if operand_split(operands, *numbers[:2]) == split]


def draw_problem(rng: Draw) -> Problem:
    """A random word problem with calculations of the split."""
    while True:
        a, b = rng.subject("person"), rng.subject("person")
        if a is b:
            continue
        kind, *texts = rng.pick(table_rows("problems"))
        known = problem_numbers(kind, rng.split)
        if not known:
            continue
        x, y, *things = story_operands(rng) if kind == "sum" else rng.pick(known)
        words = {"a": a, "b": b, "x": x, "y": y, "z": x + y if kind in SUMS else x * y}
        for name in ("fruit", "boxes"):
            if f"{{{name}}}" in texts[0]:
                words[name] = rng.pick(word_list(name))
        if "{more}" in texts[-1]:
            known = partners(rng.split, words["z"])
            if not known:
                continue
            words["more"] = rng.pick(known)
            words["total"] = words["z"] + words["more"]
        story, question, *steps = (text.format(*things, **words) for text in texts)
        return Problem(story, question, steps)


# ---- Letters -------------------------------------------------------------------------------------


@cache
def spelling_words() -> list[str]:
    """The words whose spelling is taught: names and things of the world, and everyday words."""
    fields = table_rows("spelling_words")
    found = {getattr(s, field) for kind, field in fields for s in subjects(kind)}
    return sorted(found.union(word_list("more_words")))


def spelled(word: str) -> str:
    """'l-a-n-t-e-r-n'."""
    return "-".join(word)


@cache
def letter_questions(split: Split, inside: bool = True) -> list[tuple[str, str, int]]:
    """
    (word, letter, count) for the letters of each word that the split may count; for the letters
    that the word lacks if `inside` is False.
    """
    return [
        (word, letter, word.lower().count(letter))
        for word in spelling_words()
        for letter in ascii_lowercase
        if (letter in word.lower()) == inside and split_of("letter", word, letter) == split
    ]


# ---- Documents -----------------------------------------------------------------------------------


def sum_text(rng: Draw) -> Paragraphs:
    """Calculations: as a column, in words, or as questions."""
    drills = [draw_drill(rng) for _ in range(rng.between(12, 40))]
    style = rng.pick(("column", "column", "words", "questions"))
    if style == "column":
        return titled(rng, "Sums", "\n".join(drills))
    if style == "words":
        return titled(rng, "Sums in words", " ".join(phrase(rng, d, "told") for d in drills))
    return ["\n".join(f"{phrase(rng, d, 'asked')} {d.split()[-1]}" for d in drills)]


def counting(rng: Draw) -> Paragraphs:
    """Counting up or down by ones, twos, fives or tens, and comparisons of two numbers."""
    for _ in range(rng.between(2, 5)):
        step, name = rng.pick(table_rows("counting"))
        by = int(step)
        first = rng.between(0, 60) // by * by
        numbers = [first + by * i for i in range(rng.between(6, 16))]
        up = rng.random() < 0.7
        line = ", ".join(map(str, numbers if up else numbers[::-1]))
        less, more = sorted(rng.pick_n(numbers, 2))
        compared = f"{more} is more than {less}. {less} is less than {more}."
        yield f"Counting {'' if up else 'backwards '}by {name}: {line}.\n{compared}"


def problems(rng: Draw) -> Paragraphs:
    """Word problems with their solutions in prose."""
    for _ in range(rng.between(2, 6)):
        story, question, steps = draw_problem(rng)
        asked = [question] if rng.random() < 0.6 else []
        yield " ".join([story, *asked, *steps])


def spelling(rng: Draw) -> Paragraphs:
    """Words letter by letter, their first and last letters, and letter counts."""
    words = [rng.pick(spelling_words()) for _ in range(rng.between(5, 14))]
    if rng.random() < 0.4:
        return titled(rng, "Spelling", "\n".join(f"{word}: {spelled(word)}" for word in words))
    lines = [rng.say("spellings", word=w, hyphens=spelled(w), commas=", ".join(w)) for w in words]
    for word in words[: rng.between(0, 4)]:
        lines += [f"{word} begins with {word[0]} and ends with {word[-1]}."]
        lines += [f"{word} has {len(word)} letters."]
    for _ in range(4):
        word, letter, count = rng.pick(letter_questions(rng.split))
        times = "1 time" if count == 1 else f"{count} times"
        lines.append(f"{word}: {spelled(word)}. The letter {letter} is found {times} in {word}.")
    return titled(rng, "Letters and words", "\n".join(lines))
