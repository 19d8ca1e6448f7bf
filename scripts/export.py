"""
Write a checkpoint in another project's format.

    python -m scripts.export                            # the last stage's newest checkpoint
    python -m scripts.export -i base -g d24 --out=my-model --dtype=bfloat16
    python -m scripts.export -i base --format=artifact --limit_bytes=16000000

Reads   a checkpoint of a stage
Writes  export/<stage>-<tag>/, or the folder of --out: weights, configuration, tokenizer and chat
        template for Hugging Face's AutoModelForCausalLM and AutoTokenizer; as an artifact the one
        file export/<stage>-<tag>.golf, which scripts.golf.evaluate scores
"""

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Literal

from nanochat.checkpoint import Checkpoint, find_checkpoint, lineage, load_model, newest_stage
from nanochat.common import base_dir, write_atomic
from nanochat.config import short, start
from nanochat.distributed import DistConfig, init_distributed
from nanochat.golf.artifact import Compressor, Container, store
from nanochat.golf.quantize import Clip, QuantConfig
from nanochat.golf.size import describe, require_within, smallest
from nanochat.gpt import GPT
from nanochat.hf.export import is_native, write_hf
from nanochat.tokenizer import Tokenizer


@dataclass(frozen=True)
class Export:
    format: Literal["hf", "artifact"] = "hf"
    """hf: Hugging Face's. A model of --arch=classic becomes transformers' own NanoChat classes; any
    other brings its code along. artifact: one file, as small as can be, refused above a limit."""
    source: Literal["base", "mid", "sft", "rl"] | None = short("i", None)
    """The stage whose model is written. Default: the last that has one."""
    model_tag: str | None = short("g", None)
    """Folder of the checkpoint. Default: the one written last."""
    step: int | None = short("s", None)
    """Step of the checkpoint. Default: the last good one."""
    out: str | None = None
    """Folder or file to write. Default: export/<stage>-<tag> under the base directory."""
    quantize: str | None = None
    """Of an artifact: the format of each matrix, as in embed.*=int8,*=int6. Default: what the model
    was trained for, else *=int8."""
    row_clip: Clip | None = None
    """Of an artifact: how far the grid of a row reaches (see base_train). Default: as trained."""
    row_clip_std: float | None = None
    """Of an artifact: standard deviations that --row_clip=std keeps. Default: as trained."""
    container: Container | None = None
    """Of an artifact: levels in a byte each, or packed to their bits. Default: the smaller file."""
    compressor: Compressor | None = None
    """Of an artifact: what compresses it. Default: the smallest file."""
    limit_bytes: int = 16_000_000
    """Of an artifact: the most that file and code may take together."""
    count_code: bool = True
    """Of an artifact: whether the code that scores it counts towards the limit."""
    machine: DistConfig = field(default_factory=lambda: DistConfig("cpu", "float32"))
    """Its dtype is that of the weights as they are written."""


def main(cfg: Export) -> None:
    machine = init_distributed(cfg.machine, steady=False)
    stage = cfg.source or newest_stage()
    checkpoint = find_checkpoint(stage, cfg.model_tag, cfg.step)
    tokenizer = Tokenizer.read(checkpoint.folder / "tokenizer.json")
    name = f"{stage}-{checkpoint.folder.parent.name}" + ".golf" * (cfg.format == "artifact")
    out = Path(cfg.out).expanduser() if cfg.out else base_dir() / "export" / name
    model = load_model(checkpoint, machine)
    if cfg.format == "artifact":
        write_artifact(cfg, model, tokenizer, checkpoint, out)
        what = f"an artifact, {out.stat().st_size:,} bytes"
    else:
        origin = {"stage": stage, "step": checkpoint.step, **lineage(checkpoint.state)}
        write_hf(out, model, tokenizer, machine.dtype, origin)
        code = "" if is_native(model.cfg) else ", trust_remote_code=True"
        what = f'{machine.dtype}\nAutoModelForCausalLM.from_pretrained("{out}"{code})'
    print(f"{checkpoint.folder} -> {out}: {model.num_params():,} parameters in {what}")
    machine.close()


def write_artifact(
    cfg: Export, model: GPT, tokenizer: Tokenizer, checkpoint: Checkpoint, path: Path
) -> None:
    """One file, or UsageError; the table of what everything costs in any case."""
    if path.is_dir():
        raise ValueError(f"--out={path} is a folder; an artifact is one file")
    trained = checkpoint.state.get("settings", {})
    asked = {f.name: getattr(cfg, f.name) or trained.get(f.name) for f in fields(QuantConfig)}
    quant = QuantConfig(**{name: value for name, value in asked.items() if value is not None})
    provenance = checkpoint.state["provenance"]
    origin = {
        "stage": checkpoint.state["stage"],
        "tag": checkpoint.folder.parent.name,
        "step": checkpoint.step,
        "checkpoint": checkpoint.fingerprint,
        **{name: provenance[name] for name in ("run_id", "seed")},
    }
    stored = store(model.state_dict(), quant)
    written = smallest(stored, model.cfg, tokenizer, origin, cfg.container, cfg.compressor)
    print(describe(written, cfg.limit_bytes, cfg.count_code), flush=True)
    require_within(written, cfg.limit_bytes, cfg.count_code)
    write_atomic(path, written.data)


if __name__ == "__main__":
    start(main, Export(), __doc__)
