"""
Watch a fine-tuning run for signs that it is broken, from its checkpoints and log.

    python -m scripts.lab.watch --run=sft:d4 --parent=mid:d4              # all saved checkpoints
    python -m scripts.lab.watch --run=rl:d4 --parent=sft:d4 --follow      # and those to come

Reads   the checkpoints (trained with --save_every), metrics.jsonl and packed rows of the run, and
        the checkpoint that it started from
Writes  the section "Canaries <stage>"; exits with status 78 if the run is broken
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nanochat import records, report
from nanochat.checkpoint import (
    Checkpoint,
    find_checkpoint,
    load_inference,
    read_checkpoint,
    stage_folder,
    step_folders,
)
from nanochat.common import MissingInput, printable
from nanochat.config import start
from nanochat.dist import DistConfig, init_dist
from nanochat.lab.canaries import (
    BROKEN,
    CanaryMonitor,
    check_rows,
    measure,
    open_suite,
    pretraining_batches,
    rises,
)
from nanochat.records import METRICS_FILE, read_metrics

POLL_SECONDS, GIVE_UP_SECONDS = 2.0, 3600.0


@dataclass(frozen=True)
class Watch:
    run: str = ""
    """Run to watch: stage:tag, as in sft:d4."""
    parent: str = ""
    """Checkpoint that it started from: stage[:tag[:step]], as in mid:d4."""
    follow: bool = False
    """Wait for further checkpoints until the run has finished or is found broken, or for an hour
    without a new one."""
    dist: DistConfig = field(default_factory=DistConfig)


def main(cfg: Watch) -> None:
    dist = init_dist(cfg.dist, steady=False)
    stage, _, tag = cfg.run.partition(":")
    if not tag or not cfg.parent:
        raise ValueError("name the run and its parent, as in --run=sft:d4 --parent=mid:d4")
    records.require_writable()
    folder, parent = stage_folder(stage) / tag, find_checkpoint(cfg.parent)
    suite = open_suite(parent.state["source"].get("dataset"))
    shared = pretraining_batches(parent, dist), suite, dist
    before = measure(*load_inference(parent, dist), *shared)
    checkpoint, monitor = None, CanaryMonitor()

    # The first step, then every checkpoint; a canary must trigger at two of them
    for checkpoint in saved_checkpoints(folder, cfg.follow):
        log, step = read_log(folder), checkpoint.step
        if not monitor.worst and "rows" in checkpoint.state:
            monitor.record(1, check_rows(checkpoint.state, log[0]["loss"], parent, dist))
        try:
            found = rises(before, measure(*load_inference(checkpoint, dist), *shared))
        except OSError:
            if step == max(step_folders(folder), default=step):
                raise
            continue  # deleted meanwhile: a run keeps only the newest
        if "without_signal" in (logged := log.get(step - 1, {})):  # RL
            found["no_signal"] = logged["without_signal"]
        monitor.record(step, found)
        print(f"step {step}: {monitor.level}", flush=True)
        if monitor.level == "broken":
            break
    if checkpoint is None:
        raise MissingInput(f"no checkpoint in {folder}", "a training run with --save_every")

    values = {"Canaries": monitor.level, "Last step": checkpoint.step}
    inputs = checkpoint.state["provenance"]["inputs"]
    cost, tables = records.Cost.so_far(dist), [monitor.table()]
    report.append_section(f"Canaries {stage}", cfg, values, inputs, cost, tables=tables)
    if monitor.level == "broken":
        print("broken: check the template, loss mask, --init_lr_frac and checkpoint", flush=True)
        raise SystemExit(BROKEN)


def read_log(folder: Path) -> dict[int, dict[str, Any]]:
    """Logged metrics of each step of a run."""
    return {each["step"]: each for each in read_metrics(folder / METRICS_FILE) if "loss" in each}


def saved_checkpoints(folder: Path, follow: bool) -> Iterator[Checkpoint]:
    """Yield the checkpoints in order; with `follow`, also those to come until the run finishes."""
    step, changed = -1, time.monotonic()
    while True:
        if new := [each for each in step_folders(folder).items() if each[0] > step]:
            (step, path), changed = new[0], time.monotonic()
            try:
                checkpoint = read_checkpoint(path)
            except (OSError, ValueError) as error:
                if len(new) == 1:
                    raise
                print(printable(f"skipped step {step}: {error}"), flush=True)  # deleted meanwhile
                continue
            yield checkpoint
            follow = follow and not checkpoint.state["progress"]["finished"]
        elif not follow or time.monotonic() > changed + GIVE_UP_SECONDS:
            return
        else:
            time.sleep(POLL_SECONDS)


if __name__ == "__main__":
    start(main, Watch(), __doc__)
