"""
Fill in the results in tests/README.md from the JUnit XML files of test runs.

    bash tests/run.sh --junitxml=ordinary.xml -m "not slow and not net"
    bash tests/run.sh --junitxml=slow.xml -m slow
    python -m dev.reliability ordinary.xml slow.xml   # later files override earlier ones
"""

import re
import sys
import xml.etree.ElementTree as ET
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from nanochat.records import git_state
from tests.cases import CASES, NOT_HERE

README = Path(__file__).resolve().parent.parent / "tests" / "README.md"
BEGIN, END = "<!-- results -->\n", "<!-- end of results -->\n"
ID = re.compile(r"(?<=_)([BRPSV]\d+)(?=_)")
FAMILIES = {
    "kills survived, with nothing lost": ["kills survived"],
    "bit flips found": ["bit flips found"],
    "bad inputs tried": ["bad inputs tried"],
    "requests served under load": ["requests served"],
}


@dataclass
class Result:
    """Result of a test."""

    name: str
    file: str
    mark: str
    outcome: str
    counted: dict[str, int]
    """Counts recorded with record_property: kills, inputs, requests."""


def read(path: Path) -> tuple[str, list[Result]]:
    """Read the date and the results of a test run."""
    suite = next(iter(ET.parse(path).getroot().iter("testsuite")))
    mark = "slow" if "slow" in path.stem else "ordinary"
    results = []
    for case in suite.iter("testcase"):
        kinds = {child.tag for child in case}
        outcome = next((k for k in ("failure", "error", "skipped") if k in kinds), "passed")
        name, file = case.get("name", ""), case.get("classname", "").split(".")[-1]
        counted = {
            p.get("name", ""): int(float(p.get("value", "0"))) for p in case.iter("property")
        }
        results.append(Result(name, file, mark, outcome, counted))
    return suite.get("timestamp", "")[:10], results


def row(case: str, results: list[Result]) -> str:
    """Table row of a case."""
    files = ", ".join(f"`{file}.py`" for file in sorted({r.file for r in results}))
    marks = Counter(r.mark for r in results)
    outcomes = Counter(r.outcome for r in results)
    last = ", ".join(f"{n} {outcome}" for outcome, n in sorted(outcomes.items()))
    counted = ", ".join(f"{n} {mark}" for mark, n in sorted(marks.items()))
    if case in NOT_HERE:
        last, counted = f"not here: {NOT_HERE[case]}", f"{len(results)} gpu"
    return f"| {case} | {CASES[case]} | {files} | {counted} | {last} |"


def table(paths: Iterable[Path]) -> str:
    """The generated part of tests/README.md."""
    by_case: dict[str, list[Result]] = defaultdict(list)
    sums: Counter[str] = Counter()
    days, totals, escapes = set(), Counter(), 0
    last: dict[tuple[str, str], Result] = {}
    for path in paths:
        day, results = read(path)
        days.add(day)
        last |= {(result.file, result.name): result for result in results}
    for result in last.values():
        totals[result.mark, result.outcome] += 1
        sums.update(result.counted)
        cases = ID.findall(result.name)
        for case in cases:
            by_case[case].append(result)
        escapes += result.outcome == "passed" and any(c[0] == "S" for c in cases)
    lines = [f"Last run: {' and '.join(sorted(days))}, commit {git_state()['commit']}."]
    for mark in ("ordinary", "slow"):
        of = [f"{n:,} {outcome}" for (m, outcome), n in sorted(totals.items()) if m == mark]
        lines.append(f"{mark.capitalize()} tests: {', '.join(of) or 'not run'}.")
    lines += ["", "| | |", "|---|---|"]
    lines += [f"| {name} | {sum(sums[key] for key in keys):,} |" for name, keys in FAMILIES.items()]
    what = "tests of cases S1 to S14 passed (sandbox, calculator, untrusted text and archives)"
    lines += [f"| {what} | {escapes} |"]
    lines += ["", "| ID | case | tests | how many | last result |", "|---|---|---|---|---|"]
    lines += [row(case, by_case[case]) for case in CASES]
    return "\n".join(lines) + "\n"


def main() -> None:
    text = README.read_text()
    head, rest = text.split(BEGIN)
    tail = rest.split(END)[1]
    paths = [Path(name) for name in sys.argv[1:]]
    README.write_text(head + BEGIN + "\n" + table(paths) + "\n" + END + tail)


if __name__ == "__main__":
    main()
