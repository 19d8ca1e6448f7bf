"""
The speed of our tokenizer beside that of others, on the same text and machine.

    texts -> one process per measurement, libraries in turn -> rate, range and ratio of each

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
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from nanochat.bench.table import Findings, Rate
from nanochat.common import REPOSITORY
from nanochat.packing import Packer, pack
from nanochat.tokenizer import PATTERN, Tokenizer

PEER = REPOSITORY / "dev" / "tokenizer_peer.py"
PEER_PACKAGES = {
    "rustbpe": "rustbpe==0.1.0",
    "tokenizers": "tokenizers==0.23.3",
    "gigatoken": "gigatoken==0.10.0",
}
PATH = "Tokenizer"
# Encoding is compared with GPT-4's own three digits: gigatoken knows patterns by name only.
GPT4_PATTERN = PATTERN.replace("{1,2}", "{1,3}")


class Bench(NamedTuple):
    """A folder with the texts, their size, how often to measure, and each library's Python."""

    folder: Path
    megabytes: float
    repeats: int
    pythons: dict[str, list[str] | None]


def bench_tokenizer(
    texts: list[str],
    vocab_sizes: Sequence[int],
    threads: Sequence[int],
    repeats: int,
    found: Findings,
) -> None:
    """
    Training to each of `vocab_sizes` with the last number of `threads`; encoding with the last
    vocabulary and each number of threads, first pass over the texts; packing; growth.
    """
    megabytes = sum(len(text.encode()) for text in texts) / 1e6
    tokenizer = Tokenizer.train(texts, vocab_sizes[-1])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        pythons: dict[str, list[str] | None] = dict.fromkeys(("ours", "tiktoken"), [sys.executable])
        pythons |= {library: peer_python(library, folder) for library in PEER_PACKAGES}
        bench = Bench(folder, megabytes, repeats, pythons)
        (folder / "texts.json").write_text(json.dumps(texts))
        write_ranks(tokenizer, folder / "ranks.tiktoken")

        found.note(f"Tokenizer: {megabytes:.1f} MB of text, {len(texts):,} documents")
        for size in vocab_sizes:
            job = {"what": "train", "pattern": PATTERN, "vocab_size": size, "threads": threads[-1]}
            label = f"trained, {size:,} ids, {threads[-1]} threads"
            compare(bench, label, job, ["ours", "rustbpe", "tokenizers"], found)
        for num in threads:
            job = {"what": "encode", "pattern": GPT4_PATTERN, "threads": num}
            label = f"encoded, {vocab_sizes[-1]:,} ids, {num} threads"
            compare(bench, label, job, ["ours", "gigatoken", "tiktoken"], found)
        grow(bench, texts, vocab_sizes, threads, found)
    rates = [pack_rate(texts, tokenizer) for _ in range(repeats)]
    found.line(PATH, "packed into rows of 513 tokens", "MB/s", Rate.of(rates))


def grow(
    bench: Bench,
    texts: list[str],
    vocab_sizes: Sequence[int],
    threads: Sequence[int],
    found: Findings,
) -> None:
    """Time and memory of our training against the text, the vocabulary and the threads."""
    job = {
        "what": "train",
        "pattern": PATTERN,
        "vocab_size": vocab_sizes[0],
        "threads": threads[-1],
    }

    def median(job: dict[str, Any]) -> tuple[float, float]:
        measured = [measure(bench, "ours", job) for _ in range(bench.repeats)]
        seconds = statistics.median(result["seconds"] for result in measured)
        return seconds, statistics.median(result["megabytes"] for result in measured)

    for vocab_size in (vocab_sizes[0], *vocab_sizes[0] * np.array([2, 4])):
        seconds, _ = median(job | {"vocab_size": int(vocab_size)})
        found.point("ids: training the tokenizer", int(vocab_size), seconds)
    for num in threads:
        found.point("threads: training the tokenizer", num, median(job | {"threads": num})[0])
    for part in (8, 4, 2, 1):
        (bench.folder / "texts.json").write_text(json.dumps(texts[: len(texts) // part]))
        size = bench.megabytes / part
        found.point("MB of text: training the tokenizer", size, *median(job))
    encoding = {"what": "encode", "pattern": GPT4_PATTERN, "threads": threads[-1]}
    for part in (8, 4, 2, 1):
        (bench.folder / "texts.json").write_text(json.dumps(texts[: len(texts) // part]))
        found.point("MB of text: encoding", bench.megabytes / part, *median(encoding))


def pack_rate(texts: list[str], tokenizer: Tokenizer) -> float:
    """MB of text a second that are packed once they are encoded."""
    batches = [texts[i : i + 1024] for i in range(0, len(texts), 1024)]
    encoded = [tokenizer.encode_flat(batch) for batch in batches]
    started = time.perf_counter()
    for _ in pack(iter(encoded), Packer(513, tokenizer.bos_id, np.uint16)):
        pass
    seconds = time.perf_counter() - started
    return sum(len(text.encode()) for text in texts) / 1e6 / seconds


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


def compare(
    bench: Bench, label: str, job: dict[str, Any], libraries: Sequence[str], found: Findings
) -> None:
    """Measure those of the libraries that are there in turn: a line for each peer."""
    present = [library for library in libraries if bench.pythons[library] is not None]
    results: dict[str, list[dict[str, Any]]] = {library: [] for library in present}
    for _ in range(bench.repeats):
        for library in present:
            results[library].append(measure(bench, library, job))
    rates = {
        library: Rate.of(bench.megabytes / result["seconds"] for result in measured)
        for library, measured in results.items()
    }
    for library in libraries:
        if library == "ours":
            continue
        agreement = ""
        if library in results:
            digests = {result["digest"] for result in (*results["ours"], *results[library])}
            agreement = "" if None in digests else " (same)" if len(digests) == 1 else " (DIFFERS)"
        found.line(PATH, label, "MB/s", rates["ours"], library + agreement, rates.get(library))
