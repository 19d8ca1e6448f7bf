"""
Import a Hugging Face model as a checkpoint: one from scripts.export or another NanoChat model.

    python -m scripts.import_hf --hf_path=my-model --model_tag=imported
    python -m scripts.import_hf --hf_path=downloaded --stage=sft     # to chat with it

Reads   a folder with config.json, tokenizer.json and *.safetensors
Writes  <stage>_checkpoints/<tag>/, without optimizer state
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanochat.checkpoint import Stage, lineage, save_checkpoint, stage_folder
from nanochat.common import UsageError, printable, require_name, try_lock
from nanochat.config import start
from nanochat.hf.export import HFModel, read_hf
from nanochat.recursion.model import new_model

BATCH_TOKENS = 524_288  # per training step; used if the pretraining batch size is unknown


@dataclass(frozen=True)
class ImportHF:
    hf_path: str = ""
    """Folder of the model."""
    stage: Stage | None = None
    """Stage of the imported checkpoint. Default: the stage it was exported from, else base."""
    model_tag: str = "imported"
    """Folder name of the checkpoint."""


def main(cfg: ImportHF) -> None:
    if not cfg.hf_path:
        raise ValueError("no model given; use --hf_path=<folder>")
    found = read_hf(Path(cfg.hf_path).expanduser())
    model = new_model(found.cfg)
    model.load_state_dict(found.weights)
    origin = found.origin or default_origin(found)
    stage = cfg.stage or origin["stage"]
    folder = stage_folder(stage) / require_name("model_tag", cfg.model_tag)
    state = {"stage": stage, **lineage(origin)}
    with try_lock(folder.parent / f".{folder.name}.lock") as is_free:  # the lock of a training run
        if not is_free or folder.exists() and any(folder.iterdir()):
            why = "already has checkpoints" if is_free else "is used by another run"
            raise UsageError(f"{folder} {why}", "choose another --model_tag")
        saved = save_checkpoint(folder, origin["step"], model, None, found.tokenizer, state)
    print(printable(f"{cfg.hf_path} -> {saved.folder}: {model.num_params():,} parameters"))


def default_origin(found: HFModel) -> Mapping[str, Any]:
    """Checkpoint state for a model that was trained with other software."""
    inputs = {"tokenizer": found.tokenizer.fingerprint}
    provenance = {"seed": 0, "inputs": inputs}
    started = {"stage": "base", "step": 0, "source": {}, "batch_tokens": BATCH_TOKENS}
    return {**started, "provenance": provenance}


if __name__ == "__main__":
    start(main, ImportHF(), __doc__)
