"""
Files of data set repositories on the hub, fetched patiently.

    (repository, revision) -> listing: commit, files -> remote_file, download

huggingface_hub does the talking (HF_ENDPOINT and HF_TOKEN are its own) and continues a download
that was cut off. Here is what it leaves to its callers: attempts, pauses, and errors that say what
to do. Knows nothing of what is in a file.
"""

import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, TypeVar

from huggingface_hub import HfApi, constants, get_hf_file_metadata, hf_hub_download, hf_hub_url
from huggingface_hub.errors import (
    HfHubHTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
    XetDownloadError,
)
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import disable_progress_bars

from nanochat.disk import require_free

X = TypeVar("X")

ATTEMPTS = 6
PAUSE_SECONDS = 1.0  # before the second attempt; doubles with each further one
TRANSIENT_STATUS = {408, 425, 429, 500, 502, 503, 504}


class Listing(NamedTuple):
    """A repository at one commit: the size of each file in bytes, by name, in order of names."""

    commit: str
    sizes: dict[str, int]


class RemoteFile(NamedTuple):
    """What the hub says about a file; of small text files it keeps no SHA-256."""

    size: int
    sha256: str | None


def listing(repo: str, revision: str) -> Listing:
    """Resolve a branch, tag or commit. Raises ValueError where there is no such thing."""
    api = HfApi()

    def resolve() -> Listing:
        commit = api.dataset_info(repo, revision=revision).sha
        tree = api.list_repo_tree(repo, recursive=True, revision=commit, repo_type="dataset")
        files = sorted((f for f in tree if isinstance(f, RepoFile)), key=lambda f: f.path)
        return Listing(commit or revision, {file.path: file.size for file in files})

    try:
        return with_retries(repo, resolve)
    except RevisionNotFoundError as error:
        raise ValueError(f"{repo} has no revision {revision!r}") from error
    except RepositoryNotFoundError as error:
        raise ValueError(
            f"{constants.ENDPOINT} has no data set {repo}, or it is private: then log in with "
            "`hf auth login`"
        ) from error


def remote_file(repo: str, commit: str, name: str) -> RemoteFile:
    """Ask for the size and digest of a file."""
    url = hf_hub_url(repo, name, repo_type="dataset", revision=commit)
    about = with_retries(name, lambda: get_hf_file_metadata(url))
    is_sha256 = about.etag is not None and len(about.etag) == 64
    return RemoteFile(about.size or 0, about.etag if is_sha256 else None)


def download(repo: str, commit: str, name: str, size: int, folder: Path) -> None:
    """Fetch one file into `folder`, continuing what an earlier attempt left behind."""
    require_free(folder, size, f"downloading {name}", "lower --num_shards")
    print(f"downloading {repo}: {name} ({size / 1e6:.1f} MB)", flush=True)
    began = time.monotonic()
    with_retries(
        name,
        lambda: hf_hub_download(repo, name, repo_type="dataset", revision=commit, local_dir=folder),
    )
    print(f"downloaded {name} in {time.monotonic() - began:.1f} s", flush=True)


def with_retries(what: str, action: Callable[[], X]) -> X:
    """Run a request again, after growing pauses, while what stops it may pass."""
    for attempt in itertools.count(1):
        try:
            return action()
        except Exception as error:
            if not is_transient(error):
                raise
            if attempt == ATTEMPTS:
                raise ConnectionError(
                    f"{what}: gave up after {attempt} attempts: {error}; run the same command "
                    "again to continue, or work without network: --dataset=embedded or --data_dir "
                    "for text, jsonl:<file> for conversations"
                ) from error
            pause = PAUSE_SECONDS * 2 ** (attempt - 1)
            reason = str(error).strip().partition("\n")[0]
            print(
                f"{what}: {type(error).__name__}: {reason}; "
                f"attempt {attempt + 1} of {ATTEMPTS} in {pause:.0f} s",
                flush=True,
            )
            time.sleep(pause)
    raise AssertionError("unreachable")


def is_transient(error: BaseException) -> bool:
    """True for failures that a later attempt may not meet: an overloaded hub, a cut connection."""
    if isinstance(error, OfflineModeIsEnabled):
        return False
    if isinstance(error, HfHubHTTPError):
        response = getattr(error, "response", None)
        return response is not None and response.status_code in TRANSIENT_STATUS
    if isinstance(error, LocalEntryNotFoundError):  # asking about a file failed
        return error.__cause__ is None or is_transient(error.__cause__)
    # huggingface_hub 1 speaks through httpx, 2 through httpx2
    return (
        isinstance(error, ConnectionError | TimeoutError | XetDownloadError)
        or type(error).__module__.startswith("httpx")
        or "Consistency check failed" in str(error)
    )


def hide_progress() -> None:
    """Silence the library's own progress bars, one per file, where another one shows them all."""
    disable_progress_bars()
