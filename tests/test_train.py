"""The training loop, on a tiny model with rows generated in memory."""

import math
import os
import signal
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from nanochat import train
from nanochat.anomaly import NonFiniteError
from nanochat.checkpoint import (
    FLOAT16_LOSS_SCALE,
    CheckpointManager,
    Progress,
    SavingConfig,
    build_model,
)
from nanochat.common import PREEMPTED, UNEVALUATED, EvaluationAborted, UsageError, WaitAborted
from nanochat.eval_bpb import Bpb
from nanochat.evaluators import ValidationConfig, ValidationLoss
from nanochat.golf.qat import AveragingMuonAdamW, LateQuantization
from nanochat.golf.quantize import QuantConfig, quantize_dequantize
from nanochat.loss import IGNORE
from nanochat.optim import MuonAdamW, OptimConfig, ScheduleConfig
from nanochat.scaling import make_rules
from nanochat.tokenizer import Tokenizer
from nanochat.train import (
    Callback,
    RowLoader,
    TrainConfig,
    TrainingRun,
    inputs_and_targets,
    run_loop,
    split_micro_batches,
    to_device,
    train_step,
)
from tests.conftest import TINY

ROWS, T = 8, TINY.max_seq_len
TOKENIZER = Tokenizer.train(["a"], 265)


def rows_of(step, masked=False):
    rng = np.random.default_rng(step)
    ids = rng.integers(0, 32, (ROWS, 1)) + np.arange(T + 1)  # learnable: each token is the next id
    tokens, targets = ids[:, :-1] % 64, ids[:, 1:] % 64
    if masked:  # uneven: row i keeps only its last i + 1 targets
        for i in range(ROWS):
            targets[i, : T - i - 1] = IGNORE
    return tokens, targets


class Measure(Callback):
    every = 5

    def __init__(self, evaluate):
        self.evaluate = evaluate


def falling(step, stopping, last):
    return {"val_bpb": 5.0 - step}


class Given:
    """Loader whose rows are a function of the step."""

    identity, batch_tokens, metrics = {}, ROWS * T, {}

    def __init__(self, rows, device="cpu"):
        self.rows, self.device = rows, torch.device(device)

    def micro_batches(self, step, device_rows, stopping):
        tokens, targets = self.rows(step)
        return split_micro_batches(tokens, targets, device_rows, self.device)

    def prefetch(self, step, device_rows, stopping):
        pass

    def row_names(self, step):
        return f"rows of {step}"


def make_run(
    machine,
    num_steps=20,
    device_rows=ROWS,
    masked=False,
    seed=0,
    rows=None,
    evaluate=falling,
    grad_clip=0.0,
    **changes,
):
    model = build_model(TINY, torch.device("cpu"), torch.float32, seed)
    table = make_rules(OptimConfig(weight_decay=0.1), TINY.d_model)
    optimizer = MuonAdamW(model, table, machine)
    saved, logged = [], []
    run = TrainingRun(
        kind="base",
        model=model,
        tokenizer=TOKENIZER,
        optimizer=optimizer,
        loader=Given(rows or (lambda step: rows_of(step + 1000 * seed, masked))),
        machine=machine,
        cfg=TrainConfig(optim=OptimConfig(grad_clip=grad_clip)),
        tag="tiny",
        num_steps=num_steps,
        device_rows=device_rows,
        callbacks=[Measure(evaluate)],
        save=lambda progress, final=False: saved.append(
            (progress.step, {n: p.detach().clone() for n, p in model.named_parameters()})
        ),
        log=lambda step, values: logged.append((step, values)),
        schedule=ScheduleConfig(warmup_steps=2),
    )
    return replace(run, **changes), saved, logged


def test_training_learns_the_next_id(machine):
    run, _, logged = make_run(machine, num_steps=60)
    assert run_loop(run, Progress())
    losses = [v["loss"] for _, v in logged if "loss" in v]
    assert losses[0] == pytest.approx(math.log(64), rel=0.02)
    assert np.mean(losses[-5:]) < 0.3 * losses[0]


@pytest.mark.parametrize("masked", [False, True])
def test_R20_B4_gradients_do_not_depend_on_micro_batch_size(machine, masked):
    def gradient(device_rows):
        run, *_ = make_run(machine, device_rows=device_rows, masked=masked)
        seen = []
        run.optimizer.update = lambda group, weight, grad: seen.append(grad.flatten().clone())
        train_step(run, 0)
        return torch.cat(seen)

    reference = gradient(ROWS)
    assert reference.norm() > 0
    for device_rows in (1, 2, 4):
        assert (gradient(device_rows) - reference).norm() < 1e-5 * reference.norm()


def test_loss_is_the_mean_over_non_ignored_targets(machine):
    run, *_ = make_run(machine, masked=True, device_rows=3)
    tokens, targets = (torch.from_numpy(x) for x in rows_of(0, masked=True))
    want = run.model.loss(tokens, targets).item() / int((targets != IGNORE).sum())
    assert train_step(run, 0)[0] == pytest.approx(want, rel=1e-5)


@pytest.fixture
def split_rows(monkeypatch):
    """Rows of a `RowLoader` are tokens and targets already."""
    monkeypatch.setattr(train, "inputs_and_targets", lambda stored: stored)


@pytest.mark.usefixtures("split_rows")
@pytest.mark.parametrize(("seen", "logged"), [([0, 0], None), ([3, 3], 3), ([0, 1], None)])
def test_times_seen_is_logged_if_positive_and_equal_for_all_rows(machine, seen, logged):
    ids = np.array([[each, 0] for each in seen])
    rows = SimpleNamespace(max_seq_len=T, recipe={}, row_ids=lambda *share: ids)
    rows.read = lambda ids: rows_of(0)
    loader = RowLoader(rows, ROWS * T, 0, machine)  # type: ignore
    run = replace(make_run(machine)[0], loader=loader)
    assert train_step(run, 0).metrics.get("times_seen") == logged


@pytest.mark.usefixtures("split_rows")
def test_prefetched_batch_and_its_metrics_are_those_of_its_step(machine):
    read = []

    def read_rows(ids):
        read.append(step := int(ids[0, 0]))
        return rows_of(step)

    rows = SimpleNamespace(max_seq_len=T, recipe={}, read=read_rows)
    rows.row_ids = lambda step, *share: np.full((2, 2), step)  # rows of step n are seen n times
    loader = RowLoader(rows, ROWS * T, 0, machine)  # type: ignore
    run, *_ = make_run(machine, num_steps=5)
    plain, *_ = make_run(machine, num_steps=5)
    for step in (0, 1, 2, 4):  # a resume or a new plan may skip what was prefetched
        done, want = train_step(replace(run, loader=loader), step), train_step(plain, step)
        assert done.loss == want.loss and done.metrics.get("times_seen", 0) == step
    assert read == [0, 1, 2, 3, 4], "each step is read once, and none after the last"


@pytest.mark.usefixtures("split_rows")
def test_stop_request_during_prefetch_does_not_abort_the_finished_step(machine):
    def read(ids):
        if ids.any():
            raise WaitAborted("stop requested")
        return rows_of(0)

    rows = SimpleNamespace(max_seq_len=T, recipe={}, read=read)
    rows.row_ids = lambda step, *share: np.full((2, 2), step)
    loader = RowLoader(rows, ROWS * T, 0, machine)  # type: ignore
    run, want = make_run(machine)[0], make_run(machine)[0]
    assert train_step(replace(run, loader=loader), 0).loss == train_step(want, 0).loss


def test_B1_step_with_all_targets_ignored_changes_nothing(machine):
    run, *_ = make_run(machine, rows=lambda s: (rows_of(s)[0], np.full((ROWS, T), IGNORE)))
    before = run.model.embed.weight.detach().clone()
    loss, norm, *_ = train_step(run, 0)
    assert (loss, norm) == (0.0, 0.0)
    assert torch.equal(run.model.embed.weight, before)


def poisoned(machine, bad, **changes):
    """A run with NaN loss in the steps `bad`."""
    run, saved, logged = make_run(machine, **changes)
    plain_loss, step = run.model.loss, {"now": -1}

    def rows(s):
        step["now"] = s
        return rows_of(s)

    run.model.loss = lambda x, y: plain_loss(x, y) * (math.nan if step["now"] in bad else 1.0)
    return replace(run, loader=Given(rows)), saved, logged


def test_R13_non_finite_step_is_skipped_and_reported(machine, capsys):
    run, saved, _ = poisoned(machine, {3, 7}, num_steps=12)
    progress = Progress()
    assert run_loop(run, progress)
    assert progress.health.bad_steps == 2
    assert "step 3" in (out := capsys.readouterr().out) and "rows of 3" in out
    assert math.isfinite(progress.smooth_loss)
    assert all(p.isfinite().all() for _, weights in saved for p in weights.values())


def test_R13_non_finite_gradient_is_skipped(machine):
    run, *_ = make_run(machine, num_steps=1)
    run.model.head.weight.register_hook(lambda g: g * math.inf)
    before = [p.detach().clone() for p in run.model.parameters()]
    progress = Progress()
    run_loop(run, progress)
    assert progress.health.bad_steps == 1
    assert all(torch.equal(a, b) for a, b in zip(before, run.model.parameters(), strict=True))


def test_R13_repeated_bad_steps_abort_with_good_state_saved(machine):
    run, saved, _ = poisoned(machine, {4, 5, 6, 7, 8}, num_steps=12)
    with pytest.raises(NonFiniteError, match="step 8"):
        run_loop(run, Progress())
    clean, _, _ = make_run(machine, num_steps=12)
    for step in range(4):
        train_step(clean, step)
    for name, p in clean.model.named_parameters():
        assert torch.equal(saved[-1][1][name], p), name


def losses_in(dtype, machine, num_steps=40):
    run, _, logged = make_run(replace(machine, dtype=dtype), num_steps=num_steps)
    run.model.dtype = dtype
    run.progress.begin_loss_scale(dtype)
    assert run_loop(run, run.progress)
    return [v["loss"] for _, v in logged if "loss" in v], run.progress


def test_float16_trains_like_float32(machine):
    (want, plain), (got, scaled) = (
        losses_in(dtype, machine) for dtype in (torch.float32, torch.float16)
    )
    assert plain.loss_scale == 1.0 and scaled.loss_scale == FLOAT16_LOSS_SCALE
    assert scaled.health.bad_steps == 0 and want[-1] < 0.7 * want[0]
    np.testing.assert_allclose(got, want, rtol=0.01)


def test_float16_loss_scale_follows_overflows(machine, monkeypatch):
    monkeypatch.setattr("nanochat.checkpoint.RAISE_SCALE_AFTER", 2)
    losses, progress = losses_in(torch.float16, machine, num_steps=60)
    assert 0 < progress.health.bad_steps < 30  # overflowed again and again
    assert FLOAT16_LOSS_SCALE < progress.loss_scale < 2.0**30
    assert losses[-1] < 0.7 * losses[0]
    saved = Progress()
    saved.load_state_dict(progress.state_dict())
    saved.begin_loss_scale(torch.float16)
    assert saved.loss_scale == progress.loss_scale
    saved.begin_loss_scale(torch.bfloat16)
    assert saved.loss_scale == 1.0


def test_R2_resumed_run_equals_uninterrupted_run_bitwise(machine):
    whole, *_ = make_run(machine, num_steps=240)
    run_loop(whole, Progress())
    first, *_ = make_run(machine, num_steps=240)
    progress = Progress()
    for step in range(30):
        train_step(first, step)
        progress.step += 1
    second, *_ = make_run(machine, num_steps=240)
    second.model.load_state_dict(first.model.state_dict())
    second.optimizer.load_full_state(dict(first.optimizer.full_state()))
    run_loop(second, progress)
    for (name, a), b in zip(whole.model.named_parameters(), second.model.parameters(), strict=True):
        assert torch.equal(a, b), name
    for (name, a), (_, b) in zip(
        whole.optimizer.full_state(), second.optimizer.full_state(), strict=True
    ):
        assert torch.equal(a, b), name


class Clock:
    """Fake clock: a step takes 1 s, an evaluation or save 100 s."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr("nanochat.train.time.perf_counter", lambda: self.now)

    def rows(self, step):
        self.now += 1.0
        return rows_of(step)

    def evaluate(self, step, stopping, last):
        self.now += 100.0
        return {"last": float(last)}

    def save(self, progress, final=False):
        self.now += 100.0

    def changes(self, **more):
        return {"rows": self.rows, "evaluate": self.evaluate, "save": self.save, **more}


def test_time_budget_counts_only_steps_and_drives_schedule(machine, monkeypatch):
    clock = Clock(monkeypatch)
    schedule = ScheduleConfig(warmup_steps=2, warmdown_ratio=0.4, final_lr_frac=0.0)
    changes = clock.changes(max_seconds=20.0, schedule=schedule)
    run, _, logged = make_run(machine, num_steps=500, **changes)
    progress = Progress()
    assert run_loop(run, progress)
    assert progress.step == 20 and progress.clock_seconds == 20.0
    rates = [v["lr"] for _, v in logged if "lr" in v]
    # two warmup steps (no pace is known at first), flat to 60% of the budget, decay to its end
    want = [min((s + 1) / 2, 1.0, (20 - s) / 8) for s in range(20)]
    np.testing.assert_allclose(rates, want)
    assert [v["last"] for _, v in logged if "last" in v] == [0.0, 0.0, 0.0, 1.0]  # 5, 10, 15, end
    assert [v["seconds_left"] for _, v in logged if "lr" in v][-2:] == [1.0, 0.0]


def test_resumed_run_trains_for_the_remaining_time_budget(machine, monkeypatch):
    clock = Clock(monkeypatch)
    run, *_ = make_run(machine, num_steps=500, **clock.changes(max_seconds=12.0))
    progress = Progress(step=6, clock_seconds=9.0, loss_average=1.0)
    assert run_loop(run, progress)
    assert progress.step == 9 and progress.clock_seconds == 12.0


def test_num_steps_can_end_a_run_before_its_time_budget(machine, monkeypatch):
    clock = Clock(monkeypatch)
    run, *_ = make_run(machine, num_steps=7, **clock.changes(max_seconds=100.0))
    progress = Progress()
    assert run_loop(run, progress) and progress.step == 7


def test_run_ends_with_averaged_weights(machine):
    run, saved, _ = make_run(machine, num_steps=6)
    named = dict(run.model.named_parameters())
    averaged = {n: p.detach().clone() for n, p in named.items()}
    keeps = iter([2 / 11, 3 / 12, 4 / 13, 5 / 14, 0.4, 0.4])  # warms up to ema_decay
    table = make_rules(OptimConfig(weight_decay=0.1), TINY.d_model)
    optimizer = AveragingMuonAdamW(run.model, table, machine, ema_decay=0.4)

    def log(step, values):
        if "lr" in values:
            keep = next(keeps)
            for name, p in named.items():
                averaged[name] = keep * averaged[name] + (1 - keep) * p.detach()

    progress, run = Progress(), replace(run, optimizer=optimizer, log=log)
    run_loop(run, progress)
    for name, p in named.items():
        torch.testing.assert_close(p.detach(), averaged[name], rtol=1e-5, atol=1e-6)
        assert torch.equal(saved[-1][1][name], p.detach())
    assert dict(optimizer.full_state()).keys() >= {f"{name}.average" for name in named}
    assert run_loop(run, progress)  # only evaluates again
    with pytest.raises(UsageError, match="ended after step 6"):
        run_loop(replace(run, num_steps=9), progress)


def test_resuming_a_finished_averaged_run_keeps_its_weights(machine, base):
    saving = SavingConfig(resume="auto")
    found = []
    for seed in (0, 1):  # initial weights differ; the resumed run must discard them
        run, *_ = make_run(machine, num_steps=4, seed=seed)
        model, named = run.model, dict(run.model.named_parameters())
        table = make_rules(OptimConfig(weight_decay=0.1), TINY.d_model)
        optimizer = AveragingMuonAdamW(model, table, machine, ema_decay=0.4)
        with CheckpointManager(
            base / "averaged", machine, saving, keep_optimizer=False
        ) as checkpoints:
            progress = checkpoints.begin({}, model, optimizer, 4)

            def save(progress, final=False, run=run, to=checkpoints, optimizer=optimizer):
                to.save(run.model, optimizer, TOKENIZER, {"identity": {}}, progress, final)

            assert run_loop(replace(run, optimizer=optimizer, save=save), progress)
            assert progress.averaged and not checkpoints.saved.has_optimizer
            found.append((named, checkpoints.saved.model_tensors()))
    (first, _), (again, saved) = found
    assert all(torch.equal(p, again[name]) for name, p in first.items())
    assert all(torch.equal(p, saved[name]) for name, p in first.items())


def test_quantized_weights_are_restored_before_the_update(machine):
    """Gradients are computed at quantized weights; the update applies to the original ones."""
    run, *_ = make_run(machine, num_steps=1)
    named = dict(run.model.named_parameters())
    start = {n: p.detach().clone() for n, p in named.items()}
    late = LateQuantization(run.model, QuantConfig("*=int5"), start=0.0)
    seen = []

    class Watched:
        def loss(self, tokens, targets):
            seen.append({n: p.detach().clone() for n, p in named.items()})
            return run.model.loss(tokens, targets)

    moved = {}

    def update(group, *rest):
        moved.update({name: named[name].detach().clone() for name in group["param_names"]})

    run.optimizer.update = update
    train_step(replace(run, objective=Watched(), callbacks=[late], device_rows=4), 0)
    assert len(seen) == 2
    for name in named:
        assert torch.equal(
            seen[1][name], quantize_dequantize(start[name], late.formats[name], late.cfg)
        )
    assert not torch.equal(seen[0]["embed.weight"], start["embed.weight"])
    assert moved.keys() == start.keys()
    assert all(torch.equal(p, start[name]) for name, p in moved.items())


def test_B12_checkpoint_is_saved_before_the_final_evaluation(machine):
    order = []
    run, *_ = make_run(
        machine,
        num_steps=3,
        save=lambda progress, final: order.append("save" if final else "save, unsafe"),
        evaluate=lambda step, stopping, last: order.append("evaluate") or {},
    )
    run_loop(run, Progress())
    assert order == ["save", "evaluate"]


def test_R7_signal_saves_and_stops_within_two_steps(machine):
    run, saved, logged = make_run(machine, num_steps=1000)

    def log(step, values):
        logged.append(step)
        if step == 5:
            os.kill(os.getpid(), signal.SIGTERM)

    progress = Progress()
    assert not run_loop(replace(run, log=log), progress)
    assert saved[-1][0] == progress.step == 5  # the current step is dropped
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL  # the loop restores the handler


def test_R7_signal_ends_the_wait_for_rows_being_packed(machine):
    def rows(step):
        if step == 4:
            os.kill(os.getpid(), signal.SIGTERM)
            raise WaitAborted
        return rows_of(step)

    run, saved, _ = make_run(machine, num_steps=10, rows=rows)
    assert not run_loop(run, Progress()) and saved[-1][0] == 4


@pytest.mark.usefixtures("split_rows")
@pytest.mark.parametrize("error", [UsageError("a is damaged", "rerun"), OSError("disk fault")])
@pytest.mark.parametrize("prefetching", [False, True])
def test_R11_data_that_cannot_be_loaded_ends_the_run_after_saving_it(machine, error, prefetching):
    def rows(step, *share):
        if step == 4:
            raise error
        return rows_of(step)

    run, saved, _ = make_run(machine, rows=rows)
    if prefetching:
        packed = SimpleNamespace(max_seq_len=T, recipe={}, read=lambda ids: rows(int(ids[0, 0])))
        packed.row_ids = lambda step, *share: np.full((2, 2), step)
        run.loader = RowLoader(packed, ROWS * T, 0, machine)  # type: ignore
    progress = Progress()
    for _ in range(2):  # the second attempt fails at once and has nothing new to save
        with pytest.raises(type(error), match=str(error)):
            run_loop(run, progress)
        assert [step for step, _ in saved] == [progress.step] == [4]


@pytest.mark.parametrize(("when", "saved_step"), [(5, 5), (10, 10)])
def test_R7_signal_aborts_a_long_evaluation(machine, when, saved_step):
    def evaluate(step, stopping, last):
        if step == when:
            os.kill(os.getpid(), signal.SIGTERM)
        if stopping():
            raise EvaluationAborted
        return {"val_bpb": 1.0}

    run, saved, logged = make_run(machine, num_steps=10, evaluate=evaluate)
    assert not run_loop(run, Progress())
    assert saved[-1][0] == saved_step
    assert when not in [step for step, values in logged if "val_bpb" in values]


def test_R17_final_evaluation_oom_reports_the_saved_model(machine, capsys):
    saved = []

    def evaluate(step, stopping, last):
        raise torch.OutOfMemoryError

    run, *_ = make_run(
        machine, 3, evaluate=evaluate, save=lambda progress, final: saved.append(progress.step)
    )
    with pytest.raises(SystemExit) as caught:
        run_loop(run, Progress())
    assert caught.value.code == UNEVALUATED != PREEMPTED and saved == [3]
    assert "--resume=auto" in capsys.readouterr().out


def test_R17_evaluation_oom_retries_with_fewer_rows():
    tried = []

    class Greedy(ValidationLoss):
        fits = 3

        def score(self, rows, stopping):
            tried.append((rows, self.rows_per_pass))
            if self.rows_per_pass > self.fits:
                raise torch.OutOfMemoryError
            return [Bpb(6.0, 4, 3, 8.0, 4)]

    evaluator = Greedy(ValidationConfig(), {"a": 1, "b": 2})
    evaluator.rows_per_pass = 16
    figures = evaluator.evaluate(5, lambda: False, False)
    assert tried == [(1, 16), (1, 8), (1, 4), (1, 2), (2, 2)]  # b is not scored twice, nor is a
    assert figures["val_loss"] == 2.0 and figures["val_bpb:a"] == figures["val_bpb"]
    evaluator.fits = 0
    with pytest.raises(torch.OutOfMemoryError):
        evaluator.evaluate(10, lambda: False, False)


def test_R17_oom_in_an_evaluation_during_training_skips_it(machine, capsys):
    def evaluate(step, stopping, last):
        if not last:
            raise torch.OutOfMemoryError
        return {"val_bpb": 1.0}

    run, _, logged = make_run(machine, 7, evaluate=evaluate)
    assert run_loop(run, Progress())
    assert "out of memory: evaluation at step 5 skipped" in capsys.readouterr().out
    assert [step for step, values in logged if "val_bpb" in values] == [7]


def test_smallest_and_last_validation_values_are_tracked(machine):
    run, _, logged = make_run(machine, num_steps=12)
    progress = Progress()
    run_loop(run, progress)
    assert (progress.min_val, progress.last_val) == (5.0 - 12, 5.0 - 12)
    assert [s for s, v in logged if "val_bpb" in v] == [5, 10, 12]


def test_clipping_bounds_the_applied_gradient(machine):
    run, *_ = make_run(machine, grad_clip=1e-3)
    norms = []
    run.optimizer.update = lambda group, weight, grad: norms.append(float(grad.norm()))
    assert train_step(run, 0).norm > 1e-2  # before clipping
    assert math.hypot(*norms) == pytest.approx(1e-3, rel=1e-4)


def test_pinned_arrays_are_contiguous(monkeypatch):
    pinned = []

    class Copied:
        def to(self, device, non_blocking):
            assert device.type == "cuda" and non_blocking
            return pinned[-1]

    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda x: pinned.append(x) or Copied())
    for part in inputs_and_targets(np.arange(12, dtype=np.uint16).reshape(3, 4)):
        assert to_device(part, torch.device("cuda")).tolist() == part.tolist()
    assert all(x.is_contiguous() for x in pinned) and len(pinned) == 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_B7_async_copy_does_not_overwrite_pinned_batch():
    device = torch.device("cuda")
    busy = torch.randn(8192, 8192, device=device)
    for _ in range(20):
        busy = busy @ busy / 100  # keeps the stream busy, so that copies queue up
    copies = []
    for step in range(50):
        copies.append(to_device(np.full((64, 1024), step), device))
    torch.cuda.synchronize()
    for step, copy in enumerate(copies):
        assert (copy == step).all()
