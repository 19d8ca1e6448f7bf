"""
Export a checkpoint to the Hugging Face format or to a compressed golf artifact.

    python -m scripts.export                            # newest checkpoint of the last stage
    python -m scripts.export -i base -g d24 --out=my-model --dtype=bfloat16
    python -m scripts.export -i base --format=artifact --limit_bytes=16000000

Reads   a checkpoint from any stage
Writes  export/<stage>-<tag>/ or --out: weights, configuration, tokenizer and chat template for
        AutoModelForCausalLM and AutoTokenizer; as an artifact, the file
        export/<stage>-<tag>.golf, which scripts.golf.evaluate scores
"""

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Literal

from nanochat.checkpoint import Checkpoint, CheckpointChoice, lineage, load_model
from nanochat.common import UsageError, base_dir, write_atomic
from nanochat.config import start
from nanochat.dist import DistConfig, init_dist
from nanochat.golf.artifact import MAGIC, quantize_tensors
from nanochat.golf.model import GolfGPT
from nanochat.golf.quantize import QuantConfig
from nanochat.golf.size import choose_smallest, format_sizes, require_size_limit
from nanochat.gpt import GPT
from nanochat.hf.export import check_logits, is_native, require_model_code, write_hf
from nanochat.tokenizer import Tokenizer


@dataclass(frozen=True)
class Export(CheckpointChoice):
    format: Literal["hf", "artifact"] = "hf"
    """hf: Hugging Face format; --arch=classic models use transformers' NanoChat classes, others
    include their code. artifact: one compressed file, rejected above limit_bytes."""
    out: str | None = None
    """Output folder or file. Default: export/<stage>-<tag> under the base directory."""
    quantize: str | None = None
    """artifact: quantization format of each matrix, as in embed.*=int8,*=int6. Default: as trained,
    else *=int8."""
    limit_bytes: int = 16_000_000
    """artifact: maximum size of file and code together, in bytes."""
    dist: DistConfig = field(default_factory=lambda: DistConfig("cpu", "float32"))
    """Its dtype is also used for the exported weights."""


def main(cfg: Export) -> None:
    dist = init_dist(cfg.dist, steady=False)
    stage, checkpoint = cfg.find()
    tokenizer = checkpoint.tokenizer()
    name = f"{stage}-{checkpoint.folder.parent.name}" + ".golf" * (cfg.format == "artifact")
    out = Path(cfg.out).expanduser() if cfg.out else base_dir() / "export" / name
    model = load_model(checkpoint, dist)
    if cfg.format == "artifact" and type(model) not in (GPT, GolfGPT):
        raise UsageError("an artifact holds a plain or a golf model", "use --format=hf")
    if cfg.format == "artifact":
        write_artifact(cfg, model, tokenizer, checkpoint, out)
        what = f"an artifact of {out.stat().st_size:,} bytes"
    else:
        origin = {"stage": stage, "step": checkpoint.step, **lineage(checkpoint.state)}
        require_model_code(str(checkpoint.folder), checkpoint.state.get("code", {}))
        write_hf(out, model, tokenizer, dist.dtype, origin)
        if not check_logits(out):
            print("not compared with our logits, which needs transformers", flush=True)
        code = "" if is_native(model) else ", trust_remote_code=True"
        what = f'{dist.dtype}\nAutoModelForCausalLM.from_pretrained("{out}"{code})'
    print(f"{checkpoint.folder} -> {out}: {model.num_params():,} parameters in {what}")
    dist.close()


def write_artifact(
    cfg: Export, model: GPT, tokenizer: Tokenizer, checkpoint: Checkpoint, path: Path
) -> None:
    """Print the table of sizes and write the artifact. Raises UsageError if it is too large."""
    if path.is_dir():
        raise ValueError(f"--out={path} is a folder; an artifact is one file, so pass its name")
    if path.exists():
        with path.open("rb") as file:
            if file.read(len(MAGIC)) != MAGIC:
                raise ValueError(f"--out={path} is another file, not an artifact; pass a new name")
    trained = checkpoint.state.get("settings", {})
    formats = {f.name: trained[f.name] for f in fields(QuantConfig) if f.name in trained}
    if cfg.quantize:
        formats["quantize"] = cfg.quantize
    origin = {
        "stage": checkpoint.state["stage"],
        "tag": checkpoint.folder.parent.name,
        "step": checkpoint.step,
        "checkpoint": checkpoint.fingerprint,
        "seed": checkpoint.state["provenance"]["seed"],
    }
    stored = quantize_tensors(model.state_dict(), QuantConfig(**formats))
    written = choose_smallest(stored, model.cfg, tokenizer, origin)
    print(format_sizes(written, cfg.limit_bytes), flush=True)
    require_size_limit(written, cfg.limit_bytes)
    write_atomic(path, written.data)


if __name__ == "__main__":
    start(main, Export(), __doc__)
