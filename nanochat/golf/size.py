"""
Artifact size: tries all compressors; checks file and code against the limit.

    stored tensors -> choose_smallest -> file, sizes -> table, or UsageError

The code that counts toward the limit is the code needed to read and score a file: `artifact.py`,
`eval_bpb.py`, the nanochat modules they import, and the sources of rustbpe. Packages of others are
free.
"""

import ast
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from nanochat.common import REPOSITORY, UsageError
from nanochat.golf.artifact import (
    COMPRESSORS,
    Compressor,
    StoredTensor,
    compress,
    make_body,
    write_body,
)
from nanochat.gpt import GPTConfig
from nanochat.tokenizer import Tokenizer

EVALUATORS = ("golf.artifact", "eval_bpb")  # read a file, score its model
COSTLIEST = 5  # number of tensors listed in the error


class SmallestFile(NamedTuple):
    """The smallest file and the alternatives."""

    data: bytes
    compressor: Compressor
    tried: dict[Compressor, int]
    """File size in bytes by compressor."""
    tensors: list[tuple[StoredTensor, int, int]]
    """Each tensor with its bytes as stored, and compressed on its own."""
    code: dict[str, int]
    """Bytes of each module required to score the file."""

    @property
    def code_bytes(self) -> int:
        return sum(self.code.values())

    @property
    def total_bytes(self) -> int:
        """Bytes of file and code, which the limit is for."""
        return len(self.data) + self.code_bytes


def choose_smallest(
    stored: list[StoredTensor], model: GPTConfig, tokenizer: Tokenizer, origin: Mapping[str, Any]
) -> SmallestFile:
    """Return the smallest file over all compressors."""
    body = make_body(stored, model, tokenizer, origin)
    files: dict[Compressor, bytes] = {by: write_body(body, by) for by in COMPRESSORS}
    by: Compressor = min(files, key=lambda by: len(files[by]))
    tensors = []
    for s in stored:
        payload = s.floats + s.levels
        tensors.append((s, len(payload), len(compress(payload, by))))
    tried: dict[Compressor, int] = {which: len(data) for which, data in files.items()}
    return SmallestFile(files[by], by, tried, tensors, code_bytes())


def code_bytes() -> dict[str, int]:
    """Return the size in bytes of each module that counts toward the limit."""
    names = {name for module in EVALUATORS for name in list_imported_modules(module)}
    found = {name: len(read_source(name).encode()) for name in sorted(names)}
    crate = REPOSITORY / "rustbpe"
    sources = (crate / "Cargo.toml", *crate.glob("src/*.rs"))
    return found | {"rustbpe": sum(path.stat().st_size for path in sources)}


def read_source(module: str) -> str:
    """Return the source of a nanochat module, e.g. "hf.export"."""
    path = REPOSITORY.joinpath("nanochat", *module.split(".")).with_suffix(".py")
    return path.read_text(encoding="utf-8")


def list_imported_modules(module: str) -> list[str]:
    """Return a module and all nanochat modules it imports, directly or not."""
    found, waiting = [], [module]
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.append(name)
            nodes = ast.walk(ast.parse(read_source(name)))
            imported = [n.module or "" for n in nodes if isinstance(n, ast.ImportFrom)]
            waiting += [n.removeprefix("nanochat.") for n in imported if n.startswith("nanochat.")]
    return found


def format_sizes(written: SmallestFile, limit: int) -> str:
    """Return a table of tensors, file sizes by compressor, modules and totals."""
    row = "{:<34} {:>12} {:>6} {:>12} {:>11} {:>11}".format
    lines = [row("tensor", "shape", "format", "raw", "payload", "alone")]
    raw = payload = 0
    for s, stored, alone in written.tensors:
        size = 4 * math.prod(s.shape)
        raw, payload = raw + size, payload + stored
        sizes = (f"{n:,}" for n in (size, stored, alone))
        lines.append(row(s.name, "x".join(map(str, s.shape)), s.form, *sizes))
    lines += ["", "compressor"]
    for by, size in sorted(written.tried.items(), key=lambda item: item[1]):
        chosen = "  <- chosen" if by == written.compressor else ""
        lines.append(f"  {by:<14} {size:>12,}{chosen}")
    listed = ", ".join(f"{name} {size:,}" for name, size in written.code.items())
    return "\n".join(lines) + (
        f"\n\ncode: {listed}\n\n"
        f"raw        {raw:>12,}  float32\n"
        f"payload    {payload:>12,}  quantized\n"
        f"compressed {len(written.data):>12,}  file, with configuration and tokenizer\n"
        f"code       {written.code_bytes:>12,}  {len(written.code)} modules\n"
        f"total      {written.total_bytes:>12,}  of {limit:,}"
    )


def require_size_limit(written: SmallestFile, limit: int) -> None:
    """Raise UsageError, listing the largest tensors, if the artifact exceeds the limit."""
    total = written.total_bytes
    if total <= limit:
        return
    costly = sorted(written.tensors, key=lambda each: -each[2])[:COSTLIEST]
    named = ", ".join(f"{s.name} {alone:,} ({s.form})" for s, _, alone in costly)
    code, above = written.code_bytes, total - limit
    raise UsageError(
        f"{total:,} bytes ({code:,} of them code) exceed the limit of {limit:,} by {above:,}; "
        f"largest tensors: {named}",
        "use fewer bits for them (--quantize), a smaller model, or more weight decay, which makes "
        "weights more compressible",
    )
