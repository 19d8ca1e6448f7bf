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
from nanochat.config import settings, short, start
from nanochat.distributed import Machine, MachineConfig, init_machine
from nanochat.engine import Engine, Sampling
from nanochat.eval_chat import (
    Graded,
    Outcomes,
    left_out,
    score_by_generation,
    score_by_logits,
)
from nanochat.finetune import parent_inputs
from nanochat.gpt import for_inference
from nanochat.lab.held_out import admitted, require_access
from nanochat.lab.variance import default_repeats
from nanochat.preflight import choose_fused_engine
from nanochat.stats import Estimate
from nanochat.tokenizer import Tokenizer
from nanochat.tools import Tools
from tasks.base import Task
from tasks.defaults import defaults
from tasks.registry import exam, key_of, why_unavailable

MEAN = "ChatCORE"


@dataclass(frozen=True)
class ChatEval:
    source: Literal["base", "mid", "sft", "rl"] = short("i", "sft")
    """The stage whose model is scored."""
    task_name: str | None = short("a", None)
    """Tasks by name, with | between them. Default: all of the model's world."""
    temperature: float = short("t", 0.0)
    """Sampling temperature; 0 is greedy."""
    max_new_tokens: int = short("m", 512)
    """Longest answer, in tokens."""
    num_samples: int | None = short("n", None)
    """Answers to each question; a score is their mean (Avg@k), and pass@k is shown beside it.
    Default: 1 at temperature 0, else what scripts.lab.eval_variance found the task to need."""
    top_k: int | None = short("k", 50)
    """Sample from the k most likely tokens. Default: all."""
    top_p: float = 1.0
    """Only among the likeliest tokens that together reach this probability."""
    batch_size: int | None = short("b", None)
    """Answers written at a time; changes no result. Default: 64."""
    model_tag: str | None = short("g", None)
    """Folder of the checkpoint. Default: the one written last."""
    step: int | None = short("s", None)
    """Step of the checkpoint. Default: the last good one."""
    max_problems: int | None = short("x", None)
    """Questions of each task, counted from the first. Default: all."""
    seed: int = 0
    """Of the answers, at a temperature above 0."""
    python: bool = False
    """Run python that the model calls, in the sandbox; without it, it only has a calculator."""
    unsafe_exec: bool = False
    """Run what the model wrote with all your rights where this machine has no sandbox."""
    compile_engine: bool | None = None
    """Fuse the step that writes a token. Default: on a GPU, and on a CPU where so much may be
    written that it pays."""
    final: bool = False
    """Also score benchmarks that scripts.lab.hold_out declared final, and log the access; without
    it, they are rejected by name and otherwise left out."""
    once: bool = False
    """Skip the tasks on which this checkpoint was scored with these settings before."""
    report_dir: str | None = None
    """Folder of records. Default: report/ under the base directory."""
    machine: MachineConfig = field(default_factory=MachineConfig)

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
        """Answers to each question of a task that is scored by what the model writes."""
        return self.num_samples or default_repeats(task.name, self.temperature)

    def sampled(self, task: Task) -> bool:
        """Whether the answers to a task are sampled."""
        return task.kind == "generate" and self.temperature > 0

    @property
    def sampling(self) -> Sampling:
        return Sampling(
            self.max_new_tokens, self.temperature, self.top_k, self.top_p, seed=self.seed
        )


def main(cfg: ChatEval) -> None:
    started = time.perf_counter()
    machine = init_machine(cfg.machine, cfg.seed)
    checkpoint = machine.on_node(
        "verifying the checkpoint",
        lambda: find_checkpoint(cfg.source, cfg.model_tag, cfg.step, machine.print0),
    )
    every_task = defaults(checkpoint.state["source"]).evaluated
    names = admitted(cfg.task_name, every_task, cfg.final, machine.print0)
    reasons = {name: why_unavailable(name, cfg.unsafe_exec) for name in names}
    missing = left_out(reasons, bool(cfg.task_name), machine)
    with machine.working("loading the tasks"):
        tasks = [exam(name, cfg.unsafe_exec) for name in names if name not in missing]
    inputs = parent_inputs(checkpoint)
    key = task_key(cfg, inputs)
    known: dict[str, Estimate] = {}
    if cfg.once:
        known = machine.on_main("verifying files", lambda: scored_before(cfg, key, inputs))
    todo = [task for task in tasks if task.name not in known]
    if not todo and (cfg.task_name or MEAN in known):
        machine.print0(f"{cfg.section}: finished already, skipped")
        return machine.close()

    section = Section(cfg, checkpoint, key, missing, machine, started)
    if machine.is_main:
        who = {"checkpoint": str(checkpoint.folder), "section": cfg.section}
        require_access([task.name for task in todo], cfg.final, who)
    machine.barrier()
    tokenizer = Tokenizer.read(checkpoint.folder / "tokenizer.json")
    model = for_inference(load_model(checkpoint, machine))
    tool = Tools(cfg.python, unsafe=cfg.unsafe_exec)
    answers = sum(
        min(len(task), cfg.max_problems or len(task)) * cfg.repeats(task)
        for task in todo
        if task.kind == "generate"
    )
    fused = choose_fused_engine(cfg.compile_engine, machine, answers * cfg.max_new_tokens)
    engine = Engine(model, tokenizer, cfg.batch_size or 64, tool=tool, compiled=fused)
    for task in todo:
        begun = time.perf_counter()
        count = min(len(task), cfg.max_problems or len(task))
        if task.kind == "choice":
            graded = score_by_logits(model, tokenizer, task, count, machine)
        else:
            graded = score_by_generation(
                engine, task, count, cfg.sampling, cfg.repeats(task), machine
            )
        known[task.name] = score = accuracy(graded.outcomes)
        repeats = f", {len(graded.outcomes[0])} answers each" * (len(graded.outcomes[0]) > 1)
        cropped = f", {graded.num_cropped} cropped" if graded.num_cropped else ""
        machine.print0(
            f"{task.name}: {score.value:.4f} +- {score.se:.4f} ({count} questions{repeats}"
            f"{cropped}), {time.perf_counter() - begun:.1f} s"
        )
        if machine.is_main:
            section.add_task(task, graded)
    if machine.is_main:
        scored = {key_of(task.name) for task in tasks} | {key_of(name) for name in missing}
        if scored >= {key_of(name) for name in every_task}:
            section.add_mean(tasks, known)
        with machine.working("writing the report"):
            report.update(cfg.report_dir)
    machine.close()


def task_key(cfg: ChatEval, inputs: Mapping[str, str]) -> str:
    """Names what decides the score of a task: all settings but which tasks there are."""
    return records.stage_key({**asked(cfg), "task_name": None}, inputs)


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


def accuracy(outcomes: Outcomes) -> Estimate:
    """The mean over the items."""
    return stats.mean(item_means(outcomes))


def with_repeats(outcomes: Outcomes, sampled: bool) -> dict[str, Any]:
    """
    A score as the record has it: with n items, k answers to each, and the two parts of its error.

    One answer by chance hides which part is which: then only their sum is known.
    """
    value, n, se = accuracy(outcomes)
    k = len(outcomes[0])
    if k > 1 and n > 1:
        split = stats.repeated(outcomes)
        return records.estimate(value, n, split.se, k, split.item_se, split.repeat_se)
    return records.estimate(value, n, se, k, *((None, None) if sampled else (se, 0.0)))


class Section:
    """The section's record, extended task by task, so that an abort keeps what was scored."""

    def __init__(
        self,
        cfg: ChatEval,
        checkpoint: Checkpoint,
        key: str,
        missing: Mapping[str, str],
        machine: Machine,
        started: float,
    ):
        self.cfg, self.checkpoint, self.key, self.machine = cfg, checkpoint, key, machine
        self.missing, self.started = missing, started

    def add_task(self, task: Task, graded: Graded) -> None:
        """Record the scores of a task."""
        outcomes, name = graded.outcomes, task.name
        values: dict[str, Any] = {name: with_repeats(outcomes, sampled=self.cfg.sampled(task))}
        conversations = [task[i] for i in range(len(outcomes))]
        scores = records.item_scores(conversations, item_means(outcomes))
        items = {name: {**scores, "key": self.key}}
        k = len(outcomes[0])
        for n in {2, 4, 8, 16, 32, 64} & set(range(2, k + 1)):
            correct = [sum(score == 1 for score in scores) for scores in outcomes]
            passed = stats.mean_pass_at_k(k, correct, n)
            values[f"{name} pass@{n}"] = records.estimate(*passed)
            each = [stats.pass_at_k(k, c, n) for c in correct]
            items[f"{name} pass@{n}"] = records.item_scores(conversations, each)
        values[f"{name} cropped prompts"] = graded.num_cropped or None
        self.write(values, items)

    def add_mean(self, tasks: Sequence[Task], scores: Mapping[str, Estimate]) -> None:
        """Record ChatCORE: the mean of the centered scores of all tasks of the model's world."""
        centred = [stats.centred(scores[task.name], task.baseline) for task in tasks]
        values: dict[str, Any] = {MEAN: records.estimate(*stats.average(centred))}
        weights = {task.name: 1 / len(tasks) / (1 - task.baseline) for task in tasks}
        names = ", ".join(exam(name).name for name in self.missing)
        why = "; ".join(self.missing.values())
        values[f"{MEAN} without"] = f"{names}: {why}" if names else None
        self.write(values, {MEAN: records.weighted_scores(weights)})

    def write(self, values: Mapping[str, Any], items: Mapping[str, Any]) -> None:
        """Extend the record, at the cost of the time since it was last extended."""
        origin, inputs = self.checkpoint.state["provenance"], parent_inputs(self.checkpoint)
        records.write_record(
            self.cfg.section,
            asked(self.cfg),
            values,
            records.Provenance(origin["run_id"], self.cfg.seed, inputs),
            records.Cost.since(self.started, self.machine),
            self.cfg.report_dir,
            items=items,
            extend=True,
        )
        self.started = time.perf_counter()


if __name__ == "__main__":
    start(main, ChatEval(), __doc__)
