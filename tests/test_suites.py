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
from nanochat.eval_core import CORE_TASKS, open_suite
from nanochat.logger import read_metrics
from tests.test_eval_core import WORDS, save_model, write_bundle

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
    assert len(suite.missing) == 16 and "coqa" in suite.missing
    (bundle / "eval_data" / "sense" / "copa.jsonl").unlink()
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


UNSAFE = [  # name in the archive, mode, size, message
    ("eval_bundle/../../up.txt", 0, 1, "up.txt' points outside of the archive"),
    ("/tmp/absolute.txt", 0, 1, "absolute.txt' points outside of the archive"),
    ("..\\up.txt", 0, 1, "up.txt' points outside of the archive"),
    ("eval_bundle/bomb", 0, 8 << 20, "8,[0-9,]+ bytes unpacked"),
]


@pytest.mark.parametrize(("name", "mode", "size", "message"), UNSAFE)
def test_S14_unsafe_archive_is_rejected_before_use(
    archive, command, monkeypatch, tmp_path, name, mode, size, message
):
    info = zipfile.ZipInfo(name)
    info.external_attr, info.compress_type = mode << 16, zipfile.ZIP_DEFLATED
    with zipfile.ZipFile(archive, "a") as file:
        file.writestr(info, bytes(size))
    monkeypatch.setattr(eval_core, "MAX_UNPACKED_BYTES", 2**20)
    before = set(tmp_path.rglob("*"))
    printed = command.rejects(*FETCH, f"--eval_bundle={archive}")
    assert re.search(f"(?s){message}.*--eval_bundle", printed)
    assert set(tmp_path.rglob("*")) == before, "nothing is extracted"


def test_S14_error_names_the_damaged_member(archive, command):
    content = bytearray(archive.read_bytes())
    content[content.index(b"eval_data/sense/copa.jsonl") + 100] ^= 1
    archive.write_bytes(content)
    assert re.search("(?s)bundle.zip.*copa", command.rejects(*FETCH, f"--eval_bundle={archive}"))


COPA = "eval_data/sense/copa.jsonl"
ITEM = {"query": "I ran, so", "choices": ["I won.", "I ate."], "gold": 1}


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("core.yaml", "tasks: 3", "icl_tasks"),
        ("core.yaml", "icl_tasks:\n- label: copa\n", "icl_task_type"),
        ("core.yaml", '[{"dataset_uri": "../up"}]', "'../up' of x is not a path inside eval_data"),
        ("core.yaml", '[{"dataset_uri": "/tmp/up"}]', "'/tmp/up' of x"),
        ("core.yaml", '[{"dataset_uri": "a/../../up"}]', "'a/../../up' of x"),
        ("core.yaml", '[{"icl_task_type": "essay"}]', "x.jsonl, line 1: not an item of kind essay"),
        ("core.yaml", '[{"num_fewshot": [-1]}]', "task x: .*num_fewshot -1"),
        ("eval_meta_data.csv", "a,b\n1,2\n", "Eval Task"),
        ("eval_meta_data.csv", "Eval Task,Random baseline\ncopa,50\n", "piqa"),
        ("eval_meta_data.csv", "Eval Task,Random baseline\ncopa,100\n", "copa.*random_baseline 1"),
        (COPA, '{"query": 1}\n{"que', "copa.jsonl, line 2"),
        (COPA, "", "copa.*0 items"),
        (COPA, "[" * 100_000, "copa.jsonl, line 1"),
        *(
            (COPA, f"{json.dumps(ITEM)}\n{json.dumps(ITEM | bad)}", "copa.jsonl, line 2")
            for bad in ({"gold": 5}, {"gold": "1"}, {"gold": -1}, {"choices": []}, {"query": None})
        ),
    ],
)
def test_invalid_bundle_file_is_named(bundle, base, command, file, text, message):
    if text.startswith("[{"):
        entry = {"label": "x", "dataset_uri": "x.jsonl", "icl_task_type": "schema"}
        [change] = json.loads(text)
        text = json.dumps({"icl_tasks": [entry | {"num_fewshot": [0]} | change]})
        (bundle / "eval_meta_data.csv").write_text("Eval Task,Random baseline\nx,50\n")
        (bundle / "eval_data" / "x.jsonl").write_text("{}")
    (bundle / file).write_text(text)
    save_model()
    printed = command.rejects("base_eval", f"--eval_bundle={bundle}", "--device_type=cpu")
    assert re.search(f"(?s){message}.*--eval_bundle", printed)


def test_published_bundle_has_the_tasks_in_report_order(hub):
    suite = open_suite(f"{hub}/eval_bundle")
    assert suite.missing == ("coqa",)
    assert [task.name for task in suite.tasks] == [name for name in CORE_TASKS if name != "coqa"]


def test_core_metric_runs_at_its_cadence_and_at_the_end(base, bundle, tmp_path, command):
    (tmp_path / "text").mkdir()
    for shard in "ab":
        lines = [json.dumps({"text": " ".join(WORDS * (i % 9) + [shard])}) for i in range(60)]
        (tmp_path / "text" / f"{shard}.jsonl").write_text("\n".join(lines))
    command.works("tok_train", f"--dataset={tmp_path / 'text'}", "--vocab_size=290")
    flags = (
        f"--dataset={tmp_path / 'text'} --depth=1 --max_seq_len=32 --total_batch_size=64 "
        "--num_iterations=5 --eval_every=0 --eval_tokens=64 --device_type=cpu "
        f"--eval_bundle={bundle} --core_metric_every=2 --core_metric_max_per_task=3"
    )
    command.works("base_train", *flags.split())
    metrics = read_metrics(base / "base_checkpoints" / "d1" / "metrics.jsonl")
    found = {m["step"]: m["core_metric"] for m in metrics if "core_metric" in m}
    values = read_json(base / "report" / "base-model-training.json")["values"]
    assert list(found) == [2, 4, 5] and values["CORE metric estimate"]["n"] == 18
    assert found[5] == values["CORE metric estimate"]["value"]
