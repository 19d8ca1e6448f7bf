"""
Mixtures of data: their words, what they amount to, and the text of a base model.

    "fineweb=0.7,code=0.3" -> parse_mixture -> Part, ... -> resolve -> counts of each bucket
    DataConfig, MixConfig -> open_texts -> TextMixture: sources by name -> Corpus: rows

Text is counted in tokens, conversations in items: by shares, counts or repeats.
"""

import math
import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from nanochat.common import fingerprint, read_json
from nanochat.dataloader import MixedRows, Rows
from nanochat.dataset import DataConfig, Prepare, Source, open_source
from nanochat.distributed import Machine
from nanochat.packing import (
    bytes_to_pack,
    ensure,
    open_rows,
    start_packing,
)
from nanochat.tokenizer import Tokenizer

# ---- Mixtures: what shares, tokens and repeats amount to -----------------------------------------


MOST_REPEATS = 4  # beyond, repeating pays ever less: Muennighoff et al., arXiv:2305.16264
OPTIONS_CAP = 0.05  # share of questions with added options from which on they are warned of
MIXTURE_FILE = "mixture.json"  # what a mixture came to, beside the checkpoints
PART = re.compile(r"([\w./-]+)(?::([^,=*]+))?(?:=([\d.]+)(t|%)?)?(?:\*([\d.]+)(t)?)?")
FORM = (
    "name[:source], then =rows, *repeats, =tokens as in =500000t, rows and tokens as in "
    "=10000*500000t, or a share as in =20%"
)


@dataclass(frozen=True)
class MixConfig:
    mixture: str = ""
    """What is learned: buckets, each with as many conversations (=10000), repeats (*1.5), tokens
    (=500000t) or as large a share (=20%) as wanted, as in smoltalk=10000,gsm8k*4,aqua=10%. A
    bucket without an amount is taken whole, or fills the budget with the others of that sort; of
    one with =0% nothing is taken; =10000*500000t takes so many tokens of so many conversations.
    Default: by what the base model was trained on; of text, the one of --dataset."""
    buckets: str | None = None
    """A JSON file that names own buckets: {"wiki": {"dataset": "owner/name", "language": "ko"}}."""
    mixture_tokens: int | None = None
    """The budget: tokens of the mixture gone through once. Default: what the amounts add up to."""
    mixture_alpha: float = 1.0
    """Buckets without an amount share what is left in proportion to their size to this power: 1 as
    they are, 0 all alike."""

    def __post_init__(self) -> None:
        if self.mixture_tokens is not None and self.mixture_tokens < 1:
            raise ValueError(f"mixture_tokens must be at least 1, got {self.mixture_tokens}")
        if not 0 <= self.mixture_alpha <= 1:
            raise ValueError(f"mixture_alpha lies in [0, 1], got {self.mixture_alpha}")

    @property
    def chosen(self) -> dict[str, Any]:
        """What beside the words decides the proportions; JSON-ready."""
        return {"mixture_tokens": self.mixture_tokens, "mixture_alpha": self.mixture_alpha}

    def otherwise(self, mixture: str) -> "MixConfig":
        """The same with a mixture where none was asked for."""
        return self if self.mixture else replace(self, mixture=mixture)


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

    @property
    def is_empty(self) -> bool:
        """Whether nothing of it is taken."""
        return self.share == 0 or self.tokens == 0

    @property
    def is_open(self) -> bool:
        """Whether nobody said how much of it."""
        return self.rows is self.repeats is self.tokens is self.share is None


def parse_mixture(spec: str) -> list[Part]:
    """The parts of a mixture. Raises ValueError naming the part that is amiss."""
    parts = []
    for words in spec.split(","):
        found = PART.fullmatch(words.strip())
        try:
            part = read_part(*found.groups()) if found else None
        except ValueError:
            part = None
        if part is None:
            raise ValueError(f"{words!r} in the mixture {spec!r} is not {FORM}")
        parts.append(part)
    return parts


def read_part(
    name: str,
    source: str | None,
    amount: str | None,
    unit: str | None,
    factor: str | None,
    factor_unit: str | None,
) -> Part | None:
    """
    A part from the groups of PART; None for an amount of 0 or a contradictory one.

    Raises ValueError for a number that is none, such as 1.5 rows.
    """
    if amount and float(amount) == 0 and unit != "%":
        return None
    if factor_unit:  # tokens of the first `amount` rows
        rows = int(amount) if amount and not unit else None
        return Part(name, source, rows, tokens=int(factor or 0)) if rows else None
    repeats = float(factor) if factor else None
    if repeats == 0 or (unit and repeats):
        return None
    if unit == "%":
        return Part(name, source, share=float(amount or 0) / 100)
    if unit == "t":
        return Part(name, source, tokens=int(amount or 0))
    return Part(name, source, int(amount) if amount else None, repeats)


def write_mixture(parts: Sequence[Part]) -> str:
    """The words that `parse_mixture` reads as these parts."""

    def words(part: Part) -> str:
        amount = f"={part.rows}" if part.rows is not None else ""
        amount += f"*{part.repeats:g}" if part.repeats is not None else ""
        if part.tokens is not None:
            amount += f"{'*' if amount else '='}{part.tokens}t"
        amount += f"={100 * part.share:.10g}%" if part.share is not None else ""
        return part.label + amount

    return ",".join(map(words, parts))


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
    named = [part.label for part in parts]
    shares = math.fsum(part.share or 0 for part in parts)
    fixed = [fixed_rows(part, n, row_tokens) for part, n in zip(parts, available, strict=True)]
    opens = [n**alpha if part.is_open else 0.0 for part, n in zip(parts, available, strict=True)]
    natural = sum(n for part, n in zip(parts, available, strict=True) if part.is_open)
    others = math.fsum(fixed) + natural
    if shares > 1 + 1e-9 or (shares > 1 - 1e-9 and others):
        raise ValueError(f"the shares of {', '.join(named)} add up to {shares:.1%}: too much")
    if not others and shares < 1 - 1e-9:
        raise ValueError(f"the shares of {', '.join(named)} add up to {shares:.1%}, not to 100%")
    if budget_tokens is not None:
        total = budget_tokens / row_tokens
    elif others:
        total = others / (1 - shares)
    else:
        total = min(n / part.share for part, n in zip(parts, available, strict=True) if part.share)
    left = total * (1 - shares) - math.fsum(fixed)
    if left < -0.5 or (any(opens) and left < 0.5) or (not any(opens) and left > 0.5 * len(parts)):
        raise ValueError(
            f"a budget of {round(total * row_tokens):,} tokens, but the amounts of "
            f"{', '.join(named)} leave {round(left * row_tokens):,} of it to buckets without one"
        )
    filled = left / math.fsum(opens) if any(opens) else 0.0
    wanted = [
        fix + total * (part.share or 0) + filled * weight
        for part, fix, weight in zip(parts, fixed, opens, strict=True)
    ]
    counts = round_to_total(wanted)
    for name, part, count, n in zip(named, parts, counts, available, strict=True):
        if not part.is_empty and not (count and n):
            raise ValueError(f"{name} comes to less than {row_tokens} tokens")
    return counts


def fixed_rows(part: Part, available: int, row_tokens: int) -> float:
    """Rows of a part that says itself how many; 0 of one that shares or fills."""
    if part.tokens is not None:
        return part.tokens / row_tokens
    if part.rows is None and part.repeats is None:
        return 0.0
    return available * (part.repeats or 1)


def round_to_total(wanted: Sequence[float]) -> list[int]:
    """Whole numbers with the sum of `wanted`, rounded: the largest remainders are rounded up."""
    counts = [math.floor(x) for x in wanted]
    order = sorted(range(len(wanted)), key=lambda i: counts[i] - wanted[i])
    for i in order[: round(math.fsum(wanted)) - sum(counts)]:
        counts[i] += 1
    return counts


# ------------------------------------------------------------------------------------------------
# What came of it


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
    """A mixture, resolved: what is printed, and saved beside the checkpoints."""

    spec: str
    buckets: Sequence[Resolved]

    @property
    def warnings(self) -> list[str]:
        """A line for every bucket that is repeated too often, and for too many added options."""
        warnings = [
            f"warning: {bucket.name} comes {bucket.repeats:.1f} times; beyond {MOST_REPEATS} times "
            "repeating teaches little"
            for bucket in self.buckets
            if (bucket.repeats or 0) > MOST_REPEATS
        ]
        if self.shares_by("augmented").get("options", 0.0) > OPTIONS_CAP:
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
        found: dict[str, float] = {}
        for bucket in self.buckets:
            value = getattr(bucket.tags, tag)
            found[value] = found.get(value, 0.0) + self.share(bucket)
        return found

    def state(self) -> dict[str, Any]:
        """JSON-ready."""
        buckets = [
            {**asdict(bucket), "repeats": bucket.repeats, "share": self.share(bucket)}
            for bucket in self.buckets
        ]
        return {"spec": self.spec, "buckets": buckets, "warnings": self.warnings}

    def tables(self) -> list[dict[str, Any]]:
        """As a record holds them: by bucket, and by every tag that tells buckets apart."""
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
        tables = [{"title": "Mixture", "columns": columns, "rows": rows}]
        by_tag = [
            [tag.name, value or "-", f"{share:.1%}"]
            for tag in fields(Tags)
            if len(shares := self.shares_by(tag.name)) > 1
            for value, share in shares.items()
        ]
        if by_tag:
            title = "Mixture by tag"
            tables.append({"title": title, "columns": ["Tag", "Value", "Share"], "rows": by_tag})
        return tables

    def lines(self) -> list[str]:
        """For the screen."""
        width = max(len(bucket.name) for bucket in self.buckets)
        lines = [
            f"{bucket.name:<{width}}  {self.share(bucket):6.1%}  {bucket.tokens:>11,} tokens of "
            f"{'?' if bucket.available is None else format(bucket.available, ',')}, "
            f"{bucket.trained_tokens:,} with loss"
            for bucket in self.buckets
        ]
        return [f"mixture {self.spec}", *lines, *self.warnings]


# ------------------------------------------------------------------------------------------------
# Own buckets


def read_buckets(path: str | None) -> dict[str, dict[str, Any]]:
    """
    The buckets that a JSON file declares: name -> where it comes from, and its tags.

    {"task": "smoltalk", "source": "local/chat-korean", ...} for conversations, of questions with
    "augment": styles, order or options; {"dataset": ...} or {"data_dir": ...} for text. Raises
    ValueError naming an entry that is neither, or what it holds that is neither place nor tag.
    """
    if path is None:
        return {}
    file = Path(path).expanduser()
    if not file.is_file():
        raise FileNotFoundError(f"--buckets={path}: there is no such file")
    found = read_json(file)
    places = {"task", "source", "augment", "dataset", "data_dir"}
    known = {tag.name for tag in fields(Tags)} | places
    if not isinstance(found, dict):
        raise ValueError(f"{file} holds no buckets: {{name: {{...}}, ...}}")
    for name, entry in found.items():
        if not isinstance(entry, dict) or len({"task", "dataset", "data_dir"} & entry.keys()) != 1:
            raise ValueError(f"{file}: {name} must have one of task, dataset and data_dir")
        if wrong := [key for key in places & entry.keys() if not isinstance(entry[key], str)]:
            raise ValueError(f"{file}: {wrong[0]} of {name} is {entry[wrong[0]]!r}, not a string")
        if unknown := entry.keys() - known:
            raise ValueError(
                f"{file}: {name} has {', '.join(sorted(unknown))}; known are "
                f"{', '.join(sorted(known))}"
            )
    return found


def tags_of(entry: Mapping[str, Any], default: Tags = Tags()) -> Tags:
    """The tags of a declared bucket; what it does not say, as `default` has it."""
    given = {tag.name: entry[tag.name] for tag in fields(Tags) if tag.name in entry}
    return Tags(**{**asdict(default), **given})


# ---- The text of a base model: one source, or several in proportions -----------------------------
# Every bucket keeps shards and rows of its own, so that another mixture of them packs nothing anew.


@dataclass(frozen=True)
class TextMixture:
    """Sources by the name of their bucket, in order; `mix` says how much of each."""

    sources: dict[str, Source]
    mix: MixConfig = field(default_factory=MixConfig)
    """Without a mixture there is a single source, which is taken as it comes."""
    tags: Mapping[str, Tags] = field(default_factory=dict)

    @property
    def spec(self) -> str:
        """The words of the mixture; empty for a single source."""
        return self.mix.mixture

    @property
    def parts(self) -> list[Part]:
        """Of the mixture; none for a single source."""
        return parse_mixture(self.spec) if self.spec else []

    @property
    def only(self) -> Source:
        """The single source."""
        assert not self.spec, "a mixture has several sources"
        return next(iter(self.sources.values()))

    @property
    def fingerprint(self) -> str:
        """Names the text: that of the source, or of all of them and their proportions."""
        if not self.spec:
            return self.only.fingerprint
        prints = {name: source.fingerprint for name, source in self.sources.items()}
        return fingerprint({"mixture": self.spec, **self.mix.chosen, "sources": prints})

    def describe(self) -> dict[str, Any]:
        """JSON-ready; `open_texts` opens the very same text from it."""
        if not self.spec:
            return self.only.describe()
        return {
            "mixture": self.spec,
            "chosen": self.mix.chosen,
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
        self, rows_needed: int, machine: Machine
    ) -> tuple[Resolution | None, dict[str, int]]:
        """
        What a run over `rows_needed` rows takes of a mixture, which is printed, and how many rows
        of every bucket. Packs buckets first whose share depends on their size.
        """
        texts = self.texts
        if not texts.spec:
            return None, dict.fromkeys(self.rows, rows_needed)
        if sized := [p.label for p in texts.parts if p.tokens is None and p.share is None]:
            machine.print0(f"packing all of {', '.join(sized)}: it counts how much there is")
            self.pack(dict.fromkeys(sized), machine)
        T, alpha = next(iter(self.rows.values())).max_seq_len, texts.mix.mixture_alpha
        sizes = {  # None while not all of a text is packed
            name: rows.packed_train_rows if all(map(rows.is_packed, rows.train_shards)) else None
            for name, rows in self.rows.items()
        }
        available = [sizes[part.label] or rows_needed for part in texts.parts]
        counts = resolve(texts.parts, available, T, rows_needed * T, alpha)
        needed = dict(zip(self.rows, counts, strict=True))
        found = [
            Resolved(
                name,
                texts.tags.get(name, Tags()),
                None if (size := sizes[name]) is None else size * T,
                needed[name] * T,
                rows.totals()["documents"],
            )
            for name, rows in self.rows.items()
        ]
        mixed = Resolution(texts.spec, found)
        for line in mixed.lines():
            machine.print0(line)
        return mixed, needed

    def mixed(self, needed: Mapping[str, int]) -> Rows | MixedRows:
        """What a run reads: the rows of a single text as they come, or mixed by their counts."""
        if not self.texts.spec:
            return next(iter(self.rows.values()))
        return MixedRows({name: (rows, needed[name]) for name, rows in self.rows.items()})

    def pack(self, needed: Mapping[str, int | None], machine: Machine) -> None:
        """Pack so many rows of each bucket (None: all); every rank waits until it is done."""
        if machine.local_rank == 0:
            for name, count in needed.items():
                with machine.working(f"packing {name}"):
                    ensure(self.rows[name], self.texts.sources[name], self.tokenizer, count)
        machine.barrier()

    def bytes_to_pack(self, needed: Mapping[str, int], machine: Machine) -> int:
        """What packing will write; the main rank finds out."""
        if not machine.is_main:
            return 0
        sources = self.texts.sources
        return sum(bytes_to_pack(self.rows[n], sources[n], count)[0] for n, count in needed.items())

    def packing(self, needed: Mapping[str, int], machine: Machine) -> ExitStack:
        """Pack beside the training what it needs; a process for each machine and bucket does."""
        stack = ExitStack()
        for name, count in needed.items() if machine.local_rank == 0 else ():
            source = self.texts.sources[name]
            stack.enter_context(start_packing(self.rows[name], source, count, say=machine.print0))
        return stack


def open_corpus(
    texts: TextMixture,
    tokenizer: Tokenizer,
    max_seq_len: int,
    run_id: str | None = None,
    verifies: bool = True,
) -> Corpus:
    """The rows of texts, packed already or not; `verifies` as for `Rows`."""
    rows = {
        name: open_rows(source, tokenizer, max_seq_len, run_id, verifies=verifies)
        for name, source in texts.sources.items()
    }
    return Corpus(texts, tokenizer, rows)


def open_texts(
    cfg: DataConfig,
    mix: MixConfig | None = None,
    recorded: dict[str, Any] | None = None,
    prepare: Prepare | None = None,
) -> TextMixture:
    """
    The text that `cfg` or `mix` name; or, where they name none, the one an earlier stage `recorded`
    (`TextMixture.describe()` of then). `prepare` as for `open_source`.

    Raises ValueError, naming the way out, for amounts that text is not counted in, and as
    `open_source` does.
    """
    if mix and mix.mixture:
        if cfg.dataset or cfg.data_dir or cfg.val_shard or cfg.revision:
            raise ValueError(
                "--mixture names its texts itself: give no --dataset, --data_dir, --val_shard or "
                "--revision beside it"
            )
        return open_mixture(cfg, mix, prepare)
    if not (cfg.dataset or cfg.data_dir) and "mixture" in (recorded or {}):
        assert recorded is not None
        described = recorded["sources"].items()
        sources = {name: open_source(cfg, was, prepare) for name, was in described}
        tags = {name: tags_of(was) for name, was in recorded["tags"].items()}
        return TextMixture(sources, MixConfig(recorded["mixture"], **recorded["chosen"]), tags)
    source = open_source(cfg, recorded, prepare)
    return TextMixture({source.name: source})


def open_mixture(cfg: DataConfig, mix: MixConfig, prepare: Prepare | None) -> TextMixture:
    """The sources of a mixture of text; none is opened before all parts are checked."""
    if mix.mixture_tokens is not None:
        raise ValueError(
            f"--mixture_tokens={mix.mixture_tokens} is for conversations; the budget of a mixture "
            "of text is the run's: --num_iterations or --target_param_data_ratio"
        )
    declared = read_buckets(mix.buckets)
    configs: dict[str, DataConfig] = {}
    for part in parse_mixture(mix.mixture):
        if part.rows is not None or part.source is not None:
            raise ValueError(
                f"{part.label!r}: text is taken by tokens (=500000t), a share (=20%) or repeats "
                "(*1.5), and has no further source"
            )
        entry = declared.get(part.name, {"dataset": part.name})
        if "task" in entry:
            raise ValueError(
                f"{part.name} is declared as a task: it holds conversations, no text; use it in "
                "the mixture of scripts.mid_train or scripts.chat_sft"
            )
        if part.name in configs:
            raise ValueError(f"{part.name} comes twice in the mixture; say {part.name}*2")
        configs[part.name] = replace(
            cfg, dataset=entry.get("dataset"), data_dir=entry.get("data_dir")
        )
    sources = {name: open_source(place, None, prepare) for name, place in configs.items()}
    tags = {name: tags_of(declared.get(name, {})) for name in sources}
    return TextMixture(sources, replace(mix, buckets=None), tags)
