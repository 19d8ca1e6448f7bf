"""
The built-in dataset: generated once under the base directory, then read like any other.

    embedded -> write -> data/embedded/: text/*.jsonl, suite/ (evaluation bundle), manifest.json
"""

from collections.abc import Mapping
from typing import Any

from nanochat.dataset import DataConfig, Source, choose_source, open_source
from tasks.world.write import EMBEDDED, write


def open_text(cfg: DataConfig, recorded: Mapping[str, Any] | None) -> Source:
    """`dataset.open_source`, after writing what is missing of the built-in dataset."""
    wanted = choose_source(cfg, recorded)
    if wanted.dataset == EMBEDDED:
        write(wanted.num_shards)
    return open_source(cfg, recorded)


def builtin_suite(dataset: str | None) -> str | None:
    """Location of the few-shot tasks of the built-in dataset; None for another one."""
    return str(write(num_shards=0) / "suite") if dataset == EMBEDDED else None
