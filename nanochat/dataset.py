"""
Text of one source or of several: a dataset on the Hub, a local folder, the built-in dataset.

    DataConfig -> open_text -> Text: sources and their shares -> documents
                  open_source -> Source: ordered shards -> texts(shard)

The first use of a source writes a manifest under the base directory: commit, file list, validation
shard, and the SHA-256 of every file once it is read. Later runs must read exactly the same text or
raise an error. Only Hub sources use the network.
"""

import gzip
import itertools
import json
import os
import re
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from nanochat.common import (
    base_dir,
    fingerprint,
    hold_lock,
    printable,
    read_json,
    sha256_file,
    write_json,
)
from nanochat.config import require_at_least
from nanochat.hub import HubRepo, pin_repo

# ---- Reading files -------------------------------------------------------------------------------

SUFFIXES = (".parquet", ".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz")
READ_ROWS = 256  # parquet rows decoded at a time
LEAVE_OUT = "replace it or remove it"


def read_texts(path: Path, skipped: Counter) -> Iterator[str]:
    """
    Yield the texts of a file, in order: the column `text` of parquet, the field `text` of JSON
    lines. Raises ValueError with the file (and line) if it cannot be read.

    Skipped texts are counted in `skipped` under `null`, `empty` and `undecodable`.
    """
    for raw in (read_parquet if path.suffix.lower() == ".parquet" else read_jsonl)(path):
        try:
            if raw:
                yield raw.decode()
            else:
                skipped["null" if raw is None else "empty"] += 1
        except UnicodeDecodeError:
            skipped["undecodable"] += 1


def read_parquet(path: Path) -> Iterator[bytes | None]:
    """Yield the texts of a parquet file as UTF-8 bytes, or None for null."""
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            if "text" not in file.schema_arrow.names:
                names = ", ".join(file.schema_arrow.names)
                raise ValueError(f"{path}: no column `text`; the columns are {names}; {LEAVE_OUT}")
            for batch in file.iter_batches(READ_ROWS, columns=["text"], use_threads=False):
                yield from batch.column(0).cast(pa.large_binary()).to_pylist()
    except pa.ArrowNotImplementedError as error:
        kind = str(pq.read_schema(path).field("text").type)
        is_text = kind.removeprefix("large_") in ("string", "binary")
        why = f"the column `text` has the type {kind}, not string"
        why = "the column `text` cannot be decoded" if is_text else why
        raise ValueError(f"{path}: {why}; {LEAVE_OUT}") from error
    except (pa.ArrowException, OSError) as error:
        line = str(error).splitlines()[0]
        raise ValueError(f"{path} is not a readable parquet file ({line}); {LEAVE_OUT}") from error


def read_jsonl(path: Path) -> Iterator[bytes | None]:
    """Yield the texts of a JSON-lines file as UTF-8 bytes, or None for null."""
    for number, value in read_json_lines(path):
        fields = value if isinstance(value, dict) else {}
        text = fields.get("text", 0)
        if not isinstance(text, str | None):
            found = f"the fields are {', '.join(fields)[:200] or 'none'}"
            if "text" in fields:
                found = f"it is {json.dumps(text):.60}"
            raise line_error(path, number, f"expected a string `text`; {found}")
        # A lone surrogate becomes invalid UTF-8
        yield None if text is None else text.encode(errors="surrogatepass")


def read_json_lines(path: Path) -> Iterator[tuple[int, Any]]:
    """
    Yield (line number, value) of each non-blank line. Raises ValueError with file and line; OSError
    if the file cannot be read.
    """
    number = 0
    try:
        packed = path.suffix.lower() == ".gz"
        with gzip.open(path, "rb") if packed else path.open("rb") as stream:
            for number, line in enumerate(stream, 1):
                if not line.isspace():
                    yield number, json.loads(line)
    except (ValueError, RecursionError, EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise line_error(path, number, f"not JSON ({type(error).__name__}: {error})") from error


def line_error(path: Path, number: int, problem: str) -> ValueError:
    """Build the error for a line of a file."""
    fix = "fix the line or leave the file out"
    return ValueError(f"{path}, line {number}: {problem}; {fix}")


# ---- Text sources: ordered, frozen shards with a fingerprint -------------------------------------
# If the last file is more than LARGEST_HELD_OUT of the text, it is split into two shards at its
# document `tail_start`: training, then validation.

TAIL = "tail-of-"  # name prefix of that validation shard
LARGEST_HELD_OUT = 0.1  # of the text


@dataclass(frozen=True)
class DataConfig:
    NOT_IN_RECIPE: ClassVar[str] = "dataset num_shards revision val_shard"

    dataset: str | None = None
    """Text source: a Hub dataset with parquet files (karpathy/climbmix-400b-shuffle), `embedded`
    (the built-in dataset, no network), or a local folder of .parquet, .jsonl or .jsonl.gz files
    with a `text` field; or several with their shares of the rows: ./books=0.7,./code=0.3. Default:
    the source of the earlier stages."""
    num_shards: int | None = None
    """Training shards to use of a single source, from the first. Default: with --dataset, all;
    else, as in the earlier stages."""

    def __post_init__(self) -> None:
        require_at_least(self, num_shards=1)


@dataclass(frozen=True)
class FirstUseConfig(DataConfig):
    """Adds the settings that are fixed by the first use of a source."""

    revision: str | None = None
    """Branch, tag or commit of the repository. Default: main at first use, then pinned."""
    val_shard: str | None = None
    """Validation file. Default: the last one named for validation, else the last; if that is more
    than a tenth of the text, its last documents (1%; of few, up to 10%)."""


@dataclass(frozen=True)
class Source:
    """A frozen, ordered list of training shards and one validation shard, stored in files."""

    name: str
    """Value for --dataset: a repository, the path of a folder, or the built-in dataset."""
    train_shards: list[str]
    val_shard: str
    id: str
    """16 hex digits; determines the text of every shard, including unused ones."""
    files: dict[str, dict[str, Any]] = field(compare=False)
    """File -> bytes and sha256, from the manifest."""
    tail_start: int | None
    """First validation document of the file that is split."""
    manifest: Path
    folder: Path
    """Directory of the files."""
    repo: HubRepo | None
    """Fetches the files of a Hub dataset; None for local files."""

    @property
    def fingerprint(self) -> str:
        """Hash of the id and the shards in use."""
        return fingerprint([self.id, self.train_shards, self.val_shard])

    def describe(self) -> dict[str, Any]:
        """JSON-ready description; `open_source(DataConfig(), described)` reopens this source."""
        return {
            "dataset": self.name,
            "revision": self.repo and self.repo.commit,
            "val_shard": self.val_shard,
            "num_shards": len(self.train_shards),
            "fingerprint": self.fingerprint,
        }

    def shards(self) -> list[str]:
        """All shards, the validation shard last."""
        return [*self.train_shards, self.val_shard]

    def fetch(self, shard: str) -> Path:
        """Download a shard's file if it is missing, verify it, and return its path."""
        file = shard.removeprefix(TAIL)
        if self.repo:
            return self.repo.fetch(file)
        name = file if is_text_file(file) else f"{file}.jsonl"  # of the built-in dataset
        require_unchanged(self.folder / name, self.files[file], self.manifest)
        return self.folder / name

    def texts(
        self, shard: str, most: int | None = None, skipped: Counter | None = None
    ) -> Iterator[str]:
        """
        Yield the texts of a shard, in order; `most` limits their number. Null, empty and
        undecodable ones are counted in `skipped`. Raises ValueError for an unreadable file.
        """
        path, skips = self.fetch(shard), Counter() if skipped is None else skipped
        if shard.startswith(TAIL):
            every = itertools.islice(read_texts(path, Counter()), self.tail_start, None)
        elif TAIL + shard == self.val_shard:
            every = itertools.islice(read_texts(path, skips), self.tail_start)
        else:
            every = read_texts(path, skips)
        return itertools.islice(every, most)


@dataclass(frozen=True)
class Text:
    """Text of one source, or of several in proportion to their shares, which sum to 1."""

    sources: Sequence[Source]
    shares: Sequence[float]

    @property
    def name(self) -> str:
        """Value for --dataset."""
        first, *others = self.sources
        pairs = zip(self.sources, self.shares, strict=True)
        return ",".join(f"{s.name}={share:g}" for s, share in pairs) if others else first.name

    @property
    def fingerprint(self) -> str:
        """Hash of the text of all sources and their shares; of a single one, its fingerprint."""
        first, *others = (source.fingerprint for source in self.sources)
        return fingerprint([first, *others, *self.shares]) if others else first

    def describe(self) -> dict[str, Any]:
        """JSON-ready description; `open_text(DataConfig(), described)` reopens this text."""
        described = [source.describe() for source in self.sources]
        if len(described) == 1:
            return described[0]
        pairs = zip(described, self.shares, strict=True)
        parts = {each["dataset"]: {**each, "share": share} for each, share in pairs}
        return {"dataset": self.name, "fingerprint": self.fingerprint, "sources": parts}

    def documents(self) -> Iterator[tuple[str, str]]:
        """
        Yield (shard, text) of each training document. Several sources alternate, so that the
        characters of each are about its share, until they end.
        """
        running = {i: training_documents(source) for i, source in enumerate(self.sources)}
        read = [0.0] * len(self.sources)  # characters divided by the share
        while running:
            i = min(running, key=read.__getitem__)
            if (found := next(running[i], None)) is None:
                del running[i]
                continue
            read[i] += len(found[1]) / self.shares[i]
            yield found

    def val_texts(self, most: int | None = None) -> Iterator[str]:
        """
        Yield validation documents, at most `most`. Several sources alternate as above until the
        first one ends, so that the shares hold.
        """
        running = [source.texts(source.val_shard) for source in self.sources]
        read, count = [0.0] * len(self.sources), 0
        while most is None or count < most:
            i = min(range(len(running)), key=read.__getitem__)
            if (text := next(running[i], None)) is None:
                return
            read[i] += len(text) / self.shares[i]
            count += 1
            yield text


def training_documents(source: Source) -> Iterator[tuple[str, str]]:
    """Yield (shard, text) of each training document of a source, in order."""
    for shard in source.train_shards:
        for text in source.texts(shard):
            yield shard, text


def split_last(
    manifest: Mapping[str, Any], file: str, path: Path, documents: int
) -> dict[str, Any]:
    """
    Return the entries of a manifest for its last file, at `path`: its documents from `tail_start`
    on are for validation, 1% of them but at least 16, and at most a tenth, but at least one. If it
    has a single document, the whole file is; ValueError if it is the only one with text.
    """
    text = [name for name, role in roles_in(manifest).items() if role == "train"]
    if documents < 2 and len(text) > 1:
        return {"val_shard": file}
    if documents < 2:
        why = f"has {documents} non-empty documents; training and validation need one each"
        fix = "split it into documents, or add a file for validation"
        raise ValueError(f"{path} is the only file of text and {why}; {fix}")
    tail = max(1, min(documents // 10, max(documents // 100, 16)))
    held_out = f"the last {tail:,} of its {documents:,} documents are for validation"
    print(printable(f"{path}: {held_out}"), flush=True)
    return {"tail_start": documents - tail}


def count_documents(path: Path) -> int:
    """Read a file to its end and count its documents. Raises ValueError as `read_texts`."""
    return sum(1 for _ in read_texts(path, Counter()))


# ---- Opening a source ----------------------------------------------------------------------------
# The manifest is written under the base directory at first use, after all checks have passed.

Role = Literal["train", "validate", "leave out"]
ROLES: dict[str, Role] = {  # name of a file or a folder, without shard numbers
    **dict.fromkeys(("val", "valid", "validation", "dev"), "validate"),
    **dict.fromkeys(("test", "tests", "testing", "eval", "evaluation"), "leave out"),
}
SHARD_NUMBER = re.compile(r"([-_.]?\d+)(-of-\d+)?(-[0-9a-f]{16})?$")
MOST_LISTED = 10  # files in a message
SMALLEST_SHARE = 1e-3  # of a source in a mixture


def choose_source(cfg: DataConfig, recorded: Mapping[str, Any] | None) -> FirstUseConfig:
    """
    Settings of the source that `cfg` selects, or else of the one `recorded` by an earlier stage
    (`Source.describe()`), which those in `cfg` override. Raises ValueError if there is none.
    """
    given = {name: value for name, value in asdict(cfg).items() if value is not None}
    if "dataset" not in given:
        if not recorded:
            ways = "--dataset=<owner>/<name>, --dataset=embedded or --dataset=<folder>"
            raise ValueError(f"one text source is required; use {ways}")
        names = ("dataset", "num_shards", "revision", "val_shard")
        given = {name: recorded.get(name) for name in names} | given
    return FirstUseConfig(**given)


def split_mixture(words: str) -> dict[str, float]:
    """
    The sources of a value of --dataset and their shares, normalized: "a=0.7,b=0.3", or "a,b" for
    equal ones. Raises ValueError for other forms, shares below SMALLEST_SHARE and repeated names.
    """
    if Path(words).expanduser().exists() or not re.search(r",|=[\d.]+$", words):
        return {words: 1.0} if words else {}
    found: dict[str, float] = {}
    parts = [part.strip() for part in words.split(",")]
    for part in parts:
        name, _, share = part.rpartition("=") if "=" in words else (part, "", "1")
        if not name or not re.fullmatch(r"\d+\.?\d*|\.\d+", share) or not float(share):
            form = "<source>=<share above 0>, as in ./books=0.7,./code=0.3"
            raise ValueError(f"--dataset={words}: {part!r} must be {form}")
        if name in found:
            raise ValueError(f"--dataset={words} has {name} twice; add up its shares")
        found[name] = float(share)
    shares = {name: share / sum(found.values()) for name, share in found.items()}
    if small := [name for name, share in shares.items() if share < SMALLEST_SHARE]:
        raise ValueError(f"--dataset={words}: {small[0]} is less than {SMALLEST_SHARE} of all")
    return shares


def open_text(cfg: DataConfig, recorded: Mapping[str, Any] | None = None) -> Text:
    """
    Open the sources that `choose_source` returns, one or, separated by commas, several.

    Raises ValueError with the fix if their text has changed, and for flags that are for one source.
    """
    wanted = choose_source(cfg, recorded)
    shares = split_mixture(wanted.dataset or "")
    if len(shares) < 2:
        alone = cfg if cfg.dataset is None else replace(cfg, dataset=next(iter(shares), ""))
        return Text([open_source(alone, recorded)], [1.0])
    for name in ("num_shards", "revision", "val_shard"):
        if getattr(cfg, name, None) is not None:
            fix = "open each alone first, such as with scripts.data --download_only, which fixes it"
            if name == "num_shards":
                fix = "leave it out; a source in a mixture has all of its files"
            raise ValueError(f"--{name} is for one source, not for {wanted.dataset}; {fix}")
    known = (recorded or {}).get("sources", {}) if cfg.dataset is None else {}
    if known:
        sources = [open_source(DataConfig(), known[name]) for name in known]
        return Text(sources, [known[name]["share"] for name in known])
    sources = [open_source(FirstUseConfig(name)) for name in shares]
    pairs = sorted(zip(sources, shares.values(), strict=True), key=lambda pair: pair[0].id)
    sources, fractions = [source for source, _ in pairs], [share for _, share in pairs]
    names = [source.name for source in sources]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"--dataset={wanted.dataset} has {twice[0]} twice; add up its shares")
    return Text(sources, fractions)


def open_source(cfg: DataConfig, recorded: Mapping[str, Any] | None = None) -> Source:
    """
    Open the source that `choose_source` returns.

    Raises ValueError with the fix if its text has changed; nothing is recorded in that case.
    """
    wanted = choose_source(cfg, recorded)
    same = recorded and wanted == choose_source(DataConfig(), recorded)
    must_be = recorded["fingerprint"] if recorded and same else None
    name = wanted.dataset or ""
    of_hub = wanted.revision is not None  # only Hub datasets have revisions
    if not of_hub and name.startswith((".", "/", "~")):
        return open_folder(wanted, must_be)
    path = base_dir() / "data" / name.replace("/", "--") / "manifest.json"
    if not of_hub and path.is_file() and "identity" in (manifest := read_json(path)):
        source = make_source(wanted, manifest, path, path.with_name("text"))
    elif not of_hub and os.path.exists(name):
        return open_folder(wanted, must_be)
    else:
        source = open_hub(wanted, path)
    require_recorded(source, must_be)
    return source


def make_source(
    cfg: FirstUseConfig, manifest: dict, path: Path, folder: Path, repo: HubRepo | None = None
) -> Source:
    """Build the source of a `manifest` at `path` with files in `folder`, fetched by `repo`."""
    files, tail_start = manifest["files"], manifest.get("tail_start")
    train, val_shard = split_shards(cfg, manifest, path)
    if repo:
        identity: Any = [repo.name, repo.commit]
    else:  # the manifest of the built-in dataset has its own identity
        digests = {file: entry["sha256"] for file, entry in files.items()}
        identity = manifest.get("identity") or digests
    id, name = fingerprint([identity, tail_start]), str(cfg.dataset)
    return Source(name, train, val_shard, id, files, tail_start, path, folder, repo)


def split_shards(
    cfg: FirstUseConfig, manifest: Mapping[str, Any], path: Path
) -> tuple[list[str], str]:
    """
    Return the training shards and the validation shard of the files of a manifest, at `path`.

    The validation shard is the one that it has; at first use, cfg.val_shard, or the last one named
    for validation, or else the last one, or its last documents. Files named for validation or tests
    are not trained on. Raises ValueError if a setting contradicts that.
    """
    roles, recorded = roles_in(manifest), manifest.get("val_shard")
    files = list(roles)
    text = [file for file in files if roles[file] == "train"] if len(files) > 1 else files
    named = [file for file in files if roles[file] == "validate"] if len(files) > 1 else []
    if not text:
        raise ValueError(f"{cfg.dataset} has only files named for evaluation; rename one of them")
    sizes = [manifest["files"][file]["bytes"] for file in text]
    default = [*text, *named][-1]
    if not named and sizes[-1] > LARGEST_HELD_OUT * sum(sizes):
        default = TAIL + default
    options = [recorded] if recorded else [*files, default] if len(files) > 1 else [default]
    val_shard = cfg.val_shard or recorded or default
    if val_shard not in options:
        why = f"has {len(files)} files, {files[0]} to {files[-1]}; if there are several, choose one"
        if recorded:
            why = f"already validates on {recorded}; delete {path} to start over"
        raise ValueError(f"--val_shard={val_shard}: {cfg.dataset} {why}, or leave --val_shard out")
    train = [file for file in text if file != val_shard]
    if not train:
        raise ValueError(f"--val_shard={val_shard} leaves no file of {cfg.dataset} to train on")
    if cfg.num_shards is not None and cfg.num_shards > len(train):
        raise ValueError(
            f"--num_shards={cfg.num_shards}, but {cfg.dataset} has {len(train)} training shards; "
            f"use --num_shards={len(train)}, or leave it out to use all"
        )
    return train[: cfg.num_shards], val_shard


def role_of(file: str) -> Role:
    """
    What a file is for, by its name or that of a folder that it is in: compared whole, without
    suffix and shard number. So `test_prep_books.jsonl` is text.
    """
    names = [SHARD_NUMBER.sub("", part) for part in reversed(stem_of(file).split("/"))]
    roles: list[Role] = [ROLES[name] for name in names if name in ROLES]
    return roles[0] if roles else "train"


def roles_of(files: Sequence[str]) -> dict[str, Role]:
    """
    What each file is for: `role_of`; of `wiki_dev.jsonl`, if there is a `wiki_train.jsonl`, what
    follows the common prefix.
    """
    roles: dict[str, Role] = {file: role_of(file) for file in files}
    stems = set(map(plain_stem, files))
    for file in files:
        found = re.search(r"[-_.]([a-z]*)$", plain_stem(file))
        if found and found[1] in ROLES and plain_stem(file)[: found.start(1)] + "train" in stems:
            roles[file] = ROLES[found[1]]
    return roles


def plain_stem(file: str) -> str:
    """The path of a file in lower case, without suffix and shard number."""
    return SHARD_NUMBER.sub("", stem_of(file))


def roles_in(manifest: Mapping[str, Any]) -> dict[str, Role]:
    """Roles of the files of a manifest; that of the built-in dataset has none."""
    return manifest.get("roles") or roles_of(list(manifest["files"]))


def describe_files(train: Sequence[str], roles: Mapping[str, Role], val_shard: str) -> str:
    """What the files of a source are used for, at its first use."""
    files = list(roles)
    used = f"trains on {len(train)} of {len(files)} files, validates on {val_shard}"
    left = [file for file in files if file != val_shard and roles[file] != "train"]
    more = f" and {len(left) - MOST_LISTED} more" if len(left) > MOST_LISTED else ""
    listed = f"; left out, by name: {', '.join(left[:MOST_LISTED])}{more}"
    return used + (listed if left and len(files) > 1 else "")


def require_recorded(source: Source, recorded: str | None) -> None:
    """Raise ValueError if the source does not have the `recorded` fingerprint; None accepts any."""
    if recorded not in (None, source.fingerprint):
        raise ValueError(
            f"the text of {source.name} has changed: fingerprint {source.fingerprint}, recorded "
            f"{recorded}; restore the old files, or pass --dataset to accept the new ones"
        )


def save_last_source(described: Mapping[str, Any], tokenizer_tag: str) -> None:
    """Record a stage's text source as the default of later stages with the same tokenizer."""
    write_json(base_dir() / "data" / f"used_with_{tokenizer_tag}.json", dict(described))


def load_last_source(tokenizer_tag: str) -> dict[str, Any] | None:
    """Return the last record of `save_last_source`, or None."""
    path = base_dir() / "data" / f"used_with_{tokenizer_tag}.json"
    return read_json(path) if path.exists() else None


# ---- A local folder ------------------------------------------------------------------------------
# Never written to. A file is hashed if it is new or its size or modification time changed.


def open_folder(cfg: FirstUseConfig, recorded: str | None) -> Source:
    """
    Open a folder, which must have the `recorded` fingerprint.

    Raises ValueError naming files that were added, removed or changed, or cannot be read.
    """
    folder = Path(cfg.dataset or "").expanduser().resolve()
    if not folder.is_dir():
        fix = "check the path"
        if folder.is_file():
            fix = "use a folder of .jsonl files, each line with a `text` field (docs/data.md)"
            if is_text_file(folder.name):
                fix = f"use its folder: --dataset={folder.parent}"
        raise ValueError(f"--dataset={cfg.dataset}: not a folder; {fix}")
    name = str(folder)
    cfg = replace(cfg, dataset=name)
    path = base_dir() / "data" / f"{folder.name}-{fingerprint(name)[:8]}" / "manifest.json"
    with hold_lock(path.parent / ".lock", f"reading {folder}"):
        old = read_json(path) if path.exists() else {}
        names, others = find_files(folder)
        if not names:
            fix = "add one with a `text` field per row or line; docs/data.md converts .txt files"
            found = f" (ignored: {', '.join(others)})" if others else ""
            raise ValueError(f"{folder} contains no {', '.join(SUFFIXES)} file{found}; {fix}")
        known = old.get("files", dict.fromkeys(names))
        if changes := sorted(known.keys() ^ set(names)):
            raise ValueError(
                f"{folder} does not match {path}: {', '.join(changes[:5])} added or removed; "
                "restore the old files, or delete that manifest and set --dataset again"
            )
        sizes = {file: {"bytes": (folder / file).stat().st_size} for file in names}
        manifest = old or {"data_dir": name, "files": sizes, "roles": roles_of(names)}
        train, val_shard = split_shards(cfg, manifest, path)
        files = {file: check_file(folder / file, known[file], path) for file in names}
        stems = Counter(map(stem_of, names))
        if twice := [stem for stem, count in stems.items() if count > 1 and not old]:
            raise ValueError(f"{folder}: several files are named {twice[0]}; remove or rename one")
        by_digest: dict[str, str] = {}
        for file, entry in files.items():
            if (same := by_digest.setdefault(entry["sha256"], file)) != file:
                raise ValueError(f"{folder}: {same} and {file} have equal content; remove one")
        manifest = {**manifest, "files": files, "val_shard": val_shard}
        if val_shard.startswith(TAIL) and "tail_start" not in old:
            last = val_shard.removeprefix(TAIL)
            manifest |= split_last(manifest, last, folder / last, files[last]["documents"])
        source = make_source(cfg, manifest, path, folder)
        require_recorded(source, recorded)
        if not old:
            ignored = f"; ignored: {', '.join(others)}" if others else ""
            used = describe_files(source.train_shards, manifest["roles"], source.val_shard)
            print(printable(f"{folder}: {used}{ignored}"), flush=True)
        if manifest != old:
            write_json(path, manifest)
    return source


def require_unchanged(path: Path, known: dict[str, Any], manifest: Path) -> None:
    """Raise ValueError if a file is missing or its SHA-256 is not the one in the `manifest`."""
    if not path.is_file() or sha256_file(path) != known["sha256"]:
        fix = "restore the old file, or delete that manifest and set --dataset again"
        raise ValueError(f"{path} is missing or does not match its SHA-256 in {manifest}; {fix}")


def is_text_file(name: str) -> bool:
    """Whether a file has one of the SUFFIXES, in lower or upper case."""
    return name.lower().endswith(SUFFIXES)


def stem_of(file: str) -> str:
    """The path of a file in lower case, without its suffix."""
    suffix = max(filter(file.lower().endswith, SUFFIXES), key=len, default="")
    return file.lower().removesuffix(suffix)


def find_files(folder: Path) -> tuple[list[str], list[str]]:
    """
    Return the sorted names of the text files under a folder, and how many others there are of each
    type, as in "3 .txt". Links to folders are followed; hidden files and folders are left out.

    Raises ValueError for an entry that is not a regular file and for a link that would repeat text,
    OSError for an unreadable folder.
    """

    def stop(error: OSError) -> None:
        raise error

    names, seen, others = [], {}, Counter[str]()
    for below, folders, files in os.walk(folder, onerror=stop, followlinks=True):
        folders[:] = [name for name in folders if not name.startswith(".")]
        real = Path(below).resolve()
        if real in seen or (seen and folder.is_relative_to(real)):
            other = seen.get(real, folder)
            raise ValueError(f"{below} links to {real}, already read as {other}; remove one")
        seen[real] = below
        visible = [file for file in files if not file.startswith(".")]
        paths = [Path(below, file) for file in visible if is_text_file(file)]
        others.update(Path(file).suffix or file for file in visible if not is_text_file(file))
        if wrong := [path for path in paths if not path.is_file()]:
            raise ValueError(f"{wrong[0]} is a broken link or not a regular file; remove it")
        names += [path.relative_to(folder).as_posix() for path in paths]
    return sorted(names), [f"{count} {kind}" for kind, count in others.most_common(10)]


def check_file(file: Path, known: dict[str, Any] | None, manifest: Path) -> dict[str, Any]:
    """
    Return the manifest entry of a file: bytes, modification time, documents and SHA-256.

    A new file is read to its end. Raises ValueError if it is unusable or differs from `known`.
    """
    stat = file.stat()
    entry: dict[str, Any] = {"bytes": stat.st_size, "mtime_ns": stat.st_mtime_ns}
    if known and entry.items() <= known.items():
        return known
    if known:
        require_unchanged(file, known, manifest)
        return {**known, **entry}
    if not (documents := count_documents(file)):
        raise ValueError(f"{file} contains no text; {LEAVE_OUT}")
    return {**entry, "documents": documents, "sha256": sha256_file(file)}


# ---- A dataset on the Hub ------------------------------------------------------------------------
# Pinned to the commit of its first use. A file is downloaded when it is first read.


def open_hub(cfg: FirstUseConfig, path: Path) -> Source:
    """Open a Hub repository whose manifest is at `path`."""
    name = cfg.dataset or ""
    if name.count("/") != 1 or not all(name.split("/")):
        raise ValueError(
            f"--dataset={name}: a Hub repository is <owner>/<name>; a local folder exists, or "
            "starts with ., / or ~; without --revision, local folders and `embedded` work too"
        )
    with hold_lock(path.with_name(".lock"), f"resolving {name}"):
        manifest = pin_repo(name, path, (".parquet",), cfg.revision)
        files = list(manifest["files"])
        if not files:
            raise ValueError(f"{name} has no parquet files; jsonl only works in local folders")
        if not path.exists():
            manifest["roles"] = roles_of(files)
        train, val_shard = split_shards(cfg, manifest, path)
        if not path.exists():
            manifest["val_shard"] = val_shard
            write_json(path, manifest)
            used = describe_files(train, manifest["roles"], val_shard)
            print(printable(f"{name}: {used}"), flush=True)
    repo = HubRepo(name, path.parent, manifest["commit"])
    if val_shard.startswith(TAIL) and "tail_start" not in manifest:
        last = val_shard.removeprefix(TAIL)
        file = repo.fetch(last)
        try:
            split = split_last(manifest, last, file, count_documents(file))
        except ValueError:
            path.unlink()  # so that a later commit can be used
            raise
        manifest |= split
        repo.record(split)
    return make_source(cfg, manifest, path, repo.folder, repo)


if __name__ == "__main__":
    raise SystemExit("use python -m scripts.data --dataset=<source> --num_shards=<n>")
