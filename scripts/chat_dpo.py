"""
Preference tuning of a chat model by DPO, on pairs of a chosen and a rejected answer.

    python -m scripts.chat_dpo                          # right and wrong answers of the SFT model
    python -m scripts.chat_dpo --pairs=HuggingFaceH4/ultrafeedback_binarized
    torchrun --nproc_per_node=8 -m scripts.chat_dpo -- --task=gsm8k

Reads   chatsft_checkpoints/<tag>/ and preference pairs, or the questions of the tasks
Writes  chatdpo_checkpoints/<tag>/ with metrics.jsonl, chatdpo_checkpoints/pairs_<hash>.json if the
        pairs are sampled, and the section "Chat DPO"
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial

from nanochat.checkpoint import FOLDERS, Checkpoint, load_model, stage_folder
from nanochat.common import fingerprint
from nanochat.config import require_at_least, require_positive, settings, start
from nanochat.distributed import DistContext, init_distributed
from nanochat.engine import Engine
from nanochat.finetune import choose_tag, open_parent, parent_inputs
from nanochat.gpt import GPT, inference_copy
from nanochat.lab.canaries import CanaryConfig, open_monitor
from nanochat.lab.dpo import (
    DPOObjective,
    Pair,
    PairEvaluator,
    PairLoader,
    encode_pairs,
    keep_pairs,
    sample_pairs,
)
from nanochat.optim import MuonAdamW, ScheduleConfig
from nanochat.preflight import choose_engine_compile
from nanochat.rl import RolloutConfig
from nanochat.sandbox import calculate
from nanochat.scaling import make_rules
from nanochat.tokenizer import Tokenizer
from nanochat.train import TrainingRun, skip_if_finished, train, write_section
from scripts.chat_rl import BUILTIN_TASKS, TASK, AnswerTuning, open_questions
from tasks.base import Mixture, Task
from tasks.preferences import Preferences

SECTION = "Chat DPO"


@dataclass(frozen=True)
class ChatDPO(AnswerTuning):
    pairs: str | None = None
    """Preference pairs: a JSON Lines file, or <owner>/<name> on the Hub. Default: the parent's own
    answers to the questions of task."""
    task: str | None = None
    """Task or mixture of tasks whose right and wrong answers are paired, as in gsm8k or
    gsm8k,aqua=2000. Default: as in scripts.chat_rl."""
    init_lr_frac: float = 0.03
    eval_examples: int = 400
    """Number of held-out pairs to evaluate, or of held-out questions to answer for them."""
    beta: float = 0.1
    """Weight of the log-probability ratio to the parent; lower values allow larger changes."""
    rollouts: RolloutConfig = RolloutConfig(num_samples=8)
    canaries: CanaryConfig = field(default_factory=CanaryConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(self, eval_examples=1)
        require_positive(self, "beta")
        if self.pairs and self.task:
            raise ValueError("--pairs and --task are both set; use one of them")


def main(cfg: ChatDPO) -> None:
    rows = cfg.train.device_batch_size or 8
    machine = init_distributed(cfg.train.machine, cfg.train.seed)
    parent = open_parent(cfg.source, tuple(FOLDERS), cfg.train, machine)
    default = BUILTIN_TASKS.get(parent.state["source"].get("dataset"), TASK)
    spec = None if cfg.pairs else cfg.task or default

    # Training and held-out data
    tag = choose_tag("dpo", parent, cfg.train)
    with machine.working("loading the data"):
        data = open_data(cfg, spec)
        found = {"pairs": fingerprint(data[0].identity)} if spec is None else {}
    resolved, inputs = {**settings(cfg), "task": spec}, {**parent_inputs(parent), **found}
    if skip_if_finished(SECTION, resolved, inputs, cfg.train, machine):
        return machine.close()

    # Models, pairs, optimizer
    model, tokenizer = load_model(parent, machine), parent.tokenizer()
    pairs, held_out = make_pairs(cfg, data, parent, model, tokenizer, machine)
    reference = load_model(parent, machine).to(machine.dtype).requires_grad_(False)
    objective = DPOObjective(model, reference, cfg.beta)
    T, filler = model.cfg.max_seq_len, tokenizer.bos_id
    loader = PairLoader(pairs, cfg.rollouts, cfg.train.seed, machine, filler, T)
    steps = cfg.num_epochs * len(pairs) / cfg.rollouts.examples_per_step
    num_steps = cfg.num_iterations or max(1, round(steps))
    table = make_rules(cfg.train.optim, model.cfg.d_model, cfg.init_lr_frac)
    optimizer = MuonAdamW(model, table, machine)

    # Evaluation before training, and canaries
    n = min(len(held_out), cfg.eval_examples)
    some = [held_out[i * len(held_out) // n] for i in range(n)]
    evaluator = PairEvaluator(objective, loader, some, rows)
    tasks = data[1].tasks if isinstance(data[1], Mixture) else data[1:]
    chats = {task.name: task for task in tasks}
    monitor = open_monitor(cfg.canaries, parent, model, chats, num_steps, machine)

    run = TrainingRun(
        kind="dpo",
        model=model,
        tokenizer=tokenizer,
        objective=objective,
        optimizer=optimizer,
        loader=loader,
        machine=machine,
        cfg=cfg.train,
        tag=tag,
        num_steps=num_steps,
        schedule=ScheduleConfig(0, warmdown_ratio=1.0, final_lr_frac=0.0),
        device_rows=rows,
        callbacks=[evaluator, *([monitor] if monitor else [])],
        inputs=inputs,
        identity={"task": spec, "beta": cfg.beta, "init_lr_frac": cfg.init_lr_frac, **inputs},
        state={"source": parent.state["source"]},
        settings=resolved,
        keep_optimizer=cfg.save_optimizer,
    )
    train(run)
    values = {"Training pairs": len(pairs), "Number of iterations": num_steps}
    write_section(SECTION, run, values)


def open_data(cfg: ChatDPO, spec: str | None) -> tuple[Task, Task]:
    """Training and held-out pairs of --pairs or, with `spec`, questions of its tasks."""
    if spec is None:
        assert cfg.pairs is not None
        return Preferences("train", cfg.pairs), Preferences("val", cfg.pairs)
    return open_questions(spec, spec, cfg.eval_examples, cfg.train.seed)


def make_pairs(
    cfg: ChatDPO,
    data: Sequence[Task],
    parent: Checkpoint,
    model: GPT,
    tokenizer: Tokenizer,
    machine: DistContext,
) -> list[list[Pair]]:
    """
    Encoded pairs of each task; sampled ones are saved in the folder of DPO checkpoints. Raises
    ValueError if a task has none.
    """
    T, engine, found = model.cfg.max_seq_len, None, []
    if not cfg.pairs:
        tokens = sum(map(len, data)) * cfg.rollouts.num_samples * cfg.rollouts.max_new_tokens
        compiled = choose_engine_compile(None, machine, tokens)
        twin = inference_copy(model)
        engine = Engine(twin, tokenizer, tool=calculate, compiled=compiled)
    for seed, task in enumerate(data, cfg.train.seed):
        if isinstance(task, Preferences):
            with machine.working(f"encoding {len(task):,} pairs"):
                pairs, num_long = encode_pairs(task.pairs, tokenizer, T)
            about = f"without {num_long:,} of more than {T:,} tokens, {task.num_skipped:,} invalid"
            fix = "use shorter pairs, or a model with a larger max_seq_len"
        else:
            assert engine is not None
            sampling = asdict(replace(cfg.rollouts, examples_per_step=1))  # has no influence
            origin = fingerprint([parent.fingerprint, task.identity, sampling, seed])
            sample = partial(sample_pairs, engine, task, cfg.rollouts, seed, machine)
            path = stage_folder("dpo") / f"pairs_{origin}.json"
            pairs = keep_pairs(path, sample, machine)
            about = f"from {cfg.rollouts.num_samples} answers to each of {len(task):,} questions"
            machine.print0(f"{task.split}: pairs are kept in {path}")
            fix = "raise --num_samples, or use tasks that the model solves sometimes"
        machine.print0(f"{task.split}: {len(pairs):,} pairs, {about}")
        if not pairs:
            raise ValueError(f"no pairs in {task.name} ({task.split}), {about}; {fix}")
        found.append(pairs)
    return found


if __name__ == "__main__":
    start(main, ChatDPO(), __doc__)
