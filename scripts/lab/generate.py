"""
Generate answers to prompts with a teacher behind any OpenAI-compatible API.

    python -m scripts.chat_web &                                         # our own model as teacher
    python -m scripts.lab.generate --prompts=prompts.jsonl --out=made.jsonl --pilot=2000
    python -m scripts.lab.generate --prompts=prompts.jsonl --out=made.jsonl    # then the rest

A pilot is required: train on its rows and compare (scripts.lab.filter, scripts.lab.sweep) before
paying for the rest. If interrupted, rerun the same command: finished answers are kept.

Reads   a file of rows {"messages": [...]}, {"prompt": "..."} or [messages]; other fields are kept
Writes  --out, the rows with answers and finish reasons ("finish"), or with --as_prompt new prompts;
        <out>.pilot next to it, and the section "Generation <name of the file>"
"""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanochat import records, report
from nanochat.common import UsageError, fingerprint, printable
from nanochat.config import require_at_least, start
from nanochat.records import append_line, read_lines
from scripts.lab.filter import read_rows
from tasks.base import answer_text, assistant, user


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
    key_file: str = ""
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

    def __post_init__(self) -> None:
        require_at_least(self, parallel=1, max_tokens=1)


def main(cfg: Generate) -> None:
    if not (cfg.prompts and cfg.out):
        raise ValueError("--prompts and --out are required")
    records.require_writable()
    out = Path(cfg.out).expanduser()
    pilot = out.with_name(f"{out.name}.pilot")
    if not cfg.pilot and not pilot.exists():
        fix = "run with --pilot=2000 first, train on it and compare, then answer the rest"
        raise UsageError("no pilot found: the value of these answers is unknown", fix)
    rows = {fingerprint(row): row for row in read_rows(cfg.prompts)}
    keys = sorted(rows)[: cfg.pilot or None]
    if not keys:
        raise ValueError(f"{cfg.prompts} has no prompts")
    known = {row.get("key") for row in read_lines(out)}
    todo = [{**rows[key], "key": key} for key in keys if key not in known]
    client, model = connect(cfg)
    print(f"{len(keys):,} prompts, {len(todo):,} to go, teacher {printable(model)}", flush=True)

    out.parent.mkdir(parents=True, exist_ok=True)
    counts = {"Answered": len(keys) - len(todo), "Failed": 0}
    pool = ThreadPoolExecutor(cfg.parallel)
    try:
        for future in as_completed([pool.submit(answer, cfg, client, model, row) for row in todo]):
            if error := future.exception():  # one failed prompt does not stop the others
                counts["Failed"] += 1
                print(f"failed: {type(error).__name__}: {printable(error)}", flush=True)
                continue
            append_line(out, future.result())  # at once: answers cost money
            counts["Answered"] += 1
    finally:
        pool.shutdown(cancel_futures=True)  # on interrupt, cancel the rest
    if (failed := counts["Failed"]) > len(keys) / 2:
        raise UsageError(f"{failed:,} of {len(keys):,} prompts failed", "see the first one above")
    pilot.touch()
    values = {"Teacher": model, "Prompts": len(keys), **counts}
    inputs = {"before": fingerprint(keys)}
    report.append_section(f"Generation {out.stem}", cfg, values, inputs)


def connect(cfg: Generate) -> tuple[Any, str]:
    """Return an API client and the teacher's model name."""
    try:
        import openai  # from the interop group; not needed for --help
    except ImportError as error:
        fix = "uv sync --inexact --group interop"
        raise UsageError("the openai package is not installed", fix) from error
    key = Path(cfg.key_file).expanduser().read_text().strip() if cfg.key_file else "none"
    client = openai.OpenAI(base_url=cfg.base_url, api_key=key, max_retries=5)
    try:
        return client, cfg.model or next(iter(client.models.list())).id
    except (openai.OpenAIError, StopIteration) as error:
        fix = "serve our model with python -m scripts.chat_web, or set --base_url and --key_file"
        raise UsageError(f"no model from a server at {cfg.base_url}: {error}", fix) from error


def answer(cfg: Generate, client: Any, model: str, row: Mapping[str, Any]) -> dict[str, Any]:
    """A row with the teacher's answer. Raises ValueError for an empty answer or cut-off prompt."""
    messages = row.get("messages") or [user(row["prompt"])]
    if messages[-1]["role"] == "assistant":  # an earlier answer
        messages = messages[:-1]
    opening = [{"role": "system", "content": cfg.system}] if cfg.system else []
    reply = client.chat.completions.create(
        model=model,
        messages=[*opening, *messages],
        temperature=cfg.temperature,
        top_p=cfg.top_p,
        max_tokens=cfg.max_tokens,
    )
    text, finish = reply.choices[0].message.content, reply.choices[0].finish_reason
    if not (text or "").strip():
        raise ValueError(f"empty answer, finish reason {finish!r}")
    made = {**row, "messages": [*messages, assistant(text)], "finish": finish, "teacher": model}
    if cfg.as_prompt:
        if finish != "stop":
            raise ValueError(f"incomplete prompt, finish reason {finish!r}")
        made |= {"prompt": text, "original": answer_text(messages[-1])}
        del made["messages"]
    return made


if __name__ == "__main__":
    start(main, Generate(), __doc__)
