"""
Hold out final benchmarks, and check training data for contamination.

    python -m scripts.lab.hold_out --final="humaneval|kmmlu"    # scoring them then needs --final
    python -m scripts.lab.hold_out --mixture="smoltalk,gsm8k"   # overlap with benchmarks
    python -m scripts.lab.hold_out                              # list finals and accesses to them

Reads   held_out.json and held_out_access.jsonl under the base directory; with --mixture,
        its conversations and the evaluation splits of the benchmarks
Writes  held_out.json with --final; the section "Overlap" with --mixture
"""

from dataclasses import dataclass, field

from nanochat import records, report
from nanochat.common import fingerprint, printable
from nanochat.config import start
from nanochat.mixture import MixConfig, read_mixture
from tasks import held_out
from tasks.buckets import TAGS, buckets
from tasks.overlap import overlaps
from tasks.registry import BENCHMARKS, TASKS, eval_task, key_of, overlapping_tasks

SECTION = "Overlap"


@dataclass(frozen=True)
class HoldOut:
    final: str = ""
    """Tasks to declare final, separated by |; includes other tasks with the same questions."""
    benchmarks: str = ""
    """Tasks to compare a mixture with, separated by |. Default: ARC, MMLU, KMMLU, GSM8K, AQuA,
    HumanEval, and final ones."""
    report_dir: str | None = None
    """Folder of records. Default: report/ under the base directory."""
    mix: MixConfig = field(default_factory=MixConfig)


def main(cfg: HoldOut) -> None:
    if cfg.final:
        keys = [k for name in cfg.final.split("|") for k in overlapping_tasks(check_task(name))]
        print(f"wrote {held_out.declare({TASKS[k].name: TAGS[k].parent for k in keys})}")
    if cfg.mix.mixture:
        return scan(cfg)
    for name, parent in held_out.final_benchmarks().items():
        print(printable(f"final: {name}, made from {parent or '?'}"))
    print(report.render_table(held_out.access_table()))


def check_task(name: str) -> str:
    """Return the key of a task that can be scored. Raises ValueError otherwise."""
    key = key_of(name)
    if TASKS[key].kind == "talk" or key not in TAGS:
        raise ValueError(f"--final: {name!r} is not scored; use {', '.join(BENCHMARKS)}")
    return key


def scan(cfg: HoldOut) -> None:
    """Record the overlap of a mixture with benchmarks: 13-grams of words, or whole questions."""
    learned = buckets(*read_mixture(cfg.mix.mixture))
    final = map(key_of, held_out.final_benchmarks())
    same = (key.removesuffix("_10").removesuffix("_letter") for key in final)  # same questions
    default = [*BENCHMARKS, *same]
    names = cfg.benchmarks.split("|") if cfg.benchmarks else dict.fromkeys(default)
    tests = [eval_task(name) for name in names]
    found = overlaps([bucket.train for bucket in learned], tests)
    owners = (bucket.name for bucket in learned for _ in tests)
    rows = [
        [name, o.held_out, *(f"{n:,}" for n in (o.items, o.checked, len(o.shared), len(o.whole)))]
        for name, o in zip(owners, found, strict=True)
        if o.shared or o.whole
    ]
    columns = ["Bucket", "Benchmark", "Items", "Checked", "Share 13 words", "Found in full"]
    table = {"title": "Overlap with benchmarks", "columns": columns, "rows": rows}
    values = {"Items with overlap": sum(len(o.shared) + len(o.whole) for o in found)}
    inputs = {"before": fingerprint({bucket.name: bucket.train.identity for bucket in learned})}
    provenance = records.Provenance(records.new_run_id(), 0, inputs)
    report.append_section(SECTION, cfg, values, provenance, tables=[table])


if __name__ == "__main__":
    start(main, HoldOut(), __doc__)
