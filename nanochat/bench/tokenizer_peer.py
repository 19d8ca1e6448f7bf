"""
Benchmark one tokenizer library once, in a separate process.

    python -P nanochat/bench/tokenizer_peer.py job.json    # prints seconds and digest as JSON

Run by bench/tokenizer.py for our crate and, in separate environments, for other libraries. It
imports only the library under test, because two of them have the same import name, rustbpe. Each
measurement is a first pass with cold caches; timing starts after texts and vocabulary are loaded.
The digest is a hash of the result: vocabulary tokens, or the ids of all texts.
"""

import base64
import hashlib
import json
import os
import sys
import time
from array import array
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

RANKS = "ranks.tiktoken"  # a base64 token and its rank per line
Work = Callable[[], Any]
Pieces = Callable[[Any], Iterable[bytes]]


def open_trainer(job: dict[str, Any], texts: list[str]) -> tuple[Work, Pieces]:
    """What trains a vocabulary, and the function that turns its result into bytes."""
    import rustbpe  # ours, or the PyPI package with the same interface

    tokenizer, size = rustbpe.Tokenizer(), job["vocab_size"]
    return (
        lambda: tokenizer.train_from_iterator(iter(texts), size, pattern=job["pattern"]),
        lambda _: [token for token, _ in tokenizer.get_mergeable_ranks()],
    )


def open_encoder(job: dict[str, Any], texts: list[str]) -> tuple[Work, Pieces]:
    """What encodes the texts, and the function that turns its result into bytes."""
    lines = [line.split() for line in Path(RANKS).read_text().splitlines()]
    ranks, threads = [(base64.b64decode(token), int(i)) for token, i in lines], job["threads"]
    if job["library"] == "tiktoken":
        import tiktoken

        options = {"mergeable_ranks": dict(ranks), "special_tokens": {}}
        encoding = tiktoken.Encoding("bench", pat_str=job["pattern"], **options)
        return (
            lambda: encoding.encode_ordinary_batch(texts, num_threads=threads),
            lambda rows: (array("I", row).tobytes() for row in rows),
        )
    if job["library"] == "gigatoken":
        import gigatoken  # type: ignore
        import numpy as np

        peer = gigatoken.Tokenizer.from_tiktoken(RANKS, "gpt4")
        return (
            lambda: peer.encode_batch(texts, parallel=threads > 1),
            lambda rows: (np.asarray(row, np.uint32).tobytes() for row in rows),
        )
    import rustbpe

    tokenizer = rustbpe.Tokenizer.from_ranks(ranks, job["pattern"])
    return lambda: tokenizer.encode_flat(texts), lambda flat: [flat[0]]


def main(job: dict[str, Any]) -> None:
    os.environ["RAYON_NUM_THREADS"] = str(job["threads"])  # read by all but tiktoken
    texts = json.loads(Path("texts.json").read_text())
    work, pieces = (open_trainer if "vocab_size" in job else open_encoder)(job, texts)
    start = time.perf_counter()
    result = work()
    seconds = time.perf_counter() - start
    digest = hashlib.sha256(b"".join(pieces(result))).hexdigest()
    print(json.dumps([seconds, digest]))


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
