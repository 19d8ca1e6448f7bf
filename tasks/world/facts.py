"""
Facts of the embedded world: a small invented land called Lowen, the same for every seed.

    data/ -> `subjects(kind)`, each with its facts -> statements and questions -> `telling`

A fact is one relation of one subject ("the color of Mira's boat"), with several sentences and
questions. `split_of` determines by a hash what training documents may contain: every fact is stated
in all splits, but a training document never asks a question held out for "val" or "test".

The text is in data/: edit a line there to change the world.

    lists.json     name -> words or sentences
    tables.txt     [kind of subject], names of the columns, then one subject per line;
                   other tables: [name], then one row per line
    relations.txt  [kind of subject], then a block per relation: its name, then statements ("-"),
                   first-person statements ("I") and questions with their answers ("?")
    rules.txt      a block per causal rule: its title, settings and question; then, for the bad and
                   the good outcome: causes, effects, the reason, and the answer in one sentence
    itself.txt     a block per question about the assistant: its variants, then answers, one per
                   line

Cells and variants are separated by `|`. In relations, {S} {P} {s} {p} {o} become the name (Mira,
Mira's) or a pronoun (She, Her, she, her, her); {he} and {his} are always pronouns, {name} always
the name. {a_animal} has an article; capitalized fields ({Inn}) begin a sentence. In word problems,
{a} and {b} are people, {0} and {1} goods or towns, {x} and {y} the numbers drawn, and {z} their sum
or product; each step contains one calculation.
"""

import hashlib
import json
import random
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, TypeVar

from nanochat.common import fingerprint, sha256_file

T = TypeVar("T")
Split = Literal["train", "val", "test"]
Paragraphs = Iterable[str]

# After these relations, "she" could mean the friend and "it" the animal, the inn or the festival
AMBIGUOUS = "friend animal pet landmark festival month inn road".split()


# ---- Text data -----------------------------------------------------------------------------------


FOLDER = Path(__file__).parent / "data"
DIGEST = fingerprint([*map(sha256_file, sorted(FOLDER.iterdir()))])  # of all files in data/


def read_data(file: str) -> str:
    """The contents of a file in data/."""
    return (FOLDER / file).read_text(encoding="utf-8")


@cache
def word_list(name: str) -> list[str]:
    """One list of words or sentences."""
    return json.loads(read_data("lists.json"))[name]


def blocks(text: str) -> list[list[str]]:
    """Split a text at blank lines into blocks of lines."""
    return [block.splitlines() for block in re.split(r"\n\s*\n", text.strip())]


@cache
def text_sections(file: str) -> dict[str, str]:
    """[heading] -> the text below it."""
    sections = read_data(file).removeprefix("[").split("\n[")
    return dict(section.split("]\n", 1) for section in sections)


def table_rows(name: str) -> list[list[str]]:
    """The rows of a table."""
    return [line.split(" | ") for line in text_sections("tables.txt")[name].strip().splitlines()]


# ---- Random draws --------------------------------------------------------------------------------


def split_of(*key: str | int) -> Split:
    """
    The split of a combination, chosen by a hash of its key: 80% train, 10% val, 10% test.

    All calculations, combinations and questions of the world use this rule, so the key alone
    determines what is held out.
    """
    digest = hashlib.sha256("|".join(map(str, key)).encode()).digest()
    bucket = int.from_bytes(digest[:4], "big") % 10
    return "val" if bucket == 0 else "test" if bucket == 1 else "train"


def pick(rng: "random.Random | Draw", values: Sequence[T]) -> T:
    """
    A random element.

    Uses only `random()`, the one method that is stable across Python versions.
    """
    return values[int(rng.random() * len(values))]


class Draw:
    """Random choices for one text or item of `split`, determined by the key."""

    def __init__(self, split: Split, *key: str | int):
        self.split = split
        self.random = random.Random("-".join(["Lowen", *map(str, key)])).random

    pick = pick

    def between(self, low: int, high: int) -> int:
        """A random integer from low to high, inclusive."""
        return self.pick(range(low, high + 1))

    def subject(self, kind: str) -> "Subject":
        """A random subject of a kind."""
        return self.pick(subjects(kind))

    def pick_n(self, values: Iterable[T], low: int, high: int | None = None) -> list[T]:
        """
        `low` or, if given, up to `high` different elements in random order; all if there are fewer.
        """
        n = self.between(low, high) if high else low
        return sorted(values, key=lambda _: self.random())[:n]

    def say(self, sentences: str, **fields: Any) -> str:
        """A random sentence from a list with its fields filled in."""
        return self.pick(word_list(sentences)).format(**fields)


def upper_first(text: str) -> str:
    """Capitalize the first letter only."""
    return text[0].upper() + text[1:]


# ---- Subjects and facts --------------------------------------------------------------------------


class Subject(SimpleNamespace):
    """
    A person, town, dish, ... with the columns of its table as attributes.

    A person also has `do`, `does` and `place` of their trade. `a_<field>` has an article, `<Field>`
    a capital. `facts` has a Fact for each relation.
    """

    @property
    def people(self) -> "list[Subject]":
        """The people of a town or trade, with an animal, or whose favorite is a dish."""
        return subjects("person", **{self.kind: self.name})

    @property
    def summaries(self) -> list[str]:
        """Sentences that combine several facts about a person or a town."""
        return [text.format(**vars(self)) for text in word_list(f"{self.kind}_summaries")]

    def tell(self, rng: "Draw", low: int, high: int) -> str:
        """Between `low` and `high` facts in random order, as running text."""
        return telling(rng, rng.pick_n(self.facts.values(), low, high))

    def first_person(self, rng: "Draw", low: int, high: int, without: str = "") -> str:
        """Facts about a person in their own words, except the relation `without`."""
        known = [f for f in self.facts.values() if f.relation != without]
        return " ".join(rng.pick(f.own) for f in rng.pick_n(known, low, high))


@dataclass(eq=False)
class Fact:
    """One relation of one subject as text. The questions are asked only in `split`."""

    subject: Subject
    relation: str
    cluster: str
    """Questions of a cluster are answered alike: those of both directions of a mutual relation."""
    named: list[str]
    """Sentences that name the subject."""
    short: list[str]
    """Sentences with a pronoun, for use within a paragraph. May be empty."""
    own: list[str]
    """Sentences in the first person. May be empty."""
    split: Split
    questions: "list[Question]"


@dataclass(eq=False)
class Question:
    """One question about a fact."""

    fact: Fact
    text: str
    answer: str
    template: str
    """The answer before its fields are filled in."""

    @cached_property
    def possible_answers(self) -> list[str]:
        """The answers for all subjects, each repeated as often as it occurs."""
        return [self.template.format(**vars(s)) for s in subjects(self.fact.subject.kind)]

    @property
    def short(self) -> str:
        """The question with a pronoun, if possible."""
        s = self.fact.subject
        text = self.text.replace(f"{s.name}'s ", f"{s.his} ")
        return text.replace(f"does {s.name} ", f"does {s.he} ")

    @property
    def rivals(self) -> list[str]:
        """The possible answers that are wrong."""
        return [answer for answer in self.possible_answers if answer != self.answer]

    @property
    def fair_rivals(self) -> list[str]:
        """
        The rivals that are answers to questions from the same side of the split (trained or held
        out).

        Answers to training questions occur more often in text, so if the options came from both
        sides, their frequency would reveal the right one.
        """
        fact = self.fact
        return [
            q.answer
            for s in subjects(fact.subject.kind)
            for q in s.facts[fact.relation].questions
            if q.template == self.template and q.answer != self.answer
            if (q.fact.split == "train") == (fact.split == "train")
        ]

    @property
    def full_answers(self) -> list[str]:
        """The fact's sentences that contain the answer and every name in the question."""
        needed = [*re.findall(r"[A-Z][^ ?']*", self.text[1:]), self.answer]
        return [text for text in self.fact.named if all(part in text for part in needed)]

    @property
    def sentences(self) -> list[str]:
        """The sentences that answer the question, or the bare answer if there are none."""
        found = filter(whole_words(self.answer).search, self.full_answers)
        return [*found] or [f"{upper_first(self.answer)}."]


@cache
def whole_words(answer: str) -> re.Pattern[str]:
    """Case-insensitive pattern for an answer at word boundaries, without article or preposition."""
    words = re.escape(re.sub("^(at the|a|an|the|to) ", "", answer))
    return re.compile(rf"(?<!\w){words}(?!\w)", re.IGNORECASE)


@cache
def subjects(kind: str, **wanted: str | int) -> list[Subject]:
    """The subjects of a kind, in the order of their table; only those with the wanted fields."""
    if wanted:
        return [s for s in subjects(kind) if wanted.items() <= vars(s).items()]
    header, *rows = table_rows(kind)
    return [make_subject(kind, dict(zip(header, row, strict=True))) for row in rows]


def make_subject(kind: str, fields: dict[str, str]) -> Subject:
    """Derive the other forms of the fields, and the facts."""
    fields = {"he": "it", "his": "its", "him": "it"} | fields
    if kind == "person":
        [trade] = subjects("trade", name=fields["trade"])
        fields |= {"do": trade.do, "does": trade.does, "place": trade.place}
    vowels = "aeio"  # by spelling, which is right for every word used here
    fields |= {f"a_{k}": f"a{'n' if v[0] in vowels else ''} {v}" for k, v in fields.items()}
    fields |= {upper_first(key): upper_first(value) for key, value in fields.items()}
    numbers = {key: int(value) for key, value in fields.items() if value.isdigit()}
    subject = Subject(**fields | numbers, kind=kind)
    subject.facts = {
        relation: make_fact(subject, relation, lines)
        for relation, *lines in blocks(text_sections("relations.txt")[kind])
    }
    return subject


def make_fact(s: Subject, relation: str, lines: Sequence[str]) -> Fact:
    """Fill in one relation block for one subject."""

    def fill(mark: str, **names: Any) -> list[str]:
        """The lines with a mark."""
        fields = vars(s) | names
        return [line[2:].format(**fields) for line in lines if line[0] == mark]

    named = fill("-", **dict.fromkeys("Sso", s.name), **dict.fromkeys("Pp", f"{s.name}'s"))
    pronouns = fill("-", S=s.He, s=s.he, o=s.him, P=s.His, p=s.his)
    short = [text for text in pronouns if text not in named]
    # Friends and opposites are mutual: both directions share one key
    names = [s.name, getattr(s, relation)] if relation in ("friend", "opposite") else [s.name]
    key = (s.kind, relation, *sorted(names))
    split = split_of("question", *key)
    fact = Fact(s, relation, " ".join(key), named, short, fill("I"), split, [])
    templates = [line.split(" | ")[-1] for line in lines if line[0] == "?"]
    for line, template in zip(fill("?"), templates, strict=True):
        question, answer = line.split(" | ")
        fact.questions.append(Question(fact, question, answer, template))
    return fact


@cache
def facts() -> list[Fact]:
    """All facts about Lowen."""
    return [
        fact
        for kind in text_sections("relations.txt")
        for subject in subjects(kind)
        for fact in subject.facts.values()
    ]


@cache
def askable(split: Split) -> list[Fact]:
    """The facts that a split may ask about."""
    return [f for f in facts() if f.split == split]


# ---- Facts as running text -----------------------------------------------------------------------


def state(rng: Draw, known: Iterable[Fact]) -> str:
    """Facts in sentences that name their subjects."""
    return " ".join(rng.pick(f.named) for f in known)


def telling(rng: Draw, known: Iterable[Fact]) -> str:
    """Facts about one subject as text: the name first, then mostly pronouns if unambiguous."""
    sentences = []
    clear = False
    for f in known:
        short = f.short if clear and rng.random() < 0.75 else []
        sentences.append(rng.pick(short or f.named))
        clear = f.relation not in AMBIGUOUS
    return " ".join(sentences)


def titled(rng: Draw, title: str, *paragraphs: str) -> Paragraphs:
    """The paragraphs, with a title half of the time. Empty ones are left out of the text."""
    return [title if rng.random() < 0.5 else "", *paragraphs]
