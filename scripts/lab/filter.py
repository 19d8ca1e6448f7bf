"""
Filter a bucket of conversations and write the result to a file to train on.

    python -m scripts.lab.filter --bucket=smoltalk:local/chat-korean --out=korean.jsonl \
        --filters="length=10:2000,no_image,script=hangul:30%,not_degenerate,no_duplicate,no_overlap"
    python -m scripts.lab.filter --rows=made.jsonl --out=good.jsonl --filters=verified,no_duplicate

Use the file as a bucket: --mixture=jsonl:korean.jsonl.

Reads   training conversations of a task, or a file of rows {"messages", "original", "gold", ...},
        or of prompts to answer later, {"prompt", "original", ...};
        the tokenizer --tokenizer_tag and, for no_overlap, the evaluation splits of benchmarks
Writes  --out, and the section "Filters <name of the file>"
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from nanochat import records, report
from nanochat.common import fingerprint, printable, sha256_file, write_atomic
from nanochat.config import start
from nanochat.dataset import read_json_lines
from nanochat.mixture import BUDGET, parse_mixture, read_mixture
from nanochat.tokenizer import Tokenizer
from tasks.base import assistant, find_error, user
from tasks.buckets import Bucket, buckets
from tasks.filters import FilterRow, apply_filters, parse_all
from tasks.registry import BENCHMARKS, eval_task


@dataclass(frozen=True)
class Filter:
    out: str = ""
    """Output file, one conversation per line."""
    filters: str = "no_image,not_degenerate,no_duplicate,no_overlap"
    """Filters in the order they are applied: length_shift, length=10:2000, longest=99%, no_image,
    script=hangul:30%, not_degenerate, verified, no_duplicate, no_near_duplicate, no_overlap."""
    bucket: str = ""
    """Bucket to filter, as in --mixture of mid_train: smoltalk=1000."""
    rows: str = ""
    """JSONL file to filter, instead of --bucket."""
    tokenizer_tag: str = "main"
    """Tokenizer for lengths in tokens; without it, lengths are in characters."""
    report_dir: str | None = None
    """Folder of records. Default: report/ under the base directory."""

    def __post_init__(self) -> None:
        if self.out and bool(self.bucket) == bool(self.rows):
            raise ValueError("set either --bucket or --rows")


def main(cfg: Filter) -> None:
    if not cfg.out:
        raise ValueError("--out is required: the file to write")
    benchmarks = BENCHMARKS if "no_overlap" in cfg.filters else []
    rules = parse_all(cfg.filters, length_in(cfg.tokenizer_tag), [eval_task(b) for b in benchmarks])
    bucket = open_bucket(cfg) if cfg.bucket else None
    rows = list(read_rows(cfg.rows, bucket))
    kept, table = apply_filters(rows, rules)
    if not kept:
        raise ValueError(f"the filters {cfg.filters} drop all of {cfg.bucket or cfg.rows}")
    out = Path(cfg.out).expanduser()
    text = (json.dumps(dict(row), ensure_ascii=False) for row in kept)
    write_atomic(out, "".join(f"{line}\n" for line in text))
    print(printable(f"wrote {len(kept):,} conversations to {out}"))
    values = {"Kept": len(kept), "Dropped": len(rows) - len(kept)}
    if bucket:
        source = fingerprint(bucket.train.identity)
    else:
        source = sha256_file(Path(cfg.rows).expanduser())[:16]
    provenance = records.Provenance(records.new_run_id(), 0, {"before": source})
    report.append_section(f"Filters {out.stem}", cfg, values, provenance, tables=[table])


def length_in(tag: str) -> Callable[[str], int]:
    """Return a function: text -> length in tokens, or in characters without a tokenizer."""
    try:
        tokenizer = Tokenizer.load(tag)
    except FileNotFoundError:
        print("no tokenizer found: lengths are in characters")
        return len
    return lambda text: len(tokenizer.encode(text))


def open_bucket(cfg: Filter) -> Bucket:
    """Open the bucket to filter. Raises ValueError unless it is one bucket, name[=rows]."""
    spec, declared = read_mixture(cfg.bucket)
    part, *others = parse_mixture(spec)
    if others or part.share or part.tokens or part.repeats or BUDGET.search(spec):
        raise ValueError(f"--bucket={cfg.bucket!r} must be one bucket, optionally with =rows")
    [bucket] = buckets(spec, declared)
    return bucket


def read_rows(path: str, bucket: Bucket | None) -> Iterator[FilterRow]:
    """
    Yield the rows to filter: those of the bucket, else of the file. Raises ValueError for a line
    that is not a conversation.
    """
    if bucket:
        yield from ({"messages": conversation} for conversation in bucket.train)
        return
    for number, line in read_json_lines(Path(path).expanduser()):
        problem = "not an object"
        if isinstance(line, dict):
            messages = line.get("messages")
            if messages is None and "prompt" in line:  # not answered yet
                messages = [user(line["prompt"]), assistant("-")]
            problem = find_error(messages)
        if problem:
            raise ValueError(f"{path}, line {number}: {problem}")
        yield line


if __name__ == "__main__":
    start(main, Filter(), __doc__)
