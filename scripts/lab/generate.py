"""
Generate answers to prompts with a teacher behind any OpenAI-compatible API.

    python -m scripts.chat_web &                                         # our own model as teacher
    python -m scripts.lab.generate --prompts=prompts.jsonl --out=made.jsonl --pilot=2000
    python -m scripts.lab.generate --prompts=prompts.jsonl --out=made.jsonl    # then the rest

A pilot is required: train on its rows and compare (scripts.lab.filter, scripts.lab.sweep) before
paying for the rest. If interrupted, rerun the same command: finished answers are kept.

Reads   a file of rows {"messages": [...]} or {"prompt": "..."}; other fields are kept
Writes  --out, the rows with answers and finish reasons ("finish"), or with --as_prompt new prompts;
        <out>.pilot.json next to it, and the section "Generation <name of the file>"
"""

import json
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanochat import records, report
from nanochat.chat_format import merge_turns
from nanochat.common import UsageError, fingerprint, printable, read_json, write_json
from nanochat.config import require_at_least, settings, start
from nanochat.dataset import read_json_lines
from nanochat.records import append_line, read_lines

INSTALL = "uv sync --inexact --group interop"
SERVE = "serve our model with python -m scripts.chat_web, or set --base_url and --key_file"


@dataclass(frozen=True)
class Generate:
    prompts: str = ""
    """JSONL file of prompts."""
    out: str = ""
    """Output JSONL file: the rows with answers."""
    pilot: int = 0
    """Answer only N prompts, chosen by hash; required before the full run. 0 = all."""
    base_url: str = "http://127.0.0.1:8000/v1"
    """API address of the teacher."""
    model: str = ""
    """Model name of the teacher. Default: the first one the server lists."""
    key_file: str | None = None
    """File with the API key. Default: no key."""
    system: str = ""
    """System message before every prompt. Default: none."""
    as_prompt: bool = False
    """Write each answer as the prompt of a new row that keeps the old prompt as `original`; this
    translates prompts if a --system message asks for it. Only the last message of a prompt is
    kept."""
    temperature: float = 0.7
    top_p: float = 0.9
    max_tokens: int = 1024
    """Maximum number of tokens per answer."""
    parallel: int = 16
    """Number of concurrent requests."""
    report_dir: str | None = None
    """Folder of records. Default: report/ under the base directory."""

    def __post_init__(self) -> None:
        require_at_least(self, parallel=1, max_tokens=1)


def main(cfg: Generate) -> None:
    if not (cfg.prompts and cfg.out):
        raise ValueError("--prompts and --out are required")
    out = Path(cfg.out).expanduser()
    note = out.with_name(f"{out.name}.pilot.json")
    if not cfg.pilot and not note.exists():
        fix = "run with --pilot=2000 first, train on it and compare, then answer the rest"
        raise UsageError("no pilot found: the value of these answers is unknown", fix)
    todo = sorted(load_prompts(cfg.prompts), key=lambda row: row["key"])[: cfg.pilot or None]
    known = Counter(row.get("key") for row in read_lines(out)) if out.exists() else Counter()
    rows = {row["key"]: row for row in todo}
    left = [rows[key] for key in (Counter(row["key"] for row in todo) - known).elements()]
    num_known = len(todo) - len(left)
    client, model = connect(cfg)
    print(f"{len(todo):,} prompts: {num_known:,} answered, {len(left):,} to go, ", end="")
    print(f"teacher {printable(model)}")
    if not cfg.pilot and (teacher := read_json(note)["model"]) != model:
        fix = "first run --pilot=2000 with this teacher and a new --out"
        raise UsageError(f"the pilot used teacher {teacher}, not {model}", fix)
    counts = answer_all(cfg, client, model, left, out)
    answered = num_known + counts["Answered"]
    if not answered:
        raise UsageError(f"all {len(left):,} prompts failed", "see the first failure above")
    if cfg.pilot:
        write_json(note, {"answered": answered, "model": model, "settings": settings(cfg)})
    values = {"Teacher": model, "Prompts": len(todo), "Answered before": num_known, **counts}
    inputs = {"before": fingerprint([row["key"] for row in todo])}
    provenance = records.Provenance(records.new_run_id(), 0, inputs)
    report.append_section(f"Generation {out.stem}", cfg, values, provenance)


def load_prompts(path: str) -> Iterator[dict[str, Any]]:
    """Yield rows with the prompt as messages, and a key hashed from the row."""
    for number, row in read_json_lines(Path(path).expanduser()):
        if not isinstance(row, dict) or not (row.get("prompt") or row.get("messages")):
            raise ValueError(f'{path}, line {number}: neither "prompt" nor "messages"')
        messages = row.get("messages") or [{"role": "user", "content": row["prompt"]}]
        try:
            merge_turns(messages)
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
        messages = messages[:-1] if messages[-1]["role"] == "assistant" else messages
        if not messages:
            raise ValueError(f"{path}, line {number}: no prompt before the answer")
        row = {**row, "messages": messages}
        yield {**row, "key": fingerprint(row)}


def connect(cfg: Generate) -> tuple[Any, str]:
    """Return an API client and the teacher's model name."""
    try:
        import openai  # from the interop group; not needed for --help
    except ImportError as error:
        raise UsageError("the openai package is not installed", INSTALL) from error
    key = Path(cfg.key_file).expanduser().read_text().strip() if cfg.key_file else "none"
    client = openai.OpenAI(base_url=cfg.base_url, api_key=key, max_retries=5)
    try:
        names = [cfg.model] if cfg.model else [model.id for model in client.models.list()]
    except openai.OpenAIError as error:
        raise UsageError(f"no model from a server at {cfg.base_url}: {error}", SERVE) from error
    if not names:
        raise UsageError(f"the server at {cfg.base_url} has no model", SERVE)
    return client, names[0]


def answer_all(
    cfg: Generate, client: Any, model: str, rows: list[dict[str, Any]], out: Path
) -> dict[str, int]:
    """Answer rows concurrently and append each to `out`; return counts for the record."""
    out.parent.mkdir(parents=True, exist_ok=True)
    lock = threading.Lock()
    opening = [{"role": "system", "content": cfg.system}] if cfg.system else []
    counts = {"Answered": 0, "Failed": 0, "Cut off": 0, "Tokens written": 0}

    def answer(row: Mapping[str, Any]) -> None:
        reply = client.chat.completions.create(
            model=model,
            messages=[*opening, *row["messages"]],
            temperature=cfg.temperature,
            top_p=cfg.top_p,
            max_tokens=cfg.max_tokens,
        )
        text, finish = reply.choices[0].message.content, reply.choices[0].finish_reason
        if not (text or "").strip():
            raise ValueError(f"empty answer, finish reason {finish!r}")
        if cfg.as_prompt and finish != "stop":
            raise ValueError(f"incomplete prompt, finish reason {finish!r}")
        if cfg.as_prompt:
            made = {**row, "prompt": text, "original": row["messages"][-1]["content"]}
            del made["messages"]
        else:
            made = {**row, "messages": [*row["messages"], {"role": "assistant", "content": text}]}
        made |= {"finish": finish, "teacher": model}
        with lock:  # append immediately: answers cost money
            append_line(out, json.dumps(made, ensure_ascii=False))
            counts["Answered"] += 1
            counts["Cut off"] += finish != "stop"
            counts["Tokens written"] += reply.usage.completion_tokens if reply.usage else 0

    pool = ThreadPoolExecutor(cfg.parallel)
    try:
        waiting = [pool.submit(answer, row) for row in rows]
        for number, future in enumerate(as_completed(waiting), 1):
            try:
                future.result()
            except Exception as error:  # one failed prompt does not stop the others
                counts["Failed"] += 1
                print(f"failed: {type(error).__name__}: {printable(error)}", flush=True)
            if number % 100 == 0:
                print(f"{number:,} of {len(rows):,}", flush=True)
    finally:
        pool.shutdown(cancel_futures=True)  # on interrupt, cancel the rest
    if counts["Failed"]:
        print(f"{counts['Failed']:,} prompts failed; rerun the same command to retry them")
    return counts


if __name__ == "__main__":
    start(main, Generate(), __doc__)
