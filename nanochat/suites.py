"""
Suites of few-shot tasks: the 22 of DataComp-LM whose mean is CORE, or those of the embedded world.

    evaluation bundle (folder, zip or URL) -> open_bundle -> Suite: tasks, what is missing, whence

A bundle holds core.yaml (how each task is asked), eval_meta_data.csv (accuracy of guessing) and
eval_data/ (items, one JSON object per line). Scores nothing. Source: DataComp-LM, arXiv:2406.11794,
in the form published with nanochat.
"""

import csv
import functools
import hashlib
import io
import json
import stat
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import pooch
import yaml

from nanochat import world_suite
from nanochat.common import Refused, base_dir, fingerprint, sha256_file
from nanochat.eval_core import FewShotTask
from nanochat.hub import is_inside, with_retries

PUBLISHED_URL = "https://karpathy-public.s3.us-west-2.amazonaws.com/eval_bundle.zip"
# Of the archive behind that address, as several independent public projects pin it (2026-06)
PUBLISHED_SHA256 = "90a7c19e28ee7a52b4f6e1f87658deb9fde7f63deba2379045bdb1fe9ea5d200"
# The tasks of CORE in the report's order, and how many items of each were published
CORE_TASKS = {
    "hellaswag_zeroshot": 10_042,
    "jeopardy": 2_117,
    "bigbench_qa_wikidata": 20_321,
    "arc_easy": 2_376,
    "arc_challenge": 1_172,
    "copa": 100,
    "commonsense_qa": 1_221,
    "piqa": 1_838,
    "openbook_qa": 500,
    "lambada_openai": 5_153,
    "hellaswag": 10_042,
    "winograd": 273,
    "winogrande": 1_267,
    "bigbench_dyck_languages": 1_000,
    "agi_eval_lsat_ar": 230,
    "bigbench_cs_algorithms": 1_320,
    "bigbench_operators": 210,
    "bigbench_repeat_copy_logic": 32,
    "squad": 10_570,
    "coqa": 7_983,
    "boolq": 3_270,
    "bigbench_language_identification": 10_000,
}
TIMEOUT_SECONDS = 30
PATIENCE_SECONDS = 120.0  # a run goes on without the bundle, so it does not wait for long
# Limits of an archive, unpacked; the largest file known, hellaswag's, has about 8 MB
MAX_MEMBERS = 10_000
MAX_MEMBER_BYTES = 256 << 20
MAX_TOTAL_BYTES = 1 << 30
MAX_RATIO = 100  # unpacked bytes per packed byte, of members above 1 MB
HINT = "unpack one by hand and name it: --eval_bundle=<folder or zip>"

Place = Path | zipfile.Path  # a folder, or one in an archive: both are read the same way


@dataclass(frozen=True)
class SuiteConfig:
    suite: Literal["embedded", "dclm"] | None = None
    """Which few-shot tasks. Default: those of the embedded world for a model that was trained on
    it, else DCLM's, whose mean is CORE."""
    eval_bundle: str | None = None
    """Where DCLM's tasks are: a folder, a zip file or its URL. Default: the published archive,
    downloaded once."""


@dataclass(frozen=True)
class Suite:
    """Tasks to examine a model on."""

    tasks: tuple[FewShotTask, ...]
    fingerprint: str
    """16 hex digits of all tasks, items included."""
    about: str
    """Whence they come and how far they are the published ones, for the report."""
    missing: tuple[str, ...] = ()
    """Tasks of CORE that are not among them."""


def open_suite(cfg: SuiteConfig, dataset: str | None) -> Suite:
    """
    The suite asked for, or that which suits a model trained on `dataset`.

    Raises ValueError, FileNotFoundError or Refused with what is wrong and the fix.
    """
    default = "embedded" if dataset == "embedded" and cfg.eval_bundle is None else "dclm"
    if (cfg.suite or default) == "dclm":
        return open_bundle(fetched(cfg.eval_bundle or PUBLISHED_URL))
    if cfg.eval_bundle is not None:
        raise ValueError("--eval_bundle is for --suite=dclm; the embedded world needs no files")
    tasks = [FewShotTask(**task) for task in world_suite.suite()]
    return Suite(tuple(tasks), print_of(tasks), "embedded world")


def fetched(location: str) -> Path:
    """A folder or file by its path, or the copy of what a URL names, downloaded once."""
    if not location.startswith(("http://", "https://")):
        path = Path(location).expanduser()
        if not path.exists():
            raise FileNotFoundError(f"there is no evaluation bundle {path}; {HINT}")
        return path
    known = f"sha256:{PUBLISHED_SHA256}" if location == PUBLISHED_URL else None
    folder = base_dir() / "data" / "eval_bundle"
    name = f"{hashlib.sha256(location.encode()).hexdigest()[:8]}-{Path(location).name}"
    store = pooch.create(folder, base_url="", registry={name: known}, urls={name: location})
    downloader: Any = pooch.HTTPDownloader(timeout=TIMEOUT_SECONDS)
    try:
        fetch = functools.partial(store.fetch, name, downloader=downloader)
        return Path(with_retries(location, fetch, PATIENCE_SECONDS))
    except Refused as error:
        raise Refused(error.parts[0], HINT) from error
    except ValueError as error:  # pooch's, of another digest
        raise Refused(f"{location} is not the published bundle: {error}", HINT) from error
    except OSError as error:  # requests' errors too
        raise Refused(f"{location} cannot be downloaded ({error})", HINT) from error


def open_bundle(path: Path) -> Suite:
    """
    Read a bundle. Raises ValueError naming the file that is none, or the line in it; Refused for
    an archive that is damaged or unsafe.
    """
    if path.is_dir():
        return read_bundle(path, path, None)
    if not zipfile.is_zipfile(path):
        raise ValueError(f"{path} is neither a folder nor a zip file; {HINT}")
    try:
        if problem := danger(path):
            raise Refused(f"{path}: {problem}", HINT)
        return read_bundle(path, zipfile.Path(path), sha256_file(path))
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError) as error:
        why = f"{path} is a damaged or unusual zip file ({error})"
        raise Refused(why, f"delete it if it was downloaded, to have it anew; or {HINT}") from error


def danger(path: Path) -> str | None:
    """What keeps an archive from being used: a path outside of it, a link, too many bytes."""
    with zipfile.ZipFile(path) as archive:
        members = archive.infolist()
    for member in members:
        name = member.orig_filename
        kind = stat.S_IFMT(member.external_attr >> 16)
        packed = max(member.compress_size, (1 << 20) // MAX_RATIO)
        if not is_inside(name):
            return f"{name!r} is a path outside of the archive"
        if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
            return f"{name!r} is a link or a device, not a file"
        if member.flag_bits & 1:
            return f"{name!r} is encrypted"
        if member.file_size > min(MAX_MEMBER_BYTES, MAX_RATIO * packed):
            return (
                f"{name!r} has {member.file_size:,} bytes unpacked, {member.compress_size:,} packed"
            )
    names = [member.filename for member in members]
    total = sum(member.file_size for member in members)
    if len(set(names)) < len(names):
        return "two members have the same name"
    if len(names) > MAX_MEMBERS or total > MAX_TOTAL_BYTES:
        return f"{len(names):,} members with {total:,} bytes are too many"
    return None


def read_bundle(path: Path, root: Place, archive: str | None) -> Suite:
    """The tasks of a folder, or of an archive of that SHA-256."""
    inside = [root, *(place for place in root.iterdir() if place.is_dir())]
    found = [place for place in inside if (place / "core.yaml").is_file()]
    if not found:
        raise ValueError(f"{path} holds no core.yaml, so it is no evaluation bundle; {HINT}")
    place = found[0]
    baselines = read_baselines(place / "eval_meta_data.csv")
    tasks = [
        task
        for entry in read_entries(place / "core.yaml")
        if (task := read_task(place, entry, baselines))
    ]
    if not tasks:
        raise ValueError(f"{path} holds the items of no task; {HINT}")
    missing = tuple(name for name in CORE_TASKS if name not in {task.name for task in tasks})
    return Suite(tuple(tasks), print_of(tasks), describe(tasks, missing, archive), missing)


def read_entries(file: Place) -> list[Mapping[str, Any]]:
    """What core.yaml says of each task."""
    try:
        entries = yaml.safe_load(file.read_text(encoding="utf-8"))["icl_tasks"]
        return [dict(entry) for entry in entries]
    except (yaml.YAMLError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{file}: not a list of tasks below icl_tasks ({error!r})") from error


def read_baselines(file: Place) -> dict[str, float]:
    """Task -> accuracy of guessing, from 0 to 1."""
    try:
        rows = csv.DictReader(io.StringIO(file.read_text(encoding="utf-8")))
        return {row["Eval Task"]: float(row["Random baseline"]) / 100 for row in rows}
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{file}: not a table with the columns Eval Task and Random baseline ({error!r})"
        ) from error


def read_task(
    place: Place, entry: Mapping[str, Any], baselines: Mapping[str, float]
) -> FewShotTask | None:
    """A task with its items; None where their file is not in the bundle."""
    try:
        name, kind, uri = entry["label"], entry["icl_task_type"], entry["dataset_uri"]
        num_fewshot = int(entry["num_fewshot"][0])
    except (KeyError, TypeError, IndexError, ValueError) as error:
        raise ValueError(f"{place / 'core.yaml'}: task {dict(entry)} lacks {error}") from error
    if not isinstance(uri, str) or uri in ("", ".") or not is_inside(uri):
        raise ValueError(
            f"{place / 'core.yaml'}: dataset_uri {uri!r} of {name} is no path inside eval_data/; "
            "correct it or use another bundle"
        )
    file = place / "eval_data" / uri
    if not file.is_file():
        return None
    if name not in baselines:
        raise ValueError(f"{place / 'eval_meta_data.csv'} has no random baseline for {name}")
    delimiter = entry.get("continuation_delimiter", " ")
    return FewShotTask(name, kind, num_fewshot, baselines[name], delimiter, read_items(file))


def read_items(file: Place) -> list[dict[str, Any]]:
    """The items of a task."""
    items: list[dict[str, Any]] = []
    try:
        for line in file.read_text(encoding="utf-8").splitlines():
            items.append(dict(json.loads(line)))
    except (ValueError, TypeError, RecursionError) as error:
        line = len(items) + 1
        raise ValueError(f"{file}, line {line}: not a JSON object ({error})") from error
    return items


def describe(tasks: list[FewShotTask], missing: tuple[str, ...], archive: str | None) -> str:
    """Whether these are the published tasks, in a line."""
    if archive == PUBLISHED_SHA256:
        return "DCLM, the published bundle"
    present = len(CORE_TASKS) - len(missing)
    words = [f"DCLM, {present} of {len(CORE_TASKS)} tasks"]
    words += [f"without {', '.join(missing)}"] if missing else []
    for task in tasks:
        published = CORE_TASKS.get(task.name)
        if published is None:
            words.append(f"{task.name} is none of CORE's")
        elif len(task.items) != published:
            words.append(f"{task.name} has {len(task.items):,} of {published:,} items")
    comparable = not missing and len(words) == 1
    words += (
        ["as many items as published"] if comparable else ["not comparable with published CORE"]
    )
    return "; ".join(words)


def print_of(tasks: list[FewShotTask]) -> str:
    """The fingerprint of tasks."""
    return fingerprint([asdict(task) for task in tasks])
