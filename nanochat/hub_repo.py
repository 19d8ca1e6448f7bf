"""
A data set repository of the hub, pinned to what it was when it was first used.

    repository, revision -> manifest: commit, files -> fetch(file) -> verified download

The manifest lies beside the files. It names the commit that the branch stood at, and the SHA-256
of every file from its first download on; both are enforced from then on. Where the hub gives no
digest, all content is decoded before one is recorded. Knows nothing else of what is in a file.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanochat import hub
from nanochat.common import printable, read_json, sha256_file, write_json
from nanochat.disk import locked
from nanochat.text_files import damage


@dataclass(frozen=True)
class HubRepo:
    """A repository at one commit; its files are fetched into `folder` when first read."""

    name: str
    folder: Path
    commit: str

    @property
    def manifest(self) -> Path:
        return self.folder / "manifest.json"

    def files(self) -> dict[str, dict[str, Any]]:
        """Name -> bytes, and sha256 once it has been fetched."""
        return read_json(self.manifest)["files"]

    def fetch(self, file: str, check: Callable[[Path], None] = lambda path: None) -> Path:
        """
        A file, complete and verified. One process fetches it, the others wait.

        A file that is damaged is set aside as `<name>.bad` and fetched anew, once; after that
        ValueError names it. `check` may refuse, by an error, a file that is new and whole.
        """
        path = self.folder / file
        problem = None
        lock = self.folder / ".locks" / f"{file.replace('/', '--')}.lock"
        with locked(lock, f"fetching {file}"):
            for _ in range(2):
                problem = self.obtain(file, check)
                if problem is None:
                    return path
                bad = path.with_name(path.name + ".bad")
                os.replace(path, bad)
                print(printable(f"{path}: {problem}; set aside as {bad.name}"), flush=True)
        raise ValueError(
            f"{self.name}: {file} is refused, twice: {problem}; when the hub's file is wrong, "
            f"use fewer --num_shards, or delete {self.folder} and name another --revision"
        )

    def obtain(self, file: str, check: Callable[[Path], None]) -> str | None:
        """Download the file unless it is there, and record its digest; or say what is wrong."""
        path = self.folder / file
        recorded = promised = self.files()[file].get("sha256")
        if recorded is None or not path.exists():
            remote = hub.remote_file(self.name, self.commit, file)
            promised = recorded or remote.sha256
            if not path.exists():
                hub.download(self.name, self.commit, file, remote.size, self.folder)
        digest = sha256_file(path)
        if promised is not None and promised != digest:
            by = "the manifest" if recorded else "the hub"
            return f"its SHA-256 is {digest[:16]}..., {by} says {promised[:16]}..."
        size, listed = path.stat().st_size, self.files()[file].get("bytes")
        if recorded is None and listed is not None and size != listed:
            return f"it has {size} bytes, the listing says {listed}"
        if recorded is None:
            if problem := damage(path, whole=promised is None):
                return problem
            try:
                check(path)
            except ValueError:
                if not any("sha256" in each for each in self.files().values()):
                    self.manifest.unlink()  # nothing of a repository that is of no use is recorded
                    path.unlink()
                raise
            with locked(self.folder / ".lock", "writing the manifest"):
                manifest = read_json(self.manifest)
                manifest["files"][file] = {"bytes": path.stat().st_size, "sha256": digest}
                write_json(self.manifest, manifest)
        return None


def open_repo(
    name: str,
    folder: Path,
    suffixes: tuple[str, ...],
    revision: str | None = None,
    choose: Callable[[Sequence[str]], dict[str, Any]] = lambda files: {},
) -> tuple[HubRepo, dict[str, Any]]:
    """
    A repository and its manifest, which is written at first use.

    suffixes: of the files that the manifest lists, in order of names; from these names, `choose`
    makes what else it is to hold. Raises ValueError when there is no such repository or revision,
    or when another one is pinned.
    """
    path = folder / "manifest.json"
    with locked(folder / ".lock", f"resolving {name}"):
        if not path.exists():
            branch = revision or "main"
            commit, sizes = hub.listing(name, branch)
            files = {file: {"bytes": n} for file, n in sizes.items() if file.endswith(suffixes)}
            about = {"dataset": name, "revision": branch, "commit": commit, "files": files}
            write_json(path, about | choose(list(files)))
        manifest = read_json(path)
    if revision not in (None, manifest["revision"], manifest["commit"]):
        raise ValueError(
            f"--revision={revision}, but {path} pins {name} to {manifest['revision']} at "
            f"commit {manifest['commit']}; delete {folder} to start over with another"
        )
    return HubRepo(name, folder, manifest["commit"]), manifest
