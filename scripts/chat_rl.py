"""
Reinforcement learning: the model answers questions, and right answers become likelier.

    python -m scripts.chat_rl                                      # the SFT checkpoint written last
    torchrun --nproc_per_node=8 -m scripts.chat_rl -- --task=gsm8k,aqua

Reads   chatsft_checkpoints/<tag>/ and the tasks' training and evaluation questions
Writes  chatrl_checkpoints/<tag>/ with metrics.jsonl, and the section "Chat RL"
"""

from dataclasses import dataclass, field, replace

from nanochat import records
from nanochat.checkpoint import FOLDERS, Checkpoint, SavingConfig, load_model
from nanochat.config import settings, start
from nanochat.distributed import DistContext, init_distributed
from nanochat.engine import Engine, Sampling
from nanochat.eval_chat import score_by_generation
from nanochat.finetune import open_parent, parent_inputs
from nanochat.gpt import GPT, for_inference, refresh
from nanochat.lab.canaries import RETIRED_FLAGS, CanaryConfig, open_monitor
from nanochat.lab.held_out import require_access, require_other_families
from nanochat.logger import METRICS_FILE, read_metrics
from nanochat.optim import MuonAdamW, OptimConfig, ScheduleConfig, rules
from nanochat.preflight import Prepared, choose_fused_engine
from nanochat.rl import HeldOut, RLConfig, RolloutLoader, summarize
from nanochat.tokenizer import Tokenizer
from nanochat.tools import Tools
from nanochat.train import (
    Stopwatch,
    TrainConfig,
    TrainingRun,
    finished_before,
    train,
    write_section,
)
from tasks.base import Mixture, Task
from tasks.buckets import TAGS, held_out_questions, questions
from tasks.registry import key_of

SECTION = "Chat RL"
TASK = "gsm8k"
BUILTIN_TASKS = {"embedded": "world_facts"}  # by the data set that the base model was trained on
SLOTS = 64  # answers generated at a time on one device
RETIRED = {
    **RETIRED_FLAGS,
    "resample": "it is now --resample_zero_signal",
    "solved_from": "it is now --min_pass_rate",
    "solved_to": "it is now --max_pass_rate",
    "split": "RL trains on the training split",
    "slots": f"{SLOTS} answers are generated at a time",
}


@dataclass(frozen=True)
class ChatRL:
    source: str = "sft"
    """The checkpoint to start from: stage[:tag[:step]], as in sft:d4:400."""
    task: str | None = None
    """One task, or a mixture of tasks whose answers can be scored, as in gsm8k or gsm8k,aqua=2000.
    Default: gsm8k, or a task of the built-in data set that the model was trained on."""
    num_iterations: int | None = None
    """Steps. Default: from num_epochs."""
    num_epochs: float = 1.0
    """Passes over the training questions."""
    init_lr_frac: float = 0.05
    """Peak of all learning rates, as a fraction of those of pretraining; they fall linearly to
    0."""
    eval_examples: int = 400
    """Held-out questions, of all tasks together, to answer before, after, and every --eval_every
    steps; before and after, rewards of about as many training questions."""
    eval_samples: int = 8
    """Answers to each of them."""
    min_pass_rate: float = 0.0
    """Train only on questions that the parent model answers correctly at least this often,
    estimated with as many answers as a group has."""
    max_pass_rate: float = 1.0
    """And at most this often: 0.2 to 0.8 leaves out what gives no gradient."""
    python: bool = False
    """Run python that the model calls, in the sandbox; without it, it only has a calculator."""
    unsafe_exec: bool = False
    """Run model-written code unsandboxed, with your permissions, where there is no sandbox."""
    compile_engine: bool | None = None
    """Compile the decode step. Default: on a GPU, and on a CPU where enough is generated."""
    save_optimizer: bool = False
    """Keep the optimizer state in the last checkpoint, so that the run can be made longer."""
    rl: RLConfig = field(default_factory=RLConfig)
    canaries: CanaryConfig = field(default_factory=CanaryConfig)
    train: TrainConfig = field(
        default_factory=lambda: TrainConfig(
            device_batch_size=8,
            eval_every=60,
            save_every=60,
            saving=SavingConfig(keep=1),
            optim=OptimConfig(weight_decay=0.0),
        )
    )

    def __post_init__(self) -> None:
        for name in ("eval_examples", "eval_samples"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")

    @property
    def sampling(self) -> Sampling:
        """For held-out questions: as for those of the training."""
        rl = self.rl
        return Sampling(rl.max_new_tokens, rl.temperature, rl.top_k, seed=self.train.seed + 1)


def main(cfg: ChatRL) -> None:
    began, seed = Stopwatch.start(), cfg.train.seed
    machine = init_distributed(cfg.train.machine, seed)
    parent = open_parent(cfg.source, tuple(FOLDERS), cfg.train, machine)
    spec = cfg.task or BUILTIN_TASKS.get(parent.state["source"].get("dataset"), TASK)
    asked, inputs = {**settings(cfg), "task": spec}, parent_inputs(parent)
    if finished_before(SECTION, asked, inputs, cfg.train, machine):
        return machine.close()

    # Questions to train on, and others to evaluate with
    with machine.working("loading the tasks"):
        train_task = questions(spec, "train", seed)
        held_out = held_out_questions(spec, cfg.eval_examples)
    require_access({task.name for task in held_out.tasks}, False, {})
    require_other_families({t.name: TAGS[key_of(t.name)].parent for t in train_task.tasks})

    # Model, rollouts with it as batches, optimizer
    model = load_model(parent, machine)
    rollouts = open_rollouts(cfg, parent, model, train_task, machine)
    num_steps = cfg.num_iterations or rollouts.num_steps(cfg.num_epochs)
    table = rules(cfg.train.optim, model.cfg.d_model, cfg.init_lr_frac)
    optimizer = MuonAdamW(dict(model.named_parameters()), model.param_roles(), table, machine)

    # Evaluation before, and the canaries
    every = cfg.train.eval_every
    evaluator = HeldOut(
        rollouts, held_out, cfg.eval_samples, cfg.sampling, every, cfg.eval_examples, num_steps
    )
    chats = {task.name: task for task in held_out.tasks}
    watch = open_monitor(cfg.canaries, parent, model, chats, num_steps, machine)

    run_id = machine.broadcast(records.inherited_run_id(inputs, cfg.train.report_dir))
    answers = cfg.rl.examples_per_step * cfg.rl.num_samples
    # an answer takes a forward and a backward pass besides: twice the work of generating it
    seconds = 3 * evaluator.seconds_per_answer * answers * num_steps
    run = TrainingRun(
        kind="rl",
        model=model,
        optimizer=optimizer,
        loader=rollouts,
        machine=machine,
        cfg=cfg.train,
        tag=cfg.train.model_tag or parent.folder.parent.name,
        num_steps=num_steps,
        batch_tokens=rollouts.max_tokens,
        schedule=ScheduleConfig(0, warmdown_ratio=1.0, final_lr_frac=0.0),
        momentum=lambda step, horizon: 0.95,
        prepared=Prepared(cfg.train.device_batch_size or 8, False, 0, seconds),
        callbacks=[rollouts, evaluator, *([watch] if watch else [])],
        finds_spikes=False,
        tokenizer=rollouts.tokenizer,
        identity={"task": spec, "init_lr_frac": cfg.init_lr_frac, **inputs},
        provenance={"run_id": run_id, "seed": seed, "inputs": inputs},
        state={"source": parent.state["source"]},
        settings=asked,
        keep_optimizer=cfg.save_optimizer,
    )
    result = train(run)
    metrics = read_metrics(result.folder / METRICS_FILE) if machine.is_main else []
    names = [held_out.locate(i)[0].name for i in range(len(held_out))]
    values = summarize(metrics, names, evaluator.before, evaluator.after) if metrics else {}
    write_section(SECTION, result, values, began)


def open_rollouts(
    cfg: ChatRL, parent: Checkpoint, model: GPT, task: Mixture, machine: DistContext
) -> RolloutLoader:
    """Rollouts on the questions of `task` that are wanted, by one engine."""
    tokenizer, samples = Tokenizer.read(parent.folder / "tokenizer.json"), cfg.rl.num_samples
    answers = (cfg.num_iterations or 0) * cfg.rl.examples_per_step * samples
    answers = answers or round(cfg.num_epochs * len(task) * samples)
    compiled = choose_fused_engine(cfg.compile_engine, machine, answers * cfg.rl.max_new_tokens)
    tool = Tools(cfg.python, unsafe=cfg.unsafe_exec)
    engine = Engine(for_inference(model), tokenizer, SLOTS, tool=tool, compiled=compiled)

    def refreshed(model: GPT) -> Engine:
        refresh(engine.model, model)
        return engine

    chosen = filter_by_pass_rate(cfg, task, engine, machine)
    reference = for_inference(load_model(parent, machine)) if cfg.rl.log_kl else None
    return RolloutLoader(
        task, tokenizer, cfg.rl, cfg.train.seed, machine, model, refreshed, chosen, reference
    )


def filter_by_pass_rate(
    cfg: ChatRL, task: Task, engine: Engine, machine: DistContext
) -> list[int] | None:
    """The questions that are neither too hard nor too easy, by number; None for all of them."""
    if cfg.min_pass_rate <= 0 and cfg.max_pass_rate >= 1:
        return None
    sampling = replace(cfg.sampling, seed=cfg.train.seed + 2)
    graded = score_by_generation(engine, task, len(task), sampling, cfg.rl.num_samples, machine)
    rates = [sum(scores) / len(scores) for scores in graded.outcomes]
    kept = [i for i, rate in enumerate(rates) if cfg.min_pass_rate <= rate <= cfg.max_pass_rate]
    machine.print0(
        f"training on {len(kept):,} of {len(rates):,} questions: those of which "
        f"{cfg.min_pass_rate:.0%} to {cfg.max_pass_rate:.0%} of the answers are right"
    )
    return kept


if __name__ == "__main__":
    start(main, ChatRL(), __doc__, RETIRED)
