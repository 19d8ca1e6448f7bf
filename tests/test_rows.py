"""Packed rows: what text and chats become on disk, batches, and fine-tuning on them."""

import errno
import random
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanochat import chat_format, common, recipe
from nanochat.chat_format import render
from nanochat.common import UsageError, read_json, sha256_file, write_json
from nanochat.dataset import DataConfig, Text, load_last_source, open_text
from nanochat.eval_bpb import Validation, ValidationConfig
from nanochat.finetune import fit_batch
from nanochat.loss import IGNORE
from nanochat.recipe import compare_trees
from nanochat.records import read_metrics, read_records
from nanochat.rows import (
    BLOCK,
    MAX_DROPPED,
    WINDOW_SHARDS,
    ChatPart,
    Packer,
    Rows,
    Shards,
    draw_block,
    inputs_and_targets,
    make_windows,
    missing_shards,
    open_chat_rows,
    open_rows,
    pack_chats,
    pack_rows,
    pack_text,
)
from nanochat.tokenizer import Tokenizer, tokenizer_dir
from nanochat.train import document_segments
from tests.conftest import byte_model
from tests.hub_server import FakeHub, serve
from tests.test_dataset import parquet, write

T, SEED, ROWS = 32, 7, 256  # ROWS: rows of a step
WORDS = "the a of and sea boat sail wind north south cold warm stone river bread".split()


def sentence(rng: random.Random, words: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(words)) + "."


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    rng = random.Random(0)
    return Tokenizer.train((sentence(rng, 20) for _ in range(200)), 300)


@pytest.fixture
def saved(tokenizer, base) -> Tokenizer:
    """The tokenizer, as found by scripts."""
    tokenizer.save(tokenizer_dir("main"))
    return tokenizer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Five files, each large enough for a shard of rows, with texts of many lengths."""
    for number, name in enumerate(("shard_0", "shard_1", "shard_2", "shard_3", "val")):
        rng = random.Random(number)
        texts = [sentence(rng, int(rng.lognormvariate(4.5, 1)) + 1) for _ in range(100)]
        write(tmp_path / "text" / f"{name}.jsonl", texts)
    return tmp_path / "text"


@pytest.fixture(autouse=True)
def small_windows(monkeypatch) -> None:
    """A window for each shard; processes that pack keep the default."""
    monkeypatch.setattr("nanochat.rows.WINDOW_SHARDS", 1)
    monkeypatch.setattr("nanochat.rows.WINDOW_TOKENS", 1)


def opened(folder: Path | str, tokenizer: Tokenizer, T: int = T, **settings) -> tuple[Any, Text]:
    text = open_text(DataConfig(str(folder), **settings))
    return open_rows(text, tokenizer, T), text


def packed(folder: Path | str, tokenizer: Tokenizer, T: int = T, **settings) -> Any:
    """All packed rows of a source, or of a mixture."""
    rows, text = opened(folder, tokenizer, T, **settings)
    pack_text(rows, text, tokenizer)
    return rows.only if len(rows.parts) == 1 else rows


def stored(rows: Shards, shard: str) -> np.ndarray:
    return np.fromfile(rows.path(shard, ".bin"), rows.dtype).reshape(-1, rows.max_seq_len + 1)


def missing(rows: Rows, text: Text) -> list[str]:
    return [shard for *_, shard in missing_shards(rows, text)]


def digests(rows: Shards) -> dict[str, str]:
    return {path.name: sha256_file(path) for path in rows.folder.glob("*.bin")}


# ---- The packer ----------------------------------------------------------------------------------

BOS = 0
documents = st.lists(st.integers(0, 60), max_size=60) | st.lists(st.integers(0, 900), max_size=9)


def simple_rows(texts: list, row_length: int, pool_pieces: int) -> list[list[int]]:
    """Reference implementation of the packing rule with lists and linear search."""
    rows: list[list[int]] = []
    pool: list[list[int]] = []

    def fill_row() -> None:
        row: list[int] = []
        while len(row) < row_length and pool:
            gap = row_length - len(row)
            fitting = [piece for piece in pool if len(piece) <= gap]
            if fitting:
                longest = max(fitting, key=len)  # the first one, i.e. the oldest
                pool.remove(longest)
                row += longest
            elif gap == 1:
                row.append(BOS)
            else:
                shortest = min(pool, key=len)
                pool.remove(shortest)
                row += shortest[:gap]
                pool.append([BOS, *shortest[gap:]])
        tokens = sum(token != BOS for token in row)
        if len(row) >= row_length - 1 or tokens > MAX_DROPPED * sum(map(len, texts)):
            rows.append(row + [BOS] * (row_length - len(row)))

    for text in texts:
        while len(text) > row_length - 1:
            rows.append([BOS, *text[: row_length - 1]])
            text = text[row_length - 1 :]
        if text:
            pool.append([BOS, *text])
        while len(pool) > pool_pieces and sum(map(len, pool)) >= row_length:
            fill_row()
    while pool:
        fill_row()
    return rows


@given(documents, st.integers(2, 24), st.integers(1, 12), st.integers(1, 70))
@settings(max_examples=150)
def test_P7_R5_packer_equals_a_naive_one(lengths, row_length, pool, batch):
    ends = np.cumsum([0, *lengths])
    ids = np.arange(1, ends[-1] + 1, dtype=np.uint32)  # every token is unique
    packer = Packer(row_length, BOS, np.uint32)
    packer.pool_pieces = pool
    blocks = []
    for i in range(0, len(lengths), batch):
        part = ends[i : i + batch + 1]
        blocks.append(packer.add(ids[part[0] : part[-1]], part - part[0]))
    rows = np.concatenate([*blocks, packer.finish()])
    texts = [ids[a:b].tolist() for a, b in zip(ends, ends[1:], strict=False)]
    assert rows.tolist() == simple_rows(texts, row_length, pool)

    counts, placed = packer.counts, rows[rows != BOS]
    assert (counts["tokens"], counts["rows"]) == (len(np.unique(placed)), len(rows))
    assert counts["tokens"] + counts["dropped"] == len(ids)
    assert counts["dropped"] <= MAX_DROPPED * len(ids)
    assert counts["documents"] == sum(map(bool, texts))
    if not counts["dropped"]:
        starts = set((rows[:, 1:])[rows[:, :-1] == BOS].tolist()) - {BOS}  # after each BOS
        assert counts["documents_cut"] == sum(bool(starts & set(text[1:])) for text in texts)


# ---- Text on disk --------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["small files", "giant document", "few tokens"])
def test_P7_R34_B2_text_of_any_form_is_packed_almost_whole(form, tmp_path, tokenizer):
    text = "The boat number {} sails to the north wind and back. "
    files = {
        "small files": {f"f{i:03d}": [text.format(i) * 56] for i in range(200)},
        "giant document": {"a": [text * 20_000], "b": [text * 9]},
        "few tokens": {"a": ["The boat sails."], "b": ["a"]},
    }[form]
    for name, texts in files.items():
        write(tmp_path / "own" / f"{name}.jsonl", texts)
    rows = packed(tmp_path / "own", tokenizer, 512)
    texts, found = sum(files.values(), []), Counter()
    shards = [*rows.train_shards, rows.val_shard]
    for shard in shards:
        here, counts = stored(rows, shard), rows.record(shard)
        assert (here[:, 0] == tokenizer.bos_id).all() and counts["rows"] == len(here) > 0
        assert counts["dropped"] <= 0.005 * (counts["dropped"] + counts["tokens"])
        found.update(here[here != tokenizer.bos_id].tolist())
    wanted, sums = Counter(sum(map(tokenizer.encode, texts), [])), rows.totals(shards)
    assert found <= wanted and (wanted - found).total() == sums["dropped"]
    assert (sums["documents"], sums["text_bytes"]) == (len(texts), sum(map(len, texts)))
    _, targets = inputs_and_targets(rows.batch(5 * rows.num_rows, rows.num_rows, SEED))
    if form == "few tokens":  # padding has no loss
        assert (targets != IGNORE).sum() == rows.totals()["tokens"] + 1


def test_data_packs_once_with_any_number_of_processes(folder, saved, command):
    rows, source = packed(folder, saved), opened(folder, saved)[1].describe()
    expected = digests(rows)
    assert len(expected) == 5 and load_last_source("main") is None
    text = command.works("data", "--dataset", folder, "--max_seq_len=32")
    assert "packed" not in text and re.search(rf"^rows +{rows.num_rows:,} ", text, re.M)
    assert load_last_source("main") == source
    shutil.rmtree(rows.folder)
    command.works("data", "--max_seq_len=32", "--workers=3")  # uses the last source
    assert digests(rows) == expected and not list(rows.folder.glob("*.part"))


def test_packing_on_a_disk_without_inodes_says_so(folder, saved, command, monkeypatch):
    monkeypatch.setattr("fcntl.flock", lambda *_: Path("/dev/full").write_text("x"))
    assert "No space left" in command.rejects("data", "--dataset", folder, "--workers=1")


def test_packing_needs_no_shared_memory(folder, saved, monkeypatch):
    def refuse(*_: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system", "/dev/shm/sem")

    monkeypatch.setattr("_multiprocessing.SemLock", refuse)  # as where /dev/shm is read-only
    rows, text = opened(folder, saved)
    pack_rows(rows, text, saved, workers=2)
    assert missing(rows, text) == []


def test_full_disk_while_packing_is_one_error_with_path_and_fix(folder, saved):
    rows, text = opened(folder, saved)
    rows.only.folder.mkdir(parents=True)
    for shard in missing(rows, text):
        (rows.only.folder / f"{shard}.bin.part").symlink_to("/dev/full")
    with pytest.raises(ValueError, match=r"jsonl\.bin: No space left on device\n.*free some space"):
        pack_rows(rows, text, saved, workers=2)


@pytest.mark.parametrize(("vocab_size", "dtype"), [(65_536, "<u2"), (65_537, "<u4")])
def test_ids_above_65535_are_stored_in_four_bytes(folder, saved, monkeypatch, vocab_size, dtype):
    monkeypatch.setattr(saved, "vocab_size", vocab_size)
    assert opened(folder, saved)[0].only.dtype == dtype


def test_more_shards_keep_existing_rows(folder, tokenizer, capsys):
    rows, text = opened(folder, tokenizer)
    one = pack_text(rows, text, tokenizer, [1])
    assert missing(rows, text) == [f"shard_{i}.jsonl" for i in (1, 2, 3)]
    with pytest.raises(UsageError, match="training rows for this run, fewer than"):
        one.batch(0, one.num_rows + 1, SEED)
    two = pack_text(rows, text, tokenizer, [one.num_rows + 1])
    assert len(missing(rows, text)) == 2
    shards = [part.only.train_shards for part in (rows, one, two)]
    assert shards[1:] == [["shard_0.jsonl"], shards[0][:2]]
    assert packed(folder, tokenizer, num_shards=3).folder == packed(folder, tokenizer).folder
    assert capsys.readouterr().out.count("packed") == 5


def test_R6_differences_name_the_changed_setting(folder, tokenizer, tmp_path):
    before = opened(folder, tokenizer)[0].recipe
    other = Tokenizer.train(["quite different words"] * 9, 270)
    line = f"tokenizer: was {tokenizer.fingerprint!r}, now {other.fingerprint!r}"
    assert line in compare_trees(before, opened(folder, other)[0].recipe)
    copied = shutil.copytree(folder, tmp_path / "copy")
    assert compare_trees(before, opened(copied, tokenizer)[0].recipe) == []
    grown = shutil.copytree(folder, tmp_path / "grown")
    write(grown / "z.jsonl", ["new"])
    line = "text.num_shards: was 4, now 5"
    assert line in compare_trees(before, opened(grown, tokenizer)[0].recipe)


# ---- Batches -------------------------------------------------------------------------------------


def test_R4_R5_step_has_the_same_rows_on_any_ranks(folder, tokenizer, monkeypatch):
    monkeypatch.setattr("nanochat.rows.WINDOW_SHARDS", 2)
    rows = packed(folder, tokenizer)
    shards, total = [stored(rows, shard) for shard in rows.train_shards], rows.num_rows
    batches = [rows.batch(step * ROWS, ROWS, SEED) for step in range(2 * total // ROWS + 1)]
    epochs = np.split(np.concatenate(batches), [total, 2 * total])[:2]
    tokens, ends, visited = tuple(rows.sizes * T), (4,), []
    for number, epoch in enumerate(epochs):  # every row once, windows of two shards in some order
        windows = make_windows(tokens, ends, SEED, number)
        visited.append([window.tolist() for window in windows])
        assert sorted(sum(visited[-1], [])) == [0, 1, 2, 3] and list(map(len, windows)) == [2, 2]
        for window in windows:
            expected = np.concatenate([shards[i] for i in window])
            here, epoch = np.split(epoch, [len(expected)])
            assert sorted(map(bytes, here)) == sorted(map(bytes, expected))
            assert (here != expected).any()
    first, second = epochs
    assert (first != second).any() and (rows.batch(0, ROWS, SEED + 1) != batches[0]).any()
    others = [make_windows(tokens, ends, seed, 0) for seed in range(5)]
    assert len({str(windows) for windows in others}) > 1  # the order of shards is a random one

    again, _ = opened(folder, tokenizer)
    for step in (len(batches) - 1, 0):  # as a resumed run, in any order
        for world_size in (1, 2, 8):
            ids = np.split(again.row_ids(step * ROWS, ROWS, SEED), world_size)
            assert (np.concatenate(list(map(again.read, ids))) == batches[step]).all()


def test_R5_longer_run_reads_each_row_once(folder, tokenizer, monkeypatch):
    rows, text = opened(folder, tokenizer)
    monkeypatch.setattr("nanochat.rows.WINDOW_SHARDS", WINDOW_SHARDS)
    short = pack_text(rows, text, tokenizer, [500])
    longer = pack_text(rows, text, tokenizer, [500, 500, 2 * short.num_rows])
    assert len(short.only.train_shards) < len(longer.only.train_shards)
    begun = short.row_ids(0, 500, SEED)
    ids = longer.row_ids(0, longer.num_rows, SEED)
    assert (ids[:500] == begun).all()
    assert len(np.unique(ids, axis=0)) == longer.num_rows
    shorter = rows.first([500, 10])  # as it began
    assert (shorter.row_ids(0, 500, SEED) == begun).all()
    assert (rows.first([2 * short.num_rows]).row_ids(0, 500, SEED) != begun).any()


@pytest.mark.parametrize(
    ("sizes", "shards", "expected"),
    [([5] * 3, 2, [3]), ([5] * 7, 2, [2, 2, 3]), ([1] * 7, 2, [3, 4]), ([9], 8, [1])],
)
def test_windows_have_enough_shards_and_tokens(sizes, shards, expected, monkeypatch):
    monkeypatch.setattr("nanochat.rows.WINDOW_SHARDS", shards)
    monkeypatch.setattr("nanochat.rows.WINDOW_TOKENS", 3)
    make_windows.cache_clear()
    windows = make_windows(tuple(sizes), (len(sizes),), SEED, 0)
    assert list(map(len, windows)) == expected
    assert sorted(np.concatenate(windows)) == list(range(len(sizes)))


def test_files_of_one_folder_mix(tokenizer, tmp_path, monkeypatch):
    """Two files of each of two kinds, in order of their names."""
    monkeypatch.setattr("nanochat.rows.WINDOW_SHARDS", WINDOW_SHARDS)
    for name, word in (("a0", "sea"), ("a1", "sea"), ("b0", "boat"), ("b1", "boat"), ("val", "x")):
        texts = [f"{word} " * (60 + i % 5) + name for i in range(1500)]
        write(tmp_path / "text" / f"{name}.jsonl", texts)
    rows = packed(tmp_path / "text", tokenizer)
    sea = tokenizer.encode(" sea")[0]
    is_sea = np.array([(row == sea).any() for row in rows.batch(0, rows.num_rows, SEED)])
    share, parts = is_sea.mean(), is_sea[: len(is_sea) // 100 * 100].reshape(-1, 100).mean(axis=1)
    bound = 3 * (share * (1 - share) / 100) ** 0.5
    assert len(parts) > 20 and (abs(parts - share) <= bound).mean() >= 0.97


MIXTURES = ([0.7, 0.3], [1 / 3, 1 / 3, 1 / 3], [0.98, 0.019, 0.001])


@pytest.mark.parametrize("shares", MIXTURES)
def test_any_part_of_a_mixture_has_its_shares(shares):
    for seed, count in ((0, 100), (1, 2000), (2, BLOCK), (3, 3 * BLOCK + 77)):
        rows = Rows({}, tuple(shares), {"max_seq_len": T, "fingerprint": ""})
        sources, numbers = rows.place(0, count, seed)
        for i, share in enumerate(shares):
            mine = numbers[sources == i]
            assert (mine == np.arange(len(mine))).all()  # each of its rows once, in order
            assert abs(len(mine) - share * count) <= 2 + count / 2000
        for first in (0, 33, count // 2):
            part = rows.place(first, count - first, seed)
            assert (part[0] == sources[first:]).all() and (part[1] == numbers[first:]).all()
    orders = {draw_block(tuple(shares), seed, block).sources.tobytes()
              for seed in (0, 1) for block in (0, 1)}  # fmt: skip
    assert len(orders) == 4


def test_R4_R5_mixture_reads_each_source_as_if_alone_on_any_ranks(folder, tokenizer, tmp_path):
    """A source that ends begins anew while others go on."""
    small = tmp_path / "small"
    small.mkdir()
    for name in ("shard_0.jsonl", "shard_1.jsonl"):
        (folder / name).rename(small / name)
    mixed = packed(f"{folder}=3,{small}=1", tokenizer)
    whole, part = (packed(each, tokenizer) for each in (folder, small))
    alone = {str(folder): whole, str(small): part}
    assert {name: rows.folder for name, rows in mixed.parts.items()} == {
        name: rows.folder for name, rows in alone.items()
    }
    count = 4 * ROWS * (3 * part.num_rows // ROWS)  # the small one three times
    ids = mixed.row_ids(0, count, SEED)
    for i, name in enumerate(mixed.parts):
        mine, rows = ids[ids[:, 0] == i], alone[name]
        assert (mine[:, 1:] == rows.row_ids(0, len(mine), SEED)).all()
        assert (mixed.read(mine) == rows.read(mine[:, 1:])).all()
        assert name == str(folder) or mine[-1, 1] >= 2
    assert mixed.num_rows == whole.num_rows + part.num_rows
    for world_size in (1, 2, 8):
        pieces = np.split(mixed.row_ids(ROWS, ROWS, SEED), world_size)
        assert (
            np.concatenate(list(map(mixed.read, pieces))) == mixed.batch(ROWS, ROWS, SEED)
        ).all()
    assert sum(map(len, mixed.val_batches(5, 8))) == 8
    most = mixed.val_rows(10**9)  # as many as the shorter one allows
    assert most[str(folder)] == pytest.approx(3 * most[str(small)], abs=2)
    sizes = [len(rows.open(rows.val_shard)) for rows in (part, whole)]
    assert most[str(small)] == sizes[0] or most[str(folder)] == sizes[1]
    lines = {name: line for name, *line in mixed.table(count, SEED)["rows"]}
    tokens, epochs = f"{3 * count // 4 * T:,}", f"{3 * count / 4 / whole.num_rows:.2f}"
    assert lines[str(folder)] == [tokens, epochs, "75.0%"] and lines[str(small)][-1] == "25.0%"
    few = mixed.first([ROWS])  # the shards of a shorter run, which does not read all
    assert {line[2] for line in few.table(ROWS, SEED)["rows"]} == {"below 1"}


def test_R24_B9_validation_rows_depend_only_on_the_shard(folder, tokenizer):
    rows = packed(folder, tokenizer)
    every, here = np.concatenate([*rows.val_batches(8, 10**9)]), stored(rows, rows.val_shard)
    assert sorted(map(bytes, every)) == sorted(map(bytes, here))
    assert (every[:20] != here[:20]).any()  # the first rows are a sample of the whole shard
    rows = packed(folder, tokenizer, num_shards=1)
    for num_rows in (20, 10**9):
        parts = [batch for rank in (0, 1, 2) for batch in rows.val_batches(7, num_rows, rank, 3)]
        assert max(map(len, parts)) == 7
        assert (np.concatenate(parts) == every[:num_rows]).all()


def test_R38_rows_belong_to_the_code_that_packs_them(folder, saved, monkeypatch):
    rows, text = opened(folder, saved)
    monkeypatch.setitem(recipe.code_of_process, "nanochat/rows.py", "edited")
    edited, _ = opened(folder, saved)
    assert edited.only.folder != rows.only.folder
    with pytest.raises(ValueError, match=r"rows.py or dataset.py was edited just now"):
        pack_rows(edited, text, saved, workers=2)  # its processes read the file as it is
    assert not list(edited.only.folder.glob("*.bin"))


def test_missing_and_unreadable_shards_are_named(folder, saved):
    rows, text = opened(folder, saved)
    pack_text(rows, text, saved, [1])
    with pytest.raises(UsageError, match=r"shard_1\.jsonl is not packed"):
        rows.batch(0, 20 * ROWS, SEED)
    (folder / "shard_1.jsonl").write_text('{"text": "fine"}\n{"text": "cut of')
    with pytest.raises(ValueError, match=r"shard_1\.jsonl is missing or does not match"):
        pack_text(rows, text, saved)
    with pytest.raises(ValueError, match=r"shards are kept: .*shard_1\.jsonl is missing or does"):
        pack_rows(rows, text, saved, workers=2)


# ---- Damage --------------------------------------------------------------------------------------


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[777] ^= 4
    path.write_bytes(content)


def miscount(path: Path) -> None:
    record = path.with_suffix(".json")
    write_json(record, {**read_json(record), "rows": read_json(record)["rows"] ^ 4})


@pytest.mark.parametrize("damage", [flip, Path.unlink, miscount])
def test_R28_damaged_rows_are_named_and_packed_again(folder, saved, damage):
    rows = packed(folder, saved)
    expected = digests(rows)
    for shard in ("shard_2.jsonl", "val.jsonl"):
        path = rows.path(shard, ".bin")
        damage(path)
        with pytest.raises(UsageError, match=rf"{re.escape(str(path))} is damaged.*\n.*again"):
            opened(folder, saved)[0].only.open(shard)
        assert digests(packed(folder, saved)) == expected


# ---- Conversations -------------------------------------------------------------------------------

CHAT_TOKENIZER = Tokenizer.train(["what is it"], 265)
ALONE = [{"role": "user", "content": "alone"}]


def chat(question: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def packed_chats(chats: list) -> Shards:
    return mixed_rows({"x": ChatPart(chats, {"size": len(chats)})})


def mixed_rows(parts: dict[str, ChatPart], seed: int = 0) -> Shards:
    rows = open_chat_rows(parts, seed, CHAT_TOKENIZER, 63)
    pack_chats(rows, parts, seed, CHAT_TOKENIZER)
    return rows.only


def conversations_in(rows: Shards) -> Iterator[tuple[list[int], list[int]]]:
    """Yield the ids and the loss mask of every conversation, in order, without BOS."""
    start = CHAT_TOKENIZER.special("<|user_start|>")
    for row in stored(rows, "rows"):
        ids = np.where(row < 0, ~row, row)
        mask = np.append(0, inputs_and_targets(row[None])[1] != IGNORE)
        text = np.flatnonzero(ids != CHAT_TOKENIZER.bos_id)
        for part in np.split(text, np.flatnonzero(ids[text] == start)):
            if mask[part].any():
                yield ids[part].tolist(), mask[part].tolist()


def test_B3_every_conversation_is_in_one_row_with_its_mask():
    chats = [chat("q" * (i % 23), "a" * (1 + i % 17)) for i in range(200)]
    rows = packed_chats([*chats, ALONE, ALONE])  # nothing to train on there
    expected = [render(CHAT_TOKENIZER, each) for each in chats]
    assert sorted(conversations_in(rows)) == sorted((ids[1:], m[1:]) for ids, m in expected)
    counts = rows.record("rows")
    assert counts["buckets"]["x"]["used"] == 200
    assert counts["documents_cut"] == counts["dropped"] == 0
    assert sum(len(ids) for ids, _ in expected) > 0.9 * counts["rows"] * 64


def test_most_conversations_continue_another_one():
    rows = packed_chats([chat(f"{i}", "yes") for i in range(400)])
    is_bos = stored(rows, "rows") == ~CHAT_TOKENIZER.bos_id
    assert (is_bos[:, :-1] & ~is_bos[:, 1:]).sum() < 200  # starts of chats


def test_B2_long_conversation_is_cut_or_skipped(capsys):
    long, cut_off = chat("q", "a" * 500), chat("q" * 500, "a")
    rows = packed_chats([long, *[chat("q", "short")] * 30, cut_off])
    found = list(conversations_in(rows))
    ids, mask = render(CHAT_TOKENIZER, long)
    assert len(found) == 31 and (ids[1:64], mask[1:64]) in found
    assert "of 32 conversations, 1 fill a row of 63 tokens" in capsys.readouterr().out
    with pytest.raises(ValueError, match="no token to train on within"):
        packed_chats([ALONE])


def test_R38_chats_are_packed_again_when_their_format_changes(base, tmp_path, monkeypatch):
    folders, code = [], Path(str(chat_format.__file__)).read_text()
    for text in (code, code + "# a comment\n", code.replace("[0]", "[1]")):
        (tmp_path / "edited.py").write_text(text)
        monkeypatch.setattr(chat_format, "__file__", str(tmp_path / "edited.py"))
        folders.append(packed_chats([chat("q", "a")]).folder)
    assert folders[0] == folders[1] != folders[2]


def test_mixture_has_its_amounts_in_random_order():
    parts = {
        name: ChatPart([chat(f"{name}{i:03d}", "yes") for i in range(400)], {}, repeats)
        for name, repeats in (("a", 0.5), ("b", 1.5))
    }

    def mixed(seed: int) -> list[str]:
        found = conversations_in(mixed_rows(parts, seed))
        return re.findall(r"[ab]\d{3}", "".join(CHAT_TOKENIZER.decode(ids) for ids, _ in found))

    found = mixed(0)
    assert Counter(name[0] for name in found) == {"a": 200, "b": 600}
    assert len(set(found)) == 600 and max(Counter(found).values()) == 2
    for first in range(0, 700, 33):
        assert sum(name[0] == "a" for name in found[first : first + 100]) in range(12, 40)
    assert sorted(mixed(1)) != sorted(found)  # others are repeated


def test_hub_shard_without_rows_is_skipped(tokenizer, monkeypatch):
    texts = {"a": np.array([], str), "b": ["The boat sails."], "c": ["The sea."]}
    files = {f"{name}.parquet": parquet(text=text) for name, text in texts.items()}
    with serve(FakeHub(files), monkeypatch):
        rows = packed(Path("owner/texts"), tokenizer, 8)
    assert len(rows.batch(0, 4, SEED)) == 4 and "a.parquet" in rows.train_shards[0]
    assert rows.totals()["empty_files"] == 1


@pytest.mark.parametrize("victim", ["run", "packer"])
def test_packing_ends_with_a_killed_run_and_outlives_a_killed_packer(folder, saved, victim):
    rows, text = opened(folder, saved)
    words = ["-m", "scripts.data", f"--dataset={folder}", f"--max_seq_len={T}", "--workers=2"]
    with ExitStack() as held:
        for shard in missing(rows, text):  # the packing process waits for these
            assert held.enter_context(common.try_lock(rows.only.path(shard, ".lock")))
        with subprocess.Popen([sys.executable, *words], stdout=subprocess.PIPE) as process:
            assert process.stdout and any(b"waiting" in line for line in process.stdout)
            packers = psutil.Process(process.pid).children()
            (process if victim == "run" else packers[-1]).kill()
            if victim == "packer":
                held.close()
                assert b"one goes on" in process.communicate()[0]
        assert packers and not psutil.wait_procs(packers, 60)[1]
    assert missing(rows, text) == [] or victim == "run"


# ---- Short validation text -----------------------------------------------------------------------


def test_R34_short_validation_text_gives_no_nan(tmp_path, base, command):
    texts = [f"boat {i} sails to the north wind and back again. " * 9 for i in range(60)]
    folder = write(tmp_path / "own" / "a.jsonl", texts).parent
    write(folder / "b.jsonl", ["boat"])
    Tokenizer.train(texts, 300).save(tokenizer_dir("main"))
    flags = "--depth=1 --max_seq_len=256 --total_batch_size=1024 --num_iterations=2"
    small = ["base_train", *flags.split(), "--dtype=float32", f"--dataset={folder}"]
    output = command.works(*small) + command.works("base_loss")
    metrics = read_metrics(base / "base_checkpoints/d1/metrics.jsonl")
    assert 0 < metrics[-1]["val_bpb"] < 20
    files = [path for kind in ("jsonl", "json", "md") for path in base.rglob(f"*.{kind}")]
    written = "\n".join([output, *(path.read_text() for path in files)])
    assert "Minimum validation bpb" in written and not re.search(r"(?i)\bnan\b", written)
    values = next(r["values"] for r in read_records() if r["section"] == "Base model loss")
    assert 1024 < values["train tokens scored"] <= 2048  # of the two steps; the text has more
    assert values["val minus train"] == values["val bpb"] - values["train bpb"]


# ---- Fine-tuning ---------------------------------------------------------------------------------


def gradient(model, rows):
    """Gradient of the summed loss of stored rows."""
    model.zero_grad()
    for row in rows:
        x, y = map(torch.from_numpy, inputs_and_targets(row[None]))
        model.loss(x, y, document_segments(x, CHAT_TOKENIZER.bos_id)).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def test_packed_step_equals_separate_chats():
    packed = packed_chats([chat("q" * (3 + i % 7), "a" * (1 + i)) for i in range(14)]).open("rows")
    starts = np.flatnonzero(packed == ~CHAT_TOKENIZER.bos_id)
    separate = [each for each in np.split(packed.flatten(), starts) if len(each) > 1]
    assert len(packed) < len(separate)  # several per row
    model = byte_model(max_seq_len=63)
    together, alone = gradient(model, packed), gradient(model, separate)
    assert (together - alone).norm() < 1e-5 * alone.norm()


def test_R34_a_bucket_without_scorable_answers_is_rejected(dist):
    chats = {"good": [chat("q", "a" * 9)] * 9, "empty": [chat("q", "")] * 8}
    rows = {name: packed_chats(each) for name, each in chats.items()}
    validation = Validation(ValidationConfig(8 * 63), rows, CHAT_TOKENIZER, dist)
    with pytest.raises(UsageError, match="no scorable token"):
        validation.score(byte_model(max_seq_len=63).token_losses, 1)


def test_short_stage_uses_smaller_batches():
    assert fit_batch(524_288, None, 1e9, 2048) == 524_288
    assert fit_batch(524_288, None, 10e6, 2048) == 32_768
    assert fit_batch(524_288, None, 1e6, 2048) == 16_384  # not below 8 rows
    assert fit_batch(524_288, 50, 1e6, 2048) == 524_288  # explicit num_iterations
    assert fit_batch(255 * 2048, None, 10e6, 2048) == 15 * 2048  # of 3 or 5 GPUs
