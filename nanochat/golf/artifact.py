"""
Golf artifact: a model in one compressed file (configuration, tokenizer and quantized weights).

    model, tokenizer -> header, floats, levels -> compressor -> file, and back

    magic, compressor, CRC-32 and length of the body | compressed body:
    header length | header (JSON) | scales and unquantized tensors | levels of each tensor

Tensors are stored in state_dict order; names and shapes follow from the configuration. Levels take
one byte each: packed to their bit width, files were 9% larger once compressed.
"""

import io
import json
import lzma
import struct
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from nanochat.dist import DistContext
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

Compressor = Literal["zstd", "lzma"]
COMPRESSORS: tuple[Compressor, ...] = get_args(Compressor)
MAGIC = b"nanogol2"
PREFIX = struct.Struct("<8sBIQ")  # magic, compressor, CRC-32 and length of the body
FLOATS = {"fp16": np.dtype("<f2"), "fp32": np.dtype("<f4")}
MAX_BODY = 1 << 32  # bytes; keeps a corrupt length from using all memory
# lc, lp, pb = 0: the data is neither text nor aligned to four bytes
FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "lc": 0, "lp": 0, "pb": 0}]


class StoredTensor(NamedTuple):
    """A tensor in its storage format."""

    name: str
    shape: tuple[int, ...]
    form: Format
    floats: bytes
    """Scales of a quantized tensor, else all values."""
    levels: bytes
    """int8; empty if not quantized."""


@dataclass(frozen=True)
class Artifact:
    """Content of an artifact file."""

    cfg: GPTConfig
    tokenizer: Tokenizer
    weights: dict[str, Tensor]
    """Dequantized float32 weights by name."""
    formats: dict[str, Format]
    origin: dict[str, Any]
    """Provenance recorded by the writer."""

    def build(self, dist: DistContext) -> GPT:
        """Return the model on `dist.device`."""
        with torch.device("meta"):
            model = new_model(self.cfg, dist.dtype)
        model.to_empty(device=dist.device)
        model.load_state_dict(self.weights)
        return model


# ---- Writing -------------------------------------------------------------------------------------


def quantize_tensors(weights: Mapping[str, Tensor], cfg: QuantConfig) -> list[StoredTensor]:
    """Convert every tensor to its format. Raises ValueError if a tensor overflows its format."""
    stored = []
    for name, form in cfg.formats(weights).items():
        w, levels = weights[name].detach().to("cpu", torch.float32), b""
        if form in BITS:
            try:
                scale, level = quantize_rows(w, form, cfg)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from error
            floats, levels = scale.numpy().astype(FLOATS["fp16"]), level.numpy().tobytes()
        else:
            with np.errstate(over="ignore"):
                floats = w.numpy().astype(FLOATS[form])
            if not np.isfinite(floats).all():
                raise ValueError(f"{name} overflows {form}; choose another format")
        stored.append(StoredTensor(name, tuple(w.shape), form, floats.tobytes(), levels))
    return stored


def make_body(
    stored: list[StoredTensor], model: GPTConfig, tokenizer: Tokenizer, origin: Mapping[str, Any]
) -> bytes:
    """Return the uncompressed body."""
    head = {
        "model": asdict(model),
        "formats": [s.form for s in stored],
        "tokenizer": tokenizer.content,
        "origin": dict(origin),
    }
    text = json.dumps(head, separators=(",", ":")).encode()
    floats, levels = [s.floats for s in stored], [s.levels for s in stored]
    return b"".join([struct.pack("<I", len(text)), text, *floats, *levels])


def write_body(body: bytes, compressor: Compressor) -> bytes:
    """Return the file content: prefix and compressed body."""
    prefix = MAGIC, COMPRESSORS.index(compressor), zlib.crc32(body), len(body)
    return PREFIX.pack(*prefix) + compress(body, compressor)


def compress(data: bytes, compressor: Compressor) -> bytes:
    """Compress at the highest level."""
    if compressor == "zstd":
        return pa.Codec("zstd", compression_level=22).compress(data, asbytes=True)
    return lzma.compress(data, lzma.FORMAT_RAW, filters=FILTERS)


# ---- Reading -------------------------------------------------------------------------------------


def read_artifact(path: Path) -> Artifact:
    """
    Read an artifact file.

    Raises FileNotFoundError, or ValueError if the file is corrupt or not an artifact.
    """
    data = Path(path).read_bytes()
    try:
        return parse_body(read_body(data))
    except (ValueError, KeyError, TypeError, IndexError, MemoryError, struct.error) as error:
        raise ValueError(f"{path} is not a valid artifact: {error}; export it again") from error


def read_body(data: bytes) -> bytes:
    """Return the decompressed body. Raises ValueError for a corrupt file."""
    if len(data) < PREFIX.size or data[: len(MAGIC)] != MAGIC:
        raise ValueError(f"it does not start with {MAGIC.decode()}")
    _, compressor, checksum, size = PREFIX.unpack_from(data)
    if compressor >= len(COMPRESSORS) or size > MAX_BODY:
        raise ValueError("invalid file header")
    try:
        body = decompress(data[PREFIX.size :], COMPRESSORS[compressor], size)
    except (lzma.LZMAError, OSError, EOFError) as error:
        raise ValueError(f"decompression failed ({error})") from error
    if len(body) != size or zlib.crc32(body) != checksum:
        raise ValueError("checksum mismatch")
    return body


def decompress(data: bytes, compressor: Compressor, size: int) -> bytes:
    """Decompress at most `size` bytes."""
    if compressor == "zstd":
        return pa.decompress(data, size, codec="zstd", asbytes=True)
    return lzma.LZMADecompressor(lzma.FORMAT_RAW, filters=FILTERS).decompress(data, size)


def parse_body(body: bytes) -> Artifact:
    """Parse a decompressed body."""
    stream = io.BytesIO(body)
    (length,) = struct.unpack("<I", stream.read(4))
    head = json.loads(stream.read(length))
    cfg = read_config(head["model"])
    with torch.device("meta"):
        shapes = {name: tuple(p.shape) for name, p in new_model(cfg).state_dict().items()}
    formats: dict[str, Format] = dict(zip(shapes, head["formats"], strict=True))
    floats = {n: read_floats(stream, shapes[n], form) for n, form in formats.items()}
    weights = {}
    for name, form in formats.items():
        weights[name] = floats[name].float()
        if form in BITS:
            weights[name] = dequantize_rows(floats[name], read_levels(stream, shapes[name], form))
    if rest := stream.read():
        raise ValueError(f"{len(rest)} unexpected bytes after the last tensor")
    return Artifact(cfg, Tokenizer(head["tokenizer"]), weights, formats, head["origin"])


def read_floats(stream: io.BytesIO, shape: tuple[int, ...], form: Format) -> Tensor:
    """Read the float16 scales (M,) of a quantized tensor, or all values of any other tensor."""
    dtype, shape = FLOATS["fp16" if form in BITS else form], shape[:1] if form in BITS else shape
    values = np.frombuffer(stream.read(dtype.itemsize * int(np.prod(shape))), dtype)
    return torch.from_numpy(values.reshape(shape).copy())


def read_levels(stream: io.BytesIO, shape: tuple[int, ...], form: Format) -> Tensor:
    """Read the next levels, int8 in the tensor's shape. Raises ValueError if out of range."""
    n = int(np.prod(shape))
    values = np.frombuffer(stream.read(n), np.int8)
    if n and np.abs(values.astype(np.int16)).max() > largest_level(form):
        raise ValueError(f"level out of range for {form}")
    return torch.from_numpy(values.reshape(shape).copy())
