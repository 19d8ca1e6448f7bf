"""
The ground floor: where generated files live, and how they are written and named.

    base_dir() -> out/ or NANOCHAT_BASE_DIR; everything a run writes is below it

Imports no torch, so that a script which only moves files starts at once.
"""

import errno
import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
# Control characters but tab and newline, separators of lines, surrogates, what reorders text
# (bidirectional controls, Unicode UAX 9) and what is invisible, but for the joiners of emoji and
# scripts
UNPRINTABLE = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f"
    r"\ud800-\udfff\ufeff\ufff9-\ufffb]"
)


class MissingInput(FileNotFoundError):
    """
    An earlier stage has not run. The message says what is missing and which command makes it.

    Scripts print it without a traceback (`config.start`).
    """

    def __init__(self, what: str, command: str):
        super().__init__(f"{what}\n  make it with:  {command}")
        self.parts = (what, command)

    def __reduce__(self) -> tuple[type, tuple[str, str]]:
        return type(self), self.parts


class Refused(RuntimeError):
    """
    A run that cannot go on as it was asked to. The message says why, and the way out.

    Scripts print it without a traceback (`config.start`).
    """

    def __init__(self, why: str, way_out: str):
        super().__init__(f"{why}\n  way out:  {way_out}")
        self.parts = (why, way_out)

    def __reduce__(self) -> tuple[type, tuple[str, str]]:
        return type(self), self.parts  # one rank refuses, all of them say so


def printable(text: Any) -> str:
    """
    Text from elsewhere (models, data, users, errors) for a terminal or a log: what could control
    the terminal, or show something else than what is there, as Python's escapes.
    """
    return UNPRINTABLE.sub(lambda found: found[0].encode("unicode_escape").decode(), str(text))


def base_dir() -> Path:
    """The folder of everything generated: NANOCHAT_BASE_DIR, by default out/ in the repository."""
    path = Path(os.environ.get("NANOCHAT_BASE_DIR") or REPOSITORY / "out").expanduser().resolve()
    with require_writable(path):
        path.mkdir(parents=True, exist_ok=True)
    return path


@contextmanager
def require_writable(path: Path) -> Iterator[None]:
    """Raise Refused where what is done inside fails because nothing can be written to `path`."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR):
            raise
        raise Refused(
            f"{path} cannot be written: {error.strerror}",
            "set NANOCHAT_BASE_DIR to a folder that you can write to",
        ) from error


def require_name(flag: str, name: str) -> str:
    """`name`, which must name a folder below another. Raises ValueError for one that leads out."""
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise ValueError(f"--{flag}={name} is not a plain name; use letters, digits, - and _")
    return name


def canonical_json(value: Any) -> str:
    """The one JSON text of `value`: sorted keys, no spaces. Raises TypeError for other types."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def fingerprint(value: Any) -> str:
    """16 hex digits that name a JSON value: equal values, equal names, on every machine."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()[:16]


def sha256_file(path: Path) -> str:
    """SHA-256 of a file's bytes, read in pieces."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def write_atomic(path: Path, data: bytes | str) -> None:
    """
    Write a file so that a reader sees the old content or the new, never a part, even after
    a power cut. The temporary file is removed when writing fails.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(data.encode() if isinstance(data, str) else data)
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(name, 0o644)  # mkstemp makes it private
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    fsync(path.parent)


def fsync(path: Path) -> None:
    """Wait until a file, or the names inside a folder, would survive a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def json_text(value: Any) -> str:
    """Indented JSON with sorted keys, as files have it: the same value gives the same text."""
    return json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def write_json(path: Path, value: Any) -> None:
    """`write_atomic` of `json_text`."""
    write_atomic(path, json_text(value))


def read_json(path: Path) -> Any:
    """Read a JSON file. Raises ValueError naming the file when it does not parse."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON ({error}); correct or delete it") from error


def sealed(value: Mapping[str, Any]) -> dict[str, Any]:
    """A JSON object with the digest of all the rest of it, under `seal`."""
    return {**value, "seal": hashlib.sha256(json_text(value).encode()).hexdigest()}


def unseal(text: str, written: Callable[[Any], str]) -> dict[str, Any]:
    """
    The JSON object that was `sealed` and then `written` as `text`, without its seal.

    Raises ValueError where a single character is not as it was written.
    """
    value = json.loads(text)
    rest = {n: v for n, v in value.items() if n != "seal"} if isinstance(value, dict) else {}
    if not isinstance(value, dict) or "seal" not in value:
        raise ValueError("it has no seal")
    if written(sealed(rest)) != text:
        raise ValueError("it does not match its seal")
    return rest


def read_sealed(path: Path) -> dict[str, Any]:
    """
    The JSON object that `write_json` wrote `sealed`. Raises ValueError naming the file when it is
    not, byte for byte, what was written.
    """
    try:
        return unseal(path.read_bytes().decode(), json_text)
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from error


def free_bytes(path: Path) -> int:
    """Free space, in bytes, on the file system that holds `path`, or would."""
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free
