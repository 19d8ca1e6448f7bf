"""
Score a chat model on tasks, by the letters' logits or by what it writes.

    python -m scripts.chat_eval -i sft                       # all tasks of the model's world
    python -m scripts.chat_eval -i rl -a GSM8K -n 8 -t 1.0   # one task, 8 answers to each question
    torchrun --nproc_per_node=8 -m scripts.chat_eval -- -i mid -a "ARC-Easy|MMLU"

Reads   the checkpoint of a stage (base, mid, sft, rl) and the evaluation splits of the tasks
Writes  the section "Chat evaluation <stage>", to which every call adds its tasks
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from nanochat import records, report, stats
from nanochat.checkpoint import Checkpoint, find_checkpoint, load_model
from nanochat.common import UsageError
from nanochat.config import settings, short, start
from nanochat.distributed import DistConfig, DistContext, init_distributed
from nanochat.engine import Engine, Sampling
from nanochat.eval_chat import Graded, Outcomes, score_by_generation, score_by_logits
from nanochat.finetune import parent_inputs
from nanochat.gpt import for_inference
from nanochat.lab.held_out import admitted, require_access
from nanochat.lab.variance import default_repeats, repeated
from nanochat.preflight import choose_fused_engine
from nanochat.sandbox import Tools
from nanochat.stats import Estimate
from nanochat.tokenizer import Tokenizer
from tasks.base import Task
from tasks.registry import exam, key_of, why_unavailable

MEAN = "ChatCORE"
EVAL_TASKS = ("arc_easy", "arc_challenge", "mmlu", "gsm8k", "humaneval", "aqua", "spelling")
BUILTIN_EVAL_TASKS = {  # by the data set that the base model was trained on
    "embedded": ("world_choice", "world_facts", "world_problems", "world_spelling")
}


@dataclass(frozen=True)
class TaskEval:
    """What the scripts that score chat models have in common."""

    task_name: str | None = short("a", None)
    """Tasks by name, with | between them. Default: all of the model's world."""
    temperature: float = short("t", 0.0)
    """Sampling temperature; 0 is greedy."""
    max_new_tokens: int = short("m", 512)
    """Longest answer, in tokens."""
    top_k: int | None = short("k", 50)
    """Sample from the k most likely tokens. Default: all."""
    top_p: float = 1.0
    """Only among the likeliest tokens that together reach this probability."""
    max_problems: int | None = short("x", None)
    """Questions of each task, counted from the first. Default: all."""
    seed: int = 0
    """Of the answers, at a temperature above 0."""
    python: bool = False
    """Run python that the model calls, in the sandbox; without it, it only has a calculator."""
    unsafe_exec: bool = False
    """Run what the model wrote with all your rights where this machine has no sandbox."""
    batch_size: int | None = short("b", None)
    """Answers written at a time; changes no result. Default: 64."""
    compile_engine: bool | None = None
    """Fuse the step that writes a token. Default: on a GPU, and on a CPU where so much may be
    written that it pays."""
    final: bool = False
    """Also score benchmarks that scripts.lab.hold_out declared final, and log the access; without
    it, they are rejected by name and otherwise left out."""
    report_dir: str | None = None
    """Folder of records. Default: report/ under the base directory."""
    machine: DistConfig = field(default_factory=DistConfig)

    def count(self, task: Task) -> int:
        """Questions of a task that are asked."""
        return min(len(task), self.max_problems or len(task))

    @property
    def sampling(self) -> Sampling:
        return Sampling(
            self.max_new_tokens, self.temperature, self.top_k, self.top_p, seed=self.seed
        )


@dataclass(frozen=True)
class ChatEval(TaskEval):
    source: Literal["base", "mid", "sft", "rl"] = short("i", "sft")
    """The stage whose model is scored."""
    num_samples: int | None = short("n", None)
    """Answers to each question; a score is their mean (Avg@k), and pass@k is shown beside it.
    Default: 1 at temperature 0, else what scripts.lab.eval_variance found the task to need."""
    model_tag: str | None = short("g", None)
    """Folder of the checkpoint. Default: the one written last."""
    step: int | None = short("s", None)
    """Step of the checkpoint. Default: the last good one."""
    skip_if_done: bool = False
    """Skip the tasks on which this checkpoint was scored with these settings before."""

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "num_samples", "batch_size", "max_problems"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        assert self.sampling  # raises ValueError for values that no answer can be sampled with

    @property
    def section(self) -> str:
        return f"Chat evaluation {self.source}"

    def repeats(self, task: Task) -> int:
        """Answers to each question of a task that is scored by what the model generates."""
        return self.num_samples or default_repeats(task.name, self.temperature)


def default_tasks(source: Mapping[str, Any]) -> tuple[str, ...]:
    """What a model is scored on that was pretrained on `source`, as a checkpoint describes it."""
    return BUILTIN_EVAL_TASKS.get(source.get("dataset", ""), EVAL_TASKS)


def open_tasks(
    cfg: TaskEval, default: Sequence[str], machine: DistContext
) -> tuple[list[Task], dict[str, str]]:
    """
    The tasks that every rank can score, and of the others why not; logged. Raises UsageError where
    the user asked for one of these by name.
    """
    names = admitted(cfg.task_name, default, cfg.final, machine.print0)
    reasons = {name: why_unavailable(name, cfg.unsafe_exec) for name in names}
    missing = {n: why for rank in machine.gather(reasons) for n, why in rank.items() if why}
    for name, why in missing.items():
        if cfg.task_name:
            raise UsageError(f"{name} cannot be scored here: {why}", "leave it out of --task_name")
        machine.print0(f"{name} is left out: {why}")
    with machine.working("loading the tasks"):
        return [exam(name, cfg.unsafe_exec) for name in names if name not in missing], missing


def open_engine(
    cfg: TaskEval, checkpoint: Checkpoint, machine: DistContext, num_answers: int
) -> Engine:
    """An engine with the model of a checkpoint, compiled where that many answers pay for it."""
    tokenizer = Tokenizer.read(checkpoint.folder / "tokenizer.json")
    model = for_inference(load_model(checkpoint, machine))
    tool = Tools(cfg.python, unsafe=cfg.unsafe_exec)
    fused = choose_fused_engine(cfg.compile_engine, machine, num_answers * cfg.max_new_tokens)
    return Engine(model, tokenizer, cfg.batch_size or 64, tool=tool, compiled=fused)


def main(cfg: ChatEval) -> None:
    started = time.perf_counter()
    machine = init_distributed(cfg.machine, cfg.seed)
    checkpoint = machine.on_node(
        "verifying the checkpoint",
        lambda: find_checkpoint(cfg.source, cfg.model_tag, cfg.step),
    )
    every_task = default_tasks(checkpoint.state["source"])
    tasks, missing = open_tasks(cfg, every_task, machine)
    inputs = parent_inputs(checkpoint)
    key = records.stage_key({**asked(cfg), "task_name": None}, inputs)  # of each task's score
    known: dict[str, Estimate] = {}
    if cfg.skip_if_done:
        known = machine.on_main("verifying files", lambda: scored_before(cfg, key, inputs))
    todo = [task for task in tasks if task.name not in known]
    if not todo and (cfg.task_name or MEAN in known):
        machine.print0(f"{cfg.section}: finished already, skipped")
        return machine.close()

    if machine.is_main:
        who = {"checkpoint": str(checkpoint.folder), "section": cfg.section}
        require_access([task.name for task in todo], cfg.final, who)
    machine.barrier()
    generated = [task for task in todo if task.kind == "generate"]
    answers = sum(cfg.count(task) * cfg.repeats(task) for task in generated)
    engine = open_engine(cfg, checkpoint, machine, answers)

    def record(values: Mapping[str, Any], items: Mapping[str, Any]) -> None:
        """Extend the section at the cost of the time since; an abort keeps what was scored."""
        nonlocal started
        if machine.is_main:
            origin = records.Provenance(checkpoint.state["provenance"]["run_id"], cfg.seed, inputs)
            cost, folder = records.Cost.since(started, machine), cfg.report_dir
            records.write_record(
                cfg.section, asked(cfg), values, origin, cost, folder, items=items, extend=True
            )
        started = time.perf_counter()

    for task in todo:
        begun = time.perf_counter()
        if task.kind == "choice":
            model, tokenizer = engine.model, engine.tokenizer
            graded = score_by_logits(model, tokenizer, task, cfg.count(task), machine)
        else:
            n, repeats = cfg.count(task), cfg.repeats(task)
            graded = score_by_generation(engine, task, n, cfg.sampling, repeats, machine)
        known[task.name] = stats.mean(item_means(graded.outcomes))
        machine.print0(describe(task, graded, time.perf_counter() - begun))
        record(*task_figures(task, graded, key, task.kind == "generate" and cfg.temperature > 0))
    scored = {key_of(name) for name in (*missing, *(task.name for task in tasks))}
    if scored >= {key_of(name) for name in every_task}:
        record(*mean_figures(tasks, known, missing))
    if machine.is_main:
        with machine.working("writing the report"):
            report.update(cfg.report_dir)
    machine.close()


def scored_before(cfg: ChatEval, key: str, inputs: Mapping[str, str]) -> dict[str, Estimate]:
    """The scores of the record that have this `task_key`, and ChatCORE where it has one."""
    path = records.report_folder(cfg.report_dir) / f"{records.slug(cfg.section)}.json"
    record = records.read_if_sound(path)
    if record is None or record["provenance"]["inputs"] != inputs:
        return {}
    scored = [name for name, entry in record["items"].items() if entry.get("key") == key]
    scored += [MEAN] if scored and MEAN in record["values"] else []
    values = {name: record["values"][name] for name in scored if " pass@" not in name}
    return {
        name: Estimate(float(value["value"]), value["n"], float(value["se"]))
        for name, value in values.items()
    }


def asked(cfg: ChatEval) -> dict[str, Any]:
    """The settings as the report shows them: what was left open as None."""
    open_ones = ("task_name", "model_tag", "step", "max_problems")
    return {**settings(cfg), **{name: getattr(cfg, name) for name in open_ones}}


def item_means(outcomes: Outcomes) -> list[float]:
    """The score of every item: the mean over its answers."""
    return [sum(scores) / len(scores) for scores in outcomes]


def with_repeats(outcomes: Outcomes, sampled: bool) -> dict[str, Any]:
    """
    A score as the record has it: with n items, k answers to each, and the two parts of its error.

    One answer by chance hides which part is which: then only their sum is known.
    """
    value, n, se = stats.mean(item_means(outcomes))
    k = len(outcomes[0])
    if k > 1 and n > 1:
        split = repeated(outcomes)
        return records.estimate(value, n, split.se, k, split.item_se, split.repeat_se)
    return records.estimate(value, n, se, k, *((None, None) if sampled else (se, 0.0)))


def describe(task: Task, graded: Graded, seconds: float) -> str:
    """A line about a task."""
    score, k = stats.mean(item_means(graded.outcomes)), len(graded.outcomes[0])
    repeats = f", {k} answers each" if k > 1 else ""
    cropped = f", {graded.num_cropped} cropped" if graded.num_cropped else ""
    return (
        f"{task.name}: {score.value:.4f} +- {score.se:.4f} ({score.n} questions{repeats}{cropped})"
        f", {seconds:.1f} s"
    )


Figures = tuple[dict[str, Any], dict[str, Any]]  # values and items of the record


def task_figures(task: Task, graded: Graded, key: str, sampled: bool) -> Figures:
    """The scores of a task, whole and by item; of several answers to each question, pass@k too."""
    name, outcomes = task.name, graded.outcomes
    conversations, k = [task[i] for i in range(len(outcomes))], len(outcomes[0])
    values: dict[str, Any] = {name: with_repeats(outcomes, sampled)}
    items = {name: {**records.item_scores(conversations, item_means(outcomes)), "key": key}}
    for n in (n for n in (2, 4, 8, 16, 32, 64) if n <= k):
        each = [stats.pass_at_k(k, sum(score == 1 for score in scores), n) for scores in outcomes]
        values[f"{name} pass@{n}"] = records.estimate(*stats.mean(each))
        items[f"{name} pass@{n}"] = records.item_scores(conversations, each)
    values[f"{name} cropped prompts"] = graded.num_cropped or None
    return values, items


def mean_figures(
    tasks: Sequence[Task], scores: Mapping[str, Estimate], missing: Mapping[str, str]
) -> Figures:
    """ChatCORE: the mean of the centered scores of all tasks of the model's world."""
    centred = [stats.centred(scores[task.name], task.baseline) for task in tasks]
    weights = {task.name: 1 / len(tasks) / (1 - task.baseline) for task in tasks}
    names = ", ".join(exam(name).name for name in missing)
    values = {
        MEAN: records.estimate(*stats.average(centred)),
        f"{MEAN} without": f"{names}: {'; '.join(missing.values())}" if names else None,
    }
    return values, {MEAN: records.weighted_scores(weights)}


if __name__ == "__main__":
    start(main, ChatEval(), __doc__)
