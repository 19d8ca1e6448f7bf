"""
Benchmark our tokenizer against other libraries on the same text and machine.

    texts -> one process per measurement, libraries in turn -> throughput, range and ratio of each

Each library runs in its own process (dev/tokenizer_peer.py), peers in environments created by `uv`
because the PyPI package rustbpe has the same import name as our crate. A peer that cannot be
installed is listed as missing.
"""

import base64
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from nanochat.bench.table import BenchLog, TableLine, alternate
from nanochat.common import REPOSITORY
from nanochat.tokenizer import PATTERN, Tokenizer

PEER_SCRIPT = REPOSITORY / "dev" / "tokenizer_peer.py"
PEER_PACKAGES = {
    "rustbpe": "rustbpe==0.1.0",
    "tokenizers": "tokenizers==0.23.3",
    "gigatoken": "gigatoken==0.10.0",
}
TRAINING, ENCODING = "Tokenizer training", "Tokenizer encoding"
# Encoding uses GPT-4's own pattern (up to three digits): gigatoken accepts patterns by name only
GPT4_PATTERN = PATTERN.replace("{1,2}", "{1,3}")


def bench_tokenizer(
    texts: list[str],
    vocab_sizes: Sequence[int],
    threads: Sequence[int],
    repeats: int,
    found: BenchLog,
) -> None:
    """
    Benchmark training (each of `vocab_sizes`, last entry of `threads`) and first-pass encoding
    (last vocabulary, each entry of `threads`).
    """
    tokenizer = Tokenizer.train(texts, vocab_sizes[-1])
    training = {"what": "train", "pattern": PATTERN, "threads": threads[-1]}
    encoding = {"what": "encode", "pattern": GPT4_PATTERN, "threads": threads[-1]}
    with tempfile.TemporaryDirectory() as folder:
        bench = TokenizerBench(Path(folder), texts, tokenizer, repeats, found)
        amount = f"{bench.megabytes:.1f} MB of UTF-8 text, {len(texts):,} documents"
        found.note(
            TRAINING,
            f"MB of text per second, {amount}. Each measurement is a new process. Equal output: "
            "the peer learned the same vocabulary; where it is not stated, outputs were not "
            "compared.",
        )
        found.note(
            ENCODING,
            f"MB of text per second, {amount}; first pass with cold caches in a new process, all "
            "libraries with one vocabulary. Equal output: the peer gave the same token ids.",
        )
        for size in vocab_sizes:
            label, job = f"vocabulary {size:,}", training | {"vocab_size": size}
            bench.compare(TRAINING, label, job, ["rustbpe", "tokenizers"])
        for num in threads:
            label, job = f"vocabulary {vocab_sizes[-1]:,}", encoding | {"threads": num}
            bench.compare(ENCODING, label, job, ["gigatoken", "tiktoken"])


class TokenizerBench:
    """A folder with texts and vocabulary, and a Python command per library."""

    def __init__(
        self, folder: Path, texts: list[str], tokenizer: Tokenizer, repeats: int, found: BenchLog
    ):
        self.folder, self.repeats, self.found = folder, repeats, found
        self.megabytes = sum(len(text.encode()) for text in texts) / 1e6
        self.pythons = {library: peer_python(library, folder) for library in PEER_PACKAGES}
        self.pythons |= dict.fromkeys(("ours", "tiktoken"), [sys.executable])
        (folder / "texts.json").write_text(json.dumps(texts))
        write_ranks(tokenizer, folder / "ranks.tiktoken")

    def measure(self, library: str, job: dict[str, Any]) -> dict[str, Any]:
        """Run dev/tokenizer_peer.py once; return its JSON. Raises RuntimeError if it fails."""
        command = self.pythons[library]
        assert command is not None, f"{library} is missing"
        paths = {"texts": "texts.json", "ranks": "ranks.tiktoken"}
        (self.folder / "job.json").write_text(json.dumps(job | paths | {"library": library}))
        ended = run_outside_venv([*command, str(PEER_SCRIPT), "job.json"], self.folder)
        if ended.returncode:
            raise RuntimeError(f"benchmark of {library} failed:\n{ended.stderr}")
        return json.loads(ended.stdout)

    def compare(self, table: str, label: str, job: dict[str, Any], peers: Sequence[str]) -> None:
        """Measure our library and the installed peers in turn; add a line per peer."""
        threads = job["threads"]
        label += f", {threads} thread{'s' if threads > 1 else ''}"
        present = ["ours", *(peer for peer in peers if self.pythons[peer])]
        works = (partial(self.measure, library, job) for library in present)
        results = dict(zip(present, alternate(self.repeats, *works, num_warmup=0), strict=True))
        rates = {
            library: [self.megabytes / result["seconds"] for result in measured]
            for library, measured in results.items()
        }
        for peer in peers:
            agreement = ""
            if peer in results:
                digests = {result["digest"] for result in results["ours"] + results[peer]}
                same = " (equal output)" if len(digests) == 1 else " (OUTPUT DIFFERS)"
                agreement = "" if None in digests else same
            theirs = rates.get(peer, ())
            line = TableLine(table, label, "MB/s", rates["ours"], peer + agreement, theirs)
            self.found.line(line)


def write_ranks(tokenizer: Tokenizer, path: Path) -> None:
    """Write the vocabulary for all libraries in tiktoken's file format."""
    tokens = [tokenizer.decode_bytes([i]) for i in range(tokenizer.bos_id)]
    lines = [f"{base64.b64encode(token).decode()} {i}\n" for i, token in enumerate(tokens)]
    path.write_text("".join(lines))


def peer_python(library: str, folder: Path) -> list[str] | None:
    """Command to run Python with the library, without our crate; None if unavailable."""
    uv, reason = shutil.which("uv"), "uv is not installed"
    if uv is not None:
        command = [uv, "run", "--quiet", "--no-project", "--isolated", "--python", sys.executable]
        command += ["--with", PEER_PACKAGES[library], "python"]
        probe = run_outside_venv([*command, "-c", f"import {library}"], folder)
        if not probe.returncode:
            return command
        reason = (probe.stderr.strip().splitlines() or ["unknown error"])[-1]
    print(f"{library} is missing: {reason}", flush=True)
    return None


def run_outside_venv(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a command in `folder`, outside our virtual environment."""
    ours = ("VIRTUAL_ENV", "PYTHONPATH", "UV_PROJECT_ENVIRONMENT")
    environment = {name: value for name, value in os.environ.items() if name not in ours}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
