"""
Hold out final benchmarks, and check training data for contamination.

    python -m scripts.lab.hold_out --final="humaneval|kmmlu"    # scoring them then needs --final
    python -m scripts.lab.hold_out --mixture="smoltalk,gsm8k"   # overlap with benchmarks
    python -m scripts.lab.hold_out                              # list finals and accesses to them

Reads   held_out.json and held_out_access.jsonl under the base directory; with --mixture,
        its conversations and the evaluation splits of the benchmarks
Writes  held_out.json with --final; the section "Overlap" with --mixture
"""

import re
from collections import Counter
from dataclasses import dataclass

from nanochat import report
from nanochat.common import fingerprint, printable
from nanochat.config import start
from nanochat.lab.filters import BENCHMARKS, index_passages, shared_items
from tasks import held_out
from tasks.buckets import buckets, read_mixture
from tasks.registry import TASKS, eval_task, key_of


@dataclass(frozen=True)
class HoldOut:
    final: str = ""
    """Tasks to declare final, separated by |; includes other tasks with the same questions."""
    mixture: str = ""
    """Buckets to compare with benchmarks, as in smoltalk,gsm8k, or a JSON file; see docs/data.md.
    Default: none."""
    benchmarks: str = "|".join(BENCHMARKS)
    """Tasks to compare a mixture with, separated by |, besides the final ones."""


def main(cfg: HoldOut) -> None:
    keys = [key_of(name) for name in cfg.final.split("|")] if cfg.final else []
    for key in keys:
        if TASKS[key].kind == "talk":
            raise ValueError(f"--final: {key!r} is not scored; use {', '.join(BENCHMARKS)}")
    if keys:
        every = [other for key in keys for other in overlapping_tasks(key)]
        print(f"wrote {held_out.declare({TASKS[k].name: TASKS[k].tags.parent for k in every})}")
    if cfg.mixture:
        scan(cfg)
    for name, parent in held_out.final_benchmarks().items():
        print(printable(f"final: {name}, made from {parent or '?'}"))
    print(report.render_table(held_out.access_table()))


def overlapping_tasks(key: str) -> list[str]:
    """Keys of the tasks with the same questions in any form, including the task itself."""
    same = re.sub("(_redux)?(_10|_letter)?$", "", key) + "(_redux)?(_10|_letter)?"
    return [other for other in TASKS if re.fullmatch(same, other)]


def scan(cfg: HoldOut) -> None:
    """Record the overlap of a mixture with benchmarks: 13-grams of words, or whole questions."""
    learned = buckets(*read_mixture(cfg.mixture))
    names = [*cfg.benchmarks.split("|"), *held_out.final_benchmarks()]
    tests = [eval_task(key) for key in dict.fromkeys(map(key_of, names))]
    index, total, rows = index_passages(tests), 0, []
    checked = Counter(n for n, _ in set[tuple[int, int]]().union(*index.values()))
    for bucket in learned:
        for n, shared in sorted(Counter(n for n, _ in shared_items(bucket.train, index)).items()):
            counts = len(tests[n]), checked[n], shared
            rows.append([bucket.name, tests[n].name, *(f"{count:,}" for count in counts)])
            total += shared
    columns = ["Bucket", "Benchmark", "Items", "Checked", "Shared"]
    table = {"title": "Overlap with benchmarks", "columns": columns, "rows": rows}
    values = {"Items with overlap": total}
    inputs = {"before": fingerprint({bucket.name: bucket.train.identity for bucket in learned})}
    report.append_section("Overlap", cfg, values, inputs, tables=[table])


if __name__ == "__main__":
    start(main, HoldOut(), __doc__)
