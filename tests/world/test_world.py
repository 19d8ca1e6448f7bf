"""The embedded world: text that is the same everywhere, correct, well formed and held out."""

import hashlib
import re
from collections import Counter
from functools import cache
from itertools import chain, islice

import pytest

from nanochat.sandbox import calculate
from tasks.base import Conversation, answer_text, final_value
from tasks.world.conversations import TALK_VERSION, conversation
from tasks.world.corpus import WORLD_VERSION, documents
from tasks.world.drills import OPERANDS, calculation, operand_split
from tasks.world.facts import askable, facts, split_of, whole_words, word_list
from tasks.world.stories import episodes
from tasks.world.suite import SUITE_VERSION, suite
from tasks.world.task import (
    TASKS_VERSION,
    WorldChoice,
    WorldFacts,
    WorldProblems,
    WorldSpelling,
    fact_questions,
)

SPLITS = ("train", "val", "test")
SCORED = (WorldFacts, WorldChoice, WorldProblems, WorldSpelling)
TALKS = 3000
VERSIONS = (WORLD_VERSION, TALK_VERSION, TASKS_VERSION, SUITE_VERSION)
DIGESTS = {(2, 2, 4, 3): "7783bed0ed726222"}
SCANNERS = [  # kind of operands, how a calculation with x and y is written, its operands
    ("sum", r"(?<!product of )\b(\d+)(?: [+] | plus | and )(\d+)", lambda x, y: (x, y)),
    ("sum", r"\b(\d+)(?: - | minus | less )(\d+)", lambda x, y: (x - y, y)),
    ("sum", r"Take (\d+) from (\d+)", lambda x, y: (y - x, x)),
    ("product", r"\b(\d+)(?: [*] | times )(\d+)", lambda x, y: (x, y)),
    ("product", r"product of (\d+) and (\d+)", lambda x, y: (x, y)),
    ("product", r"\b(\d+)(?: / | divided by | shared by )(\d+)", lambda x, y: (x // y, y)),
]


@cache
def text(split) -> str:
    """Two shards of documents and some conversations."""
    talks = ("\n".join(chain(*conversation(split, i))) for i in range(TALKS))
    return "\n=====\n".join([*documents(0, split), *documents(1, split), *talks])


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


# ---- Determinism ---------------------------------------------------------------------------------


def test_text_and_items_are_fixed_per_version():
    assert DIGESTS.get(VERSIONS) == digest(), "the text changed: bump a version"


# ---- Held-out items ------------------------------------------------------------------------------


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


# ---- Content -------------------------------------------------------------------------------------


SUITE = {task["name"]: task for task in suite()}
CALL = re.compile(r"(\S+ . \S+) = <\|python_start\|>(.*?)<\|python_end\|>"
                  r"<\|output_start\|>(\d+)<\|output_end\|>(\d+)")  # fmt: skip


def written(conversation: Conversation) -> str:
    """The last message as a completion, with special tokens as text."""
    content = conversation[-1]["content"]
    if isinstance(content, str):
        return content
    marks = {"python": "python", "python_output": "output"}
    parts = [(marks.get(part["type"]), part["text"]) for part in content]
    return "".join(f"<|{m}_start|>{said}<|{m}_end|>" if m else said for m, said in parts)


def are_balanced(counts: Counter, kinds: int) -> bool:
    """Whether no value is over three standard errors more frequent than one of `kinds` should."""
    n, chance = counts.total(), 1 / kinds
    return max(counts.values(), default=0) <= n * chance + 3 * (n * chance * (1 - chance)) ** 0.5


# ---- Tasks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("kind", SCORED)
def test_only_the_right_answer_scores(kind, split):
    task, letters = kind(split), Counter()
    for i, asked in enumerate(islice(task, 200)):
        assert task.score(i, written(asked) + "<|assistant_end|>") == 1
        wrong = [""]
        if kind is WorldChoice:
            assert all(f"={letter}\n" in asked[0]["content"] for letter in task.letters(i))
            letters[asked[-1]["content"]] += len(task.letters(i)) == 4
            wrong = set("ABCD") - {asked[-1]["content"]}
        elif kind is not WorldFacts:
            number = final_value(answer_text(asked[-1]))
            wrong = f"#### {number}1", str(number), f"#### {number} #### 0", "#### 0"
        assert not any(task.score(i, each) for each in wrong)
    assert are_balanced(letters, 4)


def test_fact_sentences_score_1_and_rivals_score_0():
    task = WorldFacts("test")
    for i, asked in enumerate(fact_questions("test")):
        right = asked.answer
        for sentence in [*asked.sentences, right, f"It is {right}!"]:
            assert task.score(i, sentence) == 1
        for rival in {r for r in asked.rivals if not whole_words(r).search(asked.text)}:
            assert not task.score(i, f"It is {rival}.")
            assert not task.score(i, f"It is {right} or {rival}.")
        assert not task.score(i, f"It is un{right.split(' ', 1)[-1]}ish.")


def test_questions_about_one_fact_are_one_cluster():
    facts, choice = WorldFacts("test"), WorldChoice("test")
    about = {facts[i][0]["content"]: facts.cluster(i) for i in range(len(facts))}
    assert len(set(about.values())) < len(facts) / 2
    for i in range(len(choice)):
        assert choice.cluster(i) == about[choice.question(i).text]


@pytest.mark.parametrize("split", SPLITS)
def test_R27_problems_are_correct_and_of_their_split(split):
    calls = 0
    for asked, answer in islice(WorldProblems(split), 300):
        said = written([answer])
        given = set(re.findall(r"\d+", asked["content"]))
        used = CALL.findall(said)
        calls += len(used)
        assert len(used) == said.count("python_start") > 0
        for shown, call, output, repeated in used:
            assert shown == call and calculate(call) == output == repeated
            assert set(call.split()[::2]) <= given, "from the story or an earlier step"
            given.add(output)
        assert str(final_value(said)) == used[-1][2]
        shown = ". ".join(call[0] for call in used)
        assert {operand_split(*c) for c in calculations(shown)} == {split}
    assert calls > 330  # some need two


@pytest.mark.parametrize("split", SPLITS)
def test_R27_letter_counts_are_correct_and_of_their_split(split):
    counts = Counter()
    task = WorldSpelling(split)
    for i in range(400):
        letter, words = task.letter_and_words(i)
        assert {split_of("letter", word, letter) for word in words} == {split}
        worked, count = task[i][1]["content"].split("\n#### ")
        plain = worked.replace("-", "")
        assert re.sub(r"\d", "", plain).split() == words
        numbers = [(letter, str(n + 1)) for n in range(int(count))]
        assert re.findall(r"(\w)(\d)", plain) == numbers and plain.count(letter) == int(count)
        counts[int(count)] += 1
    assert [*sorted(counts)] == [1, 2, 3, 4] and are_balanced(counts, 4)


@pytest.mark.parametrize("name", SUITE)
def test_R27_suite_items_are_well_formed_and_new(name):
    task, seen, golds = SUITE[name], set(), Counter()
    for item in task["items"]:
        options = item.get("choices") or item.get("context_options") or [item["context"]]
        assert len(set(options)) == len(options) == round(1 / (task["random_baseline"] or 1))
        golds[item.get("gold", 0)] += 1
        prompt = item.get("query") or f"{options[item.get('gold', 0)]} {item['continuation']}"
        if name == "world_sums":
            assert {operand_split(*c) for c in calculations(prompt)} < set(SPLITS[1:])
        else:
            assert prompt.removeprefix("Question: ") not in text("train")
        assert str(item).isascii() and not re.search(r"[<>]|None|  ", str(item))
        seen.add(str(item))
    assert max(golds) < len(options) and are_balanced(golds, len(options))
    assert len(seen) == len(task["items"]) >= (40 if name == "world_opposites" else 110)


def test_both_directions_of_a_friendship_are_one_cluster():
    found = Counter(fact.cluster for fact in askable("test") if fact.relation == "friend")
    assert set(found.values()) == {2}
