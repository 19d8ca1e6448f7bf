"""
Score a chat model on tasks, by the letters' logits or by what it writes.

    python -m scripts.chat_eval -i sft                       # all tasks of the model's world
    python -m scripts.chat_eval -i rl -a GSM8K -n 8 -t 1.0   # one task, 8 answers to each question
    torchrun --nproc_per_node=8 -m scripts.chat_eval -i mid -a "ARC-Easy|MMLU"

Reads   the checkpoint of a stage (base, mid, sft, rl) and the evaluation splits of the tasks
Writes  the section "Chat evaluation <stage>", to which every call adds its tasks
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from nanochat import records, report, stats
from nanochat.checkpoint import Checkpoint, find_checkpoint, load_model
from nanochat.config import settings, short, start
from nanochat.engine import Engine
from nanochat.eval_chat import Graded, Outcomes, by_letters, by_writing
from nanochat.finetune import parent_inputs
from nanochat.gpt import for_inference
from nanochat.held_out import admitted, require_access
from nanochat.kernels import choose_fused_engine
from nanochat.machine import Machine, MachineConfig, init_machine
from nanochat.sampling import Sampling
from nanochat.stats import Estimate
from nanochat.tokenizer import Tokenizer
from nanochat.tools import Tools
from nanochat.variance import default_repeats
from tasks.base import Task
from tasks.defaults import defaults
from tasks.registry import exam, key_of


@dataclass(frozen=True)
class ChatEval:
    source: Literal["base", "mid", "sft", "rl"] = short("i", "sft")
    """The stage whose model is scored."""
    task_name: str | None = short("a", None)
    """Tasks by name, with | between them. Default: all of the model's world."""
    temperature: float = short("t", 0.0)
    """How freely the model answers; 0 always takes the likeliest token."""
    max_new_tokens: int = short("m", 512)
    """Longest answer, in tokens."""
    num_samples: int | None = short("n", None)
    """Answers to each question; a score is their mean (Avg@k), and pass@k is shown beside it.
    Default: 1 at temperature 0, else what scripts.eval_variance found the task to need."""
    top_k: int | None = short("k", 50)
    """Only among so many of the likeliest tokens. Default: all."""
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
    """Look at benchmarks that scripts.hold_out declared final, and have it written down; without
    it, they are refused by name and otherwise left out."""
    once: bool = False
    """Do nothing when this checkpoint was scored with these settings before."""
    report_dir: str | None = None
    """Folder of records. Default: report/ under the base directory."""
    machine: MachineConfig = field(default_factory=MachineConfig)

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "num_samples", "batch_size", "max_problems"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")

    @property
    def section(self) -> str:
        return f"Chat evaluation {self.source}"

    def repeats(self, task: Task) -> int:
        """Answers to each question of a task that is scored by what the model writes."""
        return self.num_samples or default_repeats(task.name, self.temperature)

    def sampled(self, task: Task) -> bool:
        """Whether the answers to a task are left to chance."""
        return task.kind == "generate" and self.temperature > 0

    @property
    def sampling(self) -> Sampling:
        return Sampling(
            self.max_new_tokens, self.temperature, self.top_k, self.top_p, seed=self.seed
        )


def main(cfg: ChatEval) -> None:
    started = time.perf_counter()
    machine = init_machine(cfg.machine, cfg.seed)
    checkpoint = find_checkpoint(cfg.source, cfg.model_tag, cfg.step, machine.print0)
    every_task = defaults(checkpoint.state["source"]).evaluated
    names = admitted(cfg.task_name, every_task, cfg.final, machine.print0)
    tasks = [exam(name, cfg.unsafe_exec) for name in names]
    inputs = parent_inputs(checkpoint)
    key = records.stage_key(asked(cfg), inputs)
    if cfg.once and machine.broadcast(
        records.finished(cfg.section, key, cfg.report_dir) is not None
    ):
        machine.print0(f"{cfg.section}: finished already, skipped")
        return machine.close()

    if machine.is_main:
        who = {"checkpoint": str(checkpoint.folder), "section": cfg.section}
        require_access([task.name for task in tasks], cfg.final, who)
    machine.barrier()
    tokenizer = Tokenizer.read(checkpoint.folder / "tokenizer.json")
    model = for_inference(load_model(checkpoint, machine))
    tool = Tools(cfg.python, unsafe=cfg.unsafe_exec)
    answers = sum(
        min(len(task), cfg.max_problems or len(task)) * cfg.repeats(task)
        for task in tasks
        if task.kind == "generate"
    )
    fused = choose_fused_engine(cfg.compile_engine, machine, answers * cfg.max_new_tokens)
    engine = Engine(model, tokenizer, cfg.batch_size or 64, tool=tool, compiled=fused)
    found: dict[str, Graded] = {}
    for task in tasks:
        begun = time.perf_counter()
        count = min(len(task), cfg.max_problems or len(task))
        if task.kind == "choice":
            graded = by_letters(model, tokenizer, task, count, machine)
        else:
            graded = by_writing(engine, task, count, cfg.sampling, cfg.repeats(task), machine)
        found[task.name] = graded
        score = accuracy(graded.outcomes)
        repeats = f", {len(graded.outcomes[0])} answers each" * (len(graded.outcomes[0]) > 1)
        cropped = f", {graded.num_cropped} cropped" if graded.num_cropped else ""
        machine.print0(
            f"{task.name}: {score.value:.4f} +- {score.se:.4f} ({count} questions{repeats}"
            f"{cropped}), {time.perf_counter() - begun:.1f} s"
        )
    if machine.is_main:
        whole = {key_of(task.name) for task in tasks} >= {key_of(name) for name in every_task}
        write_section(cfg, checkpoint, tasks, found, whole, machine, started)
    machine.close()


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


def write_section(
    cfg: ChatEval,
    checkpoint: Checkpoint,
    tasks: Sequence[Task],
    found: dict[str, Graded],
    whole: bool,
    machine: Machine,
    started: float,
) -> None:
    """The record and the report; ChatCORE where all the tasks of the model's world were scored."""
    values: dict[str, Any] = {}
    items: dict[str, Any] = {}
    for task in tasks:
        outcomes = found[task.name].outcomes
        values[task.name] = with_repeats(outcomes, sampled=cfg.sampled(task))
        conversations = [task[i] for i in range(len(outcomes))]
        items[task.name] = records.item_scores(conversations, item_means(outcomes))
        k = len(outcomes[0])
        for n in {2, 4, 8, 16, 32, 64} & set(range(2, k + 1)):
            correct = [sum(score == 1 for score in scores) for scores in outcomes]
            passed = stats.mean_pass_at_k(k, correct, n)
            values[f"{task.name} pass@{n}"] = records.estimate(*passed)
            each = [stats.pass_at_k(k, c, n) for c in correct]
            items[f"{task.name} pass@{n}"] = records.item_scores(conversations, each)
    if whole:
        centred = [
            stats.centred(accuracy(found[task.name].outcomes), task.baseline) for task in tasks
        ]
        values["ChatCORE"] = records.estimate(*stats.average(centred))
        weights = {task.name: 1 / len(tasks) / (1 - task.baseline) for task in tasks}
        items["ChatCORE"] = records.weighted_scores(weights)
    if cropped := sum(graded.num_cropped for graded in found.values()):
        values["Cropped prompts"] = cropped
    origin = checkpoint.state["provenance"]
    records.write_record(
        cfg.section,
        asked(cfg),
        values,
        records.Provenance(origin["run_id"], cfg.seed, parent_inputs(checkpoint)),
        records.Cost.since(started, machine),
        cfg.report_dir,
        items=items,
        extend=True,
    )
    report.update(cfg.report_dir)


if __name__ == "__main__":
    start(main, ChatEval(), __doc__)
