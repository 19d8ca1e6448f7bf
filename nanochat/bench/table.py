"""
Render benchmarks as a page: comparison with peers and a ceiling, and cost by size.

    TableLine, Point -> BenchLog -> render_findings -> dev/bench-cpu.md

Throughput is useful work per second: higher is better, and a ratio above 1 means we are faster. A
line without a peer has no counterpart on PyPI; a peer that cannot run here is listed as missing.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple, TypeVar

from pydantic import TypeAdapter

from nanochat.common import write_json

T = TypeVar("T")


class TableLine(NamedTuple):
    """One measurement."""

    path: str
    """Page section: training, generation, ..."""
    what: str
    unit: str
    ours: Sequence[float]
    """Work per second of each repeat."""
    peer: str = ""
    """Library to compare with; empty = none."""
    theirs: Sequence[float] = ()
    """Like `ours`; empty if there is no peer or it is missing."""
    ceiling: float | None = None
    """Achieved fraction of the ceiling, which is measured in the same run."""

    @property
    def ratio(self) -> float | None:
        """Our median over the peer's; None without a peer."""
        return (
            statistics.median(self.ours) / statistics.median(self.theirs) if self.theirs else None
        )


class Point(NamedTuple):
    """Cost at one size."""

    axis: str
    """The growing quantity and the measured work, as in "threads: encoding"."""
    size: float
    seconds: float
    megabytes: float | None = None
    """Peak memory; None if not measured."""


@dataclass
class BenchLog:
    """Lines, points and notes of one or several benchmarks."""

    lines: list[TableLine] = field(default_factory=list)
    points: list[Point] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def line(self, line: TableLine) -> None:
        """Add a line and print it."""
        self.lines.append(line)
        against = f"   {line.peer}: {spread(line.theirs) or 'missing'}" if line.peer else ""
        against += f"   ratio {line.ratio:.2f}" if line.ratio else ""
        share = "" if line.ceiling is None else f"   {line.ceiling:.0%} of the ceiling"
        print(f"{line.what:<44} {spread(line.ours)} {line.unit}{against}{share}", flush=True)

    def note(self, text: str) -> None:
        """Add a note and print it."""
        self.notes.append(text)
        print(text, flush=True)

    def write(self, path: Path) -> None:
        """Write as JSON."""
        write_json(path, asdict(self))

    @classmethod
    def read(cls, path: Path) -> "BenchLog":
        """Read a file written by `write`."""
        return TypeAdapter(cls).validate_json(path.read_bytes())

    def add(self, other: "BenchLog") -> None:
        """Append the findings of another benchmark."""
        self.lines += other.lines
        self.points += other.points
        self.notes += other.notes


def alternate(repeats: int, *works: Callable[[], T] | None, num_warmup: int = 1) -> list[list[T]]:
    """
    Call `works` in turn, `repeats` times after warm-up, so that machine noise affects all alike.
    Returns the list of results of each; empty for None.
    """
    found: list[list[T]] = [[] for _ in works]
    for _ in range(num_warmup + repeats):
        for results, work in zip(found, works, strict=True):
            if work:
                results.append(work())
    return [results[num_warmup:] for results in found]


def spread(rates: Sequence[float]) -> str:
    """Format "median (low to high)"; empty without rates."""
    if not rates:
        return ""
    median, low, high = map(fmt, (statistics.median(rates), min(rates), max(rates)))
    return f"{median} ({low} to {high})"


def fmt(value: float) -> str:
    """Format a number with three significant digits."""
    if value == 0 or not math.isfinite(value):
        return f"{value}"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:,.{digits}f}"


def render_findings(found: BenchLog, command: str, machine: str, minutes: float) -> str:
    """Render the page in Markdown."""
    blocks = [
        "# Speed",
        f"`{command}` on {machine}; {minutes:.0f} minutes. Each figure is the median (lowest to "
        "highest) of repeated measurements; ours and peers alternate in the same run. Ratio: "
        "ours over theirs, higher is faster. Ceiling: fraction of this machine's limit, measured "
        "in the same run.",
        "\n".join(f"- {note}" for note in found.notes),
    ]
    columns = ["", "unit", "ours", "peer", "theirs", "ratio", "ceiling"]
    for path in dict.fromkeys(line.path for line in found.lines):
        rows = []
        for line in (line for line in found.lines if line.path == path):
            theirs = (spread(line.theirs) or "missing") if line.peer else ""
            ratio = f"**{line.ratio:.2f}**" if line.ratio else ""
            share = "" if line.ceiling is None else f"{line.ceiling:.0%}"
            rows.append([line.what, line.unit, spread(line.ours), line.peer, theirs, ratio, share])
        blocks += [f"## {path}", markdown(columns, rows)]
    if found.points:
        blocks += ["## How it grows", growth_table(found.points)]
    return "\n\n".join(block for block in blocks if block) + "\n"


def growth_table(points: Sequence[Point]) -> str:
    """Time and memory by size, each with the exponent of a fitted power law."""
    rows = []
    for axis in dict.fromkeys(point.axis for point in points):
        mine = sorted(point for point in points if point.axis == axis)
        row = [axis, ", ".join(fmt(p.size) for p in mine)]
        costs = [[(p.size, p.seconds) for p in mine]]
        costs.append([(p.size, p.megabytes) for p in mine if p.megabytes])
        for known in costs:
            whole = len(known) == len(mine)
            row += [", ".join(fmt(y) for _, y in known), exponent(known)] if whole else ["", ""]
        rows.append(row)
    return markdown(["what grows", "sizes", "seconds", "~ size^", "MB", "~ size^"], rows)


def exponent(points: Sequence[tuple[float, float]]) -> str:
    """Slope of log cost over log size, from (size, cost); empty for a single size."""
    if len({size for size, _ in points}) < 2:
        return ""
    x, y = zip(*((math.log(size), math.log(cost)) for size, cost in points), strict=True)
    return f"{statistics.linear_regression(x, y).slope:.2f}"


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Render a Markdown table."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
