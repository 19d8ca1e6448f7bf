"""The embedded world: text that is the same everywhere, correct, well formed and held out."""

import hashlib
import os
import re
import subprocess
import sys
from collections import Counter, defaultdict
from functools import cache
from itertools import chain, islice

import pytest

from nanochat.common import REPOSITORY
from tasks.world.conversations import TALK_VERSION, conversation
from tasks.world.corpus import DOCUMENTS_PER_SHARD, WORLD_VERSION, documents
from tasks.world.drills import OPERANDS, calculation, operand_split
from tasks.world.facts import facts, split_of, subjects
from tasks.world.stories import episodes
from tasks.world.suite import SUITE_VERSION, suite
from tasks.world.task import TASKS_VERSION, WorldChoice, WorldFacts, WorldProblems, WorldSpelling
from tasks.world.words import word_list

SPLITS = ("train", "val", "test")
SCORED = (WorldFacts, WorldChoice, WorldProblems, WorldSpelling)
TALKS = 3000
VERSIONS = (WORLD_VERSION, TALK_VERSION, TASKS_VERSION, SUITE_VERSION)
DIGESTS = {(2, 2, 3, 2): "f038492619c117a8"}
SCANNERS = [  # kind of operands, how a calculation with x and y is written, its operands
    ("sum", r"(?<!product of )\b(\d+)(?: [+] | plus | and )(\d+)", lambda x, y: (x, y)),
    ("sum", r"\b(\d+)(?: - | minus | less )(\d+)", lambda x, y: (x - y, y)),
    ("sum", r"Take (\d+) from (\d+)", lambda x, y: (y - x, x)),
    ("product", r"\b(\d+)(?: [*] | times )(\d+)", lambda x, y: (x, y)),
    ("product", r"product of (\d+) and (\d+)", lambda x, y: (x, y)),
    ("product", r"\b(\d+)(?: / | divided by | shared by )(\d+)", lambda x, y: (x // y, y)),
]


@cache
def texts(split) -> tuple[str, ...]:
    """Two shards of documents and some conversations."""
    talks = ("\n".join(chain(*conversation(split, i))) for i in range(TALKS))
    return (*documents(0, 0, split), *documents(0, 1, split), *talks)


@cache
def text(split) -> str:
    return "\n=====\n".join(texts(split))


def digest() -> str:
    """Digest of the text and of items of all kinds."""
    items = [[*islice(kind(split), 200)] for kind in SCORED for split in SPLITS]
    found = [text("train"), text("val"), items, suite()]
    return hashlib.sha256(repr(found).encode()).hexdigest()[:16]


def calculations(where: str) -> set[tuple]:
    """("sum" or "product", a, b) of each calculation in a text, inverses included."""
    return {
        (kind, *operands(int(x), int(y)))
        for kind, pattern, operands in SCANNERS
        for x, y in re.findall(pattern, where)
    }


# ------------------------------------------------------------------------------------------------
# Determinism


def test_text_and_items_are_fixed_per_version_in_any_process():
    found = digest()
    assert DIGESTS.get(VERSIONS) == found, "the text changed: bump a version"
    code = "from tests.world.test_world import digest; print(digest())"
    env = {**os.environ, "PYTHONHASHSEED": "7"}
    again = subprocess.check_output([sys.executable, "-c", code], env=env, cwd=REPOSITORY)
    assert again.decode().strip() == found


def test_seed_shard_and_split_change_the_documents():
    first = set(documents(0, 0, "train"))
    assert len(first) > 0.99 * DOCUMENTS_PER_SHARD
    for other in documents(1, 0, "train"), documents(0, 1, "train"), documents(0, 0, "val"):
        assert len(first & set(other)) < 0.02 * DOCUMENTS_PER_SHARD


# ------------------------------------------------------------------------------------------------
# Held-out items


def test_scanners_match_every_form_of_calculation():
    for symbol, operands in OPERANDS.items():
        written = calculation(symbol, 7, 13)
        x, _, y, _, z = written.split()
        forms = [form for how in ("told", "asked") for form in word_list(f"{symbol} {how}")]
        for form in [written, *(form.format(x=x, y=y, z=z) for form in forms)]:
            assert {(operands, 7, 13), (operands, 13, 7)} & calculations(form), form


@pytest.mark.parametrize("split", ["train", "val"])
def test_R27_text_has_no_item_of_another_split(split):
    where = text(split)
    found = calculations(where)
    assert len(found) > 100 and {operand_split(*c) for c in found} == {split}
    for other in SPLITS:
        some = episodes(other)[::9]
        found_in = [any(f"{a} {b}" in where for a in e.settings for b in e.causes) for e in some]
        assert sum(found_in) > 0.3 * len(some) if other == split else not any(found_in)
    asked = set(re.findall(r'(?:^|\n|[":.] ?)((?:[A-Z][^\n".:?]*)\?)', where))
    questions = {q.text: f.split for f in facts() for q in f.questions}
    own = [question for question in questions if questions[question] == split]
    assert {questions[q] for q in asked & questions.keys()} == {split}
    assert len(asked & set(own)) > 0.8 * len(own)
    answers = re.findall(r"Who am I\?\n(?:I am|You are) (\w+)", where)
    assert answers and {split_of("riddle", name) for name in answers} == {split}
    letters = re.findall(r"letter (\w) is found (?:\d+ times? )?in (\w+)", where)
    assert letters and {split_of("letter", word, letter) for letter, word in letters} == {split}


# ------------------------------------------------------------------------------------------------
# Content


def test_training_documents_state_every_fact():
    sentences = Counter(re.split(r'(?<=[.?!"])\s+|\n(?:- )?|: ', text("train")))
    counts = [sum(sentences[s] for s in {*f.named, *f.own, *f.short}) for f in facts()]
    assert min(counts) >= 6  # in two of 16 shards


def test_every_question_has_one_answer_and_several_choices():
    answers = defaultdict(set)
    for fact in facts():
        for question in fact.questions:
            answers[question.text].add(question.answer)
            choices = question.possible_answers
            assert question.answer in choices and len(set(choices)) >= 2
    assert {len(found) for found in answers.values()} == {1}


def test_world_is_consistent_and_answers_are_uniform():
    people, towns = {p.name: p for p in subjects("person")}, subjects("town")
    assert all(len({p.trade for p in town.people}) == 4 for town in towns)
    assert all(people[p.friend].friend == name != p.friend for name, p in people.items())
    for field in ("town", "trade", "dish", "thing", "colour", "animal", "pastime"):
        counts = Counter(getattr(p, field) for p in people.values())
        assert len(set(counts.values())) == 1, field
    names = [*people, *(p.pet for p in people.values()), *(town.name for town in towns)]
    assert len(set(names)) == len(names)
    found = [*chain(*map(episodes, SPLITS))]
    assert len({e.title for e in found}) == 24 == len({(e.title, e.good) for e in found}) / 2
    assert all(e.answer != e.wrong and not set(e.causes) & set(e.effects) for e in found)


@pytest.mark.parametrize("split", ["train", "val"])
def test_calculations_and_spellings_are_correct(split):
    lines = re.findall(r"\d+ [-+*/] \d+ = \d+", text(split))
    assert len(lines) > 500 and all(eval(line.replace("=", "==")) for line in lines)
    spelled = re.findall(r"word (\w+) is spelled ([\w-]+)\.", text(split))
    assert spelled and all(letters.replace("-", "") == word for word, letters in spelled)
    counted = re.findall(r"letter (\w) is found (\d+) times? in (\w+)", text(split))
    assert counted and all(w.lower().count(letter) == int(n) for letter, n, w in counted)
    less = re.findall(r"(\d+) is less than (\d+)", text(split))
    assert less and all(int(a) < int(b) for a, b in less)
    paid = re.findall(r"I have (\d+) pennies. Can I buy .*\n(Yes|No)\..*?(\d+)", text(split))
    assert paid and all((int(a) >= int(b)) == (reply == "Yes") for a, reply, b in paid)


WRONG = (
    r"  |\n\n\n|\t|[{}<>]|None",  # spaces, unfilled templates
    r"\b[Aa] (?:[aeio]\w{3,}|awl|axe|oar|owl|egg|ant)\b|\b[Aa]n (?!hour)[^aeio]",  # an apple
    r"\b(\w+) \1\b",
    r"[.?!] [a-z]| [.,;:?!]|[.,][.,]|(?<!Yours),$",
    r"[^\x00-\x7f]",
    r"\b1 (?:pennies|miles|letters)\b|\b(?:[02-9]|\d\d+) (?:time|penny|mile|day)\b",
)


@pytest.mark.parametrize("split", ["train", "val"])
@pytest.mark.parametrize("wrong", WRONG)
def test_text_is_well_formed(split, wrong):
    prose = (each.replace(",\n", "\n") for each in texts(split))  # the closing of a letter
    assert [(m[0], each) for each in prose if (m := re.search(wrong, each))] == []
