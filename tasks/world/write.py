"""
The built-in dataset: text shards and an evaluation bundle, written once, then read like any other.

    documents, few-shot tasks -> data/embedded/text/*.jsonl, suite/ -> manifest.json, written last

The manifest has the identity and the digest of every file. Files from an interrupted call are not
listed and are written again.
"""

import copy
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from nanochat import dataset
from nanochat.common import base_dir, hold_lock, read_json, sha256_file, write_atomic, write_json
from nanochat.dataset import DataConfig, Text, choose_source, split_mixture
from tasks.world.corpus import WORLD_VERSION, documents
from tasks.world.facts import DIGEST
from tasks.world.suite import SUITE_VERSION, suite

EMBEDDED = "embedded"  # name of the dataset
# What determines the files; those of another identity are rewritten
IDENTITY = {"kind": EMBEDDED, "version": [WORLD_VERSION, SUITE_VERSION], "data": DIGEST}
TRAIN_SHARDS = [f"world_{i:05d}" for i in range(16)]  # 5M tokens at vocabulary size 4,096
VAL_SHARD = "world_val"


def write(num_shards: int | None = None) -> Path:
    """
    Write the missing files of data/embedded/: the first `num_shards` training shards (default:
    all), the validation shard and the suite. Rewrites files of another identity. Returns the
    folder.
    """
    folder = base_dir() / "data" / EMBEDDED
    path = folder / "manifest.json"
    with hold_lock(folder / ".lock", f"writing the dataset {EMBEDDED}"):
        before = read_json(path) if path.exists() else {}
        manifest = copy.deepcopy(before)
        if manifest.get("identity") != IDENTITY:
            manifest = {"identity": IDENTITY, "val_shard": VAL_SHARD}
        files, bundle = manifest.setdefault("files", {}), manifest.setdefault("suite", {})
        for i, shard in [*enumerate(TRAIN_SHARDS[:num_shards]), (0, VAL_SHARD)]:
            file = folder / "text" / f"{shard}.jsonl"
            if shard not in files or not file.exists():
                texts = documents(i, "val" if shard == VAL_SHARD else "train")
                files[shard] = write_file(file, format_json_lines({"text": t} for t in texts))
        known = {folder / "suite" / file: bundle[file]["sha256"] for file in bundle}
        if not known or any(not p.exists() or sha256_file(p) != known[p] for p in known):
            for file, text in bundle_files():
                bundle[file] = write_file(folder / "suite" / file, text)
        if manifest != before:  # the folder may be read-only
            write_json(path, manifest)
    return folder


def write_file(path: Path, text: str) -> dict[str, Any]:
    """Write a file. Returns its entry in the manifest: bytes and SHA-256."""
    write_atomic(path, text)
    return {"bytes": path.stat().st_size, "sha256": sha256_file(path)}


def format_json_lines(items: Iterable[dict[str, Any]]) -> str:
    """One JSON object per line."""
    return "".join(json.dumps(item) + "\n" for item in items)


def bundle_files() -> Iterator[tuple[str, str]]:
    """Yield (path, contents) of each file of an evaluation bundle in DataComp-LM format."""
    entries, rows = [], ["Eval Task,#shots,#datapoints,Random baseline"]
    for task in suite():
        name, shots, items = task["name"], task["num_fewshot"], task["items"]
        yield f"eval_data/{name}.jsonl", format_json_lines(items)
        rows.append(f"{name},{shots},{len(items)},{100 * task['random_baseline']}")  # in percent
        entries.append(
            {
                "label": name,
                "dataset_uri": f"{name}.jsonl",
                "num_fewshot": [shots],
                "icl_task_type": task["kind"],
                "continuation_delimiter": task["continuation_delimiter"],
            }
        )
    yield "eval_meta_data.csv", "".join(f"{row}\r\n" for row in rows)
    core = {"about": "embedded world", "icl_tasks": entries}
    yield "core.yaml", yaml.safe_dump(core, sort_keys=False)


# ---- The dataset as any other --------------------------------------------------------------------


def open_text(cfg: DataConfig, recorded: Mapping[str, Any] | None) -> Text:
    """`dataset.open_text`, after writing what is missing of the built-in dataset."""
    wanted = choose_source(cfg, recorded)
    if EMBEDDED in split_mixture(wanted.dataset or ""):
        write(wanted.num_shards)
    return dataset.open_text(cfg, recorded)


def builtin_suite(name: str | None) -> str | None:
    """Location of the few-shot tasks of the built-in dataset; None for another one."""
    return str(write(num_shards=0) / "suite") if name == EMBEDDED else None
