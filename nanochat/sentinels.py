"""
Is a run broken? A small fixed suite, asked of the parent before and of the model on the way.

    parent, text, conversations -> Suite.measure -> Watch: note, warn or broken -> stop

What post-training moves little must not fall far: bits per byte of the text that was pretrained on.
How little depends on the rates, so the rise is told as a share of the way to knowing nothing, where
every token is as likely. What it does move must move as the loss says: the suite renders its
conversations itself, so a slip in template, mask or loading shows as a gap between it and the
training loss, at the first step. And answers are looked at as text: how long, whether they end,
whether they can be read, whether they repeat themselves or name one letter whatever is asked. Knows
no task; thresholds were set by what known-good runs do (dev/LOG.md).
"""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import torch

from nanochat.chat_format import Message, render, render_prompt
from nanochat.common import Refused
from nanochat.engine import Completion, Engine
from nanochat.eval_bpb import Batch, bits_by_row
from nanochat.gpt import GPT, for_inference
from nanochat.loss import IGNORE
from nanochat.machine import Machine
from nanochat.sampling import Sampling
from nanochat.stopping import BROKEN
from nanochat.tokenizer import Tokenizer

Level = Literal["fine", "note", "warn", "broken"]
LEVELS: tuple[Level, ...] = ("fine", "note", "warn", "broken")
NGRAM = 4  # tokens whose repetition is counted
COUNTED = 64  # conversations of a bucket in which tokens that carry loss are counted


class Bounds(NamedTuple):
    """From which value on a sentinel notes, warns, and calls a run broken."""

    note: float
    warn: float
    broken: float

    def level(self, value: float) -> Level:
        """NaN, where nothing could be measured, is fine."""
        return LEVELS[sum(value >= bound for bound in self)]


# All are rises over the parent, but for the ratios (counted, length) and the gap
BOUNDS = {
    "forgotten": Bounds(0.2, 0.4, 0.6),
    "gap": Bounds(0.5, 0.75, 1.0),
    "counted": Bounds(1.25, 1.4, 1.6),
    "no_end": Bounds(0.15, 0.3, 0.6),
    "unreadable": Bounds(0.15, 0.3, 0.6),
    "repeated": Bounds(0.15, 0.3, 0.5),
    "one_letter": Bounds(0.3, 0.5, 0.7),
    "length": Bounds(2.0, 3.0, 6.0),
    "no_signal": Bounds(0.9, 0.97, math.inf),
}
WORDS = {
    "forgotten": "what pretraining taught is forgotten, by the bits of its text",
    "gap": "the training loss lies beside that of the same conversations as they are asked",
    "counted": "another share of tokens carries loss than in conversations as they are asked",
    "no_end": "more answers do not end",
    "unreadable": "more answers cannot be read",
    "repeated": "answers repeat themselves more",
    "one_letter": "one letter answers more questions, whatever is asked",
    "length": "answers have another length",
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
    """Conversations in the suite, of all buckets together, which are also answered; 0 = none."""
    on_broken: Literal["stop", "warn"] = "warn"
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


class Asked(Protocol):
    """Held-out conversations of a bucket; `tasks.base.Task` is one."""

    def __len__(self) -> int: ...
    def __getitem__(self, i: int) -> Sequence[Message]: ...
    def letters(self, i: int) -> tuple[str, ...]: ...
    def answered(self, answer: str) -> bool: ...


@dataclass
class Suite:
    """What is asked, always the same. `shares`: of the training tokens, by bucket."""

    tokenizer: Tokenizer
    text: Sequence[Batch]
    chats: Mapping[str, Asked]
    shares: Mapping[str, float]
    cfg: SentinelConfig
    max_new_tokens: int = 48

    def measure_parent(self, model: GPT) -> dict[str, float]:
        """Before a run: as `measure`, and what does not change."""
        found = self.measure(model)
        if self.text:
            found["knowing_nothing"] = self.knowing_nothing()
        share_ = self.counted(model.cfg.max_seq_len)
        return found if math.isnan(share_) else {**found, "counted": share_}

    def measure(self, model: GPT) -> dict[str, float]:
        """Every figure of the suite; those of the answers only where conversations are asked."""
        found = {}
        if self.text:
            sizes = self.tokenizer.token_bytes()
            found["text_bpb"] = bits_by_row(model, self.text, sizes, model.device).value
        return {**found, **self.conversations(model), **self.answers(model)}

    def knowing_nothing(self) -> float:
        """Bits per byte of the text where every token is as likely."""
        sizes = self.tokenizer.token_bytes()
        lengths = np.concatenate([sizes[targets].ravel() for _, targets in self.text])
        return math.log2(len(sizes)) * int((lengths > 0).sum()) / int(lengths.sum())

    def asked(self) -> list[tuple[str, int]]:
        """Bucket and number of the conversations; at least two of each bucket that is learned."""
        learned = [name for name, share in self.shares.items() if share and len(self.chats[name])]
        if not self.cfg.sentinel_answers or not learned:
            return []
        each = max(2, self.cfg.sentinel_answers // len(learned))
        return [(name, i) for name in learned for i in range(min(each, len(self.chats[name])))]

    @torch.no_grad()
    def conversations(self, model: GPT) -> dict[str, float]:
        """Nats per counted token, as the mixture weighs its buckets."""
        nats: dict[str, float] = defaultdict(float)
        counted: Counter = Counter()
        tokens: Counter = Counter()
        for name, i in self.asked():
            ids, said = self.rendered(name, i, model.cfg.max_seq_len)
            x, y = (torch.tensor([each], device=model.device) for each in (ids, said))
            nats[name] += float(model.token_losses(x, y).double().sum())
            counted[name] += sum(target != IGNORE for target in said)
            tokens[name] += len(ids)
        weights = {n: self.shares[n] * counted[n] / tokens[n] for n in nats if counted[n]}
        total = math.fsum(weights.values())
        loss = math.fsum(w * nats[n] / counted[n] for n, w in weights.items())
        return {"answer_loss": loss / total} if total else {}

    def counted(self, max_seq_len: int) -> float:
        """The share of tokens that carry loss, as the mixture weighs its buckets."""
        found = total = 0.0
        for name, share_ in self.shares.items():
            some = range(min(COUNTED, len(self.chats[name]))) if share_ else ()
            pairs = [self.rendered(name, i, max_seq_len) for i in some]
            if pairs:
                said = sum(target != IGNORE for _, targets in pairs for target in targets)
                found += share_ * said / sum(len(ids) for ids, _ in pairs)
                total += share_
        return found / total if total else math.nan

    def rendered(self, name: str, i: int, max_seq_len: int) -> tuple[list[int], list[int]]:
        """Tokens and targets of a conversation, IGNORE where one does not count."""
        ids, mask = render(self.tokenizer, self.chats[name][i], max_seq_len + 1)
        said = [token if own else IGNORE for token, own in zip(ids, mask, strict=True)]
        return ids[:-1], said[1:]

    def answers(self, model: GPT) -> dict[str, float]:
        """What the answers look like."""
        asked = self.asked()
        if not asked:
            return {}
        engine = Engine(for_inference(model), self.tokenizer, len(asked))
        T = model.cfg.max_seq_len
        room = T - min(self.max_new_tokens, T // 2)  # of a prompt that is longer the end is read
        prompts = [render_prompt(self.tokenizer, self.chats[n][i])[-room:] for n, i in asked]
        groups = engine.generate(prompts, Sampling(self.max_new_tokens, 0.0, None))
        said = [group[0] for group in groups]
        words = [self.tokenizer.decode(answer.ids) for answer in said]
        choices = [
            text.strip()
            for (name, i), text in zip(asked, words, strict=True)
            if self.chats[name].letters(i)
        ]
        readable = [self.chats[n].answered(t) for (n, _), t in zip(asked, words, strict=True)]
        most = max(Counter(choices).values()) / len(choices) if len(choices) >= 4 else math.nan
        return {
            "length": sum(len(answer.ids) for answer in said) / len(said),
            "no_end": share(answer.finish == "length" for answer in said),
            "unreadable": 1 - share(readable),
            "repeated": sum(map(repeated, said)) / len(said),
            "one_letter": most,
        }


def share(values: Any) -> float:
    """Of the values that are true."""
    known = list(values)
    return sum(known) / len(known)


def repeated(answer: Completion) -> float:
    """Share of an answer's runs of NGRAM tokens that came before in it."""
    runs = [tuple(answer.ids[i : i + NGRAM]) for i in range(len(answer.ids) - NGRAM + 1)]
    return 1 - len(set(runs)) / len(runs) if runs else 0.0


class Finding(NamedTuple):
    """What one sentinel says at one step."""

    step: int
    name: str
    value: float
    """The rise over the parent, the gap, or the ratio."""
    level: Level


@dataclass
class Watch:
    """Looks at a run on its way. `parent` is what the suite measured before it began."""

    suite: Suite
    parent: Mapping[str, float]
    num_steps: int
    first_pass: float
    """Steps until rows come again: from then on the training loss may fall by heart."""
    counted: float
    """Share of the tokens of the training rows that carry loss."""
    machine: Machine
    history: list[Finding] = field(default_factory=list)
    measured: dict[str, float] = field(default_factory=dict)
    """The latest."""

    def first_step(self, loss: float) -> list[Finding]:
        """Judge the first step: its loss is the parent's, and its rows count what they should."""
        found = {}
        if "answer_loss" in self.parent:
            found["gap"] = gap(loss, self.parent["answer_loss"])
        if self.counted and "counted" in self.parent:
            ratio = self.counted / self.parent["counted"]
            found["counted"] = max(ratio, 1 / ratio)
        return self.judge(1, found)

    def look(self, step: int, model: GPT, smooth_loss: float) -> list[Finding]:
        """Ask the suite and judge; every rank calls this, the main one measures."""
        now = self.suite.measure(model) if self.machine.is_main else {}
        self.measured = self.machine.broadcast(now)
        rises = ("no_end", "unreadable", "repeated", "one_letter")
        found = {
            name: self.measured[name] - self.parent[name] for name in rises if name in self.parent
        }
        if "text_bpb" in self.parent:
            was, most = self.parent["text_bpb"], self.parent["knowing_nothing"]
            found["forgotten"] = (self.measured["text_bpb"] - was) / max(1e-9, most - was)
        if "answer_loss" in self.measured and step < self.first_pass:
            found["gap"] = gap(self.measured["answer_loss"], smooth_loss)
        if self.parent.get("no_end", 1.0) < 0.5:  # of a parent whose answers end
            ratio = max(1.0, self.measured["length"]) / max(1.0, self.parent["length"])
            found["length"] = max(ratio, 1 / ratio)
        return self.judge(step, found)

    def practised(self, step: int, without_signal: float) -> list[Finding]:
        """Judge a step of RL by the share of its groups whose answers all earned the same."""
        return self.judge(step, {"no_signal": without_signal})

    def judge(self, step: int, found: Mapping[str, float]) -> list[Finding]:
        """Levels of values; what is more than fine is printed."""
        findings = [
            Finding(step, name, value, BOUNDS[name].level(value)) for name, value in found.items()
        ]
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
            "look at template, mask, rates and what is loaded; --on_broken=warn goes on",
        )


def worst(history: Sequence[Finding]) -> Level:
    """The highest level there was."""
    return LEVELS[max((LEVELS.index(finding.level) for finding in history), default=0)]
