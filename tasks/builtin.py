"""
Built-in data sets: written once below the base directory, then data sets like any other.

    name -> ensure_written -> data/<name>/: text/*.jsonl, suite/ (evaluation bundle), manifest.json
"""

from pathlib import Path

from tasks.world import write as world

WRITERS = {"embedded": world}  # a module that has write(folder, num_shards)


def ensure_written(name: str | None, num_shards: int | None = None) -> Path | None:
    """
    The folder of a built-in data set, its files written where they are missing or of another
    version: of the training shards the first `num_shards`, by default all. None for other names.
    """
    return WRITERS[name].write(name, num_shards) if name in WRITERS else None


def choose_bundle(suite: str | None, eval_bundle: str | None, dataset: str | None) -> str | None:
    """
    Where the few-shot tasks are: the suite of the built-in data set that `suite` names, by default
    the `dataset` that the model was trained on; else `eval_bundle`, None for the published one.

    Raises ValueError for an unknown suite, and for a bundle given with a built-in suite.
    """
    if suite not in (None, "dclm", *WRITERS):
        raise ValueError(f"--suite={suite} is unknown; use one of dclm, {', '.join(WRITERS)}")
    if suite is not None and suite != "dclm" and eval_bundle is not None:
        raise ValueError(f"--eval_bundle is for --suite=dclm; the suite {suite} needs no files")
    name = suite or dataset if eval_bundle is None else None
    folder = ensure_written(name, num_shards=0)
    return str(folder / "suite") if folder else eval_bundle
