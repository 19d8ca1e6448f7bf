"""
Dataset files on the Hugging Face Hub: requests with retries, pinned downloads.

    repository, revision -> pin_repo -> manifest: commit and files -> HubRepo.fetch -> verified file

huggingface_hub sends the requests, reads HF_ENDPOINT, HF_TOKEN, HF_HUB_DOWNLOAD_TIMEOUT and
HF_HUB_ETAG_TIMEOUT, and resumes interrupted downloads. This module adds retries, a timeout for each
request, and error messages with a fix.
"""

import os
import random
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import cache, partial
from pathlib import Path, PurePosixPath
from typing import Any, NoReturn, TypeVar

from huggingface_hub import HfApi, constants, errors, hf_hub_url, set_client_factory
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import disable_progress_bars, hf_raise_for_status
from huggingface_hub.utils._http import default_client_factory

from nanochat.common import (
    UsageError,
    hold_lock,
    printable,
    read_json,
    require_free,
    sha256_file,
    write_json,
)

# ---- Requests to the Hub, with retries -----------------------------------------------------------


X = TypeVar("X")

PATIENCE_SECONDS = 900.0  # retry a request for this long after its first failure
PAUSE_SECONDS = 1.0  # before the first retry; doubles with every retry
MAX_PAUSE_SECONDS = 60.0
JITTER = 1.25  # largest random factor of a pause, so that processes do not retry in lockstep
TRANSIENT_STATUS = {408, 425, 429, 500, 502, 503, 504}
# Base classes of transient errors in Python, httpx, requests and hf_xet. Matched by name, because
# huggingface_hub 1 uses httpx and 2 uses httpx2.
TRANSIENT_ERRORS = {
    *("ConnectionError", "TimeoutError", "TimeoutException", "NetworkError", "ProxyError"),
    *("RemoteProtocolError", "Timeout", "ChunkedEncodingError", "XetDownloadError"),
    "LocalEntryNotFoundError",  # unless it has a cause
}
NO_NETWORK = "work offline: --dataset=embedded or <folder>, or conversations from jsonl:<file>"


def request(repo: str, revision: str, file: str | None, action: Callable[[], X]) -> X:
    """Run a request to the Hub with retries. Raises UsageError with a fix if it fails."""
    install_client()
    try:
        return with_retries(file or repo, action)
    except Exception as error:
        if explained := explain(unwrap_error(error), repo, revision, file):
            raise explained from error
        raise


def explain(error: BaseException, repo: str, revision: str, file: str | None) -> UsageError | None:
    """Return a UsageError with the cause and fix of a permanent error, or None if unknown."""
    hub, line = constants.ENDPOINT, first_line(error)
    code = getattr(getattr(error, "response", None), "status_code", None)
    # Raised for responses not from the Hub, such as a captive portal's login page
    unexpected = (ValueError, TypeError, KeyError, AttributeError, errors.FileMetadataError)
    if isinstance(error, errors.HFValidationError):
        why = f"{repo!r} is not a valid repository name ({line})"
        fix = "use <owner>/<name>"
    elif isinstance(error, errors.OfflineModeIsEnabled):
        why = f"{file or repo} is not on disk, and HF_HUB_OFFLINE disables downloads"
        fix = f"unset HF_HUB_OFFLINE, or {NO_NETWORK}"
    elif isinstance(error, errors.GatedRepoError) or code == 403:
        why = f"{repo} is gated, or access is denied ({code})"
        fix = f"request access at {hub}/datasets/{repo}, then log in with `hf auth login`"
    elif isinstance(error, errors.RevisionNotFoundError) and file is None:
        why = f"{repo} has no revision {revision!r}"
        fix = "set revision to a branch, tag or commit"
    elif isinstance(error, errors.RevisionNotFoundError):
        why = f"{repo} no longer has commit {revision}, which the manifest pins"
        fix = "set a new NANOCHAT_BASE_DIR to start over with the current commit"
    elif isinstance(error, errors.EntryNotFoundError):
        why = f"{repo} has no file {file} at commit {revision}, although the Hub lists it"
        fix = "delete the dataset's folder under NANOCHAT_BASE_DIR/data and choose another revision"
    elif isinstance(error, errors.RepositoryNotFoundError) or code == 401:
        why = f"{hub} has no dataset {repo}, or it is private, or your token is invalid ({code})"
        fix = "check the name; log in with `hf auth login`, or unset HF_TOKEN"
    elif isinstance(error, unexpected) or is_client_error(error) or code is not None:
        what = "failed" if code else "got no valid Hub response"
        why = f"request to {hub} for {file or repo} {what} ({line})"
        fix = f"log in to the network in a browser, check HF_ENDPOINT and proxy, or {NO_NETWORK}"
    else:
        return None
    return UsageError(why, fix)


def with_retries(what: str, action: Callable[[], X], patience_seconds: float | None = None) -> X:
    """
    Retry `action` on transient failures for `patience_seconds` (default: PATIENCE_SECONDS).

    Pauses double up to MAX_PAUSE_SECONDS; a Retry-After from the server takes precedence. Raises
    UsageError when the time is up, and any other error at once.
    """
    patience = PATIENCE_SECONDS if patience_seconds is None else patience_seconds
    attempt, began = 1, time.monotonic()
    while True:
        attempted = time.monotonic()
        try:
            return action()
        except Exception as raised:
            error = unwrap_error(raised)
            if not is_transient(error):
                raise
            if attempt == 1 or time.monotonic() - attempted > MAX_PAUSE_SECONDS:
                began = time.monotonic()  # a long attempt made progress: restart the clock
            server_wait, problem = retry_after(error), printable(f"{what}: {first_line(error)}")
            backoff = min(MAX_PAUSE_SECONDS, PAUSE_SECONDS * 2 ** min(attempt - 1, 30))
            pause = backoff if server_wait is None else max(server_wait, PAUSE_SECONDS)
            pause *= random.SystemRandom().uniform(1, JITTER)  # leaves the run's RNG alone
            limit = f"limit {patience / 60:.0f} min"
            if time.monotonic() - began + pause > patience:
                wait = f"; Retry-After: {server_wait:.0f} s" if server_wait is not None else ""
                raise UsageError(
                    f"gave up after {attempt} attempts ({limit}): {problem}{wait}",
                    f"run the same command again to resume, or {NO_NETWORK}",
                ) from raised
            attempt += 1
            print(f"{problem}; retrying in {pause:.0f} s (attempt {attempt}, {limit})", flush=True)
            time.sleep(pause)


def is_transient(error: BaseException) -> bool:
    """True for failures that a retry may fix: an overloaded server, a lost connection."""
    if isinstance(error, errors.OfflineModeIsEnabled) or is_client_error(error):
        return False
    response = getattr(error, "response", None)
    if response is not None:
        return response.status_code in TRANSIENT_STATUS
    names = {base.__name__ for base in type(error).__mro__}
    return bool(names & TRANSIENT_ERRORS) or "Consistency check failed" in str(error)


def is_client_error(error: BaseException) -> bool:
    """True if the request cannot succeed: invalid URL, redirect loop, invalid certificate."""
    return type(error).__name__ in ("UnsupportedProtocol", "InvalidURL", "TooManyRedirects") or (
        "CERTIFICATE_VERIFY_FAILED" in str(error)
    )


def retry_after(error: BaseException) -> float | None:
    """Seconds to wait according to Retry-After (seconds or date) or RateLimit, or None."""
    headers = getattr(getattr(error, "response", None), "headers", {})
    value = headers.get("Retry-After", "").strip()
    if value.isdigit():
        return float(value)
    if limit := re.search(r"\br=0\s*;\s*t=(\d+)", headers.get("RateLimit", "")):
        return float(limit[1])
    try:
        date = parsedate_to_datetime(value).replace(tzinfo=UTC)  # HTTP dates are in GMT
    except ValueError:
        return None
    return max(0.0, (date - datetime.now(UTC)).total_seconds())


def unwrap_error(error: BaseException) -> BaseException:
    """The cause of a LocalEntryNotFoundError if it has one, else the error itself."""
    return (isinstance(error, errors.LocalEntryNotFoundError) and error.__cause__) or error


def first_line(error: BaseException) -> str:
    """Type of an error and the first line of its message."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}".rstrip(": ")


def is_inside(name: str) -> bool:
    """True for a relative path that stays inside its folder."""
    path = PurePosixPath(name)
    return not (path.is_absolute() or ".." in path.parts or "\\" in name or "\0" in name)


@cache
def install_client() -> None:
    """Add `set_timeouts` and `raise_transient` to the Hub client; they run before its retries."""

    disable_progress_bars()  # one per file; `download` prints a line instead

    def new_client() -> Any:
        client = default_client_factory()
        client.event_hooks["request"].append(set_timeouts)
        client.event_hooks["response"].append(raise_transient)
        return client

    set_client_factory(new_client)


def set_timeouts(http_request: Any) -> None:
    """Set the connect, read, write and pool timeouts that a request lacks."""
    limits, default = http_request.extensions["timeout"], constants.HF_HUB_DOWNLOAD_TIMEOUT
    http_request.extensions["timeout"] = {k: v or default for k, v in limits.items()}


def raise_transient(response: Any) -> None:
    """Raise on an HTML page; also on a transient status, so that only `with_retries` retries it."""
    if response.status_code in TRANSIENT_STATUS:
        hf_raise_for_status(response)
    if response.is_success and "text/html" in response.headers.get("Content-Type", ""):
        raise ValueError("HTML page instead of data")


# ---- A dataset repository, pinned at first use ---------------------------------------------------
# The manifest stores the commit and the SHA-256 of every downloaded file; both are enforced. If the
# Hub has no digest, the whole file is decoded before one is recorded.


def pin_repo(name: str, path: Path, suffixes: tuple[str, ...], revision: str | None = None) -> dict:
    """
    Return the manifest at `path`, or a new one, which the caller saves.

    It lists the files with one of the `suffixes`, sorted by name. Raises UsageError if the
    repository or revision does not exist, ValueError if another revision is pinned.
    """
    if not path.exists():
        branch = revision or "main"

        def resolve() -> tuple[str, list[RepoFile]]:
            api = HfApi()  # uses the current endpoint
            commit = api.dataset_info(name, revision=branch).sha or branch
            tree = api.list_repo_tree(name, recursive=True, revision=commit, repo_type="dataset")
            return commit, [file for file in tree if isinstance(file, RepoFile)]

        commit, listed = request(name, branch, None, resolve)
        if outside := [file.path for file in listed if not is_inside(file.path)]:
            raise UsageError(f"{name} lists unsafe path {outside[0]!r}", "use another dataset")
        files = {file.path: {"bytes": file.size} for file in listed if file.path.endswith(suffixes)}
        pinned = {"dataset": name, "revision": branch, "commit": commit}
        return {**pinned, "files": dict(sorted(files.items()))}
    manifest = read_json(path)
    if revision not in (None, manifest["revision"], manifest["commit"]):
        raise ValueError(
            f"revision {revision} is set, but {path} pins {name} to {manifest['revision']} at "
            f"commit {manifest['commit']}; delete {path.parent} to change it"
        )
    return manifest


@dataclass(frozen=True)
class HubRepo:
    """A repository at one commit; files are downloaded into `folder` when first read."""

    name: str
    folder: Path
    commit: str
    find_problem: Callable[[Path, bool], str | None]
    """(new file, whether to decode all of it) -> why it is unusable, or None."""
    need_less: str = "lower --num_shards"
    """How to do without some of its files, for errors."""

    @property
    def manifest(self) -> Path:
        return self.folder / "manifest.json"

    def files(self) -> dict[str, dict[str, Any]]:
        """File name -> bytes, and sha256 once downloaded."""
        return read_json(self.manifest)["files"]

    def record(self, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        """Replace the manifest with `change(manifest)`, holding the lock."""
        with hold_lock(self.folder / ".lock", "writing the manifest"):
            write_json(self.manifest, change(read_json(self.manifest)))

    def fetch(self, file: str) -> Path:
        """
        Return the path of a verified file. One process downloads it, the others wait.

        A damaged file is renamed to `<name>.bad` and downloaded again, once. Raises ValueError if
        that fails too, or at once if the file matches the Hub's digest but is unusable.
        """
        path, problem = self.folder / file, None
        lock = self.folder / ".locks" / f"{file.replace('/', '--')}.lock"
        with hold_lock(lock, f"fetching {file}"):
            for _ in range(2):
                problem = self.obtain(file)
                if problem is None:
                    return path
                bad = path.with_name(path.name + ".bad")
                os.replace(path, bad)
                print(printable(f"{path}: {problem}; set aside as {bad.name}"), flush=True)
            self.refuse(file, f"after two attempts: {problem}")

    def obtain(self, file: str) -> str | None:
        """Download a file if missing, verify it and record its digest; return any problem."""
        path, entry = self.folder / file, self.files()[file]
        recorded = entry.get("sha256")
        expected = recorded or self.remote_digest(file)
        if not path.exists():
            self.download(file, entry["bytes"])
        digest, size = sha256_file(path), path.stat().st_size
        if expected not in (None, digest):
            by = "the manifest" if recorded else "the Hub"
            return f"its SHA-256 is {digest[:16]}..., but {by} says {expected[:16]}..."
        if recorded is not None:
            return None
        if size != entry["bytes"]:
            return f"it has {size} bytes, but the listing says {entry['bytes']}"
        if problem := self.find_problem(path, expected is None):
            if expected is None:
                return problem
            self.refuse(file, f"although it matches the Hub's digest: {problem}")
        entry = {"bytes": size, "sha256": digest}
        self.record(lambda manifest: {**manifest, "files": {**manifest["files"], file: entry}})
        return None

    def refuse(self, file: str, problem: str) -> NoReturn:
        """Delete a file, and the manifest if it has no verified file; raise ValueError."""
        (self.folder / file).unlink(missing_ok=True)
        with hold_lock(self.folder / ".lock", "writing the manifest"):
            found = self.files() if self.manifest.exists() else {}
            if not any("sha256" in each for each in found.values()):
                self.manifest.unlink(missing_ok=True)
        fix = f"{self.need_less}, or delete {self.folder} and choose another revision"
        raise ValueError(f"{self.name}: {file} is unusable {problem}; {fix}")

    def remote_digest(self, file: str) -> str | None:
        """SHA-256 of a file on the Hub; None for small text files, which have none there."""
        url = hf_hub_url(self.name, file, repo_type="dataset", revision=self.commit)

        def ask() -> str | None:
            about = HfApi().get_hf_file_metadata(url=url, timeout=constants.HF_HUB_ETAG_TIMEOUT)
            if about.etag is None or about.commit_hash is None:
                raise ValueError("no ETag or no commit")
            return about.etag if len(about.etag) == 64 else None

        return request(self.name, self.commit, file, ask)

    def download(self, file: str, size: int) -> None:
        """Download one file, resuming a partial download."""
        require_free(self.folder, size, f"downloading {file}", self.need_less)
        print(printable(f"downloading {self.name}: {file} ({size / 1e6:.1f} MB)"), flush=True)
        began, where = time.monotonic(), {"revision": self.commit, "local_dir": self.folder}
        get = partial(HfApi().hf_hub_download, self.name, file, repo_type="dataset", **where)
        request(self.name, self.commit, file, get)
        print(printable(f"downloaded {file} in {time.monotonic() - began:.1f} s"), flush=True)
