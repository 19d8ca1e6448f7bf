"""
Filters that drop rows of a bucket, with counts and samples of dropped rows; overlap of training
data with benchmarks.

    rows -> filters in order -> kept rows, counts and samples per filter

A row is {"messages": [...]}, or {"prompt": "..."} if it has no answer yet, plus optional fields:
"original" (the prompt before translation), "gold" (the reference answer), "finish" (why the answer
ended). A row without a field that a rule needs is kept and counted as not judged.
"""

import math
import re
import unicodedata
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from tasks import code, questions
from tasks.augment import MoreOptions
from tasks.base import NumberTask, QuestionTask, Task, answer_text, final_value, split_words, user
from tasks.registry import eval_task

Verdicts = Iterable[bool | None]  # whether to keep each item; None if it cannot be judged


class Item(NamedTuple):
    """A row and its text."""

    row: Mapping[str, Any]
    asked: str
    """All user messages."""
    answer: str | None
    """The last assistant message; None if there is no answer yet."""
    text: str
    """Prompt and answer."""
    size: int
    """Length of the text."""


FilterRule = Callable[[Sequence[Item]], Verdicts]

NUMBER = r"(?:(?<!\w)[+-])?\d+(?:,\d+)*(?:\.\d+)?"
PUNCTUATION = ".,;:!?\"'"  # around words; unlike operators
NUM_SHOWN = 3  # dropped rows shown per filter
SHOWN_CHARS = 120
MAD_SIGMA = 1.4826  # standard deviation / median absolute deviation of a normal distribution
MOST_SHIFT = 3.0  # standard deviations; our choice, no published value
NGRAM = 4  # words per n-gram in the repetition check
MOST_REPEATED = 0.5  # share of repeated n-grams that makes an answer degenerate
LEAST_WORDS = 23  # of an answer, for the repetition check
HASHES, BANDS = 512, 32  # MinHash: rows are near-duplicates if any of 32 bands of 16 are equal
PHOTO = "(?:image|picture|figure|photo|photograph|screenshot|diagram|chart|attachment)s?"
SHOWN = f"(?:{PHOTO}|graphs?)"
IMAGE = re.compile(  # one that is attached or shown
    rf"!\[[^\]]*\]\(|<img\b|data:image/|\A\s*https?://\S+\s*\Z"
    rf"|\b(?:attached (?:{SHOWN}|file|document)|(?:see|look at) (?:the|this|these) {SHOWN}"
    rf"|(?:in|from) (?:the|this|these) {PHOTO}"
    rf"|{SHOWN} (?:is |are |shown )?(?:attached|above|below))\b"
    r"|첨부(?:한|된) ?(?:파일|그림|사진|이미지)|(?:다음|아래) (?:그림|사진|이미지)",
    re.IGNORECASE,
)
SCRIPTS = "hangul|latin|cjk|hiragana|katakana|cyrillic|arabic|greek|hebrew|thai"


def apply_filters(
    rows: Iterable[Mapping[str, Any]], rules: Mapping[str, FilterRule], count: Callable = len
) -> tuple[list[Mapping[str, Any]], dict[str, Any]]:
    """
    Apply rules in order; each sees the rows kept by the previous ones. Returns the kept rows and a
    table of a record: counts of each filter, and the beginnings of some dropped prompts.

    count: length of a text, in characters or tokens.
    """
    items, table = [read_item(row, count) for row in rows], []
    for name, rule in rules.items():
        verdicts = list(rule(items))
        judged = list(zip(items, verdicts, strict=True))
        items = [item for item, kept in judged if kept is not False]
        gone = [item.asked for item, kept in judged if kept is False]
        samples = (" ".join(asked.split())[:SHOWN_CHARS] for asked in gone[:NUM_SHOWN])
        counts = len(items), len(gone), verdicts.count(None)
        table.append([name, *(f"{n:,}" for n in counts), " / ".join(samples)])
    columns = ["Filter", "Kept", "Dropped", "Not judged", "Such as"]
    return [item.row for item in items], {"title": "Filters", "columns": columns, "rows": table}


def read_item(row: Mapping[str, Any], count: Callable) -> Item:
    """A row with its text."""
    messages = row.get("messages") or [user(row["prompt"])]
    asked = "\n".join(answer_text(m) for m in messages if m["role"] == "user")
    answer = answer_text(messages[-1]) if messages[-1]["role"] == "assistant" else None
    text = "\n".join(filter(None, (asked, answer)))
    return Item(row, asked, answer, text, count(text))


# ---- Rules ---------------------------------------------------------------------------------------


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


def length(least: str, most: str, items: Sequence[Item]) -> Verdicts:
    """Keep rows with `least` <= length of prompt and answer <= `most`."""
    return [int(least) <= item.size <= int(most) for item in items]


def no_image(items: Sequence[Item]) -> Verdicts:
    """Drop prompts that refer to an image or attachment, or are only a link."""
    return [not IMAGE.search(item.asked) for item in items]


def script(name: str, percent: str, items: Sequence[Item]) -> Verdicts:
    """Keep rows whose prompt and answer each have at least `percent` of letters in a script."""
    for item in items:
        shares = []
        for text in (item.asked, item.answer or ""):
            letters = [unicodedata.name(c, "") for c in text if c.isalpha()]
            hits = sum(letter.startswith(name.upper()) for letter in letters)
            shares += [hits / len(letters)] if letters else []
        yield min(shares) >= int(percent) / 100 if shares else None


def not_degenerate(items: Sequence[Item]) -> Verdicts:
    """Keep answers that are complete, not empty and not repetitive."""
    for item in items:
        words = split_words(item.answer or "")
        repeats = len(words) >= LEAST_WORDS and repeated_share(words) >= MOST_REPEATED
        is_empty = not (item.answer or "").strip()
        ended = item.row.get("finish") in (None, "stop") and not is_empty
        yield None if item.answer is None else ended and not repeats


def verified(items: Sequence[Item]) -> Verdicts:
    """
    Keep rows whose answer (after the last ####, else all of it or its last number) equals "gold",
    as a number or as text.
    """
    for item in items:
        answer, gold = item.answer or "", item.row.get("gold")
        last = re.findall(NUMBER, answer)[-1:] if "####" not in answer else []
        whole = answer if "####" in answer else " ".join(answer.split())
        said = [final_value(f"#### {text}".lower()) for text in (whole, *last)]
        right = final_value(f"#### {gold}".lower())
        yield None if item.answer is None or gold is None else right in said


def no_duplicate(items: Sequence[Item]) -> Verdicts:
    """Keep the first of any rows with the same words, ignoring case and punctuation after them."""
    seen = set()
    for item in items:
        words = tuple(word.strip(PUNCTUATION) for word in item.text.casefold().split())
        yield words not in seen
        seen.add(words)


def no_near_duplicate(items: Sequence[Item]) -> Verdicts:
    """
    Drop rows whose n-grams have a Jaccard index of about 0.8 or more with those of an earlier row,
    by MinHash (Broder, "On the resemblance and containment of documents", 1997): with index 0.9,
    99.9% are dropped, with 0.8, 60%, with 0.7, 10%.
    """
    odd = 2 * np.random.default_rng(0).integers(1 << 63, size=HASHES, dtype=np.uint64) + 1
    seen = set()
    for item in items:
        runs = {" ".join(run).encode() for run in ngrams(split_words(item.text), NGRAM)}
        hashes = np.array([*map(zlib.crc32, runs)], np.uint64)[:, None] * odd  # (n-grams, HASHES)
        parts = np.split(hashes.min(axis=0, initial=2**64 - 1), BANDS) if runs else ()
        bands = {(n, part.tobytes()) for n, part in enumerate(parts)}
        yield seen.isdisjoint(bands)
        seen |= bands


def no_overlap(items: Sequence[Item]) -> Verdicts:
    """Drop rows that contain 13 consecutive words of a benchmark item, or a whole shorter item."""
    index = index_passages([eval_task(key) for key in BENCHMARKS])
    return [not find_items(item.text, index) for item in items]


RULES: dict[str, Callable[..., Verdicts]] = {
    "length_shift": length_shift,
    r"length=(\d+):(\d+)": length,
    "no_image": no_image,
    rf"script=({SCRIPTS}):(\d+)%": script,
    "not_degenerate": not_degenerate,
    "verified": verified,
    "no_duplicate": no_duplicate,
    "no_near_duplicate": no_near_duplicate,
    "no_overlap": no_overlap,
}
"""Pattern of a filter -> rule, which takes the groups of the pattern too."""
EXAMPLES = (
    "length_shift,length=10:2000,no_image,script=hangul:30%,not_degenerate,verified,no_duplicate,"
    "no_near_duplicate,no_overlap"
)


def parse_filters(spec: str) -> dict[str, FilterRule]:
    """Parse filters as in EXAMPLES, in the order they are applied. Raises ValueError for others."""
    rules = {}
    for words in map(str.strip, spec.split(",")):
        for form, rule in RULES.items():
            if found := re.fullmatch(form, words):
                rules[words] = partial(rule, *found.groups())
        if words not in rules:
            raise ValueError(f"invalid filter {words!r}; use one or more of {EXAMPLES}")
    return rules


# ---- Overlap with benchmarks: items that share 13 words in a row with training data --------------
#
#    held-out tasks -> Index of passages; training task, index -> shared items by held-out task
#
# Words are runs of letters and digits, ignoring case and option letters; passages do not cross
# items. Items of 6 to 12 words are searched for as a whole. So is the question text alone, without
# the options, if it has 8 to 12 words. Shorter texts are not checked. Paraphrases are not found, so
# finding no overlap does not prove that there is none. Source: the criterion of Brown et al.,
# "Language Models are Few-Shot Learners", arXiv:2005.14165.

# Overlap with these is checked by default; the other tasks download much, are gated, have the same
# questions, or are invented here
BENCHMARKS = ("arc_easy", "arc_challenge", "mmlu", "kmmlu", "gsm8k", "aqua", "humaneval")
RUN = 13  # words
LEAST = 6  # minimum length, in words, of items that are searched for in full
LEAST_ASKED = 8  # the same for a question without its options

Words = tuple[str, ...]
Items = set[tuple[int, int]]  # (task, item)
Index = dict[Words, Items]  # passage -> where it occurs


def passages(task: Task, i: int) -> Iterator[Words]:
    """Yield the passages of one item, of RUN words or fewer."""
    words = split_words(material(task, i))
    yield from ngrams(words, RUN)
    if LEAST <= len(words) < RUN:
        yield words
    if isinstance(task, QuestionTask):
        asked = split_words(task.question(i).text)
        if LEAST_ASKED <= len(asked) < RUN:
            yield asked


def material(task: Task, i: int) -> str:
    """
    Text of item i without instructions: a question with its options, but not those added from
    training questions; a math problem; else all messages.
    """
    if isinstance(task, QuestionTask):
        own: Any = super(MoreOptions, task) if isinstance(task, MoreOptions) else task
        return "\n".join([own.question(i).text, *own.question(i).options])
    said = task[i][:1] if isinstance(task, NumberTask) else task[i]
    text = "\n".join(map(answer_text, said))
    for words in (code.INSTRUCTION, code.READ, code.PROGRAM, questions.SOLVE):
        text = text.replace(words, "")
    return text


def ngrams(words: Sequence[Any], n: int) -> Iterator[tuple[Any, ...]]:
    """All runs of n words or tokens, in order."""
    return zip(*(words[k:] for k in range(n)), strict=False)


def repeated_share(words: Sequence[Any]) -> float:
    """Share of n-grams (n = NGRAM) that repeat an earlier one."""
    runs = list(ngrams(words, NGRAM))
    return 1 - len(set(runs)) / len(runs) if runs else 0.0


def index_passages(tasks: Sequence[Task]) -> Index:
    """
    The passages of held-out tasks to search for: runs of RUN words, and shorter texts as a whole.
    The items among the values are those that are long enough to check.
    """
    index: Index = {}
    for number, task in enumerate(tasks):
        for i in range(len(task)):
            for passage in passages(task, i):
                index.setdefault(passage, set()).add((number, i))
                index.setdefault(passage[:LEAST], set())  # where a search begins
    return index


def find_items(text: str, index: Index) -> Items:
    """The items with a passage that occurs in a text."""
    words, found = split_words(text), set()
    for n, start in enumerate(ngrams(words, LEAST)):
        if start in index:
            for size in range(LEAST, RUN + 1):
                found |= index.get(words[n : n + size], set())
    return found


def shared_items(train: Task, index: Index) -> Items:
    """The items with a passage that occurs in a training task."""
    located = map(train.locate, range(len(train)))
    return {item for task, i in located for item in find_items(material(task, i), index)}
