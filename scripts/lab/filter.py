"""
Filter a bucket of conversations and write the result to a file to train on.

    python -m scripts.lab.filter --bucket=smoltalk:local/chat-korean --out=korean.jsonl \
        --filters="length=10:2000,no_image,script=hangul:30%,not_degenerate,no_duplicate,no_overlap"
    python -m scripts.lab.filter --rows=made.jsonl --out=good.jsonl --filters=verified,no_duplicate

Use the file as a bucket: --mixture=jsonl:korean.jsonl.

Reads   training conversations of a task, or a file of rows {"messages", "original", "gold", ...},
        of lists of messages, or of prompts to answer later, {"prompt", "original", ...};
        the tokenizer --tokenizer_tag and, for no_overlap, the evaluation splits of benchmarks
Writes  --out, and the section "Filters <name of the file>"
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanochat import records, report
from nanochat.common import fingerprint, printable, write_atomic
from nanochat.config import start
from nanochat.lab.filters import apply_filters, parse_filters
from nanochat.tokenizer import Tokenizer
from tasks.buckets import buckets, read_mixture
from tasks.chats import parse_source
from tasks.hub import read_json_rows
from tasks.layouts import CHATS, read_conversation


@dataclass(frozen=True)
class Filter:
    out: str = ""
    """Output file, one conversation per line."""
    filters: str = "no_image,not_degenerate,no_duplicate,no_overlap"
    """Filters in the order they are applied: length_shift, length=10:2000, no_image,
    script=hangul:30%, not_degenerate, verified, no_duplicate, no_near_duplicate, no_overlap."""
    bucket: str = ""
    """Buckets to filter, as in --mixture of mid_train: smoltalk=1000."""
    rows: str = ""
    """JSONL file to filter, instead of --bucket."""
    tokenizer_tag: str = ""
    """Tokenizer, such as main, for lengths in tokens. Default: lengths are in characters."""


def main(cfg: Filter) -> None:
    if not cfg.out or bool(cfg.bucket) == bool(cfg.rows):
        raise ValueError("set --out, and either --bucket or --rows")
    if cfg.rows and Path(cfg.out).resolve() == Path(cfg.rows).resolve():
        raise ValueError(f"--out={cfg.out} would replace the rows that are read; use another name")
    records.require_writable()
    out = Path(cfg.out).expanduser()
    section = f"Filters {out.stem}"
    made = (records.read_record(section) or {}).get("settings", {}).get("out", "")
    if out.exists() and Path(made).expanduser().resolve() != out.resolve():
        fix = "pass another name, or delete it"
        raise ValueError(f"--out={out} exists, and the report has no record of it; {fix}")
    encode = Tokenizer.load(cfg.tokenizer_tag).encode if cfg.tokenizer_tag else str
    rules = parse_filters(cfg.filters)
    if cfg.bucket:
        found = buckets(*read_mixture(cfg.bucket))
        if any(bucket.tokens is not None or bucket.repeats != 1 for bucket in found):
            raise ValueError(
                f"--bucket={cfg.bucket}: use a number of conversations, as in gsm8k=10"
            )
        rows = [{"messages": messages} for bucket in found for messages in bucket.train]
        source = fingerprint([bucket.train.identity for bucket in found])
    else:
        rows = list(read_rows(cfg.rows))
        source = fingerprint(rows)
    kept, table = apply_filters(rows, rules, lambda text: len(encode(text)))
    if not kept:
        raise ValueError(f"the filters {cfg.filters} drop all of {cfg.bucket or cfg.rows}")
    write_atomic(out, "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in kept))
    print(printable(f"wrote {len(kept):,} conversations to {out}"))
    values = {"Kept": len(kept), "Dropped": len(rows) - len(kept)}
    inputs = {"before": source}
    report.append_section(section, cfg, values, inputs, tables=[table])


def read_rows(path: str) -> Iterator[dict[str, Any]]:
    """
    Yield the rows of a file, answered or not, their conversation as "messages" (or, to be answered,
    "prompt"). Raises ValueError for a line that is not a conversation.
    """
    file, names = parse_source(path.removeprefix("jsonl:"))
    for number, row in read_json_rows(Path(file).expanduser()):
        try:
            messages = read_conversation(row, names, is_answered=False)
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
        others = {} if isinstance(row, list) else {k: row[k] for k in row if k not in CHATS}
        to_answer = messages[-1]["role"] != "assistant" and "prompt" in others
        yield others if to_answer else {**others, "messages": messages}


if __name__ == "__main__":
    start(main, Filter(), __doc__)
