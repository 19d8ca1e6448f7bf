"""
Compare a tokenizer with those of GPT-2 and GPT-4: bytes per token on seven kinds of text.

    python -m scripts.tok_eval                            # on the text it was trained on
    python -m scripts.tok_eval --dataset=embedded         # on other text

tiktoken downloads the vocabularies of GPT-2 and GPT-4 on first use. A vocabulary that is not
available within ten seconds is left out; the section says so, and so does --skip_if_done.

Reads   tokenizer/<tag>/ (scripts.tok_train), a training shard and the validation shard
Writes  the section "Tokenizer evaluation"
"""

import threading
import time
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import tiktoken

from nanochat import records, report
from nanochat.common import printable
from nanochat.config import start
from nanochat.dataset import DataConfig, load_last_source
from nanochat.recipe import make_recipe
from nanochat.rows import batch_texts
from nanochat.tokenizer import Tokenizer
from tasks.world.write import open_text

SECTION = "Tokenizer evaluation"
SAMPLES = Path(__file__).parent / "samples.toml"
RIVALS = {"GPT-2": "gpt2", "GPT-4": "cl100k_base"}
FETCH_SECONDS = 10.0  # time limit per baseline for download and encoding


@dataclass(frozen=True)
class TokEval:
    NOT_IN_RECIPE: ClassVar[str] = "tokenizer_tag skip_if_done"

    tokenizer_tag: str = "main"
    """Folder under tokenizer/ of the tokenizer to evaluate."""
    skip_if_done: bool = False
    """Do nothing if the same evaluation has already finished."""
    data: DataConfig = field(default_factory=DataConfig)


def main(cfg: TokEval) -> None:
    tokenizer = Tokenizer.load(cfg.tokenizer_tag)
    text = open_text(cfg.data, load_last_source(cfg.tokenizer_tag))
    inputs = {"tokenizer": tokenizer.fingerprint, "data": text.fingerprint}
    if cfg.skip_if_done and (found := records.find_finished(SECTION, make_recipe(cfg, inputs))):
        missing = [rival for rival in RIVALS if f"Comparison with {rival}" in found["values"]]
        without = f" (without {' and '.join(missing)}; python -m scripts.tok_eval tries again)"
        return print(f"{SECTION}: finished already, skipped{without if missing else ''}")
    records.require_writable()

    # the report that ours is compared with has "fwe", whatever the dataset of the Hub
    of_hub = text.sources[0].repo is not None
    name = "World" if text.name == "embedded" else "fwe" if of_hub else "text"
    texts = {
        **tomllib.loads(SAMPLES.read_text(encoding="utf-8")),
        f"{name}-train": first_batch(document for _, document in text.documents()),
        f"{name}-val": first_batch(text.val_texts()),
    }
    ours = {kind: len(tokenizer.encode(text)) for kind, text in texts.items()}
    theirs = rival_counts(list(texts.values()))
    tables, values = [], {}
    for rival, counts in theirs.items():
        if isinstance(counts, str):
            values[f"Comparison with {rival}"] = counts
            print(f"Comparison with {rival}: {printable(counts)}")
        else:
            tables.append(compare_tokenizers(rival, texts, counts, ours))
    for kind, text in texts.items():
        values[f"bytes per token, {kind}"] = len(text.encode()) / ours[kind]
    report.append_section(SECTION, cfg, values, inputs, tables=tables)


def first_batch(documents: Iterable[str]) -> str:
    """First documents (a few MB), joined by newlines."""
    return "\n".join(next(batch_texts(documents)))


def compare_tokenizers(
    rival: str, texts: Mapping[str, str], theirs: Sequence[int], ours: Mapping[str, int]
) -> dict[str, Any]:
    """Table for one baseline: tokens, bytes per token, and the percentage of tokens ours saves."""
    rows = []
    for (kind, text), base in zip(texts.items(), theirs, strict=True):
        size, count = len(text.encode()), ours[kind]
        saving = f"{100 * (base - count) / base:+.1f}%"
        rows.append([kind, size, base, f"{size / base:.2f}", count, f"{size / count:.2f}", saving])
    columns = ["Text Type", "Bytes", f"{rival} Tokens", f"{rival} Ratio"]
    columns += ["Ours Tokens", "Ours Ratio", "Relative Diff %"]
    return {"title": f"Comparison with {rival}", "columns": columns, "rows": rows}


def rival_counts(texts: Sequence[str]) -> dict[str, list[int] | str]:
    """
    Baseline -> number of tokens in each text, or why the baseline was skipped.

    tiktoken's download has no timeout, so each baseline gets a thread; one that is late is left
    behind.
    """
    late = f"skipped: no vocabulary within {FETCH_SECONDS:g} s"
    found: dict[str, list[int] | str] = dict.fromkeys(RIVALS, late)

    def count(rival: str) -> None:
        try:
            encode = tiktoken.get_encoding(RIVALS[rival]).encode_ordinary_batch
            found[rival] = list(map(len, encode(list(texts))))
        except (OSError, ValueError) as error:  # no network, or another file
            found[rival] = f"skipped: no vocabulary ({type(error).__name__})"

    threads = [threading.Thread(target=count, args=[rival], daemon=True) for rival in RIVALS]
    deadline = time.monotonic() + FETCH_SECONDS
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return dict(found)


if __name__ == "__main__":
    start(main, TokEval(), __doc__)
