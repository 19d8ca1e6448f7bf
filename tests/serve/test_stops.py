"""A stop string ends a text wherever it is cut into pieces, and nothing else is lost."""

import random

from hypothesis import given
from hypothesis import strategies as st

from nanochat.serve.scheduler import StopFinder

WORDS = st.text("ab\n", max_size=24)
STOPS = st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3)


def in_pieces(text, seed):
    rng = random.Random(seed)
    while text:
        n = rng.randint(1, 4)
        yield text[:n]
        text = text[n:]


@given(WORDS, STOPS, st.integers(0, 5))
def test_the_text_shown_ends_where_the_first_stop_that_was_complete_begins(text, stops, seed):
    finder = StopFinder(stops)
    shown, read = "", ""
    for piece in in_pieces(text, seed):
        if not finder.found:
            read += piece
            shown += finder.add(piece)
    places = [read.find(stop) for stop in stops if stop in read]
    assert finder.found == bool(places)
    assert shown + finder.close() == (read[: min(places)] if places else text)


@given(WORDS, STOPS)
def test_only_what_may_become_a_stop_is_held_back(text, stops):
    finder = StopFinder(stops)
    shown = "".join(finder.add(letter) for letter in text)
    assert finder.found or any(stop.startswith(finder.held) for stop in stops) or not finder.held
    assert finder.found or text.startswith(shown)


def test_after_a_stop_nothing_more_is_shown():
    finder = StopFinder(["END", ""])
    assert [finder.add("one E"), finder.add("ND two"), finder.add(" three")] == ["one ", "", ""]
    assert finder.found and finder.close() == ""
