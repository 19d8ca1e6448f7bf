"""Text sources: reading, pinning and validation of files; failing downloads."""

import gzip
import json
import os
import shutil
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import huggingface_hub.constants
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from huggingface_hub.errors import HfHubHTTPError

from nanochat import common, dataset
from nanochat import hub as hub_files
from nanochat.common import REPOSITORY, UsageError, read_json, sha256_file, write_json
from nanochat.dataset import (
    DataConfig,
    FirstUseConfig,
    Source,
    load_last_source,
    open_source,
    save_last_source,
)
from tests.hub_server import hub_served

MINI = "local/mini-pretrain"


def write_parquet(path: Path, texts: list, column: str = "text", **options) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({column: texts}), path, **options)
    return path


def write_jsonl(path: Path, texts: list) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    path.write_bytes(gzip.compress(lines) if path.suffix == ".gz" else lines)
    return path


def texts_of(source, shard: str, skipped: Counter | None = None) -> list[str]:
    return [text for batch in source.documents(shard, skipped) for text in batch]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two training files and one validation file, in three formats."""
    write_parquet(tmp_path / "text/a.parquet", ["one", "two", "three"])
    write_jsonl(tmp_path / "text/b.jsonl", ["four", "five"])
    write_jsonl(tmp_path / "text/c.jsonl.gz", ["six"])
    return tmp_path / "text"


def local(folder: Path, **settings):
    return open_source(FirstUseConfig(dataset=str(folder), **settings))


# ------------------------------------------------------------------------------------------------
# Source selection


@pytest.mark.parametrize("recorded", [None, {}])  # {}: of an imported model
def test_error_without_source_lists_the_options(recorded):
    with pytest.raises(ValueError, match="--dataset=embedded"):
        open_source(DataConfig(), recorded)


@pytest.mark.parametrize("name", ["", "climbmix", "a/b/c", "b/"])
def test_invalid_repository_name_is_rejected(name):
    with pytest.raises(ValueError, match="<owner>/<name>"):
        open_source(DataConfig(dataset=name))


def test_existing_or_path_like_name_is_a_folder(folder, monkeypatch):
    monkeypatch.chdir(folder.parent)
    name = folder.name
    for named in (name, f"./{name}", f"{name}/../{name}", str(folder)):
        assert open_source(DataConfig(dataset=named)).name == str(folder)
    for named in ("./none", "~/none/none", "/none/none"):
        with pytest.raises(ValueError, match=f"--dataset={named}: no such folder"):
            open_source(DataConfig(dataset=named))
    with pytest.raises(ValueError, match=f"--dataset={folder}"):
        open_source(DataConfig(dataset=f"{name}/b.jsonl"))


def test_record_with_data_dir_still_opens(folder):
    source = local(folder, num_shards=1)
    old = {"data_dir": str(folder), "val_shard": source.val_shard, "num_shards": 1}
    recorded = {**old, "fingerprint": source.fingerprint}
    assert open_source(DataConfig(), recorded) == source


def test_last_source_is_reopened_by_the_next_stage(folder):
    source = local(folder, num_shards=1)
    save_last_source(source.describe(), "main")
    assert load_last_source("other") is None
    again = open_source(DataConfig(), load_last_source("main"))
    assert again == source
    assert again.fingerprint == source.fingerprint


def test_config_overrides_recorded_settings(folder):
    recorded = local(folder, num_shards=1).describe()
    assert len(open_source(DataConfig(num_shards=2), recorded).train_shards) == 2


def test_R6_changed_text_of_recorded_source_is_rejected(folder, base):
    recorded = local(folder).describe()
    write_jsonl(folder / "b.jsonl", ["something else"])
    shutil.rmtree(base / "data")  # as on another machine: no manifest of the old text
    with pytest.raises(ValueError, match=recorded["fingerprint"]):
        open_source(DataConfig(), recorded)


def test_fingerprint_depends_on_text_and_shards_not_on_path(folder, tmp_path):
    source = local(folder)
    moved = local(shutil.copytree(folder, tmp_path / "elsewhere"))
    assert moved.fingerprint == source.fingerprint
    assert local(folder, num_shards=1).fingerprint != source.fingerprint
    other = shutil.copytree(folder, tmp_path / "other")
    write_jsonl(other / "b.jsonl", ["four", "six"])
    assert local(other).fingerprint != source.fingerprint


# ------------------------------------------------------------------------------------------------
# A local folder


def test_files_are_sorted_and_the_last_one_is_for_validation(folder):
    source = local(folder)
    assert source.train_shards == ["a.parquet", "b.jsonl"]
    assert source.val_shard == "c.jsonl.gz"
    assert [texts_of(source, shard) for shard in source.shards()] == [
        ["one", "two", "three"],
        ["four", "five"],
        ["six"],
    ]


def test_validation_shard_is_fixed_at_first_use(folder, base):
    source = local(folder, val_shard="a.parquet")
    assert source.train_shards == ["b.jsonl", "c.jsonl.gz"]
    assert local(folder).val_shard == "a.parquet"
    with pytest.raises(ValueError, match="already validates on a.parquet"):
        local(folder, val_shard="b.jsonl")
    with pytest.raises(ValueError, match="3 files, a.parquet to c.jsonl.gz"):
        shutil.rmtree(base / "data")
        local(folder, val_shard="z.parquet")


def test_single_file_is_split_and_identity_records_it(tmp_path):
    texts = [f"{i} " * 50 for i in range(100)]
    write_jsonl(tmp_path / "text/only.jsonl", texts)
    source = local(tmp_path / "text")
    assert (source.train_shards, source.val_shard) == (["only.jsonl"], "tail-of-only.jsonl")
    train, val = (texts_of(source, shard) for shard in source.shards())
    assert train + val == texts and len(val) == len(texts) - source.identity["tail_start"]
    assert open_source(DataConfig(), source.describe()) == source
    sizes = source.shard_sizes()
    assert 0 < sizes[source.val_shard] < sizes["only.jsonl"] / 2


def test_too_many_shards_error_states_the_number_available(folder):
    with pytest.raises(ValueError, match="has 2 training shards"):
        local(folder, num_shards=3)
    with pytest.raises(ValueError, match="num_shards must be at least 1, got 0"):
        local(folder, num_shards=0)


def test_read_only_folder_works(folder, base):
    os.chmod(folder, 0o555)
    try:
        before = sorted(folder.rglob("*"))
        assert texts_of(local(folder), "b.jsonl") == ["four", "five"]
        assert sorted(folder.rglob("*")) == before
    finally:
        os.chmod(folder, 0o755)
    assert list((base / "data").rglob("manifest.json"))


def test_error_names_the_changed_file(folder):
    local(folder)
    write_jsonl(folder / "b.jsonl", ["changed"])
    with pytest.raises(ValueError, match=r"b\.jsonl is missing or does not match its SHA-256"):
        local(folder)


def test_file_changed_after_opening_is_rejected_when_read(folder):
    source = local(folder)
    write_jsonl(folder / "b.jsonl", ["changed"])
    with pytest.raises(ValueError, match=r"b\.jsonl is missing or does not match its SHA-256"):
        texts_of(source, "b.jsonl")


def test_touched_file_is_accepted(folder):
    source = local(folder)
    os.utime(folder / "b.jsonl", (1, 1))
    assert local(folder) == source


def test_R6_added_file_is_named(folder):
    local(folder)
    write_jsonl(folder / "d.jsonl", ["seven"])
    with pytest.raises(ValueError, match=r"d\.jsonl added or removed"):
        local(folder)


def test_null_empty_and_undecodable_texts_are_counted(tmp_path):
    folder = tmp_path / "text"
    bad = pa.array([b"\xff\xfe"], pa.binary()).cast(pa.string(), safe=False)
    column = pa.concat_arrays([pa.array(["one", None, "", "two"]), bad])
    folder.mkdir()
    pq.write_table(pa.table({"text": column}), folder / "a.parquet")
    write_jsonl(folder / "b.jsonl", ["three", None, "", "\ud83d half a pair", "four"])
    write_jsonl(folder / "c.jsonl", ["five"])
    source = local(folder)
    for shard, texts in (("a.parquet", ["one", "two"]), ("b.jsonl", ["three", "four"])):
        skipped: Counter = Counter()
        assert texts_of(source, shard, skipped) == texts
        assert skipped == {"null": 1, "empty": 1, "undecodable": 1}


DAMAGED = "truncated.parquet empty.parquet magic.parquet number.jsonl magic.jsonl.gz".split()


def damaged_files(folder: Path) -> dict[str, tuple[bytes, str]]:
    """Name -> content and error pattern of a damaged file."""
    whole = write_parquet(folder / "whole.parquet", ["text " * 500] * 50).read_bytes()
    (folder / "whole.parquet").unlink()
    return {
        "truncated.parquet": (whole[: len(whole) // 2], "not a readable parquet"),
        "empty.parquet": (b"", "is empty"),
        "magic.parquet": (b"JUNK" + whole[4:-4] + b"JUNK", "not a readable parquet"),
        "number.jsonl": (b'{"text": 17}\n', "line 1.*string `text`"),
        "magic.jsonl.gz": (b'{"text": "one"}\n', "line 0.*BadGzipFile"),
    }


@pytest.mark.parametrize("name", DAMAGED)
def test_R11_damaged_file_is_named_when_folder_is_opened(folder, tmp_path, name):
    content, message = damaged_files(tmp_path)[name]
    (folder / name).write_bytes(content)
    with pytest.raises(ValueError, match=f"{name}.*{message}"):
        local(folder)


def test_R11_damage_inside_a_file_is_found_when_read(folder):
    path = write_parquet(
        folder / "b.parquet", [f"{i} " * 200 for i in range(500)], write_page_checksum=True
    )
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"b\.parquet is damaged"):
        texts_of(local(folder), "b.parquet")


def test_R11_error_names_truncated_last_line(folder):
    path = write_jsonl(folder / "b.jsonl", ["four", "five"])
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(ValueError, match=r"b\.jsonl, line 2"):
        texts_of(local(folder), "b.jsonl")
    path = write_jsonl(folder.parent / "more/b.jsonl.gz", [str(i) * 99 for i in range(5000)])
    path.write_bytes(path.read_bytes()[:-50])
    write_jsonl(path.parent / "c.jsonl", ["six"])
    with pytest.raises(ValueError, match=r"b\.jsonl\.gz, line .*EOFError"):
        texts_of(local(path.parent), "b.jsonl.gz")


def test_R11_file_without_text_is_rejected(folder):
    write_parquet(folder / "b.parquet", pa.array([None, ""], pa.string()))
    with pytest.raises(ValueError, match="contains no text"):
        texts_of(local(folder), "b.parquet")


def test_batch_size_does_not_depend_on_row_groups(tmp_path, monkeypatch):
    monkeypatch.setattr(dataset, "BATCH_CHARS", 1000)
    texts = [f"{i:03d}" * 33 for i in range(2000)]
    write_parquet(tmp_path / "text/a.parquet", texts, row_group_size=2000)
    write_parquet(tmp_path / "text/b.parquet", texts[:10])
    batches = list(local(tmp_path / "text").documents("a.parquet"))
    assert [text for batch in batches for text in batch] == texts
    assert max(sum(map(len, batch)) for batch in batches) < 1000 + 4 * 33


# ------------------------------------------------------------------------------------------------
# A generated dataset


@pytest.fixture
def generated(base):
    """Three shards of a dataset called `made-up`."""
    files = {}
    for shard, texts in {"a": ["one", "two"], "b": ["three"], "val": ["four"]}.items():
        path = write_jsonl(base / f"data/made-up/text/{shard}.jsonl", texts)
        files[shard] = {"bytes": path.stat().st_size, "sha256": sha256_file(path)}
    manifest = {"identity": {"version": 1}, "val_shard": "val", "files": files}
    write_json(base / "data/made-up/manifest.json", manifest)
    return manifest


def test_generated_dataset_is_opened_by_name(generated):
    source = open_source(DataConfig(dataset="made-up"))
    assert (source.name, source.train_shards, source.val_shard) == ("made-up", ["a", "b"], "val")
    assert texts_of(source, "a") == ["one", "two"] and texts_of(source, "val") == ["four"]
    assert source.describe()["dataset"] == "made-up"
    assert open_source(DataConfig(), source.describe()) == source
    with pytest.raises(ValueError, match="--num_shards=3, but made-up has 2"):
        open_source(DataConfig(dataset="made-up", num_shards=3))
    with pytest.raises(ValueError, match="leave --val_shard out"):
        open_source(FirstUseConfig("made-up", val_shard="a"))
    with pytest.raises(ValueError, match="without --revision"):
        open_source(FirstUseConfig("made-up", revision="main"))


def test_generated_dataset_may_grow_but_not_change(generated, base):
    first = open_source(DataConfig(dataset="made-up", num_shards=1))
    path = base / "data/made-up/manifest.json"
    write_json(path, generated | {"files": generated["files"] | {"c": generated["files"]["b"]}})
    again = open_source(DataConfig(), first.describe())
    assert again.fingerprint == first.fingerprint
    assert again.identity == open_source(DataConfig(dataset="made-up")).identity
    write_jsonl(base / "data/made-up/text/a.jsonl", ["another"])
    with pytest.raises(ValueError, match="does not match its SHA-256"):
        texts_of(again, "a")
    write_json(path, generated | {"identity": {"version": 2}})
    with pytest.raises(ValueError, match=first.fingerprint):
        open_source(DataConfig(), first.describe())


# ------------------------------------------------------------------------------------------------
# The Hub


@pytest.fixture
def serve(hub, monkeypatch):
    """Serve a folder as the Hub, with optional faults and short pauses between retries."""
    with hub_served(hub, monkeypatch) as start:
        yield start


def mini(**settings) -> Source:
    source = open_source(FirstUseConfig(dataset=MINI, **settings))
    assert source.repo is not None
    return source


def original(hub: Path, shard: str) -> Path:
    return hub / "datasets" / MINI / shard


def test_repository_is_pinned_and_files_are_fetched_lazily(serve, hub, base):
    serve()
    source = mini(num_shards=2)
    assert source.train_shards == ["shard_00000.parquet", "shard_00001.parquet"]
    assert source.val_shard == "shard_00005.parquet"
    assert len(source.repo.commit) == 40
    assert not list(base.rglob("*.parquet"))
    size = original(hub, source.val_shard).stat().st_size
    assert source.missing_bytes([source.val_shard]) == size
    texts = texts_of(source, source.val_shard)
    assert len(texts) == 1536
    assert texts == pq.read_table(original(hub, source.val_shard))["text"].to_pylist()
    assert [path.name for path in base.rglob("*.parquet")] == [source.val_shard]
    assert source.missing_bytes([source.val_shard]) == 0
    recorded = read_json(source.manifest)
    assert recorded["files"][source.val_shard]["sha256"] == sha256_file(
        original(hub, source.val_shard)
    )
    assert open_source(DataConfig(), source.describe()) == source


def test_downloaded_files_work_offline(serve):
    server = serve()
    source = mini()
    source.fetch(source.val_shard)
    server.shutdown()
    server.server_close()
    assert texts_of(mini(), source.val_shard)


def test_revision_mismatch_error_names_pinned_revision(serve):
    serve()
    source = mini()
    assert mini(revision="main") == mini(revision=source.repo.commit) == source
    with pytest.raises(
        ValueError, match=f"revision dev is set, but .*main at commit {source.repo.commit}"
    ):
        mini(revision="dev")


def test_error_names_missing_revision_or_repository(serve):
    serve()
    with pytest.raises(UsageError, match="no revision 'nowhere'"):
        mini(revision="nowhere")
    with pytest.raises(UsageError, match="no dataset local/nothing"):
        open_source(DataConfig(dataset="local/nothing"))


def test_new_commit_does_not_change_a_pinned_source(serve, hub, tmp_path):
    root = tmp_path / "hub"
    shutil.copytree(hub / "datasets/local/mini-pretrain-korean", root / "datasets/local/korean")
    os.chmod(root / "datasets/local/korean", 0o755)
    serve(root)
    cfg = DataConfig(dataset="local/korean")
    source = open_source(cfg)
    write_parquet(root / "datasets/local/korean/shard_00002.parquet", ["new"])
    assert open_source(cfg) == source
    assert source.val_shard == "shard_00001.parquet"


@pytest.mark.parametrize("fraction", [0.01, 0.5, 0.99])
def test_R12_interrupted_download_resumes_to_correct_digest(serve, hub, fraction):
    serve(truncate=fraction, fail_first=1)
    path = mini().fetch("shard_00005.parquet")
    assert sha256_file(path) == sha256_file(original(hub, "shard_00005.parquet"))


def test_R12_overloaded_hub_is_retried_and_logged(serve, hub, capsys):
    server = serve(fail_first=3)
    path = mini().fetch("shard_00005.parquet")
    assert sha256_file(path) == sha256_file(original(hub, "shard_00005.parquet"))
    output = capsys.readouterr().out
    assert output.count("Server error '503") == 3 and "(attempt 4, limit 15 min)" in output
    assert "downloading local/mini-pretrain: shard_00005.parquet (3.3 MB)" in output
    assert [count for (kind, _), count in server.counts.items() if kind == "fail"] == [4]


def test_R12_retries_are_bounded_and_error_names_fix(serve, monkeypatch):
    server, slept = serve(fail_first=1000), []
    clock = SimpleNamespace(monotonic=lambda: sum(slept), sleep=slept.append)
    monkeypatch.setattr(hub_files, "time", clock)  # advances only during pauses
    monkeypatch.setattr(hub_files, "PATIENCE_SECONDS", 0.5)
    with pytest.raises(UsageError, match="run the same command again"):
        mini().fetch("shard_00005.parquet")
    assert 4 <= max(server.counts.values()) <= 7


def test_R12_stalled_download_times_out_and_resumes(serve, hub, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.5)
    stalled = threading.Event()

    def stalling(module):
        class Stalling(module.Handler):
            def send_content(self, stream, size, digest, headers):
                if self.command == "GET" and not stalled.is_set():
                    stalled.set()
                    self.send_head(200, {"Content-Length": size, "ETag": f'"{digest}"', **headers})
                    self.wfile.write(stream.read(size // 3))
                    threading.Event().wait(3)
                    self.close_connection = True
                else:
                    super().send_content(stream, size, digest, headers)

        return Stalling

    serve(handler=stalling)
    path = mini().fetch("shard_00005.parquet")
    assert stalled.is_set()
    assert sha256_file(path) == sha256_file(original(hub, "shard_00005.parquet"))


@pytest.mark.parametrize("status, again", [(429, True), (503, True), (401, False), (404, False)])
def test_R12_only_transient_errors_are_retried(monkeypatch, status, again):
    slept = []
    clock = SimpleNamespace(monotonic=lambda: sum(slept), sleep=slept.append)
    monkeypatch.setattr(hub_files, "time", clock)  # advances only during pauses
    response = Mock(status_code=status, headers={}, request=None)
    error = HfHubHTTPError(f"status {status}", response=response)
    calls = []

    def action():
        calls.append(1)
        raise error

    with pytest.raises(UsageError if again else HfHubHTTPError):
        hub_files.with_retries("a file", action)
    assert (len(calls) > 3) == again and (again or len(calls) == 1)


def test_R12_two_processes_download_a_file_once(serve, base):
    server = serve(latency_ms=200)
    mini()
    program = (
        "from nanochat.dataset import open_source\n"
        "from nanochat.dataset import DataConfig\n"
        f"print(open_source(DataConfig(dataset={MINI!r})).fetch('shard_00005.parquet'))"
    )
    environment = {**os.environ, "NANOCHAT_BASE_DIR": str(base)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", program],
            cwd=REPOSITORY,
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    outputs = [process.communicate()[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert sum("downloaded" in text for text in outputs) == 1
    assert [count for (kind, _), count in server.counts.items() if kind == "fail"] == [1]


def test_R11_damaged_file_is_set_aside_and_downloaded_again(serve, hub, capsys):
    serve()
    source = mini()
    path = source.fetch("shard_00005.parquet")
    content = path.read_bytes()
    for damage in (content[: len(content) // 2], b"", b"X" + content[1:]):
        path.write_bytes(damage)
        assert source.fetch("shard_00005.parquet").read_bytes() == content
        assert path.with_name("shard_00005.parquet.bad").read_bytes() == damage
        assert "set aside as shard_00005.parquet.bad" in capsys.readouterr().out


def test_R11_unrecorded_file_is_checked_against_hub_digest(serve, hub):
    serve()
    source = mini()
    path = source.repo.folder / "shard_00005.parquet"
    shutil.copy(original(hub, "shard_00000.parquet"), path)  # readable, but the wrong file
    assert source.fetch("shard_00005.parquet") == path
    assert sha256_file(path) == sha256_file(original(hub, "shard_00005.parquet"))


def test_R11_file_never_matching_its_record_is_rejected(serve):
    serve()
    source = mini()
    manifest = read_json(source.manifest)
    manifest["files"]["shard_00005.parquet"]["sha256"] = "0" * 64
    write_json(source.manifest, manifest)
    with pytest.raises(ValueError, match=r"00005\.parquet .* after two attempts.*manifest says"):
        source.fetch("shard_00005.parquet")


def test_R11_error_names_invalid_file_on_the_hub(serve, tmp_path):
    folder = tmp_path / "hub/datasets/local/broken"
    write_parquet(folder / "a.parquet", ["one"])
    (folder / "b.parquet").write_bytes(b"no parquet")
    write_parquet(folder / "c.parquet", ["one"], column="content")
    serve(tmp_path / "hub")
    source = open_source(DataConfig(dataset="local/broken"))
    with pytest.raises(ValueError, match=r"c\.parquet is unusable.*no column `text`"):
        texts_of(source, "c.parquet")
    assert not source.manifest.exists()  # nothing is recorded before a file passes its checks
    source = open_source(DataConfig(dataset="local/broken"))
    assert texts_of(source, "a.parquet") == ["one"]
    with pytest.raises(ValueError, match=r"b\.parquet is unusable .*: not a readable parq"):
        texts_of(source, "b.parquet")
    with pytest.raises(ValueError, match=r"c\.parquet is unusable.*no column `text`"):
        texts_of(source, "c.parquet")
    assert source.manifest.exists()


def test_R9_download_error_states_needed_and_free_bytes(serve, monkeypatch):
    serve()
    source = mini()
    monkeypatch.setattr(common, "free_bytes", lambda path: 257 << 20)
    with pytest.raises(UsageError, match=r"0\.00 GB and a reserve of 0\.27 GB.*0\.27 GB free"):
        source.fetch("shard_00005.parquet")
