"""Local servers used as the Hugging Face Hub, and small copies of published datasets."""

import hashlib
import json
import runpy
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pyarrow as pa
import pyarrow.csv as csv
import pyarrow.parquet as pq
import pytest

from nanochat.hub import HubRepo
from tasks import hub


@contextmanager
def hub_served(hub: Path, patch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """
    Yield a function that starts a server for a folder (default: `hub`) and uses it as the Hub.

    The server is `tools/serve_hub.py` next to the data.
    """
    make_server = runpy.run_path(f"{hub.parent}/tools/serve_hub.py")["make_server"]
    with ExitStack() as running:
        yield lambda root=hub: running.enter_context(serve(make_server(root), patch))


@contextmanager
def serve(server: Any, patch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Run a server in a thread and use it as the Hub in this process and its children."""
    server.handle_error = lambda request, client_address: None  # clients may leave
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    use_endpoint(f"http://127.0.0.1:{server.server_port}", patch)
    yield server
    server.shutdown()
    server.server_close()


def use_endpoint(endpoint: str, patch: pytest.MonkeyPatch) -> None:
    """Use the server at `endpoint` as the Hub in this process and its children."""
    patch.setenv("HF_ENDPOINT", endpoint)
    patch.setattr(huggingface_hub.constants, "ENDPOINT", endpoint)
    template = endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    patch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)


def small_hub(hub: Path, folder: Path, rows: int) -> Path:
    """
    Copy the first `rows` rows of each file of `hub` to `folder`. Local text and conversations get
    the names that the speedrun uses.
    """
    names = {
        "karpathy/climbmix-400b-shuffle": "local/mini-pretrain",
        "HuggingFaceTB/smol-smoltalk": "local/chat-instruct",
    }
    own = "cais/mmlu openai/gsm8k openai/openai_humaneval allenai/ai2_arc deepmind/aqua_rat"
    names |= {name: name for name in own.split()}
    for name, source in names.items():
        root = hub / "datasets" / source
        for path in sorted(root.rglob("*.parquet")):
            out = folder / "datasets" / name / path.relative_to(root)
            out.parent.mkdir(parents=True, exist_ok=True)
            pq.write_table(pq.read_table(path).slice(0, rows), out)
    return folder


class FakeHub(ThreadingHTTPServer):
    """
    Serves `files` as every dataset repository. The replies of `faults[kind]` come first; a kind is
    info or tree (of a repository), head or get (of a file).
    """

    def __init__(self, files: dict[str, bytes]):
        super().__init__(("127.0.0.1", 0), FakeHubHandler)
        self.files, self.commit = files, "c0ffee" + "0" * 34
        self.faults: dict[str, Iterator[Callable]] = {}


class FakeHubHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FakeHub

    def do_GET(self):
        path = self.path.partition("?")[0]
        of_repo = {"revision": "info", "tree": "tree"}
        kind = of_repo.get(path.split("/")[5], self.command.lower())
        if fault := next(self.server.faults.get(kind, iter(())), None):
            return fault(self)
        files = self.server.files
        if kind == "info":
            return self.answer(200, {"id": "a/b", "sha": self.server.commit, "tags": []})
        if kind == "tree":
            listed = [{"path": name, "size": len(files[name])} for name in files]
            return self.answer(200, [{"type": "file", "oid": "0", **each} for each in listed])
        self.answer_file(files[path.partition("/resolve/")[2].partition("/")[2]])

    do_HEAD = do_GET

    def answer_file(self, content: bytes):
        headers = {"ETag": f'"{hashlib.sha256(content).hexdigest()}"'}
        headers |= {"Content-Type": "binary/octet-stream", "X-Repo-Commit": self.server.commit}
        self.answer(200, content, headers)

    def answer(self, status: int, body: Any = b"", headers: dict | None = None):
        body = body if isinstance(body, bytes) else json.dumps(body).encode()
        standard = {"Content-Type": "application/json", "Content-Length": len(body)}
        self.send_response(status)
        for name, value in {**standard, **(headers or {})}.items():
            self.send_header(name, str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *args):
        pass


Files = Mapping[str, Sequence[Any]]  # file name -> rows


def publish(files: Files, folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Write `files` to `folder`, and serve them as the files of every repository on the Hub."""
    for name, rows in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".jsonl":
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
            continue
        table = pa.Table.from_pylist([dict(row) for row in rows])
        csv.write_csv(table, path) if path.suffix == ".csv" else pq.write_table(table, path)
    listed = {name: {"bytes": 1, "sha256": name} for name in files}
    manifest = {"commit": "c0ffee", "revision": "main", "files": listed}
    patch.setattr(hub, "pin_repo", lambda *_: manifest)
    patch.setattr(HubRepo, "fetch", lambda _, name: folder / name)
