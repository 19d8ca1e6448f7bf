"""
Reinforcement learning on questions with scorable answers.

    python -m scripts.chat_rl                                      # newest SFT checkpoint
    torchrun --nproc_per_node=8 -m scripts.chat_rl -- --task=gsm8k,aqua

Reads   chatsft_checkpoints/<tag>/ and the training and evaluation questions of the tasks
Writes  chatrl_checkpoints/<tag>/ with metrics.jsonl, and the section "Chat RL"
"""

import time
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

from torch import Tensor

from nanochat import stats
from nanochat.checkpoint import (
    CHANGED,
    Checkpoint,
    changed_model_code,
    load_inference,
    load_model,
    stage_folder,
)
from nanochat.common import fingerprint, read_json, write_json
from nanochat.config import require_at_least, require_positive, settings, start
from nanochat.dist import DistContext
from nanochat.engine import Engine, choose_engine_compile
from nanochat.eval_chat import Outcomes, clusters_of, item_means, rates_by_k, score_by_generation
from nanochat.finetune import inherited_state, open_stage, parent_inputs
from nanochat.gpt import copy_weights, inference_copy
from nanochat.loss import cross_entropy
from nanochat.optim import TUNING, MuonAdamW, ScheduleConfig, decay_factor, lr_factor
from nanochat.recipe import code_digests, data_id, make_recipe
from nanochat.records import item_scores
from nanochat.rl import RolloutConfig, Rollouts, draws_of_step, kl_to_reference, micro_batches
from nanochat.run import Run, skip_if_finished
from nanochat.sandbox import Tools
from nanochat.scaling import make_rules
from nanochat.train import TrainConfig
from tasks.base import Mixture
from tasks.buckets import held_out_questions, rl_questions

SECTION = "Chat RL"
TASK = "gsm8k"
MOMENTUM = 0.95  # of Muon, constant
SCHEDULE = ScheduleConfig(0, warmdown_ratio=1.0, final_lr_frac=0.0)  # linear decay to 0
BUILTIN_TASKS = {  # dataset of the base model -> default task
    "embedded": "world_facts*2,world_choice*4,world_problems=800,world_spelling=800"
}


@dataclass(frozen=True)
class ChatRL:
    NOT_IN_RECIPE: ClassVar[str] = "source log_kl"

    source: str = "sft"
    """Checkpoint to start from: stage[:tag[:step]], as in sft:d4:400."""
    num_iterations: int | None = None
    """Optimizer steps. Default: derived from num_epochs."""
    num_epochs: float = 1.0
    """Epochs over the training questions."""
    init_lr_frac: float = 0.05
    """Peak learning rates as a fraction of the pretraining ones; they decay linearly to 0."""
    train: TrainConfig = TrainConfig(
        device_batch_size=8, eval_every=60, save_every=60, keep=1, optim=TUNING
    )
    task: str | None = None
    """Task or mixture of tasks to train on, as in gsm8k or gsm8k,aqua=2000. Default: gsm8k, or
    all tasks of the built-in dataset if the model was trained on it."""
    eval_task: str | None = None
    """Task or mixture of tasks that held-out questions are from. Default: `task`."""
    eval_examples: int = 400
    """Total number of held-out questions to evaluate every eval_every steps."""
    eval_samples: int = 8
    """Answers per held-out question."""
    pass_rates: tuple[float, float] | None = None
    """Train only on questions whose pass rate under the parent model is in this range, as in
    0.2 0.8; estimated from num_samples answers each. Default: all questions."""
    resample_zero_signal: int = 0
    """Replace a question whose answers all have the same reward, and thus no gradient, up to N
    times."""
    log_kl: bool = False
    """Log the KL divergence from the initial model in nats per generated token; costs two extra
    forward passes."""
    rl: RolloutConfig = field(default_factory=RolloutConfig)

    def __post_init__(self) -> None:
        require_positive(self, "num_iterations", "num_epochs", "init_lr_frac")
        require_at_least(self, eval_examples=1, eval_samples=1, resample_zero_signal=0)
        if self.train.dist.dtype == "fp8":  # GPUs multiply multiples of 16 rows only
            raise ValueError("fp8 needs rows of one length, unlike RL and DPO; omit --dtype=fp8")
        if self.pass_rates and not 0 <= self.pass_rates[0] <= self.pass_rates[1] <= 1:
            raise ValueError(f"pass_rates must rise within 0 to 1, got {self.pass_rates}")


def main(cfg: ChatRL) -> None:
    cfg, parent, tag, _, dist = open_stage("rl", cfg)
    rl, seed = cfg.rl, cfg.train.seed
    spec = cfg.task or BUILTIN_TASKS.get(parent.state["source"].get("dataset"), TASK)
    train_task = rl_questions(spec, seed)
    held_out = held_out_questions(cfg.eval_task or spec, cfg.eval_examples)
    resolved, inputs = {**settings(cfg), "task": spec}, parent_inputs(parent)
    inputs["questions"] = data_id([train_task.identity, held_out.identity])
    recipe = make_recipe(cfg, inputs)
    if skip_if_finished(SECTION, recipe, cfg.train.skip_if_done, dist, tag):
        return dist.close()

    # Model, rollouts, optimizer
    model = load_model(parent, dist)
    reference = inference_copy(load_model(parent, dist)) if cfg.log_kl else None
    rollouts = open_rollouts(cfg, parent, train_task, dist)
    engine, tokenizer = rollouts.engine, rollouts.engine.tokenizer
    steps = cfg.num_epochs * len(rollouts.questions) / rl.examples_per_step
    num_steps = cfg.num_iterations or max(1, round(steps))
    rules = make_rules(cfg.train.optim, model.cfg.d_model, cfg.init_lr_frac)
    optimizer = MuonAdamW(model, rules, dist)

    run = Run("rl", tag, recipe, model, optimizer, tokenizer, cfg.train, dist)
    run.state |= {**inherited_state(parent), "settings": resolved}
    engine.stop = run.stop

    def evaluate() -> Outcomes:
        args = held_out, len(held_out), rl.sampling(seed + 1), cfg.eval_samples, dist
        outcomes = score_by_generation(engine, *args).outcomes
        run.raise_if_stopped()  # the engine has stopped then
        return outcomes

    batch_tokens = rl.examples_per_step * rl.num_samples * rl.max_new_tokens
    with run.begin(num_steps, batch_tokens, None):
        rows, pad = run.device_rows, tokenizer.bos_id
        before = after = evaluate()  # of the parent, also in a resumed run
        for step in run.steps():  # from the last checkpoint on; the last pass saves and evaluates
            if run.due(cfg.train.save_every):
                run.save()  # the trained model before its evaluation, which may fail
            copy_weights(engine.model, model)
            if step == 0:
                run.log(pass_metrics(before, held_out))
            elif run.due(cfg.train.eval_every):
                after = evaluate()
                run.log(pass_metrics(after, held_out))
            if run.finished:
                break

            # Answers of the current model, and their rewards
            started = time.perf_counter()
            draws = draws_of_step(step, rl.examples_per_step, dist)
            first, groups = rollouts.answer(draws, cfg.resample_zero_signal)
            metrics = rollouts.metrics(first)
            metrics["rollout_seconds"] = time.perf_counter() - started
            if reference is not None:  # both are inference copies, rounded alike
                batches = micro_batches(groups, rows, pad, dist.device)
                metrics["kl"] = kl_to_reference(engine.model, reference, batches, dist)

            # edit here: `policy_gradient`, and the tensors of a batch; a term that does not depend
            # on rewards, such as an entropy bonus, also needs the groups without signal
            learned = [group for group in groups if group.has_signal]
            for batch in micro_batches(learned, rows, pad, dist.device):
                args = batch.tokens, batch.targets, None, policy_gradient, batch.tensors
                run.accumulate(model.loss(*args), sum(batch.counts), batch.tokens.numel())
            decay = decay_factor(step, num_steps)
            run.update(lr_factor(step, num_steps, SCHEDULE), MOMENTUM, decay, **metrics)
    values, items = compare_results(before, after, held_out)
    about = {"Number of iterations": num_steps, CHANGED: changed_model_code(parent)}
    run.finish(SECTION, {**about, **values}, items=items)


def policy_gradient(logits: Tensor, targets: Tensor, advantages: Tensor) -> Tensor:
    """The loss: -log p of each sampled token, weighted by the advantage of its answer."""
    return cross_entropy(logits, targets, advantages)


def pass_metrics(outcomes: Outcomes, task: Mixture) -> dict[str, float]:
    """Metrics of an evaluation: pass@1 and its standard error."""
    found = stats.mean(item_means(outcomes), clusters_of(task, len(task)))
    return {"pass_at_1": found.value, "pass_at_1_se": found.se}


def compare_results(
    before: Outcomes, after: Outcomes, task: Mixture
) -> tuple[dict[str, Any], dict[str, Any]]:
    """
    Values and items for the record: pass@1 on held-out questions before and after RL, its change
    and whether that exceeds the noise, and pass@k after RL.
    """
    clusters, questions = clusters_of(task, len(task)), [task[i] for i in range(len(task))]
    old, items = item_means(before), {}
    change = stats.compare(old, item_means(after), clusters)
    values: dict[str, Any] = {
        "pass@1 before": stats.mean(old, clusters)._asdict(),
        "pass@1 change": stats.Estimate(*change[:3])._asdict(),
        "pass@1 verdict": change.verdict,
    }
    for k, rates in rates_by_k(after).items():
        values[f"pass@{k} after"] = stats.mean(rates, clusters)._asdict()
        items[f"pass@{k} after"] = item_scores(questions, rates, clusters)
    return values, items


def open_rollouts(cfg: ChatRL, parent: Checkpoint, task: Mixture, dist: DistContext) -> Rollouts:
    """
    Rollouts on the questions of `task` whose pass rate is within `pass_rates`; the engine begins
    with the parent's weights.
    """
    rl, seed, questions = cfg.rl, cfg.train.seed, range(len(task))
    total = (cfg.num_iterations or 0) * rl.examples_per_step or round(cfg.num_epochs * len(task))
    compiled = choose_engine_compile(dist.device, total * rl.num_samples * rl.max_new_tokens)
    model, tokenizer = load_inference(parent, dist)
    engine = Engine(model, tokenizer, tool=Tools(), compiled=compiled)
    if cfg.pass_rates is not None:  # saved, because a resumed run may round differently
        (least, most), sampling = cfg.pass_rates, rl.sampling(seed + 2)
        scored_by = [x for name, x in code_digests().items() if name.startswith("tasks/")]
        made_of = [parent.fingerprint, task.identity, asdict(sampling), rl.num_samples]
        key = fingerprint([*made_of, scored_by])
        path = stage_folder("rl") / f"pass_rates_{key}.json"
        if not dist.on_main(path.exists):
            graded = score_by_generation(engine, task, len(task), sampling, rl.num_samples, dist)
            dist.on_main(lambda: write_json(path, item_means(graded.outcomes)))
        rates = dist.on_main(lambda: read_json(path))
        questions = [i for i, rate in enumerate(rates) if least <= rate <= most]
        dist.print0(
            f"training on {len(questions):,} of {len(rates):,} questions, "
            f"those with a pass rate of {least:.0%} to {most:.0%}"
        )
    return Rollouts(task, questions, rl, seed, dist, engine)


if __name__ == "__main__":
    start(main, ChatRL(), __doc__)
