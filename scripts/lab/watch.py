"""
Watch a fine-tuning run for signs that it is broken, from its checkpoints and log.

    python -m scripts.lab.watch --run=sft:d4 --parent=mid:d4              # all saved checkpoints
    python -m scripts.lab.watch --run=rl:d4 --parent=sft:d4 --follow      # and those to come

Reads   the checkpoints (trained with --save_every), metrics.jsonl and packed rows of the run, and
        the checkpoint that it started from
Writes  the section "Canaries <stage>"; exits with status 78 if the run is broken
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from nanochat import records, report
from nanochat.checkpoint import (
    Checkpoint,
    load_model,
    newest_state,
    parse_checkpoint_ref,
    read_checkpoint,
    stage_folder,
    step_folders,
)
from nanochat.common import MissingInput, base_dir
from nanochat.config import require_positive, start
from nanochat.dataloader import Rows, inputs_and_targets
from nanochat.distributed import DistConfig, DistContext, init_distributed
from nanochat.lab.canaries import (
    BROKEN,
    NUM_ROWS,
    CanaryMonitor,
    CanarySuite,
    open_suite,
    pretraining_text,
)
from nanochat.logger import METRICS_FILE, read_metrics
from tasks.base import Task
from tasks.buckets import buckets, held_out_questions

POLL_SECONDS = 2.0


@dataclass(frozen=True)
class Watch:
    run: str = ""
    """Run to watch: stage:tag, as in sft:d4."""
    parent: str = ""
    """Checkpoint that it started from: stage[:tag[:step]], as in mid:d4."""
    follow: bool = False
    """Wait for further checkpoints until the run has finished or is found broken."""
    timeout_minutes: float = 60.0
    """With --follow: give up after this long without a new checkpoint."""
    report_dir: str | None = None
    """Folder of records. Default: report/ under the base directory."""
    machine: DistConfig = field(default_factory=DistConfig)

    def __post_init__(self) -> None:
        require_positive(self, "timeout_minutes")


def main(cfg: Watch) -> None:
    machine = init_distributed(cfg.machine, steady=False)
    stage, _, tag = cfg.run.partition(":")
    if not tag or not cfg.parent:
        raise ValueError("name the run and its parent, as in --run=sft:d4 --parent=mid:d4")
    folder = stage_folder(stage) / tag
    state = wait_for_state(folder, cfg)
    parent = parse_checkpoint_ref(cfg.parent)
    suite = open_canaries(state, parent, machine)
    monitor = CanaryMonitor(suite.measure(load_model(parent, machine)))
    rows = open_training_rows(state)
    compared = {}
    if rows is not None:
        some = rows.batch(0, min(NUM_ROWS, rows.packed_train_rows), seed=0)
        compared = suite.compare_rows(*inputs_and_targets(some))
        tokens = rows.packed_train_rows * rows.max_seq_len
        monitor.epoch_steps = tokens / state["identity"]["batch_tokens"]
    log = {entry["step"]: entry for entry in read_metrics(folder / METRICS_FILE)}
    if "loss" in log.get(0, {}):
        monitor.check_start(log[0]["loss"], compared)

    # Checkpoints in order; a run is broken once a canary triggers at two of them
    seen: set[int] = set()
    changed = time.monotonic()
    while monitor.worst != "broken":
        todo = [step for step in step_folders(folder) if step not in seen]
        for step in todo[:1]:
            checkpoint = read_checkpoint(step_folders(folder)[step], step)
            log = {entry["step"]: entry for entry in read_metrics(folder / METRICS_FILE)}
            metrics = suite.measure(load_model(checkpoint, machine))
            monitor.check(step, metrics, log.get(step - 1, {}))
            print(f"step {step}: {monitor.worst}", flush=True)
            state, changed = checkpoint.state, time.monotonic()
            seen.add(step)
        if not todo:
            done = state["progress"]["finished"] or not cfg.follow
            if done or time.monotonic() - changed > 60 * cfg.timeout_minutes:
                break
            time.sleep(POLL_SECONDS)

    values = {"Canaries": monitor.worst, "Checkpoints": len(seen)}
    provenance = records.Provenance(**state["provenance"])
    table = monitor.table()
    report.append_section(f"Canaries {stage}", cfg, values, provenance, tables=[table])
    if monitor.worst == "broken":
        print("broken: check the template, loss mask, --init_lr_frac and checkpoint", flush=True)
        raise SystemExit(BROKEN)


def wait_for_state(folder: Any, cfg: Watch) -> Mapping[str, Any]:
    """State of the newest checkpoint; with --follow, waits for the first one."""
    started = time.monotonic()
    while (found := newest_state(folder)) is None:
        if not cfg.follow or time.monotonic() - started > 60 * cfg.timeout_minutes:
            raise MissingInput(f"no checkpoint in {folder}", "a training run with --save_every")
        time.sleep(POLL_SECONDS)
    return found


def open_canaries(
    state: Mapping[str, Any], parent: Checkpoint, machine: DistContext
) -> CanarySuite:
    """The suite for a run: its parent's pretraining text, and conversations of its mixture."""
    tokenizer, settings = parent.tokenizer(), state["settings"]
    T = state["model"]["max_seq_len"]
    chats: dict[str, Task] = {}
    train_chats: dict[str, Task] = {}
    shares: dict[str, float] = {}
    if "mixture" in state:
        declared, spec = state.get("declared", {}), settings["mixture"]
        shares = {b["name"]: b["share"] for b in state["mixture"]["resolved"]["buckets"]}
        used = [b for b in buckets(spec, declared) if shares.get(b.name)]
        chats = {b.name: b.val for b in used}
        train_chats = {b.name: b.train for b in used}
    elif settings.get("task"):  # RL and DPO
        spec, count = settings.get("eval_task") or settings["task"], settings["eval_examples"]
        chats = {task.name: task for task in held_out_questions(spec, count).tasks}
    text = pretraining_text(parent, tokenizer, T, machine)
    static = open_suite(parent.state["source"].get("dataset"))
    questions = [task for task in static if task.kind == "choice"]
    return CanarySuite(tokenizer, text, chats, train_chats, shares, questions)


def open_training_rows(state: Mapping[str, Any]) -> Rows | None:
    """The packed conversations that a run trains on; None if there are none."""
    recipe = state["identity"].get("rows")
    if recipe is None:
        return None
    folder = base_dir() / "rows" / recipe["fingerprint"]
    return Rows(folder, ["train"], "val", "int32", state["model"]["vocab_size"], recipe)


if __name__ == "__main__":
    start(main, Watch(), __doc__)
