"""
A local server that imitates the Hugging Face Hub with a folder of real data.

The server comes with the data: `tools/serve_hub.py` next to the folder.
"""

import importlib.util
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pyarrow.parquet as pq
import pytest

from nanochat import hub as hub_files


@contextmanager
def hub_served(hub: Path, patch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """
    Yield a function that starts a server for a folder (default: `hub`) and uses it as the Hub.

    The function's `switches` inject server faults. Pauses between retries are short.
    """
    path = hub.parent / "tools" / "serve_hub.py"
    spec = importlib.util.spec_from_file_location("serve_hub", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    patch.setattr(hub_files, "PAUSE_SECONDS", 0.01)
    running = []

    def start(root: Path = hub, handler=None, **switches):
        server = module.make_server(root, **switches)
        server.RequestHandlerClass = handler(module) if handler else server.RequestHandlerClass
        server.handle_error = lambda request, address: None  # clients may leave: print no traceback
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        running.append(server)
        use_endpoint(f"http://127.0.0.1:{server.server_port}", patch)
        return server

    yield start
    for server in running:
        server.shutdown()
        server.server_close()


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


def use_endpoint(endpoint: str, patch: pytest.MonkeyPatch) -> None:
    """Use the server at `endpoint` as the Hub in this process and its children."""
    patch.setenv("HF_ENDPOINT", endpoint)
    patch.setattr(huggingface_hub.constants, "ENDPOINT", endpoint)
    template = endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    patch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
