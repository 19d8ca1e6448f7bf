"""
What an artifact costs: every container with every compressor, the code, each tensor; and the limit.

    stored tensors -> the smallest file there is, its sizes -> a table, or Refused

The code that is charged is what it takes to read a file and score it: `artifact.py`, `eval_bpb.py`
and all of ours that they import. Packages are not: torch, numpy, pyarrow, tiktoken, rustbpe.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nanochat.common import Refused, code_of, source_of
from nanochat.golf.artifact import (
    COMPRESSORS,
    CONTAINERS,
    Compressor,
    Container,
    Stored,
    compress,
    make_body,
    seal,
)
from nanochat.gpt import GPTConfig
from nanochat.tokenizer import Tokenizer

EVALUATORS = ("golf.artifact", "eval_bpb")  # what reads a file, what scores its model
COSTLIEST = 5  # tensors that a refusal names


@dataclass(frozen=True)
class TensorSize:
    """The bytes of one tensor: float32, stored, and stored when compressed alone."""

    name: str
    shape: tuple[int, ...]
    form: str
    raw: int
    payload: int
    compressed: int


@dataclass(frozen=True)
class Written:
    """The smallest file, and what it was chosen from."""

    data: bytes
    container: Container
    compressor: Compressor
    tried: dict[tuple[Container, Compressor], int]
    """Bytes of the file with each."""
    tensors: list[TensorSize]
    code: dict[str, int]
    """Bytes of each module that is charged."""

    @property
    def raw_bytes(self) -> int:
        """All tensors in float32."""
        return sum(t.raw for t in self.tensors)

    @property
    def payload_bytes(self) -> int:
        """All tensors as they are stored, before compression."""
        return sum(t.payload for t in self.tensors)

    @property
    def code_bytes(self) -> int:
        """The modules it takes to score the file."""
        return sum(self.code.values())

    def total_bytes(self, count_code: bool) -> int:
        """What is compared with the limit."""
        return len(self.data) + (self.code_bytes if count_code else 0)


def smallest(
    stored: list[Stored],
    model: GPTConfig,
    tokenizer: Tokenizer,
    origin: Mapping[str, Any],
    container: Container | None = None,
    compressor: Compressor | None = None,
) -> Written:
    """Try every container with every compressor, or those asked for, and keep the smallest file."""
    files: dict[tuple[Container, Compressor], bytes] = {}
    for lie in (container,) if container else CONTAINERS:
        body = make_body(stored, model, tokenizer, origin, lie)
        for by in (compressor,) if compressor else COMPRESSORS:
            files[lie, by] = seal(body, lie, by)
    best = min(files, key=lambda k: len(files[k]))
    return Written(
        files[best],
        *best,
        {which: len(data) for which, data in files.items()},
        [size_of(s, *best) for s in stored],
        code_bytes(),
    )


def size_of(stored: Stored, container: Container, compressor: Compressor) -> TensorSize:
    """What one tensor takes."""
    payload = stored.floats + stored.level_bytes(container)
    numel = math.prod(stored.shape)
    alone = len(compress(payload, compressor))
    return TensorSize(stored.name, stored.shape, stored.form, 4 * numel, len(payload), alone)


def code_bytes() -> dict[str, int]:
    """The modules that are charged, with their bytes."""
    names = {name for module in EVALUATORS for name in code_of(module)}
    return {name: len(source_of(name).encode()) for name in sorted(names)}


def describe(written: Written, limit: int, count_code: bool) -> str:
    """The table: every tensor, every choice, every module, and the sums."""
    row = "{:<34} {:>12} {:>6} {:>12} {:>11} {:>11}".format
    lines = [row("tensor", "shape", "format", "raw", "payload", "alone")]
    for t in written.tensors:
        sizes = (f"{n:,}" for n in (t.raw, t.payload, t.compressed))
        lines.append(row(t.name, "x".join(map(str, t.shape)), t.form, *sizes))
    lines += ["", "container and compressor"]
    for (lie, by), size in sorted(written.tried.items(), key=lambda item: item[1]):
        chosen = "  <- written" if (lie, by) == (written.container, written.compressor) else ""
        lines.append(f"  {lie + ' ' + by:<14} {size:>12,}{chosen}")
    listed = ", ".join(f"{name} {size:,}" for name, size in written.code.items())
    charged = "" if count_code else " (not counted)"
    lines += [
        "",
        f"code: {listed}",
        "",
        f"raw        {written.raw_bytes:>12,}  float32",
        f"payload    {written.payload_bytes:>12,}  on their grids",
        f"compressed {len(written.data):>12,}  with configuration and tokenizer: the file",
        f"code       {written.code_bytes:>12,}  {len(written.code)} modules{charged}",
        f"total      {written.total_bytes(count_code):>12,}  of {limit:,}",
    ]
    return "\n".join(lines)


def require_within(written: Written, limit: int, count_code: bool) -> None:
    """Raises Refused naming the tensors that cost most where the artifact is above the limit."""
    total = written.total_bytes(count_code)
    if total <= limit:
        return
    costly = sorted(written.tensors, key=lambda t: -t.compressed)[:COSTLIEST]
    named = ", ".join(f"{t.name} {t.compressed:,} ({t.form})" for t in costly)
    code = f", {written.code_bytes:,} of them code" if count_code else ""
    raise Refused(
        f"{total:,} bytes{code} are {total - limit:,} above the limit of {limit:,}; most cost "
        + named,
        "fewer bits for those (--quantize), a smaller model, or more weight decay, which makes "
        "weights compress better",
    )
