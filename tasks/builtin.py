"""
Built-in datasets: generated once under the base directory, then read like any other.

    name -> ensure_written -> data/<name>/: text/*.jsonl, suite/ (evaluation bundle), manifest.json
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nanochat.dataset import DataConfig, Source, choose_source, open_source
from tasks.world import write as world

WRITERS = {"embedded": world}  # modules with write(name, num_shards)


def ensure_written(name: str | None, num_shards: int | None = None) -> Path | None:
    """
    Generate the missing or outdated files of a built-in dataset: the first `num_shards` training
    shards (default: all) and all other files. Returns its folder, or None for other names.
    """
    return WRITERS[name].write(name, num_shards) if name in WRITERS else None


def open_text(cfg: DataConfig, recorded: Mapping[str, Any] | None) -> Source:
    """`dataset.open_source`, after writing what is missing of a built-in dataset."""
    wanted = choose_source(cfg, recorded)
    ensure_written(wanted.dataset, wanted.num_shards)
    return open_source(cfg, recorded)


def choose_bundle(suite: str | None, eval_bundle: str | None, dataset: str | None) -> str | None:
    """
    Location of the few-shot tasks: `eval_bundle` if given, else the suite of the built-in dataset
    `suite` (default: the training `dataset`), else None for the published bundle.

    Raises ValueError for an unknown suite, or for `eval_bundle` with a built-in suite.
    """
    if suite not in (None, "dclm", *WRITERS):
        raise ValueError(f"--suite={suite} is unknown; use one of dclm, {', '.join(WRITERS)}")
    if suite is not None and suite != "dclm" and eval_bundle is not None:
        raise ValueError(f"--eval_bundle requires --suite=dclm; --suite={suite} needs no bundle")
    name = suite or dataset if eval_bundle is None else None
    folder = ensure_written(name, num_shards=0)
    return str(folder / "suite") if folder else eval_bundle
