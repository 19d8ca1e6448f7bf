"""
Write the embedded world to disk: text shards and an evaluation bundle.

    documents, few-shot tasks -> data/<name>/text/*.jsonl, suite/ -> manifest.json, written last

The manifest has the version and the digest of every file. Files from an interrupted call are not
listed and are written again.
"""

import csv
import hashlib
import io
import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from nanochat.common import base_dir, hold_lock, read_json, sha256_file, write_atomic, write_json
from tasks.world import suite
from tasks.world.corpus import WORLD_VERSION, documents

SEED = 0
IDENTITY = {"kind": "embedded", "version": WORLD_VERSION, "seed": SEED}  # determines all texts
VERSION = [WORLD_VERSION, suite.SUITE_VERSION]  # files of another version are rewritten
TRAIN_SHARDS = [f"world_{i:05d}" for i in range(16)]  # 5M tokens at vocabulary size 4,096
VAL_SHARD = "world_val"
SUITE_NAME = "embedded world"


def write(name: str, num_shards: int | None = None) -> Path:
    """
    Write the missing files of data/<name>/: the first `num_shards` training shards (default: all),
    the validation shard and the suite. Rewrites files from other versions. Returns the folder.
    """
    folder = base_dir() / "data" / name
    path = folder / "manifest.json"
    with hold_lock(folder / ".lock", f"writing the dataset {name}"):
        old = read_json(path) if path.exists() else {}
        if old.get("version") != VERSION:
            path.unlink(missing_ok=True)
            for part in ("text", "suite"):
                shutil.rmtree(folder / part, ignore_errors=True)
            old = {"files": {}, "suite": {}}
        files, bundle = dict(old["files"]), dict(old["suite"])
        for shard in [*TRAIN_SHARDS[:num_shards], VAL_SHARD]:
            file = folder / "text" / f"{shard}.jsonl"
            if shard not in files or not file.exists():
                lines = format_json_lines({"text": t} for t in texts(shard))
                files[shard] = write_file(file, lines)
        if not bundle or not all(is_intact(folder / "suite" / f, bundle[f]) for f in bundle):
            for file, text in bundle_files(suite.suite()):
                bundle[file] = write_file(folder / "suite" / file, text)
        new = {
            "version": VERSION,
            "identity": IDENTITY,
            "val_shard": VAL_SHARD,
            "files": files,
            "suite": bundle,
        }
        if new != old:
            write_json(path, new)
    return folder


def is_intact(path: Path, entry: Mapping[str, Any]) -> bool:
    """Whether a file exists with the SHA-256 of its entry in the manifest."""
    return path.exists() and sha256_file(path) == entry["sha256"]


def texts(shard: str) -> Iterator[str]:
    """The documents of a shard, in order."""
    if shard == VAL_SHARD:
        return documents(SEED, 0, "val")
    return documents(SEED, int(shard.removeprefix("world_")), "train")


def write_file(path: Path, text: str) -> dict[str, Any]:
    """Write a file. Returns its entry in the manifest: bytes and SHA-256."""
    data = text.encode()
    write_atomic(path, data)
    return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def format_json_lines(items: Iterable[Mapping[str, Any]]) -> str:
    """One JSON object per line."""
    return "".join(json.dumps(item) + "\n" for item in items)


def bundle_files(tasks: list[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    """Yield (path, contents) of each file of an evaluation bundle in DataComp-LM format."""
    entries, table = [], io.StringIO()
    rows = csv.writer(table)
    rows.writerow(["Eval Task", "#shots", "#datapoints", "Random baseline"])
    for task in tasks:
        file = f"{task['name']}.jsonl"
        yield f"eval_data/{file}", format_json_lines(task["items"])
        baseline = 100 * task["random_baseline"]  # in percent
        rows.writerow([task["name"], task["num_fewshot"], len(task["items"]), baseline])
        entries.append(
            {
                "label": task["name"],
                "dataset_uri": file,
                "num_fewshot": [task["num_fewshot"]],
                "icl_task_type": task["kind"],
                "continuation_delimiter": task["continuation_delimiter"],
            }
        )
    yield "eval_meta_data.csv", table.getvalue()
    yield "core.yaml", yaml.safe_dump({"about": SUITE_NAME, "icl_tasks": entries}, sort_keys=False)
