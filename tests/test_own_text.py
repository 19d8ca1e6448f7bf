"""Flags for the user's own text: the fix in each error message works."""

import gzip
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nanochat.common import write_json
from nanochat.hub import HubRepo, pin_repo
from tasks.hub import find_file_damage
from tests.hub_server import hub_served

STORIES = [f"story {i} of a cat, a dog and the {i} mice they met " * 5 for i in range(40)]


def write(path: Path, texts: list = STORIES) -> Path:
    """Write documents in the format given by the file name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    if path.suffix == ".parquet":
        pq.write_table(pa.table({"text": texts}), path)
    else:
        path.write_bytes(gzip.compress(lines) if path.suffix == ".gz" else lines)
    return path


def manifests(base: Path) -> list[Path]:
    """All records of text sources."""
    return [*base.rglob("manifest.json"), *base.rglob("used_with_*.json")]


@pytest.fixture
def train(command) -> Callable:
    """Train a tokenizer with flags; `how` is `rejects` or `works`."""
    return lambda how, *flags: getattr(command, how)("tok_train", "--vocab_size=300", *flags)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with two files."""
    write(tmp_path / "text/a.jsonl")
    write(tmp_path / "text/b.parquet")
    return tmp_path / "text"


# ------------------------------------------------------------------------------------------------
# R33: nothing is recorded until all checks pass


def content(name: str) -> bytes:
    """Content of an invalid file."""
    if name.startswith("schema"):
        column = {"schema-number": {"text": [1, 2]}, "schema-name": {"content": ["one"]}}
        sink = pa.BufferOutputStream()
        pq.write_table(pa.table(column[name.partition(".")[0]]), sink)
        return sink.getvalue().to_pybytes()
    if name.startswith("blank"):
        return b'{"text": ""}\n{"text": null}\n'
    if name.startswith("late"):
        return b'{"text": "fine"}\n' * 5000 + b'{"text": 17}\n'
    if name.startswith("cut"):
        return gzip.compress(os.urandom(9999).hex().encode())[:-100]
    if name.startswith("flipped"):
        lines = b"".join(b'{"text": "line %d of many"}\n' % i for i in range(5000))
        packed = bytearray(gzip.compress(lines))
        packed[len(packed) // 2 : len(packed) // 2 + 16] = b"\xff" * 16
        return bytes(packed)
    return {
        "empty.jsonl": b"",
        "words.jsonl": b"just words\n",
        "field.jsonl": b'{"content": "one"}\n',
        "deep.jsonl": b"[" * 200_000 + b"]" * 200_000,
        "words.parquet": b"just words",
    }[name]


@pytest.mark.parametrize(
    "name, message",
    [
        ("empty.jsonl", "is empty"),
        ("words.jsonl", "line 1: not JSON"),
        ("field.jsonl", "line 1.*the fields are content"),
        ("deep.jsonl", "line 1.*RecursionError"),
        ("late.jsonl", "line 5001.*string `text`"),
        ("blank.jsonl", "contains no text"),
        ("cut.jsonl.gz", "line .*EOFError"),
        ("flipped.jsonl.gz", "flipped.jsonl.gz, line"),
        ("words.parquet", "not a readable parquet"),
        ("schema-name.parquet", "no column `text`; the columns are content"),
        ("schema-number.parquet", "holds int64, not strings"),
    ],
)
def test_R33_removing_a_rejected_file_works(folder, base, train, name, message):
    (folder / name).write_bytes(content(name))
    text = train("rejects", f"--dataset={folder}")
    assert re.search(message, text) and f"{folder / name}" in text
    assert re.search(r"remove it|leave the file out", text)
    assert not manifests(base)
    (folder / name).unlink()
    train("works", f"--dataset={folder}")


@pytest.mark.parametrize(
    "flags, message, fixed",
    [
        (["--num_shards=2"], "use --num_shards=1", ["--num_shards=1"]),
        (["--val_shard=z.jsonl"], "2 files, a.jsonl to b.parquet", ["--val_shard=a.jsonl"]),
        (["--revision=dev"], "without --revision", []),
        (["--num_shards=0"], "must be at least 1", ["--num_shards=1"]),
        (["--mixture=a"], "remove --dataset", []),
    ],
)
def test_R33_correcting_a_rejected_flag_works(folder, base, train, flags, message, fixed):
    assert message in train("rejects", f"--dataset={folder}", *flags)
    assert not manifests(base)
    train("works", f"--dataset={folder}", *fixed)


def test_R33_passing_a_folder_with_text_works(folder, base, train):
    assert "no such folder" in train("rejects", f"--dataset={folder}x")
    output = train("rejects", f"--dataset={folder / 'a.jsonl'}")
    assert f"use its folder: --dataset={folder}" in output
    (folder.parent / "none").mkdir()
    assert "add one" in train("rejects", f"--dataset={folder.parent / 'none'}")
    write(folder.parent / "none/a.jsonl")
    assert not manifests(base)
    train("works", f"--dataset={folder.parent / 'none'}")
    train("works", f"--dataset={folder}")


def test_R33_passing_a_dataset_works(folder, base, train):
    assert "use --dataset=" in train("rejects")
    assert "<owner>/<name>" in train("rejects", "--dataset=climbmix")
    assert not manifests(base)
    assert "leave --val_shard out" in train("rejects", "--dataset=embedded", "--val_shard=a.jsonl")
    train("works", "--dataset=embedded", "--max_chars=20000")


def test_R33_both_fixes_for_a_single_document_work(tmp_path, base, train):
    one = write(tmp_path / "one/a.jsonl", STORIES[:1])
    two = write(tmp_path / "two/a.jsonl", STORIES[:1])
    for file in (one, two):
        output = train("rejects", f"--dataset={file.parent}")
        assert "split it into documents, or add a file" in output
    assert not manifests(base)
    write(one, STORIES[:2])
    train("works", f"--dataset={one.parent}")
    write(two.with_name("b.jsonl"), STORIES[:1])
    train("works", f"--dataset={two.parent}")


def test_R33_single_file_as_val_shard_can_be_fixed(tmp_path, base, train):
    file = write(tmp_path / "one/a.jsonl")
    flags = [f"--dataset={file.parent}", "--val_shard=a.jsonl"]
    assert "leave --val_shard out" in train("rejects", *flags)
    assert not manifests(base)
    train("works", *flags[:1])
    shutil.rmtree(base)
    train("rejects", *flags)
    write(file.with_name("b.jsonl"))  # at least two files
    train("works", *flags)


def delete_path(text: str) -> None:
    """Delete the path named in an error message."""
    named = re.search(r"delete (that manifest|/\S+)", text)
    assert named, text
    path = re.search(r"/\S+manifest\.json", text)
    target = Path(path[0] if path else named[1])
    shutil.rmtree(target) if target.is_dir() else target.unlink()


@pytest.mark.parametrize("fix", ["back", "delete"])
@pytest.mark.parametrize("change", ["changed", "came", "went"])
def test_R33_changed_files_can_be_restored_or_accepted(folder, train, change, fix):
    train("works", f"--dataset={folder}")
    kept = shutil.copytree(folder, folder.parent / "kept")
    if change == "went":
        (folder / "a.jsonl").unlink()
    else:
        write(folder / {"changed": "a.jsonl", "came": "c.jsonl"}[change], STORIES[:9])
    output = train("rejects", f"--dataset={folder}")
    assert {"changed": "a.jsonl is missing or", "came": "c.jsonl", "went": "a.jsonl"}[
        change
    ] in output
    if fix == "back":
        shutil.rmtree(folder)
        shutil.copytree(kept, folder)
    else:
        delete_path(output)
    train("works", f"--dataset={folder}")


def test_R33_another_validation_shard_can_be_accepted(folder, train):
    train("works", f"--dataset={folder}")
    output = train("rejects", f"--dataset={folder}", "--val_shard=a.jsonl")
    delete_path(output)
    train("works", f"--dataset={folder}", "--val_shard=a.jsonl")


@pytest.mark.parametrize("fix", ["back", "accept"])
def test_R33_changed_recorded_text_can_be_fixed(folder, base, train, fix):
    train("works", f"--dataset={folder}")
    old = (folder / "a.jsonl").read_bytes()
    write(folder / "a.jsonl", STORIES[:9])
    for path in base.rglob("manifest.json"):  # as on another machine
        path.unlink()
    output = train("rejects")
    assert "has changed: fingerprint" in output
    assert not list(base.rglob("manifest.json"))
    if fix == "back":
        (folder / "a.jsonl").write_bytes(old)
        train("works")
    else:
        train("works", f"--dataset={folder}")
        train("works")


def test_R33_rejected_mixture_can_be_corrected(folder, base, train, tmp_path):
    write(tmp_path / "more/a.jsonl")
    own = tmp_path / "own.json"
    texts = {"a": {"dataset": str(folder)}, "b": {"dataset": str(tmp_path / "none")}}
    declared = {**texts, "talk": {"task": "smoltalk"}}

    def mixture_of(spec):
        own.write_text(json.dumps({"mixture": spec, "buckets": declared}))
        return f"--mixture={own}"

    for mixture, message in (
        ("a=50%,talk", "talk is declared as a task"),
        ("a,a", "a appears twice"),
        ("a=5,b", "for text, use tokens"),
        ("a=?", "a=?"),
    ):
        assert message in train("rejects", mixture_of(mixture))
        assert not manifests(base)
    assert str(tmp_path / "none") in train("rejects", mixture_of("a=50%,b"))
    assert "No such file" in train("rejects", f"--mixture={own.with_name('x.json')}")
    shutil.copytree(tmp_path / "more", tmp_path / "none")
    train("works", mixture_of("a=50%,b"))


# ------------------------------------------------------------------------------------------------
# A single file


def tail_of(base: Path) -> tuple[int, int]:
    """Index of the first held-out document, and the number of documents."""
    [path] = base.rglob("manifest.json")
    tail = json.loads(path.read_text())["tail"]
    return tail["tail_start"], tail["documents"]


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.parquet", "below/a.jsonl"])
def test_last_documents_of_a_single_file_are_held_out(tmp_path, base, command, train, name):
    texts = [*STORIES, "quokka " * 30]
    write(tmp_path / "text" / name, texts)
    output = train("works", f"--dataset={tmp_path / 'text'}")
    start, documents = tail_of(base)
    assert documents == len(texts) and f"last {documents - start} of its {documents} docu" in output
    tokens = json.loads((base / "tokenizer/main/tokenizer.json").read_text())["tokens"]
    assert not any("uo" in token for token in tokens)  # validation text is not trained on
    output = command.works("data", "--max_seq_len=32", "--workers=1")
    assert f"{start} \u2502" in output and f"{documents - start} \u2502" in output
    assert "are held out" not in output  # recorded, so not computed again


def test_held_out_part_is_small_and_never_empty(tmp_path, base, train):
    for texts, most in (
        (STORIES[:2], 1 / 2),
        ([STORIES[0], "x" * 9000], 1 / 2),
        (["word " * 100] * 200, 1 / 10),
        (["word " * 100] * 20_000, 1.01 / 100),
    ):
        shutil.rmtree(base, ignore_errors=True)
        write(tmp_path / "text/a.jsonl", texts)
        train("works", f"--dataset={tmp_path / 'text'}")
        start, documents = tail_of(base)
        assert 0 < documents - start <= most * documents


@pytest.mark.parametrize("documents", [1, 60])
def test_hub_dataset_of_one_file_is_split_too(
    tmp_path, base, hub, command, train, monkeypatch, documents
):
    served = tmp_path / "hub/datasets/local/one"
    write(served / "data/only.parquet", [f"text {i} " * 9 for i in range(documents)])
    with hub_served(hub, monkeypatch) as serve:
        serve(tmp_path / "hub")
        if documents == 1:
            assert "split it" in train("rejects", "--dataset=local/one")
            assert not manifests(base)
            write(served / "data/only.parquet", ["one", "two", "three"])
        train("works", "--dataset=local/one")
        start, found = tail_of(base)
        assert 0 < start < found == max(documents, 3)
        output = command.works("data", "--max_seq_len=8", "--workers=1")
        assert "tail-of-data/only.parquet" in output


def test_R33_rejected_hub_flag_pins_nothing(hub, base, train, monkeypatch):
    name = "--dataset=local/mini-pretrain"
    with hub_served(hub, monkeypatch) as serve:
        serve()
        for flag in ("--num_shards=99", "--val_shard=z.parquet", "--revision=nowhere"):
            train("rejects", name, flag)
            assert not manifests(base)
        train("works", name, "--num_shards=1", "--max_chars=20000")
        output = train("rejects", name, "--val_shard=shard_00003.parquet")
        delete_path(output)
        train("works", name, "--val_shard=shard_00003.parquet", "--max_chars=20000")


# ------------------------------------------------------------------------------------------------
# Supported files


TEXT_TYPES = [
    pa.dictionary(pa.int32(), pa.string()),
    pa.dictionary(pa.int8(), pa.binary()),
    pa.binary(),
    pa.large_binary(),
    pa.large_string(),
    pa.string_view(),
    pa.binary_view(),
]


@pytest.mark.parametrize("kind", TEXT_TYPES, ids=str)
def test_text_columns_of_all_types_are_read(folder, base, train, kind):
    values = kind.value_type if pa.types.is_dictionary(kind) else kind
    texts = ["quokka " * 40, None, "", "quokka " * 40]
    is_bytes = any(t(values) for t in (pa.types.is_binary, pa.types.is_large_binary))
    is_bytes = is_bytes or pa.types.is_binary_view(values)
    column = pa.array([t and t.encode() if is_bytes else t for t in texts], values)
    if values != kind:
        column = column.dictionary_encode().cast(kind)
    pq.write_table(pa.table({"text": column}), folder / "a.parquet")
    train("works", f"--dataset={folder}", "--num_shards=2")
    record = json.loads((base / "report/tokenizer-training.json").read_text())
    assert record["values"]["documents"] == len(STORIES) + 2
    tokens = json.loads((base / "tokenizer/main/tokenizer.json").read_text())["tokens"]
    assert any("uo" in token for token in tokens)


def test_text_cut_by_doc_cap_is_logged_and_recorded(folder, base, train):
    assert "--doc_cap" not in train("works", f"--dataset={folder}")
    write(folder / "a.jsonl", [*STORIES, "long " * 3000, "longer " * 2000])
    next(base.rglob("manifest.json")).unlink()
    output = train("works", f"--dataset={folder}")
    assert "--doc_cap=10000: truncated 2 of 42 documents" in output
    assert "dropping 9,000 characters" in output
    values = json.loads((base / "report/tokenizer-training.json").read_text())["values"]
    assert (values["documents_cut"], values["characters_cut"]) == (2, 9000)


def test_links_to_folders_are_followed(folder, base, train, tmp_path):
    write(tmp_path / "elsewhere/below/c.jsonl", ["quokka " * 40] * 9)
    (folder / "0").symlink_to(tmp_path / "elsewhere")
    train("works", f"--dataset={folder}", "--num_shards=1")
    tokens = json.loads((base / "tokenizer/main/tokenizer.json").read_text())["tokens"]
    assert any("uo" in token for token in tokens)


@pytest.mark.parametrize("target", [".", "..", "sub", "a.jsonl.missing"])
def test_R33_training_works_after_removing_rejected_link(folder, base, train, target):
    write(folder / "sub/c.jsonl")
    link = folder / ("z.jsonl" if "missing" in target else "z")
    link.symlink_to(folder / target)
    output = train("rejects", f"--dataset={folder}")
    assert str(link) in output and "remove" in output
    assert not manifests(base)
    link.unlink()
    train("works", f"--dataset={folder}")


def test_R33_training_works_after_removing_named_pipe(folder, train):
    os.mkfifo(folder / "c.jsonl")
    assert "not a regular file" in train("rejects", f"--dataset={folder}")
    (folder / "c.jsonl").unlink()
    train("works", f"--dataset={folder}")


@pytest.mark.parametrize("name", ["data.jsonl", "data.jsonl.gz", "data.csv", "data.parquet"])
def test_damaged_file_without_hub_digest_is_not_recorded(tmp_path, hub, base, monkeypatch, name):
    whole = write(tmp_path / name) if ".csv" not in name else tmp_path / name
    if name == "data.csv":
        whole.write_text("text\n" + "".join(f'"{text}"\n' for text in STORIES))
    if name == "data.parquet":
        pq.write_table(pa.table({"text": STORIES}), whole, write_page_checksum=True)
    good = whole.read_bytes()
    middle = len(good) // 2
    bad = good[:middle] + (b'"\xff' * 9)[: len(good) - middle] + good[middle + 18 :]
    if name == "data.parquet":
        bad = good[:200] + bytes([good[200] ^ 255]) + good[201:]
    served = tmp_path / "hub/datasets/local/nodigest" / name
    served.parent.mkdir(parents=True)
    served.write_bytes(bad)
    with hub_served(hub, monkeypatch) as serve:
        serve(tmp_path / "hub", handler=without_digest)
        with pytest.raises(ValueError, match="unusable after two attempts"):
            pinned("local/nodigest", base / "data" / "nodigest").fetch(name)
        assert not manifests(base)
        served.write_bytes(good)
        assert pinned("local/nodigest", base / "data" / "nodigest").fetch(name).read_bytes() == good


def pinned(name: str, folder: Path) -> HubRepo:
    """Pin a repository with files of any format."""
    manifest = pin_repo(name, folder / "manifest.json", ("",))
    write_json(folder / "manifest.json", manifest)
    return HubRepo(name, folder, manifest["commit"], find_file_damage)


def without_digest(module) -> type:
    """A server that sends no SHA-256, like the Hub for small files."""

    class Handler(module.Handler):
        def send_content(self, stream, size, digest, headers):
            super().send_content(stream, size, digest[:40], headers)

    return Handler


def test_error_names_line_of_deeply_nested_conversation(tmp_path, command):
    path = tmp_path / "own.jsonl"
    path.write_text('{"messages": ' + "[" * 100_000 + "]" * 100_000 + "}\n")
    output = command.rejects("lab.filter", f"--rows={path}", f"--out={tmp_path / 'out.jsonl'}")
    assert f"{path}, line 1: not JSON (RecursionError" in output
