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


def choose_bundle(suite: str | None, eval_bundle: str | None, dataset: str | None) -> str | None:
    """
    Location of the few-shot tasks: `eval_bundle` if given, else the suite of the built-in dataset
    if that is `suite` (default: the training `dataset`), else None for the published bundle.

    Raises ValueError for an unknown suite, or for `eval_bundle` with the built-in suite.
    """
    if suite not in (None, "dclm", EMBEDDED):
        raise ValueError(f"--suite={suite} is unknown; use dclm or {EMBEDDED}")
    if suite == EMBEDDED and eval_bundle is not None:
        raise ValueError(f"--eval_bundle requires --suite=dclm; --suite={suite} needs no bundle")
    if eval_bundle is None and (suite or dataset) == EMBEDDED:
        return str(write(num_shards=0) / "suite")
    return eval_bundle
