"""
Benchmark one tokenizer library once, in a separate process.

    python dev/tokenizer_peer.py job.json    # prints the result as JSON

Run by scripts/bench.py for our crate and, in separate environments, for other libraries. It imports
only the library under test, because two of them have the same import name, rustbpe. Each
measurement is a first pass with cold caches; timing starts after texts and vocabulary are loaded.
`digest` is a hash of the result: vocabulary tokens, or the ids of all texts.
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

Job = dict[str, Any]
Work = Callable[[], Any]
Pieces = Callable[[Any], Iterable[bytes]] | None


def train_rustbpe(job: Job, texts: list[str]) -> tuple[Work, Pieces]:
    """Our crate and the PyPI package rustbpe, which have the same interface."""
    import rustbpe

    tokenizer = rustbpe.Tokenizer()

    def work() -> Any:
        tokenizer.train_from_iterator(iter(texts), job["vocab_size"], pattern=job["pattern"])

    return work, lambda _: [token for token, _ in tokenizer.get_mergeable_ranks()]


def train_tokenizers(job: Job, texts: list[str]) -> tuple[Work, Pieces]:
    """Hugging Face tokenizers; it breaks ties differently, so its result is not compared."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(job["pattern"]), "isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    trainer = trainers.BpeTrainer(
        vocab_size=job["vocab_size"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    return lambda: tokenizer.train_from_iterator(iter(texts), trainer, len(texts)), None


def encode_rustbpe(job: Job, texts: list[str]) -> tuple[Work, Pieces]:
    """Our crate; encodes into one flat array."""
    import rustbpe

    tokenizer = rustbpe.Tokenizer.from_ranks(ranks(job), job["pattern"])
    return lambda: tokenizer.encode_flat(texts), lambda flat: [flat[0]]


def encode_tiktoken(job: Job, texts: list[str]) -> tuple[Work, Pieces]:
    import tiktoken

    tokenizer = tiktoken.Encoding(
        "bench", pat_str=job["pattern"], mergeable_ranks=dict(ranks(job)), special_tokens={}
    )

    def work() -> Any:
        return tokenizer.encode_ordinary_batch(texts, num_threads=job["threads"])

    return work, lambda rows: (array("I", row).tobytes() for row in rows)


def encode_gigatoken(job: Job, texts: list[str]) -> tuple[Work, Pieces]:
    """gigatoken, with a vocabulary in tiktoken's file format and a pattern selected by name."""
    import gigatoken
    import numpy as np

    tokenizer = gigatoken.Tokenizer.from_tiktoken(job["ranks"], "gpt4")

    def work() -> Any:
        return tokenizer.encode_batch(texts, parallel=job["threads"] > 1)

    return work, lambda rows: (np.asarray(row, np.uint32).tobytes() for row in rows)


WORK = {
    ("train", "ours"): train_rustbpe,
    ("train", "rustbpe"): train_rustbpe,
    ("train", "tokenizers"): train_tokenizers,
    ("encode", "ours"): encode_rustbpe,
    ("encode", "tiktoken"): encode_tiktoken,
    ("encode", "gigatoken"): encode_gigatoken,
}


def ranks(job: Job) -> list[tuple[bytes, int]]:
    """Read a vocabulary in tiktoken's file format: a base64 token and its rank per line."""
    lines = [line.split() for line in Path(job["ranks"]).read_text().splitlines()]
    return [(base64.b64decode(token), int(i)) for token, i in lines]


def main(job: Job) -> None:
    os.environ["RAYON_NUM_THREADS"] = str(job["threads"])  # read by all but tiktoken
    texts = json.loads(Path(job["texts"]).read_text())
    work, pieces = WORK[job["what"], job["library"]](job, texts)
    start = time.perf_counter()
    result = work()
    seconds = time.perf_counter() - start
    digest = None
    if pieces is not None:
        digest = hashlib.sha256(b"".join(pieces(result))).hexdigest()
    print(json.dumps({"seconds": seconds, "digest": digest}))


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
