"""
Reinforcement learning on questions with scorable answers.

    python -m scripts.chat_rl                                      # newest SFT checkpoint
    torchrun --nproc_per_node=8 -m scripts.chat_rl -- --task=gsm8k,aqua

Reads   chatsft_checkpoints/<tag>/ and the training and evaluation questions of the tasks
Writes  chatrl_checkpoints/<tag>/ with metrics.jsonl, and the section "Chat RL"
"""

import math
from dataclasses import dataclass, field

from nanochat.checkpoint import FOLDERS, Checkpoint, SavingConfig, load_model
from nanochat.config import require_at_least, require_positive, settings, start
from nanochat.distributed import DistContext, init_distributed
from nanochat.engine import Engine
from nanochat.eval_chat import item_means, score_by_generation
from nanochat.finetune import choose_tag, open_parent, parent_inputs
from nanochat.gpt import GPT, inference_copy
from nanochat.lab.canaries import CanaryConfig, open_monitor
from nanochat.lab.held_out import reject_contaminated, require_access
from nanochat.mixture import Part
from nanochat.optim import MuonAdamW, OptimConfig, ScheduleConfig
from nanochat.preflight import choose_engine_compile
from nanochat.rl import RLConfig, RLEvaluator, RolloutLoader
from nanochat.sandbox import calculate
from nanochat.scaling import make_rules
from nanochat.train import TrainConfig, TrainingRun, skip_if_finished, train, write_section
from tasks.base import Mixture
from tasks.buckets import held_out_questions, rl_questions, tags
from tasks.registry import key_of

SECTION = "Chat RL"
TASK = "gsm8k"
BUILTIN_TASKS = {  # dataset of the base model -> default task
    "embedded": "world_facts*2,world_choice*4,world_problems=800,world_spelling=800"
}


@dataclass(frozen=True)
class AnswerTuning:
    """Settings shared by the scripts that tune the answers of a chat model: RL and DPO."""

    source: str = "sft"
    """Checkpoint to start from: stage[:tag[:step]], as in sft:d4:400."""
    num_iterations: int | None = None
    """Optimizer steps. Default: derived from num_epochs."""
    num_epochs: float = 1.0
    """Epochs over the training questions or pairs."""
    init_lr_frac: float = 0.05
    """Peak learning rates as a fraction of the pretraining ones; they decay linearly to 0."""
    save_optimizer: bool = False
    """Keep the optimizer state in the final checkpoint, so that the run can be extended."""
    train: TrainConfig = TrainConfig(
        device_batch_size=8,
        eval_every=60,
        save_every=60,
        saving=SavingConfig(keep=1),
        optim=OptimConfig(weight_decay=0.0),
    )

    def __post_init__(self) -> None:
        require_positive(self, "num_iterations", "num_epochs", "init_lr_frac")
        if self.train.machine.dtype == "fp8":  # GPUs multiply multiples of 16 rows only
            raise ValueError("fp8 needs rows of one length, unlike RL and DPO; omit --dtype=fp8")


@dataclass(frozen=True)
class ChatRL(AnswerTuning):
    task: str | None = None
    """Task or mixture of tasks to train on, as in gsm8k or gsm8k,aqua=2000. Default: gsm8k, or
    all tasks of the built-in dataset if the model was trained on it."""
    eval_task: str | None = None
    """Task or mixture of tasks that held-out questions are from. Default: `task`."""
    eval_examples: int = 400
    """Total number of held-out questions to evaluate every eval_every steps. Before and after RL,
    about as many training questions are evaluated too."""
    eval_samples: int = 8
    """Answers per held-out question."""
    pass_rates: tuple[float, float] | None = None
    """Train only on questions whose pass rate under the parent model is in this range, as in
    0.2,0.8; estimated from num_samples answers each. Default: all questions."""
    rl: RLConfig = field(default_factory=RLConfig)
    canaries: CanaryConfig = field(default_factory=CanaryConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(self, eval_examples=1, eval_samples=1)
        if self.pass_rates and not 0 <= self.pass_rates[0] <= self.pass_rates[1] <= 1:
            raise ValueError(f"pass_rates must rise within 0 to 1, got {self.pass_rates}")


def main(cfg: ChatRL) -> None:
    seed = cfg.train.seed
    machine = init_distributed(cfg.train.machine, seed)
    parent = open_parent(cfg.source, tuple(FOLDERS), cfg.train, machine)
    spec = cfg.task or BUILTIN_TASKS.get(parent.state["source"].get("dataset"), TASK)
    resolved, inputs = {**settings(cfg), "task": spec}, parent_inputs(parent)
    if skip_if_finished(SECTION, resolved, inputs, cfg.train, machine):
        return machine.close()

    # Training and held-out questions
    tag = choose_tag("rl", parent, cfg.train)
    with machine.working("loading the tasks"):
        eval_spec = cfg.eval_task or spec
        train_task, held_out = open_questions(spec, eval_spec, cfg.eval_examples, seed)

    # Model, rollouts, optimizer
    model = load_model(parent, machine)
    rollouts = open_rollouts(cfg, parent, model, train_task, machine)
    steps = cfg.num_epochs * len(rollouts.questions) / cfg.rl.examples_per_step
    num_steps = cfg.num_iterations or max(1, round(steps))
    table = make_rules(cfg.train.optim, model.cfg.d_model, cfg.init_lr_frac)
    optimizer = MuonAdamW(model, table, machine)

    # Evaluation before training, and canaries
    reward_steps = min(num_steps, math.ceil(cfg.eval_examples / cfg.rl.examples_per_step))
    evaluator = RLEvaluator(rollouts, held_out, cfg.eval_samples, reward_steps)
    chats = {task.name: task for task in held_out.tasks}
    monitor = open_monitor(cfg.canaries, parent, model, chats, num_steps, machine)

    rates = cfg.pass_rates
    identity = {"task": spec, "init_lr_frac": cfg.init_lr_frac, "pass_rates": rates and list(rates)}
    run = TrainingRun(
        kind="rl",
        model=model,
        tokenizer=rollouts.engine.tokenizer,
        optimizer=optimizer,
        loader=rollouts,
        machine=machine,
        cfg=cfg.train,
        tag=tag,
        num_steps=num_steps,
        schedule=ScheduleConfig(0, warmdown_ratio=1.0, final_lr_frac=0.0),
        device_rows=cfg.train.device_batch_size or 8,
        callbacks=[evaluator, *([monitor] if monitor else [])],
        inputs=inputs,
        identity={**identity, **inputs},
        state={"source": parent.state["source"]},
        settings=resolved,
        keep_optimizer=cfg.save_optimizer,
    )
    train(run)
    write_section(SECTION, run, {})


def open_questions(spec: str, eval_spec: str, count: int, seed: int) -> tuple[Mixture, Mixture]:
    """
    Questions of the tasks in `spec`, and `count` held-out ones of those in `eval_spec`. Raises
    UsageError if a held-out task is final, or if training tasks contaminate a final benchmark.
    """
    questions, held_out = rl_questions(spec, seed), held_out_questions(eval_spec, count)
    require_access({task.name for task in held_out.tasks}, False, {})
    reject_contaminated({t.name: tags(Part(key_of(t.name))) for t in questions.tasks})
    return questions, held_out


def open_rollouts(
    cfg: ChatRL, parent: Checkpoint, model: GPT, task: Mixture, machine: DistContext
) -> RolloutLoader:
    """Rollouts on the questions of `task` whose pass rate is within `pass_rates`."""
    rl, seed, questions = cfg.rl, cfg.train.seed, range(len(task))
    total = (cfg.num_iterations or 0) * rl.examples_per_step or round(cfg.num_epochs * len(task))
    compiled = choose_engine_compile(None, machine, total * rl.num_samples * rl.max_new_tokens)
    tokenizer = parent.tokenizer()
    engine = Engine(inference_copy(model), tokenizer, tool=calculate, compiled=compiled)
    if cfg.pass_rates is not None:
        (least, most), sampling = cfg.pass_rates, rl.sampling(seed + 2)
        graded = score_by_generation(engine, task, len(task), sampling, rl.num_samples, machine)
        rates = item_means(graded.outcomes)
        questions = [i for i, rate in enumerate(rates) if least <= rate <= most]
        machine.print0(
            f"training on {len(questions):,} of {len(rates):,} questions, "
            f"those with a pass rate of {least:.0%} to {most:.0%}"
        )
    reference = inference_copy(load_model(parent, machine)) if rl.log_kl else None
    return RolloutLoader(task, questions, rl, seed, machine, model, engine, reference)


if __name__ == "__main__":
    start(main, ChatRL(), __doc__)
