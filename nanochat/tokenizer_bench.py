"""
The speed of our tokenizer beside that of others, on the same text and machine.

    texts -> one process per measurement, libraries in turn -> median, range and ratio of each

Each library runs in a process of its own (dev/tokenizer_peer.py), the peers in environments that
`uv` makes for them: the PyPI package rustbpe shares its import name with our crate. A peer that
cannot be installed is said to be missing.
"""

import base64
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from nanochat.common import REPOSITORY
from nanochat.tokenizer import PATTERN, Tokenizer

PEER = REPOSITORY / "dev" / "tokenizer_peer.py"
PEER_PACKAGES = {
    "rustbpe": "rustbpe==0.1.0",
    "tokenizers": "tokenizers==0.23.3",
    "gigatoken": "gigatoken==0.10.0",
}
# Encoding is compared with GPT-4's own three digits: gigatoken knows patterns by name only.
GPT4_PATTERN = PATTERN.replace("{1,2}", "{1,3}")


class Bench(NamedTuple):
    """A folder with the texts, their size, how often to measure, and each library's Python."""

    folder: Path
    megabytes: float
    repeats: int
    pythons: dict[str, list[str] | None]


def bench_tokenizer(
    texts: list[str], vocab_sizes: Sequence[int], threads: Sequence[int], repeats: int
) -> None:
    """
    Print the tables: training to each of `vocab_sizes` with the last number of `threads`, and
    encoding with the last vocabulary and each number of threads, first pass over the texts.
    """
    megabytes = sum(len(text.encode()) for text in texts) / 1e6
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        pythons: dict[str, list[str] | None] = dict.fromkeys(("ours", "tiktoken"), [sys.executable])
        pythons |= {library: peer_python(library, folder) for library in PEER_PACKAGES}
        bench = Bench(folder, megabytes, repeats, pythons)
        (folder / "texts.json").write_text(json.dumps(texts))
        write_ranks(Tokenizer.train(texts, vocab_sizes[-1]), folder / "ranks.tiktoken")

        print(f"\nTraining on {megabytes:.1f} MB, threads: {threads[-1]}", flush=True)
        for size in vocab_sizes:
            job = {"what": "train", "pattern": PATTERN, "vocab_size": size, "threads": threads[-1]}
            compare(bench, f"{size:,} ids", job, ["ours", "rustbpe", "tokenizers"])

        print(f"\nEncoding {megabytes:.1f} MB with {vocab_sizes[-1]:,} ids", flush=True)
        for num in threads:
            job = {"what": "encode", "pattern": GPT4_PATTERN, "threads": num}
            compare(bench, f"threads: {num}", job, ["ours", "gigatoken", "tiktoken"])


def write_ranks(tokenizer: Tokenizer, path: Path) -> None:
    """Write the vocabulary that all libraries encode with, in tiktoken's file format."""
    tokens = [tokenizer.decode_bytes([i]) for i in range(tokenizer.bos_id)]
    lines = [f"{base64.b64encode(token).decode()} {i}\n" for i, token in enumerate(tokens)]
    path.write_text("".join(lines))


def peer_python(library: str, folder: Path) -> list[str] | None:
    """The command of a Python that has the library and not our crate; None, said, without one."""
    uv = shutil.which("uv")
    if uv is None:
        print(f"{library} is missing: uv is not installed", flush=True)
        return None
    command = [uv, "run", "--quiet", "--no-project", "--isolated", "--python", sys.executable]
    command += ["--with", PEER_PACKAGES[library], "python"]
    probe = run([*command, "-c", f"import {library}"], folder)
    if probe.returncode:
        reason = (probe.stderr.strip().splitlines() or ["no reason given"])[-1]
        print(f"{library} is missing: {reason}", flush=True)
        return None
    return command


def run(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run in `folder`, away from our environment."""
    ours = ("VIRTUAL_ENV", "PYTHONPATH", "UV_PROJECT_ENVIRONMENT")
    environment = {name: value for name, value in os.environ.items() if name not in ours}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


def measure(bench: Bench, library: str, job: dict[str, Any]) -> dict[str, Any]:
    """One measurement: what dev/tokenizer_peer.py prints. Raises RuntimeError when it fails."""
    command = bench.pythons[library]
    assert command is not None, f"{library} is missing"
    paths = {"texts": "texts.json", "ranks": "ranks.tiktoken"}
    (bench.folder / "job.json").write_text(json.dumps(job | paths | {"library": library}))
    ended = run([*command, str(PEER), "job.json"], bench.folder)
    if ended.returncode:
        raise RuntimeError(f"measuring {library} failed:\n{ended.stderr}")
    return json.loads(ended.stdout)


def compare(bench: Bench, label: str, job: dict[str, Any], libraries: Sequence[str]) -> None:
    """Measure those of the libraries that are there in turn, and print a line for each."""
    present = [library for library in libraries if bench.pythons[library] is not None]
    results: dict[str, list[dict[str, Any]]] = {library: [] for library in present}
    for _ in range(bench.repeats):
        for library in present:
            results[library].append(measure(bench, library, job))
    ours = statistics.median(result["seconds"] for result in results["ours"])
    for library, measured in results.items():
        seconds = [result["seconds"] for result in measured]
        median = statistics.median(seconds)
        digests = {result["digest"] for result in measured + results["ours"]}
        agreement = "" if None in digests else ", same result" if len(digests) == 1 else ", DIFFERS"
        print(
            f"{label:>12}  {library + ' ' + measured[0]['version']:<18}"
            f"{median:8.3f} s ({min(seconds):.3f} to {max(seconds):.3f})"
            f"{bench.megabytes / median:8.1f} MB/s{median / ours:8.2f} x our time{agreement}",
            flush=True,
        )
