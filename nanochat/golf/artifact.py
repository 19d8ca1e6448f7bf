"""
One file that is a model: configuration, tokenizer, and weights on their grids, compressed.

    model, tokenizer -> head, floats, levels -> container -> compressor -> bytes -> all of it again

    magic, container, compressor, CRC-32 and length of the body | body, compressed:
    length of the head | head (JSON) | scales and what is kept as floats | levels by tensor

Tensors come in the model's own order, so that names and shapes follow from the configuration. The
levels lie in a byte each or packed to their bits; which of the two compresses better, and by what,
is for the writer to try. Reading needs nothing but the file.
"""

import json
import lzma
import struct
import zlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from nanochat.distributed import DistContext
from nanochat.golf.model import new_model, read_config
from nanochat.golf.quantize import (
    BITS,
    Format,
    QuantConfig,
    dequantize_rows,
    largest_level,
    quantize_rows,
)
from nanochat.gpt import GPT, GPTConfig
from nanochat.tokenizer import Tokenizer

Container = Literal["bytes", "packed"]
Compressor = Literal["zlib", "zstd", "lzma"]
CONTAINERS: tuple[Container, ...] = get_args(Container)
COMPRESSORS: tuple[Compressor, ...] = get_args(Compressor)
MAGIC = b"nanogolf"
PREFIX = struct.Struct("<8sBBIQ")  # magic, container, compressor, CRC-32 and length of the body
FLOATS = {"fp16": np.dtype("<f2"), "fp32": np.dtype("<f4")}
MAX_BODY = 1 << 32  # bytes; a damaged length must not take all memory
# of lzma: what is stored has no structure of four bytes or of text
FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "lc": 0, "lp": 0, "pb": 0}]


class Stored(NamedTuple):
    """One tensor as it is stored: its floats (scales, or all of it), and its levels if it has."""

    name: str
    shape: tuple[int, ...]
    form: Format
    floats: bytes
    levels: np.ndarray | None
    """int8, in the tensor's shape."""

    def level_bytes(self, container: Container) -> bytes:
        """The levels in their container."""
        if self.levels is None or container == "bytes":
            return b"" if self.levels is None else self.levels.tobytes()
        return pack(self.levels.ravel(), BITS[self.form])


@dataclass(frozen=True)
class Artifact:
    """What a file holds, ready to be built (`build`)."""

    cfg: GPTConfig
    tokenizer: Tokenizer
    weights: dict[str, Tensor]
    """By name, float32, on their grids."""
    formats: dict[str, Format]
    origin: dict[str, Any]
    """What the writer recorded of it."""

    def build(self, machine: DistContext) -> GPT:
        """The model on the machine's device."""
        with torch.device("meta"):
            model = new_model(self.cfg, machine.dtype)
        model.to_empty(device=machine.device)
        model.load_state_dict(self.weights)
        return model


# ------------------------------------------------------------------------------------------------
# Writing


def store(weights: Mapping[str, Tensor], cfg: QuantConfig) -> list[Stored]:
    """Every tensor in its format. Raises ValueError naming one that is beyond its format."""
    stored = []
    for name, form in cfg.formats(weights).items():
        w, levels = weights[name].detach().to("cpu", torch.float32), None
        if form in BITS:
            try:
                scale, level = quantize_rows(w, form, cfg)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from error
            floats, levels = scale.numpy().astype(FLOATS["fp16"]), level.numpy()
        else:
            with np.errstate(over="ignore"):
                floats = w.numpy().astype(FLOATS[form])
            if not np.isfinite(floats).all():
                raise ValueError(f"{name} does not fit {form}")
        stored.append(Stored(name, tuple(w.shape), form, floats.tobytes(), levels))
    return stored


def make_body(
    stored: list[Stored],
    model: GPTConfig,
    tokenizer: Tokenizer,
    origin: Mapping[str, Any],
    container: Container,
) -> bytes:
    """All that is compressed."""
    head = {
        "model": asdict(model),
        "formats": [s.form for s in stored],
        "tokenizer": tokenizer.content,
        "origin": dict(origin),
    }
    text = json.dumps(head, separators=(",", ":")).encode()
    floats = [s.floats for s in stored]
    levels = [s.level_bytes(container) for s in stored]
    return b"".join([struct.pack("<I", len(text)), text, *floats, *levels])


def seal(body: bytes, container: Container, compressor: Compressor) -> bytes:
    """The file: prefix and compressed body."""
    which = CONTAINERS.index(container), COMPRESSORS.index(compressor)
    return PREFIX.pack(MAGIC, *which, zlib.crc32(body), len(body)) + compress(body, compressor)


def compress(data: bytes, compressor: Compressor) -> bytes:
    """As small as each of them can."""
    if compressor == "zlib":
        return zlib.compress(data, 9)
    if compressor == "zstd":
        return pa.Codec("zstd", compression_level=22).compress(data, asbytes=True)
    return lzma.compress(data, lzma.FORMAT_RAW, filters=FILTERS)


def pack(levels: np.ndarray, bits: int) -> bytes:
    """Levels (n,) int8 in `bits` bits each, without gaps; the last byte is filled up with zeros."""
    unsigned = (levels.astype(np.int16) + (1 << (bits - 1))).astype(np.uint8)
    shifts = np.arange(bits - 1, -1, -1, dtype=np.uint8)
    return np.packbits((unsigned[:, None] >> shifts) & 1).tobytes()


# ------------------------------------------------------------------------------------------------
# Reading


def read_artifact(path: Path) -> Artifact:
    """
    Read a file that `seal` made.

    Raises FileNotFoundError, or ValueError naming the file where it is something else or damaged.
    """
    data = Path(path).read_bytes()
    try:
        body, container = unseal(data)
        return parse_body(body, container)
    except (ValueError, KeyError, TypeError, IndexError, MemoryError, struct.error) as error:
        raise ValueError(f"{path} is no artifact, or a damaged one: {error}") from error


def unseal(data: bytes) -> tuple[bytes, Container]:
    """The body of a file, and how its levels lie. Raises ValueError for one that is damaged."""
    if len(data) < PREFIX.size or data[: len(MAGIC)] != MAGIC:
        raise ValueError(f"it does not begin with {MAGIC.decode()}")
    _, container, compressor, checksum, size = PREFIX.unpack_from(data)
    if container >= len(CONTAINERS) or compressor >= len(COMPRESSORS) or size > MAX_BODY:
        raise ValueError("its first bytes make no sense")
    try:
        body = decompress(data[PREFIX.size :], COMPRESSORS[compressor], size)
    except (zlib.error, lzma.LZMAError, OSError, EOFError) as error:
        raise ValueError(f"it cannot be decompressed ({error})") from error
    if len(body) != size or zlib.crc32(body) != checksum:
        raise ValueError("its content does not match its checksum")
    return body, CONTAINERS[container]


def decompress(data: bytes, compressor: Compressor, size: int) -> bytes:
    """`size` bytes, at most."""
    if compressor == "zlib":
        return zlib.decompressobj().decompress(data, size)
    if compressor == "zstd":
        return pa.decompress(data, size, codec="zstd", asbytes=True)
    return lzma.LZMADecompressor(lzma.FORMAT_RAW, filters=FILTERS).decompress(data, size)


def parse_body(body: bytes, container: Container) -> Artifact:
    """What a body says."""
    (length,) = struct.unpack_from("<I", body)
    head = json.loads(body[4 : 4 + length])
    cfg = read_config(head["model"])
    with torch.device("meta"):
        shapes = {name: tuple(p.shape) for name, p in new_model(cfg).state_dict().items()}
    formats: dict[str, Format] = dict(zip(shapes, head["formats"], strict=True))
    place = 4 + length

    def take(size: int) -> bytes:
        nonlocal place
        place += size
        return body[place - size : place]

    floats = {n: as_floats(take, shapes[n], form) for n, form in formats.items()}
    weights = {}
    for name, form in formats.items():
        weights[name] = floats[name].float()
        if form in BITS:
            level = as_levels(take, shapes[name], form, container)
            weights[name] = dequantize_rows(floats[name], level)
    if place != len(body):
        raise ValueError(f"{len(body) - place} bytes more than its tensors take")
    return Artifact(cfg, Tokenizer(head["tokenizer"]), weights, formats, head["origin"])


def as_floats(take: Callable[[int], bytes], shape: tuple[int, ...], form: Format) -> Tensor:
    """The next scales (M,) float16 of a tensor of levels, or all of another tensor."""
    dtype, shape = FLOATS["fp16" if form in BITS else form], shape[:1] if form in BITS else shape
    values = np.frombuffer(take(dtype.itemsize * int(np.prod(shape))), dtype)
    return torch.from_numpy(values.reshape(shape).copy())


def as_levels(
    take: Callable[[int], bytes], shape: tuple[int, ...], form: Format, container: Container
) -> Tensor:
    """The next levels, int8 in the tensor's shape. Raises ValueError for one beyond the grid."""
    n, bits = int(np.prod(shape)), BITS[form]
    if container == "bytes":
        values = np.frombuffer(take(n), np.int8)
    else:
        values = unpack(take(-(-n * bits // 8)), bits, n)
    if n and np.abs(values.astype(np.int16)).max() > largest_level(form):
        raise ValueError(f"a level beyond {form}")
    return torch.from_numpy(values.reshape(shape).copy())


def unpack(data: bytes, bits: int, n: int) -> np.ndarray:
    """The `n` levels that `pack` packed."""
    ones = np.unpackbits(np.frombuffer(data, np.uint8), count=n * bits).reshape(n, bits)
    unsigned = ones @ (1 << np.arange(bits - 1, -1, -1, dtype=np.int16))
    return (unsigned - (1 << (bits - 1))).astype(np.int8)
