"""
Evaluate a chat model on tasks, scored by answer-letter logits or by generated answers.

    python -m scripts.chat_eval -i sft                       # all default tasks
    python -m scripts.chat_eval -i rl -a GSM8K -n 8 -t 1.0   # one task, 8 answers per question
    torchrun --nproc_per_node=8 -m scripts.chat_eval -- -i mid -a "ARC-Easy|MMLU"

Reads   the checkpoint of a stage (base, mid, sft, dpo, rl) and the evaluation splits of the tasks
Writes  the section "Chat evaluation <stage>"; a run with the same settings adds its tasks
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import mean
from typing import Annotated, Any, ClassVar

from nanochat import records, report, stats
from nanochat.checkpoint import CHANGED, Stage, changed_model_code, find_checkpoint, load_inference
from nanochat.common import MissingInput, UsageError, fingerprint, hold_lock
from nanochat.config import require_at_least, short, start
from nanochat.dist import DistConfig, DistContext, init_dist
from nanochat.engine import Engine, Sampling, choose_engine_compile
from nanochat.eval_chat import (
    Outcomes,
    TaskResult,
    clusters_of,
    item_means,
    longest_prompt,
    rates_by_k,
    render_prompts,
    score_answer,
    score_by_generation,
    score_by_logits,
)
from nanochat.finetune import parent_inputs
from nanochat.gpt import GPT
from nanochat.recipe import Recipe, code_digests, list_changes, make_recipe
from nanochat.records import Cost
from nanochat.sandbox import SandboxUnavailable, Tools
from nanochat.stats import Estimate
from nanochat.tokenizer import Tokenizer
from tasks.base import LaterTurns, Mixture, Task, answer_text, user, visible
from tasks.held_out import is_final, require_access
from tasks.registry import eval_task, key_of

TURNS = 3  # before the questions that show what a model can do later in a chat
LATER_PROBLEMS = 200  # such questions of each task
OPENERS = ("Hello! Who are you?", "What can you do?")
EVAL_TASKS = ("arc_easy", "arc_challenge", "mmlu", "gsm8k", "humaneval", "aqua", "spelling")
BUILTIN_EVAL_TASKS = {  # dataset that the base model was trained on -> tasks
    "embedded": ("world_choice", "world_facts", "world_problems", "world_spelling")
}


@dataclass(frozen=True)
class ChatEval:
    NOT_IN_RECIPE: ClassVar[str] = (
        "source model_tag step task_name batch_size unsafe_exec final skip_if_done"
    )

    task_name: Annotated[str | None, short("a")] = None
    """Tasks, separated by |. Default: a standard set that depends on the pretraining data."""
    sampling: Sampling = Sampling(max_new_tokens=512, temperature=0.0, top_k=50)
    max_problems: Annotated[int | None, short("x")] = None
    """Evaluate only the first N questions of each task. Default: all."""
    python: bool = False
    """Let the model run Python in the sandbox; otherwise it has only a calculator."""
    unsafe_exec: bool = False
    """If no sandbox works, run the model's code unsandboxed, with your permissions."""
    batch_size: Annotated[int | None, short("b")] = None
    """Number of answers generated concurrently; changes results by rounding only. Default: 64, or
    fewer if memory is small."""
    final: bool = False
    """Also evaluate benchmarks that scripts.lab.hold_out declared final, and log the access.
    Without it, they are skipped, or rejected if listed in task_name."""
    dist: DistConfig = field(default_factory=DistConfig)

    source: Annotated[Stage, short("i")] = "sft"
    """Stage of the model."""
    num_samples: Annotated[int, short("n")] = 1
    """Answers per question; the score is their mean (avg@k), and pass@k is reported too.
    scripts.lab.eval_variance measures how many a task needs."""
    model_tag: Annotated[str | None, short("g")] = None
    """Folder of the checkpoint. Default: the newest."""
    step: Annotated[int | None, short("s")] = None
    """Step of the checkpoint. Default: the latest intact one."""
    skip_if_done: bool = False
    """Do nothing if all tasks were already evaluated with this checkpoint and these settings."""

    def __post_init__(self) -> None:
        require_at_least(self, batch_size=1, max_problems=1, num_samples=1)
        if self.num_samples > 1 and not self.sampling.temperature:
            raise ValueError(
                f"{self.num_samples} greedy answers to a question are equal; use --temperature=1"
            )


def default_tasks(source: Mapping[str, Any]) -> tuple[str, ...]:
    """Default tasks for a model pretrained on `source` (from the checkpoint state)."""
    return BUILTIN_EVAL_TASKS.get(source.get("dataset", ""), EVAL_TASKS)


def open_tasks(
    cfg: ChatEval, default: Sequence[str], dist: DistContext
) -> tuple[list[Task], dict[str, str]]:
    """
    Return the tasks that can be scored, and name -> reason for the skipped ones, which are
    logged. Raises UsageError if a task in `task_name` cannot be scored.
    """
    selected = cfg.task_name.split("|") if cfg.task_name else default
    names = list({key_of(name): name for name in selected}.values())
    mine = dist.on_main(lambda: {n: why_unavailable(n, cfg) for n in names})
    missing = {n: why for reasons in dist.gather(mine) for n, why in reasons.items() if why}
    for name, why in missing.items():
        if cfg.task_name:
            raise UsageError(f"{name} cannot be scored here: {why}", "remove it from --task_name")
        dist.print0(f"skipping {name}: {why}")
    return [eval_task(name, cfg.unsafe_exec) for name in names if name not in missing], missing


def why_unavailable(name: str, cfg: ChatEval) -> str | None:
    """
    Why a task cannot be scored here; None if it can. Generated code needs a sandbox, spelling a
    word list. Final benchmarks are not among the default tasks.
    """
    task = eval_task(name, cfg.unsafe_exec)
    if is_final(task.name) and not cfg.final and not cfg.task_name:
        return "final benchmark, evaluated with --final"
    try:
        task.require_input()
    except (SandboxUnavailable, MissingInput) as error:
        return " ".join(str(error).split())
    return None


def main(cfg: ChatEval) -> None:
    section = f"Chat evaluation {cfg.source}"
    if cfg.num_samples > 1 or cfg.sampling.temperature > 0:  # a section of its own
        section += f", {cfg.num_samples} answers at temperature {cfg.sampling.temperature:g}"
    dist = init_dist(cfg.dist, cfg.sampling.seed)
    commits = [records.git_state()["Commit"]]
    checkpoint = dist.on_main(lambda: find_checkpoint(cfg.source, cfg.model_tag, cfg.step))
    dist = dist.keep_dtype(cfg.dist, checkpoint.state.get("compute"))
    inputs = parent_inputs(checkpoint)

    # Choose the tasks, and the means over them
    default = default_tasks(checkpoint.state["source"])
    tasks, missing = open_tasks(cfg, default, dist)
    counted = [task for task in tasks if key_of(task.name) in default]
    named = {key_of(task.name) for task in counted} | missing.keys()
    is_complete = bool(counted) and named >= set(default)
    main_score = records.mean_name("ChatCORE", (task.name for task in counted))
    means: dict[str, list[Task]] = {main_score: counted} if is_complete else {}
    later: list[Task] = []
    if is_complete and not cfg.task_name and cfg.source != "base":  # a text model has no turns
        for number, task in enumerate(counted):
            earlier = Mixture(counted, seed=number)  # other turns, so that errors are independent
            later.append(LaterTurns(task, earlier, [TURNS], LATER_PROBLEMS))
        means[f"{main_score} after {TURNS} turns"] = later

    # Stop if they are recorded; only scores with the same key are merged into a record
    todo, recipe = [*tasks, *later], make_recipe(cfg, inputs)
    wanted = {*means, *(task.name for task in todo)}
    record = None
    if cfg.skip_if_done:
        record = dist.on_main(lambda: records.find_finished(section, recipe))
    if record and record["values"].keys() >= wanted and has_questions(record["items"], cfg, todo):
        dist.print0(f"{section}: finished already, skipped")
        return dist.close()
    dist.on_main(records.require_writable)
    names = {task.name for each in todo for task in getattr(each, "tasks", [each])}
    who = {"checkpoint": str(checkpoint.folder), "section": section}
    tables = dist.on_main(lambda: require_access(sorted(names), cfg.final, who))

    # Score them
    model, tokenizer = load_inference(checkpoint, dist)
    engine = open_engine(cfg, model, tokenizer, todo, dist)
    items, scores, outcomes = {}, {}, {}
    values: dict[str, Any] = {CHANGED: changed_model_code(checkpoint)}
    for task in todo:
        begun, n = time.perf_counter(), num_problems(cfg, task)
        if task.kind == "choice":
            graded = score_by_logits(model, tokenizer, task, n, dist)
        else:
            graded = score_by_generation(engine, task, n, cfg.sampling, cfg.num_samples, dist)
        outcomes[task.name] = graded.outcomes
        score = scores[task.name] = add_task(values, items, task, graded, cfg)
        dist.print0(describe_task(task, graded, score, time.perf_counter() - begun))

    # Record them
    for name, parts in means.items():
        weights = {task.name: 1 / len(parts) / (1 - task.baseline) for task in parts}
        found = stats.combine([scores[task.name] for task in parts], list(weights.values()))
        chance = sum(weights[task.name] * task.baseline for task in parts)
        values[name] = {**found._asdict(), "value": found.value - chance}  # 0 is chance
        without = "; ".join(f"{eval_task(n).name}: {why}" for n, why in missing.items())
        values[f"{name} without"] = without or None  # None deletes that of an earlier evaluation
        items[name] = {"weights": weights}
    if dist.is_main:
        tables += [sample_conversations(engine, cfg, tasks, outcomes)] if is_complete else []
        cost = Cost.so_far(dist)
        with hold_lock(records.report_folder() / ".merge.lock", f"merging {section}"):
            old = records.read_record(section)
            if old and is_same(old, recipe):  # add to it
                if old["values"].keys() - values.keys():
                    earlier = old["cost"]["wall_seconds"]
                    cost = replace(cost, wall_seconds=cost.wall_seconds + earlier)
                values, items = {**old["values"], **values}, {**old["items"], **items}
                tables = [*{t["title"]: t for t in (*old["tables"], *tables)}.values()]
            shown: dict[str, Any] = {"items": items, "tables": tables, "commits": commits}
            report.append_section(section, cfg, values, inputs, cost, **shown)
    dist.close()


def num_problems(cfg: ChatEval, task: Task) -> int:
    """Number of questions of a task to evaluate."""
    return min(len(task), cfg.max_problems or len(task))


def has_questions(items: Mapping[str, Any], cfg: ChatEval, tasks: Sequence[Task]) -> bool:
    """Whether the items of a record are of the questions that the tasks have now."""
    asked = {t.name: fingerprint([t[i] for i in range(num_problems(cfg, t))]) for t in tasks}
    return all(items[name]["of"] == digest for name, digest in asked.items())


def open_engine(
    cfg: ChatEval, model: GPT, tokenizer: Tokenizer, todo: Sequence[Task], dist: DistContext
) -> Engine:
    """The engine that answers the questions of the tasks; compiled if they are many."""
    answers = sum(num_problems(cfg, task) for task in todo if task.kind == "generate")
    num_tokens = answers * cfg.num_samples * cfg.sampling.max_new_tokens
    compiled = choose_engine_compile(dist.device, num_tokens)
    tool = Tools(cfg.python, unsafe=cfg.unsafe_exec)
    return Engine(model, tokenizer, cfg.batch_size, tool=tool, compiled=compiled)


def is_same(record: records.Record, recipe: Recipe) -> bool:
    """Whether a record has scores by the same recipe and code."""
    same = "recipe" in record and not list_changes(record["recipe"], recipe)
    return same and record["code"] == code_digests()


def describe_task(task: Task, graded: TaskResult, score: Estimate, seconds: float) -> str:
    """One log line about a task."""
    k = len(graded.outcomes[0])
    repeats = f", {k} answers each" if k > 1 else ""
    repeats += f", {graded.num_truncated} truncated" if graded.num_truncated else ""
    return f"{task.name}: {score} ({score.n} questions{repeats}), {seconds:.1f} s"


def add_task(
    values: dict[str, Any], items: dict[str, Any], task: Task, graded: TaskResult, cfg: ChatEval
) -> Estimate:
    """
    Add a task's score to the values and items of the record, also pass@k of several answers.
    Returns the score.
    """
    s, shared, count = cfg.sampling, {}, len(graded.outcomes)
    conversations, clusters = [task[i] for i in range(count)], clusters_of(task, count)
    if task.kind == "generate":
        sampled = [s.temperature, s.top_k, s.top_p, s.min_p, s.max_new_tokens, cfg.python]
        shared = {"how": fingerprint(sampled)}
    for k, rates in rates_by_k(graded.outcomes).items():
        name = task.name if k == 1 else f"{task.name} pass@{k}"
        values[name] = stats.mean(rates, clusters)._asdict()
        if k == 1 and (answers := len(graded.outcomes[0])) > 1:
            values[name]["k"] = answers
        items[name] = {**records.item_scores(conversations, rates, clusters), **shared}
    if graded.num_truncated:
        values[f"{task.name} truncated prompts"] = graded.num_truncated
    return stats.mean(item_means(graded.outcomes), clusters)


def sample_conversations(
    engine: Engine, cfg: ChatEval, tasks: Sequence[Task], outcomes: Mapping[str, Outcomes]
) -> dict[str, Any]:
    """
    Table of greedy answers to two questions about the model, to the first question of each
    generated task, and to one that had no right answer, with what was expected of wrong ones.
    """
    generated = [task for task in tasks if task.kind == "generate"]
    chosen = [(task, 0) for task in generated]
    weak = sorted(generated, key=lambda t: mean(item_means(outcomes[t.name])))
    failed = [(t, i) for t in weak for i, found in enumerate(outcomes[t.name]) if not any(found)]
    chosen = list(dict.fromkeys([*chosen, *failed[:1]]))
    asked = [[user(text)] for text in OPENERS] + [task[i][:1] for task, i in chosen]
    most = longest_prompt(engine, cfg.sampling.max_new_tokens)
    prompts, _ = render_prompts(engine.tokenizer, asked, most)
    groups = engine.generate(prompts, Sampling(cfg.sampling.max_new_tokens, 0.0))
    answers = [engine.tokenizer.decode(group[0].ids) for group in groups]
    expected = [""] * len(OPENERS)
    for (task, i), answer in zip(chosen, answers[len(OPENERS) :], strict=True):
        right = visible(answer_text(task[i][-1]))
        expected.append("" if score_answer(task, i, answer) else f"expected: {right}")
    rows = [
        [m["content"], visible(a), e] for [m], a, e in zip(asked, answers, expected, strict=True)
    ]
    return {"title": report.SAMPLES, "columns": ["User", "Model", "Wrong"], "rows": rows}


if __name__ == "__main__":
    start(main, ChatEval(), __doc__)
