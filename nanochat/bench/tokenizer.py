"""
Benchmark our tokenizer against other libraries on the same text and machine.

    texts -> one process per measurement, libraries in turn -> throughput, range and ratio of each

Each library runs in its own process (tokenizer_peer.py), peers in environments created by `uv`
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

from nanochat.bench.table import alternate, compare, print_table
from nanochat.tokenizer import PATTERN, Tokenizer

PEER_SCRIPT = Path(__file__).with_name("tokenizer_peer.py")
PEER_PACKAGES = {"rustbpe": "rustbpe==0.1.0", "gigatoken": "gigatoken==0.10.0"}
NOTE = """\
MB of text per second, {amount}, vocabulary {vocab_size:,}. Each measurement is a new process with
cold caches. Equal output: same vocabulary or token ids."""
OURS = ("VIRTUAL_ENV", "PYTHONPATH", "UV_PROJECT_ENVIRONMENT")  # not for other libraries
# Encoding uses GPT-4's own pattern (up to three digits): gigatoken accepts patterns by name only
GPT4_PATTERN = PATTERN.replace("{1,2}", "{1,3}")


def bench_tokenizer(
    texts: list[str], vocab_size: int, threads: Sequence[int], repeats: int
) -> None:
    """Benchmark training (last entry of `threads`) and first-pass encoding (each entry)."""
    megabytes = sum(len(text.encode()) for text in texts) / 1e6
    training = {"vocab_size": vocab_size, "pattern": PATTERN, "threads": threads[-1]}
    jobs: list[tuple[str, dict[str, Any], list[str]]] = [
        (f"training, {threads[-1]} threads", training, ["rustbpe"])
    ]
    for n in threads:
        encoding = {"pattern": GPT4_PATTERN, "threads": n}
        jobs.append((f"encoding, {n} threads", encoding, ["gigatoken", "tiktoken"]))
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_inputs(texts, Tokenizer.train(texts, vocab_size), folder)
        for case, job, peers in jobs:
            works: list[Any] = [
                partial(measure, folder, job, library) for library in ("ours", *peers)
            ]
            ours, *others = alternate(repeats, *works, num_warmup=0)
            rates = [megabytes / seconds for seconds, _ in ours]
            for peer, found in zip(peers, others, strict=True):
                present = [each for each in found if each]
                agreement = ""
                if present:
                    is_equal = len({digest for _, digest in ours + present}) == 1
                    agreement = " (equal output)" if is_equal else " (OUTPUT DIFFERS)"
                theirs = [megabytes / seconds for seconds, _ in present]
                rows.append(compare(case, "MB/s", rates, peer + agreement, theirs))
    amount = f"{megabytes:.1f} MB of UTF-8 text, {len(texts):,} documents"
    print_table("Tokenizer", NOTE.format(amount=amount, vocab_size=vocab_size), rows)


def measure(folder: Path, job: dict[str, Any], library: str) -> tuple[float, str] | None:
    """
    Run tokenizer_peer.py once. Returns seconds and the digest of its output; None, with a
    message, if the library cannot be run here.
    """
    python = [sys.executable]
    if library in PEER_PACKAGES:
        python = [shutil.which("uv") or "uv", "run", "--quiet", "--no-project", "--isolated"]
        python += ["--python", sys.executable, "--with", PEER_PACKAGES[library], "python"]
    (folder / "job.json").write_text(json.dumps(job | {"library": library}))
    environment = {name: value for name, value in os.environ.items() if name not in OURS}
    options: Any = {"cwd": folder, "env": environment, "capture_output": True, "text": True}
    try:
        ended = subprocess.run([*python, "-P", str(PEER_SCRIPT), "job.json"], check=True, **options)
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        if library not in PEER_PACKAGES:
            raise
        reason = getattr(error, "stderr", "") or "uv is not installed"
        print(f"{library} is missing: {reason.strip()}", flush=True)
        return None
    seconds, digest = json.loads(ended.stdout)
    return seconds, digest


def write_inputs(texts: Sequence[str], tokenizer: Tokenizer, folder: Path) -> None:
    """Write the texts, and the vocabulary in tiktoken's file format."""
    (folder / "texts.json").write_text(json.dumps(texts))
    tokens = [tokenizer.decode_bytes([i]) for i in range(tokenizer.bos_id)]
    lines = [f"{base64.b64encode(token).decode()} {i}\n" for i, token in enumerate(tokens)]
    (folder / "ranks.tiktoken").write_text("".join(lines))
