"""
A fixed suite of about 200 questions, asked of every checkpoint of a run.

    dataset of the base model -> open_suite -> tasks -> score_suite -> scores of the items by task

The items are the first ones, in the tasks' fixed order, of splits that no stage trains on: the
validation split, or the test split of GSM8K, which has no other, and of the built-in tasks, whose
validation split is for RL. Nothing is downloaded: if the benchmarks are not on this machine, the
built-in tasks are asked. Final benchmarks are left out.
"""

from collections.abc import Mapping, Sequence

from nanochat.checkpoint import Checkpoint, load_model
from nanochat.common import base_dir, fingerprint, read_json, write_json
from nanochat.distributed import DistContext
from nanochat.engine import Engine, Sampling
from nanochat.eval_chat import score_by_generation, score_by_logits
from nanochat.gpt import GPT, inference_copy
from nanochat.lab.held_out import is_final
from nanochat.sandbox import calculate
from nanochat.tokenizer import Tokenizer
from tasks.base import Subset, Task
from tasks.builtin import WRITERS
from tasks.hub import HubTask
from tasks.registry import TASKS, make_task

PUBLISHED = {"arc_easy": 60, "arc_challenge": 50, "mmlu": 70, "gsm8k": 20}  # task -> items
BUILTIN = {"world_choice": 110, "world_facts": 40, "world_problems": 25, "world_spelling": 25}
GREEDY = Sampling(max_new_tokens=256, temperature=0.0)

ItemScores = dict[str, list[float]]
"""Score of each item by task."""


def open_suite(dataset: str | None) -> list[Task]:
    """Tasks of the suite for models that were pretrained on `dataset`."""
    published = [] if dataset in WRITERS else first_items(PUBLISHED)
    has_choice = any(task.kind == "choice" for task in published)
    return published if has_choice else first_items(BUILTIN)


def first_items(counts: Mapping[str, int]) -> list[Task]:
    """The first items of each task that is on this machine and not final."""
    found: list[Task] = []
    for key in (key for key in counts if not is_final(key)):
        kind = TASKS[key].task
        split = next(s for s in ("val", "test") if s in kind.splits and s != kind.rl_split)
        task = make_task(key, split)
        if not isinstance(task, HubTask) or task.is_local():
            found.append(Subset(task, 0, counts[key]))
    return found


def score_suite(
    model: GPT, tokenizer: Tokenizer, suite: Sequence[Task], machine: DistContext
) -> ItemScores:
    """
    Score a model (ideally `gpt.inference_copy(model)`): by logits, or by greedy answers with a
    calculator. Every rank of `machine` must call it.
    """
    found = {}
    for task in suite:
        if task.kind == "choice":
            graded = score_by_logits(model, tokenizer, task, len(task), machine)
        else:
            engine = Engine(model, tokenizer, tool=calculate)
            graded = score_by_generation(engine, task, len(task), GREEDY, 1, machine)
        found[task.name] = [score for (score,) in graded.outcomes]
    return found


def score_checkpoint(
    checkpoint: Checkpoint, suite: Sequence[Task], machine: DistContext
) -> ItemScores:
    """Score a checkpoint, or read its scores from an earlier call with the same suite."""
    path = base_dir() / "suite" / f"{checkpoint.fingerprint}.json"
    identity = fingerprint([GREEDY.max_new_tokens, *(task.identity for task in suite)])
    found = read_json(path) if path.exists() else {}
    if found.get("suite") != identity:
        tokenizer = Tokenizer.read(checkpoint.folder / "tokenizer.json")
        model = inference_copy(load_model(checkpoint, machine))
        scores = score_suite(model, tokenizer, suite, machine)
        found = {"suite": identity, "scores": scores}
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, found)
    return {task.name: found["scores"][task.name] for task in suite}  # a file has no order
