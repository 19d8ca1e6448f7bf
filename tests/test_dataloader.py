"""Rows on disk and batches: pure functions of (rows, seed, step), for any packer and reader."""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest

from nanochat import common, dataloader, dataset
from nanochat import packing as packing_module
from nanochat.common import (
    REPOSITORY,
    UsageError,
    read_json,
    read_sealed,
    seal,
    sha256_file,
    write_json,
)
from nanochat.dataloader import Rows, diff_recipe
from nanochat.dataset import DataConfig, open_source
from nanochat.loss import IGNORE
from nanochat.packing import ensure_packed, open_rows, start_packing
from nanochat.tokenizer import Tokenizer
from nanochat.train import RowLoader, inputs_and_targets

T = 32
SEED = 7
ROWS = 256  # per step
WORDS = "the a of and sea boat sail wind north south cold warm stone river bread".split()


def sentence(rng: random.Random, words: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(words)) + "."


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    rng = random.Random(0)
    return Tokenizer.train((sentence(rng, 20) for _ in range(200)), 300)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Five jsonl files, each large enough for a shard, with texts of many lengths."""
    folder = tmp_path / "text"
    folder.mkdir()
    for shard in range(5):
        rng = random.Random(shard)
        lengths = [int(rng.lognormvariate(4.5, 1)) + 1 for _ in range(100)]
        lines = [json.dumps({"text": sentence(rng, n)}) for n in lengths]
        (folder / f"shard_{shard}.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def source_of(folder: Path, **settings):
    return open_source(DataConfig(dataset=str(folder), **settings))


def packed(folder: Path, tokenizer: Tokenizer, max_seq_len: int = T, **settings) -> Rows:
    source = source_of(folder, **settings)
    found = open_rows(source, tokenizer, max_seq_len)
    ensure_packed(found, source, tokenizer)
    return found


def digests(found: Rows) -> dict[str, str]:
    return {path.name: sha256_file(path) for path in sorted(found.folder.glob("*.bin"))}


# ------------------------------------------------------------------------------------------------
# Batches


@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
def test_R4_rows_of_a_step_do_not_depend_on_number_of_ranks(folder, tokenizer, world_size, machine):
    found = packed(folder, tokenizer)
    ranks = [replace(machine, rank=r, world_size=world_size) for r in range(world_size)]
    loaders = [RowLoader(found, ROWS * T, SEED, rank) for rank in ranks]
    for step in range(60):  # crosses the ends of shards and epochs
        batches = [each for loader in loaders for each in loader.load(step, ROWS, lambda: False)]
        whole = inputs_and_targets(found.batch(step, ROWS, SEED))[0]
        assert (np.concatenate([batch.tokens for batch in batches]) == whole).all()
    assert 60 * ROWS > 2 * found.packed_train_rows


def test_batch_has_the_rows_given_by_row_ids(folder, tokenizer):
    found = packed(folder, tokenizer)
    batch = found.batch(3, ROWS, SEED)
    assert batch.shape == (ROWS, T + 1)
    for row, (_, shard, index) in zip(batch, found.row_ids(3, ROWS, SEED), strict=True):
        path = found.bin_path(found.train_shards[shard])
        stored = np.fromfile(path, "<u2").reshape(-1, T + 1)
        assert (row == stored[index]).all()
        assert row[0] == tokenizer.bos_id


def test_R5_resumed_run_reads_the_same_rows(folder, tokenizer):
    source = source_of(folder)
    found = packed(folder, tokenizer)
    uninterrupted = [found.batch(step, ROWS, SEED) for step in range(60)]
    for step in [59, 0, 17, 33, 5]:  # mid-shard, at and after epoch ends
        resumed = open_rows(source, tokenizer, T)
        assert resumed.batch(step, ROWS, SEED).tobytes() == uninterrupted[step].tobytes()


def test_epoch_has_every_row_once_and_shards_in_order(folder, tokenizer):
    found = packed(folder, tokenizer)
    total = found.packed_train_rows
    ids = np.concatenate([found.row_ids(step, 1, SEED) for step in range(2 * total)])
    assert ids[:, 0].tolist() == [0] * total + [1] * total
    ids = ids[:, 1:]
    first, second = ids[:total], ids[total:]
    assert (np.diff(first[:, 0]) >= 0).all() and (np.diff(second[:, 0]) >= 0).all()
    everything = {
        (shard, row)
        for shard, name in enumerate(found.train_shards)
        for row in range(found.counts(name)["rows"])
    }
    for epoch in (first, second):
        assert {tuple(row) for row in epoch.tolist()} == everything
    assert (first != second).any()
    other_seed = np.concatenate([found.row_ids(step, 1, SEED + 1)[:, 1:] for step in range(total)])
    assert (other_seed != first).any()


def test_row_permutation_never_changes():
    assert dataloader.permutation(1, 2, 3, 10).tolist() == [8, 1, 9, 3, 7, 5, 2, 0, 4, 6]


def test_B2_very_long_document_is_packed_and_epochs_continue(tmp_path, tokenizer):
    folder = tmp_path / "text"
    folder.mkdir()
    book = sentence(random.Random(0), 20_000)
    for name in ("a", "b"):
        (folder / f"{name}.jsonl").write_text(json.dumps({"text": book}) + "\n")
    found = packed(folder, tokenizer)
    total = found.packed_train_rows
    assert total == len(tokenizer.encode(book)) // T  # drops the tail
    assert found.epochs_for(3 * total) == 3
    assert found.row_ids(5 * total, 1, SEED)[0, :2].tolist() == [5, 0]


def test_R34_text_shorter_than_a_row_is_one_padded_row(folder, tokenizer):
    found = packed(folder, tokenizer, max_seq_len=200_000)
    assert found.packed_train_rows == found.counts(found.val_shard)["rows"] == 1
    source = source_of(folder)
    texts = [text for file in source.train_shards for text in source.texts(file)]
    tokens, targets = inputs_and_targets(found.batch(0, 1, SEED))
    counted = found.totals()["tokens"] + len(texts)  # plus one BOS per text
    assert (targets == IGNORE).sum() == 200_000 - counted
    assert found.totals()["tokens"] == sum(len(tokenizer.encode(text)) for text in texts)
    assert (tokens[targets == IGNORE] == tokenizer.bos_id).all()


def test_ids_above_65535_are_stored_in_four_bytes(folder, tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "vocab_size", 100_000)
    found = packed(folder, tokenizer)
    assert found.dtype == np.dtype("<u4")
    monkeypatch.undo()
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(folder.parent / "narrow"))
    narrow = packed(folder, tokenizer)
    assert narrow.dtype == np.dtype("<u2")
    assert (found.batch(1, ROWS, SEED) == narrow.batch(1, ROWS, SEED)).all()


# ------------------------------------------------------------------------------------------------
# Validation


def test_R24_B9_validation_rows_depend_only_on_the_shard(folder, tokenizer):
    expected = np.concatenate(list(packed(folder, tokenizer).val_batches(8, 20)))
    assert len(expected) == 20
    for num_shards in (1, 3):
        found = packed(folder, tokenizer, num_shards=num_shards)
        for per_batch in (1, 7, 64):
            for world_size in (1, 2, 3):
                batches = [
                    batch
                    for rank in range(world_size)
                    for batch in found.val_batches(per_batch, 20, rank, world_size)
                ]
                assert max(map(len, batches)) <= per_batch
                assert (np.concatenate(batches) == expected).all()


def test_large_num_rows_yields_every_validation_row_once(folder, tokenizer):
    found = packed(folder, tokenizer)
    stored = np.fromfile(found.bin_path(found.val_shard), "<u2").reshape(-1, T + 1)
    got = np.concatenate(list(found.val_batches(8, 10**9)))
    assert sorted(map(bytes, got)) == sorted(map(bytes, stored))
    assert len(got) == found.counts(found.val_shard)["rows"]
    assert not (got[: len(got) // 4] == stored[: len(got) // 4]).all()  # not in file order


def test_validation_halves_partition_the_rows(folder, tokenizer):
    found = packed(folder, tokenizer)
    every, *halves = (
        np.concatenate(list(found.val_batches(8, 10**9, half=half))) for half in (0, 1, 2)
    )
    assert sorted(map(bytes, np.concatenate(halves))) == sorted(map(bytes, every))
    assert abs(len(halves[0]) - len(halves[1])) <= 1
    few = np.concatenate(list(found.val_batches(8, 5, half=2)))
    assert (few == halves[1][:5]).all()


# ------------------------------------------------------------------------------------------------
# Packing


def test_P7_rows_contain_every_token_except_dropped_ones(folder, tokenizer):
    found = packed(folder, tokenizer)
    source = source_of(folder)
    for shard in source.shards():
        texts = [text for batch in source.documents(shard) for text in batch]
        ids = np.concatenate([tokenizer.encode(text) for text in texts])
        stored = np.fromfile(found.bin_path(shard), "<u2").reshape(-1, T + 1)
        counts = found.counts(shard)
        assert (stored[:, 0] == tokenizer.bos_id).all()
        placed = np.bincount(stored.reshape(-1), minlength=tokenizer.vocab_size)
        missing = np.bincount(ids, minlength=tokenizer.vocab_size) - placed
        assert missing[tokenizer.bos_id] == -counts["bos"]
        missing[tokenizer.bos_id] = 0
        assert (missing >= 0).all() and missing.sum() == counts["dropped"] < T
        assert counts["text_bytes"] == sum(len(text.encode()) for text in texts)
        assert counts["documents"] == len(texts)


def test_R5_packed_rows_are_byte_identical_for_any_batching(folder, tokenizer, monkeypatch):
    expected = digests(packed(folder, tokenizer))
    assert len(expected) == 5
    for size in (1, 500):
        monkeypatch.setattr(dataset, "BATCH_CHARS", size)
        monkeypatch.setenv("NANOCHAT_BASE_DIR", str(folder.parent / f"base{size}"))
        assert digests(packed(folder, tokenizer)) == expected


def test_using_more_shards_keeps_existing_rows(folder, tokenizer):
    few = packed(folder, tokenizer, num_shards=2)
    before = {path: path.stat().st_mtime_ns for path in few.folder.glob("*.bin")}
    assert len(before) == 3
    many = packed(folder, tokenizer, num_shards=4)
    assert many.folder == few.folder
    assert many.fingerprint != few.fingerprint
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_packing_stops_at_the_rows_needed(folder, tokenizer):
    source = source_of(folder)
    found = open_rows(source, tokenizer, T)
    ensure_packed(found, source, tokenizer, rows_needed=1)
    assert [found.is_packed(shard) for shard in source.shards()] == [True, *[False] * 3, True]
    assert found.epochs_for(10**6) is None  # the length of an epoch is unknown
    assert found.epochs_for(1) is None
    ensure_packed(found, source, tokenizer, rows_needed=found.packed_train_rows + 1)
    assert [found.is_packed(shard) for shard in source.shards()][:3] == [True, True, False]


def test_crash_while_packing_leaves_no_partial_shard(folder, tokenizer, tmp_path, monkeypatch):
    expected = digests(packed(folder, tokenizer))
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path / "other"))
    monkeypatch.setattr(dataset, "BATCH_CHARS", 500)
    source = source_of(folder)
    found = open_rows(source, tokenizer, T)
    encode, calls = Tokenizer.encode_flat, []

    def failing(self, texts, **options):
        calls.append(1)
        if len(calls) == 250:
            raise RuntimeError("crash")
        return encode(self, texts, **options)

    monkeypatch.setattr(Tokenizer, "encode_flat", failing)
    with pytest.raises(RuntimeError, match="crash"):
        ensure_packed(found, source, tokenizer)
    done = digests(found)
    assert 0 < len(done) < 5
    assert not list(found.folder.glob("*.part"))
    ensure_packed(found, source, tokenizer)
    assert digests(found) == expected


def test_recipe_in_index_json_reopens_the_source(folder, tokenizer):
    source = source_of(folder)
    found = open_rows(source, tokenizer, T)
    recipe = read_json(found.folder / "index.json")
    assert recipe == found.recipe and recipe["tokenizer"] == tokenizer.fingerprint
    assert open_source(DataConfig(), recipe["source"]) == source


# ------------------------------------------------------------------------------------------------
# Changes and damage


def test_R6_differences_list_changed_settings(folder, tokenizer, tmp_path):
    before = packed(folder, tokenizer)
    assert diff_recipe(before.recipe, packed(folder, tokenizer).recipe) == []

    fewer = packed(folder, tokenizer, num_shards=2)
    assert "source.num_shards: was 4, now 2" in diff_recipe(before.recipe, fewer.recipe)
    shorter = packed(folder, tokenizer, max_seq_len=16)
    assert diff_recipe(before.recipe, shorter.recipe) == ["max_seq_len: was 32, now 16"]
    other = Tokenizer.train(["quite different words"] * 9, 270)
    retrained = packed(folder, other)
    assert diff_recipe(before.recipe, retrained.recipe) == [
        f"tokenizer: was {tokenizer.fingerprint!r}, now {other.fingerprint!r}"
    ]
    assert len({r.folder for r in (before, fewer, shorter, retrained)}) == 3
    assert len({r.fingerprint for r in (before, fewer, shorter, retrained)}) == 4

    copy = tmp_path / "copy"
    copy.mkdir()
    for path in folder.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    same = packed(copy, tokenizer)
    assert diff_recipe(before.recipe, same.recipe) == []
    assert diff_recipe({"rows": before.recipe, "seed": 1}, {"rows": same.recipe, "seed": 2}) == [
        "seed: was 1, now 2"
    ]
    (copy / "shard_9.jsonl").write_text(json.dumps({"text": "new"}) + "\n")
    grown = tmp_path / "grown"
    copy.rename(grown)
    found = open_rows(source_of(grown), tokenizer, T)
    changed = {**before.recipe, "source": {**before.recipe["source"], "fingerprint": "another"}}
    assert diff_recipe({"rows": before.recipe}, {"rows": {**changed, "fingerprint": "other"}}) == [
        f"rows.source.fingerprint: was {before.recipe['source']['fingerprint']!r}, now 'another'"
    ]
    assert "source.val_shard: was 'shard_4.jsonl', now 'shard_9.jsonl'" in diff_recipe(
        before.recipe, found.recipe
    )


def test_rows_of_wrong_size_are_packed_again(folder, tokenizer, capsys):
    found = packed(folder, tokenizer)
    expected, path = digests(found), found.bin_path("shard_1.jsonl")
    path.write_bytes(path.read_bytes()[:-2])
    again = packed(folder, tokenizer)
    assert digests(again) == expected
    assert re.search(
        r"does not match .*shard_1\.jsonl\.bin: packing shard_1", capsys.readouterr().out
    )


@pytest.mark.parametrize("shard", ["shard_0.jsonl", "shard_2.jsonl", "shard_4.jsonl"])
def test_R28_flipped_bit_never_reaches_a_batch(folder, tokenizer, shard):
    found = packed(folder, tokenizer)
    expected, path = digests(found), found.bin_path(shard)
    content, rng = path.read_bytes(), random.Random(0)
    for _ in range(20):
        damaged = bytearray(content)
        damaged[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        reader = open_rows(source_of(folder), tokenizer, T)
        assert reader.is_packed(shard)
        with pytest.raises(UsageError, match=rf"{re.escape(str(path))} is damaged.*\n.*again"):
            read_everything(reader)
        assert digests(packed(folder, tokenizer)) == expected  # repacked with the same bytes


def read_everything(found: Rows) -> None:
    """Read one epoch as rank 0 of 2, and the validation rows."""
    for step in range(1 + found.packed_train_rows // ROWS):
        found.read(found.row_ids(step, ROWS, SEED)[: ROWS // 2])
    list(found.val_batches(64, 10**9))


def test_R28_every_rank_verifies_what_it_reads(folder, tokenizer):
    found = packed(folder, tokenizer)
    boundary = found.counts("shard_0.jsonl")["rows"]
    flip(found.bin_path("shard_1.jsonl"))
    found.batch(0, 2 * (boundary // 2), SEED)  # the next shard is only prechecked
    first, second = np.split(found.row_ids(0, 2 * boundary, SEED), 2)
    found.read(first)  # rank 0 reads shard_0, rank 1 shard_1
    with pytest.raises(UsageError, match="shard_1"):
        found.read(second)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[777] ^= 4
    path.write_bytes(content)


def test_R28_ids_outside_the_vocabulary_are_rejected(folder, tokenizer):
    found = packed(folder, tokenizer)
    path, record = found.bin_path("shard_0.jsonl"), found.counts_path("shard_0.jsonl")
    rows = np.fromfile(path, "<u2")
    rows[5000] = tokenizer.vocab_size
    rows.tofile(path)
    write_json(record, seal({**read_sealed(record), "sha256": sha256_file(path)}))
    reader = open_rows(source_of(folder), tokenizer, T)
    with pytest.raises(UsageError, match=r"has token id 300, but the vocabulary size is 300"):
        reader.batch(0, 2, SEED)


@pytest.mark.parametrize("resealed", [False, True])
def test_R28_shard_without_its_last_row_is_rejected(folder, tokenizer, resealed):
    found = packed(folder, tokenizer)
    expected = digests(found)
    path, record = found.bin_path("shard_0.jsonl"), found.counts_path("shard_0.jsonl")
    path.write_bytes(path.read_bytes()[: -2 * (T + 1)])
    whole = read_json(record)
    counts = {**whole, "rows": whole["rows"] - 1}
    if resealed:
        counts = seal({name: value for name, value in counts.items() if name != "seal"})
    write_json(record, counts)
    if resealed:
        with pytest.raises(UsageError, match="SHA-256 does not match the record"):
            open_rows(source_of(folder), tokenizer, T).batch(0, 2, SEED)
    assert digests(packed(folder, tokenizer)) == expected


def test_shards_are_hashed_once_per_run(folder, tokenizer, monkeypatch):
    found, hashed = packed(folder, tokenizer), []

    def counted(path: Path) -> str:
        hashed.append(path.name)
        return sha256_file(path)

    monkeypatch.setattr(dataloader, "sha256_file", counted)
    for _ in range(2):
        read_everything(found)
    assert sorted(hashed) == [f"shard_{i}.jsonl.bin" for i in range(5)]


# ------------------------------------------------------------------------------------------------
# Small files


@pytest.fixture
def small_files(tmp_path: Path) -> Path:
    """60 files of about 3,000 characters; with T = 32, about 20 of them fill a shard."""
    folder = tmp_path / "many"
    folder.mkdir()
    for i in range(60):
        line = json.dumps({"text": sentence(random.Random(i), 600)})
        (folder / f"{i:02d}.jsonl").write_text(line + "\n")
    return folder


def test_groups_of_small_files_do_not_depend_on_later_files(small_files, tokenizer):
    every = packed(small_files, tokenizer)
    assert 2 <= len(every.train_shards) <= 5
    files = [file for shard in every.train_shards for file in every.files[shard]]
    assert files == source_of(small_files).train_shards
    fewer = packed(small_files, tokenizer, num_shards=58)
    assert fewer.folder == every.folder
    assert fewer.train_shards[:-1] == every.train_shards[:-1]
    assert fewer.train_shards[-1] != every.train_shards[-1]
    assert (fewer.batch(0, ROWS, SEED) == every.batch(0, ROWS, SEED)).all()
    totals = every.totals()
    assert totals["documents"] == 59
    assert totals["dropped"] < 0.005 * totals["tokens"]


def test_large_files_keep_their_names_and_their_own_rows(folder, small_files, tokenizer):
    alone = packed(folder, tokenizer)
    assert alone.train_shards == source_of(folder).train_shards
    assert all(alone.files[shard] == [shard] for shard in alone.shards)
    for i in range(3):  # sorted before the large ones
        (folder / f"a_{i}.jsonl").write_bytes((small_files / f"0{i}.jsonl").read_bytes())
    both = packed_elsewhere(folder, tokenizer)
    first = [*(f"a_{i}.jsonl" for i in range(3)), "shard_0.jsonl"]
    assert both.files[both.train_shards[0]] == first
    assert both.train_shards[1:] == [f"shard_{i}.jsonl" for i in (1, 2, 3)]
    for shard in both.shards[1:]:
        assert both.bin_path(shard).read_bytes() == alone.bin_path(shard).read_bytes()


def packed_elsewhere(folder: Path, tokenizer: Tokenizer) -> Rows:
    """Pack a folder after renaming it, so that it gets a new manifest."""
    return packed(folder.rename(folder.parent / "elsewhere"), tokenizer)


def test_R9_packing_error_states_needed_and_free_bytes(folder, tokenizer, monkeypatch):
    source = source_of(folder)
    found = open_rows(source, tokenizer, T)
    monkeypatch.setattr(common, "free_bytes", lambda path: 200 << 20)
    with pytest.raises(UsageError, match=r"packing the text needs about .*0\.21 GB free"):
        ensure_packed(found, source, tokenizer)
    assert not digests(found)


# ------------------------------------------------------------------------------------------------
# Several processes


def start_and_finish(found: Rows, source, workers: int) -> None:
    with start_packing(found, source, workers=workers) as processes:
        assert [process.wait() for process in processes] == [0] * workers


def test_several_processes_pack_the_same_bytes_as_one(folder, tokenizer, tmp_path, monkeypatch):
    alone = packed(folder, tokenizer)
    index = (alone.folder / "index.json").read_text()
    expected = digests(alone)
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path / "other"))
    source = source_of(folder)
    found = open_rows(source, tokenizer, T)
    start_and_finish(found, source, workers=3)
    assert digests(found) == expected
    assert (found.folder / "index.json").read_text() == index
    assert not list(found.folder.glob("*.part"))


def test_every_shard_is_packed_by_exactly_one_thread(folder, tokenizer, monkeypatch):
    source = source_of(folder)
    found = open_rows(source, tokenizer, T)
    pack_shard, claimed = packing_module.pack_shard, []

    def slow(source, shard, *rest):
        claimed.append(shard)
        time.sleep(0.05)
        return pack_shard(source, shard, *rest)

    monkeypatch.setattr(packing_module, "pack_shard", slow)
    threads = [
        threading.Thread(
            target=ensure_packed, args=(open_rows(source, tokenizer, T), source, tokenizer)
        )
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(claimed) == source.shards()
    assert found.packed_train_rows > 0


def test_training_waits_only_for_the_shard_it_needs(folder, tokenizer, capsys):
    source = source_of(folder)
    found = open_rows(source, tokenizer, T)
    with common.hold_lock(
        packing_module.lock_path(found, "shard_3.jsonl"), ""
    ):  # blocks the last training shard
        with start_packing(found, source):
            first = found.batch(0, 16, SEED)
            assert not found.is_packed("shard_3.jsonl")
    assert capsys.readouterr().out.count("waiting for shard_0.jsonl to be packed") == 1
    ensure_packed(found, source, tokenizer)
    assert (open_rows(source, tokenizer, T).batch(0, 16, SEED) == first).all()


def test_packing_error_is_raised_in_waiting_ranks(folder, tokenizer):
    source = source_of(folder)
    (folder / "shard_1.jsonl").write_text('{"text": "fine"}\n{"text": "cut of')
    found = open_rows(source, tokenizer, T)
    other_rank = open_rows(source, tokenizer, T)  # did not start the process
    with start_packing(found, source):
        steps = range(100)
        for reader in (found, other_rank):
            with pytest.raises(RuntimeError, match=r"shard_1\.jsonl is missing or does not match"):
                for step in steps:
                    reader.batch(step, ROWS, SEED)
    (folder / "shard_1.jsonl").unlink()
    with pytest.raises(ValueError, match="added or removed"):
        source_of(folder)


def test_killed_packing_process_is_reported_and_resumed(folder, tokenizer):
    source = source_of(folder)
    found = open_rows(source, tokenizer, T)
    with common.hold_lock(packing_module.lock_path(found, "shard_2.jsonl"), ""):
        with start_packing(found, source) as processes:
            found.wait("shard_3.jsonl")
            processes[0].kill()
            with pytest.raises(UsageError, match="status -9"):
                found.wait("shard_2.jsonl")
    start_and_finish(found, source, workers=1)
    assert all(found.is_packed(shard) for shard in source.shards())


def test_worker_that_fails_at_startup_is_reported(folder, tokenizer, monkeypatch):
    source = source_of(folder)
    found = open_rows(source, tokenizer, T)
    monkeypatch.setattr(packing_module.sys, "executable", shutil.which("false"))
    with start_packing(found, source), pytest.raises(UsageError, match="status 1"):
        found.wait("shard_2.jsonl")


def test_error_without_packing_process_names_the_fix(folder, tokenizer, monkeypatch):
    monkeypatch.setattr(dataloader, "SILENCE_SECONDS", 0.3)
    found = open_rows(source_of(folder), tokenizer, T)
    with pytest.raises(UsageError, match="no process is packing it(.|\n)*run the same command"):
        found.batch(0, 16, SEED)


def test_packing_process_exits_with_its_parent(folder, tokenizer, base):
    source = source_of(folder)
    found = open_rows(source, tokenizer, T)
    program = (
        "import time\n"
        "from pathlib import Path\n"
        "from nanochat.dataset import open_source\n"
        "from nanochat.dataset import DataConfig\n"
        "from nanochat.packing import open_rows, start_packing\n"
        "from nanochat.tokenizer import Tokenizer\n"
        f"source = open_source(DataConfig(dataset={str(folder)!r}))\n"
        f"tokenizer = Tokenizer.read(Path({str(found.folder / 'tokenizer.json')!r}))\n"
        f"with start_packing(open_rows(source, tokenizer, {T}), source) as processes:\n"
        "    print(processes[0].pid, flush=True)\n"
        "    time.sleep(60)\n"
    )
    with common.hold_lock(packing_module.lock_path(found, "shard_3.jsonl"), ""):  # the worker waits
        parent = subprocess.Popen(
            [sys.executable, "-c", program],
            cwd=REPOSITORY,
            env={**os.environ, "NANOCHAT_BASE_DIR": str(base)},
            stdout=subprocess.PIPE,
            text=True,
        )
        assert parent.stdout is not None
        worker = psutil.Process(int(parent.stdout.readline()))
        found.wait("shard_2.jsonl")
        assert worker.is_running()
        parent.send_signal(signal.SIGKILL)
        parent.wait()
        worker.wait(timeout=60)


def test_SIGTERM_ends_a_worker_at_any_moment(folder, tokenizer, base):
    """The handler raises SystemExit; here as the heartbeat is about to end."""
    found = open_rows(source_of(folder), tokenizer, T)
    program = (
        "import os, signal, sys, threading\n"
        "from pathlib import Path\n"
        "from nanochat.packing import heartbeat\n"
        "signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))\n"
        f"with heartbeat(Path({str(found.alive_path)!r})):\n"
        "    uninterrupted = threading.Event.set\n"
        "    def interrupted(event):\n"
        "        if threading.current_thread() is threading.main_thread():\n"
        "            os.kill(os.getpid(), signal.SIGTERM)\n"
        "        uninterrupted(event)\n"
        "    threading.Event.set = interrupted\n"
        "print('not interrupted')\n"
    )
    worker = subprocess.run(
        [sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, timeout=100
    )
    assert (worker.returncode, worker.stdout) == (128 + signal.SIGTERM, ""), worker.stderr


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads peak memory from /proc")
def test_packing_1_gb_uses_far_less_memory(tmp_path, tokenizer, base):
    folder = tmp_path / "text"
    folder.mkdir()
    rng = random.Random(0)
    lines = "".join(
        json.dumps({"text": sentence(rng, int(rng.lognormvariate(5, 1.2)) + 1)}) + "\n"
        for _ in range(10_000)
    )
    with (folder / "a.jsonl").open("w") as out:
        while out.tell() < 10**9:
            out.write(lines)
    (folder / "b.jsonl").write_text(lines)
    tokenizer.save(tmp_path)
    program = (
        "from pathlib import Path\n"
        "from nanochat.dataset import open_source\n"
        "from nanochat.dataset import DataConfig\n"
        "from nanochat.packing import ensure_packed, open_rows\n"
        "from nanochat.tokenizer import Tokenizer\n"
        f"source = open_source(DataConfig(dataset={str(folder)!r}))\n"
        f"tokenizer = Tokenizer.read(Path({str(tmp_path / 'tokenizer.json')!r}))\n"
        "ensure_packed(open_rows(source, tokenizer, 2048), source, tokenizer)\n"
        "import resource\n"
        "children = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss\n"
        "[own] = [line for line in open('/proc/self/status') if line.startswith('VmHWM')]\n"
        "print(max(children, int(own.split()[1])))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, check=True,
        env={**os.environ, "NANOCHAT_BASE_DIR": str(base)},
    )  # fmt: skip
    peak = int(done.stdout.splitlines()[-1])  # KiB
    assert 50 << 10 < peak < 700 << 10, f"{peak / 2**10:.0f} MiB"
