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

The recipe decides (recipe.py: flags without NOT_IN_RECIPE, ids of inputs, digests of code). A new
flag is a field of a config and counts, unless the config lists it in NOT_IN_RECIPE.

    as before, and ...    --skip_if_done                    --resume=auto
    finished              nothing is done                   the last evaluation is repeated
    unfinished            trains: see --resume              goes on from the newest good checkpoint
    other flags, inputs   printed; trains: see --resume     error that lists them
    other code            error that names the files        goes on; the files are printed, recorded

Resuming with more steps is no error. --allow_data_change accepts other inputs, ACCEPT_CODE_CHANGE=1
other code of a finished stage. With --resume=never, the run starts at step 0 and moves the
checkpoints of an earlier one aside.
"""

import os
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from typing import Any, TypeVar

from torch import Tensor

from nanochat import common, records, report
from nanochat.checkpoint import (
    ASIDE,
    Checkpoint,
    Stage,
    describe_model,
    model_class,
    newest_checkpoint,
    save_checkpoint,
    saved_state,
    stage_folder,
    step_folders,
)
from nanochat.common import StopRequested, UsageError, is_out_of_memory
from nanochat.dist import DistContext
from nanochat.fp8 import enable_fp8
from nanochat.gpt import GPT
from nanochat.optim import MuonAdamW
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
    set_kernels,
    to_host,
)

LENGTHS = ("num_iterations", "num_epochs")  # flags that may be larger in a resumed run
CHECK_RANKS_EVERY = 100  # steps between checks that the weights are equal on all ranks
OWN = "run."  # before the names of `Run.tensors` in a checkpoint
BatchConfig = TypeVar("BatchConfig", bound=Any)  # a config with total_batch_size


class Run(Step):
    """
    A training run with its folder <stage>_checkpoints/<tag>/. recipe: what determines the result.

    Raises UsageError if the class of the model could not be loaded again.
    """

    def __init__(
        self,
        stage: Stage,
        tag: str,
        recipe: Recipe,
        model: GPT,
        optimizer: MuonAdamW,
        tokenizer: Tokenizer,
        cfg: TrainConfig,
        dist: DistContext,
    ):
        super().__init__(model, optimizer, cfg, dist)
        model_class(describe_model(model))
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
        """Main rank only."""
        self.is_logging = False
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
        UNEVALUATED. Raises UsageError if another run is using the folder, and as `resume`.
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
        if not (shared or alone):
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
        dist, folder, found = self.dist, self.folder, self.find_resumable()
        commits = [records.git_state()["Commit"]]
        self.state |= {"compute": dist.compute, "code": code_digests(), "commits": commits}
        self.state["provenance"] = {"seed": self.cfg.seed, "inputs": self.recipe.ids}
        self.state.setdefault("learning_rates", self.cfg.optim.learning_rates())
        self.state["tracked"] = records.new_run_id()
        if found is None:
            return
        was = found.state
        changed = self.require_same_recipe(found)
        if code := changed_code(was["code"]):
            changed.append(f"code: {', '.join(code)}")
            dist.print0(f"resuming with changed {changed[-1]}")
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
            self.optimizer.load_full_state(tensors)
        except (KeyError, RuntimeError) as error:
            problem = f"{found.folder} has the state of another optimizer; use another --model_tag"
            raise ValueError(problem) from error
        self.checkpoint = found if dist.is_main else None
        dist.print0(f"resumed {found.folder}")

    def require_same_recipe(self, found: Checkpoint) -> list[str]:
        """Accepted differences of the recipe to that of a checkpoint; others are an error."""
        if "recipe" not in found.state:
            problem = f"{self.folder} has no recipe to compare: imported, merged or before 2026-12"
            fix = "finish it with the code that began it, use another --model_tag, or"
            raise UsageError(problem, f"{fix} --resume=never to train again")
        was, now = found.state["recipe"], self.recipe.flags
        longer = [x for x in LENGTHS if (now.get(x) or 0) > (was["flags"].get(x) or 0)]
        accepted = tuple(f"--{name}:" for name in longer)
        differences = list_changes(was, self.recipe)
        changed = [line for line in differences if not line.startswith(accepted)]
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

    def find_resumable(self) -> Checkpoint | None:
        """
        The checkpoint to resume, verified by the main rank; None to start at step 0. Raises
        CorruptCheckpoint if all are corrupt, and UsageError if another rank has other files.
        """
        dist, folder = self.dist, self.folder
        if self.cfg.resume == "never":
            return None
        found = dist.on_main(lambda: newest_checkpoint(folder, optimizer=True))
        mine = saved_state(folder, found.step if found else None)
        same = (mine and mine["files"]) == (found and found.state["files"])
        if dist.any(not same):
            problem = f"not all ranks find the checkpoints of rank 0 in {folder}"
            raise UsageError(problem, "put NANOCHAT_BASE_DIR on a disk that all nodes share")
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
            "device": f"{dist.device_name} x {dist.world_size}, {dist.describe_dtype()}",
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
        Open the log at its first entry. A run that replaces another one first moves its checkpoints
        aside: by then, everything has been checked.
        """

        def begin() -> None:
            if self.cfg.resume == "never" and step_folders(self.folder):
                aside = self.folder.rename(f"{self.folder}{ASIDE}{records.new_run_id()}")
                self.dist.print0(f"moved the checkpoints of an earlier run to {aside}")
            about = (self.cfg.run, self.state["tracked"], self.state["settings"], self.first_step)
            self.logger = self.resources.enter_context(RunLog(self.folder, *about, self.num_steps))

        if not self.is_logging:
            self.dist.on_main(begin)
            self.is_logging = True

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
        gathered = self.optimizer.full_state()  # by all ranks; the main rank copies
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

    def measure_throughput(self) -> float | None:
        """
        Median tokens per second over all attempts; None for at most UNTIMED_STEPS steps. Call on
        every rank.
        """
        logged = self.dist.on_main(lambda: records.read_metrics(self.folder / METRICS_FILE))
        speeds = [x["tokens_per_second"] for x in logged if "tokens_per_second" in x]
        return statistics.median(speeds[UNTIMED_STEPS:]) if speeds[UNTIMED_STEPS:] else None

    def measurements(self) -> dict[str, Any]:
        """Values for the record of a stage whose steps all have `batch_tokens` tokens."""
        speed, progress = self.measure_throughput(), self.progress
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
        dist = self.dist

        def write() -> None:
            assert (saved := self.checkpoint) is not None
            self.add_cost()
            changes = "; ".join(self.state.get("changes", [])) or None
            about = {"Compute dtype": dist.describe_dtype(), "Changed when resumed": changes}
            records.write_record(
                section,
                self.state["settings"],
                {**values, **about},
                self.recipe.ids,
                records.Cost.so_far(dist, self.progress.wall_seconds),
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

        dist.on_main(write)
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
        return saved_state(stage_folder(stage) / tag) if cfg.resume == "auto" else None

    return dist.on_main(read) or {}


def keep_batch(cfg: BatchConfig, state: Mapping[str, Any]) -> BatchConfig:
    """The config with the batch size of a resumed run as its default, whatever the ranks."""
    return replace(cfg, total_batch_size=cfg.total_batch_size or state.get("batch_tokens"))


def skip_if_finished(
    section: str, recipe: Recipe, wanted: bool, dist: DistContext, tag: str = ""
) -> bool:
    """
    Whether --skip_if_done is set (`wanted`) and this stage is already recorded, with its checkpoint
    intact. tag: of a training run.
    """

    def is_finished() -> bool:
        if wanted and records.find_finished(section, recipe, tag):
            return True
        records.require_writable()
        return False

    found = dist.on_main(is_finished)
    if found:
        dist.print0(f"{section}: finished already, skipped")
    return found
