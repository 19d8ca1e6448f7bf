"""
Measurements of dev/gpu_check.sh that no other script makes, and its table.

    python -m dev.gpu_check --depth=12                    training step by kernel -> steps.json
    python -m dev.gpu_check --depth=12 --profile          profile of two steps -> trace.json
    python -m dev.gpu_check --stop_after=20 -- <module>   stop a training run by SIGTERM
    python -m dev.gpu_check --users=64                    server under load -> server.json
    python -m dev.gpu_check --write                       results -> dev/bench-gpu.md

Results go to the folder $OUT.
"""

import argparse
import gc
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

import torch

from nanochat.attention import Backend
from nanochat.bench.table import FIRST_CHECKS
from nanochat.bench.train import Work
from nanochat.common import PREEMPTED, REPOSITORY, write_atomic
from nanochat.distributed import DistContext, init_distributed
from nanochat.gpt import GPTConfig
from nanochat.preflight import KernelConfig, enable_fp8, probe_attention, probe_works
from nanochat.scaling import default_windows, shape_for_depth

VOCAB_SIZE = 32768

# ---- A training step by kernel -------------------------------------------------------------------


def variants(cfg: GPTConfig, machine: DistContext) -> Iterator[tuple[str, GPTConfig, Backend]]:
    """Yield name, model and attention kernel of each step to time."""
    for pattern in ("L", "SSSL"):
        shape = replace(cfg, window_pattern=pattern)
        for backend in get_args(Backend):
            if backend in ("blocks", "plain"):  # for CPUs, and the reference
                continue
            if (backend, pattern) == ("flex", "L"):  # without windows the same as sdpa
                continue
            if probe_works(backend, partial(probe_attention, backend, shape, machine), machine):
                yield f"windows {pattern}, attention {backend}", shape, backend
    for backend in ("flex", "sdpa"):
        yield f"documents masked (SFT), attention {backend}", cfg, backend
    yield "value embeddings in every layer", replace(cfg, value_every=1), "sdpa"
    yield "fp8", cfg, "sdpa"


def time_steps(depth: int, max_seq_len: int, rows: int, out: Path) -> None:
    """Time a training step of each variant; writes the results after each one."""
    machine = init_distributed()
    cfg = shape_for_depth(depth, VOCAB_SIZE, max_seq_len)
    found: dict[str, dict[str, float]] = {}
    for name, shape, backend in variants(cfg, machine):
        work = Work(shape, rows, machine, KernelConfig(compile=True))
        for block in work.model.blocks:
            block.attention.backend = backend
        if name == "fp8":
            enable_fp8(work.model, machine)
        if "masked" in name:  # a conversation begins at token 0, about every 64 tokens
            work.tokens = torch.where(work.tokens % 64 == 0, 0, work.tokens)
            segments = (work.tokens == 0).cumsum(dim=1)
            work.model.loss = partial(work.model.loss, segments=segments)  # type: ignore
        torch.cuda.reset_peak_memory_stats()
        work.time_steps(3)
        seconds = statistics.median(sum(times) for times in work.time_steps(5))
        rate = work.tokens.numel() / seconds
        found[name] = {
            "step_seconds": seconds,
            "tokens_per_second": rate,
            "tflops": rate * work.model.flops_per_token() / 1e12,
            "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
        }
        print(name, found[name], flush=True)
        (out / "steps.json").write_text(json.dumps(found, indent=1))
        del work, block
        gc.unfreeze()
        gc.collect()
        torch.cuda.empty_cache()


def profile(depth: int, max_seq_len: int, rows: int, out: Path) -> None:
    """Profile two training steps: trace.json for a trace viewer, and a table of kernels."""
    machine = init_distributed()
    windows = default_windows(machine.device.type)
    cfg = shape_for_depth(depth, VOCAB_SIZE, max_seq_len, "default", windows)
    work = Work(cfg, rows, machine, KernelConfig())
    work.time_steps(3)
    with torch.profiler.profile() as recorded:
        work.time_steps(2)
    recorded.export_chrome_trace(str(out / "trace.json"))
    print(recorded.key_averages().table(sort_by="self_device_time_total", row_limit=40))


# ---- Runs that are stopped -----------------------------------------------------------------------


def losses_of(tag: str) -> list[float]:
    """Loss of each step that a run has logged, in order; a resume repeats none."""
    path = Path(os.environ["NANOCHAT_BASE_DIR"]) / "base_checkpoints" / tag / "metrics.jsonl"
    return [row["loss"] for row in rows_of(path) if "loss" in row] if path.exists() else []


def rows_of(path: Path) -> list[dict[str, Any]]:
    """Complete lines of a JSONL file."""
    return [json.loads(line) for line in path.read_text().splitlines(True) if line.endswith("\n")]


def stop_after(steps: int, command: list[str]) -> None:
    """Start or resume a run; send SIGTERM once it has logged `steps` steps, at least a new one."""
    tag = next(flag.split("=")[1] for flag in command if flag.startswith("--model_tag="))
    steps = max(steps, len(losses_of(tag)) + 1)
    runner = os.environ.get("GPU_RUNNER", "").split()
    process = subprocess.Popen([sys.executable, "-m", *runner, *command], cwd=REPOSITORY)
    while process.poll() is None and len(losses_of(tag)) < steps:
        time.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    if (status := process.wait()) not in (0, PREEMPTED):
        raise SystemExit(f"exit status {status}, expected {PREEMPTED}")


# ---- Server --------------------------------------------------------------------------------------


@contextmanager
def server() -> Iterator[str]:
    """Serve the newest model; yields the address once it answers."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url, runner = f"http://127.0.0.1:{port}", os.environ.get("GPU_RUNNER", "").split()
    flags = ["scripts.chat_web", f"--port={port}", "--slots=64"]
    process = subprocess.Popen([sys.executable, "-m", *runner, *flags], cwd=REPOSITORY)
    try:
        while True:
            if process.poll() is not None:
                raise SystemExit("the server ended; its error is above")
            try:
                urllib.request.urlopen(f"{url}/health").close()
                break
            except OSError:  # not listening yet
                time.sleep(0.5)
        yield url
    finally:
        process.terminate()
        process.wait()


def load_server(users: int, out: Path) -> None:
    """Concurrent users for 15 seconds, 64 tokens per answer."""
    with server() as url:
        command = [sys.executable, "-m", "tests.load_client", url, str(users), "15", "64"]
        done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    print(done.stdout)
    (out / "server.json").write_text(done.stdout)


# ---- Results -------------------------------------------------------------------------------------


def difference(one: str, other: str) -> str:
    """Largest difference between the losses of two runs, over the steps that both have."""
    pairs = list(zip(losses_of(one), losses_of(other), strict=False))
    most = max((abs(a - b) for a, b in pairs), default=float("nan"))
    return f"{most:.4g} over {len(pairs)} steps"


def write(out: Path) -> None:
    """Put the results so far into dev/bench-gpu.md and $OUT/results.json."""
    checks = {(c["part"], c["check"]): c for c in rows_of(out / "checks.jsonl")}  # the last ones
    measured = sorted(out.glob("*.json"))
    measured = [path for path in measured if path.stem not in ("trace", "results")]
    figures = {path.stem: json.loads(path.read_text()) for path in measured}
    losses = {
        "CPU against GPU": difference("whole", "cpu"),
        "uninterrupted against resumed": difference("whole", "stopped"),
    }
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    result = {"device": name, "torch": torch.__version__, "checks": list(checks.values())}
    result |= {"figures": figures, "largest_loss_difference": losses}
    (out / "results.json").write_text(json.dumps(result, indent=1))
    day = time.strftime("%Y-%m-%d")
    lines = [FIRST_CHECKS, ""]
    lines += [f"`dev/gpu_check.sh`, {day}, {name}, torch {torch.__version__}.", ""]
    lines += ["| part | check | status | seconds | commit |", "|---|---|---|---|---|"]
    lines += [
        "| {part} | {check} | {status} | {seconds} | {commit} |".format(**c)
        for c in checks.values()
    ]
    lines += ["", "| Largest difference of losses | |", "|---|---|"]
    lines += [f"| {what} | {value} |" for what, value in losses.items()]
    if steps := figures.get("steps"):
        lines += ["", "| Training step | seconds | tokens/s | TFLOP/s | peak GiB |"]
        lines += ["|---|---|---|---|---|"]
        for what, row in steps.items():
            numbers = row["step_seconds"], row["tokens_per_second"], row["tflops"], row["peak_gib"]
            lines.append("| {} | {:.4f} | {:,.0f} | {:.0f} | {:.1f} |".format(what, *numbers))
    page = REPOSITORY / "dev" / "bench-gpu.md"
    before = "# Measurements on a GPU\n\n"
    if page.exists():
        before = page.read_text().partition(FIRST_CHECKS)[0]
    text = "\n".join(lines) + "\n"
    if name != "no GPU" and "GPU_RUNNER" not in os.environ:
        write_atomic(page, before + text)
    print(text)
    passed = sum(check["status"] == "0" for check in checks.values())
    differ = "; ".join(f"{what}: {value}" for what, value in losses.items())
    print(
        f"For dev/LOG.md:\n\n## {day}: First checks on {name}: {passed} of {len(checks)} pass\n\n"
        f"**Setup.** `dev/gpu_check.sh`, commit {next(reversed(checks.values()))['commit']}, "
        f"torch {torch.__version__}.\n\n**Result.** Largest differences of losses: {differ}. "
        "Figures: [bench-gpu.md](bench-gpu.md).\n"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    for flag in ("--depth", "--stop_after", "--users"):
        parser.add_argument(flag, type=int)
    parser.add_argument("--max_seq_len", type=int, default=2048)
    parser.add_argument("--rows", type=int, default=16)
    for flag in ("--profile", "--write"):
        parser.add_argument(flag, action="store_true")
    parser.add_argument("command", nargs="*")
    args, folder = parser.parse_args(), Path(os.environ["OUT"])
    if args.depth:
        measure = profile if args.profile else time_steps
        measure(args.depth, args.max_seq_len, args.rows, folder)
    if args.stop_after:
        stop_after(args.stop_after, args.command)
    if args.users:
        load_server(args.users, folder)
    if args.write:
        write(folder)
