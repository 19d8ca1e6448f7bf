"""
Data mixtures: notation, resolution into amounts, and the text for a base model.

    "fineweb=70%,code=30%" -> parse_mixture -> Part, ... -> resolve -> rows of each bucket
    DataConfig, MixConfig -> open_texts -> TextMixture: sources by name -> Corpus: rows

Amounts are shares, tokens, repeats or, for conversations, counts.
"""

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from nanochat.common import fingerprint, read_json
from nanochat.dataloader import MixedRows, Rows
from nanochat.dataset import DataConfig, Prepare, Source, open_source
from nanochat.distributed import DistContext
from nanochat.packing import bytes_to_pack, ensure_packed, open_rows, start_packing
from nanochat.tokenizer import Tokenizer

# ---- Mixtures: shares, tokens and repeats, resolved to counts ------------------------------------


MOST_REPEATS = 4  # more have diminishing returns: Muennighoff et al., arXiv:2305.16264
OPTIONS_CAP = 0.05  # warn if the share of questions with added options is larger
NUMBER = r"(?:\d+\.?\d*|\.\d+)"
PART = re.compile(
    r"(?P<name>[\w./-]+)(?::(?P<source>(?:[^,=*{}]|\{[^{}]*\})+))?"
    rf"(?:=(?P<share>{NUMBER})%|=(?:(?P<of>\d+)\*)?(?P<tokens>\d+)t|(?:=(?P<rows>\d+))?"
    rf"(?:\*(?P<repeats>{NUMBER}))?)"
)
COMMA = re.compile(r",(?![^{}]*\})")  # not inside braces
BUDGET = re.compile(rf"@(?=[\d^])(?:(\d+)t)?(?:\^({NUMBER}))?$")
READERS = {"rows": int, "repeats": float, "tokens": int, "share": lambda x: float(x) / 100}
FORM = "name[:source], then =rows, *repeats, =tokens (=500000t), =rows*tokens or =share (=20%)"


@dataclass(frozen=True)
class MixConfig:
    mixture: str = ""
    """Buckets with amounts, such as smoltalk=10000,gsm8k*4,aqua=10%, or a JSON file that defines
    buckets; see docs/data.md. Default: depends on the base model; for text, --dataset."""


@dataclass(frozen=True)
class Tags:
    """Properties of a bucket; empty if not declared."""

    domain: str = ""
    language: str = ""
    origin: str = ""
    """native, translated, synthetic or mixed."""
    licence: str = ""
    answer_format: str = ""
    """letter, number, marker, code or free."""
    parent: str = ""
    """Datasets it was derived from, separated by +. Evaluations that share one are in the same
    family."""
    teacher: str = ""
    """Model that generated the answers, if any."""
    augmented: str = ""
    """How its questions were modified: styles, order or options."""
    waived: str = ""
    """Final benchmarks of its family, separated by +, that do not block training on it."""


class Bucket(NamedTuple):
    """A named set of conversations."""

    name: str
    tags: Tags
    train: Any
    """A `tasks.base.Task`: a sequence of conversations. Its JSON-ready `identity` determines them
    and their order."""
    val: Any

    @property
    def benchmark(self) -> str:
        """Name of the benchmark if `val` is its test split, else empty."""
        return self.val.name if self.val.split == "test" and self.val.kind != "talk" else ""


class Part(NamedTuple):
    """A bucket of a mixture and its amount: tokens, a share, or conversations and repeats."""

    name: str
    source: str | None = None
    rows: int | None = None
    """Use the first N conversations; None = all."""
    repeats: float | None = None
    tokens: int | None = None
    share: float | None = None
    """Fraction of the budget."""

    @property
    def label(self) -> str:
        """Name and source, unique in a mixture."""
        return self.name if self.source is None else f"{self.name}:{self.source}"

    def fixed_rows(self, available: int, row_tokens: int) -> float | None:
        """Rows of a part with an amount, 0 for a share, None for a part that fills the rest."""
        if self.tokens is not None:
            return self.tokens / row_tokens
        if self.share is not None:
            return 0.0
        has_amount = self.rows is not None or self.repeats is not None
        return available * (self.repeats or 1) if has_amount else None


def parse_mixture(spec: str) -> list[Part]:
    """
    Parse the parts of a mixture, without its budget.

    Raises ValueError naming any part that is malformed or zero.
    """
    parts = []
    for words in COMMA.split(BUDGET.sub("", spec)):
        if (found := PART.fullmatch(words.strip())) is None:
            raise ValueError(f"{words!r} in the mixture {spec!r} must be {FORM}")
        given = {name: text for name, text in found.groupdict().items() if text}
        if "of" in given:
            given["rows"] = given.pop("of")
        part = Part(**{name: READERS.get(name, str)(text) for name, text in given.items()})
        if 0 in (part.rows, part.repeats) or (part.tokens == 0 and not part.rows):
            raise ValueError(f"{words!r} in the mixture {spec!r} has amount 0; write =0% for none")
        parts.append(part)
    return parts


def parse_budget(spec: str) -> dict[str, Any]:
    """Parse the budget of a mixture: tokens (default None) and power. Raises ValueError."""
    found = BUDGET.search(spec)
    tokens, alpha = found.groups() if found else (None, None)
    if (tokens and int(tokens) == 0) or (alpha and float(alpha) > 1):
        raise ValueError(f"the budget of {spec!r} must be >= 1 token, its power in [0, 1]")
    # key names as stored in fingerprints and checkpoints
    return {"mixture_tokens": int(tokens) if tokens else None, "mixture_alpha": float(alpha or 1)}


def resolve(
    parts: Sequence[Part],
    available: Sequence[int],
    row_tokens: int = 1,
    budget_tokens: int | None = None,
    alpha: float = 1.0,
) -> list[int]:
    """
    Return the rows of each part in one pass through the mixture, repeats included.

    available: rows of each bucket, each row of `row_tokens` tokens. Shares are fractions of the
    budget. Default budget: the total at which shares and other amounts add up to 100% or, if there
    are only shares, the largest total without repeats. Raises ValueError for contradictory or empty
    amounts.
    """
    named = ", ".join(part.label for part in parts)
    shares = math.fsum(part.share or 0 for part in parts)
    fixed = [part.fixed_rows(n, row_tokens) for part, n in zip(parts, available, strict=True)]
    open_sizes = [n if rows is None else 0 for rows, n in zip(fixed, available, strict=True)]
    weights = [n**alpha if n else 0.0 for n in open_sizes]
    taken = math.fsum(rows or 0 for rows in fixed)
    others = taken + sum(open_sizes)
    too_much = shares > 1 + 1e-9 or (shares > 1 - 1e-9 and others)
    if too_much or (shares < 1 - 1e-9 and not others):
        problem = ": too much" if too_much else ", not 100%"
        raise ValueError(f"the shares of {named} add up to {shares:.1%}{problem}")
    if budget_tokens is not None:
        total = budget_tokens / row_tokens
    elif others:
        total = others / (1 - shares)
    else:
        total = min(n / p.share for p, n in zip(parts, available, strict=True) if p.share)
    left = total * (1 - shares) - taken
    if left < -0.5 or (left < 0.5 if any(weights) else left > 0.5 * len(parts)):
        raise ValueError(
            f"the budget is {round(total * row_tokens):,} tokens, but the amounts of {named} "
            f"leave {round(left * row_tokens):,} for buckets without an amount"
        )
    filled = left / math.fsum(weights) if any(weights) else 0.0
    every = zip(parts, fixed, weights, strict=True)
    wanted = [(rows or 0) + total * (part.share or 0) + filled * w for part, rows, w in every]
    counts = round_to_total(wanted)
    for part, n, count in zip(parts, available, counts, strict=True):
        if not (part.share == 0 or part.tokens == 0 or (count and n)):
            raise ValueError(f"{part.label} gets under {row_tokens} tokens; increase or remove it")
    return counts


def round_to_total(wanted: Sequence[float]) -> list[int]:
    """Round to integers that add up to the rounded sum, by the largest-remainder method."""
    counts = [math.floor(x) for x in wanted]
    order = sorted(range(len(wanted)), key=lambda i: counts[i] - wanted[i])
    for i in order[: round(math.fsum(wanted)) - sum(counts)]:
        counts[i] += 1
    return counts


# ---- A resolved mixture --------------------------------------------------------------------------


@dataclass(frozen=True)
class Resolved:
    """A bucket with its resolved amount."""

    name: str
    tags: Tags
    available: int | None
    """Tokens available; None if a text is not fully packed."""
    tokens: int
    """Tokens in one pass through the mixture."""
    documents: int | None
    """Conversations or documents available; None as above."""
    trained: int | None = None
    """Available tokens with loss; None = all."""

    @property
    def repeats(self) -> float | None:
        """Average number of times a token is used in one pass, if known."""
        return self.tokens / self.available if self.available else None

    @property
    def trained_tokens(self) -> int:
        """Tokens with loss in one pass."""
        if self.trained is None or not self.available:
            return self.tokens
        return round(self.trained * self.tokens / self.available)


@dataclass(frozen=True)
class Resolution:
    """A resolved mixture; printed, and saved with the checkpoints."""

    spec: str
    buckets: Sequence[Resolved]

    @property
    def warnings(self) -> list[str]:
        """Warnings about buckets repeated too often and about too many added options."""
        warnings = [
            f"warning: {bucket.name} is used {bucket.repeats:.1f} times per epoch; "
            f"above {MOST_REPEATS}, returns diminish"
            for bucket in self.buckets
            if (bucket.repeats or 0) > MOST_REPEATS
        ]
        if self.shares_by("augmented").get("options", 0) > OPTIONS_CAP:
            warnings.append(
                f"warning: more than {OPTIONS_CAP:.0%} of the mixture is questions with options "
                "added by retrieval, which lowered most benchmarks in earlier work"
            )
        return warnings

    @property
    def tokens(self) -> int:
        """Tokens in one pass."""
        return sum(bucket.tokens for bucket in self.buckets)

    @property
    def documents(self) -> int:
        """Conversations or documents in one pass, repeats included."""
        return round(sum((b.documents or 0) * (b.repeats or 0) for b in self.buckets))

    def share(self, bucket: Resolved) -> float:
        """Fraction of the tokens of a pass."""
        return bucket.tokens / self.tokens

    def shares_by(self, tag: str) -> dict[str, float]:
        """Value of a tag -> its share of the tokens."""
        found: dict[str, float] = defaultdict(float)
        for bucket in self.buckets:
            found[getattr(bucket.tags, tag)] += self.share(bucket)
        return found

    def state(self) -> dict[str, Any]:
        """JSON-ready form."""
        buckets = [
            {**asdict(bucket), "repeats": bucket.repeats, "share": self.share(bucket)}
            for bucket in self.buckets
        ]
        return {"spec": self.spec, "buckets": buckets, "warnings": self.warnings}

    def tables(self) -> list[dict[str, Any]]:
        """Tables for a record: shares by bucket, and by every tag with several values."""
        columns = "Bucket, Tags, Documents, Tokens, With loss, Repeats, Share".split(", ")
        rows = [
            [
                bucket.name,
                ", ".join(value for value in asdict(bucket.tags).values() if value) or "-",
                "-" if bucket.documents is None else f"{bucket.documents:,}",
                f"{bucket.tokens:,}",
                f"{bucket.trained_tokens:,}",
                "-" if bucket.repeats is None else f"{bucket.repeats:.2f}",
                f"{self.share(bucket):.1%}",
            ]
            for bucket in self.buckets
        ]
        by_tag = [
            [tag.name, value or "-", f"{share:.1%}"]
            for tag in fields(Tags)
            if len(shares := self.shares_by(tag.name)) > 1
            for value, share in shares.items()
        ]
        tables = [
            {"title": "Mixture", "columns": columns, "rows": rows},
            {"title": "Mixture by tag", "columns": ["Tag", "Value", "Share"], "rows": by_tag},
        ]
        return tables if by_tag else tables[:1]

    def __str__(self) -> str:
        rows = map("  ".join, self.tables()[0]["rows"])
        return "\n".join([f"mixture {self.spec}", *rows, *self.warnings])


@dataclass(frozen=True)
class ChatMixture:
    """Buckets of conversations for training and validation; `spec` sets the amount of each."""

    spec: str
    declared: Mapping[str, Any]
    """User-defined buckets, as returned by `read_mixture`."""
    train_buckets: Sequence[Bucket]
    """Training buckets, one per part of the mixture."""
    val_buckets: Sequence[Bucket]

    @property
    def description(self) -> dict[str, Any]:
        """JSON-ready; identical for the same conversations in the same proportions."""
        return {
            "learned": {bucket.name: bucket.train.identity for bucket in self.train_buckets},
            "measured": {bucket.name: bucket.val.identity for bucket in self.val_buckets},
            "parts": [part._asdict() for part in parse_mixture(self.spec)],
            **parse_budget(self.spec),
        }


# ---- Custom buckets ------------------------------------------------------------------------------


def read_mixture(words: str) -> tuple[str, dict[str, dict[str, Any]]]:
    """
    Return the notation of a --mixture and its custom buckets, name -> source and tags.

    `words` is the notation, or a file X.json: {"mixture": ..., "buckets": {name: ...}}. A bucket is
    {"task": "smoltalk", "source": "local/chat-korean", ...} for conversations (for questions,
    "augment" is styles, order or options) or {"dataset": ...} for text. Raises ValueError for other
    content, naming the bucket.
    """
    if not re.fullmatch(r"[^:=,]+\.json", words):
        return words, {}
    file = Path(words).expanduser()
    content = read_json(file)
    source_keys = {"task", "source", "augment", "dataset"}
    known = {tag.name for tag in fields(Tags)} | source_keys
    if not isinstance(content, dict) or content.keys() != {"mixture", "buckets"}:
        raise ValueError(f'{file} must be {{"mixture": "...", "buckets": {{name: {{...}}}}}}')
    if not (isinstance(content["mixture"], str) and isinstance(content["buckets"], dict)):
        raise ValueError(f"{file}: mixture must be a string, buckets {{name: {{...}}}}")
    for name, entry in content["buckets"].items():
        if not isinstance(entry, dict) or len({"task", "dataset"} & entry.keys()) != 1:
            raise ValueError(f"{file}: {name} must have exactly one of task and dataset")
        if wrong := {k: v for k, v in entry.items() if k not in known or not isinstance(v, str)}:
            fix = f"use only these keys, with string values: {', '.join(sorted(known))}"
            raise ValueError(f"{file}: {name} has invalid {wrong}; {fix}")
    return content["mixture"], content["buckets"]


def tags_of(entry: Mapping[str, Any], default: Tags = Tags()) -> Tags:
    """Return the tags of a declared bucket; `default` provides the rest."""
    return replace(default, **{t.name: entry[t.name] for t in fields(Tags) if t.name in entry})


# ---- The text of a base model: one source, or a mixture of sources -------------------------------
# Every bucket has its own shards and rows, so changing the mixture does not repack them.


@dataclass(frozen=True)
class TextMixture:
    """Text sources by bucket name, in order; `spec` sets the amount of each."""

    sources: dict[str, Source]
    spec: str = ""
    """The mixture; empty for a single source."""
    tags: Mapping[str, Tags] = field(default_factory=dict)

    @property
    def parts(self) -> list[Part]:
        """Parts of the mixture; empty for a single source."""
        return parse_mixture(self.spec) if self.spec else []

    @property
    def only(self) -> Source:
        """The single source."""
        return next(iter(self.sources.values()))

    @property
    def fingerprint(self) -> str:
        """Hash of the text: of the source, or of all sources and the mixture."""
        if not self.spec:
            return self.only.fingerprint
        prints = {name: source.fingerprint for name, source in self.sources.items()}
        return fingerprint({"mixture": self.spec, **parse_budget(self.spec), "sources": prints})

    def describe(self) -> dict[str, Any]:
        """JSON-ready description, from which `open_texts` reopens the same text."""
        if not self.spec:
            return self.only.describe()
        return {
            "mixture": self.spec,
            "sources": {name: source.describe() for name, source in self.sources.items()},
            "tags": {name: asdict(tags) for name, tags in self.tags.items()},
            "fingerprint": self.fingerprint,
        }


@dataclass(frozen=True)
class Corpus:
    """A TextMixture as packed rows of one length, by bucket name."""

    texts: TextMixture
    tokenizer: Tokenizer
    rows: dict[str, Rows]

    @property
    def fingerprint(self) -> str:
        """Hash of the rows of all buckets."""
        prints = {name: rows.fingerprint for name, rows in self.rows.items()}
        return fingerprint(prints) if self.texts.spec else next(iter(prints.values()))

    def resolve_amounts(
        self, rows_needed: int, machine: DistContext
    ) -> tuple[Resolution | None, dict[str, int]]:
        """
        Return the resolved mixture (None for a single source) of a run over `rows_needed` rows, and
        the number of rows of every bucket. Also prints the mixture.

        First packs the buckets whose amount depends on their size.
        """
        spec, parts, tags = self.texts.spec, self.texts.parts, self.texts.tags
        if not spec:
            return None, dict.fromkeys(self.rows, rows_needed)
        if sized := [p.label for p in parts if p.tokens is None and p.share is None]:
            machine.print0(f"packing all of {', '.join(sized)} to count the tokens")
            self.pack(dict.fromkeys(sized), machine)
        T = next(iter(self.rows.values())).max_seq_len
        sizes = {  # None if not fully packed
            name: rows.packed_train_rows * T
            if all(map(rows.is_packed, rows.train_shards))
            else None
            for name, rows in self.rows.items()
        }
        available = [size // T if size else rows_needed for size in sizes.values()]
        alpha = parse_budget(spec)["mixture_alpha"]
        counts = resolve(parts, available, T, rows_needed * T, alpha)
        needed = dict(zip(self.rows, counts, strict=True))
        found = [
            Resolved(name, tags[name], size, needed[name] * T, size and rows.totals()["documents"])
            for (name, rows), size in zip(self.rows.items(), sizes.values(), strict=True)
        ]
        mixed = Resolution(spec, found)
        machine.print0(mixed)
        return mixed, needed

    def mixed(self, needed: Mapping[str, int]) -> Rows | MixedRows:
        """Return the rows of a run: of the single source, or mixed by `needed`."""
        if not self.texts.spec:
            return next(iter(self.rows.values()))
        return MixedRows({name: (rows, needed[name]) for name, rows in self.rows.items()})

    def pack(self, needed: Mapping[str, int | None], machine: DistContext) -> None:
        """Pack the needed rows of each bucket (None: all); every rank waits until it is done."""
        for name, count in needed.items():
            rows, source = self.rows[name], self.texts.sources[name]
            job = partial(ensure_packed, rows, source, self.tokenizer, count)
            machine.on_node(job)

    def bytes_to_pack(self, needed: Mapping[str, int]) -> int:
        """Estimated bytes that packing will write."""
        sources = self.texts.sources
        return sum(bytes_to_pack(self.rows[n], sources[n], count) for n, count in needed.items())

    def packing(self, needed: Mapping[str, int], machine: DistContext) -> ExitStack:
        """Pack during training, in one background process per machine and bucket."""
        stack = ExitStack()
        for name, count in needed.items() if machine.local_rank == 0 else ():
            source = self.texts.sources[name]
            stack.enter_context(start_packing(self.rows[name], source, count))
        return stack


def open_corpus(texts: TextMixture, tokenizer: Tokenizer, max_seq_len: int) -> Corpus:
    """Open the rows of `texts`, packed or not yet packed."""
    sources = texts.sources.items()
    rows = {name: open_rows(each, tokenizer, max_seq_len) for name, each in sources}
    return Corpus(texts, tokenizer, rows)


def open_texts(
    cfg: DataConfig,
    mix: MixConfig | None = None,
    recorded: dict[str, Any] | None = None,
    prepare: Prepare | None = None,
) -> TextMixture:
    """
    Open the text that `cfg` or `mix` selects, or else the one `recorded` by an earlier stage.

    recorded: `TextMixture.describe()` of that stage. prepare: see `open_source`. All parts of a
    mixture are checked before any source is opened. Raises ValueError, stating the fix, if text
    does not support an amount; also raises the errors of `open_source`.
    """
    mixture = mix.mixture if mix else ""
    if recorded and "mixture" in recorded and not (mixture or cfg.dataset):
        spec, described = recorded["mixture"], recorded["sources"]  # JSON sorts the sources
        names = [part.label for part in parse_mixture(spec)]
        sources = {name: open_source(cfg, described[name], prepare) for name in names}
        tags = {name: tags_of(was) for name, was in recorded["tags"].items()}
        return TextMixture(sources, spec, tags)
    if not mixture:
        source = open_source(cfg, recorded, prepare)
        return TextMixture({source.name: source})
    spec, declared = read_mixture(mixture)
    if replace(cfg, num_shards=None) != type(cfg)():
        raise ValueError("--mixture selects the text; remove --dataset, --revision, --val_shard")
    if parse_budget(spec)["mixture_tokens"] is not None:
        fix = "remove @...t and use --num_iterations or --target_param_data_ratio"
        raise ValueError(f"{spec!r}: a mixture of text cannot have a budget; {fix}")
    configs: dict[str, DataConfig] = {}
    parts = parse_mixture(spec)
    resolve(parts, [1 << 40] * len(parts))  # raises ValueError for contradictory shares
    for part in parts:
        entry = declared.get(part.name, {"dataset": part.name})
        if part.rows is not None or part.source is not None:
            ways = "tokens (=500000t), a share (=20%) or repeats (*1.5)"
            raise ValueError(f"{part.label!r}: for text, use {ways}, and no :source")
        if "task" in entry:
            fix = "use it in the mixture of scripts.mid_train or scripts.chat_sft"
            raise ValueError(f"{part.name} is declared as a task, not as text; {fix}")
        if part.name in configs:
            raise ValueError(f"{part.name} appears twice in the mixture; use {part.name}*2")
        configs[part.name] = replace(cfg, dataset=entry["dataset"])
    sources = {name: open_source(each, None, prepare) for name, each in configs.items()}
    tags = {name: tags_of(declared.get(name, {})) for name in sources}
    return TextMixture(sources, spec, tags)
