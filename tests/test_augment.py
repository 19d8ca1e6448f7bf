"""Augmented questions: correct answers survive new formats, orders and extra options."""

from collections import Counter

import pytest

from tasks.augment import BM25, STYLES, MoreOptions, Reordered, Styled, near_equal, read_letter
from tasks.base import LETTERS, MCQuestion, QuestionTask
from tasks.buckets import buckets
from tasks.gsm8k import GSM8K

ANIMALS = "cat dog horse mouse whale eagle salmon frog spider beetle".split()


class Animals(QuestionTask):
    """Three kinds of questions about ten animals."""

    name, splits, baseline = "Animals", ("train", "test"), 0.25

    def __len__(self):
        return 30

    def question(self, i):
        right = ANIMALS[i % 10]
        others = [ANIMALS[(i + n) % 10] for n in (1, 2, 3)]
        about = ("eats grass", "lives in water", "has many legs")[i // 10]
        options = [*others[: i % 4], right, *others[i % 4 :]]
        return MCQuestion(f"Which animal number {i} {about}?", tuple(options), i % 4)


@pytest.fixture
def task():
    return Animals("train")


def test_reordering_keeps_the_correct_option(task):
    found = Reordered(task)
    for i in range(30):
        was, now = task.question(i), found.question(i)
        assert sorted(now.options) == sorted(was.options)
        assert now.options[now.right] == was.options[was.right]
        assert found[i] == Reordered(task)[i]
    positions = Counter(found.question(i).right for i in range(30))
    assert len(positions) == 4 and found.identity != task.identity


def test_every_style_is_parsed_and_scored(task):
    found = Styled(task)
    seen = set()
    for i in range(30):
        asked, answer = (message["content"] for message in found[i])
        style = found.style(i)
        seen.add(style)
        assert asked.endswith(style.instruction) and style.pattern.fullmatch(answer)
        assert sum(other.instruction in asked for other in STYLES) == 1  # no second instruction
        letter = LETTERS[task.question(i).right]
        assert read_letter(answer) == letter and found.score(found[i], answer) == 1
        for other in STYLES:  # any format is accepted
            assert found.score(found[i], other.form.format(letter)) == 1
            assert found.score(found[i], other.form.format("Z")) == 0
    assert seen == set(STYLES)
    assert read_letter("A, or maybe (B) or Option C is correct") is None
    assert read_letter("no idea") is None


def test_extra_options_are_distinct_and_wrong(task):
    found = MoreOptions(task, exactly=True, most=8)
    for i in range(30):
        was, now = task.question(i), found.question(i)
        assert set(was.options) <= set(now.options) and len(now.options) == 8
        assert len(set(now.options)) == 8
        assert now.options[now.right] == was.options[was.right]
        assert found.letters(i) == tuple("ABCDEFGH")
    drawn = MoreOptions(task)
    sizes = Counter(len(drawn.question(i).options) for i in range(30))
    assert min(sizes) >= 4 and max(sizes) <= 10 and len(sizes) > 3


def test_extra_options_come_only_from_training_questions(task):
    test = MoreOptions(Animals("test"), exactly=True)
    questions, _ = test.corpus
    assert questions == [task.question(i) for i in range(30)]


def test_near_equal_detects_similar_options():
    for one, other in (
        ("The cat.", "the cat"),
        ("a red fox", "red fox"),
        ("photosynthesis", "photosynthesiss"),
    ):
        assert near_equal(one, other)
    for one, other in (("cat", "dog"), ("12", "21"), ("north", "south"), ("4", "14")):
        assert not near_equal(one, other)


def test_bm25_ranks_by_shared_rare_words():
    index = BM25(["the cat sat", "the dog sat", "the whale sang a long long song", "cat and dog"])
    assert index.search("a whale song", 1) == [2]
    assert index.search("the cat", 2)[0] == 0
    assert index.search("nothing here", 3) == []
    twins = BM25(["same words"] * 5 + ["words"])
    assert twins.search("same", 3) == [0, 1, 2] and twins.search("words same", 9)[-1] == 5
    assert BM25([]).search("a", 3) == []


def test_augmenting_a_task_without_options_raises(task):
    with pytest.raises(ValueError, match="GSM8K is not answered with a letter"):
        Reordered(GSM8K("train"))


def test_augmented_bucket_has_its_tag():
    declared = {"arc-styles": {"task": "arc_easy", "augment": "styles"}}
    [bucket] = buckets("arc-styles=20", declared)
    assert bucket.tags.augmented == "styles" and bucket.tags.parent == "arc"
    assert bucket.name == "arc-styles"
    with pytest.raises(ValueError, match="augment 'x' is not one of styles, order, options"):
        buckets("y", {"y": {"task": "arc_easy", "augment": "x"}})
