"""
Train many variants with the standard scripts and test which differ by more than noise.

    python -m scripts.lab.sweep --bases="d4|d6" --num_iterations=200 --total_batch_size=4096 \
        --mixture="smoltalk=60%,gsm8k=40%" --arms="only:gsm8k|drop:gsm8k"       # a data ablation
    python -m scripts.lab.sweep --grid="init_lr_frac=0.3,1;weight_decay=0,0.1" ...  # combinations
    python -m scripts.lab.sweep --search=init_lr_frac --low=0.01 --high=3 ...      # the best value
    python -m scripts.lab.sweep --stage=rl --grid="task=gsm8k|gsm8k,aqua" ...      # tasks of RL

All runs train on the same number of tokens; every variant ("arm") has its own seeds. A data
ablation trains the control first; arms divide its token total differently. Finished runs are
kept: if a sweep is interrupted, rerun the same command.

Reads   checkpoints to start from, and the inputs of the scripts
Writes  sweeps/<name>/ under the base directory (ledger, CSV), sweeps/runs/, and the section "Sweep
        <name>"
"""

import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from nanochat import records, report
from nanochat.common import fingerprint, write_atomic
from nanochat.config import require_at_least, start
from nanochat.lab import search
from nanochat.lab.ablation import read_floor
from nanochat.lab.search import SearchConfig
from nanochat.lab.significance import lower_is_better, over_seeds
from nanochat.lab.study import (
    CONTROL,
    FIRST_HALF,
    Arm,
    Study,
    StudyConfig,
    as_csv,
    compare_arms,
    from_grid,
    measured_on_rows,
    split_arms,
)
from nanochat.lab.sweep import DoneRun, Sweep, SweepConfig, ledger_table
from nanochat.mixture import MixConfig, read_mixture
from scripts import chat_sft, mid_train
from tasks.buckets import buckets
from tasks.held_out import reject_contaminated


@dataclass(frozen=True)
class SweepScript:
    name: str = "sweep"
    """Folder under sweeps/; each name has its own ledger."""
    arms: str = ""
    """Data ablations, separated by |; each has as many total tokens as the control, in other
    proportions: copy:name, only:x, drop:x, swap:a->b, scale:x*2, ratio:language ko:en=1:4, or two
    of these as in drop:x then scale:y*2. A bucket that is used only by arms must be listed in
    --mixture, with =0%."""
    arm_floor: str = ""
    """Minimum shares of other buckets in every `only` arm, as in arc_easy=5%, so that
    models still learn to answer in the format that evaluations parse."""
    grid: str = ""
    """Flag values to combine, as in init_lr_frac=0.3,1;weight_decay=0,0.1; the first combination
    is the control. Values with commas are separated by |, as in task=gsm8k|gsm8k,aqua."""
    seeds: int = 3
    """Number of seeds for the control and for each search finalist; at least 3."""
    arm_seeds: int = 2
    """Number of seeds for each other arm; at least 2."""
    metric: str = ""
    """Metric that a search optimizes and that is listed first. Default: Final validation bpb; for
    RL, pass@1 after."""
    report_dir: str | None = None
    """Folder of the sweep's record. Default: report/ under the base directory."""
    searching: SearchConfig = field(default_factory=SearchConfig)
    study: StudyConfig = field(default_factory=StudyConfig)
    mix: MixConfig = field(default_factory=MixConfig)
    sweep: SweepConfig = field(default_factory=SweepConfig)

    def __post_init__(self) -> None:
        require_at_least(self, seeds=3, arm_seeds=2)  # fewer cannot estimate the noise


def default_mixture(stage: str, dataset: str | None) -> str:
    """Default mixture of mid or sft for a base model trained on `dataset`."""
    script = {"mid": mid_train, "sft": chat_sft}[stage]
    return script.BUILTIN_MIXTURES.get(dataset, script.MIXTURE)


def main(cfg: SweepScript) -> None:
    if sum(map(bool, [cfg.arms, cfg.grid, cfg.searching.search])) != 1:
        raise ValueError("set exactly one of --arms, --grid and --search")
    is_rl = cfg.study.stage == "rl"
    if is_rl and cfg.arms:
        raise ValueError('RL has no mixture for --arms to change; use --grid="task=a|b"')
    if re.search(r"(^|[;\s-])mixture=", cfg.grid) and not re.search(
        "--val[-_]mixture=", cfg.study.flags
    ):
        raise ValueError(
            f"--grid={cfg.grid!r}: each mixture would be measured on its own held-out data; use "
            "--arms, or add --val_mixture=... to --flags"
        )
    if cfg.searching.search and "|" in cfg.study.bases:
        raise ValueError(f"--search takes one base, got --bases={cfg.study.bases!r}")
    cfg = replace(cfg, metric=cfg.metric or ("pass@1 after" if is_rl else "Final validation bpb"))
    sweep = Sweep(cfg.sweep, cfg.name)
    study = Study(cfg.study, cfg.mix, data_of(cfg), partial(default_mixture, cfg.study.stage))
    if cfg.arms:
        study.check_arms(split_arms(cfg.arms), read_floor(cfg.arm_floor))
        if cfg.study.stage == "base":  # other stages check for contamination themselves
            mixture = study.mixture(study.bases[0])
            reject_contaminated({name: tags for name, (_, tags) in mixture.items()})
    with sweep:
        values, tables, series = (tune if cfg.searching.search else run_arms)(cfg, study, sweep)
    tables.append(ledger_table(sweep.ledger()))
    for table in tables:
        write_atomic(sweep.folder / f"{records.slug(table['title'])}.csv", as_csv(table))
    section = "Sweep" if cfg.name == "sweep" else f"Sweep {cfg.name}"
    provenance = records.Provenance(study.run_id, 0, study.inputs)
    cost = sweep.cost()
    report.append_section(section, cfg, values, provenance, cost, tables=tables, series=series)


def data_of(cfg: SweepScript) -> str:
    """Fingerprint of training and validation data; empty if the flags identify them."""
    own, given = read_mixture(cfg.mix.mixture), re.split("[ ;]+", f"{cfg.study.flags};{cfg.grid}")
    texts = [word.split("=", 1)[1] for word in given if re.match("(--)?(val[-_])?mixture=", word)]
    found = [own, *(read_mixture(each) for text in texts for each in text.split("|"))]
    found = [(spec, declared or own[1]) for spec, declared in found if spec]
    if not found:
        return ""
    if cfg.study.stage == "base":
        return fingerprint(found)
    every = [bucket for mixture in found for bucket in buckets(*mixture)]
    identities = {b.name: [b.train.identity, b.val.identity] for b in every}
    return fingerprint([sorted({spec for spec, _ in found}), identities])


Findings = tuple[dict[str, Any], list[dict[str, Any]], dict[str, list[list[float]]]]
"""Values, tables and series of the record."""


def run_arms(cfg: SweepScript, study: Study, sweep: Sweep) -> Findings:
    """Train all arms and compare each with the control."""
    arms = (
        dict.fromkeys(study.bases, from_grid(cfg.grid)) if cfg.grid else ablate(cfg, study, sweep)
    )
    jobs = study.jobs(arms, cfg.seeds, cfg.arm_seeds)
    done = sweep.run_all(list(jobs.values()))
    runs = {key: done[job.name] for key, job in jobs.items()}
    million_tokens = None  # unknown in RL
    if cfg.study.stage != "rl":
        million_tokens = cfg.study.num_iterations * cfg.study.total_batch_size / 1e6
    found, table = compare_arms(runs, million_tokens, cfg.metric)
    first = [c for c in found if c.metric == cfg.metric]
    values: dict[str, Any] = {
        f"{c.arm}, {c.base}": f"{c.difference:+.4f} ({c.verdict})" for c in first
    }
    values["Comparisons"] = len(found)
    values["Verdicts that hold after Holm correction"] = sum(c.stands for c in found)
    if broken := [name for name, run in done.items() if run.is_broken]:
        values["Broken runs"] = ", ".join(broken)
    return values, [table], {f"{c.arm}, {c.base}": [[c.difference, c.bar]] for c in first}


def ablate(cfg: SweepScript, study: Study, sweep: Sweep) -> dict[str, list[Arm]]:
    """Train the controls of a data ablation; return controls and arms by base."""
    jobs = study.jobs(dict.fromkeys(study.bases, [Arm(CONTROL, ())]), cfg.seeds, arm_seeds=0)
    done = sweep.run_all(list(jobs.values()))
    arms, floor = split_arms(cfg.arms), read_floor(cfg.arm_floor)
    found = {}
    for base in study.bases:
        control = [done[job.name] for (of, *_), job in jobs.items() if of == base]
        found[base] = study.ablation(base, control, arms, floor)
    return found


def tune(cfg: SweepScript, study: Study, sweep: Sweep) -> Findings:
    """Search a flag on the first base; re-evaluate the best value on other validation rows."""
    flag, runs = cfg.searching.search, {}

    def tried(values: Sequence[float], seeds: Sequence[int]) -> dict[float, list[float]]:
        jobs = {}
        for value, seed in itertools.product(values, seeds):
            setting = f"{flag}={search.show_setting(value)}"
            half = [] if cfg.study.stage == "rl" else [FIRST_HALF]  # RL has no validation rows
            arm = Arm(setting, (f"--{setting}", *half))
            jobs[value, seed] = study.job(study.bases[0], arm, seed)
        done = sweep.run_all(list(jobs.values()))
        runs.update({key: done[job.name] for key, job in jobs.items()})
        return {value: [score(runs[value, seed]) for seed in seeds] for value in values}

    def score(run: DoneRun) -> float:
        return math.nan if run.is_broken else run.metric(cfg.metric)

    found = search.run_search(cfg.searching, tried, lower_is_better(cfg.metric), cfg.seeds)
    scores = found.finals[found.chosen]
    seeds = [i for i, score in enumerate(scores) if math.isfinite(score)]  # indices, not broken
    values = {
        f"Chosen {flag}": found.chosen,
        f"{cfg.metric}, mean of {len(seeds)} seeds": over_seeds([scores[i] for i in seeds]),
        "Score of the best seed when it was chosen": scores[found.best_seed],
        "Expected inflation of the best score": found.inflation,
    }
    if measured_on_rows(cfg.metric):  # re-evaluated greedy answers would be identical
        jobs = {i: study.confirmation(runs[found.chosen, 1 + i]) for i in seeds}
        done = sweep.run_all(list(jobs.values()))
        anew = {i: done[job.name].metric(cfg.metric) for i, job in jobs.items()}
        values["Mean of the same seeds on other validation rows"] = over_seeds([*anew.values()])
        values["The best seed on other validation rows"] = anew[found.best_seed]
    return values, [found.table()], found.series()


if __name__ == "__main__":
    start(main, SweepScript(), __doc__)
