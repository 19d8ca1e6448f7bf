"""
Byte-level BPE tokenizer, trained and run by rustbpe.

    texts -> Tokenizer.train -> tokenizer.json -> Tokenizer.load -> encode, decode

Ids are the 256 bytes, then the merges by rank, then the nine special tokens. Special tokens are
only inserted by code, through `special`; encoding text never produces one, whatever a user types.

tokenizer.json contains `format`, `pattern` (the regex that splits text into words),
`special_tokens` and `tokens`: the bytes of every other token by id, one character per byte
(latin-1). Training is deterministic: the same text gives the same file, byte for byte.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import rustbpe
from nanochat.common import MissingInput, base_dir, fingerprint, read_json, require_name, write_json

if not hasattr(rustbpe, "split"):
    raise ImportError(
        f"{rustbpe.__file__} is rustbpe from PyPI, which lacks functions that nanochat needs; "
        "install the one in rustbpe/ with `uv sync` or `pip install ./rustbpe`"
    )

FORMAT = 1
# The GPT-4 pattern, but with numbers of at most two digits
PATTERN = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,2}"
    r"| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
)
PROBE = "aB 12,\n \t\u00e9\u6f22'"  # letters, digits, punctuation, spaces: a pattern must match all
FILE_NAME = "tokenizer.json"
# bos starts every document and conversation. The other tokens are pairs that enclose a user turn,
# an assistant turn, a tool call and the tool output.
TURNS = ("user", "assistant", "python", "output")
SPECIAL_TOKENS = ("<|bos|>", *(f"<|{t}_{edge}|>" for t in TURNS for edge in ("start", "end")))


class Tokenizer:
    """
    An immutable BPE vocabulary. Create one with `train`, `read` or `load`.

    `Tokenizer(content)` recreates it from its `content`; `pattern` splits text into words, within
    which bytes are merged; `fingerprint` is a hash of the content, 16 hex digits.
    """

    def __init__(self, content: dict[str, Any]):
        """`content`: a parsed tokenizer.json. Raises ValueError if it is invalid."""
        missing = {"format", "pattern", "special_tokens", "tokens"} - content.keys()
        if missing or content["format"] != FORMAT:
            raise ValueError(f"not a tokenizer of format {FORMAT}; missing keys: {sorted(missing)}")
        if tuple(content["special_tokens"]) != SPECIAL_TOKENS:
            raise ValueError(f"special tokens {content['special_tokens']} are not {SPECIAL_TOKENS}")
        tokens = [token.encode("latin-1") for token in content["tokens"]]
        self.content, self.pattern = content, content["pattern"]
        ranks = [(token, i) for i, token in enumerate(tokens)]
        self._bpe = rustbpe.Tokenizer.from_ranks(ranks, self.pattern)
        self.ranks = dict(ranks)
        """Bytes -> id of every non-special token, in order of ids."""
        self._special = {name: len(tokens) + i for i, name in enumerate(SPECIAL_TOKENS)}
        self.bos_id = len(tokens)
        """Id of <|bos|>, which starts every document."""
        self._bytes = tokens + [name.encode() for name in SPECIAL_TOKENS]
        self.vocab_size = len(self._bytes)
        """Number of token ids, including special tokens."""
        self.fingerprint = fingerprint(content)
        if self.decode(self.encode(PROBE)) != PROBE:
            raise ValueError(f"pattern {content['pattern']!r} loses text; it must match all of it")

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> "Tokenizer":
        """
        Train a tokenizer of `vocab_size` tokens, including the 256 bytes and the special tokens.

        Reads `texts` once and stores only word counts. If the text is too short for `vocab_size`,
        the vocabulary is smaller and a message is printed. The result does not depend on the order
        of texts or on the number of threads (RAYON_NUM_THREADS, default: one per core). Raises
        ValueError if vocab_size is below 265 or a text has a lone surrogate.
        """
        smallest = 256 + len(SPECIAL_TOKENS)
        if vocab_size < smallest:
            fix = f"use --vocab_size={smallest} or more (256 bytes and the special tokens)"
            raise ValueError(f"vocab_size is {vocab_size}; {fix}")
        bpe = rustbpe.Tokenizer()
        bpe.train_from_iterator(texts, vocab_size - len(SPECIAL_TOKENS), pattern=PATTERN)
        tokens = [token.decode("latin-1") for token, _ in bpe.get_mergeable_ranks()]
        content = {"format": FORMAT, "pattern": PATTERN, "special_tokens": list(SPECIAL_TOKENS)}
        tokenizer = cls({**content, "tokens": tokens})
        if tokenizer.vocab_size < vocab_size:
            print(f"trained {tokenizer.vocab_size} of {vocab_size} tokens: no pairs left to merge")
        return tokenizer

    @classmethod
    def read(cls, path: Path) -> "Tokenizer":
        """
        Read a tokenizer.json. Raises FileNotFoundError or ValueError naming the file.

        A fingerprint in the file, as written by `save`, must match the content.
        """
        content = read_json(path)
        try:
            recorded = content.pop("fingerprint", None)
            tokenizer = cls(content)
            if recorded not in (None, tokenizer.fingerprint):
                raise ValueError(f"damaged: the content does not match its fingerprint {recorded}")
            return tokenizer
        except (ValueError, TypeError, AttributeError) as error:
            raise ValueError(f"{path}: {error}") from error

    @classmethod
    def load(cls, tag: str = "main") -> "Tokenizer":
        """Read the tokenizer with this tag. Raises MissingInput if it has not been trained."""
        path = tokenizer_dir(tag) / FILE_NAME
        flag = "" if tag == "main" else f" --tokenizer_tag={tag}"
        command = f"python -m scripts.tok_train{flag} --dataset=embedded  # or your text"
        if not path.is_file():
            raise MissingInput(f"no tokenizer {tag!r} at {path}", command)
        try:
            return cls.read(path)
        except ValueError as error:
            raise ValueError(f"{error}\n  fix:  retrain it with {command}") from error

    def save(self, folder: Path) -> Path:
        """Write tokenizer.json into `folder` and return its path."""
        path = folder / FILE_NAME
        write_json(path, {"fingerprint": self.fingerprint, **self.content})
        return path

    def special(self, name: str) -> int:
        """Return the id of a special token."""
        return self._special[name]

    def encode(self, text: str) -> list[int]:
        """
        Return the token ids of a text, never those of special tokens.

        Raises ValueError for a lone surrogate, which has no UTF-8 encoding.
        """
        return self._bpe.encode(text)

    def encode_flat(self, texts: Iterable[str]) -> tuple[np.ndarray, np.ndarray]:
        """
        Encode many texts on all cores and return `(ids, offsets)`, both read-only.

        Text i is `ids[offsets[i] : offsets[i + 1]]`; `ids` is uint32, `offsets` is int64 with one
        more entry than `texts`.
        """
        ids, offsets = self._bpe.encode_flat(texts)
        return np.frombuffer(ids, np.uint32), np.frombuffer(offsets, np.int64)

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        """Bytes of `ids`; special tokens become their names. Raises ValueError for invalid ids."""
        if unknown := [i for i in ids if not 0 <= i < self.vocab_size]:
            raise ValueError(f"token id {unknown[0]} is not in [0, {self.vocab_size})")
        return b"".join([self._bytes[i] for i in ids])

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`; invalid UTF-8 becomes U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def token_bytes(self) -> np.ndarray:
        """
        Return the length in bytes of every token, int32 (V,); 0 for special tokens.

        A text's token lengths add up to its UTF-8 length, the denominator of bits per byte.
        """
        return np.array([*map(len, self.ranks), *[0] * len(SPECIAL_TOKENS)], np.int32)


def tokenizer_dir(tag: str = "main") -> Path:
    """Directory of the tokenizer with this tag."""
    return base_dir() / "tokenizer" / require_name("tokenizer_tag", tag)
