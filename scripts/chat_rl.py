"""
Reinforcement learning: the model answers, right answers become likelier.

    python -m scripts.chat_rl                                      # the SFT checkpoint written last
    torchrun --nproc_per_node=8 -m scripts.chat_rl -- --task=gsm8k,aqua

Reads   chatsft_checkpoints/<tag>/ and the tasks' training and evaluation questions
Writes  chatrl_checkpoints/<tag>/ with metrics.jsonl, and the section "Chat RL"
"""

import math
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, Literal

from nanochat import preflight, records, report
from nanochat.checkpoint import (
    Checkpoint,
    Checkpoints,
    SavingConfig,
    closing_lines,
    find_checkpoint,
    load_model,
    stage_folder,
)
from nanochat.common import PREEMPTED, require_name
from nanochat.config import settings, start
from nanochat.distributed import Machine, MachineConfig, init_machine
from nanochat.engine import Engine, Sampling
from nanochat.eval_chat import by_writing
from nanochat.finetune import parent_inputs
from nanochat.gpt import GPT, for_inference, refresh
from nanochat.lab.canaries import (
    RETIRED_FLAGS,
    CanaryConfig,
    CanaryMonitor,
    open_monitor,
    stop_if_broken,
)
from nanochat.lab.held_out import require_access, require_other_families
from nanochat.logger import (
    METRICS_FILE,
    RunLog,
    RunLogConfig,
    read_metrics,
)
from nanochat.optim import MuonAdamW, OptimConfig, rules
from nanochat.preflight import choose_fused_engine
from nanochat.rl import (
    Exam,
    PolicyRun,
    Practice,
    RLConfig,
    Standing,
    figures,
    pass_at,
    train_policy,
)
from nanochat.stage import saves_to_come
from nanochat.tokenizer import Tokenizer
from nanochat.tools import Tools
from nanochat.train import LoopConfig, Progress, last_evaluation
from tasks.base import Mixture, Task
from tasks.buckets import TAGS, held_out_questions, questions
from tasks.defaults import defaults
from tasks.registry import key_of

SECTION = "Chat RL"


@dataclass(frozen=True)
class ChatRL:
    source: Literal["base", "mid", "sft", "rl"] = "sft"
    """Which stage's checkpoint to start from."""
    task: str | None = None
    """What is practised: one task or a mixture of tasks whose answers can be scored, as in gsm8k or
    gsm8k,aqua=2000. Default: by what the base model read."""
    split: str = "train"
    """Split of the tasks that is practised; held out is always test."""
    from_tag: str | None = None
    """Folder of the checkpoint to start from. Default: --model_tag, else the one written last."""
    from_step: int | None = None
    """Step of that checkpoint. Default: the last good one."""
    num_iterations: int | None = None
    """Steps. Default: from num_epochs."""
    num_epochs: float = 1.0
    """How often the training questions are gone through."""
    device_batch_size: int = 8
    """Answers per forward and backward pass on one device; never changes the result."""
    slots: int = 64
    """Answers written at a time on one device; never changes the result."""
    compile_engine: bool | None = None
    """Fuse the step that writes a token. Default: on a GPU, and on a CPU where so much may be
    written that it pays."""
    init_lr_frac: float = 0.05
    """Peak of all rates, as a fraction of those of pretraining; they fall linearly to 0."""
    eval_examples: int = 400
    """Held-out questions, of all tasks together, that are answered before, after, and every
    --eval_every steps; before and after, about as many of those that are practised."""
    eval_samples: int = 8
    """Answers to each of them."""
    solved_from: float = 0.0
    """Practise only questions of which the model it starts from gets this share of its answers
    right, found out by as many answers as there are samples in a group."""
    solved_to: float = 1.0
    """And at most this share: 0.2 to 0.8 leaves out what teaches nothing."""
    python: bool = False
    """Run python that the model calls, in the sandbox; without it, it only has a calculator."""
    unsafe_exec: bool = False
    """Run what the model wrote with all your rights where this machine has no sandbox."""
    model_tag: str = ""
    """Name of the folder of checkpoints. Default: that of the checkpoint it starts from."""
    seed: int = 0
    """Of the order of questions and of the answers."""
    once: bool = False
    """Do nothing when the same training has ended before and its checkpoint is still there."""
    report_dir: str | None = None
    """Folder of records. Default: report/ under the base directory."""
    hourly_rate: float | None = None
    """Dollars an hour that all devices together cost, for the estimate. Default: what such GPUs are
    rented for."""
    saving: SavingConfig = field(default_factory=lambda: SavingConfig(keep=1))
    rl: RLConfig = field(default_factory=RLConfig)
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(weight_decay=0.0))
    loop: LoopConfig = field(default_factory=lambda: LoopConfig(eval_every=60, save_every=60))
    machine: MachineConfig = field(default_factory=MachineConfig)
    log: RunLogConfig = field(default_factory=RunLogConfig)
    watch: CanaryConfig = field(default_factory=CanaryConfig)

    @property
    def sampling(self) -> Sampling:
        """How held-out questions are answered: as those of the training."""
        rl = self.rl
        return Sampling(rl.max_new_tokens, rl.temperature, rl.top_k, seed=self.seed + 1)

    def __post_init__(self) -> None:
        if self.split == "test":
            raise ValueError("--split=test: what is held out for tests cannot be practised")
        for name in ("device_batch_size", "slots", "eval_examples", "eval_samples"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        require_name("model_tag", self.model_tag)
        if self.seed < 0:
            raise ValueError(f"seed must not be negative, got {self.seed}")


def main(cfg: ChatRL) -> None:
    started = time.perf_counter()
    machine = init_machine(cfg.machine, cfg.seed)
    tag = cfg.from_tag or cfg.model_tag or None
    parent = machine.on_node(
        "verifying the checkpoint",
        lambda: find_checkpoint(cfg.source, tag, cfg.from_step, machine.print0),
    )
    spec = cfg.task or defaults(parent.state["source"]).rl
    asked, inputs = {**settings(cfg), "task": spec}, parent_inputs(parent)
    key = records.stage_key(asked, inputs)
    if cfg.once and machine.on_main(
        "verifying files", lambda: records.finished(SECTION, key, cfg.report_dir) is not None
    ):
        machine.print0(f"{SECTION}: finished already, skipped")
        return machine.close()

    folder = stage_folder("rl") / (cfg.model_tag or parent.folder.parent.name)
    with Checkpoints(folder, machine, cfg.saving.of_stage("rl")) as checkpoints:
        practise(cfg, asked, parent, checkpoints, machine, started)
    machine.close()


def practise(
    cfg: ChatRL,
    asked: Mapping[str, Any],
    parent: Checkpoint,
    checkpoints: Checkpoints,
    machine: Machine,
    started: float,
) -> None:
    """Measure, practise, measure again, and record it. Raises SystemExit when asked to stop."""
    # What it practises, and how well it does before
    spec, inputs = asked["task"], parent_inputs(parent)
    tokenizer = Tokenizer.read(parent.folder / "tokenizer.json")
    tool = Tools(cfg.python, unsafe=cfg.unsafe_exec)

    with machine.working("loading the tasks"):
        practised = questions(spec, cfg.split, cfg.seed)
        held_out = held_out_questions(spec, cfg.eval_examples)
    answers = (cfg.num_iterations or 0) * cfg.rl.examples_per_step * cfg.rl.num_samples
    answers = answers or round(cfg.num_epochs * len(practised) * cfg.rl.num_samples)
    fused = choose_fused_engine(cfg.compile_engine, machine, answers * cfg.rl.max_new_tokens)

    model = load_model(parent, machine)
    writer = Engine(for_inference(model), tokenizer, cfg.slots, tool=tool, compiled=fused)

    def engine(model: GPT) -> Engine:
        refresh(writer.model, model)
        return writer

    chosen = unsolved(cfg, practised, engine(model), machine)
    practice = Practice(practised, tokenizer, cfg.rl, cfg.seed, machine, chosen)
    num_steps = cfg.num_iterations or practice.num_steps(cfg.num_epochs)
    refuse_final(held_out, practised)
    exam = Exam(held_out, cfg.eval_samples, cfg.sampling, engine, machine)
    review = min(num_steps, math.ceil(cfg.eval_examples / practice.per_step))

    def measure() -> Standing:
        rewards = practice.mean_rewards(engine(model), review)
        return Standing(rewards, exam.take(model))

    measuring = time.perf_counter()
    before = measure()
    measured_seconds = time.perf_counter() - measuring
    machine.print0(f"before: {before}")

    # Practise
    run_id = machine.broadcast(records.inherited_run_id(inputs, cfg.report_dir))
    chats = {task.name: task for task in held_out.tasks}
    watch = open_monitor(cfg.watch, parent, model, chats, num_steps, machine)
    run, progress, log = open_run(
        cfg, asked, parent, model, practice, exam, checkpoints, num_steps, run_id, watch
    )
    answers = len(before.rewards) * cfg.rl.num_samples + cfg.eval_examples * cfg.eval_samples
    show(cfg, run, progress, inputs, checkpoints, measured_seconds / answers)
    with log:
        if progress.step == 0:
            log.log(0, before.logged)
        if not train_policy(run, progress):
            machine.close()
            raise SystemExit(PREEMPTED)
        with last_evaluation(machine):
            after = measure()
        log.log(num_steps, after.logged)
    machine.print0(f"after: {after}")

    # What came of it
    if machine.is_main:
        checkpoint = checkpoints.saved
        assert checkpoint is not None, "the main rank writes checkpoints"
        metrics = checkpoint.folder.parent / METRICS_FILE
        names = [held_out.locate(i)[0].name for i in range(len(held_out))]
        made = {"rl": checkpoint.fingerprint}
        with machine.working("writing the report"):
            records.write_record(
                SECTION,
                asked,
                figures(read_metrics(metrics), names, before, after),
                records.Provenance(run_id, cfg.seed, inputs, made),
                records.Cost.since(started, machine),
                cfg.report_dir,
                tables=[watch.table()] if watch else (),
                metrics=metrics,
                files=[checkpoint.folder],
            )
            report.update(cfg.report_dir)
        machine.print0(closing_lines(checkpoint.folder, machine))


def watched(
    watch: CanaryMonitor | None, log: RunLog, model: GPT, done: int, figures: Mapping[str, float]
) -> None:
    """Check the canaries after a step. Raises Broken where one calls the run broken."""
    if watch is None or not watch.cfg.due(done, watch.num_steps):
        return
    findings = watch.check_rewards(done, figures["without_signal"])
    findings += watch.check(done, model, math.nan)
    log.log(done, {f"canary_{name}": value for name, value in watch.measured.items()})
    stop_if_broken(findings, watch.cfg)


def refuse_final(held_out: Mixture, practised: Mixture) -> None:
    """Raise Refused where practice would be measured on a final benchmark, or is of its family."""
    require_access({task.name for task in held_out.tasks}, False, {})
    parents = {task.name: TAGS[key_of(task.name)].parent for task in practised.tasks}
    require_other_families(parents)


def show(
    cfg: ChatRL,
    run: PolicyRun,
    progress: Progress,
    inputs: Mapping[str, str],
    checkpoints: Checkpoints,
    answer_seconds: float,
) -> None:
    """One screen of what is about to happen; the time from the answers that were just written."""
    machine, rl, per_step = run.machine, cfg.rl, run.practice.per_step
    left = (run.num_steps - progress.step) * per_step * rl.num_samples
    # an answer that is learned from is read and differentiated: twice the work of writing it
    seconds = 3 * answer_seconds * left
    disk = checkpoints.bytes_to_come(run.model, saves_to_come(cfg.loop, progress, run.num_steps))
    preflight.screen(
        {
            **preflight.describe(run.model, machine, compiled=False),
            "disk": preflight.require_disk(checkpoints.folder, machine, checkpoints=disk),
            "inputs": ", ".join(f"{name} {print_}" for name, print_ in inputs.items()),
            "training": f"{run.num_steps:,} steps of {per_step} questions, {rl.num_samples} "
            f"answers to each; from step {progress.step:,}",
            "estimate": f"about {preflight.duration(seconds)} of training, "
            + preflight.price(seconds, cfg.hourly_rate, machine),
        },
        machine,
    )


def open_run(
    cfg: ChatRL,
    asked: Mapping[str, Any],
    parent: Checkpoint,
    model: GPT,
    practice: Practice,
    exam: Exam,
    checkpoints: Checkpoints,
    num_steps: int,
    run_id: str,
    watch: CanaryMonitor | None,
) -> tuple[PolicyRun, Progress, RunLog]:
    """The run that continues `parent`, from the beginning or from where it was interrupted."""
    machine, inputs = exam.machine, parent_inputs(parent)
    table = rules(cfg.optim, model.cfg.d_model, cfg.init_lr_frac)
    optimizer = MuonAdamW(dict(model.named_parameters()), model.param_roles(), table, machine)
    start = for_inference(load_model(parent, machine)) if cfg.rl.log_kl else None
    identity = {
        "rl": asdict(cfg.rl),
        "task": asked["task"],
        "split": cfg.split,
        "seed": cfg.seed,
        **inputs,
    }
    progress = Progress()
    checkpoints.begin(identity, False, model, optimizer, progress, num_steps)
    state = {
        "stage": "rl",
        "identity": identity,
        "settings": dict(asked),
        "source": parent.state["source"],
        "provenance": {"run_id": run_id, "seed": cfg.seed, "inputs": inputs},
    }
    log = RunLog(
        cfg.log,
        checkpoints.folder,
        is_main=machine.is_main,
        first_step=progress.step,
        total_steps=num_steps,
        run_id=run_id,
        settings=asked,
    )
    run = PolicyRun(
        model=model,
        optimizer=optimizer,
        engine=exam.engine,
        machine=machine,
        num_steps=num_steps,
        rows_per_pass=cfg.device_batch_size,
        practice=practice,
        evaluate=lambda step: {"pass_at_1": pass_at(exam.take(model), 1).value},
        save=lambda progress, final=False: checkpoints.save(
            model, optimizer, practice.tokenizer, state, progress, final
        ),
        log=log.log,
        loop=cfg.loop,
        start=start,
        after_step=partial(watched, watch, log, model),
    )
    return run, progress, log


def unsolved(cfg: ChatRL, task: Task, engine: Engine, machine: Machine) -> list[int] | None:
    """The questions that are neither too hard nor too easy, by number; None for all of them."""
    if cfg.solved_from <= 0 and cfg.solved_to >= 1:
        return None
    sampling = replace(cfg.sampling, seed=cfg.seed + 2)
    graded = by_writing(engine, task, len(task), sampling, cfg.rl.num_samples, machine)
    solved = [sum(scores) / len(scores) for scores in graded.outcomes]
    kept = [i for i, share in enumerate(solved) if cfg.solved_from <= share <= cfg.solved_to]
    machine.print0(
        f"practising {len(kept):,} of {len(solved):,} questions: those of which "
        f"{cfg.solved_from:.0%} to {cfg.solved_to:.0%} of the answers are right"
    )
    return kept


if __name__ == "__main__":
    start(main, ChatRL(), __doc__, RETIRED_FLAGS)
