"""
Evaluate a base model on few-shot tasks: centered accuracy per task, and their mean, CORE.

    python -m scripts.base_eval                                    # newest checkpoint
    torchrun --nproc_per_node=8 -m scripts.base_eval -- --model_tag=d24 --max_per_task=500
    python -m scripts.base_eval --hf_path=openai-community/gpt2    # a Hugging Face model

Reads   base_checkpoints/<tag>/ or a Hugging Face model, and the suite: DCLM's evaluation bundle,
        downloaded on first use, or that of a built-in dataset, generated on first use
Writes  the section "Base model evaluation"; for a Hugging Face model, "Evaluation of <model>"
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, ClassVar, Literal

from torch import Tensor

from nanochat import records, report
from nanochat.checkpoint import CHANGED, changed_model_code, find_checkpoint, load_inference
from nanochat.common import MissingInput, UsageError, fingerprint, sha256_file
from nanochat.config import require_at_least, short, start
from nanochat.dist import DistConfig, DistContext, init_dist
from nanochat.eval_core import TaskScore, core, evaluate_task, open_suite
from nanochat.recipe import make_recipe
from nanochat.run import skip_if_finished
from tasks.held_out import is_final, require_access
from tasks.world.write import builtin_suite

SECTION = "Base model evaluation"
INSTALL = "uv sync --inexact --group interop"


@dataclass(frozen=True)
class BaseEval:
    NOT_IN_RECIPE: ClassVar[str] = (
        "model_tag model_step eval_bundle hf_path trust_remote_code only_fetch skip_if_done"
    )

    model_tag: Annotated[str | None, short("g")] = None
    """Folder under base_checkpoints/. Default: the newest."""
    model_step: Annotated[int | None, short("s")] = None
    """Step of the checkpoint. Default: the latest intact one."""
    max_per_task: int | None = None
    """Maximum number of items per task. Default: all."""
    hf_path: str | None = None
    """Evaluate this Hugging Face causal language model instead: a Hub name or a folder. Needs
    `uv sync --inexact --group interop`."""
    trust_remote_code: bool = False
    """Allow the Hugging Face model to run its own code."""
    suite: Literal["dclm", "embedded"] | None = None
    """Few-shot tasks: `dclm` (CORE), or a built-in dataset with its own suite, such as embedded.
    Default: the suite of the model's training data if it has one, else dclm."""
    eval_bundle: str | None = None
    """DCLM's tasks: a folder, a zip file or its URL. Default: the published archive, downloaded
    once."""
    final: bool = False
    """Also evaluate tasks that scripts.lab.hold_out declared final, and log the access."""
    only_fetch: bool = False
    """Only download or generate the tasks and print a description; needs no model."""
    skip_if_done: bool = False
    """Do nothing if this checkpoint was already evaluated with these settings."""
    dist: DistConfig = field(default_factory=DistConfig)

    def __post_init__(self) -> None:
        require_at_least(self, max_per_task=1)
        if self.suite == "embedded" and self.eval_bundle:
            raise ValueError("--eval_bundle requires --suite=dclm")


def main(cfg: BaseEval) -> None:
    if cfg.only_fetch:
        return print(open_suite(cfg.eval_bundle or builtin_suite(cfg.suite)).about)
    dist, commits = init_dist(cfg.dist), [records.git_state()["Commit"]]
    model = tokenizer = checkpoint = None
    if cfg.hf_path:
        section, name, dataset = f"Evaluation of {cfg.hf_path}", cfg.hf_path, None
        model = tokenizer = HFModel(cfg.hf_path, dist, cfg.trust_remote_code)
        inputs = {"hf": model.revision}
    else:
        checkpoint = dist.on_main(lambda: find_checkpoint("base", cfg.model_tag, cfg.model_step))
        dist = dist.keep_dtype(cfg.dist, checkpoint.state.get("compute"))
        section, name = SECTION, f"base_model (step {checkpoint.step})"
        dataset, origin = checkpoint.state["source"].get("dataset"), checkpoint.state["provenance"]
        inputs = {**origin["inputs"], "base": checkpoint.fingerprint}
    suite = dist.on_main(lambda: open_suite(cfg.eval_bundle or builtin_suite(cfg.suite or dataset)))
    inputs["suite"] = suite.fingerprint
    if skip_if_finished(section, make_recipe(cfg, inputs), cfg.skip_if_done, dist):
        return dist.close()

    tasks = [task for task in suite.tasks if cfg.final or not is_final(task.name)]
    names, who = [task.name for task in tasks], {"checkpoint": name, "section": section}
    if not tasks:
        raise UsageError("all tasks of the suite are final", "pass --final; the access is logged")
    accesses = dist.on_main(lambda: require_access(names, cfg.final, who))
    about = suite.about
    if final := [task.name for task in suite.tasks if task not in tasks]:
        about += f"; not comparable: without final {', '.join(final)}"
    if checkpoint is not None:
        model, tokenizer = load_inference(checkpoint, dist)
    dist.print0(f"{name} on {about}")
    scores = []
    for task in tasks:
        scores.append(evaluate_task(model, tokenizer, task, dist, cfg.max_per_task))
        dist.print0(describe_score(scores[-1]))
    if cfg.max_per_task:
        about += f"; at most {cfg.max_per_task} items of each task: not comparable with all of them"
    total, metric = core(scores), records.mean_name("CORE metric", names)
    dist.print0(f"{metric} {total} over {len(scores)} tasks")
    values = {
        "Model": name,
        metric: total._asdict(),
        **{score.task.name: score.centered_accuracy._asdict() for score in scores},
        "Tasks": len(scores),
        "Suite": about,
        "Truncated items": sum(score.num_truncated for score in scores),
        CHANGED: changed_model_code(checkpoint) if checkpoint else None,
    }
    if dist.is_main:
        cost = records.Cost.so_far(dist)
        items = {s.task.name: records.item_scores(s.task.items, s.centered) for s in scores}
        items[metric] = {"weights": {s.task.name: 1 / len(scores) for s in scores}}
        tables = [task_table(scores), *accesses]
        shown = {"items": items, "tables": tables}
        report.append_section(section, cfg, values, inputs, cost, **shown, commits=commits)
    dist.close()


class HFModel:
    """
    A causal language model of transformers and its tokenizer, with what `eval_core` uses of ours.

    Raises MissingInput without transformers; OSError or ValueError if the model does not exist,
    requires remote code, or lacks a context length or a token to start a text with.
    """

    new_cache = None

    def __init__(self, path: str, dist: DistContext, trust_remote_code: bool):
        try:
            from transformers import AutoModelForCausalLM, AutoTokenizer  # optional package
        except ModuleNotFoundError as error:
            raise MissingInput(f"--hf_path needs {error.name}", INSTALL) from error
        loader: Any = AutoModelForCausalLM
        options = {"trust_remote_code": trust_remote_code}
        self.model = loader.from_pretrained(path, dtype=dist.dtype, **options).to(dist.device)
        self.tokenizer, self.device = AutoTokenizer.from_pretrained(path, **options), dist.device
        config, bos_id = self.model.eval().config, self.tokenizer.bos_token_id
        self.bos_id: Any = self.tokenizer.eos_token_id if bos_id is None else bos_id
        self.cfg = SimpleNamespace(max_seq_len=getattr(config, "max_position_embeddings", None))
        if None in (self.bos_id, self.cfg.max_seq_len):
            raise ValueError(
                f"{path} needs max_position_embeddings in config.json, and bos_token or eos_token "
                "in tokenizer_config.json"
            )
        if Path(path).is_dir():
            files = sorted(file for file in Path(path).iterdir() if file.is_file())
            self.revision = fingerprint({file.name: sha256_file(file) for file in files})
        else:
            self.revision = config._commit_hash or path

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def hidden(self, tokens: Tensor, view: None) -> Tensor:
        """tokens (B, T) -> logits (B, T, V): the steps before them differ by architecture."""
        return self.model(input_ids=tokens, use_cache=False).logits

    def logits(self, hidden: Tensor) -> Tensor:
        """Return `hidden` (N, V) unchanged."""
        return hidden


def describe_score(score: TaskScore) -> str:
    """One log line about a task."""
    accuracy, centered = score.accuracy, score.centered_accuracy
    truncated = f", {score.num_truncated} truncated" if score.num_truncated else ""
    return (
        f"{score.task.name}: accuracy {accuracy.value:.4f}, centered {centered} "
        f"({accuracy.n} items{truncated}), {score.seconds:.1f} s"
    )


def task_table(scores: Sequence[TaskScore]) -> dict[str, Any]:
    """Settings, accuracy and time of each task, as a table for the record."""
    rows = []
    for s in scores:
        counts = [s.task.name, s.task.num_fewshot, len(s.outcomes), s.num_truncated]
        chance = f"{s.task.random_baseline:.3f}"
        rows.append([*counts, chance, str(s.accuracy), f"{s.seconds:.1f}"])
    columns = ["Task", "Examples", "Items", "Truncated", "Chance", "Accuracy", "Seconds"]
    return {"title": "Tasks", "columns": columns, "rows": rows}


if __name__ == "__main__":
    start(main, BaseEval(), __doc__)
