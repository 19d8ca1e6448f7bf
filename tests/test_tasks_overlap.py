"""Contamination check: evaluation items that occur in training data."""

from tasks.base import assistant, user
from tasks.chats import JSONL
from tasks.overlap import RUN, Overlap, overlaps

WORDS = [f"w{i}" for i in range(100)]


class Texts(JSONL):
    """One conversation per text."""

    def __init__(self, name: str, *texts: str):
        self.name, self.items = name, [[user(text), assistant("")] for text in texts]


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
        words(1, 12),  # whole, but shorter
        "a few words",  # too short to check
    )
    other = Texts("other", "nothing of the kind")
    assert overlaps([train, other], [held_out, Texts("empty", "")]) == [
        Overlap("seen", "asked", 7, 6, [1, 3, 4, 5]),
        Overlap("seen", "empty", 1, 0, []),
        Overlap("other", "asked", 7, 6, []),
        Overlap("other", "empty", 1, 0, []),
    ]


def test_R27_ngrams_do_not_cross_items():
    split = Texts("split", words(0, 7), words(7, 7), words(0, RUN))
    [found] = overlaps([Texts("whole", words(0, 14))], [split])
    assert found.shared == [0, 1, 2]
    assert overlaps([split], [Texts("long", words(1, 14))])[0].shared == []
