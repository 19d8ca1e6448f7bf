"""The embedded world: deterministic, correct, well-formed text; no held-out items in train."""

import hashlib
import itertools
import os
import random
import re
import subprocess
import sys
from collections import Counter, defaultdict
from functools import cache

import pytest

from nanochat.common import REPOSITORY
from tasks.world import corpus
from tasks.world.corpus import DOCUMENTS_PER_SHARD, WORLD_VERSION, documents
from tasks.world.drills import (
    OPERATIONS,
    PROBLEMS,
    Operands,
    draw_drill,
    draw_problem,
    letter_questions,
    operand_pairs,
    operand_split,
    spelling_words,
)
from tasks.world.facts import facts, people, person, split_of, towns
from tasks.world.questions import field_values
from tasks.world.stories import episode_split, episodes
from tasks.world.words import word_list

DIGESTS = {2: "4a23b58808d1ae8b b81cbc6151a4cafa"}  # by version: first shards of train and val


@cache
def shard(split: str, number: int = 0) -> tuple[str, ...]:
    return tuple(documents(0, number, split))  # pyright: ignore[reportArgumentType]


@cache
def text(split: str) -> str:
    """Two shards of a split; no document contains the separator line."""
    return "\n=====\n".join(shard(split, 0) + shard(split, 1))


@cache
def train_sentences() -> Counter[str]:
    return Counter(re.split(r'(?<=[.?!"])\s+|\n(?:- )?|: ', text("train")))


def digest(split: str) -> str:
    return hashlib.sha256("\0".join(shard(split)).encode()).hexdigest()[:16]


# ------------------------------------------------------------------------------------------------
# Determinism


def test_documents_depend_only_on_their_arguments():
    state = random.getstate()
    first, second = documents(3, 7, "train"), documents(3, 7, "train")
    other = documents(3, 8, "train")
    mixed = [(a, b, c) for a, b, c in zip(first, second, other, strict=True)]  # interleaved
    assert all(a == b for a, b, _ in mixed)
    assert len(mixed) == DOCUMENTS_PER_SHARD
    assert random.getstate() == state


@pytest.mark.parametrize("other", [(1, 0, "train"), (0, 1, "train"), (0, 0, "val")])
def test_seed_shard_and_split_change_the_documents(other):
    common = set(shard("train")) & set(documents(*other))
    assert len(common) < 0.02 * DOCUMENTS_PER_SHARD


def test_text_digests_are_fixed_per_version():
    found = f"{digest('train')} {digest('val')}"
    assert DIGESTS.get(WORLD_VERSION) == found, "the text changed: bump WORLD_VERSION"


def test_text_does_not_depend_on_the_hash_seed():
    code = "from tests.world.test_world import digest; print(digest('val'))"
    env = {**os.environ, "PYTHONHASHSEED": "7"}
    ran = subprocess.run(
        [sys.executable, "-c", code], env=env, cwd=REPOSITORY, capture_output=True, text=True
    )
    assert ran.stdout.strip() == digest("val"), ran.stderr


def test_generator_uses_only_the_stable_random_method(monkeypatch):
    class OnlyRandom(random.Random):
        def getrandbits(self, k):
            raise AssertionError("choice, shuffle and sample are not stable across Python versions")

    monkeypatch.setattr(corpus, "Random", OnlyRandom)
    assert tuple(itertools.islice(documents(0, 0, "train"), 200)) == shard("train")[:200]


def test_documents_of_the_test_split_raise():
    with pytest.raises(ValueError, match="'test'"):
        documents(0, 0, "test")  # pyright: ignore[reportArgumentType]


# ------------------------------------------------------------------------------------------------
# Held-out items

SCANNERS = {
    "sum": (
        r"(\d+) [+] (\d+)",
        r"(\d+) plus (\d+)",
        r"(\d+) and (\d+) make",
        r"do (\d+) and (\d+) make",
        r"sum of (\d+) and (\d+)",
    ),
    "difference": (
        r"(\d+) - (\d+)",
        r"(\d+) minus (\d+)",
        r"(\d+) less (\d+)",
        r"Take (?P<y>\d+) from (?P<x>\d+)",
    ),
    "product": (r"(\d+) [*] (\d+)", r"(\d+) times (\d+)", r"product of (\d+) and (\d+)"),
    "quotient": (r"(\d+) / (\d+)", r"(\d+) divided by (\d+)", r"(\d+) shared by (\d+)"),
}


def calculations(where: str) -> set[tuple[Operands, int, int]]:
    """("sum" or "product", a, b) per calculation in a text, inverses included."""
    found = set()
    for kind, scanners in SCANNERS.items():
        for scanner in scanners:
            for match in re.finditer(scanner, where):
                named = match.groupdict()
                x, y = int(named.get("x", match[1])), int(named.get("y", match[2]))
                if kind in ("sum", "product"):
                    found.add((kind, x, y))
                elif kind == "difference":
                    found.add(("sum", x - y, y))
                elif x % y == 0:
                    found.add(("product", x // y, y))
    return found


def test_scanners_match_every_form_of_calculation():
    for operation in OPERATIONS:
        x, y, z = (91, 7, 13) if operation.undoes else (7, 13, 91)
        want = (operation.operands, 13 if operation.undoes else 7, 7 if operation.undoes else 13)
        if operation.operands == "sum":
            x, y, z = (91, 7, 84) if operation.undoes else (7, 13, 20)
            want = ("sum", 84, 7) if operation.undoes else ("sum", 7, 13)
        forms = [
            *word_list(f"{operation.symbol} told"),
            *word_list(f"{operation.symbol} asked"),
            f"{{x}} {operation.symbol} {{y}} = {{z}}",
        ]
        for form in forms:
            assert want in calculations(form.format(x=x, y=y, z=z)), form


@pytest.mark.parametrize("split", ["train", "val"])
def test_documents_have_no_calculation_of_another_split(split):
    found = calculations(text(split))
    assert len(found) > (450 if split == "train" else 80)
    assert [c for c in found if operand_split(*c) != split] == []


def test_swapped_and_inverse_calculations_share_a_split():
    for operands, limit in (("sum", 20), ("product", 12)):
        by_split = {s: operand_pairs(operands, s) for s in ("train", "val", "test")}
        assert sum(map(len, by_split.values())) == limit * limit
        for pairs in by_split.values():
            assert pairs and all((b, a) in pairs for a, b in pairs)
    rng = random.Random(0)
    for _ in range(500):
        d = draw_drill(rng, "test")
        a, b = (d.y, d.z) if d.operation.undoes else (d.x, d.y)
        assert operand_split(d.operation.operands, a, b) == "test"


@pytest.mark.parametrize("split", ["train", "val"])
def test_documents_have_no_stories_from_other_splits(split):
    def occurs(e, where):
        return any(f"{s} {c}" in where for s in e.settings for c in e.causes)

    assert all(e.hero.name in s for e in episodes("test") for s in e.settings)
    for other in {"train", "val", "test"} - {split}:
        foreign = episodes(other)[:: 7 if other == "train" else 1]
        assert [e.title for e in foreign if occurs(e, text(split))] == []
    known = [e for e in episodes(split)[::10] if occurs(e, text(split))]
    assert len(known) > 0.3 * len(episodes(split)[::10])


@pytest.mark.parametrize("split", ["train", "val"])
def test_documents_have_no_questions_from_other_splits(split):
    asked = set(re.findall(r'(?:^|\n|[":.] ?)((?:[A-Z][^\n".:?]*)\?)', text(split)))
    own = {q.text for f in facts() if f.split == split for q in f.questions}
    foreign = {q.text for f in facts() if f.split != split for q in f.questions}
    assert asked & foreign == set()
    assert len(asked & own) > (0.8 if split == "train" else 0.95) * len(own)
    answers = re.findall(r"Who am I\?\nI am (\w+)", text(split))
    assert answers and {split_of("riddle", name) for name in answers} == {split}
    letters = re.findall(r"letter (\w) is found (?:\d+ times? )?in (\w+)", text(split))
    assert letters and {split_of("letter", word, letter) for letter, word in letters} == {split}


def test_held_out_splits_have_enough_questions():
    for split in ("val", "test"):
        kinds = Counter(f.kind for f in facts() if f.split == split)
        assert kinds["person"] > 25 and kinds["town"] > 4 and kinds["everyday"] > 2
        assert len(letter_questions(split)) > 50
    shares = Counter(f.split for f in facts())
    assert 0.75 < shares["train"] / len(facts()) < 0.85


# ------------------------------------------------------------------------------------------------
# Content


def test_training_documents_state_every_fact():
    least = {"train": 10**9, "val": 10**9, "test": 10**9}
    for fact in facts():
        count = sum(train_sentences()[s] for s in {*fact.named, *fact.own, *fact.short})
        least[fact.split] = min(least[fact.split], count)
    assert min(least.values()) >= 6, least  # in two of 16 shards


def test_every_question_has_one_answer_and_several_choices():
    answers = defaultdict(set)
    for fact in facts():
        for question in fact.questions:
            answers[question.text].add(question.answer)
            choices = field_values(fact.kind, question.field)
            assert question.answer in choices and len(set(choices)) >= 2
    assert [text for text, found in answers.items() if len(found) != 1] == []


def test_world_is_consistent_and_answers_are_uniform():
    for town in towns():
        assert len({p.trade for p in people() if p.town == town.name}) == 4
    for p in people():
        assert person(p.friend).friend == p.name != p.friend
    for field in ("town", "trade", "food", "thing", "colour", "animal", "pastime"):
        assert len(set(Counter(getattr(p, field) for p in people()).values())) == 1, field
    assert len({(p.thing, p.colour) for p in people()}) == len(people())
    names = [p.name for p in people()] + [p.pet for p in people()] + [t.name for t in towns()]
    assert len(set(names)) == len(names)


def test_every_rule_has_two_different_outcomes():
    ways = defaultdict(set)
    for e in episodes("train") + episodes("val") + episodes("test"):
        ways[e.title].add(e.good)
        assert e.answer != e.wrong
        assert not set(e.causes) & set(e.effects)
        assert len(e.settings) == len(e.causes) == len(e.effects) == 2
    assert len(ways) == 24 and all(found == {True, False} for found in ways.values())
    assert episode_split("The Hay", True, "Mira") == split_of("story", "The Hay", 1, "Mira")


def test_calculations_in_documents_are_correct():
    where = text("train") + text("val")
    lines = re.findall(r"(\d+) ([-+*/]) (\d+) = (\d+)", where)
    assert len(lines) > 3000
    for x, symbol, y, z in lines:
        compute = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__, "/": int.__floordiv__}
        assert compute[symbol](int(x), int(y)) == int(z) >= 0
        assert symbol != "/" or int(x) % int(y) == 0
    for word, letters in re.findall(r"word (\w+) is spelled ([\w-]+)\.", where):
        assert letters.replace("-", "") == word
    for letter, times, word in re.findall(r"letter (\w) is found (\d+) times? in (\w+)", where):
        assert word.lower().count(letter) == int(times)
    for less, more in re.findall(r"(\d+) is less than (\d+)", where):
        assert int(less) < int(more)


def test_word_problem_steps_lead_to_the_answer():
    rng = random.Random(0)
    for split in ("train", "val", "test"):
        for _ in range(400):
            problem = draw_problem(rng, split)
            given = set(re.findall(r"\d+", f"{problem.story} {problem.question}"))
            for step in problem.steps:
                x, symbol, y = step.expression.split()
                assert {x, y} <= given, problem  # from the story or an earlier step
                assert step.result == eval(step.expression)
                given.add(str(step.result))
            assert problem.answer == problem.steps[-1].result
            for c in calculations(problem.solution):
                assert operand_split(*c) == split
    assert len(PROBLEMS) == 10


# ------------------------------------------------------------------------------------------------
# Well-formed text

WRONG = (
    r"  |\n\n\n|\t",  # spaces
    r"[{}<>]|None",  # unfilled templates
    r"\b[Aa] (?:[aeio]\w{3,}|awl|axe|oar|owl|egg|ant)\b",  # an apple
    r"\b[Aa]n (?!hour)[^aeio]",
    r"\b(\w+) \1\b",
    r"[.?!] [a-z]",  # a sentence begins with a capital
    r" [.,;:?!]|[.,][.,]|,$",
    r"[^\x00-\x7f]",
    r"\b1 (?:pennies|miles|letters)\b|\b(?:[02-9]|\d\d+) (?:time|penny|mile|day)\b",
)


@pytest.mark.parametrize("split", ["train", "val"])
@pytest.mark.parametrize("wrong", WRONG)
def test_documents_are_well_formed(split, wrong):
    prose = [d.replace(",\n", "\n") for d in shard(split)]  # the closing of a letter
    found = [(m[0], d) for d in prose for m in [re.search(wrong, d)] if m]
    assert found == []


@pytest.mark.parametrize("split", ["train", "val"])
def test_document_lengths_vary_and_vocabulary_is_small(split):
    lengths = sorted(map(len, shard(split)))
    assert 40 <= lengths[0] and lengths[-1] <= 1500
    assert 400 < sum(lengths) / len(lengths) < 700
    assert lengths[len(lengths) // 10] < 300 and lengths[-len(lengths) // 10] > 700
    assert 1_000_000 < sum(lengths) < 2_000_000
    words = set(re.findall(r"[A-Za-z]+", text(split)))
    assert 1000 < len(words) < 3000
    assert len(set(shard(split))) > 0.99 * DOCUMENTS_PER_SHARD


def test_training_documents_spell_the_spelling_words():
    spelled = set(re.findall(r"\b([A-Za-z]+): \1?[A-Za-z]-", text("train")))
    missing = [word for word in spelling_words() if word not in spelled]
    assert len(spelling_words()) > 250 and len(missing) < 5, missing


def test_every_document_form_works_in_both_splits():
    rng = random.Random(1)
    for form in corpus.FORMS:
        for split in ("train", "val"):
            assert len(form(rng, split)) > 40
