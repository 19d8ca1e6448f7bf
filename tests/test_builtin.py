"""Built-in datasets: written once, then read as files."""

import multiprocessing
import shutil

import pytest

from nanochat.common import read_json, sha256_file
from nanochat.dataset import DataConfig, open_source
from nanochat.eval_core import FewShotTask, open_suite
from nanochat.mixture import MixConfig, open_texts
from tasks.builtin import ensure_written
from tasks.world import write
from tasks.world.corpus import documents
from tasks.world.suite import suite

ONE = DataConfig(dataset="embedded", num_shards=1)
# Source fingerprints recorded by runs that generated the documents while training
RECORDED = {1: "b338ee3597b633b5", 16: "cb7e32e777d456b1"}


def texts_of(source, shard):
    return [text for batch in source.documents(shard) for text in batch]


def modified(folder):
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


def test_written_documents_equal_generated_ones(base):
    source = open_source(ONE, prepare=ensure_written)
    assert source.train_shards == ["world_00000"] and source.val_shard == "world_val"
    assert texts_of(source, "world_00000") == list(documents(0, 0, "train"))
    assert texts_of(source, "world_val") == list(documents(0, 0, "val"))


def test_text_folder_is_an_ordinary_dataset(base, monkeypatch):
    text = ensure_written("embedded", 2) / "text"
    moved = shutil.copytree(text, base / "elsewhere")
    source = open_source(DataConfig(dataset=str(moved)))
    assert source.identity["kind"] == "local" and source.val_shard == "world_val.jsonl"
    assert source.train_shards == ["world_00000.jsonl", "world_00001.jsonl"]
    assert texts_of(source, "world_00001.jsonl") == list(documents(0, 1, "train"))


def test_suite_folder_is_an_ordinary_bundle(base):
    found = open_suite(f"{ensure_written('embedded', 0)}/suite")
    assert found.tasks == tuple(FewShotTask(**task) for task in suite())
    assert found.fingerprint == "11eb3427e48b432b" and found.about == "embedded world"


def test_only_missing_shards_are_written(base):
    folder = ensure_written("embedded", 1)
    before = modified(folder / "text") | modified(folder / "suite")
    ensure_written("embedded", 1)
    ensure_written("embedded", 3)
    after = modified(folder / "text") | modified(folder / "suite")
    assert before.items() <= after.items()
    names = {path.name for path in after.keys() - before.keys()}
    assert names == {"world_00001.jsonl", "world_00002.jsonl"}
    (folder / "text" / "world_00001.jsonl").unlink()
    ensure_written("embedded", 3)
    assert modified(folder / "text").keys() == {p for p in after if p.parent.name == "text"}


def test_outdated_files_are_rewritten(base, monkeypatch):
    folder = ensure_written("embedded", 2)
    before = open_source(DataConfig(dataset="embedded")).fingerprint
    monkeypatch.setattr(write, "VERSION", "another")
    monkeypatch.setattr(write, "IDENTITY", {"version": "another"})
    monkeypatch.setattr(write, "texts", lambda shard: iter([f"The text of {shard}."]))
    source = open_source(ONE, prepare=ensure_written)
    assert read_json(folder / "manifest.json")["version"] == "another"
    assert not (folder / "text" / "world_00001.jsonl").exists()
    assert texts_of(source, "world_00000") == ["The text of world_00000."]
    assert source.fingerprint != before


def test_files_from_an_interrupted_call_are_not_used(base, monkeypatch):
    def abort(*args):
        raise OSError("no space left on device")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="no space"):
        patch.setattr(write, "write_json", abort)
        ensure_written("embedded", 1)
    with pytest.raises(ValueError, match="--dataset=embedded"):
        open_source(ONE)
    source = open_source(ONE, prepare=ensure_written)
    assert len(texts_of(source, "world_00000")) == 2500


def test_concurrent_writers_produce_one_complete_folder(base):
    context = multiprocessing.get_context("spawn")  # inherits the base directory
    both = [context.Process(target=ensure_written, args=("embedded", n)) for n in (1, 2)]
    for process in both:
        process.start()
    for process in both:
        process.join()
        assert process.exitcode == 0
    folder = base / "data" / "embedded"
    manifest = read_json(folder / "manifest.json")
    files = {f"text/{name}.jsonl": entry for name, entry in manifest["files"].items()}
    files |= {f"suite/{name}": entry for name, entry in manifest["suite"].items()}
    assert {f"text/world_0000{i}.jsonl" for i in (0, 1)} <= files.keys()
    found = {p.relative_to(folder).as_posix() for p in folder.rglob("*.*") if p.is_file()}
    assert found - {"manifest.json", ".lock"} == files.keys()
    assert all(sha256_file(folder / name) == entry["sha256"] for name, entry in files.items())


@pytest.mark.parametrize("num_shards", RECORDED)
def test_source_recorded_without_files_still_opens(base, num_shards):
    recorded = {
        "dataset": "embedded",
        "world_version": 2,
        "num_shards": num_shards,
        "fingerprint": RECORDED[num_shards],
    }
    source = open_source(DataConfig(), recorded, ensure_written)
    assert len(source.train_shards) == num_shards
    assert source.fingerprint == RECORDED[num_shards]


def test_built_in_datasets_in_a_mixture_are_written(base, tmp_path):
    own = tmp_path / "own.json"
    own.write_text('{"mixture": "land", "buckets": {"land": {"dataset": "embedded"}}}')
    data, mix = DataConfig(num_shards=1), MixConfig(str(own))
    texts = open_texts(data, mix, prepare=ensure_written)
    assert texts.sources["land"].train_shards == ["world_00000"]
    shutil.rmtree(base / "data")
    again = open_texts(DataConfig(), None, texts.describe(), ensure_written)
    assert again.fingerprint == texts.fingerprint and again.sources == texts.sources


def test_other_dataset_names_write_nothing(base):
    assert ensure_written("somebody/web") is ensure_written(None) is ensure_written("") is None
    assert not base.exists()
