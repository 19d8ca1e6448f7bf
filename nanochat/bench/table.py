"""
What the benchmarks measured, as a page: beside a peer, as a share of a limit, and how it grows.

    Line, Point -> Findings -> render -> dev/bench-cpu.md

All rates count useful work per second, so that more is better and a ratio above 1 is ours. A line
without a peer has none that its package index offers; a peer that cannot run here is said to be
missing. Measures nothing.
"""

import json
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from nanochat.common import write_json


class Rate(NamedTuple):
    """Work per second: the median of the repeats, the lowest and the highest."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, rates: Iterable[float]) -> "Rate":
        """From one rate per repeat."""
        found = sorted(rates)
        return cls(statistics.median(found), found[0], found[-1])

    def __str__(self) -> str:
        return f"{shown(self.median)} ({shown(self.low)} to {shown(self.high)})"


class Line(NamedTuple):
    """One thing that was measured."""

    path: str
    """Which way of using the project: training, generation, ..."""
    what: str
    unit: str
    ours: Rate
    peer: str = ""
    """Whom we are compared with; empty = nobody."""
    theirs: Rate | None = None
    """None where there is no peer, or it is missing."""
    ceiling: float | None = None
    """Share of the limit that was measured in the same run."""

    @property
    def ratio(self) -> float | None:
        """Ours over the peer's."""
        return self.ours.median / self.theirs.median if self.theirs else None


class Point(NamedTuple):
    """What something costs at one size."""

    axis: str
    """What grows, and what is done with it."""
    size: float
    seconds: float
    megabytes: float | None = None
    """Peak of the process, or None where it was not measured apart."""


@dataclass
class Findings:
    """Lines and points of one or several benchmarks, and remarks on the machine."""

    lines: list[Line] = field(default_factory=list)
    points: list[Point] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def line(self, *args: Any, **kwargs: Any) -> None:
        """Add a line, and print it."""
        line = Line(*args, **kwargs)
        self.lines.append(line)
        against = ""
        if line.peer:
            against = f"   {line.peer}: {line.theirs or 'missing'}"
        if line.ratio is not None:
            against += f"   ratio {line.ratio:.2f}"
        share = "" if line.ceiling is None else f"   {line.ceiling:.0%} of the ceiling"
        print(f"{line.what:<44} {line.ours} {line.unit}{against}{share}", flush=True)

    def point(self, *args: Any) -> None:
        """Add a point."""
        self.points.append(Point(*args))

    def note(self, text: str) -> None:
        """Add a remark, and print it."""
        self.notes.append(text)
        print(text, flush=True)

    def write(self, path: Path) -> None:
        """As JSON, for `read`."""
        write_json(path, asdict(self))

    @classmethod
    def read(cls, path: Path) -> "Findings":
        """What `write` wrote."""
        raw = json.loads(path.read_text())
        lines = []
        for path_, what, unit, ours, peer, theirs, ceiling in raw["lines"]:
            other = None if theirs is None else Rate(*theirs)
            lines.append(Line(path_, what, unit, Rate(*ours), peer, other, ceiling))
        return cls(lines, [Point(*point) for point in raw["points"]], raw["notes"])

    def add(self, other: "Findings") -> None:
        """Take in what another benchmark found."""
        self.lines += other.lines
        self.points += other.points
        self.notes += other.notes


def shown(value: float) -> str:
    """A number with three digits that count."""
    if value == 0 or not math.isfinite(value):
        return f"{value}"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:,.{digits}f}"


def exponent(points: Sequence[tuple[float, float]]) -> float:
    """
    The power of size with which a cost grows: the slope of its logarithm over that of the size.

    Raises ValueError for fewer than two different sizes.
    """
    x = [math.log(size) for size, _ in points]
    y = [math.log(cost) for _, cost in points]
    if len(set(x)) < 2:
        raise ValueError(f"an exponent needs two different sizes, got {sorted(set(x))}")
    return statistics.linear_regression(x, y).slope


def power(points: Sequence[tuple[float, float]]) -> str:
    """`exponent` as a cell; empty where one size alone was measured."""
    return f"{exponent(points):.2f}" if len({size for size, _ in points}) > 1 else ""


def render(found: Findings, command: str, machine: str, minutes: float) -> str:
    """The page in Markdown."""
    blocks = [
        "# Speed",
        f"`{command}` on {machine}; {minutes:.0f} minutes. Each figure is the median of three "
        "measurements with the lowest and the highest; peers take turns with us in the same run. "
        "Ratio: ours over theirs, more is faster. Ceiling: share of the limit of this machine "
        "measured in the same run.",
        "\n".join(f"- {note}" for note in found.notes),
    ]
    for path in dict.fromkeys(line.path for line in found.lines):
        rows = [
            "| | unit | ours | peer | theirs | ratio | ceiling |",
            "|---|---|---|---|---|---|---|",
        ]
        for line in found.lines:
            if line.path != path:
                continue
            theirs = "" if not line.peer else str(line.theirs) if line.theirs else "missing"
            ratio = "" if line.ratio is None else f"**{line.ratio:.2f}**"
            share = "" if line.ceiling is None else f"{line.ceiling:.0%}"
            cells = (line.what, line.unit, str(line.ours), line.peer, theirs, ratio, share)
            rows.append(f"| {' | '.join(cells)} |")
        blocks += [f"## {path}", "\n".join(rows)]
    if found.points:
        blocks += ["## How it grows", growth_table(found.points)]
    return "\n\n".join(block for block in blocks if block) + "\n"


def growth_table(points: Sequence[Point]) -> str:
    """Time and memory by size, with the power of the size that fits them best."""
    rows = [
        "| what grows | sizes | seconds | ~ size^ | MB | ~ size^ |",
        "|---|---|---|---|---|---|",
    ]
    for axis in dict.fromkeys(point.axis for point in points):
        of_axis = sorted(point for point in points if point.axis == axis)
        sizes = ", ".join(shown(p.size) for p in of_axis)
        seconds = ", ".join(shown(p.seconds) for p in of_axis)
        known = [(p.size, p.megabytes) for p in of_axis if p.megabytes]
        cells = [axis, sizes, seconds, power([(p.size, p.seconds) for p in of_axis])]
        if len(known) == len(of_axis):
            megabytes = ", ".join(shown(mb) for _, mb in known)
            cells += [megabytes, power(known)]
        else:
            cells += ["", ""]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)
