"""
The run around a training loop: recipe, lock, resume, log, save, stop, record.

    recipe, model, optimizer -> Run.begin -> steps: save, evaluate, load, backward, update -> finish

The loop itself stands in the script of each stage:

    with run.begin(num_steps, batch_tokens, cfg.compile):
        for step in run.steps():  # from the last checkpoint on; the last pass only saves, evaluates
            if run.due(cfg.train.save_every):
                run.save()  # the trained model before the last evaluation, which may fail
            if run.due(cfg.train.eval_every):
                run.log(...)
            if run.finished:
                break
            run.backward(run.load(rows))
            run.update(learning rate factor, Muon momentum, weight decay factor)
    run.finish("Base model training", values)

What decides (recipe.py: the flags as given without NOT_IN_RECIPE, ids of inputs, digests of code):

    --skip_if_done    the same recipe has finished, with its files intact: nothing is done. Other
                      code: an error that names the files.
    --resume=auto     flags and inputs as in the newest checkpoint: the run goes on from there, and
                      changed code is printed and recorded. Other flags or inputs: an error that
                      lists them; MAY_GROW may differ, and with --allow_data_change inputs.
    neither           the run starts at step 0; checkpoints of an earlier one are moved aside.
"""

import os
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from nanochat import common, optim, records, report
from nanochat.checkpoint import (
    ASIDE,
    Checkpoint,
    CorruptCheckpoint,
    Stage,
    newest_state,
    open_checkpoint,
    save_checkpoint,
    stage_folder,
    step_folders,
)
from nanochat.common import StopRequested, UsageError, is_out_of_memory
from nanochat.dist import DistContext
from nanochat.fp8 import enable_fp8
from nanochat.gpt import GPT
from nanochat.recipe import Recipe, changed_code, code_digests, list_changes
from nanochat.records import METRICS_FILE, UNTIMED_STEPS, RunLog
from nanochat.tokenizer import Tokenizer
from nanochat.train import (
    SMALLER,
    Compile,
    NonFiniteError,
    Progress,
    Step,
    TrainConfig,
    check_weights,
    describe_dtype,
    set_kernels,
    to_host,
)

MAY_GROW = ("--num_iterations:", "--num_epochs:")  # flags that may differ in a resumed run
CHECK_RANKS_EVERY = 100  # steps between checks that the weights are equal on all ranks
OWN = "run."  # before the names of `Run.tensors` in a checkpoint
Batched = TypeVar("Batched", bound=Any)  # a config with total_batch_size


class Run(Step):
    """
    A training run with its folder <stage>_checkpoints/<tag>/. recipe: what determines the result.

    Raises UsageError if another run is using the folder, and ValueError if the checkpoint to resume
    has another recipe.
    """

    def __init__(
        self,
        stage: Stage,
        tag: str,
        recipe: Recipe,
        model: GPT,
        optimizer: torch.optim.Optimizer,
        tokenizer: Tokenizer,
        cfg: TrainConfig,
        dist: DistContext,
    ):
        super().__init__(model, optimizer, cfg, dist)
        self.stage, self.folder = stage, stage_folder(stage) / tag
        self.recipe, self.tokenizer = recipe, tokenizer
        self.state: dict[str, Any] = {"stage": stage, "recipe": recipe.to_json()}
        """What checkpoints store besides `progress`; a script adds the source of its text and
        "settings", its flags with the defaults filled in, for the record."""
        self.tensors: dict[str, Tensor] = {}
        """Tensors of the script, equal on all ranks, that are saved, and restored in a resumed run
        when its block begins: an average of the weights, or old log-probabilities."""
        self.checkpoint: Checkpoint | None = None
        """Newest one, saved or resumed; main rank only."""
        self.trained = False
        """Whether all steps are done and saved."""
        self.saving: tuple[int, Future[Checkpoint]] | None = None
        """Step being saved, and its result."""
        self.writer = ThreadPoolExecutor(1)
        self.logger: RunLog | None = None
        self.charged = records.STARTED  # until when the cost of this attempt is counted

    # ---- beginning and end -----------------------------------------------------------------------

    @contextmanager
    def begin(self, num_steps: int, batch_tokens: int, compile: Compile | None) -> Iterator[None]:
        """
        Hold the run's folder, resume, choose kernels, and watch for stop signals, for the `steps`
        within the block.

        num_steps: steps to train; a loop with a time limit lowers it to end the run. batch_tokens:
        as in `Step.start`. compile: how to compile the model; None = not at all, for rows of any
        length.

        The block leaves no step behind: a stop request, five bad steps in a row, data that cannot
        be read or, with one rank, any error outside an update end it after saving the completed
        steps. A stop exits with status PREEMPTED, too little memory for the last evaluation with
        UNEVALUATED.
        """
        self.num_steps = num_steps
        try:
            with ExitStack() as self.resources:
                enter, lock = self.resources.enter_context, f".{self.folder.name}.lock"
                self.dist.on_main(lambda: enter(common.hold_run_lock(self.folder.parent / lock)))
                enter(self.writer)
                self.resources.callback(self.finish_save)
                self.resume()
                self.start(batch_tokens, varying=compile is None)
                self.choose_kernels(compile)
                self.describe()
                enter(self.stop)
                try:
                    yield
                except BaseException as error:
                    self.save_completed_steps(error)
                    raise
        except StopRequested as error:
            self.dist.close()
            raise SystemExit(common.PREEMPTED) from error
        except Exception as error:
            if is_out_of_memory(error):
                self.explain_lack_of_memory(error)
            raise

    def save_completed_steps(self, error: BaseException) -> None:
        """After an error that all ranks raised, or the only one, save the steps before it."""
        stopped = isinstance(error, StopRequested)
        shared = stopped or error is self.failure or isinstance(error, NonFiniteError)
        alone = self.dist.world_size == 1 and isinstance(error, Exception) and not self.updating
        if not (shared or alone) or (self.trained and not stopped):
            return
        step, text = self.progress.step, "no step was completed, nothing saved"
        if self.trained:
            text = "trained and saved; --resume=auto repeats the last evaluation"
        elif step > self.first_step:
            self.discard()
            self.save(wait=True)
            why = "stop requested" if stopped else "training ended"
            text = f"{why}: saved step {step} (continue with --resume=auto)"
        self.dist.print0(text)

    def explain_lack_of_memory(self, error: Exception) -> None:
        """Raise what tells the user how to go on."""
        if self.trained:
            print(
                "out of memory in the final evaluation; the trained model is saved. Rerun with "
                "--resume=auto to repeat only the evaluation, with more free memory or a smaller "
                "--device_batch_size",
                flush=True,
            )
            raise SystemExit(common.UNEVALUATED) from error
        fix = f"use a smaller --device_batch_size, {SMALLER}"
        raise UsageError(f"out of memory at step {self.progress.step}", fix) from error

    def resume(self) -> None:
        """
        Load the newest good checkpoint if --resume=auto; otherwise, the run starts at step 0 and
        replaces an earlier one (`open_log`).

        Raises CorruptCheckpoint if all are corrupt, and ValueError listing the differences if the
        checkpoint has another recipe.
        """
        dist, folder, found = self.dist, self.folder, self.newest_checkpoint()
        commits = [records.git_state()["Commit"]]
        self.state |= {"compute": dist.compute, "code": code_digests(), "commits": commits}
        self.state["provenance"] = {"seed": self.cfg.seed, "inputs": self.recipe.ids}
        self.state.setdefault("rates", self.cfg.optim.rates())
        self.state["tracked"] = records.new_run_id()
        if found is None:
            return
        was = found.state
        changed = self.list_changes(found)
        if code := changed_code(was["code"]):
            dist.print0(f"resuming with changed code: {', '.join(code)}")
        self.state["changes"] = was.get("changes", []) + changed
        self.state |= {"commits": was["commits"] + commits, "tracked": was["tracked"]}
        self.model.load_state_dict(found.model_tensors())
        self.progress = Progress(**was["progress"])
        if self.progress.step > self.num_steps:
            problem = f"{folder} has {self.progress.step} steps, this run {self.num_steps}"
            raise UsageError(problem, "use another --model_tag, or --resume=never to train again")
        tensors = found.optim_tensors()
        for name in [name for name in tensors if name.startswith(OWN)]:
            self.tensors[name.removeprefix(OWN)] = tensors.pop(name).to(dist.device)
        try:
            optim.load_full_state(self.optimizer, tensors)
        except (KeyError, ValueError) as error:
            problem = f"{found.folder} has the state of another optimizer; use another --model_tag"
            raise ValueError(problem) from error
        self.checkpoint = found if dist.is_main else None
        dist.print0(f"resumed {found.folder}")

    def list_changes(self, found: Checkpoint) -> list[str]:
        """Accepted differences of the recipe to that of a checkpoint; others are an error."""
        if "recipe" not in found.state:
            problem = f"{self.folder} was trained before 2026-12, without a recipe to compare"
            fix = "finish it with the code that began it, use another --model_tag, or"
            raise UsageError(problem, f"{fix} --resume=never to train again")
        every = list_changes(found.state["recipe"], self.recipe)
        changed = [line for line in every if not line.startswith(MAY_GROW)]
        inputs_only = not any(line.startswith("--") for line in changed)
        if changed and not (self.cfg.allow_data_change and inputs_only):
            raise ValueError(
                f"{self.folder} was trained with different settings:\n  "
                + "\n  ".join(changed)
                + "\nuse the old values, or another --model_tag, or --resume=never to train again; "
                "if no flag differs, --allow_data_change goes on with other inputs; with "
                "speedrun.sh, rename that folder"
            )
        for line in changed:
            self.dist.print0(f"resuming despite {line}")
        return changed

    def newest_checkpoint(self) -> Checkpoint | None:
        """
        The checkpoint to resume, verified by one rank per node; None to start at step 0. Raises
        CorruptCheckpoint, on every rank, if all are corrupt or the nodes' files differ.
        """
        dist, folder = self.dist, self.folder
        if self.cfg.resume == "never":
            return None
        found = dist.on_node(lambda: open_checkpoint(folder, optimizer=True))
        name = f"step {found.step} ({found.fingerprint})" if found else "no checkpoint"
        names = dist.gather(name)
        for rank, other in enumerate(names):
            if other != names[0]:
                message = f"rank {rank} finds {other} in {folder}, rank 0 {names[0]}"
                raise CorruptCheckpoint(f"{message}; all nodes need a shared disk")
        return found

    def choose_kernels(self, compile: Compile | None) -> None:
        """Set kernels; a resumed run keeps how it is compiled."""
        progress, dist = self.progress, self.dist
        if compile is None:
            return
        if dist.fp8:
            enable_fp8(self.model, dist.device)
        left = (self.num_steps - progress.step) * self.batch_tokens
        flops = left * self.model.flops_per_token()
        if compile != "auto":
            progress.compile = compile
        progress.compile = set_kernels(progress.compile, self.model, flops, dist, self.optimizer)

    def describe(self) -> None:
        """Print what is about to be trained, and where."""
        model, dist, cfg = self.model, self.dist, self.model.cfg
        eager = self.progress.compile in ("auto", "off")
        mode = "eager" if eager else "compiled in the first step, which takes a minute or more"
        lines = {
            "device": f"{dist.device_name} x {dist.world_size}, {describe_dtype(dist)}",
            "kernels": f"attention {model.backend}, {mode}",
            "model": f"{model.num_params():,} parameters: {cfg.n_layer} layers, width "
            f"{cfg.d_model}, {cfg.n_head} heads of {cfg.head_dim}, vocabulary {cfg.vocab_size:,}",
            "inputs": ", ".join(map(" ".join, self.recipe.ids.items())),
            "batch": f"{self.batch_tokens:,} tokens, {self.device_rows} rows per pass",
            "training": f"{self.num_steps:,} steps, from step {self.first_step:,}",
        }
        dist.print0("\n".join(f"{name:<10}{text}" for name, text in lines.items()))

    # ---- the loop --------------------------------------------------------------------------------

    @property
    def finished(self) -> bool:
        """Whether all steps are done."""
        return self.progress.step >= self.num_steps

    def steps(self) -> Iterator[int]:
        """
        Yield the index of each step, from the last checkpoint on; then, after the last one, their
        number, to save and evaluate.
        """
        while not self.finished:
            if self.progress.step % CHECK_RANKS_EVERY == 0:
                check_weights(self.model, self.dist, self.progress.step)
            self.started = time.perf_counter()
            yield self.progress.step
        yield self.progress.step

    def due(self, every: int) -> bool:
        """Whether something that happens every N steps happens now; always after the last step."""
        step = self.progress.step
        return self.finished or bool(step and every and step % every == 0)

    def update(self, lr: float, momentum: float, decay: float, **metrics: float) -> None:
        """
        Update the weights with the accumulated gradients, and log the step with `metrics`.
        Arguments and errors as in `Step.apply` and `raise_if_diverged`.
        """
        found = self.apply(lr, momentum, decay, metrics.get("rollout_seconds", 0.0))
        self.write(self.progress.step - 1, {**found, **metrics})
        self.raise_if_diverged()

    def log(self, metrics: Mapping[str, Any]) -> None:
        """Log an evaluation before the current step. "val_bpb" is to be minimized."""
        progress = self.progress
        if (value := metrics.get("val_bpb")) is not None:
            progress.last_val = value
            progress.min_val = value if progress.min_val is None else min(progress.min_val, value)
        self.write(progress.step, metrics)
        self.started = time.perf_counter()  # evaluations do not count as training

    def print(self, text: str) -> None:
        """Print on the main rank, after work that does not count as training."""
        self.dist.print0(text)
        self.started = time.perf_counter()

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Write metrics to the log."""
        self.open_log()
        if self.logger:
            self.logger.log(step, metrics)

    def open_log(self) -> None:
        """
        Open the log, and before that move the checkpoints of an earlier run that this one replaces
        aside: when there is something to log, everything has been checked.
        """
        if self.logger is None and self.dist.is_main:
            if self.cfg.resume == "never" and step_folders(self.folder):
                aside = self.folder.rename(f"{self.folder}{ASIDE}{records.new_run_id()}")
                self.dist.print0(f"moved the checkpoints of an earlier run to {aside}")
            about = (self.cfg.run, self.state["tracked"], self.state["settings"], self.first_step)
            self.logger = self.resources.enter_context(RunLog(self.folder, *about, self.num_steps))

    def raise_if_stopped(self) -> None:
        """Raise StopRequested on every rank if any was asked to stop. Waits for all ranks."""
        if self.dist.any(self.stop.asked):
            raise StopRequested

    # ---- saving ----------------------------------------------------------------------------------

    def save(self, wait: bool = False) -> None:
        """
        Save the state of all ranks, unless it is saved. On a GPU, a thread writes a copy while
        training goes on; `wait`, and after the last step, waits until it is on disk. Call on every
        rank.

        Raises as `check_weights`. If the disk fails, training goes on and the older checkpoints
        stay; a save that is waited for raises OSError.
        """
        dist, progress, model = self.dist, self.progress, self.model
        wait = wait or self.finished
        if dist.on_main(self.is_saved):
            self.trained = self.finished
            return
        self.open_log()
        check_weights(model, dist, progress.step)
        gathered = optim.full_state(self.optimizer)  # by all ranks; the main rank copies
        moments = {n: to_host(x) for n, x in gathered if dist.is_main}
        moments |= {f"{OWN}{name}": to_host(x) for name, x in self.tensors.items() if dist.is_main}
        self.add_cost()
        if dist.is_main:
            weights = {name: to_host(x) for name, x in model.state_dict().items()}
            done = {**asdict(progress), "finished": self.finished}
            state = {**self.state, "batch_tokens": self.batch_tokens, "progress": done}
            job = (self.folder, progress.step, model, moments, self.tokenizer, state)
            future = self.writer.submit(save_checkpoint, *job, self.cfg.keep, weights)
            self.saving = progress.step, future
        if wait or dist.device.type == "cpu":  # where it would slow down training, or see updates
            dist.on_main(lambda: self.finish_save(raises=wait))
        self.trained = self.finished
        self.started = time.perf_counter()  # saves do not count as training

    def is_saved(self) -> bool:
        """Whether the newest checkpoint is of the current step."""
        self.finish_save()
        return self.checkpoint is not None and self.checkpoint.step == self.progress.step

    def finish_save(self, raises: bool = False) -> None:
        """Wait for the save in progress. An error of the disk is printed or raised."""
        if self.saving is None:
            return
        (step, future), self.saving = self.saving, None
        try:
            self.checkpoint = future.result()
        except OSError as error:
            problem = OSError(error.errno, f"saving step {step} failed: {error}")
            if raises:
                raise problem from error
            self.dist.print0(problem)

    def add_cost(self) -> None:
        """Add the time since the last call to the cost of the run."""
        seconds, self.charged = time.perf_counter() - self.charged, time.perf_counter()
        self.progress.wall_seconds += seconds

    # ---- the record ------------------------------------------------------------------------------

    @property
    def tokens_per_second(self) -> float | None:
        """Median throughput over all attempts; None for at most UNTIMED_STEPS steps."""
        logged = self.dist.on_main(lambda: records.read_metrics(self.folder / METRICS_FILE))
        seconds = [x["step_seconds"] for x in logged if "step_seconds" in x][UNTIMED_STEPS:]
        return self.batch_tokens / statistics.median(seconds) if seconds else None

    def measurements(self) -> dict[str, Any]:
        """Values for the record of a stage whose steps all have `batch_tokens` tokens."""
        speed, progress = self.tokens_per_second, self.progress
        return {
            "Tokens per second": "-" if speed is None else f"{speed:,.0f}",
            "Batch tokens": self.batch_tokens,
            "Rows per device pass": self.device_rows,
            "Compiled": progress.compile,
            "Skipped steps": progress.bad_steps,
        }

    def finish(
        self,
        section: str,
        values: Mapping[str, Any],
        tables: Sequence[Mapping[str, Any]] = (),
        items: Mapping[str, Any] = {},
        following: str = "",
    ) -> None:
        """
        Write the record of the finished run, update the report and print the next commands: that of
        the `following` script, and for chat models how to talk to them.
        """
        saved, dist = self.checkpoint, self.dist
        if saved is not None:
            self.add_cost()
            devices, spent = dist.world_size, self.progress
            changes = "; ".join(saved.state.get("changes", [])) or None
            about = {"Compute dtype": describe_dtype(dist), "Data changed when resumed": changes}
            records.write_record(
                section,
                self.state["settings"],
                {**values, **about},
                self.recipe.ids,
                records.Cost(spent.wall_seconds, devices, dist.device_name),
                outputs={self.stage: saved.fingerprint},
                items=items,
                tables=tables,
                metrics=self.folder / METRICS_FILE,
                files=[saved.folder],
                commits=list(dict.fromkeys(saved.state["commits"])),
                code=saved.state["code"],
                recipe=self.recipe,
            )
            report.update(renew=True)
            dist.print0(self.next_commands(following))
        dist.close()

    def next_commands(self, following: str) -> str:
        """Lines printed after training: the checkpoint folder and the next commands."""
        stage, tag, dist = self.stage, self.folder.name, self.dist
        ranks = os.environ.get("LOCAL_WORLD_SIZE", dist.world_size)
        many = f"torchrun --nproc_per_node={ranks} -m scripts.{{}} --"
        command = many if dist.world_size > 1 else "python -m scripts.{}"
        lines = [f"checkpoint: {self.folder}/step_{self.progress.step:06d}"]
        if following:
            lines.append(f"next: {command.format(following)} --model_tag={tag}")
        if stage in ("sft", "dpo", "rl"):
            lines.append(f"chat: python -m scripts.chat_cli --source={stage} --model_tag={tag}")
        return "\n".join(lines)


def resumed_state(stage: Stage, tag: str, cfg: TrainConfig, dist: DistContext) -> dict[str, Any]:
    """
    State of the run that will be resumed, for what it keeps: the dtype, the default batch size.
    Empty if a run begins.
    """

    def read() -> dict[str, Any] | None:
        return newest_state(stage_folder(stage) / tag) if cfg.resume == "auto" else None

    return dist.on_main(read) or {}


def keep_batch(cfg: Batched, state: Mapping[str, Any]) -> Batched:
    """The config with the batch size of a resumed run as its default, whatever the ranks."""
    return replace(cfg, total_batch_size=cfg.total_batch_size or state.get("batch_tokens"))


def skip_if_finished(section: str, recipe: Recipe, wanted: bool, dist: DistContext) -> bool:
    """
    Whether --skip_if_done is set (`wanted`) and this stage is already recorded, with its checkpoint
    intact.
    """
    found = wanted and dist.on_main(lambda: records.find_finished(section, recipe) is not None)
    if found:
        dist.print0(f"{section}: finished already, skipped")
    return found
