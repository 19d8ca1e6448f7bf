"""Local servers used as the Hugging Face Hub: a folder of real data, or files in memory."""

import hashlib
import importlib.util
import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pyarrow.parquet as pq
import pytest


@contextmanager
def hub_served(hub: Path, patch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """
    Yield a function that starts a server for a folder (default: `hub`) and uses it as the Hub.

    The server is `tools/serve_hub.py` next to the data; the function's `switches` inject faults.
    """
    path = hub.parent / "tools" / "serve_hub.py"
    spec = importlib.util.spec_from_file_location("serve_hub", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    running = []

    def start(root: Path = hub, handler=None, **switches):
        server = module.make_server(root, **switches)
        server.RequestHandlerClass = handler(module) if handler else server.RequestHandlerClass
        serve(server, patch)
        running.append(server)
        return server

    yield start
    for server in running:
        server.shutdown()
        server.server_close()


def serve(server: ThreadingHTTPServer, patch: pytest.MonkeyPatch) -> None:
    """Run a server in a thread and use it as the Hub in this process and its children."""
    server.handle_error = lambda request, client_address: None  # clients may leave
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    use_endpoint(f"http://127.0.0.1:{server.server_port}", patch)


def use_endpoint(endpoint: str, patch: pytest.MonkeyPatch) -> None:
    """Use the server at `endpoint` as the Hub in this process and its children."""
    patch.setenv("HF_ENDPOINT", endpoint)
    patch.setattr(huggingface_hub.constants, "ENDPOINT", endpoint)
    template = endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    patch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)


def small_hub(hub: Path, folder: Path, rows: int = 100, whole: tuple[str, ...] = ()) -> Path:
    """
    Copy the first `rows` rows of each file of `hub` to `folder`; all rows for repositories in
    `whole`. Local text and conversations get the names that the speedrun uses.
    """
    names = {
        "karpathy/climbmix-400b-shuffle": "local/mini-pretrain",
        "HuggingFaceTB/smol-smoltalk": "local/chat-instruct",
        **{name: name for name in ("cais/mmlu", "openai/gsm8k", "openai/openai_humaneval")},
        **{name: name for name in ("allenai/ai2_arc", "deepmind/aqua_rat")},
    }
    for name, source in names.items():
        root = hub / "datasets" / source
        for path in sorted(root.rglob("*.parquet")):
            out = folder / "datasets" / name / path.relative_to(root)
            out.parent.mkdir(parents=True, exist_ok=True)
            table = pq.read_table(path)
            pq.write_table(table if name in whole else table.slice(0, rows), out)
    return folder


class FakeHub(ThreadingHTTPServer):
    """
    Serves `files` as every dataset repository. The replies of `faults[kind]` come first; a kind is
    info or tree (of a repository), head or get (of a file). `counts` has the requests of each kind.
    """

    def __init__(self, files: dict[str, bytes]):
        super().__init__(("127.0.0.1", 0), FakeHubHandler)
        self.files, self.commit, self.has_digests = files, "c0ffee" + "0" * 34, True
        self.faults: dict[str, Iterator[Callable]] = {}
        self.counts = Counter[str]()


class FakeHubHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FakeHub

    def do_GET(self):
        path = self.path.partition("?")[0]
        of_repo = {"revision": "info", "tree": "tree"}
        kind = of_repo.get(path.split("/")[5], self.command.lower())
        self.server.counts[kind] += 1
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

    def answer_file(self, content: bytes, sent: float = 1.0):
        """Send a file, or only the first part of it; without digests, like the Hub's small files"""
        digest = hashlib.sha256(content).hexdigest()[: 64 if self.server.has_digests else 40]
        headers = {"ETag": f'"{digest}"', "X-Repo-Commit": self.server.commit}
        self.answer(200, content, {"Content-Type": "binary/octet-stream", **headers}, sent)

    def answer(self, status: int, body: Any = b"", headers: dict | None = None, sent: float = 1.0):
        body = body if isinstance(body, bytes) else json.dumps(body).encode()
        standard = {"Content-Type": "application/json", "Content-Length": len(body)}
        self.send_response(status)
        for name, value in {**standard, **(headers or {})}.items():
            self.send_header(name, str(value))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body[: int(len(body) * sent)])
            self.close_connection = sent < 1

    def log_message(self, *args):
        pass


@contextmanager
def fake_hub(files: dict[str, bytes], patch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """Use a `FakeHub` with these files as the Hub."""
    server = FakeHub(files)
    serve(server, patch)
    yield server
    server.shutdown()
    server.server_close()
