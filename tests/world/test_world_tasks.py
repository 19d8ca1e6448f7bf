"""Items of the embedded world: deterministic, held out, correct, not guessable above chance."""

import hashlib
import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from itertools import chain

import pytest

from tasks.world.conversations import (
    FORMS,
    TALK_VERSION,
    conversation,
    pronoun_questions,
    unknown_names,
)
from tasks.world.corpus import documents
from tasks.world.drills import operand_split, spelling_words
from tasks.world.facts import facts, people, split_of, towns
from tasks.world.questions import (
    TASKS_VERSION,
    choice,
    choice_questions,
    fact_questions,
    letter_count,
    problem,
    questions_by_field,
)
from tasks.world.stories import episodes
from tasks.world.suite import SUITE_VERSION, suite, two_steps
from tests.world.test_world import WRONG, calculations

DIGESTS = {(2, 3, 2): "a6ef4dd407098ae8"}  # of conversations, items and suite, by version
HELD_OUT = ("val", "test")
TALKS = 3000
SUITE = {task["name"]: task for task in suite()}
CHOICES = [name for name, task in SUITE.items() if task["kind"] != "language_modeling"]


@cache
def talk(split: str) -> str:
    """The text of the first TALKS conversations of a split."""
    turns = chain(*(conversation(split, i) for i in range(TALKS)))  # type: ignore[arg-type]
    return "\n".join(f"{asked}\n{answer}" for asked, answer in turns)


@cache
def trained_on() -> str:
    """Two shards of training documents and the training conversations."""
    return "\n".join(chain(documents(0, 0, "train"), documents(0, 1, "train"), [talk("train")]))


# ------------------------------------------------------------------------------------------------
# Determinism


def test_item_digests_are_fixed_per_version():
    makers = (conversation, choice, letter_count, problem)
    items = [make(split, i) for make in makers for split in ("train", "val") for i in range(200)]
    found = hashlib.sha256(repr([items, suite()]).encode()).hexdigest()[:16]
    versions = (TALK_VERSION, TASKS_VERSION, SUITE_VERSION)
    assert DIGESTS.get(versions) == found, "items changed: bump a version"


def test_items_are_varied_and_splits_are_disjoint():
    some = [tuple(conversation("train", i)) for i in range(5000)]
    assert some == [tuple(conversation("train", i)) for i in range(5000)]
    assert len(set(some)) > 4500  # lists of days, greetings etc. repeat
    far = {tuple(conversation("train", i)) for i in range(10**6, 10**6 + 5000)}
    assert len(far & set(some)) < 700
    for make in (choice, letter_count, problem):
        train, test = ({make(split, i) for i in range(500)} for split in ("train", "test"))
        assert len(train) > 450 and not train & test


def test_conversations_of_the_test_split_raise():
    with pytest.raises(ValueError, match="'test'"):
        conversation("test", 0)  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------
# Held-out items


def test_training_has_no_held_out_questions():
    asked = set(re.findall(r"(?:[A-Z][^?.!:\n\"]*)[?:]", trained_on()))
    forms = {split: [q.question.text[:-1] for q in fact_questions(split)] for split in HELD_OUT}
    for text in chain(*forms.values()):
        assert f"{text}?" not in asked and f"{text}:" not in asked
    own = [q.question.text for q in fact_questions("train")]
    assert sum(text in asked for text in own) > 0.9 * len(own)  # the pattern finds questions


def test_pronoun_questions_belong_to_their_split():
    for split in ("train", "val"):
        names = [p.name for p in people()] + [t.name for t in towns()]
        known = [known for name in names for known, _, _ in pronoun_questions(split, name)]
        assert known and {f.split for f in known} == {split}


def test_conversations_have_no_held_out_items():
    for e in episodes("test") + episodes("val"):
        assert not any(f"{s} {c}" in talk("train") for s in e.settings for c in e.causes)
    found = calculations(talk("train"))
    assert len(found) > 200 and {operand_split(*c) for c in found} == {"train"}
    guessed = re.findall(r"Who am I\?\nYou are (\w+)", talk("train"))
    assert len(guessed) > 50 and {split_of("riddle", name) for name in guessed} == {"train"}


def test_problems_and_letter_counts_belong_to_their_split():
    for split in ("train", "val", "test"):
        for i in range(300):
            steps = " ".join(step.prose for step in problem(split, i).steps)
            assert {operand_split(*c) for c in calculations(steps)} == {split}
            asked = letter_count(split, i)
            assert {split_of("letter", word, asked.letter) for word in asked.words} == {split}


def test_suite_items_do_not_occur_in_training():
    for task in SUITE.values():
        for item in task["items"] if task["name"] not in ("world_riddles", "world_sums") else ():
            if task["kind"] == "schema":
                prompt = f"{item['context_options'][item['gold']]} {item['continuation']}"
            else:
                prompt = item.get("query") or item["context"]
            assert prompt.removeprefix("Question: ") not in trained_on()
    named = {item["choices"][item["gold"]] for item in SUITE["world_riddles"]["items"]}
    assert {split_of("riddle", name) for name in named} == set(HELD_OUT)
    expressions = " ".join(item["context"] for item in SUITE["world_sums"]["items"])
    assert {operand_split(*c) for c in calculations(expressions)} == set(HELD_OUT)


# ------------------------------------------------------------------------------------------------
# Correctness


def test_calculations_and_spellings_are_correct():
    lines = re.findall(r"(\d+) ([-+*/]) (\d+) = (\d+)", talk("train"))
    assert len(lines) > 100
    for x, symbol, y, z in lines:
        assert eval(f"{x} {symbol} {y}") == int(z)
    spellings = re.findall(r"word (\w+) is spelled ([\w-]+)\.", talk("train"))
    assert spellings and all(letters.replace("-", "") == word for word, letters in spellings)
    paid = re.findall(r"I have (\d+) pennies. Can I buy .*\n(Yes|No)\..*?(\d+)", talk("train"))
    assert paid and all((int(a) >= int(b)) == (reply == "Yes") for a, reply, b in paid)


def test_refusals_are_about_unknown_names():
    strangers = {name for s in ("train", "val", "test") for name in unknown_names("person", s)}
    strangers |= {name for s in ("train", "val", "test") for name in unknown_names("town", s)}
    world = {p.name for p in people()} | {t.name for t in towns()} | {p.pet for p in people()}
    assert len(strangers) == 60 and not strangers & world
    assert not any(
        set(unknown_names("person", "train")) & set(unknown_names("person", s)) for s in HELD_OUT
    )
    names = re.findall(
        r"(?:called|heard of|no town called) (\w+)(?: in Lowen|, as|\.)", talk("train")
    )
    assert Counter(name in strangers for name in names)[True] > 60


def test_letter_counts_are_worked_out_letter_by_letter():
    for i in range(300):
        asked = letter_count("train", i)
        written = asked.worked.replace("-", "")
        assert re.sub(r"\d", "", written).split() == list(asked.words)
        assert re.findall(r"(\w)(\d)", written) == [
            (asked.letter, str(n + 1)) for n in range(asked.count)
        ]
        assert set(asked.words) <= set(spelling_words())


def test_choices_have_exactly_one_possible_answer():
    known = {q.text: q.answer for f in facts() for q in f.questions}
    could: dict[str, set[str]] = {}
    for split in ("train", "val", "test"):
        for asked in fact_questions(split):
            could[asked.question.text] = {asked.question.answer, *asked.rivals}
    for split in ("train", "val", "test"):
        for i in range(len(choice_questions(split))):
            c = choice(split, i)
            assert len(c.asked) == (8 if split == "train" else 1)
            for question, gold in c.asked:
                assert c.options[gold] == known[question]
                assert could[question] & set(c.options) == {known[question]}


def test_training_choices_are_skewed_toward_common_kinds():
    """Without the skew, small models do not learn to look up a letter (see SKEW)."""
    kind = {a.question.text: (a.fact.kind, a.question.field) for a in choice_questions("train")}
    order = list(questions_by_field())
    ranks = [order.index(kind[q]) for i in range(2_000) for q, _ in choice("train", i).asked]
    shares = [sum(r < bound for r in ranks) / len(ranks) for bound in (len(order) // 4, len(order))]
    assert shares[0] > 0.5 and shares[1] == 1.0  # 0.25 without the skew
    assert set(ranks) == set(range(len(order)))


def test_two_step_answers_follow_from_the_facts():
    home = {p.name: p.town for p in people()}
    friend = {p.name: p.friend for p in people()}
    for item in two_steps():
        found = re.search(r"does the best friend of (\w+) live", item["query"])
        if found:
            assert item["choices"][item["gold"]] == home[friend[found[1]]]


# ------------------------------------------------------------------------------------------------
# Guessing


def within(hits: float, n: int, chance: float) -> bool:
    """Whether the hit rate is at most chance plus three standard errors."""
    return hits / n <= chance + 3 * math.sqrt(chance * (1 - chance) / n)


def test_correct_options_are_uniform_over_positions():
    asked = [choice("test", i) for i in range(len(choice_questions("test")))]
    lists = {"choice": ([c.asked[0][1] for c in asked], 4)}
    lists |= {
        name: ([item["gold"] for item in task["items"]], round(1 / task["random_baseline"]))
        for name, task in SUITE.items()
        if "gold" in task["items"][0]
    }
    for name, (golds, options) in lists.items():
        for position in range(options):
            assert within(golds.count(position), len(golds), 1 / options), (name, position)


def test_letter_counts_are_uniform():
    for split in ("train", "val", "test"):
        counts = Counter(letter_count(split, i).count for i in range(400))
        assert set(counts) == {1, 2, 3, 4}
        assert all(within(n, 400, 0.25) for n in counts.values())


@cache
def word_counts() -> Counter[str]:
    return Counter(re.findall(r"[a-z]+|\d+", trained_on().lower()))


@cache
def mean_frequency(option: str) -> float:
    """The mean unigram log count of the words of an option."""
    words = re.findall(r"[a-z]+|\d+", option.lower())
    return sum(math.log(word_counts()[w] + 1) for w in words) / len(words)


@cache
def occurrences(option: str) -> int:
    return trained_on().count(option)


# Omits "least frequent": it beats chance, since held-out facts are never asked in training, but
# models do not use it
GUESSES: dict[str, Callable[[str], float]] = {
    "longest": len,
    "shortest": lambda option: -len(option),
    "most words": lambda option: len(option.split()),
    "commonest words": mean_frequency,
    "rarest words": lambda option: -mean_frequency(option),
    "most frequent": occurrences,
}


@pytest.mark.parametrize("guess", GUESSES)
@pytest.mark.parametrize("name", ["choice", *CHOICES])
def test_guessing_without_the_question_is_at_chance(name, guess):
    items: list[tuple[Sequence[str], int]]
    if name == "choice":
        asked = [choice(s, i) for s in HELD_OUT for i in range(len(choice_questions(s)))]
        items = [(c.options, c.asked[0][1]) for c in asked]
    else:
        field = "context_options" if SUITE[name]["kind"] == "schema" else "choices"
        items = [(item[field], item["gold"]) for item in SUITE[name]["items"]]
    hits = 0.0
    for options, gold in items:
        values = [GUESSES[guess](option) for option in options]
        hits += (values[gold] == max(values)) / values.count(max(values))  # ties count as guesses
    assert within(hits, len(items), 1 / len(items[0][0]))


# ------------------------------------------------------------------------------------------------
# Format

FIELDS = {
    "multiple_choice": {"query", "choices", "gold"},
    "schema": {"context_options", "continuation", "gold"},
    "language_modeling": {"context", "continuation"},
}


@pytest.mark.parametrize("name", SUITE)
def test_suite_tasks_match_the_format_of_their_kind(name):
    task, again = SUITE[name], {t["name"]: t for t in suite()}[name]
    assert task == again
    assert len(task["items"]) >= (40 if name == "world_opposites" else 110)
    assert len({str(item) for item in task["items"]}) == len(task["items"])
    for item in task["items"]:
        assert set(item) == FIELDS[task["kind"]]
        options = item.get("choices") or item.get("context_options")
        if options:
            assert len(set(options)) == len(options) == round(1 / task["random_baseline"])
            assert 0 <= item["gold"] < len(options)
        text = str(item)
        assert text.isascii() and not re.search(r"[<>]|None|  ", text)


@pytest.mark.parametrize("wrong", WRONG)
def test_conversations_are_well_formed(wrong):
    found = []
    for split in ("train", "val"):
        for i in range(TALKS):
            for text in chain(*conversation(split, i)):
                match = re.search(wrong, text)
                found += [(match[0], text)] if match else []
    assert found == []


def test_every_conversation_form_occurs_in_both_splits():
    assert len(FORMS) == 15
    for split, text in (("train", talk("train")), ("val", talk("val"))):
        for sign in (
            "helper",
            "Who am I?",
            "story",
            "Can I buy",
            "cook",
            "spelled",
            "Lowen",
            "And ",
        ):
            assert sign in text, (split, sign)
