"""Evaluation bundles: folders, archives and downloads; what is damaged or unsafe is rejected."""

import json
import re
import threading
import zipfile
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest

from nanochat import eval_core
from nanochat.common import read_json, sha256_file
from nanochat.eval_core import open_suite
from tests.test_eval_core import write_bundle
from tests.training_runs import SMALL, curve, folder

FETCH = ("base_eval", "--suite=dclm", "--only_fetch")


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return write_bundle(tmp_path / "bundle")


@pytest.fixture
def archive(bundle: Path, tmp_path: Path) -> Path:
    """The bundle as a zip file with a top-level folder, like the published one."""
    path = tmp_path / "bundle.zip"
    with zipfile.ZipFile(path, "w") as file:
        for part in bundle.rglob("*"):
            file.write(part, f"eval_bundle/{part.relative_to(bundle)}")
    return path


@pytest.fixture
def server(archive: Path):
    """Serves the folder of the archive; `asked` has the requested paths."""
    asked: list[str] = []

    class Handler(SimpleHTTPRequestHandler):
        def log_request(self, *args):
            asked.append(self.path)

    handler = partial(Handler, directory=str(archive.parent))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield SimpleNamespace(url=f"http://127.0.0.1:{server.server_port}/bundle.zip", asked=asked)
        server.shutdown()


def test_R35_folder_archive_and_url_hold_the_same_suite(bundle, archive, server):
    suite = open_suite(str(bundle))
    assert suite == open_suite(str(archive)) == open_suite(server.url)
    assert open_suite(server.url) == suite and len(server.asked) == 1, "downloaded once"
    assert suite.about.startswith("DCLM, 6 of 22 tasks") and "without coqa" in suite.about
    (bundle / "eval_data" / "copa.jsonl").unlink()
    assert open_suite(str(bundle)).fingerprint != suite.fingerprint


def test_B17_dead_bundle_url_error_has_a_fix(server, command):
    printed = command.rejects(*FETCH, f"--eval_bundle={server.url}.missing")
    assert "404" in printed and "--eval_bundle" in printed
    printed = command.rejects(*FETCH, "--eval_bundle=http://127.0.0.1:1/refused.zip")
    assert "--eval_bundle" in printed


def test_S14_published_bundle_with_wrong_digest_is_rejected(
    server, archive, base, command, monkeypatch
):
    monkeypatch.setattr(eval_core, "PUBLISHED_URL", server.url)
    monkeypatch.setattr(eval_core, "PUBLISHED_SHA256", "0" * 64)
    assert sha256_file(archive) in command.rejects(*FETCH)
    assert not [path for path in base.rglob("*") if path.is_file()], "nothing remains on disk"
    monkeypatch.setattr(eval_core, "PUBLISHED_SHA256", sha256_file(archive))
    command.works(*FETCH)
    [copy] = base.rglob("*.zip")
    copy.write_bytes(b"damaged since")
    assert "6 of 22 tasks" in command.works(*FETCH) and len(server.asked) == 3


@pytest.mark.parametrize(
    ("name", "size", "message"),
    [
        ("eval_bundle/../../up.txt", 1, "up.txt' points outside of the archive"),
        ("/tmp/absolute.txt", 1, "absolute.txt' points outside of the archive"),
        ("..\\up.txt", 1, "up.txt' points outside of the archive"),
        ("eval_bundle/bomb", 8 << 20, "8,[0-9,]+ bytes unpacked"),
    ],
)
def test_S14_unsafe_archive_is_rejected(archive, command, monkeypatch, name, size, message):
    with zipfile.ZipFile(archive, "a", zipfile.ZIP_DEFLATED) as file:
        file.writestr(zipfile.ZipInfo(name), bytes(size))
    monkeypatch.setattr(eval_core, "MAX_UNPACKED_BYTES", 2**20)
    printed = command.rejects(*FETCH, f"--eval_bundle={archive}")
    assert re.search(f"(?s){message}.*--eval_bundle", printed)


def test_S14_error_names_the_damaged_member(archive, command):
    content = bytearray(archive.read_bytes())
    content[content.index(b"eval_data/copa.jsonl") + 100] ^= 1
    archive.write_bytes(content)
    assert re.search("(?s)bundle.zip.*copa", command.rejects(*FETCH, f"--eval_bundle={archive}"))


COPA = "eval_data/copa.jsonl"
ITEM = {"query": "I ran, so", "choices": ["I won.", "I ate."], "gold": 1}


@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        ("core.yaml", '"icl_tasks"', '"tasks"', "icl_tasks"),
        ("core.yaml", '"copa.jsonl"', '"../up"', "'../up' of copa is not a path inside eval_data"),
        ("core.yaml", '"schema"', '"essay"', "essay"),
        (COPA, None, '{"query": 1}\n{"que', "copa.jsonl, line 2"),
        *(
            (COPA, None, f"{json.dumps(ITEM)}\n{json.dumps(ITEM | bad)}", "copa.jsonl, line 2")
            for bad in ({"gold": 2}, {"gold": "1"}, {"choices": []})
        ),
    ],
)
def test_invalid_bundle_file_is_named(bundle, command, file, old, new, message):
    text = (bundle / file).read_text()
    (bundle / file).write_text(text.replace(old or text, new))
    printed = command.rejects(*FETCH, f"--eval_bundle={bundle}")
    assert re.search(f"(?s){message}.*--eval_bundle", printed)


def test_core_metric_runs_at_its_cadence_and_at_the_end(trained, bundle, command):
    flags = "--num_iterations=5 --core_metric_every=2 --core_metric_max_per_task=3".split()
    command.works("base_train", *SMALL, *flags, "--model_tag=core", f"--eval_bundle={bundle}")
    found = curve(folder(trained, "core"), "core_metric")
    values = read_json(trained / "report" / "base-model-training.json")["values"]
    assert len(found) == 3 and values["CORE metric estimate"]["n"] == 18
    assert found[-1] == values["CORE metric estimate"]["value"]
