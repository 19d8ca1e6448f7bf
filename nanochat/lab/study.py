"""
A study: run bases x ablation arms x seeds as jobs and compare their scores.

    StudyConfig, arms -> Study.jobs -> Sweep.run_all -> compare_arms -> contrasts, a table

An ablation arm ("arm") is one variant of a training run. All runs of a study train on the same
number of tokens. Arms never share seeds: identical data order would make two arms look more alike
than independent runs. Only the values of a search share theirs.
"""

import csv
import io
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from nanochat import records
from nanochat.checkpoint import SCRIPTS, Checkpoint, find_checkpoint, newest_state, stage_folder
from nanochat.common import UsageError, base_dir, fingerprint, write_json
from nanochat.lab.ablation import arm_counts, parse_arm
from nanochat.lab.significance import Contrast, Scores, comparison_table, contrasts, holm_correct
from nanochat.lab.sweep import DoneRun, Job, collect_scores
from nanochat.mixture import (
    MixConfig,
    Part,
    Tags,
    parse_mixture,
    read_mixture,
    round_to_total,
    tags_of,
)
from nanochat.tokenizer import Tokenizer
from tasks.buckets import parse_task_mixture as known_parts
from tasks.buckets import tags as tags_of_part

CONTROL = "control"
SEEDS_OF_ARM = 100  # the seeds of arm n start at n times this
SHARE_UNITS = 10**9  # turns mixture shares into counts for `arm_counts`
FIRST_HALF, OTHER_HALF = "--eval_half=1", "--eval_half=2"  # of the validation rows
PARENTS = {"mid": "base", "sft": "mid", "rl": "sft"}  # stage -> stage that it starts from


@dataclass(frozen=True)
class StudyConfig:
    stage: Literal["base", "mid", "sft", "rl"] = "sft"
    """Training stage to study."""
    bases: str = "d4"
    """Base models, separated by |: checkpoint tags; for --stage=base, depths such as d4|d6."""
    source: Literal["base", "mid", "sft"] | None = None
    """Stage of the checkpoints to start from. Default: mid for SFT, sft for RL."""
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


class Arm(NamedTuple):
    """A variant: its name and its training flags."""

    name: str
    flags: tuple[str, ...]


RunKey = tuple[str, str, int]  # base, arm, seed


def split_arms(spec: str) -> list[str]:
    """Split |-separated arms. Raises ValueError for a repeated or empty one."""
    arms = [arm.strip() for arm in spec.split("|")]
    if len(set(arms)) < len(arms) or "" in arms:
        raise ValueError(f"--arms={spec!r} lists an arm twice, or an empty one")
    return arms


def from_grid(spec: str) -> list[Arm]:
    """
    All combinations of flag values, from flag=a,b;flag=c,d; the first is the control. Values with
    commas are separated by |, as in task=a,b|c. Arms with different RL tasks have the same held-out
    questions, those of all tasks.
    """
    axes, shared = [], ()
    for words in spec.split(";"):
        flag, equals, values = words.strip().partition("=")
        if not (flag and equals and values):
            raise ValueError(f"{words!r} in --grid={spec!r} is not flag=value,value")
        flag, separator = flag.removeprefix("--").replace("-", "_"), "|" if "|" in values else ","
        axes.append([f"--{flag}={value.strip()}" for value in values.split(separator)])
        if flag == "task":
            shared = (f"--eval_task={values.replace('|', ',')}",)
    arms = []
    for flags in itertools.product(*axes):
        name = ", ".join(flag.removeprefix("--") for flag in flags)
        arms.append(Arm(name if arms else CONTROL, (*flags, *shared)))
    return arms


class Study:
    """Creates the jobs of a study. Raises MissingInput if a base does not exist."""

    def __init__(
        self,
        cfg: StudyConfig,
        mix: MixConfig,
        data: str = "",
        default_mixture: Callable[[str | None], str] = lambda dataset: "",
    ):
        """
        data: fingerprint of training and validation data, if the flags do not identify them.
        default_mixture: dataset of the base model -> mixture used when `mix` has none.
        """
        self.cfg, self.mix, self.default_mixture = cfg, mix, default_mixture
        self.bases = cfg.bases.split("|")
        self.parents: dict[str, Checkpoint] = {}
        self.starts: dict[str, dict[str, str]] = {}
        if cfg.stage == "rl" and mix.mixture:
            raise ValueError(f"RL has no --mixture={mix.mixture}; set --task")
        self.source = source = cfg.source or PARENTS.get(cfg.stage, "")
        for base in self.bases:
            if cfg.stage == "base":
                if not (base.startswith("d") and base[1:].isdigit()):
                    raise ValueError(f"--bases={cfg.bases}: write a depth as d4, not {base!r}")
                self.starts[base] = {"tokenizer": Tokenizer.load().fingerprint}
            else:
                self.parents[base] = find_checkpoint(source, base)
                self.starts[base] = {source: self.parents[base].fingerprint}
        first, *others = self.starts.values()
        self.run_id = records.inherited_run_id(first)
        # The report looks up inputs by name, so several different bases need a name of their own.
        same = all(start == first for start in others)
        self.inputs = dict(first) if same else {"bases": fingerprint(self.starts)}
        for start in self.starts.values() if data else ():
            start["data"] = data

    def jobs(
        self, arms: Mapping[str, Sequence[Arm]], seeds: int, arm_seeds: int
    ) -> dict[RunKey, Job]:
        """
        All jobs by (base, arm, seed), arm by arm with the control first, so that an early stop
        leaves complete arms.
        """
        found = {}
        for base in self.bases:
            for number, arm in enumerate(arms[base]):
                for i in range(arm_seeds if number else seeds):
                    seed = number * SEEDS_OF_ARM + i
                    found[base, arm.name, seed] = self.job(base, arm, seed)
        return found

    def job(self, base: str, arm: Arm, seed: int) -> Job:
        """
        One run: training, then evaluation on tasks. Arms with another batch size take more or fewer
        steps, for equal tokens. Raises ValueError for an arm that sets num_iterations.
        """
        cfg, mix = self.cfg, self.mix
        pairs = (flag.removeprefix("--").split("=", 1) for flag in arm.flags)
        own = {name.replace("-", "_"): value for name, value in pairs}
        if "num_iterations" in own:
            raise ValueError(f"{arm.name}: all runs must be equally long; set --num_iterations")
        batch = int(own.get("total_batch_size", cfg.total_batch_size))
        steps = max(1, round(cfg.num_iterations * cfg.total_batch_size / batch))
        start = f"--depth={base[1:]}" if cfg.stage == "base" else f"--source={self.source}:{base}"
        size = [] if cfg.stage == "rl" else [f"--total_batch_size={cfg.total_batch_size}"]
        words = [
            *(f"scripts.{SCRIPTS[cfg.stage]}", f"--num_iterations={steps}", *size),
            *"--eval_every=0 --keep=1 --resume=auto --skip_if_done".split(),
            *("--model_tag={tag}", f"--seed={seed}", start),
        ]
        if mix.mixture and "mixture" not in own:
            words.append(f"--mixture={mix.mixture}")
        if cfg.task and "task" not in own:
            words.append(f"--task={cfg.task}")
        commands = [[*words, *cfg.flags.split(), *arm.flags]]
        if cfg.tasks:
            scored = ["scripts.chat_eval", f"--source={cfg.stage}", "--model_tag={tag}"]
            tasks = ["--skip_if_done", f"--task_name={cfg.tasks}"]
            commands.append([*scored, *tasks, *cfg.eval_flags.split()])
        return Job(f"{base} {arm.name} seed {seed}", commands, self.starts[base])

    # ---- data ablations ----------------------------------------------------------------------

    def mixture(self, base: str) -> dict[str, tuple[Part, Tags]]:
        """
        Bucket -> (part, tags) in the control mixture of a base.

        Raises ValueError for --stage=base without --mixture.
        """
        spec, declared = read_mixture(self.mix.mixture)
        if self.cfg.stage == "base":
            if not spec:
                raise ValueError("--arms changes the proportions of a mixture; set --mixture")
            parts = parse_mixture(spec)
            return {part.label: (part, tags_of(declared.get(part.name, {}))) for part in parts}
        spec = spec or self.default_mixture(self.parents[base].state["source"].get("dataset"))
        parts = known_parts(spec, declared)
        return {part.label: (part, tags_of_part(part, declared)) for part in parts}

    def check_arms(self, arms: Sequence[str], floor: Mapping[str, float]) -> None:
        """
        Validate data ablations before any training.

        Raises ValueError if `parse_arm` rejects an arm or, for a mixture of shares, if `arm_counts`
        does.
        """
        for base in self.bases:
            mixture = self.mixture(base)
            named = {name: tags for name, (_, tags) in mixture.items()}
            shares = [part.share for part, _ in mixture.values() if part.share is not None]
            for arm in arms:
                parse_arm(arm, named, floor)
                if len(shares) == len(mixture):
                    counts = round_to_total([share * SHARE_UNITS for share in shares])
                    arm_counts(arm, dict(zip(named, counts, strict=True)), named, floor)

    def ablation(
        self, base: str, control: Sequence[DoneRun], arms: Sequence[str], floor: Mapping[str, float]
    ) -> list[Arm]:
        """
        The control and the data ablation arms of a base; flags set the tokens of every bucket.

        control: finished control runs. Raises UsageError if their checkpoints were deleted.
        """
        runs = [run for run in control if not run.is_broken]
        if not runs:
            raise ValueError(no_control(base))
        state = newest_state(stage_folder(self.cfg.stage) / runs[0].tag)
        if state is None:
            raise UsageError(
                f"the checkpoints of {runs[0].job.name} are gone, so its mixture is unknown",
                f"delete {runs[0].folder} and rerun the same command to train it again",
            )
        is_base = self.cfg.stage == "base"
        resolved = state["mixture"] if is_base else state["mixture"]["resolved"]
        unit = state["model"]["max_seq_len"] if is_base else 1  # text is sampled in whole rows
        counts = {each["name"]: each["tokens"] // unit for each in resolved["buckets"]}
        mixture = self.mixture(base)
        if counts.keys() != mixture.keys():
            raise ValueError(
                f"{runs[0].job.name} was trained on {', '.join(counts)}, not on "
                f"{', '.join(mixture)}; set --mixture on the sweep, not in --flags"
            )
        named = {name: tags for name, (_, tags) in mixture.items()}
        found = [Arm(CONTROL, ())]
        for arm in arms:
            wanted = arm_counts(arm, counts, named, floor)
            parts = [with_tokens(part, wanted[name] * unit) for name, (part, _) in mixture.items()]
            _, declared = read_mixture(self.mix.mixture)
            found.append(Arm(arm, (mixture_flag(",".join(parts), declared),)))
        return found

    # ---- searches ----------------------------------------------------------------------------

    def confirmation(self, run: DoneRun) -> Job:
        """Job that re-evaluates a model on validation rows not used to select it."""
        words = [word for word in run.job.commands[0] if word not in ("--skip_if_done", FIRST_HALF)]
        words = [word.replace("{tag}", run.tag) for word in words]
        return Job(f"{run.job.name}, re-evaluated", [[*words, OTHER_HALF]], run.job.starts_from)


def mixture_flag(spec: str, declared: Mapping[str, Any]) -> str:
    """Flag that sets a mixture; a mixture with declared buckets is written to a file."""
    if not declared:
        return f"--mixture={spec}"
    content = {"mixture": spec, "buckets": declared}
    path = base_dir() / "sweeps" / "mixtures" / f"{fingerprint(content)}.json"
    write_json(path, content)
    return f"--mixture={path}"


def with_tokens(part: Part, tokens: int) -> str:
    """A part as written in a mixture, with this number of tokens from the same conversations."""
    rows = "" if part.rows is None else f"{part.rows}*"
    return f"{part.label}={rows}{tokens}t" if tokens or rows else f"{part.label}=0%"


def no_control(base: str) -> str:
    """Error message for a base without a finished control."""
    return f"all control runs of {base} broke; there is nothing to compare with"


def compare_arms(
    runs: Mapping[RunKey, DoneRun], million_tokens: float | None, first: str
) -> tuple[list[Contrast], dict[str, Any]]:
    """Compare every arm with the control of its base on every metric, `first` being the first."""
    whole = {key: run for key, run in runs.items() if not run.is_broken}
    if not whole:
        raise ValueError(f"all {len(runs)} runs broke; see the end of their log.txt")
    found: list[Contrast] = []
    controls: dict[tuple[str, str], Scores] = {}
    for metric in list_metrics(list(whole.values()), first):
        for base in dict.fromkeys(base for base, _, _ in runs):
            by_arm: dict[str, list[DoneRun]] = {}
            for (_, arm, _), run in ((p, run) for p, run in whole.items() if p[0] == base):
                by_arm.setdefault(arm, []).append(run)
            if CONTROL not in by_arm:
                raise ValueError(no_control(base))
            arms = {arm: collect_scores(mine, metric) for arm, mine in by_arm.items()}
            controls[base, metric] = arms[CONTROL]
            found += contrasts(base, metric, arms, CONTROL)
    found = holm_correct(found)
    return found, comparison_table(found, controls, million_tokens)


def list_metrics(runs: Sequence[DoneRun], first: str) -> list[str]:
    """
    Metrics that all runs share: `first`, bits per byte by bucket, and scores. Not those before RL
    and their change, nor the reward of runs on different tasks.
    """
    tasks = {word for run in runs for word in run.job.commands[0] if word.startswith("--task=")}
    left_out = (" before", " change", *(["Mean reward after"] if len(tasks) > 1 else []))
    every = [run.values() for run in runs]
    if not all(first in values for values in every):
        raise ValueError(f"some runs did not record {first!r}; the first has {', '.join(every[0])}")
    others = [
        name
        for name, value in every[0].items()
        if (name.startswith("val_bpb:") or isinstance(value, Mapping))
        and all(name in values for values in every)
        and not name.endswith(left_out)
    ]
    return list(dict.fromkeys([first, *others]))


def measured_on_rows(metric: str) -> bool:
    """Whether a metric is measured on validation rows rather than answers."""
    return "validation" in metric.lower() or metric.startswith("val_bpb:")


def as_csv(found: Mapping[str, Any]) -> str:
    """Format a record table as CSV."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([found["columns"], *found["rows"]])
    return text.getvalue()
