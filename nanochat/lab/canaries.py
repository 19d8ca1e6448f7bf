"""
Detect a broken fine-tuning run early: a small fixed suite, measured before and during training.

    Suite.measure, parent and model -> CanaryMonitor: note, warn or broken -> the run stops

Post-training may cost some bits per byte on the pretraining text, but not many; the rise is
measured as a share of the way to a uniform distribution over tokens. The loss on the training
conversations must be the logged one, and packed rows must carry loss where answers are: the suite
renders the conversations itself, so a mistake in template, mask or loading shows at the first step.
Generated answers are compared with the parent's: their length, whether they end and can be parsed,
whether they repeat themselves or always choose one letter. After the first step a canary is broken
only when it triggers at two checks in a row. Thresholds were set on healthy runs and planted
failures (dev/LOG.md).
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, cast

from nanochat.checkpoint import Checkpoint, Progress
from nanochat.common import BROKEN, UsageError
from nanochat.distributed import DistContext
from nanochat.finetune import FineTuning, split
from nanochat.gpt import GPT
from nanochat.lab.canary_suite import Suite, pretraining_text
from nanochat.tokenizer import Tokenizer
from nanochat.train import Callback, Step, TrainingRun
from tasks.base import Task

Level = Literal["fine", "note", "warn", "broken"]
LEVELS: tuple[Level, ...] = ("fine", "note", "warn", "broken")
MAX_LENGTH_RATIO = 2.0  # a parent whose answers are further from the expected length cannot answer
NUM_ROWS = 256  # packed rows that are compared with the conversations
MAX_PARENT_SHARE = 0.9  # of the bits of a uniform distribution: above, nothing can be forgotten
RETIRED_FLAGS = {
    "sentinel_every": "it is --canary_every",
    "sentinel_tokens": "the canary suite has a fixed size",
    "sentinel_answers": "the canary suite has a fixed size",
}


class Canary(NamedTuple):
    """Values from which a canary notes, warns, and calls the run broken."""

    note: float
    warn: float
    broken: float
    meaning: str

    def level(self, value: float) -> Level:
        """The level of a value that is not NaN."""
        return LEVELS[sum(value >= bound for bound in self[:3])]


# All values are increases over the parent, except for ratios (counted, length) and gaps
CANARIES = {
    "forgotten": Canary(0.25, 0.5, 0.75, "pretraining is forgotten, by the bits of its text"),
    "gap": Canary(0.75, 1.5, 2.5, "the first training loss is not that of its conversations"),
    # no level "broken": the smoothed loss averages over several steps
    "apart": Canary(1.0, 1.5, math.inf, "the training loss is not that of its conversations"),
    "counted": Canary(1.25, 1.4, 1.6, "rows and conversations differ in the share of targets"),
    "lead": Canary(0.2, 0.35, 0.5, "rows and conversations differ in the tokens before answers"),
    "no_end": Canary(0.15, 0.3, 0.6, "more answers do not end"),
    "unreadable": Canary(0.15, 0.3, 0.6, "more answers cannot be parsed"),
    "repeated": Canary(0.15, 0.3, 0.5, "answers repeat themselves more"),
    "one_letter": Canary(0.3, 0.5, 0.7, "one letter answers more of the questions"),
    "length": Canary(2.0, 3.0, 6.0, "the length of answers is further from the expected one"),
    "no_signal": Canary(0.9, 0.97, math.inf, "all answers of a group earn the same reward"),
}


@dataclass(frozen=True)
class CanaryConfig:
    canary_every: int | None = None
    """Steps between canary checks; 0 = never. Default: at 2, 5 and 10% of the run, then every
    10%."""
    on_broken: Literal["stop", "warn"] = "stop"
    """What happens to a run that is called broken: it ends without a checkpoint (status 78), or
    prints a warning and continues."""

    def due(self, step: int, num_steps: int) -> bool:
        """Whether the suite is measured after `step` steps."""
        if self.canary_every is not None:
            return self.canary_every > 0 and step % self.canary_every == 0
        shares = [0.02, 0.05, *(i / 10 for i in range(1, 11))]
        return step in {max(1, round(share * num_steps)) for share in shares}


class Broken(UsageError):
    """A run that its canaries stopped."""

    status = BROKEN


class Finding(NamedTuple):
    """What one canary found at one step."""

    step: int
    name: str
    value: float
    """The increase over the parent, the gap, or the ratio."""
    level: Level

    @property
    def severity(self) -> tuple[int, float]:
        """Sorts findings of one canary from harmless to broken."""
        return LEVELS.index(self.level), self.value


@dataclass
class CanaryMonitor(Callback):
    """Measures a fixed suite during training. `parent`: its figures before the first step."""

    cfg: CanaryConfig
    suite: Suite
    parent: Mapping[str, float]
    model: GPT
    num_steps: int
    machine: DistContext
    epoch_steps: float = 0.0
    """Steps until rows repeat: from then on the training loss may fall by memorization."""
    rows: Mapping[str, float] = field(default_factory=dict)
    """What `Suite.compare_rows` found in the packed rows of the run."""
    history: list[Finding] = field(default_factory=list)
    measured: dict[str, float] = field(default_factory=dict)
    """The latest figures of the suite."""
    triggered: set[str] = field(default_factory=set)
    """Canaries above their bound `broken` at the latest check."""

    def start(self, run: TrainingRun) -> None:
        self.log = run.log

    def after_step(self, done: Step, progress: Progress) -> None:
        step = progress.step
        findings = self.check_first_step(done.loss) if step == 1 else []
        if self.cfg.due(step, self.num_steps):
            if (silent := done.metrics.get("without_signal")) is not None:
                findings += self.check_rewards(step, silent)
            findings += self.check(step, self.model, progress.smooth_loss)
            self.log(step, {f"canary_{name}": x for name, x in self.measured.items()})
        stop_if_broken(findings, self.cfg)

    def values(self) -> dict[str, Any]:
        worst = max((finding.severity[0] for finding in self.history), default=0)
        return {"Canaries": LEVELS[worst]}

    def tables(self) -> list[dict[str, Any]]:
        return [self.table()]

    def check_first_step(self, loss: float) -> list[Finding]:
        """Check that the first loss is the parent's and that rows carry loss where they should."""
        found = dict(self.rows)
        if "taught_loss" in self.parent:
            found["gap"] = relative_gap(loss, self.parent["taught_loss"])
        return self.classify(1, found)

    def check(self, step: int, model: GPT, smooth_loss: float) -> list[Finding]:
        """Measure the suite on the main rank and classify its figures; call it on every rank."""
        parent = self.parent
        now = self.measured = self.machine.on_main(
            "measuring canaries", lambda: self.suite.measure(model)
        )
        found = {}
        if parent.get("length", math.inf) <= MAX_LENGTH_RATIO:
            rises = ("no_end", "unreadable", "repeated", "one_letter")
            found = {name: now[name] - parent[name] for name in rises}
            found["length"] = now["length"] / parent["length"]
        before, uniform = (parent.get(name, math.nan) for name in ("text_bpb", "knowing_nothing"))
        if before < MAX_PARENT_SHARE * uniform:
            found["forgotten"] = (now["text_bpb"] - before) / (uniform - before)
        if "taught_loss" in now and step < self.epoch_steps:
            found["apart"] = relative_gap(now["taught_loss"], smooth_loss)
        findings = self.classify(step, found, self.triggered)
        self.triggered = {name for name, x in found.items() if x >= CANARIES[name].broken}
        return findings

    def check_rewards(self, step: int, without_signal: float) -> list[Finding]:
        """Check a step of RL by the share of its groups whose answers all earned the same."""
        return self.classify(step, {"no_signal": without_signal})

    def classify(
        self, step: int, found: Mapping[str, float], before: Collection[str] | None = None
    ) -> list[Finding]:
        """
        Findings for values by canary; prints those that are not fine. With `before`, the canaries
        triggered at the previous check, others are at most warned of: a spike may recover.
        """
        findings = []
        for name, value in found.items():
            if math.isnan(value):  # nothing could be measured
                continue
            level = CANARIES[name].level(value)
            if level == "broken" and before is not None and name not in before:
                level = "warn"
            findings.append(Finding(step, name, value, level))
            if level != "fine":
                was = f", parent {self.parent[name]:.4g}" if name in self.parent else ""
                self.machine.print0(
                    f"canary {level} at step {step}: {CANARIES[name].meaning} "
                    f"({name} {value:+.4g}{was})"
                )
        self.history += findings
        return findings

    def table(self) -> dict[str, Any]:
        """The worst finding of every canary, as a record holds it."""
        rows = []
        for name in dict.fromkeys(finding.name for finding in self.history):
            mine = [finding for finding in self.history if finding.name == name]
            worst = max(mine, key=lambda finding: finding.severity)
            was = f"{self.parent[name]:.4f}" if name in self.parent else "-"
            found = (f"{worst.value:+.4f}", str(worst.step), str(len(mine)), worst.level)
            rows.append([name, CANARIES[name].meaning, was, *found])
        columns = ["Canary", "Triggers when", "Parent", "Worst", "At step", "Checks", "Level"]
        return {"title": "Canaries", "columns": columns, "rows": rows}


def open_monitor(
    cfg: CanaryConfig,
    parent: Checkpoint,
    model: GPT,
    chats: Mapping[str, Task],
    num_steps: int,
    machine: DistContext,
    taught: Mapping[str, Task] = {},
    shares: Mapping[str, float] = {},
) -> CanaryMonitor | None:
    """
    Measure `model`, just loaded from `parent`; None where cfg turns canaries off.

    By bucket, `chats`: held-out conversations to answer; for a training on conversations `taught`:
    these, and `shares`: of its tokens.
    """
    if cfg.canary_every == 0:
        return None
    tokenizer = Tokenizer.read(parent.folder / "tokenizer.json")
    text = pretraining_text(parent, tokenizer, model.cfg.max_seq_len, machine)
    suite = Suite(tokenizer, text, chats, taught, shares)
    before = machine.on_main("measuring canaries", lambda: suite.measure_parent(model))
    return CanaryMonitor(cfg, suite, before, model, num_steps, machine)


def monitor_finetuning(cfg: CanaryConfig, tuning: FineTuning) -> list[Callback]:
    """The callbacks that check a training on conversations: a monitor, or none."""
    run, mixed, rows = tuning.run, tuning.resolution, tuning.rows
    shares = {bucket.name: mixed.share(bucket) for bucket in mixed.buckets}
    learned = [bucket for bucket in tuning.chats.learned if shares[bucket.name]]
    chats = {bucket.name: cast(Task, bucket.val) for bucket in learned}
    taught = {bucket.name: cast(Task, bucket.train) for bucket in learned}
    monitor = open_monitor(
        cfg, tuning.parent, run.model, chats, run.num_steps, run.machine, taught, shares
    )
    if monitor is None:
        return []
    some = rows.batch(0, min(NUM_ROWS, rows.packed_train_rows), seed=0)
    monitor.rows = monitor.suite.compare_rows(*split(some))
    monitor.epoch_steps = rows.packed_train_rows * rows.max_seq_len / run.batch_tokens
    return [monitor]


def relative_gap(one: float, other: float) -> float:
    """The difference of two losses, as a multiple of what is usual between small samples."""
    return (one - other) / max(0.5, 0.35 * other)


def stop_if_broken(findings: Sequence[Finding], cfg: CanaryConfig) -> None:
    """Raise Broken for findings of level broken, unless cfg.on_broken is "warn"."""
    broken = [finding for finding in findings if finding.level == "broken"]
    if broken and cfg.on_broken == "stop":
        raise Broken(
            f"the run is broken: {', '.join(CANARIES[f.name].meaning for f in broken)}",
            "check template, mask, --init_lr_frac and the checkpoint; --on_broken=warn continues",
        )
