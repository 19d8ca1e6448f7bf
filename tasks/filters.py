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
from typing import Any

import numpy as np

from tasks.base import Task, answer_text, user
from tasks.korean import final_value
from tasks.overlap import find_passages, index_passages, ngrams, split_words

FilterRow = Mapping[str, Any]
Verdicts = Iterable[bool | None]  # whether to keep each row; None if it cannot be judged
FilterRule = Callable[[Sequence[FilterRow]], Verdicts]
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
    left, table = list(rows), []
    for name, rule in rules.items():
        judged = list(zip(left, rule(left), strict=True))
        left = [row for row, kept in judged if kept is not False]
        gone = [texts_of(row)[0] for row, kept in judged if kept is False]
        unknown = sum(kept is None for _, kept in judged)
        samples = " / ".join(" ".join(text.split())[:SHOWN_CHARS] for text in gone[:NUM_SHOWN])
        table.append([name, f"{len(left):,}", f"{len(gone):,}", f"{unknown:,}", samples])
    columns = ["Filter", "Kept", "Dropped", "Not judged", "Such as"]
    return left, {"title": "Filters", "columns": columns, "rows": table}


def texts_of(row: FilterRow) -> tuple[str, str | None]:
    """All user messages, and the last assistant message; None if there is no answer yet."""
    messages = row.get("messages") or [user(row["prompt"])]
    last = messages[-1]
    asked = "\n".join(m["content"] for m in messages if m["role"] == "user")
    return asked, answer_text(last) if last["role"] == "assistant" else None


def whole(row: FilterRow) -> str:
    """Prompt and answer."""
    return "\n".join(filter(None, texts_of(row)))


# ------------------------------------------------------------------------------------------------
# Rules


def length_shift(rows: Sequence[FilterRow]) -> Verdicts:
    """
    Keep translations of typical length: |r - median| <= 3 sigma (estimated by MAD), where
    r = ln(length / length of the original).
    """
    pairs = [(texts_of(row)[0], row.get("original")) for row in rows]
    ratios = [math.log(len(text) / len(old)) if text and old else None for text, old in pairs]
    known = [r for r in ratios if r is not None] or [0.0]
    middle = median(known)
    most = MOST_SHIFT * MAD_SIGMA * median(abs(r - middle) for r in known)
    return [None if r is None else abs(r - middle) <= most for r in ratios]


def length(count: Count, least: str, most: str, rows: Sequence[FilterRow]) -> Verdicts:
    """Keep rows with `least` <= length of prompt and answer <= `most`."""
    return (int(least) <= count(whole(row)) <= int(most) for row in rows)


def longest(count: Count, percent: str, rows: Sequence[FilterRow]) -> Verdicts:
    """Keep the shortest `percent` of the rows, by the length of prompt and answer."""
    sizes = [count(whole(row)) for row in rows]
    kept = sorted(sizes)[: max(1, math.ceil(int(percent) / 100 * len(sizes)))]
    return (size <= kept[-1] for size in sizes)


def no_image(rows: Sequence[FilterRow]) -> Verdicts:
    """Drop prompts that refer to an image or attachment, or are only a link."""
    for row in rows:
        asked, _ = texts_of(row)
        yield not (IMAGE.search(asked) or LINK_ONLY.fullmatch(asked))


def script(count: Count, name: str, percent: str, rows: Sequence[FilterRow]) -> Verdicts:
    """Keep rows whose prompt and answer each have at least `percent` of letters in a script."""
    for row in rows:
        letters = [[c for c in text if c.isalpha()] for text in texts_of(row) if text]
        shares = [sum(map(partial(is_of, name), each)) / len(each) for each in letters if each]
        yield min(shares) >= int(percent) / 100 if shares else None


def is_of(name: str, letter: str) -> bool:
    """Whether a letter is of a script, such as hangul."""
    return unicodedata.name(letter, "").startswith(name.upper())


def not_degenerate(rows: Sequence[FilterRow]) -> Verdicts:
    """Keep answers that are complete, not empty and not repetitive."""
    for row in rows:
        _, answer = texts_of(row)
        runs = list(ngrams(split_words(answer or ""), NGRAM))
        repeats = len(runs) >= LEAST_RUNS and len(set(runs)) <= (1 - MOST_REPEATED) * len(runs)
        ended = row.get("finish") in (None, "stop")
        yield None if answer is None else bool(answer.strip()) and ended and not repeats


def verified(rows: Sequence[FilterRow]) -> Verdicts:
    """Keep rows whose answer (after the last ####) equals "gold", as a number or as text."""
    for row in rows:
        _, answer = texts_of(row)
        gold = row.get("gold")
        if answer is None or gold is None:
            yield None
        else:
            yield final_value(answer.lower()) == final_value(str(gold).lower())


def no_duplicate(rows: Sequence[FilterRow]) -> Verdicts:
    """Keep the first of any rows with the same words, ignoring case and punctuation."""
    seen = set()
    for row in rows:
        words = split_words(whole(row))
        yield words not in seen
        seen.add(words)


def no_near_duplicate(rows: Sequence[FilterRow]) -> Verdicts:
    """
    Drop rows whose n-grams have a Jaccard index of at least NEAR with those of an earlier kept row,
    estimated by MinHash (Broder, "On the resemblance and containment of documents", 1997).
    """
    odd = 2 * np.random.default_rng(0).integers(1 << 63, size=HASHES, dtype=np.uint64) + 1
    kept: dict[bytes, list[np.ndarray]] = {}  # part of a signature -> signatures of rows
    for row in rows:
        runs = {" ".join(run).encode() for run in ngrams(split_words(whole(row)), NGRAM)}
        if not runs:
            yield True
            continue
        mine = (np.array([*map(zlib.crc32, runs)], np.uint64)[:, None] * odd).min(axis=0)
        bands = [band.tobytes() for band in np.split(mine, BANDS)]
        others = [other for band in bands for other in kept.get(band, ())]
        near = any((other == mine).mean() >= NEAR for other in others)
        yield not near
        for band in bands if not near else ():
            kept.setdefault(band, []).append(mine)


def no_overlap(benchmarks: Sequence[Task], rows: Sequence[FilterRow]) -> Verdicts:
    """Drop rows that contain 13 consecutive words of a benchmark item, or a whole shorter item."""
    index = index_passages(benchmarks)
    return (not any(find_passages(whole(row), index)) for row in rows)


PLAIN = (length_shift, no_image, not_degenerate, verified, no_duplicate, no_near_duplicate)
WITH_VALUES = {
    r"length=(\d+):(\d+)": length,
    r"longest=(\d+)%": longest,
    r"script=(hangul|latin|cjk|hiragana|katakana|cyrillic|arabic|greek|hebrew|thai):(\d+)%": script,
}


def parse_all(spec: str, count: Count, benchmarks: Sequence[Task]) -> dict[str, FilterRule]:
    """
    Parse comma-separated filters, in the order they are applied:

    length_shift, length=10:2000, longest=99%, no_image, script=hangul:30%, not_degenerate,
    verified, no_duplicate, no_near_duplicate, no_overlap. Raises ValueError for any other.
    """
    known: dict[str, FilterRule] = {rule.__name__: rule for rule in PLAIN}
    known["no_overlap"] = partial(no_overlap, benchmarks)
    names, wanted = ", ".join(known), list(filter(None, map(str.strip, spec.split(","))))
    for words in wanted:
        for form, rule in WITH_VALUES.items():
            if found := re.fullmatch(form, words):
                known[words] = partial(rule, count, *found.groups())
        if words not in known:
            raise ValueError(
                f"invalid filter {words!r}; use {names}, length=10:2000, longest=99% or "
                "script=hangul:30% (or latin, cyrillic, ...)"
            )
    return {words: known[words] for words in wanted}
