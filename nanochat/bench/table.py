"""
Tables of benchmarks: ours and those of a peer.

    throughputs of each repeat -> compare -> rows -> print_table -> Markdown

Throughput is useful work per second: higher is better, and a ratio above 1 means we are faster. A
row without a peer has no counterpart on PyPI; a peer that cannot run here is listed as missing.
"""

import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import TypeVar

T = TypeVar("T")
METHOD = """\
Median (lowest to highest) of `--repeats` measurements, of us and the other library (peer) in turn.
Ratio: our median over the peer's; above 1 we are faster."""


def compare(
    case: str, unit: str, ours: Sequence[float], peer: str = "", theirs: Sequence[float] = ()
) -> dict[str, str]:
    """
    Cells of a row: throughputs in `unit` of each repeat, ours and those of `peer` (none: missing).
    """
    return {
        "case": case,
        f"ours ({unit})": spread(ours),
        "peer": peer,
        f"peer ({unit})": (spread(theirs) or "missing") if peer else "",
        "ratio, ours / peer": f"**{median(ours) / median(theirs):.2f}**" if theirs else "",
    }


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
    return "{} ({} to {})".format(*map(fmt, (median(rates), min(rates), max(rates))))


def fmt(value: float) -> str:
    """Format a positive number with three significant digits."""
    return f"{value:,.{max(0, 2 - math.floor(math.log10(value)))}f}"


def print_table(title: str, note: str, rows: Sequence[Mapping[str, str]]) -> None:
    """Print a heading, sentences and rows in Markdown; columns that would be empty are left out."""
    columns = dict.fromkeys(name for row in rows for name, cell in row.items() if cell)
    table = [[*columns], ["---"] * len(columns)]
    table += [[row.get(name, "") for name in columns] for row in rows]
    print(f"## {title}\n\n{textwrap.fill(note, 110, break_on_hyphens=False)}\n")
    print("\n".join(f"| {' | '.join(line)} |" for line in table), end="\n\n", flush=True)
