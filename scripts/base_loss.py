"""
Evaluate a base model: bits per byte on training and validation text, and seven samples.

    python -m scripts.base_loss                                    # newest checkpoint
    torchrun --nproc_per_node=8 -m scripts.base_loss -- --model_tag=d24

Reads   base_checkpoints/<tag>/ and the text it was trained on (see its state.json)
Writes  the section "Base model loss"
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

import numpy as np

from nanochat import records, report
from nanochat.checkpoint import CHANGED, Checkpoint, changed_model_code, find_checkpoint, load_model
from nanochat.config import require_at_least, short, start
from nanochat.dataset import DataConfig
from nanochat.dist import DistConfig, DistContext, init_dist
from nanochat.eval_bpb import Bpb, bits_per_byte, document_bpb, generate_samples, row_batches
from nanochat.recipe import make_recipe
from nanochat.rows import Rows, open_rows, pack_text
from nanochat.run import skip_if_finished
from nanochat.train import Compile, prepare_scoring
from tasks.world.write import open_text

SECTION = "Base model loss"
CHARS_PER_TOKEN = 3  # rough, to estimate the work
GPU_ROWS = 32  # packed sequences ("rows") per forward pass on a GPU


@dataclass(frozen=True)
class BaseLoss:
    NOT_IN_RECIPE: ClassVar[str] = "device_batch_size model_tag model_step skip_if_done compile"

    device_batch_size: int | None = None
    """Rows per forward pass on each device; does not change the result. Default: automatic."""
    split_tokens: int | None = None
    """Maximum number of training tokens, and of validation tokens, to score. Default: 10,485,760;
    on CPU 262,144."""
    max_documents: int | None = None
    """Maximum number of validation documents for the document bpb. Default: all."""
    model_tag: Annotated[str | None, short("g")] = None
    """Folder under base_checkpoints/. Default: the newest."""
    model_step: Annotated[int | None, short("s")] = None
    """Step of the checkpoint. Default: the latest intact one."""
    skip_if_done: bool = False
    """Do nothing if this checkpoint was already evaluated with these settings."""
    data: DataConfig = field(default_factory=DataConfig)
    dist: DistConfig = field(default_factory=DistConfig)
    compile: Compile = "auto"
    """torch.compile. auto: on GPUs and in long runs on a CPU. autotune: times several kernels."""

    def __post_init__(self) -> None:
        require_at_least(self, device_batch_size=1, split_tokens=1, max_documents=1)


def main(cfg: BaseLoss) -> None:
    dist, commits = init_dist(cfg.dist), [records.git_state()["Commit"]]
    checkpoint = dist.on_main(lambda: find_checkpoint("base", cfg.model_tag, cfg.model_step))
    dist = dist.keep_dtype(cfg.dist, checkpoint.state.get("compute"))
    text = open_text(cfg.data, checkpoint.state["source"])
    origin = checkpoint.state["provenance"]
    inputs = {**origin["inputs"], "base": checkpoint.fingerprint}
    inputs["data"] = text.fingerprint
    if skip_if_finished(SECTION, make_recipe(cfg, inputs), cfg.skip_if_done, dist):
        return dist.close()

    # Model and text
    tokenizer = checkpoint.tokenizer()
    model = load_model(checkpoint, dist)
    documents = list(text.val_texts(cfg.max_documents))
    T = model.cfg.max_seq_len
    rows = open_rows(text, tokenizer, T)
    on_cpu = dist.device.type == "cpu"
    split_tokens = cfg.split_tokens or (262_144 if on_cpu else 20 * 524_288)
    chars = sum(map(len, documents))
    tokens = 2 * split_tokens + int(chars / CHARS_PER_TOKEN)
    default = prepare_scoring(cfg.compile, model, tokens, GPU_ROWS, dist)
    step_rows = cfg.device_batch_size or default

    dist.print0(f"scoring {len(documents):,} documents, and rows of {2 * split_tokens:,} tokens")

    # bpb on packed rows: those trained on first, and held-out text
    num_rows, seed = max(1, split_tokens // T), origin["seed"]
    trained = 0 if cfg.data.dataset else count_trained_rows(checkpoint)
    most = min(num_rows, trained or num_rows)
    lengths = checkpoint.state.get("lengths", [trained]) if trained else [most]  # for their order
    rows = dist.on_main(lambda: pack_text(rows, text, tokenizer, lengths))

    def packed_bpb(batches: Iterator[np.ndarray]) -> Bpb:
        scored, sizes = row_batches(batches, step_rows), tokenizer.token_bytes()
        return bits_per_byte(model.token_losses, scored, sizes, dist)

    most = min(most, rows.num_rows)
    train = packed_bpb(train_batches(rows, most, step_rows, seed, dist))
    val = packed_bpb(rows.val_batches(step_rows, num_rows, dist.rank, dist.world_size))
    by_source = {}
    for name, count in rows.val_rows(num_rows).items() if len(rows.parts) > 1 else ():
        share = rows.parts[name].val_batches(step_rows, count, dist.rank, dist.world_size)
        by_source[f"val bpb:{name}"] = packed_bpb(share).value

    # bpb on whole documents: comparable across packing methods and tokenizers
    plain = document_bpb(model, documents, tokenizer, T, step_rows, dist)
    values = {
        "train bpb": train.value,
        "val bpb": val.value,
        **by_source,
        **generate_samples(model, tokenizer),
        "val minus train": val.value - train.value,
        "document bpb": plain.value,
        "document bytes": plain.bytes,
        "train tokens scored": train.tokens,
        "val tokens scored": val.tokens,
        CHANGED: changed_model_code(checkpoint),
    }
    if dist.is_main:
        cost = records.Cost.so_far(dist)
        shown = ("train bpb", "val bpb", "val minus train", "document bpb")
        print(", ".join(f"{name} {values[name]:.4f}" for name in shown), flush=True)
        report.append_section(SECTION, cfg, values, inputs, cost, commits=commits)
    dist.close()


def count_trained_rows(checkpoint: Checkpoint) -> int:
    """Number of rows that a model was trained on; 0 for an imported model."""
    state = checkpoint.state
    trained = checkpoint.step * state["batch_tokens"] // state["model"]["max_seq_len"]
    return state.get("progress", {}).get("rows", trained)


def train_batches(
    rows: Rows, num_rows: int, step_rows: int, seed: int, dist: DistContext
) -> Iterator[np.ndarray]:
    """Yield this rank's batches of the first `num_rows` rows of a training run with this seed."""
    for number in range(dist.rank, -(-num_rows // step_rows), dist.world_size):
        first = number * step_rows
        yield rows.batch(first, min(step_rows, num_rows - first), seed)


if __name__ == "__main__":
    start(main, BaseLoss(), __doc__)
