"""
Score a base model on a suite of few-shot tasks: the centred score of each, and their mean, CORE.

    python -m scripts.base_eval                                    # the checkpoint written last
    torchrun --nproc_per_node=8 -m scripts.base_eval -- --model_tag=d24 --max_per_task=500
    python -m scripts.base_eval --hf_path=openai-community/gpt2    # another project's model

Reads   base_checkpoints/<tag>/ or a Hugging Face model, and the suite: DCLM's evaluation bundle,
        downloaded at first use, or that of the built-in data set, written at first use
Writes  the section "Base model evaluation", of a Hugging Face model "Evaluation of <model>"
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from nanochat import records, report
from nanochat.checkpoint import find_checkpoint, load_model
from nanochat.common import MissingInput
from nanochat.config import settings, short, start
from nanochat.distributed import DistConfig, DistContext, init_distributed
from nanochat.eval_core import (
    EvalModel,
    Suite,
    TaskScore,
    core,
    eval_model_of,
    examine,
    open_suite,
)
from nanochat.gpt import for_inference
from nanochat.lab.held_out import require_access
from nanochat.tokenizer import Tokenizer
from tasks.builtin import choose_bundle

SECTION = "Base model evaluation"
INSTALL = "uv sync --inexact --group interop"


@dataclass(frozen=True)
class BaseEval:
    model_tag: str | None = short("g", None)
    """Folder under base_checkpoints/. Default: the one written last."""
    model_step: int | None = short("s", None)
    """Step of the checkpoint. Default: the last good one."""
    max_per_task: int | None = None
    """Items to score of each task. Default: all."""
    hf_path: str | None = None
    """A causal language model of Hugging Face, by its name there or as a folder, instead of one of
    ours. Needs the packages of `uv sync --group interop`."""
    trust_remote_code: bool = False
    """Run the code that comes with that model."""
    suite: str | None = None
    """Which few-shot tasks: `dclm`, whose mean is CORE, or the name of a built-in data set that has
    a suite of its own, such as embedded. Default: that of the model's text if it has one, else
    dclm."""
    eval_bundle: str | None = None
    """Where DCLM's tasks are: a folder, a zip file or its URL. Default: the published archive,
    downloaded once."""
    final: bool = False
    """Look at tasks that scripts.lab.hold_out declared final, and have it written down."""
    only_fetch: bool = False
    """Only get the tasks and say what they are; no model is needed."""
    skip_if_done: bool = False
    """Skip the tasks on which this checkpoint was scored with these settings before."""
    report_dir: str | None = None
    """Folder of records. Default: report/ under the base directory."""
    machine: DistConfig = field(default_factory=DistConfig)

    def __post_init__(self) -> None:
        if self.max_per_task is not None and self.max_per_task < 1:
            raise ValueError(f"max_per_task must be at least 1, got {self.max_per_task}")


class Candidate(NamedTuple):
    """The model that is evaluated, as the record names it, and what loads it."""

    section: str
    name: str
    run_id: str
    seed: int
    inputs: dict[str, str]
    dataset: str | None
    """The data set it was trained on, where that is known."""
    load: Callable[[], EvalModel]


def main(cfg: BaseEval) -> None:
    started = time.perf_counter()

    def open_asked(dataset: str | None) -> Suite:
        return open_suite(choose_bundle(cfg.suite, cfg.eval_bundle, dataset))

    if cfg.only_fetch:
        return print(open_asked(None).about)
    machine = init_distributed(cfg.machine)
    candidate = (find_hf_model if cfg.hf_path else find_own_model)(cfg, machine)
    suite = machine.on_main("opening the suite", lambda: open_asked(candidate.dataset))
    candidate.inputs["suite"] = suite.fingerprint
    scores: list[TaskScore] = []
    if cfg.skip_if_done:
        scores = machine.on_main("verifying files", lambda: scored_before(cfg, candidate, suite))
    if len(scores) == len(suite.tasks):
        machine.print0(f"{candidate.section}: finished already, skipped")
        return machine.close()

    if machine.is_main:
        who = {"checkpoint": candidate.name, "section": candidate.section}
        require_access([task.name for task in suite.tasks], cfg.final, who)
    machine.barrier()
    machine.print0(f"{candidate.name} on {suite.about}")
    model = candidate.load()
    for task in suite.tasks[len(scores) :]:
        scores.append(examine(model, task, machine, cfg.max_per_task))
        machine.print0(describe(scores[-1]))
        if machine.is_main:  # an abort keeps what was scored
            values, items = figures(candidate.name, suite, scores)
            origin = records.Provenance(candidate.run_id, candidate.seed, candidate.inputs)
            cost, folder = records.Cost.since(started, machine), cfg.report_dir
            shown = {"items": items, "tables": [task_table(scores)], "extend": len(scores) > 1}
            name, asked = candidate.section, settings(cfg)
            records.write_record(name, asked, values, origin, cost, folder, **shown)
        started = time.perf_counter()
    total = core(scores)
    machine.print0(f"CORE {total.value:.4f} +- {total.se:.4f} over {len(scores)} tasks")
    if machine.is_main:
        with machine.working("writing the report"):
            report.update(cfg.report_dir)
    machine.close()


def scored_before(cfg: BaseEval, candidate: Candidate, suite: Suite) -> list[TaskScore]:
    """The scores that the section's record has for these settings: of the first tasks, or all."""
    key = records.stage_key(settings(cfg), candidate.inputs)
    record = records.finished(candidate.section, key, cfg.report_dir)
    if record is None:
        return []
    table = record["tables"][0]
    rows = {row[0]: dict(zip(table["columns"], row, strict=True)) for row in table["rows"]}
    found = []
    for task in suite.tasks:
        if row := rows.get(task.name):
            outcomes = [int(x) for x in records.read_scores(record["items"][task.name])]
            task = task.drawn(cfg.max_per_task)
            found.append(TaskScore(task, outcomes, row["Cropped"], float(row["Seconds"])))
    return found


def find_own_model(cfg: BaseEval, machine: DistContext) -> Candidate:
    """One of our checkpoints."""
    checkpoint = machine.on_node(
        "verifying the checkpoint",
        lambda: find_checkpoint("base", cfg.model_tag, cfg.model_step),
    )

    def load() -> EvalModel:
        tokenizer = Tokenizer.read(checkpoint.folder / "tokenizer.json")
        return eval_model_of(for_inference(load_model(checkpoint, machine)), tokenizer)

    name, origin = f"base_model (step {checkpoint.step})", checkpoint.state["provenance"]
    inputs = {"base": checkpoint.fingerprint, **origin["inputs"]}
    dataset = checkpoint.state["source"].get("dataset")
    return Candidate(SECTION, name, origin["run_id"], origin["seed"], inputs, dataset, load)


def find_hf_model(cfg: BaseEval, machine: DistContext) -> Candidate:
    """
    A model of Hugging Face; nobody knows what it was trained on. Raises MissingInput without the
    packages that read it.
    """
    try:
        from nanochat.hf import eval_model  # its packages are an optional group
    except ModuleNotFoundError as error:
        raise MissingInput(f"--hf_path needs {error.name}", INSTALL) from error
    name = str(cfg.hf_path)
    found = eval_model.find(name, cfg.trust_remote_code)
    section, inputs = f"Evaluation of {name}", {"hf": found.revision}
    return Candidate(section, name, found.revision, 0, inputs, None, lambda: found.load(machine))


def describe(score: TaskScore) -> str:
    """A line about a task."""
    accuracy, centred = score.accuracy, score.centred
    cropped = f", {score.num_cropped} cropped" if score.num_cropped else ""
    return (
        f"{score.task.name}: {accuracy.value:.4f} right, centred {centred.value:.4f} "
        f"+- {centred.se:.4f} ({accuracy.n} items{cropped}), {score.seconds:.1f} s"
    )


def figures(
    name: str, suite: Suite, scores: Sequence[TaskScore]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Values and items of the record, with CORE and its items where all tasks are scored."""
    whole, tasks = len(scores) == len(suite.tasks), f"{len(scores)}"
    values: dict[str, Any] = {"Model": name}
    items = {s.task.name: records.item_scores(s.task.items, s.outcomes) for s in scores}
    if whole:
        values["CORE metric"] = records.estimate(*core(scores))
        weights = {s.task.name: 1 / len(scores) / (1 - s.task.random_baseline) for s in scores}
        items["CORE metric"] = records.weighted_scores(weights)
    else:
        tasks += f" of {len(suite.tasks)}, the evaluation has not ended"
    values |= {
        **{score.task.name: records.estimate(*score.centred) for score in scores},
        "Tasks": tasks + f", missing: {', '.join(suite.missing)}" * bool(suite.missing),
        "Suite": suite.about,
        "Cropped items": sum(score.num_cropped for score in scores),
    }
    return values, items


def task_table(scores: Sequence[TaskScore]) -> dict[str, Any]:
    """How each task was asked, and what it took."""
    rows = []
    for s in scores:
        asked = [s.task.name, s.task.num_fewshot, len(s.outcomes), s.num_cropped]
        accuracy = f"{s.accuracy.value:.4f} +- {s.accuracy.se:.4f}"
        rows.append([*asked, f"{s.task.random_baseline:.3f}", accuracy, f"{s.seconds:.1f}"])
    columns = ["Task", "Examples", "Items", "Cropped", "Guessing", "Accuracy", "Seconds"]
    return {"title": "Tasks", "columns": columns, "rows": rows}


if __name__ == "__main__":
    start(main, BaseEval(), __doc__)
