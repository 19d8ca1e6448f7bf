"""
The tokenizer: text to ids and back, trained and run by rustbpe.

    texts -> Tokenizer.train -> tokenizer.json -> Tokenizer.load -> encode, decode

Ids are the 256 bytes, then the merges by rank, then the nine special tokens. Special tokens are
only ever put in by code, through `special`: encoding text never makes one, whatever a user types.
Knows nothing of conversations (chat_format.py) or of where text comes from (dataset.py).

tokenizer.json holds `format`, `pattern` (what splits text into words), `special_tokens` and
`tokens`: the bytes of every other token by id, one character per byte (latin-1), so that most of
them can be read. The same training gives the same file, byte for byte.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import rustbpe
from nanochat.common import MissingInput, base_dir, fingerprint, read_json, require_name, write_json

if not hasattr(rustbpe, "split"):
    raise ImportError(
        f"{rustbpe.__file__} is the package of that name from PyPI, which lacks what is used here; "
        "install the one in rustbpe/: `uv sync`, or `pip install ./rustbpe`"
    )

FORMAT = 1
# GPT-4's, with numbers of at most two digits
PATTERN = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,2}"
    r"| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
)
PROBE = "aB 12,\n \t\u00e9\u6f22'"  # letters, digits, signs and spaces, which a pattern must match
FILE_NAME = "tokenizer.json"
# bos starts every document and conversation; in the other pairs, what stands between start and end
# is a turn of the user, one of the assistant, its call of a tool, and the tool's answer.
TURNS = ("user", "assistant", "python", "output")
SPECIAL_TOKENS = ("<|bos|>", *(f"<|{t}_{edge}|>" for t in TURNS for edge in ("start", "end")))


class Tokenizer:
    """
    A trained vocabulary. Make one with `train`, `read` or `load`; it never changes.

    `content` makes it again, `Tokenizer(content)`; `pattern` splits a text into words, within which
    tokens are merged; `fingerprint` is 16 hex digits of the content.
    """

    def __init__(self, content: dict[str, Any]):
        """`content` is what tokenizer.json holds. Raises ValueError when it is something else."""
        missing = {"format", "pattern", "special_tokens", "tokens"} - content.keys()
        if missing or content["format"] != FORMAT:
            raise ValueError(f"not a tokenizer of format {FORMAT}: lacks {sorted(missing)}")
        if tuple(content["special_tokens"]) != SPECIAL_TOKENS:
            raise ValueError(f"special tokens {content['special_tokens']}, not {SPECIAL_TOKENS}")
        tokens = [token.encode("latin-1") for token in content["tokens"]]
        self.content, self.pattern = content, content["pattern"]
        ranks = [(token, i) for i, token in enumerate(tokens)]
        self._bpe = rustbpe.Tokenizer.from_ranks(ranks, self.pattern)
        self.ranks = dict(ranks)
        """The id of every token but the special ones, by its bytes, in order of ids."""
        self._special = {name: len(tokens) + i for i, name in enumerate(SPECIAL_TOKENS)}
        self.bos_id = len(tokens)
        """The id that starts every document."""
        self._bytes = tokens + [name.encode() for name in SPECIAL_TOKENS]
        self.vocab_size = len(self._bytes)
        """The number of ids, special tokens included."""
        self.fingerprint = fingerprint(content)
        if self.decode(self.encode(PROBE)) != PROBE:
            raise ValueError(f"pattern {content['pattern']!r} loses text: it must match all of it")

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> "Tokenizer":
        """
        Learn `vocab_size` tokens, the 256 bytes and the special tokens included.

        Reads `texts` once and keeps only the counts of distinct words. With too little text there
        are fewer tokens, which is printed. The result does not depend on the order of texts or
        on the number of threads (RAYON_NUM_THREADS, by default one per core). Raises ValueError
        below 265 tokens and for a text with a lone surrogate.
        """
        smallest = 256 + len(SPECIAL_TOKENS)
        if vocab_size < smallest:
            fix = f"use --vocab_size={smallest} or more, for all bytes and special tokens"
            raise ValueError(f"vocab_size is {vocab_size}; {fix}")
        bpe = rustbpe.Tokenizer()
        bpe.train_from_iterator(texts, vocab_size - len(SPECIAL_TOKENS), pattern=PATTERN)
        tokens = [token for token, _ in bpe.get_mergeable_ranks()]
        tokenizer = cls.of(PATTERN, tokens, SPECIAL_TOKENS)
        if tokenizer.vocab_size < vocab_size:
            print(f"tokenizer: {tokenizer.vocab_size} ids, not {vocab_size}: nothing left to merge")
        return tokenizer

    @classmethod
    def of(cls, pattern: str, tokens: Sequence[bytes], special: Sequence[str]) -> "Tokenizer":
        """From its parts, tokens by id. Raises ValueError for special tokens that are not ours."""
        names = [token.decode("latin-1") for token in tokens]
        content = {"format": FORMAT, "pattern": pattern, "special_tokens": list(special)}
        return cls({**content, "tokens": names})

    @classmethod
    def read(cls, path: Path) -> "Tokenizer":
        """
        Read a tokenizer.json. Raises FileNotFoundError or ValueError, naming the file.

        Where it says its fingerprint, as all that `save` wrote do, it must be that of the rest.
        """
        content = read_json(path)
        try:
            said = content.pop("fingerprint", None)
            tokenizer = cls(content)
            if said not in (None, tokenizer.fingerprint):
                raise ValueError(f"damaged: it is not what {said} was")
            return tokenizer
        except (ValueError, TypeError, AttributeError) as error:
            raise ValueError(f"{path}: {error}") from error

    @classmethod
    def load(cls, tag: str = "main") -> "Tokenizer":
        """Read the tokenizer of that tag. Raises MissingInput when none was trained."""
        path = tokenizer_dir(tag) / FILE_NAME
        flag = "" if tag == "main" else f" --tokenizer_tag={tag}"
        command = f"python -m scripts.tok_train{flag}"
        if not path.is_file():
            raise MissingInput(f"there is no tokenizer {tag!r} ({path})", command)
        try:
            return cls.read(path)
        except ValueError as error:
            raise ValueError(f"{error}\n  way out:  train it again with {command}") from error

    def save(self, folder: Path) -> Path:
        """Write tokenizer.json into `folder` and return its path."""
        path = folder / FILE_NAME
        write_json(path, {**self.content, "fingerprint": self.fingerprint})
        return path

    def special(self, name: str) -> int:
        """The id of a special token. Raises ValueError for another name."""
        if name not in self._special:
            raise ValueError(f"{name!r} is no special token; they are {', '.join(SPECIAL_TOKENS)}")
        return self._special[name]

    def encode(self, text: str) -> list[int]:
        """
        The ids of a text; never a special token's.

        Raises ValueError for a lone surrogate, which no bytes stand for.
        """
        return self._bpe.encode(text)

    def encode_flat(self, texts: Iterable[str]) -> tuple[np.ndarray, np.ndarray]:
        """
        The ids of many texts at once, on all cores: `(ids, offsets)`.

        Text i is `ids[offsets[i]:offsets[i + 1]]`; `ids` is uint32, `offsets` int64 and one
        longer than `texts`. The arrays are read-only.
        """
        ids, offsets = self._bpe.encode_flat(texts)
        return np.frombuffer(ids, np.uint32), np.frombuffer(offsets, np.int64)

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        """The bytes of `ids`; special tokens give their names. Raises ValueError for others."""
        if unknown := [i for i in ids if not 0 <= i < self.vocab_size]:
            raise ValueError(f"unknown token id {unknown[0]}: ids are 0 to {self.vocab_size - 1}")
        return b"".join([self._bytes[i] for i in ids])

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`; bytes that are not UTF-8 become U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def token_bytes(self) -> np.ndarray:
        """
        The length in bytes of every token, int32 (V,); 0 for special tokens.

        Over the ids of a text they add up to the length of its UTF-8, which makes them the
        denominator of bits per byte.
        """
        lengths = [*map(len, self.ranks), *[0] * len(SPECIAL_TOKENS)]
        return np.array(lengths, np.int32)


def tokenizer_dir(tag: str = "main") -> Path:
    """Where the tokenizer of that tag lives."""
    return base_dir() / "tokenizer" / require_name("tokenizer_tag", tag)
