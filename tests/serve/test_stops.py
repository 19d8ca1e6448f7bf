"""StopFinder truncates streamed text at stop strings, for any division into pieces."""

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
def test_text_ends_before_the_first_complete_stop_string(text, stops, seed):
    finder = StopFinder(stops)
    shown, added = "", ""
    for piece in in_pieces(text, seed):
        if not finder.found:
            added += piece
            shown += finder.add(piece)
    starts = [added.find(stop) for stop in stops if stop in added]
    assert finder.found == bool(starts)
    assert shown + finder.close() == (added[: min(starts)] if starts else text)


@given(WORDS, STOPS)
def test_only_possible_stop_prefixes_are_held_back(text, stops):
    finder = StopFinder(stops)
    shown = "".join(finder.add(letter) for letter in text)
    assert finder.found or any(stop.startswith(finder.held) for stop in stops) or not finder.held
    assert finder.found or text.startswith(shown)


def test_no_text_is_emitted_after_a_stop_string():
    finder = StopFinder(["END", ""])
    assert [finder.add("one E"), finder.add("ND two"), finder.add(" three")] == ["one ", "", ""]
    assert finder.found and finder.close() == ""
