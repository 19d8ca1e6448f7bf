"""
Mixtures of data: their notation, the amounts they resolve to, and the text of a base model.

    "fineweb=0.7,code=0.3" -> parse_mixture -> Part, ... -> resolve -> counts of each bucket
    DataConfig, MixConfig -> open_texts -> TextMixture: sources by name -> Corpus: rows

Text is counted in tokens, conversations in items: by shares, counts or repeats.
"""

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from nanochat.common import fingerprint, read_json
from nanochat.dataloader import MixedRows, Rows
from nanochat.dataset import DataConfig, Prepare, Source, open_source
from nanochat.distributed import DistContext
from nanochat.packing import bytes_to_pack, ensure, open_rows, start_packing
from nanochat.tokenizer import Tokenizer

# ---- Mixtures: shares, tokens and repeats, resolved to counts ------------------------------------


MOST_REPEATS = 4  # beyond, repeating pays ever less: Muennighoff et al., arXiv:2305.16264
OPTIONS_CAP = 0.05  # share of questions with added options above which a warning is printed
NUMBER = r"(?:\d+\.?\d*|\.\d+)"
PART = re.compile(
    r"(?P<name>[\w./-]+)(?::(?P<source>[^,=*]+))?"
    rf"(?:=(?P<share>{NUMBER})%|=(?:(?P<of>\d+)\*)?(?P<tokens>\d+)t|(?:=(?P<rows>\d+))?"
    rf"(?:\*(?P<repeats>{NUMBER}))?)"
)
BUDGET = re.compile(rf"@(?=[\d^])(?:(\d+)t)?(?:\^({NUMBER}))?$")
READERS = {"rows": int, "repeats": float, "tokens": int, "share": lambda x: float(x) / 100}
FORM = "name[:source], then =rows, *repeats, =tokens (=500000t), =rows*tokens or =share (=20%)"


@dataclass(frozen=True)
class MixConfig:
    mixture: str = ""
    """What is learned: buckets, each with as many conversations (=10000), repeats (*1.5), tokens
    (=500000t) or as large a share (=20%) as wanted, as in smoltalk=10000,gsm8k*4,aqua=10%. A
    bucket without an amount is taken whole, or fills the budget with the others of that sort; of
    one with =0% nothing is taken; =10000*500000t takes so many tokens of so many conversations.
    Conversations may have a budget behind them all: @500000t, the tokens of one pass (by default
    the amounts decide); and @^0.5 or @500000t^0.5: buckets without an amount share what is left in
    proportion to their size to this power (by default 1; 0 = all alike).
    Or a file that also names own buckets, as in own.json: {"mixture": "wiki=50%,web=50%",
    "buckets": {"wiki": {"dataset": "owner/name", "language": "ko"}, ...}}.
    Default: by what the base model was trained on; of text, the one of --dataset."""


@dataclass(frozen=True)
class Tags:
    """Properties of a bucket; empty where none is declared."""

    domain: str = ""
    language: str = ""
    origin: str = ""
    """native, translated, synthetic or mixed."""
    teacher: str = ""
    """The model that wrote the answers, where one did."""
    licence: str = ""
    answer_format: str = ""
    """letter, number, marker, code or free."""
    augmented: str = ""
    """How its questions were changed: styles, order or options."""
    parent: str = ""
    """The data set it was made of: what shares a parent with an evaluation is of its family."""


class Bucket(NamedTuple):
    """Conversations that can be taken or left."""

    name: str
    tags: Tags
    train: Any
    """A `tasks.base.Task`: a sequence of conversations. Its `identity`, which is JSON-ready,
    decides which there are, and in which order."""
    val: Any

    @property
    def measures(self) -> str:
        """The benchmark whose test questions `val` is; empty where it has a split of its own."""
        return self.val.name if self.val.split == "test" and self.val.kind != "talk" else ""


class Part(NamedTuple):
    """A bucket of a mixture and its amount: tokens, a share, or conversations and repeats."""

    name: str
    source: str | None = None
    rows: int | None = None
    """Conversations, counted from the first; None for all there are."""
    repeats: float | None = None
    tokens: int | None = None
    share: float | None = None
    """Of the budget."""

    @property
    def label(self) -> str:
        """What tells it from the other buckets."""
        return self.name if self.source is None else f"{self.name}:{self.source}"

    def fixed_rows(self, available: int, row_tokens: int) -> float | None:
        """Rows where it has an amount of its own or a share (0); None where it is open."""
        if self.tokens is not None:
            return self.tokens / row_tokens
        if self.share is not None:
            return 0.0
        has_amount = self.rows is not None or self.repeats is not None
        return available * (self.repeats or 1) if has_amount else None


def parse_mixture(spec: str) -> list[Part]:
    """
    The parts of a mixture, its budget left out. Raises ValueError naming a part that is malformed
    or of 0 rows.
    """
    parts = []
    for words in BUDGET.sub("", spec).split(","):
        if (found := PART.fullmatch(words.strip())) is None:
            raise ValueError(f"{words!r} in the mixture {spec!r} is not {FORM}")
        given = {name: text for name, text in found.groupdict().items() if text}
        if "of" in given:
            given["rows"] = given.pop("of")
        part = Part(**{name: READERS.get(name, str)(text) for name, text in given.items()})
        if 0 in (part.rows, part.repeats) or (part.tokens == 0 and not part.rows):
            raise ValueError(f"{words!r} in the mixture {spec!r} is not {FORM}: it takes nothing")
        parts.append(part)
    return parts


def parse_budget(spec: str) -> dict[str, Any]:
    """The tokens (by default None) and the power behind a mixture. Raises ValueError."""
    found = BUDGET.search(spec)
    tokens, alpha = found.groups() if found else (None, None)
    if (tokens and int(tokens) == 0) or (alpha and float(alpha) > 1):
        raise ValueError(f"the mixture {spec!r} needs a token or more and a power from 0 to 1")
    # the names that fingerprints and checkpoints have
    return {"mixture_tokens": int(tokens) if tokens else None, "mixture_alpha": float(alpha or 1)}


def resolve(
    parts: Sequence[Part],
    available: Sequence[int],
    row_tokens: int = 1,
    budget_tokens: int | None = None,
    alpha: float = 1.0,
) -> list[int]:
    """
    How much of each part one pass through the mixture takes, repeats included, in rows.

    available: the rows of each bucket, of `row_tokens` tokens. Shares are of the budget; without
    one, of the total at which they come out right, and of shares alone the largest at which nothing
    comes twice. Raises ValueError for amounts that contradict one another or come to nothing.
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
        problem = ": too much" if too_much else ", not to 100%"
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
            f"a budget of {round(total * row_tokens):,} tokens, but the amounts of {named} "
            f"leave {round(left * row_tokens):,} of it to buckets without one"
        )
    filled = left / math.fsum(weights) if any(weights) else 0.0
    every = zip(parts, fixed, weights, strict=True)
    wanted = [(rows or 0) + total * (part.share or 0) + filled * w for part, rows, w in every]
    counts = round_to_total(wanted)
    for part, n, count in zip(parts, available, counts, strict=True):
        if not (part.share == 0 or part.tokens == 0 or (count and n)):
            raise ValueError(f"{part.label} comes to less than {row_tokens} tokens")
    return counts


def round_to_total(wanted: Sequence[float]) -> list[int]:
    """Whole numbers with the sum of `wanted`, rounded: the largest remainders are rounded up."""
    counts = [math.floor(x) for x in wanted]
    order = sorted(range(len(wanted)), key=lambda i: counts[i] - wanted[i])
    for i in order[: round(math.fsum(wanted)) - sum(counts)]:
        counts[i] += 1
    return counts


# ---- A resolved mixture --------------------------------------------------------------------------


@dataclass(frozen=True)
class Resolved:
    """A bucket as the mixture takes it."""

    name: str
    tags: Tags
    available: int | None
    """Tokens there are; None while not all of a text is packed."""
    tokens: int
    """In one pass through the mixture."""
    documents: int
    """Conversations or documents there are."""
    trained: int | None = None
    """Tokens there are that carry loss; None where all do."""

    @property
    def repeats(self) -> float | None:
        """How often a token comes in one pass."""
        return self.tokens / self.available if self.available else None

    @property
    def trained_tokens(self) -> int:
        """Tokens that carry loss in one pass."""
        if self.trained is None or not self.available:
            return self.tokens
        return round(self.trained * self.tokens / self.available)


@dataclass(frozen=True)
class Resolution:
    """A mixture, resolved: printed, and saved beside the checkpoints."""

    spec: str
    buckets: Sequence[Resolved]

    @property
    def warnings(self) -> list[str]:
        """A line for every bucket that is repeated too often, and one for too many options."""
        warnings = [
            f"warning: {bucket.name} comes {bucket.repeats:.1f} times; beyond {MOST_REPEATS} times "
            "repeating teaches little"
            for bucket in self.buckets
            if (bucket.repeats or 0) > MOST_REPEATS
        ]
        if self.shares_by("augmented").get("options", 0) > OPTIONS_CAP:
            warnings.append(
                f"warning: more than {OPTIONS_CAP:.0%} of the mixture are questions with options "
                "added by retrieval, which lowered most benchmarks of those who tried it"
            )
        return warnings

    @property
    def tokens(self) -> int:
        """Of one pass."""
        return sum(bucket.tokens for bucket in self.buckets)

    @property
    def documents(self) -> int:
        """Conversations or documents of one pass, repeats included."""
        return round(sum(b.documents * (b.repeats or 0) for b in self.buckets))

    def share(self, bucket: Resolved) -> float:
        """Of the tokens of a pass."""
        return bucket.tokens / self.tokens

    def shares_by(self, tag: str) -> dict[str, float]:
        """Value of a tag -> the share of the tokens that it has."""
        found: dict[str, float] = defaultdict(float)
        for bucket in self.buckets:
            found[getattr(bucket.tags, tag)] += self.share(bucket)
        return found

    def state(self) -> dict[str, Any]:
        """JSON-ready."""
        buckets = [
            {**asdict(bucket), "repeats": bucket.repeats, "share": self.share(bucket)}
            for bucket in self.buckets
        ]
        return {"spec": self.spec, "buckets": buckets, "warnings": self.warnings}

    def tables(self) -> list[dict[str, Any]]:
        """For a record: shares by bucket, and by every tag that tells buckets apart."""
        columns = "Bucket, Of, Documents, Tokens, With loss, Repeats, Share".split(", ")
        rows = [
            [
                bucket.name,
                ", ".join(value for value in asdict(bucket.tags).values() if value) or "-",
                f"{bucket.documents:,}",
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


# ---- Own buckets ---------------------------------------------------------------------------------


def read_mixture(words: str) -> tuple[str, dict[str, dict[str, Any]]]:
    """
    What a --mixture says: its notation, and own buckets, name -> where it comes from, and its tags.

    `words` is the notation itself, or a file X.json: {"mixture": ..., "buckets": {name: ...}} with
    {"task": "smoltalk", "source": "local/chat-korean", ...} for conversations, of questions with
    "augment": styles, order or options; {"dataset": ...} for text. Raises
    ValueError naming an entry that is neither, or a key that is neither place nor tag.
    """
    if not re.fullmatch(r"[^:=,]+\.json", words):
        return words, {}
    file = Path(words).expanduser()
    content = read_json(file)
    places = {"task", "source", "augment", "dataset"}
    known = {tag.name for tag in fields(Tags)} | places
    if not isinstance(content, dict) or content.keys() != {"mixture", "buckets"}:
        raise ValueError(f'{file} is not {{"mixture": "...", "buckets": {{name: {{...}}}}}}')
    if not (isinstance(content["mixture"], str) and isinstance(content["buckets"], dict)):
        raise ValueError(f"{file}: the mixture is a string, buckets are {{name: {{...}}}}")
    for name, entry in content["buckets"].items():
        if not isinstance(entry, dict) or len({"task", "dataset"} & entry.keys()) != 1:
            raise ValueError(f"{file}: {name} must have one of task and dataset")
        if wrong := {k: v for k, v in entry.items() if k not in known or not isinstance(v, str)}:
            allowed = f"the others are strings, of {', '.join(sorted(known))}"
            raise ValueError(f"{file}: {name} has {wrong}; leave it out, {allowed}")
    return content["mixture"], content["buckets"]


def tags_of(entry: Mapping[str, Any], default: Tags = Tags()) -> Tags:
    """The tags of a declared bucket; those it does not declare, from `default`."""
    return replace(default, **{t.name: entry[t.name] for t in fields(Tags) if t.name in entry})


# ---- The text of a base model: one source, or several in proportions -----------------------------
# Every bucket keeps shards and rows of its own, so that another mixture of them packs nothing anew.


@dataclass(frozen=True)
class TextMixture:
    """Sources by the name of their bucket, in order; `spec` decides how much of each."""

    sources: dict[str, Source]
    spec: str = ""
    """The mixture; without one there is a single source, which is taken as it comes."""
    tags: Mapping[str, Tags] = field(default_factory=dict)

    @property
    def parts(self) -> list[Part]:
        """Of the mixture; none for a single source."""
        return parse_mixture(self.spec) if self.spec else []

    @property
    def only(self) -> Source:
        """The single source."""
        return next(iter(self.sources.values()))

    @property
    def fingerprint(self) -> str:
        """Names the text: that of the source, or of all of them and their proportions."""
        if not self.spec:
            return self.only.fingerprint
        prints = {name: source.fingerprint for name, source in self.sources.items()}
        return fingerprint({"mixture": self.spec, **parse_budget(self.spec), "sources": prints})

    def describe(self) -> dict[str, Any]:
        """JSON-ready; `open_texts` opens the very same text from it."""
        if not self.spec:
            return self.only.describe()
        return {
            "mixture": self.spec,
            "chosen": parse_budget(self.spec),
            "sources": {name: source.describe() for name, source in self.sources.items()},
            "tags": {name: asdict(tags) for name, tags in self.tags.items()},
            "fingerprint": self.fingerprint,
        }


@dataclass(frozen=True)
class Corpus:
    """TextMixture as packed rows of one length, by the name of their bucket."""

    texts: TextMixture
    tokenizer: Tokenizer
    rows: dict[str, Rows]

    @property
    def fingerprint(self) -> str:
        """Names the rows of all buckets."""
        prints = {name: rows.fingerprint for name, rows in self.rows.items()}
        return fingerprint(prints) if self.texts.spec else next(iter(prints.values()))

    def resolve_amounts(
        self, rows_needed: int, machine: DistContext
    ) -> tuple[Resolution | None, dict[str, int]]:
        """
        The amounts that a run over `rows_needed` rows takes of a mixture, which are printed, and
        the rows of every bucket. Packs buckets first whose share depends on their size.
        """
        spec, parts, tags = self.texts.spec, self.texts.parts, self.texts.tags
        if not spec:
            return None, dict.fromkeys(self.rows, rows_needed)
        if sized := [p.label for p in parts if p.tokens is None and p.share is None]:
            machine.print0(f"packing all of {', '.join(sized)}: it counts how much there is")
            self.pack(dict.fromkeys(sized), machine)
        T = next(iter(self.rows.values())).max_seq_len
        sizes = {  # None while not all of a text is packed
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
            Resolved(name, tags[name], sizes[name], needed[name] * T, rows.totals()["documents"])
            for name, rows in self.rows.items()
        ]
        mixed = Resolution(spec, found)
        machine.print0(mixed)
        return mixed, needed

    def mixed(self, needed: Mapping[str, int]) -> Rows | MixedRows:
        """The rows of a run: those of a single text as they come, or mixed by their counts."""
        if not self.texts.spec:
            return next(iter(self.rows.values()))
        return MixedRows({name: (rows, needed[name]) for name, rows in self.rows.items()})

    def pack(self, needed: Mapping[str, int | None], machine: DistContext) -> None:
        """Pack so many rows of each bucket (None: all); every rank waits until it is done."""
        if machine.local_rank == 0:
            for name, count in needed.items():
                with machine.working(f"packing {name}"):
                    ensure(self.rows[name], self.texts.sources[name], self.tokenizer, count)
        machine.barrier()

    def bytes_to_pack(self, needed: Mapping[str, int], machine: DistContext) -> int:
        """About what packing will write; 0 on all ranks but the main one."""
        if not machine.is_main:
            return 0
        sources = self.texts.sources
        return sum(bytes_to_pack(self.rows[n], sources[n], count) for n, count in needed.items())

    def packing(self, needed: Mapping[str, int], machine: DistContext) -> ExitStack:
        """Pack during training what it needs, in one process for each machine and bucket."""
        stack = ExitStack()
        for name, count in needed.items() if machine.local_rank == 0 else ():
            source = self.texts.sources[name]
            stack.enter_context(start_packing(self.rows[name], source, count))
        return stack


def open_corpus(
    texts: TextMixture, tokenizer: Tokenizer, max_seq_len: int, *, verifies: bool = True
) -> Corpus:
    """The rows of texts, packed already or not; `verifies` as for `Rows`."""
    sources = texts.sources.items()
    rows = {name: open_rows(each, tokenizer, max_seq_len, verifies) for name, each in sources}
    return Corpus(texts, tokenizer, rows)


def open_texts(
    cfg: DataConfig,
    mix: MixConfig | None = None,
    recorded: dict[str, Any] | None = None,
    prepare: Prepare | None = None,
) -> TextMixture:
    """
    The text that `cfg` or `mix` name; or, where they name none, the one an earlier stage `recorded`
    (`TextMixture.describe()` of then). `prepare` as for `open_source`; of a mixture, no source is
    opened before all parts are checked.

    Raises ValueError, naming the fix, for amounts that text is not counted in, and as `open_source`
    does.
    """
    mixture = mix.mixture if mix else ""
    if recorded and "mixture" in recorded and not (mixture or cfg.dataset):
        spec, described = recorded["mixture"], recorded["sources"]  # sorted by name
        names = [part.label for part in parse_mixture(spec)]
        sources = {name: open_source(cfg, described[name], prepare) for name in names}
        tags = {name: tags_of(was) for name, was in recorded["tags"].items()}
        if parse_budget(spec) != recorded["chosen"]:  # of a version that had a flag for it
            spec += f"@^{recorded['chosen']['mixture_alpha']:g}"
        return TextMixture(sources, spec, tags)
    if not mixture:
        source = open_source(cfg, recorded, prepare)
        return TextMixture({source.name: source})
    spec, declared = read_mixture(mixture)
    if replace(cfg, num_shards=None) != type(cfg)():
        raise ValueError("--mixture names its texts itself: give no --dataset or other text")
    if parse_budget(spec)["mixture_tokens"] is not None:
        fix = "leave @...t out; --num_iterations or --target_param_data_ratio decides"
        raise ValueError(f"{spec!r}: the budget of a mixture of text is that of the run: {fix}")
    configs: dict[str, DataConfig] = {}
    for part in parse_mixture(spec):
        entry = declared.get(part.name, {"dataset": part.name})
        if part.rows is not None or part.source is not None:
            ways = "tokens (=500000t), a share (=20%) or repeats (*1.5)"
            raise ValueError(f"{part.label!r}: text is taken by {ways}, and has no further source")
        if "task" in entry:
            fix = "it is for the mixture of scripts.mid_train or scripts.chat_sft"
            raise ValueError(f"{part.name} is declared as a task, which is no text: {fix}")
        if part.name in configs:
            raise ValueError(f"{part.name} comes twice in the mixture; say {part.name}*2")
        configs[part.name] = replace(cfg, dataset=entry["dataset"])
    sources = {name: open_source(place, None, prepare) for name, place in configs.items()}
    tags = {name: tags_of(declared.get(name, {})) for name in sources}
    return TextMixture(sources, spec, tags)
