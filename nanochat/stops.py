"""
Stop strings in a text that comes piece by piece.

    pieces -> StopFinder.add -> what may be shown, up to where the first stop begins

What could be the beginning of a stop is held back until it is clear. Knows nothing of tokens.
"""

from collections.abc import Sequence


class StopFinder:
    """Passes a text on until one of `stops` begins in it; `found` is True from then on."""

    def __init__(self, stops: Sequence[str]):
        self.stops = [stop for stop in stops if stop]
        self.held = ""
        self.found = False

    def add(self, text: str) -> str:
        """The next piece; returns what there is to show of all that came."""
        text, self.held = self.held + text, ""
        if self.found:
            return ""
        begins = min((at for stop in self.stops if (at := text.find(stop)) >= 0), default=None)
        if begins is not None:
            self.found = True
            return text[:begins]
        open_end = max((overlap(text, stop) for stop in self.stops), default=0)
        shown = len(text) - open_end
        self.held = text[shown:]
        return text[:shown]

    def close(self) -> str:
        """What was held back, when nothing more comes."""
        held, self.held = self.held, ""
        return held


def overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` with which `stop` begins, `stop` itself excluded."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
