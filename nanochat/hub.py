"""
Dataset files on the Hugging Face Hub, pinned at first use.

    repository, revision -> pin_repo -> manifest: commit and files -> HubRepo.fetch -> verified file

huggingface_hub sends the requests, retries them, and resumes interrupted downloads; its environment
variables apply (HF_ENDPOINT, HF_TOKEN, HF_HUB_OFFLINE, HF_HUB_DOWNLOAD_TIMEOUT). This module pins
the commit, checks the SHA-256 of every file, and turns failures into one sentence with a fix.
"""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from huggingface_hub import HfApi, constants, errors, get_session, hf_hub_url
from huggingface_hub.hf_api import RepoFile

from nanochat.common import UsageError, hold_lock, printable, read_json, sha256_file, write_json

X = TypeVar("X")
MAX_PAUSE_SECONDS = 30.0  # between attempts of a request; pauses double from a second
OFFLINE = "offline, use --dataset=embedded or <folder>, or conversations by --mixture=jsonl:<file>"
LOGIN = "log in with `hf auth login`, or unset HF_TOKEN"


def call_hub(repo: str, revision: str, file: str | None, request: Callable[[], X]) -> X:
    """
    Return `request()`, repeated if the Hub is busy or the network fails. Raises UsageError with
    cause and fix if it fails for good.
    """
    pause = 1.0
    while True:
        hooks = get_session().event_hooks["request"]  # of a new session after some errors
        if set_timeouts not in hooks:
            hooks.append(set_timeouts)
        try:
            return request()
        except Exception as raised:
            if isinstance(raised, OSError) and raised.errno:  # the disk
                raise
            error, for_good = explain(raised, repo, revision, file)
            if for_good or pause > MAX_PAUSE_SECONDS:
                raise error from raised
        print(f"{error.args[0]}; trying again", flush=True)
        time.sleep(pause)
        pause *= 2


def set_timeouts(request: Any) -> None:
    """Set the timeouts that a request of huggingface_hub lacks; it would wait forever."""
    limits, default = request.extensions["timeout"], constants.HF_HUB_DOWNLOAD_TIMEOUT
    request.extensions["timeout"] = {kind: limit or default for kind, limit in limits.items()}


def explain(
    raised: BaseException, repo: str, revision: str, file: str | None
) -> tuple[UsageError, bool]:
    """A failure of a request as cause and fix, and whether trying again is useless."""
    local = isinstance(raised, errors.LocalEntryNotFoundError)
    error = (local and raised.__cause__) or raised
    line = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    code = getattr(getattr(error, "response", None), "status_code", None)
    for_good = code is not None and code not in (408, 425, 429) and code < 500
    fix = f"check the network and HF_ENDPOINT, then run the same command again, or {OFFLINE}"
    if isinstance(error, errors.HFValidationError):
        why, fix = f"{repo!r} is not a valid repository name ({line})", "use <owner>/<name>"
        for_good = True
    elif isinstance(error, errors.OfflineModeIsEnabled):
        why = f"{file or repo} is not on disk, and HF_HUB_OFFLINE disables downloads"
        fix, for_good = f"unset HF_HUB_OFFLINE, or {OFFLINE}", True
    elif isinstance(error, errors.GatedRepoError) or code == 403:
        why = f"{repo} is gated, or access is denied ({code})"
        fix = f"request access at {constants.ENDPOINT}/datasets/{repo}, then {LOGIN}"
    elif code == 401 or isinstance(error, errors.RepositoryNotFoundError):
        why = f"there is no dataset {repo}, or it is private, or your token is invalid ({code})"
        fix = f"check the name; {LOGIN}"
    elif code == 404:
        why = f"{repo} has no {file or 'such revision'} at revision {revision}"
        fix = "choose another revision; if it was pinned, delete its folder under "
        fix += "NANOCHAT_BASE_DIR/data and, if it is a text source, set --dataset again"
    else:
        why = f"the request to {constants.ENDPOINT} for {file or repo} failed ({line})"
    return UsageError(printable(why), fix), for_good


def is_inside(name: str) -> bool:
    """True for a relative path that stays inside its folder."""
    path = PurePosixPath(name)
    return not (path.is_absolute() or ".." in path.parts or "\\" in name or "\0" in name)


def pin_repo(
    name: str, path: Path, suffixes: tuple[str, ...], revision: str | None = None
) -> dict[str, Any]:
    """
    Return the manifest at `path`, or a new one, which the caller saves: dataset, revision, commit,
    and the files with one of the `suffixes`, sorted by name.

    Raises UsageError if the repository or revision does not exist, ValueError if another revision
    is pinned.
    """
    if path.exists():
        manifest = read_json(path)
        if revision not in (None, manifest["revision"], manifest["commit"]):
            raise ValueError(
                f"revision {revision} is set, but {path} pins {name} to {manifest['revision']} at "
                f"commit {manifest['commit']}; delete {path.parent} to change it"
            )
        return manifest
    branch = revision or "main"

    def resolve() -> tuple[str, list[RepoFile]]:
        api = HfApi()  # uses the current endpoint
        commit = api.dataset_info(name, revision=branch).sha or branch
        tree = api.list_repo_tree(name, recursive=True, revision=commit, repo_type="dataset")
        return commit, [entry for entry in tree if isinstance(entry, RepoFile)]

    commit, listed = call_hub(name, branch, None, resolve)
    if outside := [file.path for file in listed if not is_inside(file.path)]:
        raise UsageError(f"{name} lists unsafe path {outside[0]!r}", "use another dataset")
    files = {file.path: {"bytes": file.size} for file in listed if file.path.endswith(suffixes)}
    pinned = {"dataset": name, "revision": branch, "commit": commit}
    return {**pinned, "files": dict(sorted(files.items()))}


@dataclass(frozen=True)
class HubRepo:
    """A repository at one commit; files are downloaded into `folder` when first read."""

    name: str
    folder: Path
    commit: str

    @property
    def manifest(self) -> Path:
        return self.folder / "manifest.json"

    def files(self) -> dict[str, dict[str, Any]]:
        """File name -> bytes, and sha256 once downloaded."""
        return read_json(self.manifest)["files"]

    def record(self, changes: dict[str, Any], file: str | None = None) -> None:
        """Add entries to the manifest or, with `file`, to those of a file."""
        with hold_lock(self.folder / ".lock", "writing the manifest"):
            manifest = read_json(self.manifest)
            (manifest["files"][file] if file else manifest).update(changes)
            write_json(self.manifest, manifest)

    def fetch(self, file: str) -> Path:
        """
        Return the path of a verified file. One process downloads it, the others wait.

        A damaged file is renamed to `<name>.bad` and downloaded again, once. Raises ValueError if
        that fails too.
        """
        path = self.folder / file
        lock = self.folder / ".locks" / f"{file.replace('/', '--')}.lock"
        with hold_lock(lock, f"fetching {file}"):
            entry = self.files()[file]
            expected = entry.get("sha256") or self.remote_digest(file)
            for _ in range(2):
                if not path.exists():
                    self.download(file, entry["bytes"])
                digest, size = sha256_file(path), path.stat().st_size
                if size == entry["bytes"] and digest == (expected or digest):
                    if "sha256" not in entry:
                        self.record({"sha256": digest}, file)
                    return path
                bad = path.with_name(f"{path.name}.bad")
                os.replace(path, bad)
                print(printable(f"{path} is damaged; set aside as {bad.name}"), flush=True)
        raise ValueError(
            f"{self.name}: {file} arrived with {size} bytes and SHA-256 {digest[:16]}..., not as "
            f"listed; run the same command later, or delete {self.folder} to start over"
        )

    def remote_digest(self, file: str) -> str | None:
        """SHA-256 of a file on the Hub; None for small text files, which have none there."""
        url = hf_hub_url(self.name, file, repo_type="dataset", revision=self.commit)
        limit = constants.HF_HUB_ETAG_TIMEOUT
        about = call_hub(
            *(self.name, self.commit, file),
            lambda: HfApi().get_hf_file_metadata(url=url, timeout=limit),
        )
        return about.etag if about.etag and len(about.etag) == 64 else None

    def download(self, file: str, size: int) -> None:
        """Download one file, resuming a partial download."""
        print(printable(f"downloading {self.name}: {file} ({size / 1e6:.1f} MB)"), flush=True)
        call_hub(
            *(self.name, self.commit, file),
            lambda: HfApi().hf_hub_download(
                *(self.name, file), repo_type="dataset", revision=self.commit, local_dir=self.folder
            ),
        )
