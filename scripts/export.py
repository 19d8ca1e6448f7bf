"""
Write a checkpoint in another project's format.

    python -m scripts.export                            # the last stage's newest checkpoint
    python -m scripts.export --source=base --model_tag=d24 --out=my-model --dtype=bfloat16

Reads   a checkpoint of a stage
Writes  export/<stage>-<tag>/, or the folder of --out: weights, configuration, tokenizer and chat
        template for Hugging Face's AutoModelForCausalLM and AutoTokenizer
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from nanochat.checkpoint import carried, find_checkpoint, load_model, newest_stage
from nanochat.common import base_dir
from nanochat.config import start
from nanochat.hf import is_native, write_hf
from nanochat.machine import MachineConfig, init_machine
from nanochat.tokenizer import Tokenizer


@dataclass(frozen=True)
class Export:
    format: Literal["hf"] = "hf"
    """hf: Hugging Face's. A model of --arch=classic becomes transformers' own NanoChat classes; any
    other brings its code along."""
    source: Literal["base", "mid", "sft", "rl"] | None = None
    """The stage whose model is written. Default: the last that has one."""
    model_tag: str | None = None
    """Folder of the checkpoint. Default: the one written last."""
    step: int | None = None
    """Step of the checkpoint. Default: the last good one."""
    out: str | None = None
    """Folder to write. Default: export/<stage>-<tag> under the base directory."""
    machine: MachineConfig = field(default_factory=lambda: MachineConfig("cpu", "float32"))
    """Its dtype is that of the weights as they are written."""


def main(cfg: Export) -> None:
    machine = init_machine(cfg.machine)
    stage = cfg.source or newest_stage()
    checkpoint = find_checkpoint(stage, cfg.model_tag, cfg.step)
    tag = checkpoint.folder.parent.name
    folder = Path(cfg.out).expanduser() if cfg.out else base_dir() / "export" / f"{stage}-{tag}"
    model = load_model(checkpoint, machine)
    tokenizer = Tokenizer.read(checkpoint.folder / "tokenizer.json")
    origin = {"stage": stage, "step": checkpoint.step, **carried(checkpoint.state)}
    write_hf(folder, model, tokenizer, machine.dtype, origin)
    code = "" if is_native(model.cfg) else ", trust_remote_code=True"
    print(
        f"{checkpoint.folder} -> {folder}: {model.num_params():,} parameters in {machine.dtype}\n"
        f'AutoModelForCausalLM.from_pretrained("{folder}"{code})'
    )
    machine.close()


if __name__ == "__main__":
    start(main, Export(), __doc__)
