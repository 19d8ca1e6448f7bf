"""
Filters that drop rows of a bucket, with counts and samples of dropped rows.

    rows -> filters in order -> kept rows, counts and samples per filter

A row is {"messages": [...]}, or {"prompt": "..."} if it has no answer yet, plus optional fields:
"original" (the prompt before translation), "gold" (the reference answer), "finish" (why the answer
ended). A row without a field that a rule needs is kept and counted as not judged.
"""

import math
import re
import unicodedata
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from tasks.base import Task, answer_text, user
from tasks.korean import final_value
from tasks.overlap import find_passages, index_passages, ngrams, split_words

FilterRow = Mapping[str, Any]


class Item(NamedTuple):
    """A row and its text."""

    row: FilterRow
    asked: str
    """All user messages."""
    answer: str | None
    """The last assistant message; None if there is no answer yet."""

    @property
    def text(self) -> str:
        """Prompt and answer."""
        return "\n".join(filter(None, self[1:]))


Verdicts = Iterable[bool | None]  # whether to keep each item; None if it cannot be judged
FilterRule = Callable[[Sequence[Item]], Verdicts]
Count = Callable[[str], int]  # length of a text, in characters or tokens

NUM_SHOWN = 3  # dropped rows shown per filter
SHOWN_CHARS = 120
MAD_SIGMA = 1.4826  # standard deviation / median absolute deviation of a normal distribution
MOST_SHIFT = 3.0  # standard deviations; our choice, no published value
NGRAM = 4  # words per n-gram in the repetition check
MOST_REPEATED = 0.5  # share of repeated n-grams that makes an answer degenerate
NEAR = 0.8  # minimum Jaccard index of near-duplicates
HASHES, BANDS = 128, 16  # MinHash: rows that agree in any of 16 bands of 8 are compared
LEAST_RUNS = 20  # minimum number of n-grams for the repetition check
IMAGE = re.compile(
    r"!\[[^\]]*\]\(|<img\b|data:image/|\b(attached|attachment|screenshot|"
    r"(see|in|shown in) (the|this) (image|picture|figure|photo|diagram|chart|graph)"
    r"( (above|below|shown|attached))?)\b|첨부|다음 (그림|사진|이미지)|아래 (그림|사진|이미지)",
    re.IGNORECASE,
)
LINK_ONLY = re.compile(r"\s*https?://\S+\s*")


def apply_filters(
    rows: Iterable[FilterRow], rules: Mapping[str, FilterRule]
) -> tuple[list[FilterRow], dict[str, Any]]:
    """
    Apply rules in order; each sees the rows kept by the previous ones. Returns the kept rows and a
    table of a record: counts of each filter, and the beginnings of some dropped prompts.
    """
    left, table = list(map(read_item, rows)), []
    for name, rule in rules.items():
        judged = list(zip(left, rule(left), strict=True))
        left = [item for item, kept in judged if kept is not False]
        gone = [item.asked for item, kept in judged if kept is False]
        unknown = sum(kept is None for _, kept in judged)
        samples = " / ".join(" ".join(text.split())[:SHOWN_CHARS] for text in gone[:NUM_SHOWN])
        table.append([name, f"{len(left):,}", f"{len(gone):,}", f"{unknown:,}", samples])
    columns = ["Filter", "Kept", "Dropped", "Not judged", "Such as"]
    return [item.row for item in left], {"title": "Filters", "columns": columns, "rows": table}


def read_item(row: FilterRow) -> Item:
    """A row with its text."""
    messages = row.get("messages") or [user(row["prompt"])]
    asked = "\n".join(m["content"] for m in messages if m["role"] == "user")
    is_answered = messages[-1]["role"] == "assistant"
    return Item(row, asked, answer_text(messages[-1]) if is_answered else None)


# ------------------------------------------------------------------------------------------------
# Rules


def length_shift(items: Sequence[Item]) -> Verdicts:
    """
    Keep translations of typical length: |r - median| <= 3 sigma (estimated by MAD), where
    r = ln(length / length of the original).
    """
    pairs = [(item.asked, item.row.get("original")) for item in items]
    ratios = [math.log(len(text) / len(old)) if text and old else None for text, old in pairs]
    known = [r for r in ratios if r is not None] or [0.0]
    middle = median(known)
    most = MOST_SHIFT * MAD_SIGMA * median(abs(r - middle) for r in known)
    return [None if r is None else abs(r - middle) <= most for r in ratios]


def length(count: Count, least: str, most: str, items: Sequence[Item]) -> Verdicts:
    """Keep rows with `least` <= length of prompt and answer <= `most`."""
    return (int(least) <= count(item.text) <= int(most) for item in items)


def longest(count: Count, percent: str, items: Sequence[Item]) -> Verdicts:
    """Keep the shortest `percent` of the rows, by the length of prompt and answer."""
    sizes = [count(item.text) for item in items]
    kept = sorted(sizes)[: max(1, math.ceil(int(percent) / 100 * len(sizes)))]
    return (size <= kept[-1] for size in sizes)


def no_image(items: Sequence[Item]) -> Verdicts:
    """Drop prompts that refer to an image or attachment, or are only a link."""
    return (not (IMAGE.search(i.asked) or LINK_ONLY.fullmatch(i.asked)) for i in items)


def script(name: str, percent: str, items: Sequence[Item]) -> Verdicts:
    """Keep rows whose prompt and answer each have at least `percent` of letters in a script."""
    for item in items:
        shares = []
        for text in filter(None, item[1:]):
            letters = [unicodedata.name(c, "") for c in text if c.isalpha()]
            hits = sum(letter.startswith(name.upper()) for letter in letters)
            shares += [hits / len(letters)] if letters else []
        yield min(shares) >= int(percent) / 100 if shares else None


def not_degenerate(items: Sequence[Item]) -> Verdicts:
    """Keep answers that are complete, not empty and not repetitive."""
    for row, _, answer in items:
        runs = list(ngrams(split_words(answer or ""), NGRAM))
        repeats = len(runs) >= LEAST_RUNS and len(set(runs)) <= (1 - MOST_REPEATED) * len(runs)
        ended = row.get("finish") in (None, "stop")
        yield None if answer is None else bool(answer.strip()) and ended and not repeats


def verified(items: Sequence[Item]) -> Verdicts:
    """Keep rows whose answer (after the last ####) equals "gold", as a number or as text."""
    for row, _, answer in items:
        judged = None not in (answer, gold := row.get("gold"))
        yield final_value(str(answer).lower()) == final_value(str(gold).lower()) if judged else None


def no_duplicate(items: Sequence[Item]) -> Verdicts:
    """Keep the first of any rows with the same words, ignoring case and punctuation."""
    seen = set()
    for item in items:
        words = split_words(item.text)
        yield words not in seen
        seen.add(words)


def no_near_duplicate(items: Sequence[Item]) -> Verdicts:
    """
    Drop rows whose n-grams have a Jaccard index of at least NEAR with those of an earlier kept row,
    estimated by MinHash (Broder, "On the resemblance and containment of documents", 1997).
    """
    odd = 2 * np.random.default_rng(0).integers(1 << 63, size=HASHES, dtype=np.uint64) + 1
    kept: dict[bytes, list[np.ndarray]] = {}  # part of a signature -> signatures of rows
    for item in items:
        runs = {" ".join(run).encode() for run in ngrams(split_words(item.text), NGRAM)}
        if not runs:
            yield True
            continue
        mine = (np.array([*map(zlib.crc32, runs)], np.uint64)[:, None] * odd).min(axis=0)
        bands = [kept.setdefault(band.tobytes(), []) for band in np.split(mine, BANDS)]
        near = any((other == mine).mean() >= NEAR for band in bands for other in band)
        yield not near
        for band in bands if not near else ():
            band.append(mine)


def no_overlap(benchmarks: Sequence[Task], items: Sequence[Item]) -> Verdicts:
    """Drop rows that contain 13 consecutive words of a benchmark item, or a whole shorter item."""
    index = index_passages(benchmarks)
    return (not any(find_passages(item.text, index)) for item in items)


SCRIPTS = "hangul|latin|cjk|hiragana|katakana|cyrillic|arabic|greek|hebrew|thai"


def parse_all(spec: str, count: Count, benchmarks: Sequence[Task]) -> dict[str, FilterRule]:
    """
    Parse comma-separated filters, in the order they are applied:

    length_shift, length=10:2000, longest=99%, no_image, script=hangul:30%, not_degenerate,
    verified, no_duplicate, no_near_duplicate, no_overlap. Raises ValueError for any other.
    """
    plain = (length_shift, no_image, not_degenerate, verified, no_duplicate, no_near_duplicate)
    known: dict[str, Callable] = {rule.__name__: rule for rule in plain}
    known["no_overlap"] = partial(no_overlap, benchmarks)
    with_values = {
        r"length=(\d+):(\d+)": partial(length, count),
        r"longest=(\d+)%": partial(longest, count),
        rf"script=({SCRIPTS}):(\d+)%": script,
    }
    rules = {}
    for words in filter(None, map(str.strip, spec.split(","))):
        for form, rule in {**known, **with_values}.items():
            if found := re.fullmatch(form, words):
                rules[words] = partial(rule, *found.groups())
        if words not in rules:
            raise ValueError(
                f"invalid filter {words!r}; use {', '.join(known)}, length=10:2000, longest=99% or "
                "script=hangul:30% (or latin, cyrillic, ...)"
            )
    return rules
