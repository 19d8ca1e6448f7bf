"""
The text a base model is trained on: one source, or several in proportions.

    DataConfig, MixConfig -> open_texts -> Texts: sources by name -> Corpus: packed rows of each

Every bucket of a mixture keeps shards and rows of its own, so that another mixture of the same
buckets packs nothing anew. Text is counted in tokens: by shares, tokens or repeats.
"""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from nanochat.arms import taken
from nanochat.common import fingerprint
from nanochat.dataset import open_source
from nanochat.machine import Machine
from nanochat.mixed_rows import MixedRows
from nanochat.mixture import (
    MixConfig,
    Part,
    Resolution,
    Resolved,
    Tags,
    parse_mixture,
    read_buckets,
    resolution,
    resolve,
    tags_of,
)
from nanochat.row_writer import bytes_to_pack, ensure, open_rows, start_packing
from nanochat.rows import Rows
from nanochat.source import DataConfig, Source
from nanochat.tokenizer import Tokenizer


@dataclass(frozen=True)
class Texts:
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
    """Texts as packed rows of one length, by the name of their bucket."""

    texts: Texts
    tokenizer: Tokenizer
    rows: dict[str, Rows]

    @property
    def fingerprint(self) -> str:
        """Names the rows of all buckets."""
        prints = {name: rows.fingerprint for name, rows in self.rows.items()}
        return fingerprint(prints) if self.texts.spec else next(iter(prints.values()))

    def amounts(
        self, rows_needed: int, machine: Machine
    ) -> tuple[Resolution | None, dict[str, int]]:
        """
        What a run over `rows_needed` rows takes of a mixture, told on the screen, and how many rows
        of every bucket. Packs buckets first whose share depends on their size.
        """
        texts = self.texts
        if not texts.spec:
            return None, dict.fromkeys(self.rows, rows_needed)
        if sized := [p.label for p in texts.parts if p.tokens is None and p.share is None]:
            machine.print0(f"packing all of {', '.join(sized)}: it counts how much there is")
            self.pack(dict.fromkeys(sized), machine)
        mixed, needed = self.resolve(rows_needed)
        for line in mixed.lines():
            machine.print0(line)
        return mixed, needed

    def resolve(self, rows_needed: int) -> tuple[Resolution, dict[str, int]]:
        """The mixture in whole rows, what it counts being packed."""
        T, mix = next(iter(self.rows.values())).max_seq_len, self.texts.mix
        known = {name: known_size(rows) for name, rows in self.rows.items()}
        sizes = [known[part.label] or rows_needed for part in self.texts.parts]
        counts = resolve(self.texts.parts, sizes, T, rows_needed * T, mix.mixture_alpha)
        tags = {name: self.texts.tags.get(name, Tags()) for name in self.rows}
        counts = taken(mix, list(self.rows), tags, counts)
        needed = dict(zip(self.rows, counts, strict=True))
        found = [
            Resolved(
                name,
                tags[name],
                None if (size := known[name]) is None else size * T,
                needed[name] * T,
                rows.totals()["documents"],
            )
            for name, rows in self.rows.items()
        ]
        return resolution(mix, found), needed

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


def known_size(rows: Rows) -> int | None:
    """Training rows there are; None while some are not packed."""
    whole = all(rows.is_packed(shard) for shard in rows.train_shards)
    return rows.packed_train_rows if whole else None


def open_corpus(
    texts: Texts,
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
    cfg: DataConfig, mix: MixConfig | None = None, recorded: dict[str, Any] | None = None
) -> Texts:
    """
    The text that `cfg` or `mix` name; or, where they name none, the one an earlier stage `recorded`
    (`Texts.describe()` of then).

    Raises ValueError, naming the way out, for amounts that text is not counted in, and as
    `open_source` does.
    """
    if mix and mix.mixture:
        if cfg.dataset or cfg.data_dir or cfg.val_shard or cfg.revision:
            raise ValueError(
                "--mixture names its texts itself: give no --dataset, --data_dir, --val_shard or "
                "--revision beside it"
            )
        return open_mixture(cfg, mix)
    if not (cfg.dataset or cfg.data_dir) and "mixture" in (recorded or {}):
        assert recorded is not None
        sources = {name: open_source(cfg, was) for name, was in recorded["sources"].items()}
        tags = {name: tags_of(was) for name, was in recorded["tags"].items()}
        return Texts(sources, MixConfig(recorded["mixture"], **recorded["chosen"]), tags)
    source = open_source(cfg, recorded)
    return Texts({source.name: source})


def open_mixture(cfg: DataConfig, mix: MixConfig) -> Texts:
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
    sources = {name: open_source(place) for name, place in configs.items()}
    tags = {name: tags_of(declared.get(name, {})) for name in sources}
    return Texts(sources, replace(mix, buckets=None), tags)
