"""
A study: bases x ablation arms x seeds, all trained on the same number of tokens, compared.

    StudyConfig, arms -> make_job -> Sweep.run_all -> compare_arms -> comparison_table

An ablation arm ("arm") is one variant of a training run. Arms never share seeds: identical data
order would make two arms look more alike than independent runs.
"""

import csv
import io
import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from nanochat.checkpoint import SCRIPTS, find_checkpoint
from nanochat.common import base_dir, fingerprint, write_json
from nanochat.dataset import load_last_source
from nanochat.lab.ablation import arm_counts, read_floor
from nanochat.lab.significance import CELLS, Contrast, Recorded, agreement, contrasts, holm
from nanochat.lab.sweep import Job
from nanochat.tokenizer import Tokenizer
from tasks.buckets import Bucket, buckets, chat_mixture, read_mixture
from tasks.held_out import reject_contaminated

CONTROL = "control"
SEEDS_OF_ARM = 100  # the seeds of arm n start at n times this


@dataclass(frozen=True)
class StudyConfig:
    stage: Literal["base", "mid", "sft", "rl"] = "sft"
    """Training stage to study."""
    bases: str = "d4"
    """Base models, separated by |: checkpoint tags; for --stage=base, depths such as d4|d6."""
    source: Literal["base", "mid", "sft"] | None = None
    """Stage of the checkpoints to start from. Default: mid for SFT, sft for RL."""
    mixture: str = ""
    """Mixture of the control, as in mid_train. For --arms, it sets tokens: gsm8k=40000t."""
    task: str = ""
    """Task or mixture of tasks that RL trains on. Default: that of scripts.chat_rl."""
    num_iterations: int = 100
    """Training steps per run."""
    total_batch_size: int = 4096
    """Tokens per step; unused in RL."""
    flags: str = ""
    """Extra flags for every training run."""
    tasks: str = ""
    """Tasks to evaluate every model on, separated by |. Default: none."""
    eval_flags: str = ""
    """Extra flags for scripts.chat_eval."""

    def __post_init__(self) -> None:
        if self.stage == "base" and not re.fullmatch(r"d\d+(\|d\d+)*", self.bases):
            raise ValueError(f"--bases={self.bases}: with --stage=base write depths, as in d4|d6")
        if self.stage in ("base", "rl") and self.mixture:
            raise ValueError(f"--stage={self.stage} has no --mixture={self.mixture}; RL has --task")

    @property
    def parent(self) -> str:
        """Stage of the checkpoints to start from."""
        return self.source or {"mid": "base", "sft": "mid", "rl": "sft"}[self.stage]


Inputs = Mapping[str, Mapping[str, str]]
"""Base -> fingerprints of what its runs start from."""


Arms = Mapping[str, Sequence[str]]
"""Variants by name, the control first: their training flags."""


def split_arms(spec: str) -> list[str]:
    """Split |-separated arms. Raises ValueError for a repeated or empty one."""
    arms = [arm.strip() for arm in spec.split("|")]
    if len(set(arms)) < len(arms) or "" in arms:
        raise ValueError(f"--arms={spec!r} lists an arm twice, or an empty one")
    return arms


def from_grid(spec: str) -> Arms:
    """
    All combinations of flag values, from flag=a,b;flag=c,d; the first is the control. Values with
    commas are separated by |, as in task=a,b|c.
    """
    axes = []
    for words in spec.split(";"):
        flag, _, values = words.strip().removeprefix("--").partition("=")
        if not values:
            raise ValueError(f"{words!r} in --grid={spec!r} is not flag=value,value")
        separator = "|" if "|" in values else ","
        axes.append([f"{flag.replace('-', '_')}={value}" for value in values.split(separator)])
    control, *others = itertools.product(*axes)
    found = {CONTROL: control} | {", ".join(each): each for each in others}
    return {name: [f"--{flag}" for flag in each] for name, each in found.items()}


# ---- Jobs ----------------------------------------------------------------------------------------


def find_inputs(cfg: StudyConfig, grid: str) -> Inputs:
    """
    Fingerprints of the bases, and of the data of all mixtures in the flags and the grid, whose
    names do not identify it. Raises MissingInput if a base does not exist.
    """
    specs = [cfg.mixture] if cfg.mixture else []
    for words in re.findall(r"mixture=([^\s;]+)", f"{cfg.flags} {grid}"):
        specs += words.split("|")
    bases = cfg.bases.split("|")
    if cfg.stage == "base":
        text = load_last_source("main") or {"fingerprint": ""}
        found = {"tokenizer": Tokenizer.load().fingerprint, "data": text["fingerprint"]}
        return dict.fromkeys(bases, found)
    data = fingerprint([chat_mixture(cfg.mixture or spec, spec).description for spec in specs])
    return {
        base: {cfg.parent: find_checkpoint(cfg.parent, base).fingerprint, "data": data}
        for base in bases
    }


def make_job(
    cfg: StudyConfig, inputs: Inputs, base: str, arm: str, flags: Sequence[str], seed: int
) -> Job:
    """
    One run: training, then evaluation on tasks. Arms with another batch size take more or fewer
    steps, for equal tokens. Raises ValueError for an arm that sets num_iterations.
    """
    own = dict(flag.removeprefix("--").split("=", 1) for flag in flags)
    if "num_iterations" in own:
        raise ValueError(f"{arm}: all runs must be equally long; set --num_iterations")
    batch = int(own.get("total_batch_size", cfg.total_batch_size))
    steps = max(1, round(cfg.num_iterations * cfg.total_batch_size / batch))
    words = [f"scripts.{SCRIPTS[cfg.stage]}", f"--num_iterations={steps}", f"--seed={seed}"]
    words += "--model_tag={tag} --eval_every=0 --keep=1 --resume=auto --skip_if_done".split()
    words.append(f"--depth={base[1:]}" if cfg.stage == "base" else f"--source={cfg.parent}:{base}")
    words += [f"--total_batch_size={cfg.total_batch_size}"] if cfg.stage != "rl" else []
    words += [f"--mixture={cfg.mixture}"] if cfg.mixture else []
    words += [f"--task={cfg.task}"] if cfg.task else []
    commands = [[*words, *cfg.flags.split(), *flags]]
    if cfg.tasks:
        scored = ["scripts.chat_eval", f"--source={cfg.stage}", "--model_tag={tag}"]
        scored += ["--skip_if_done", f"--task_name={cfg.tasks}", *cfg.eval_flags.split()]
        commands.append(scored)
    return Job(f"{base} {arm} seed {seed}", commands, inputs[base])


# ---- Data ablations ------------------------------------------------------------------------------


def data_arms(cfg: StudyConfig, arms: Sequence[str], arm_floor: str) -> Arms:
    """
    The control and the data ablation arms; flags set the tokens of every bucket.

    Raises ValueError for an unsuitable mixture or arm, UsageError for data of final benchmarks.
    """
    spec, declared = read_mixture(cfg.mixture)
    parts = buckets(spec, declared)
    tags_of = {part.name: part.tags for part in parts}
    reject_contaminated(tags_of)
    counts, floor = {}, read_floor(arm_floor)
    for part in parts:
        if part.tokens is None:
            raise ValueError(f"--arms needs tokens in --mixture, as in {part.name}=40000t")
        counts[part.name] = part.tokens
    found = {CONTROL: counts} | {arm: arm_counts(arm, counts, tags_of, floor) for arm in arms}
    return {arm: [mixture_flag(parts, tokens, declared)] for arm, tokens in found.items()}


def mixture_flag(
    parts: Sequence[Bucket], tokens: Mapping[str, int], declared: Mapping[str, Any]
) -> str:
    """
    Flag that sets a mixture with these tokens of each bucket, from the same conversations; with
    declared buckets, it is written to a file.
    """
    amounts = []
    for part in parts:
        rows = "" if part.rows is None else f"{part.rows}*"
        amounts.append(f"{part.name}={rows}{tokens[part.name]}t")
    if not declared:
        return f"--mixture={','.join(amounts)}"
    content = {"mixture": ",".join(amounts), "buckets": declared}
    path = base_dir() / "sweeps" / "mixtures" / f"{fingerprint(content)}.json"
    write_json(path, content)
    return f"--mixture={path}"


# ---- Results -------------------------------------------------------------------------------------


def compare_arms(
    runs: Mapping[str, Mapping[str, Sequence[Recorded]]], first: str
) -> list[Contrast]:
    """
    Compare base -> arm -> runs with the control of the base on every metric, `first` being first.

    Raises ValueError if a base has no control run.
    """
    for base, arms in runs.items():
        if not arms[CONTROL]:
            raise ValueError(f"all control runs of {base} broke; see the end of their log.txt")
    every = [run for arms in runs.values() for each in arms.values() for run in each]
    found = []
    for metric, base in itertools.product(list_metrics(every, first), runs):
        arms = {arm: each for arm, each in runs[base].items() if each}
        found += contrasts(base, metric, arms)
    return holm(found)


def list_metrics(runs: Sequence[Recorded], first: str) -> list[str]:
    """
    Metrics that all runs share: `first`, bits per byte by bucket, and scores. Not those before RL
    and their change, nor rewards, which differ between tasks.
    """
    values = runs[0].values
    shared = [name for name in values if all(name in run.values for run in runs)]
    if first not in shared:
        raise ValueError(f"some runs did not record {first!r}; the first has {', '.join(values)}")
    others = [
        name
        for name in shared
        if name.startswith("val_bpb:")
        or (isinstance(values[name], Mapping) and not re.search(" before$| change$|reward", name))
    ]
    return list(dict.fromkeys([first, *others]))


def comparison_table(found: Sequence[Contrast], million_tokens: float | None) -> dict[str, Any]:
    """
    Table of corrected contrasts. million_tokens: training tokens of each run, in millions; None in
    RL.
    """
    columns = ["Metric", "Base", "Name", *CELLS, "Bases", "Per Mtok"]
    rows = []
    for c in found:
        per_million = f"{c.difference / million_tokens:+.4f}" if million_tokens else "-"
        rows.append([c.metric, c.base, c.arm, *c.cells(), agreement(found, c), per_million])
    return {"title": "Arms", "columns": columns, "rows": rows}


def as_csv(found: Mapping[str, Any]) -> str:
    """Format a record table as CSV."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([found["columns"], *found["rows"]])
    return text.getvalue()
