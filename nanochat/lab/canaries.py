"""
Is a run broken? A small fixed suite, asked of the parent before and of the model on the way.

    what Suite measures, before and on the way -> Watch: note, warn or broken -> stop

What post-training moves little must not fall far: bits per byte of the text that was pretrained on.
How little depends on the rates, so the rise is told as a share of the way to knowing nothing, where
every token is as likely. What it does move must move as the loss says, and rows must hold what is
taught: the suite renders its conversations itself, so a slip in template, mask or loading shows at
the first step. And answers are looked at as text: how long, whether they end, whether they can be
read, whether they repeat themselves or name one letter whatever is asked. After the first step only
what two looks in a row see is broken. Knows no task; thresholds were set by what known-good runs
and planted breakages do (dev/LOG.md).
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, cast

from nanochat.checkpoint import Checkpoint
from nanochat.common import BROKEN, Refused
from nanochat.distributed import Machine
from nanochat.finetune import FineTuning
from nanochat.gpt import GPT
from nanochat.lab.canary_suite import Asked, Suite, Taught, pretraining_text
from nanochat.tokenizer import Tokenizer
from nanochat.train import Callback, Progress, Run, Step

Level = Literal["fine", "note", "warn", "broken"]
LEVELS: tuple[Level, ...] = ("fine", "note", "warn", "broken")
CAN_ANSWER = 2.0  # times longer or shorter than they should be: the answers of a parent that can
LOOKED_AT = 256  # rows that are compared with what is asked
KNOWING = 0.9  # of the bits of knowing nothing: a parent that needs more has nothing to forget


class Bounds(NamedTuple):
    """From which value on a sentinel notes, warns, and calls a run broken."""

    note: float
    warn: float
    broken: float

    def level(self, value: float) -> Level:
        """Of a value that is a number."""
        return LEVELS[sum(value >= bound for bound in self)]


# All are rises over the parent, but for the ratios (counted, length) and the gap
BOUNDS = {
    "forgotten": Bounds(0.25, 0.5, 0.75),
    "gap": Bounds(0.75, 1.5, 2.5),
    "apart": Bounds(1.0, 1.5, math.inf),  # the smoothed loss is that of several models
    "counted": Bounds(1.25, 1.4, 1.6),
    "lead": Bounds(0.2, 0.35, 0.5),
    "no_end": Bounds(0.15, 0.3, 0.6),
    "unreadable": Bounds(0.15, 0.3, 0.6),
    "repeated": Bounds(0.15, 0.3, 0.5),
    "one_letter": Bounds(0.3, 0.5, 0.7),
    "length": Bounds(2.0, 3.0, 6.0),
    "no_signal": Bounds(0.9, 0.97, math.inf),
}
WORDS = {
    "forgotten": "what pretraining taught is forgotten, by the bits of its text",
    "gap": "the first loss of training is not that of its conversations, rendered apart",
    "apart": "the training loss is not that of its conversations, rendered apart",
    "counted": "another share of tokens carries loss than in its conversations, rendered apart",
    "lead": "answers begin after other tokens than in its conversations, rendered apart",
    "no_end": "more answers do not end",
    "unreadable": "more answers cannot be read",
    "repeated": "answers repeat themselves more",
    "one_letter": "one letter answers more questions, whatever is asked",
    "length": "the length of answers is further from that of those they should learn",
    "no_signal": "groups of answers all earned the same, and teach nothing",
}


@dataclass(frozen=True)
class SentinelConfig:
    sentinel_every: int | None = None
    """Steps between looks at the fixed suite; 0 = never. Default: at 2, 5 and 10% of the run, then
    every 10%."""
    sentinel_tokens: int = 4096
    """Tokens of pretraining text in the suite."""
    sentinel_answers: int = 16
    """Held-out conversations in the suite, of all buckets together, that are answered; 0 = none."""
    on_broken: Literal["stop", "warn"] = "stop"
    """What becomes of a run that is called broken: it ends without a checkpoint (status 78), or is
    told of and goes on."""

    def due(self, step: int, num_steps: int) -> bool:
        """Whether the suite is asked after so many steps."""
        if self.sentinel_every is not None:
            return self.sentinel_every > 0 and step % self.sentinel_every == 0
        places = [0.02, 0.05, *(i / 10 for i in range(1, 11))]
        return step in {max(1, round(place * num_steps)) for place in places}


class Broken(Refused):
    """A run that its sentinels stopped."""

    status = BROKEN


class Finding(NamedTuple):
    """What one sentinel says at one step."""

    step: int
    name: str
    value: float
    """The rise over the parent, the gap, or the ratio."""
    level: Level


@dataclass
class Watch(Callback):
    """Measures a fixed suite during training. `parent`: what it measured before the first step."""

    cfg: SentinelConfig
    suite: Suite
    parent: Mapping[str, float]
    model: GPT
    num_steps: int
    machine: Machine
    first_pass: float = 0.0
    """Steps until rows come again: from then on the training loss may fall by heart."""
    rows: Mapping[str, float] = field(default_factory=dict)
    """What its rows hold, beside what is asked."""
    history: list[Finding] = field(default_factory=list)
    measured: dict[str, float] = field(default_factory=dict)
    """The latest."""
    spiked: set[str] = field(default_factory=set)
    """Sentinels beyond what is broken at the latest look."""

    def start(self, run: Run) -> None:
        self.log = run.log

    def after_step(self, done: Step, progress: Progress) -> None:
        step = progress.step
        findings = self.first_step(done.loss) if step == 1 else []
        if self.cfg.due(step, self.num_steps):
            findings += self.look(step, self.model, progress.smooth_loss)
            self.log(step, {f"sentinel_{name}": x for name, x in self.measured.items()})
        stop_if_broken(findings, self.cfg)

    def values(self) -> dict[str, Any]:
        return {"Sentinels": worst(self.history)}

    def tables(self) -> list[dict[str, Any]]:
        return [self.table()]

    def first_step(self, loss: float) -> list[Finding]:
        """Judge the first step: its loss is the parent's, and its rows hold what they should."""
        found = dict(self.rows)
        if "taught_loss" in self.parent:
            found["gap"] = gap(loss, self.parent["taught_loss"])
        return self.judge(1, found)

    def look(self, step: int, model: GPT, smooth_loss: float) -> list[Finding]:
        """Ask the suite and judge; every rank calls this, the main one measures."""
        self.measured = self.machine.on_main(
            "measuring sentinels", lambda: self.suite.measure(model)
        )
        found = {}
        if self.parent.get("length", math.inf) <= CAN_ANSWER:
            rises = ("no_end", "unreadable", "repeated", "one_letter")
            found = {name: self.measured[name] - self.parent[name] for name in rises}
            found["length"] = self.measured["length"] / self.parent["length"]
        was, most = (self.parent.get(name, math.nan) for name in ("text_bpb", "knowing_nothing"))
        if was < KNOWING * most:
            found["forgotten"] = (self.measured["text_bpb"] - was) / (most - was)
        if "taught_loss" in self.measured and step < self.first_pass:
            found["apart"] = gap(self.measured["taught_loss"], smooth_loss)
        findings = self.judge(step, found, self.spiked)
        self.spiked = {name for name, value in found.items() if value >= BOUNDS[name].broken}
        return findings

    def practised(self, step: int, without_signal: float) -> list[Finding]:
        """Judge a step of RL by the share of its groups whose answers all earned the same."""
        return self.judge(step, {"no_signal": without_signal})

    def judge(
        self, step: int, found: Mapping[str, float], seen: Collection[str] | None = None
    ) -> list[Finding]:
        """
        Levels of values; what is more than fine is printed. Where names that were broken at the
        look before are given, others are warned of: a large step may spike and recover.
        """
        findings = []
        for name, value in found.items():
            if math.isnan(value):  # nothing could be measured
                continue
            level = BOUNDS[name].level(value)
            if level == "broken" and seen is not None and name not in seen:
                level = "warn"
            findings.append(Finding(step, name, value, level))
        self.history += findings
        for finding in findings:
            if finding.level != "fine":
                self.machine.print0(sentence(finding, self.parent.get(finding.name)))
        return findings

    def table(self) -> dict[str, Any]:
        """The worst finding of every sentinel, as a record holds it."""
        rows = []
        for name in dict.fromkeys(finding.name for finding in self.history):
            mine = [finding for finding in self.history if finding.name == name]
            worst = max(mine, key=lambda finding: (LEVELS.index(finding.level), finding.value))
            was = self.parent.get(name)
            rows.append(
                [
                    *(name, WORDS[name], "-" if was is None else f"{was:.4f}"),
                    *(f"{worst.value:+.4f}", str(worst.step), str(len(mine)), worst.level),
                ]
            )
        columns = ["Sentinel", "Sounds when", "Parent", "Worst", "At step", "Looks", "Level"]
        return {"title": "Sentinels", "columns": columns, "rows": rows}


def open_watch(
    cfg: SentinelConfig,
    parent: Checkpoint,
    model: GPT,
    chats: Mapping[str, Asked],
    num_steps: int,
    machine: Machine,
    taught: Mapping[str, Taught] = {},
    shares: Mapping[str, float] = {},
) -> Watch | None:
    """
    Ask `model`, loaded from `parent`, before anything changes it; None where that is not wanted.

    By bucket, `chats`: held-out conversations to answer; of a training on conversations `taught`:
    these, and `shares`: of its tokens.
    """
    if cfg.sentinel_every == 0:
        return None
    tokenizer = Tokenizer.read(parent.folder / "tokenizer.json")
    T = model.cfg.max_seq_len
    text = pretraining_text(parent, tokenizer, T, cfg.sentinel_tokens, machine)
    suite = Suite(tokenizer, text, chats, taught, shares, cfg.sentinel_answers)
    before = machine.on_main("measuring sentinels", lambda: suite.measure_parent(model))
    return Watch(cfg, suite, before, model, num_steps, machine)


def watch_fine_tuning(cfg: SentinelConfig, run: FineTuning) -> list[Callback]:
    """The canaries of a training on conversations: they ask what it learns."""
    stage, mixed = run.stage, run.mixed
    shares = {bucket.name: mixed.share(bucket) for bucket in mixed.buckets}
    learned = [bucket for bucket in run.talk.learned if shares[bucket.name]]
    chats = {bucket.name: cast(Asked, bucket.val) for bucket in learned}
    taught = {bucket.name: cast(Taught, bucket.train) for bucket in learned}
    watch = open_watch(
        cfg, run.parent, stage.model, chats, stage.num_steps, run.machine, taught, shares
    )
    if watch is None:
        return []
    rows = run.rows
    some = rows.batch(0, min(LOOKED_AT, rows.packed_train_rows), seed=0)
    watch.rows = watch.suite.beside(*stage.split(some))
    watch.first_pass = rows.packed_train_rows * rows.max_seq_len / stage.batch_tokens
    return [watch]


def gap(one: float, other: float) -> float:
    """How far two losses lie apart, as a multiple of what is usual between small samples."""
    return (one - other) / max(0.5, 0.35 * other)


def sentence(finding: Finding, was: float | None) -> str:
    """A finding in words."""
    base = "" if was is None else f", the parent's was {was:.4g}"
    return (
        f"sentinel {finding.level} at step {finding.step}: {WORDS[finding.name]} "
        f"({finding.name} {finding.value:+.4g}{base})"
    )


def stop_if_broken(findings: Sequence[Finding], cfg: SentinelConfig) -> None:
    """Raise Broken for a run that was called so, unless that is to be told only."""
    broken = [finding for finding in findings if finding.level == "broken"]
    if broken and cfg.on_broken == "stop":
        raise Broken(
            f"the run is broken: {', '.join(WORDS[f.name] for f in broken)}",
            "look at template, mask, --init_lr_frac and what is loaded; --on_broken=warn goes on",
        )


def worst(history: Sequence[Finding]) -> Level:
    """The highest level there was."""
    return LEVELS[max((LEVELS.index(finding.level) for finding in history), default=0)]
