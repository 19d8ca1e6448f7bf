"""
Let a teacher answer prompts: any model behind OpenAI's API, ours included.

    python -m scripts.chat_web &                                         # a teacher of our own
    python -m scripts.lab.generate --prompts=asked.jsonl --out=made.jsonl --pilot=2000
    python -m scripts.lab.generate --prompts=asked.jsonl --out=made.jsonl    # the rest, afterwards

A pilot comes first: train on its rows and compare (scripts.lab.filter, scripts.lab.sweep) before
the rest is paid for. Safe to stop and run again: what is answered is kept.

Reads   a file of rows: {"messages": [...]} or {"prompt": "..."}; all else in them is kept
Writes  --out, the rows with the answers, and why each ended ("finish"); beside it <out>.pilot.json
"""

import json
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanochat import records, report
from nanochat.common import Refused, fingerprint, printable, read_json, write_json
from nanochat.config import settings, start
from nanochat.records import append_line, read_lines
from nanochat.text_files import json_lines

INSTALL = "uv sync --inexact --group interop"


@dataclass(frozen=True)
class Generate:
    prompts: str = ""
    """File of rows to answer."""
    out: str = ""
    """File of answered rows."""
    pilot: int = 0
    """Answer only so many, drawn by a hash of their content; the rest is refused before."""
    base_url: str = "http://127.0.0.1:8000/v1"
    """The teacher's address."""
    model: str = ""
    """Its name there. Default: the first that it lists."""
    key_file: str | None = None
    """File that holds its key. Default: none is needed."""
    system: str = ""
    """What is said before every prompt."""
    temperature: float = 0.7
    top_p: float = 0.9
    max_tokens: int = 1024
    """Longest answer."""
    parallel: int = 16
    """Requests at a time."""
    retries: int = 5
    """Times that a request is tried again."""
    report_dir: str | None = None
    """Folder of records. Default: report/ under the base directory."""

    def __post_init__(self) -> None:
        for name in ("parallel", "max_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")


def main(cfg: Generate) -> None:
    started = time.perf_counter()
    if not (cfg.prompts and cfg.out):
        raise ValueError("--prompts and --out name the files to read and to write")
    out = Path(cfg.out).expanduser()
    note = out.with_name(f"{out.name}.pilot.json")
    if not cfg.pilot and not note.exists():
        raise Refused(
            "nobody has tried what such answers are worth",
            "--pilot=2000 first; train on it, compare, then answer the rest",
        )
    rows = sorted(asked(cfg.prompts), key=lambda row: row["key"])
    todo = rows[: cfg.pilot] if cfg.pilot else rows
    known = {row.get("key") for row in read_lines(out)} if out.exists() else set()
    left = [row for row in todo if row["key"] not in known]
    client, model = connect(cfg)
    there = len(todo) - len(left)
    counted = f"{len(todo):,} prompts: {there:,} are answered, {len(left):,} to go"
    print(f"{counted}, by {printable(model)}")
    if not cfg.pilot and read_json(note)["model"] != model:
        raise Refused(
            f"the pilot was answered by {read_json(note)['model']}, not by {model}",
            "--pilot=2000 for this teacher first, with another --out",
        )
    counts = answer_all(cfg, client, model, left, out)
    answered = there + counts["Answered"]
    if not answered:
        raise Refused(f"none of {len(left):,} prompts was answered", "see the first failure above")
    if cfg.pilot:
        write_json(note, {"answered": answered, "model": model, "settings": settings(cfg)})
    of = fingerprint([row["key"] for row in todo])
    records.write_record(
        f"Generation {out.stem}",
        settings(cfg),
        {"Teacher": model, "Prompts": len(todo), "Answered before": there, **counts},
        records.Provenance(records.new_run_id(), 0, {"before": of}),
        records.Cost(time.perf_counter() - started),
        cfg.report_dir,
    )
    report.update(cfg.report_dir)


def asked(path: str) -> Iterator[dict[str, Any]]:
    """Rows with their prompts as messages and a key of their content."""
    for number, row in json_lines(Path(path).expanduser()):
        if not isinstance(row, dict) or not (row.get("prompt") or row.get("messages")):
            raise ValueError(f'{path}, line {number}: neither "prompt" nor "messages"')
        messages = row.get("messages") or [{"role": "user", "content": row["prompt"]}]
        if messages[-1]["role"] == "assistant":
            messages = messages[:-1]
        yield {**row, "messages": messages, "key": fingerprint(messages)}


def connect(cfg: Generate) -> tuple[Any, str]:
    """A client of the teacher, and the teacher's name."""
    try:
        import openai  # of the group interop: not for those who only want --help
    except ImportError as error:
        raise Refused("the client of OpenAI's API is not installed", INSTALL) from error
    key = Path(cfg.key_file).expanduser().read_text().strip() if cfg.key_file else "none"
    client = openai.OpenAI(base_url=cfg.base_url, api_key=key, max_retries=cfg.retries)
    try:
        return client, cfg.model or client.models.list().data[0].id
    except openai.APIConnectionError as error:
        way_out = "python -m scripts.chat_web serves ours; --base_url names another"
        raise Refused(f"nobody answers at {cfg.base_url}", way_out) from error


def answer_all(
    cfg: Generate, client: Any, model: str, rows: list[dict[str, Any]], out: Path
) -> dict[str, Any]:
    """Answer rows, several at a time, each appended when it is there; what came of them."""
    out.parent.mkdir(parents=True, exist_ok=True)
    guard = threading.Lock()
    tokens = cut = failed = 0

    def answer(row: Mapping[str, Any]) -> tuple[str, int]:
        made, used = ask(cfg, client, model, row)
        with guard:  # here: what is paid for is kept, whatever becomes of the others
            append_line(out, json.dumps(made, ensure_ascii=False))
        return made["finish"], used

    pool = ThreadPoolExecutor(cfg.parallel)
    try:
        waiting = [pool.submit(answer, row) for row in rows]
        for number, future in enumerate(as_completed(waiting), 1):
            try:
                finish, used = future.result()
            except Exception as error:  # one prompt that fails does not cost the others
                failed += 1
                print(f"failed: {type(error).__name__}: {printable(error)}", flush=True)
                continue
            tokens, cut = tokens + used, cut + (finish != "stop")
            if number % 100 == 0:
                print(f"{number:,} of {len(rows):,}", flush=True)
    finally:
        pool.shutdown(cancel_futures=True)  # interrupted: nothing more is asked
    if failed:
        print(f"{failed:,} prompts are not answered; the same command tries them again")
    return {
        "Answered": len(rows) - failed,
        "Failed": failed,
        "Cut off": cut,
        "Tokens written": tokens,
    }


def ask(
    cfg: Generate, client: Any, model: str, row: Mapping[str, Any]
) -> tuple[dict[str, Any], int]:
    """
    A row with the teacher's answer, and how many tokens it wrote. Raises ValueError for an answer
    that says nothing.
    """
    opening = [{"role": "system", "content": cfg.system}] if cfg.system else []
    reply = client.chat.completions.create(
        model=model,
        messages=[*opening, *row["messages"]],
        temperature=cfg.temperature,
        top_p=cfg.top_p,
        max_tokens=cfg.max_tokens,
    )
    choice = reply.choices[0]
    if not (choice.message.content or "").strip():
        raise ValueError(f"an empty answer, ended by {choice.finish_reason!r}")
    said = {"role": "assistant", "content": choice.message.content}
    made = {**row, "messages": [*row["messages"], said], "finish": choice.finish_reason}
    return {**made, "teacher": model}, reply.usage.completion_tokens if reply.usage else 0


if __name__ == "__main__":
    start(main, Generate(), __doc__)
