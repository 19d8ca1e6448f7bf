"""Contamination check: evaluation items that occur in training data."""

import pytest

from tasks.base import Task, assistant, user
from tasks.overlap import RUN, Overlap, ngrams_by_length, overlaps

WORDS = [f"w{i}" for i in range(100)]


class Texts(Task):
    """One conversation per text."""

    kind = "talk"
    splits = ("train",)

    def __init__(self, name: str, *texts: str):
        super().__init__("train")
        self.name, self.texts = name, texts

    def __len__(self) -> int:
        return len(self.texts)

    def conversation(self, i: int):
        return [user(self.texts[i]), assistant("")]


def words(first: int, count: int) -> str:
    return " ".join(WORDS[first : first + count])


def test_R27_items_with_shared_ngrams_are_found():
    train = Texts("seen", "Before: " + words(0, 20).upper().replace(" ", ", "), words(40, 30))
    held_out = Texts(
        "asked",
        words(60, 10) + " other",  # 10 words of a training item
        "And " + words(3, RUN) + "?",
        words(41, RUN - 1) + " z",  # one word short
        words(50, RUN) + " " + words(80, 5),
        words(3, RUN),  # again
    )
    assert overlaps([train], [held_out]) == [Overlap("seen", "asked", 5, 5, (1, 3, 4))]


def test_R27_every_pair_of_tasks_is_compared():
    one, two = Texts("one", words(0, 20)), Texts("two", words(20, 20))
    three = Texts("three", "nothing of the kind", words(10, 20))
    found = {(o.train, o.held_out): o.shared for o in overlaps([one, two], [one, two, three])}
    assert found == {
        ("one", "one"): (0,),
        ("one", "two"): (),
        ("one", "three"): (),
        ("two", "one"): (),
        ("two", "two"): (0,),
        ("two", "three"): (),
    }


def test_ngrams_do_not_cross_items():
    split = Texts("split", words(0, 7), words(7, 7), words(0, RUN))
    assert ngrams_by_length(split.texts, [RUN])[RUN].items.tolist() == [2]
    [found] = overlaps([Texts("whole", words(0, 14))], [split])
    assert (found.items, found.checked, found.shared, found.whole) == (3, 3, (2,), (0, 1))


@pytest.mark.parametrize("texts", [[], [""], ["a few words"]])
def test_short_items_are_counted_but_not_checked(texts):
    [found] = overlaps([Texts("seen", words(0, 50))], [Texts("asked", *texts)])
    assert (found.items, found.checked, found.shared) == (len(texts), 0, ())
    [found] = overlaps([Texts("seen", *texts)], [Texts("asked", words(0, 50))])
    assert found.shared == ()
