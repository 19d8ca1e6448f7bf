"""One's own text by the command line: following the fix that an error names works."""

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
from tasks.hub import find_problem
from tests.hub_server import hub_served

STORIES = [f"story {i} of a cat, a dog and the {i} mice they met " * 5 for i in range(40)]


def write(path: Path, texts: list = STORIES) -> Path:
    """A file of documents in the format of its name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    if path.suffix == ".parquet":
        pq.write_table(pa.table({"text": texts}), path)
    else:
        path.write_bytes(gzip.compress(lines) if path.suffix == ".gz" else lines)
    return path


def manifests(base: Path) -> list[Path]:
    """What is recorded of texts."""
    return [*base.rglob("manifest.json"), *base.rglob("used_with_*.json")]


@pytest.fixture
def train(command) -> Callable:
    """Trains a tokenizer on the text that flags name; `rejects` or `works`."""
    return lambda how, *flags: getattr(command, how)("tok_train", "--vocab_size=300", *flags)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with two files."""
    write(tmp_path / "text/a.jsonl")
    write(tmp_path / "text/b.parquet")
    return tmp_path / "text"


# ------------------------------------------------------------------------------------------------
# R33: nothing is recorded until everything passed


def content(name: str) -> bytes:
    """A file that is refused."""
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
    "name, said",
    [
        ("empty.jsonl", "is empty"),
        ("words.jsonl", "line 1: not JSON"),
        ("field.jsonl", "line 1.*with content"),
        ("deep.jsonl", "line 1.*RecursionError"),
        ("late.jsonl", "line 5001.*string `text`"),
        ("blank.jsonl", "holds no text"),
        ("cut.jsonl.gz", "line .*EOFError"),
        ("flipped.jsonl.gz", "flipped.jsonl.gz, line"),
        ("words.parquet", "no readable parquet"),
        ("schema-name.parquet", "no column `text`"),
        ("schema-number.parquet", "holds int64, not strings"),
    ],
)
def test_R33_leaving_out_a_refused_file_works(folder, base, train, name, said):
    (folder / name).write_bytes(content(name))
    text = train("rejects", f"--dataset={folder}")
    assert re.search(said, text) and f"{folder / name}" in text
    assert re.search(r"remove it|leave it out|leave the file out", text)
    assert not manifests(base)
    (folder / name).unlink()
    train("works", f"--dataset={folder}")


@pytest.mark.parametrize(
    "flags, said, fixed",
    [
        (["--num_shards=2"], "use --num_shards=1", ["--num_shards=1"]),
        (["--val_shard=z.jsonl"], "2 files, a.jsonl to b.parquet", ["--val_shard=a.jsonl"]),
        (["--revision=dev"], "leave --revision out", []),
        (["--num_shards=0"], "must be at least 1", ["--num_shards=1"]),
        ([f"--data_dir={Path.home()}"], "named by --dataset=<folder>", []),
        (["--mixture=a"], "give no", []),
    ],
)
def test_R33_correcting_a_refused_flag_works(folder, base, train, flags, said, fixed):
    assert said in train("rejects", f"--dataset={folder}", *flags)
    assert not manifests(base)
    train("works", f"--dataset={folder}", *fixed)


def test_R33_naming_a_folder_that_has_text_works(folder, base, train):
    assert "there is no such folder" in train("rejects", f"--dataset={folder}x")
    said = train("rejects", f"--dataset={folder / 'a.jsonl'}")
    assert f"use the folder it is in: --dataset={folder}" in said
    (folder.parent / "none").mkdir()
    assert "add one" in train("rejects", f"--dataset={folder.parent / 'none'}")
    write(folder.parent / "none/a.jsonl")
    assert not manifests(base)
    train("works", f"--dataset={folder.parent / 'none'}")
    train("works", f"--dataset={folder}")


def test_R33_naming_a_text_at_all_works(folder, base, train):
    assert "give --dataset=" in train("rejects")
    assert "<owner>/<name>" in train("rejects", "--dataset=climbmix")
    assert not manifests(base)
    assert "leave --val_shard out" in train("rejects", "--dataset=embedded", "--val_shard=a.jsonl")
    train("works", "--dataset=embedded", "--max_chars=20000")


def test_R33_of_one_document_either_fix_works(tmp_path, base, train):
    one = write(tmp_path / "one/a.jsonl", STORIES[:1])
    two = write(tmp_path / "two/a.jsonl", STORIES[:1])
    for file in (one, two):
        said = train("rejects", f"--dataset={file.parent}")
        assert "divide it into documents, or add a file" in said
    assert not manifests(base)
    write(one, STORIES[:2])
    train("works", f"--dataset={one.parent}")
    write(two.with_name("b.jsonl"), STORIES[:1])
    train("works", f"--dataset={two.parent}")


def test_R33_a_single_file_named_for_validation_can_be_fixed(tmp_path, base, train):
    file = write(tmp_path / "one/a.jsonl")
    flags = [f"--dataset={file.parent}", "--val_shard=a.jsonl"]
    assert "leave --val_shard out" in train("rejects", *flags)
    assert not manifests(base)
    train("works", *flags[:1])
    shutil.rmtree(base)
    train("rejects", *flags)
    write(file.with_name("b.jsonl"))  # "or add a file"
    train("works", *flags)


def deleted(text: str) -> None:
    """Delete what an error names for that."""
    named = re.search(r"delete (that manifest|/\S+)", text)
    assert named, text
    path = re.search(r"/\S+manifest\.json", text)
    target = Path(path[0] if path else named[1])
    shutil.rmtree(target) if target.is_dir() else target.unlink()


@pytest.mark.parametrize("fix", ["back", "delete"])
@pytest.mark.parametrize("change", ["changed", "came", "went"])
def test_R33_files_that_changed_can_be_restored_or_accepted(folder, train, change, fix):
    train("works", f"--dataset={folder}")
    kept = shutil.copytree(folder, folder.parent / "kept")
    if change == "went":
        (folder / "a.jsonl").unlink()
    else:
        write(folder / {"changed": "a.jsonl", "came": "c.jsonl"}[change], STORIES[:9])
    said = train("rejects", f"--dataset={folder}")
    assert {"changed": "a.jsonl is not the file", "came": "c.jsonl", "went": "a.jsonl"}[
        change
    ] in said
    if fix == "back":
        shutil.rmtree(folder)
        shutil.copytree(kept, folder)
    else:
        deleted(said)
    train("works", f"--dataset={folder}")


def test_R33_another_validation_shard_can_be_accepted(folder, train):
    train("works", f"--dataset={folder}")
    said = train("rejects", f"--dataset={folder}", "--val_shard=a.jsonl")
    deleted(said)
    train("works", f"--dataset={folder}", "--val_shard=a.jsonl")


@pytest.mark.parametrize("fix", ["back", "accept"])
def test_R33_a_recorded_text_that_changed_can_be_fixed(folder, base, train, fix):
    train("works", f"--dataset={folder}")
    old = (folder / "a.jsonl").read_bytes()
    write(folder / "a.jsonl", STORIES[:9])
    for path in base.rglob("manifest.json"):  # as on another machine
        path.unlink()
    said = train("rejects")
    assert "is not the text that was recorded" in said
    assert not list(base.rglob("manifest.json"))
    if fix == "back":
        (folder / "a.jsonl").write_bytes(old)
        train("works")
    else:
        train("works", f"--dataset={folder}")
        train("works")


def test_R33_a_refused_mixture_can_be_corrected(folder, base, train, tmp_path):
    write(tmp_path / "more/a.jsonl")
    own = tmp_path / "own.json"
    places = {"a": {"dataset": str(folder)}, "b": {"dataset": str(tmp_path / "none")}}
    declared = {**places, "talk": {"task": "smoltalk"}}

    def mixture_of(spec):
        own.write_text(json.dumps({"mixture": spec, "buckets": declared}))
        return f"--mixture={own}"

    for mixture, said in (
        ("a=50%,talk", "talk is declared as a task"),
        ("a,a", "a comes twice"),
        ("a=5,b", "text is taken by tokens"),
        ("a=?", "a=?"),
    ):
        assert said in train("rejects", mixture_of(mixture))
        assert not manifests(base)
    assert str(tmp_path / "none") in train("rejects", mixture_of("a=50%,b"))
    assert "No such file" in train("rejects", f"--mixture={own.with_name('x.json')}")
    shutil.copytree(tmp_path / "more", tmp_path / "none")
    train("works", mixture_of("a=50%,b"))


# ------------------------------------------------------------------------------------------------
# A single file


def tail_of(base: Path) -> tuple[int, int]:
    """The first document that is held out, and how many there are."""
    [path] = base.rglob("manifest.json")
    tail = json.loads(path.read_text())["tail"]
    return tail["tail_start"], tail["documents"]


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.parquet", "below/a.jsonl"])
def test_the_last_documents_of_a_single_file_validate(tmp_path, base, command, train, name):
    texts = [*STORIES, "quokka " * 30]
    write(tmp_path / "text" / name, texts)
    said = train("works", f"--dataset={tmp_path / 'text'}")
    start, documents = tail_of(base)
    assert documents == len(texts) and f"last {documents - start} of its {documents} docu" in said
    tokens = json.loads((base / "tokenizer/main/tokenizer.json").read_text())["tokens"]
    assert not any("uo" in token for token in tokens)  # the validation text is not trained on
    said = command.works("data", "--max_seq_len=32", "--workers=1")
    assert f"{start} \u2502" in said and f"{documents - start} \u2502" in said
    assert "are held out" not in said  # recorded, not searched for again


def test_the_held_out_part_is_small_and_never_empty(tmp_path, base, train):
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
def test_a_hub_data_set_of_one_file_is_divided_too(
    tmp_path, base, hub, command, train, monkeypatch, documents
):
    served = tmp_path / "hub/datasets/local/one"
    write(served / "data/only.parquet", [f"text {i} " * 9 for i in range(documents)])
    with hub_served(hub, monkeypatch) as serve:
        serve(tmp_path / "hub")
        if documents == 1:
            assert "divide it" in train("rejects", "--dataset=local/one")
            assert not manifests(base)
            write(served / "data/only.parquet", ["one", "two", "three"])
        train("works", "--dataset=local/one")
        start, found = tail_of(base)
        assert 0 < start < found == max(documents, 3)
        said = command.works("data", "--max_seq_len=8", "--workers=1")
        assert "tail-of-data/only.parquet" in said


def test_R33_a_hub_flag_that_is_refused_pins_nothing(hub, base, train, monkeypatch):
    name = "--dataset=local/mini-pretrain"
    with hub_served(hub, monkeypatch) as serve:
        serve()
        for flag in ("--num_shards=99", "--val_shard=z.parquet", "--revision=nowhere"):
            train("rejects", name, flag)
            assert not manifests(base)
        train("works", name, "--num_shards=1", "--max_chars=20000")
        said = train("rejects", name, "--val_shard=shard_00003.parquet")
        deleted(said)
        train("works", name, "--val_shard=shard_00003.parquet", "--max_chars=20000")


# ------------------------------------------------------------------------------------------------
# What files may be


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
def test_a_column_of_any_type_of_text_is_read(folder, base, train, kind):
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


def test_what_doc_cap_cuts_is_said_and_recorded(folder, base, train):
    assert "--doc_cap" not in train("works", f"--dataset={folder}")
    write(folder / "a.jsonl", [*STORIES, "long " * 3000, "longer " * 2000])
    next(base.rglob("manifest.json")).unlink()
    said = train("works", f"--dataset={folder}")
    assert "--doc_cap=10000: of 2 of 42 documents" in said and "9,000 characters were left" in said
    values = json.loads((base / "report/tokenizer-training.json").read_text())["values"]
    assert (values["documents_cut"], values["characters_cut"]) == (2, 9000)


def test_links_to_folders_of_text_are_followed(folder, base, train, tmp_path):
    write(tmp_path / "elsewhere/below/c.jsonl", ["quokka " * 40] * 9)
    (folder / "0").symlink_to(tmp_path / "elsewhere")
    train("works", f"--dataset={folder}", "--num_shards=1")
    tokens = json.loads((base / "tokenizer/main/tokenizer.json").read_text())["tokens"]
    assert any("uo" in token for token in tokens)


@pytest.mark.parametrize("target", [".", "..", "sub", "a.jsonl.missing"])
def test_R33_removing_a_refused_link_works(folder, base, train, target):
    write(folder / "sub/c.jsonl")
    link = folder / ("z.jsonl" if "missing" in target else "z")
    link.symlink_to(folder / target)
    said = train("rejects", f"--dataset={folder}")
    assert str(link) in said and "remove" in said
    assert not manifests(base)
    link.unlink()
    train("works", f"--dataset={folder}")


def test_R33_removing_a_pipe_that_is_named_like_text_works(folder, train):
    os.mkfifo(folder / "c.jsonl")
    assert "no regular file" in train("rejects", f"--dataset={folder}")
    (folder / "c.jsonl").unlink()
    train("works", f"--dataset={folder}")


@pytest.mark.parametrize("name", ["data.jsonl", "data.jsonl.gz", "data.csv", "data.parquet"])
def test_damage_the_hub_has_no_digest_of_is_never_recorded(tmp_path, hub, base, monkeypatch, name):
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
        with pytest.raises(ValueError, match="refused, twice"):
            pinned("local/nodigest", base / "data" / "nodigest").fetch(name)
        assert not manifests(base)
        served.write_bytes(good)
        assert pinned("local/nodigest", base / "data" / "nodigest").fetch(name).read_bytes() == good


def pinned(name: str, folder: Path) -> HubRepo:
    """A repository whose files may be of any format."""
    manifest = pin_repo(name, folder / "manifest.json", ("",))
    write_json(folder / "manifest.json", manifest)
    return HubRepo(name, folder, manifest["commit"], find_problem)


def without_digest(module) -> type:
    """A server that gives no SHA-256 of its files, as the hub does of small ones."""

    class Handler(module.Handler):
        def send_content(self, stream, size, digest, headers):
            super().send_content(stream, size, digest[:40], headers)

    return Handler


def test_a_deeply_nested_conversation_is_named(tmp_path, command):
    path = tmp_path / "own.jsonl"
    path.write_text('{"messages": ' + "[" * 100_000 + "]" * 100_000 + "}\n")
    said = command.rejects("lab.filter", f"--rows={path}", f"--out={tmp_path / 'out.jsonl'}")
    assert f"{path}, line 1: not JSON (RecursionError" in said
