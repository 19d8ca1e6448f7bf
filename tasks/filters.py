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
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median
from typing import Any

import numpy as np

from nanochat.common import fingerprint
from tasks.base import Conversation, Task, answer_text, user
from tasks.overlap import BATCH, LENGTHS, WORD, is_in, ngrams_by_length, query_ngrams

FilterRow = Mapping[str, Any]
FilterRule = Callable[[Sequence[FilterRow]], "list[bool | None]"]
"""Rows -> whether to keep each; None if it cannot be judged."""

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
NUMBER = re.compile(r"\$?(-?\d[\d,]*(?:\.\d+)?)\.?")
LINK_ONLY = re.compile(r"\s*https?://\S+\s*")


def apply_filters(
    rows: Iterable[FilterRow], rules: Mapping[str, FilterRule]
) -> tuple[list[FilterRow], dict[str, Any]]:
    """
    Apply rules in order; each sees the rows kept by the previous ones. Returns the kept rows and a
    table of a record: counts of each filter, and the beginnings of some dropped prompts.
    """
    left, done = list(rows), []
    for name, rule in rules.items():
        verdicts = rule(left)
        gone = [row for row, kept in zip(left, verdicts, strict=True) if kept is False]
        left = [row for row, kept in zip(left, verdicts, strict=True) if kept is not False]
        samples = " / ".join(preview(prompt(row)) for row in gone[:NUM_SHOWN])
        counts = len(left), len(gone), verdicts.count(None)
        done.append([name, *(f"{n:,}" for n in counts), samples])
    columns = ["Filter", "Kept", "Dropped", "Not judged", "Such as"]
    return left, {"title": "Filters", "columns": columns, "rows": done}


def messages_of(row: FilterRow) -> Conversation:
    """The messages of a row, or its prompt as the only one."""
    return row.get("messages") or [user(row["prompt"])]


def prompt(row: FilterRow) -> str:
    """All user messages."""
    return "\n".join(m["content"] for m in messages_of(row) if m["role"] == "user")


def last_reply(row: FilterRow) -> str:
    """The last assistant message, without tool calls."""
    last = messages_of(row)[-1]
    return answer_text(last) if last["role"] == "assistant" else ""


def preview(text: str) -> str:
    """The beginning of a text, on one line."""
    flat = " ".join(text.split())
    return flat if len(flat) <= SHOWN_CHARS else flat[: SHOWN_CHARS - 3] + "..."


# ------------------------------------------------------------------------------------------------
# Rules


def judge_each(keep: Callable[[FilterRow], bool | None]) -> FilterRule:
    """The rule that judges every row by itself, with `keep`."""
    return lambda rows: [keep(row) for row in rows]


def length_shift(rows: Sequence[FilterRow]) -> list[bool | None]:
    """
    Keep translations of typical length: |r - median| <= 3 sigma (estimated by MAD), where
    r = ln(length / length of the original).
    """
    ratios = [
        math.log(len(prompt(row)) / len(row["original"]))
        if row.get("original") and prompt(row)
        else None
        for row in rows
    ]
    known = [r for r in ratios if r is not None]
    if not known:
        return [None] * len(rows)
    middle = median(known)
    most = MOST_SHIFT * MAD_SIGMA * median(abs(r - middle) for r in known)
    return [None if r is None else abs(r - middle) <= most for r in ratios]


def length_between(least: int, most: int, count: Callable[[str], int] = len) -> FilterRule:
    """Keep rows with `least` <= count(prompt) + count(answer) <= `most`. Default: characters."""
    return judge_each(lambda row: least <= count(prompt(row)) + count(last_reply(row)) <= most)


def length_below_quantile(share: float, count: Callable[[str], int] = len) -> FilterRule:
    """Keep rows up to the `share` quantile of the length of prompt plus answer."""

    def rule(rows: Sequence[FilterRow]) -> list[bool | None]:
        sizes = [count(prompt(row)) + count(last_reply(row)) for row in rows]
        if not sizes:
            return []
        bound = sorted(sizes)[min(len(sizes) - 1, max(1, math.ceil(share * len(sizes))) - 1)]
        return [size <= bound for size in sizes]

    return rule


@judge_each
def no_image(row: FilterRow) -> bool:
    """Drop prompts that refer to an image or attachment, or are only a link."""
    return not (IMAGE.search(prompt(row)) or LINK_ONLY.fullmatch(prompt(row)))


def script_share(script: str, least: float) -> FilterRule:
    """Keep rows whose prompt and answer each have a share >= `least` of letters in `script`."""
    if not any(unicodedata.name(chr(c), "").startswith(script.upper()) for c in range(0xFFFF)):
        raise ValueError(f"unknown script {script!r}; use a Unicode name such as HANGUL or LATIN")

    def share(text: str) -> float | None:
        letters = [c for c in text if c.isalpha()]
        mine = sum(unicodedata.name(c, "").startswith(script.upper()) for c in letters)
        return mine / len(letters) if letters else None

    def keep(row: FilterRow) -> bool | None:
        shares = [s for s in (share(prompt(row)), share(last_reply(row))) if s is not None]
        return min(shares) >= least if shares else None

    return judge_each(keep)


@judge_each
def not_degenerate(row: FilterRow) -> bool | None:
    """Keep answers that are complete, not empty and not repetitive."""
    if messages_of(row)[-1]["role"] != "assistant":
        return None
    words = WORD.findall(last_reply(row).lower())
    runs = [tuple(words[i : i + NGRAM]) for i in range(len(words) - NGRAM + 1)]
    repeated = 1 - len(set(runs)) / len(runs) if len(runs) >= LEAST_RUNS else 0.0
    ended = row.get("finish") in (None, "stop")
    return bool(last_reply(row).strip()) and ended and repeated < MOST_REPEATED


@judge_each
def matches_gold(row: FilterRow) -> bool | None:
    """Keep rows whose answer (after the last ####) equals "gold", as a number or as text."""
    gold = row.get("gold")
    if gold is None or messages_of(row)[-1]["role"] != "assistant":
        return None
    return value(last_reply(row).rpartition("####")[2]) == value(str(gold))


def value(answer: str) -> float | str:
    """The number that an answer is, else the answer in lower case."""
    number = NUMBER.fullmatch(answer.strip())
    return float(number[1].replace(",", "")) if number else answer.strip().lower()


def no_duplicate(rows: Sequence[FilterRow]) -> list[bool | None]:
    """Keep the first of any rows with the same words, ignoring case and punctuation."""
    texts = [f"{prompt(row)}\n{last_reply(row)}".lower() for row in rows]
    prints = [fingerprint(WORD.findall(text)) for text in texts]
    first = {each: number for number, each in reversed([*enumerate(prints)])}
    return [first[each] == number for number, each in enumerate(prints)]


def no_near_duplicate(rows: Sequence[FilterRow]) -> list[bool | None]:
    """
    Drop rows whose n-grams have a Jaccard index of at least NEAR with those of an earlier kept row,
    estimated by MinHash (Broder, "On the resemblance and containment of documents", 1997).
    """
    rng = np.random.default_rng(0)
    odd, plus = (rng.integers(1 << 63, size=HASHES, dtype=np.uint64) for _ in range(2))
    buckets: dict[tuple[int, bytes], list[int]] = {}
    signatures: list[np.ndarray | None] = []
    found: list[bool | None] = []
    for number, row in enumerate(rows):
        text = f"{prompt(row)}\n{last_reply(row)}"
        runs = ngrams_by_length([text], [NGRAM])[NGRAM].hashes
        if not len(runs):
            signatures.append(None)
            found.append(True)
            continue
        mine = (np.unique(runs)[:, None] * (2 * odd + 1) + plus).min(axis=0)
        keys = [(band, part.tobytes()) for band, part in enumerate(np.split(mine, BANDS))]
        others = {other for key in keys for other in buckets.get(key, ())}
        near = any((signatures[other] == mine).mean() >= NEAR for other in others)
        signatures.append(mine)
        found.append(not near)
        for key in keys if not near else ():
            buckets.setdefault(key, []).append(number)
    return found


def no_overlap(benchmarks: Sequence[Task]) -> FilterRule:
    """Drop rows that contain 13 consecutive words of a benchmark item, or a whole shorter item."""

    def rule(rows: Sequence[FilterRow]) -> list[bool | None]:
        sought = [query_ngrams(task) for task in benchmarks]
        every = {n: np.sort(np.concatenate([s[n].hashes for s in sought])) for n in LENGTHS}
        found: list[bool | None] = []
        for first in range(0, len(rows), BATCH):
            some = rows[first : first + BATCH]
            ours = ngrams_by_length(f"{prompt(row)}\n{last_reply(row)}" for row in some)
            hit = {
                i for n in LENGTHS for i in ours[n].items[is_in(ours[n].hashes, every[n])].tolist()
            }
            found += [number not in hit for number in range(len(some))]
        return found

    return rule


def parse_all(
    spec: str, count: Callable[[str], int], benchmarks: Sequence[Task]
) -> dict[str, FilterRule]:
    """
    Parse comma-separated filters, in the order they are applied:

    length_shift, length=10:2000, longest=99%, no_image, script=hangul:30%, not_degenerate,
    verified, no_duplicate, no_near_duplicate, no_overlap. Raises ValueError for any other.
    """
    plain: dict[str, FilterRule] = {
        "length_shift": length_shift,
        "no_image": no_image,
        "not_degenerate": not_degenerate,
        "verified": matches_gold,
        "no_duplicate": no_duplicate,
        "no_near_duplicate": no_near_duplicate,
        "no_overlap": no_overlap(benchmarks),
    }
    rules: dict[str, FilterRule] = {}
    for words in filter(None, (word.strip() for word in spec.split(","))):
        name, _, value = words.partition("=")
        try:
            if name in plain and not value:
                rules[words] = plain[name]
            elif name == "length":
                least, most = map(int, value.split(":"))
                rules[words] = length_between(least, most, count)
            elif name == "longest":
                rules[words] = length_below_quantile(percent(value), count)
            elif name == "script":
                script, least_share = value.split(":")
                rules[words] = script_share(script, percent(least_share))
            else:
                raise ValueError("unknown name")
        except ValueError as error:
            raise ValueError(
                f"invalid filter {words!r} ({error}); use {', '.join(plain)}, length=10:2000, "
                "longest=99% or script=hangul:30%"
            ) from error
    return rules


def percent(words: str) -> float:
    """Parse "30%" to 0.3. Raises ValueError without the % sign or outside 0 to 100%."""
    if not words.endswith("%") or not 0 <= float(words[:-1]) <= 100:
        raise ValueError(f"{words!r} is not a percentage like 30%")
    return float(words[:-1]) / 100
