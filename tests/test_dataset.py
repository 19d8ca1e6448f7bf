"""Text from a folder, the Hub or the built-in world: reading, errors and records."""

import gzip
import io
import json
import os
import re
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import repeat
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nanochat import dataset
from nanochat.common import UsageError, read_json
from nanochat.dataset import (
    DataConfig,
    FirstUseConfig,
    Source,
    open_source,
    role_of,
    roles_of,
    split_mixture,
)
from nanochat.eval_core import FewShotTask, open_suite
from tasks.world.corpus import documents
from tasks.world.suite import suite
from tasks.world.write import open_text
from tests import training_runs
from tests.hub_server import FakeHub, serve
from tests.training_runs import SMALL, copy_until, curve, equal, tensors

STORIES = [f"story {i} of a cat, a dog and the {i} mice they met " * 5 for i in range(40)]
LINES = b"".join(b'{"text": "line %d of many"}\n' % i for i in range(5000))
NAME = "owner/texts"


def parquet(**columns: Any) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.table(columns), sink, write_page_checksum=True)
    return sink.getvalue()


def write(path: Path, texts: list = STORIES) -> Path:
    """Write texts in the format given by the file name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    content = parquet(text=texts) if path.suffix == ".parquet" else lines
    path.write_bytes(gzip.compress(lines) if path.suffix == ".gz" else content)
    return path


def opened(dataset: Path | str, **settings) -> Source:
    return open_source(FirstUseConfig(str(dataset), **settings))


def texts_of(source: Source, shard: str) -> list[str]:
    return list(source.texts(shard))


def manifests(base: Path) -> list[Path]:
    """All records of text sources."""
    return [*base.rglob("manifest.json"), *base.rglob("used_with_*.json")]


def delete_named_manifest(message: str) -> None:
    found = re.search(r"/\S+manifest\.json", message)
    assert found and re.search("delete (that manifest|/)", message)
    Path(found[0]).unlink()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A file for training and one for validation, in two formats."""
    write(tmp_path / "text/a.jsonl")
    write(tmp_path / "text/dev.parquet")
    return tmp_path / "text"


@pytest.fixture
def data(command) -> Callable[..., str]:
    """Open and verify a text source by command; `how` is `rejects` or `works`."""
    return lambda how, *flags: getattr(command, how)("data", "--download_only", *flags)


# ---- A folder ------------------------------------------------------------------------------------


def test_folder_is_read_in_order_and_its_last_file_validates(folder, tmp_path, capsys):
    (folder / "notes.txt").touch()
    (folder / "more.jsonl.zst").touch()
    (folder / "dev.parquet").rename(folder / "b.parquet")
    write(folder / "below/c.jsonl.gz", ["six"])
    write(tmp_path / "elsewhere/d.jsonl", ["seven"])
    write(folder / ".ipynb_checkpoints/b.jsonl")
    (folder / "0").symlink_to(tmp_path / "elsewhere")
    source = opened(folder)
    assert re.search(r"ignored: 1 \.(txt|zst), 1 \.", capsys.readouterr().out)
    assert source.shards() == ["0/d.jsonl", "a.jsonl", "b.parquet", "below/c.jsonl.gz"]
    assert [texts_of(source, s) for s in source.shards()] == [["seven"], STORIES, STORIES, ["six"]]
    fewer = opened(folder, num_shards=1)
    assert fewer.shards() == ["0/d.jsonl", "below/c.jsonl.gz"]
    assert open_source(DataConfig(num_shards=2), fewer.describe()).train_shards[1] == "a.jsonl"
    other = shutil.copytree(folder, tmp_path / "copy")
    assert opened(other).fingerprint == source.fingerprint != fewer.fingerprint


def test_validation_file_is_fixed_at_first_use(folder, data):
    (folder / "dev.parquet").rename(folder / "b.parquet")
    assert opened(folder, val_shard="a.jsonl").train_shards == ["b.parquet"]
    assert opened(folder).val_shard == "a.jsonl"
    message = data("rejects", f"--dataset={folder}", "--val_shard=b.parquet")
    assert "already validates on a.jsonl" in message
    delete_named_manifest(message)
    data("works", f"--dataset={folder}", "--val_shard=b.parquet")
    assert opened(folder).val_shard == "b.parquet"


@pytest.mark.parametrize(
    ("texts", "held_out"),
    [
        (STORIES[:2], 1),
        (["word " * 100] * 20, 2),  # a tenth of a short text
        (["word " * 100] * 20_000, 200),  # 1%
    ],
)
@pytest.mark.parametrize("others", [0, 2])
def test_last_documents_of_a_large_last_file_validate(tmp_path, texts, held_out, others, capsys):
    write(tmp_path / "text/below/z.parquet", [*texts, "", None])
    for i in range(others):
        write(tmp_path / f"text/{i}.jsonl", [f"of {i}", "two"])
    source = opened(tmp_path / "text")
    assert f"last {held_out} of its {len(texts):,} documents" in capsys.readouterr().out
    *_, train, val = (texts_of(source, shard) for shard in source.shards())
    assert train + val == texts and len(val) == held_out
    assert len(source.train_shards) == 1 + others
    assert open_source(DataConfig(), source.describe()) == source
    for manifest in manifests(tmp_path):  # as on another machine
        manifest.unlink()
    assert open_source(DataConfig(), source.describe()) == source


@pytest.mark.parametrize("kind", [pa.string(), pa.binary(), pa.dictionary(pa.int32(), pa.string())])
def test_all_types_of_text_are_read_and_skips_counted(folder, kind):
    column = pa.array([b"one", None, b"", b"two", b"\xff\xfe"]).cast(kind, safe=False)
    for path in folder.iterdir():
        path.unlink()
    (folder / "a.parquet").write_bytes(parquet(text=column))
    write(folder / "val.jsonl", ["one", None, "", "\ud83d half a pair", "two"])
    for shard in ("a.parquet", "val.jsonl"):
        skipped = Counter()
        assert [*opened(folder).texts(shard, skipped=skipped)] == ["one", "two"]
        assert skipped == {"null": 1, "empty": 1, "undecodable": 1}


BAD_FILES = {
    "empty.jsonl": (b"", "contains no text"),
    "field.jsonl": (b'{"content": "one"}\n', "line 1.*the fields are content"),
    "number.jsonl": (LINES + b'{"text": 17}\n', "line 5001.*string `text`"),
    "cut.jsonl": (LINES[:-4], "line 5000"),
    "cut.jsonl.gz": (gzip.compress(LINES)[:-50], "line .*EOFError"),
    "cut.parquet": (parquet(text=STORIES)[:-100], "not a readable parquet"),
    "flipped.parquet": (
        parquet(text=[f"{i} " * 99 for i in range(99)]).replace(b"50 ", b"51 ", 1),
        "not a readable parquet",
    ),
    "column.parquet": (parquet(content=["one"]), "no column `text`; the columns are content"),
    "number.parquet": (parquet(text=[1, 2]), "`text` has the type int64, not string"),
    "lists.parquet": (parquet(text=[["a"]]), "`text` has the type list<.*, not string"),
    "nan.jsonl": (b'{"text": NaN}\n', "line 1.*string `text`; it is NaN"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_R11_R33_removing_a_named_bad_file_works(folder, base, data, name):
    content, message = BAD_FILES[name]
    (folder / name).write_bytes(content)
    found = data("rejects", f"--dataset={folder}")
    assert re.search(rf"{re.escape(str(folder / name))}.*{message}", found, re.DOTALL)
    assert re.search(r"remove it|leave the file out", found) and not manifests(base)
    (folder / name).unlink()
    data("works", f"--dataset={folder}")


@pytest.mark.parametrize("target", ["..", "missing.jsonl"])
def test_R33_a_bad_link_is_to_be_removed(folder, base, target):
    path = folder / "z.jsonl"
    path.symlink_to(folder / target)
    with pytest.raises(ValueError, match=f"{path}.* remove "):
        opened(folder)
    assert not manifests(base)


@pytest.mark.parametrize(
    ("flags", "message", "fixed"),
    [
        ("--dataset=FOLDER --num_shards=2", "use --num_shards=1", "--dataset=FOLDER"),
        (
            "--dataset=FOLDER --val_shard=z.jsonl",
            "2 files, a.jsonl to dev.parquet",
            "--dataset=FOLDER --val_shard=dev.parquet",
        ),
        ("--dataset=FOLDER/a.jsonl", "use its folder: --dataset=FOLDER\n", "--dataset=FOLDER"),
        ("", "--dataset=embedded", "--dataset=embedded --num_shards=1"),
        ("--dataset=climbmix", "<owner>/<name>", "--dataset=FOLDER"),
    ],
)
def test_R33_correcting_a_rejected_flag_works(folder, base, data, flags, message, fixed):
    def fill(words: str) -> str:
        return words.replace("FOLDER", str(folder))

    assert fill(message) in data("rejects", *fill(flags).split())
    assert all("embedded" in str(path) for path in manifests(base))
    data("works", *fill(fixed).split())


def test_R33_fixes_for_too_little_text_work(tmp_path, base):
    own = tmp_path / "own"
    own.mkdir()
    with pytest.raises(ValueError, match="add one"):
        opened(own)
    write(own / "a.jsonl", STORIES[:1])
    with pytest.raises(ValueError, match="split it into documents, or add a file"):
        opened(own)
    assert not manifests(base)
    write(own / "a.jsonl", STORIES[:2])
    opened(own)


@pytest.mark.parametrize("change", ["changed", "added", "removed"])
def test_R6_R33_changed_folder_can_be_restored_or_accepted(folder, data, change):
    data("works", f"--dataset={folder}")
    source = opened(folder)
    path = folder / ("c.jsonl" if change == "added" else "a.jsonl")
    write(path, STORIES[:9])
    if change == "removed":
        path.unlink()
    message = data("rejects", f"--dataset={folder}")
    assert path.name in message
    path.unlink(missing_ok=True)
    if change != "added":
        write(path)
        os.utime(path, (1, 1))  # the content counts
    assert opened(folder) == source
    write(folder / "d.jsonl", STORIES[:5])
    delete_named_manifest(message)
    data("works", f"--dataset={folder}")


def test_R6_recorded_text_that_changed_is_rejected(folder, base):
    recorded = opened(folder).describe()
    write(folder / "a.jsonl", STORIES[:9])
    shutil.rmtree(base)  # as on another machine: no manifest of the old text
    with pytest.raises(ValueError, match=recorded["fingerprint"]):
        open_source(DataConfig(), recorded)
    assert open_source(DataConfig(str(folder)), recorded).fingerprint != recorded["fingerprint"]


@pytest.mark.parametrize(
    ("file", "role"),
    [
        ("validation-00000-of-00001.parquet", "validate"),
        ("data/val_0003.jsonl", "validate"),
        ("en/dev/0000.parquet", "validate"),
        ("data/test-00000-of-00001-f841e7bac70c0ce7.parquet", "leave out"),
        ("Testing.jsonl.gz", "leave out"),
        ("unit_tests_python.jsonl", "train"),
        ("test_prep_books.jsonl", "train"),
        ("developers.jsonl", "train"),
        ("train-00000-of-00002.parquet", "train"),
    ],
)
def test_role_of_a_file_follows_from_its_whole_name(file, role):
    assert role_of(file) == role


def test_words_after_a_common_prefix_count_beside_training_files(base, folder):
    files = ["wiki_dev.jsonl", "wiki_test-00.jsonl", "wiki_train.jsonl", "unit_test.jsonl"]
    assert list(roles_of(files).values()) == ["validate", "leave out", "train", "train"]
    write(folder / "C.JSONL", ["upper case"])
    assert texts_of(opened(folder, val_shard="a.jsonl"), "C.JSONL") == ["upper case"]


def test_files_named_for_evaluation_are_left_out_and_listed(tmp_path, capsys):
    for name in ("dev", "test", "val", "train-0", "train-1", "unit_tests"):
        write(tmp_path / f"text/{name}.jsonl", [name, "two"])
    source = opened(tmp_path / "text")
    assert source.train_shards == ["train-0.jsonl", "train-1.jsonl", "unit_tests.jsonl"]
    assert source.val_shard == "val.jsonl"
    assert "left out, by name: dev.jsonl, test.jsonl" in capsys.readouterr().out


def test_only_file_of_text_validates_on_its_last_documents(tmp_path):
    write(tmp_path / "text/test.jsonl", ["one", "two"])
    write(tmp_path / "text/train.jsonl")
    source = opened(tmp_path / "text")
    assert source.shards() == ["train.jsonl", "tail-of-train.jsonl"]
    assert [text for shard in source.shards() for text in texts_of(source, shard)] == STORIES
    assert opened(tmp_path / "text") == source


def test_a_last_file_of_one_document_validates_whole(tmp_path):
    for name in "abc":
        write(tmp_path / f"text/{name}.jsonl", [f"a book called {name}"])
    source = opened(tmp_path / "text", num_shards=1)
    assert source.shards() == ["a.jsonl", "c.jsonl"]
    assert opened(tmp_path / "text").shards() == ["a.jsonl", "b.jsonl", "c.jsonl"]


def test_files_of_one_name_are_an_error(folder):
    write(folder / "a.jsonl.gz", ["other"])
    with pytest.raises(ValueError, match="several files are named a; remove or rename one"):
        opened(folder)


def test_two_files_of_equal_content_are_an_error(folder):
    shutil.copy(folder / "dev.parquet", folder / "copy.parquet")
    with pytest.raises(ValueError, match=r"copy\.parquet.*dev\.parquet"):
        opened(folder)


# ---- Mixtures of text ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "shares"),
    [
        ("a=0.7,b=0.3", {"a": 0.7, "b": 0.3}),
        ("./a=3, me/repo=1", {"./a": 0.75, "me/repo": 0.25}),
        ("a,b", {"a": 0.5, "b": 0.5}),
        ("a=2", {"a": 1.0}),
        ("/x=y/z", {"/x=y/z": 1.0}),
    ],
)
def test_shares_are_normalized(words, shares):
    assert split_mixture(words) == pytest.approx(shares)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("a=0.7,b", "'b' must be <source>=<share above 0>"),
        ("a=1,b=0", "'b=0' must be"),
        ("a=1,=2", "'=2' must be"),
        ("a=1,b=-1", "'b=-1' must be"),
        ("a=1,a=2", "has a twice; add up its shares"),
        ("a=1,b=0.0001", "b is less than 0.001 of all"),
        ("a=1,,b=1", "'' must be"),
    ],
)
def test_wrong_mixture_is_named(words, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        split_mixture(words)


def test_mixture_is_reopened_with_the_same_text(folder, tmp_path):
    write(tmp_path / "other/x.jsonl", [f"other {i}" for i in range(40)])
    text = dataset.open_text(DataConfig(f"{folder}=3,{tmp_path / 'other'}=1"))
    assert dict(zip(text.name.split(","), text.shares, strict=True)) == {
        f"{folder}=0.75": 0.75, f"{tmp_path / 'other'}=0.25": 0.25}  # fmt: skip
    swapped = dataset.open_text(DataConfig(f"{tmp_path / 'other'}=1,{folder}=3"))
    assert swapped.fingerprint == text.fingerprint
    again = dataset.open_text(DataConfig(), text.describe())
    assert (again.fingerprint, again.shares) == (text.fingerprint, text.shares)
    other = dataset.open_text(DataConfig(f"{folder}=1,{tmp_path / 'other'}=1"))
    assert other.fingerprint != text.fingerprint
    shards = [shard for shard, _ in text.documents()]
    assert set(shards) == {"a.jsonl", "x.jsonl"}
    assert len(list(text.val_texts(4))) == 4
    with pytest.raises(ValueError, match="has .*other twice"):
        dataset.open_text(DataConfig(f"{tmp_path}/other,{tmp_path}/./other"))
    alone = dataset.open_text(DataConfig(f"{folder}=0.7"))
    assert alone.fingerprint == dataset.open_text(DataConfig(str(folder))).fingerprint
    with pytest.raises(ValueError, match="--num_shards is for one source.*; leave it out"):
        dataset.open_text(DataConfig(f"{folder},{tmp_path}/other", num_shards=1))
    write(tmp_path / "other/x.jsonl", ["changed"] * 40)
    with pytest.raises(ValueError, match="does not match its SHA-256"):
        dataset.open_text(DataConfig(), text.describe())


def test_tokenizer_reads_the_shares_of_a_mixture(tmp_path):
    for name, letter in (("one", "a"), ("two", "b")):
        write(tmp_path / name / "x.jsonl", [f"{letter} " * 50] * 300)
    text = dataset.open_text(DataConfig(f"{tmp_path}/one=0.8,{tmp_path}/two=0.2"))
    letters = [document[0] for _, document in text.documents()]
    assert letters[:200].count("a") == 160
    assert letters.count("a") == letters.count("b") == 284  # each to its end


def test_R6_mixture_trains_resumes_and_is_scored_by_source(trained, tmp_path, command):
    paths = [tmp_path / name for name in ("books", "notes")]
    for number, path in enumerate(paths):
        lines = [f"{word} " * (9 + i % 7) for i, word in enumerate(STORIES * 60)]
        write(path / "x.jsonl", [f"{number} {line}" for line in lines])
    words = ["base_train", *SMALL, "--eval_tokens=2048"]
    mixed = f"--dataset={paths[0]}=0.7,{paths[1]}=0.3"
    command.works(*words, mixed, "--model_tag=mixed")
    run = training_runs.folder(trained, "mixed")
    copy_until(8, run, run.with_name("cut"))
    command.works(*words, mixed, "--model_tag=cut", "--resume=auto")
    assert equal(*(tensors(run.with_name(tag)) for tag in ("mixed", "cut")))
    assert all(curve(run, f"val_bpb:{path}") for path in paths)
    record = read_json(trained / "report" / "base-model-training.json")
    [table] = record["tables"]
    assert [line[-1] for line in table["rows"]] == ["70.0%", "30.0%"]
    text = command.works("base_loss", "--model_tag=mixed", "--split_tokens=1024")
    assert "val bpb" in text
    values = read_json(trained / "report" / "base-model-loss.json")["values"]
    assert {f"val bpb:{path}" for path in paths} <= values.keys()
    other = f"--dataset={paths[0]}=0.6,{paths[1]}=0.4"
    text = command.rejects(*words, other, "--model_tag=cut", "--resume=auto")
    assert re.search(r"rows.text.dataset: was '[^']*books=0.7.*now '[^']*books=0.6", text)
    text = command.works(*words, f"--dataset=embedded,{paths[1]}", "--model_tag=world")
    assert "embedded=0.5" in text and f"{paths[1]}=0.5" in text


# ---- The built-in world --------------------------------------------------------------------------


def test_built_in_text_is_written_once_and_verified(base):
    one, three = (DataConfig("embedded", num_shards=n) for n in (1, 3))
    [source] = open_text(one, None).sources
    assert source.shards() == ["world_00000", "world_val"]
    assert texts_of(source, "world_val") == list(documents(0, "val"))
    home = base / "data/embedded"
    write(home / "suite/core.yaml", ["damaged"])  # written again
    [grown] = open_text(three, None).sources
    assert texts_of(grown, "world_00001") == list(documents(1, "train"))
    assert open_source(DataConfig(), source.describe()) == source
    assert open_suite(f"{home}/suite").tasks == tuple(FewShotTask(**task) for task in suite())
    write(home / "text/world_00000.jsonl", ["another"])
    with pytest.raises(ValueError, match="does not match its SHA-256"):
        texts_of(source, "world_00000")


# ---- The Hub -------------------------------------------------------------------------------------


@pytest.fixture
def served(monkeypatch) -> Iterator[FakeHub]:
    """A local server as the Hub, with two files."""
    files = {"a.parquet": parquet(text=["one"]), "val.parquet": parquet(text=["two", "three"])}
    with serve(FakeHub(files), monkeypatch) as server:
        yield server


def read_shard() -> Source:
    source = opened(NAME)
    assert texts_of(source, "val.parquet") == ["two", "three"]
    return source


def silence(handler) -> None:
    handler.rfile.read(1)  # until the client gives up
    handler.close_connection = True


def status(code: int, error: str = "", body: Any = b"{}"):
    """A fault: a reply with a status and a Hub API error code."""
    return lambda handler: handler.answer(code, body, {"X-Error-Code": error} if error else {})


def test_R35_hub_dataset_is_pinned_and_fetched_when_read(served, base, monkeypatch):
    source = opened(NAME)
    assert source.shards() == ["a.parquet", "val.parquet"] and not list(base.rglob("*.parquet"))
    assert read_shard() == source == open_source(DataConfig(), source.describe())
    [path] = base.rglob("*.parquet")
    assert path.read_bytes() == served.files["val.parquet"]
    served.commit, served.files["c.parquet"] = "f" * 40, b""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert read_shard() == source  # what was downloaded is used without the Hub
    with pytest.raises(UsageError, match="(?s)HF_HUB_OFFLINE.*--dataset=embedded"):
        source.fetch("a.parquet")


def test_hub_dataset_of_one_file_is_split(served):
    served.files = {"data/only.parquet": parquet(text=STORIES), "README.md": b""}
    source = opened(NAME)
    assert source.shards() == ["data/only.parquet", "tail-of-data/only.parquet"]
    texts = [text for shard in source.shards() for text in texts_of(source, shard)]
    assert texts == STORIES and opened(NAME) == source


@pytest.mark.parametrize("damage", [b"", b"PAR1", parquet(text=["one"]), "of equal size"])
def test_R11_damaged_download_is_set_aside_and_fetched_again(served, capsys, damage):
    source = read_shard()
    path = source.fetch("val.parquet")
    damage = path.read_bytes()[::-1] if isinstance(damage, str) else damage
    path.write_bytes(damage)
    assert texts_of(source, "val.parquet") == ["two", "three"]
    assert path.with_name("val.parquet.bad").read_bytes() == damage
    assert "set aside as val.parquet.bad" in capsys.readouterr().out
    served.files["val.parquet"] = parquet(text=["other"])
    path.unlink()
    with pytest.raises(ValueError, match="val.parquet arrived with"):
        read_shard()


KINDS = ("info", "tree", "head", "get")  # requests made when a file is first read


@pytest.mark.parametrize("kind", KINDS)
def test_R35_hub_is_asked_again_and_its_silence_is_one_sentence(served, base, kind, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.1)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_ETAG_TIMEOUT", 0.1)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    served.faults[kind] = repeat(silence)
    with pytest.raises(UsageError, match="run the same command again"):
        read_shard()
    assert not list(base.rglob("*.parquet"))
    served.faults[kind] = repeat(status(503), 2)
    read_shard()


def page(handler) -> None:
    handler.answer(200, b"<html>Log in to the hotel</html>", {"Content-Type": "text/html"})


REFUSALS = {
    "gated": (KINDS[2:3], status(403, error="GatedRepo"), "is gated.*hf auth login"),
    "bad token": (KINDS[:1], status(401), "token.*hf auth login"),
    "login page": (KINDS[:2], page, "failed.*HF_ENDPOINT"),
    "no revision": (KINDS[:1], status(404, error="RevisionNotFound"), "no such revision.*revision"),
    "commit gone": (KINDS[2:], status(404, error="RevisionNotFound"), "c0ffee.*BASE_DIR"),
    "file gone": (KINDS[2:], status(404, error="EntryNotFound"), "val.parquet.*another revision"),
    "outside": (
        KINDS[1:2],
        status(200, body=[{"type": "file", "path": "../a.parquet", "size": 1, "oid": "0"}]),
        "unsafe path",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_R35_permanent_error_is_one_sentence_with_a_fix(served, base, case, monkeypatch):
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    kinds, fault, message = REFUSALS[case]
    for kind in kinds:
        served.faults = {kind: repeat(fault)}
        with pytest.raises(UsageError, match=f"(?s){message}") as refusal:
            read_shard()
        why, fix = refusal.value.args
        assert "\n" not in why + fix and fix
        assert not list(base.rglob("*.parquet"))
        served.faults = {}
        read_shard()
        shutil.rmtree(base)
