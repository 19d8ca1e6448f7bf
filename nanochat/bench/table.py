"""
Render benchmarks as a page: comparison with peers and a roofline.

    TableLine, Detail, notes -> BenchLog -> render_findings -> dev/bench-cpu.md

Throughput is useful work per second: higher is better, and a ratio above 1 means we are faster. A
line without a peer has no counterpart on PyPI; a peer that cannot run here is listed as missing.
"""

import math
import statistics
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, TypeVar

from pydantic import TypeAdapter

from nanochat.common import write_atomic

T = TypeVar("T")


class TableLine(NamedTuple):
    """One measurement."""

    table: str
    """Title of the table: Training, Decode, ..."""
    case: str
    unit: str
    ours: Sequence[float]
    """Throughput in `unit` of each repeat."""
    peer: str = ""
    """Library to compare with; empty = none."""
    theirs: Sequence[float] = ()
    """Like `ours`; empty if there is no peer or it is missing."""
    roofline: float | None = None
    """Achieved fraction of the hardware limit, which is measured in the same run."""

    @property
    def ratio(self) -> float | None:
        """Our median over the peer's; None without a peer."""
        return (
            statistics.median(self.ours) / statistics.median(self.theirs) if self.theirs else None
        )


class Detail(NamedTuple):
    """One row of an additional table, such as the parts of a training step."""

    table: str
    """Title of the table that it follows."""
    title: str
    cells: dict[str, str]
    """Column head with unit -> cell."""


class Note(NamedTuple):
    """A sentence above a table; without a table, at the end of the method."""

    table: str
    text: str


@dataclass
class BenchLog:
    """Lines, notes and details of one or several benchmarks."""

    lines: list[TableLine] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    details: list[Detail] = field(default_factory=list)

    def line(self, line: TableLine) -> None:
        """Add a line and print it."""
        self.lines.append(line)
        against = f"   {line.peer}: {spread(line.theirs) or 'missing'}" if line.peer else ""
        against += f"   ratio {line.ratio:.2f}" if line.ratio else ""
        share = "" if line.roofline is None else f"   {line.roofline:.0%} of roofline"
        name = f"{line.table}: {line.case}"
        print(f"{name:<44} {spread(line.ours)} {line.unit}{against}{share}", flush=True)

    def note(self, table: str, text: str) -> None:
        """Add a note and print it."""
        self.notes.append(Note(table, text))
        print(f"{table}: {text}", flush=True)

    def detail(self, detail: Detail) -> None:
        """Add a row of an additional table and print it."""
        self.details.append(detail)
        listed = ", ".join(f"{name} {cell}" for name, cell in detail.cells.items())
        print(f"{detail.table}: {listed}", flush=True)

    def write(self, path: Path) -> None:
        """Write as JSON; unlike `write_json` it keeps the order of the columns."""
        write_atomic(path, TypeAdapter(BenchLog).dump_json(self))

    @classmethod
    def read(cls, path: Path) -> "BenchLog":
        """Read a file written by `write`."""
        return TypeAdapter(cls).validate_json(path.read_bytes())

    def add(self, other: "BenchLog") -> None:
        """Append the findings of another benchmark."""
        self.lines += other.lines
        self.notes += other.notes
        self.details += other.details


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


METHOD = """\
- A cell is the median (lowest to highest) of `--repeats` measurements after a warm-up.
  The tokenizer is measured without one: each first pass is in a new process.
- Our code and the other library (peer) alternate in the same run, so that the noise of the machine
  affects both alike. Figures of different runs are not comparable.
- Ratio: our median over the peer's. Throughput is work per second, so above 1 we are faster.
- % of roofline: the share of a limit that is measured in the same run. Training: the time of the
  step's matmuls alone, divided by the time of the step. Decode: the time to read weights and KV
  cache once per step from memory, divided by the time of the step; data in CPU caches is read
  faster, so this can exceed 100%.
- missing: the peer could not be installed here."""
FIRST_CHECKS = "## First checks"  # heading of the first results on a GPU, on the same page


def render_findings(found: BenchLog, command: str, machine: str, minutes: float) -> str:
    """Render the page in Markdown."""
    failures = "\n".join(f"- {text}" for table, text in found.notes if not table)
    blocks = [
        f"# Benchmarks on {machine}",
        f"Speed of this repository and of other libraries on one machine, written by\n`{command}`"
        f" in {minutes:.0f} minutes.",
        "## Method",
        "\n".join(filter(None, (METHOD, failures))),
    ]
    for title in dict.fromkeys(line.table for line in found.lines):
        blocks.append(f"## {title}")
        notes = dict.fromkeys(text for table, text in found.notes if table == title)
        blocks += [textwrap.fill(text, 110, break_on_hyphens=False) for text in notes]
        lines = [line for line in found.lines if line.table == title]
        for unit in dict.fromkeys(line.unit for line in lines):
            blocks.append(comparison([line for line in lines if line.unit == unit], unit))
        for name in dict.fromkeys(d.title for d in found.details if d.table == title):
            rows = [d.cells for d in found.details if (d.table, d.title) == (title, name)]
            blocks += [f"{name}:", markdown([*rows[0]], [[*row.values()] for row in rows])]
    return "\n\n".join(blocks) + "\n"


def comparison(lines: Sequence[TableLine], unit: str) -> str:
    """Table of lines with one unit; columns that would be empty are left out."""
    columns = {
        "case": [line.case for line in lines],
        f"ours ({unit})": [spread(line.ours) for line in lines],
        "peer": [line.peer for line in lines],
        f"peer ({unit})": [
            (spread(line.theirs) or "missing") if line.peer else "" for line in lines
        ],
        "ratio, ours / peer": [f"**{line.ratio:.2f}**" if line.ratio else "" for line in lines],
        "% of roofline": [
            "" if line.roofline is None else f"{line.roofline:.0%}" for line in lines
        ],
    }
    columns = {name: cells for name, cells in columns.items() if any(cells)}
    return markdown([*columns], [*zip(*columns.values(), strict=True)])


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Render a Markdown table."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
