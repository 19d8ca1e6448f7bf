"""Hub tasks on real data: every row of every dataset, and overlap between splits."""

import json
import re
from fractions import Fraction
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nanochat import chat_format, hub
from nanochat import hub as hub_files
from nanochat.common import UsageError, read_json, sha256_file
from nanochat.sandbox import calculate
from tasks import registry
from tasks.aqua import MARKER, AQuA
from tasks.base import CALCULATION, Subset, Task, answer_text, find_error
from tasks.buckets import buckets
from tasks.hub import HubTask, load_split, match_files
from tasks.hub_chats import load_shared
from tasks.overlap import overlaps
from tasks.registry import make_task
from tests.hub_server import hub_served

CHAT = "local/chat-instruct"  # replaces SmolTalk's default dataset
ROWS = {  # task -> rows per split
    "arc_easy": {"train": 2251, "val": 570, "test": 2376},
    "arc_challenge": {"train": 1119, "val": 299, "test": 1172},
    "mmlu": {"train": 9533, "val": 1531, "test": 14042},
    "gsm8k": {"train": 7473, "test": 1319},
    "aqua": {"train": 2726, "val": 254, "test": 254},
    "humaneval": {"test": 164},
    "kmmlu": {"train": 85, "val": 5, "test": 200},
    "smoltalk": {"train": 30306, "test": 1595},
}
SPLITS = [(name, split) for name, splits in ROWS.items() for split in splits]


@pytest.fixture(scope="module")
def base_of_module(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("base")


@pytest.fixture(autouse=True)
def base(base_of_module, monkeypatch) -> Path:
    """One base directory per module, so every file is fetched once."""
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(base_of_module))
    return base_of_module


@pytest.fixture
def serve(hub, monkeypatch):
    with hub_served(hub, monkeypatch) as start:
        yield start


def task_of(name: str, split: str) -> HubTask:
    task = make_task(name, split, **({"source": CHAT} if name == "smoltalk" else {}))
    assert isinstance(task, HubTask)
    return task


# ------------------------------------------------------------------------------------------------
# Pinned files


def write_rows(root: Path, name: str, rows: list[dict]) -> None:
    path = root / "datasets" / "own" / "data" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_files_are_pinned_and_reused_offline(serve, hub, base):
    server = serve()
    task = task_of("gsm8k", "test")
    assert len(task) == 1319
    manifest = read_json(base / "data/tasks/openai--gsm8k/manifest.json")
    [name] = match_files("main/test", list(manifest["files"]), "openai/gsm8k")
    digest = sha256_file(hub / "datasets/openai/gsm8k" / name)
    assert manifest["files"][name]["sha256"] == digest
    assert task.identity["sha256"] == {name: digest}
    assert task.identity["commit"] == manifest["commit"]
    server.shutdown()
    server.server_close()
    assert task_of("gsm8k", "test").identity == task.identity


def test_changed_file_is_fetched_again(serve, base, capsys):
    serve()
    first = load_split("openai/gsm8k", "main/test", ["question"])
    [path] = (base / "data/tasks/openai--gsm8k/main").glob("test-*.parquet")
    path.write_bytes(b"something else")
    again = load_split("openai/gsm8k", "main/test", ["question"])
    assert again.rows.table.equals(first.rows.table)
    assert "set aside as" in capsys.readouterr().out


def test_parquet_parts_and_jsonl_load_the_same_rows(serve, tmp_path, monkeypatch):
    rows = [{"messages": [{"role": "user", "content": f"{i}"}], "more": i} for i in range(10)]
    write_rows(tmp_path / "a", "data/train-00000-of-00002.parquet", rows[:4])
    write_rows(tmp_path / "a", "data/train-00001-of-00002.parquet", rows[4:])
    write_rows(tmp_path / "a", "data/test-00000-of-00001.parquet", rows[:1])
    write_rows(tmp_path / "b", "train.jsonl", rows)
    found = []
    for root in "ab":
        monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path / f"base_{root}"))
        serve(tmp_path / root)
        found.append(list(load_split("own/data", "train", ["messages"]).rows))
    assert found[0] == found[1] == [{"messages": row["messages"]} for row in rows]


def test_missing_or_ambiguous_files_raise(serve, tmp_path):
    for folder in ("all", "easy"):
        write_rows(tmp_path, f"{folder}/train.jsonl", [{"text": folder}])
    write_rows(tmp_path, "mixed/part-00000-of-00002.parquet", [{"text": "a", "level": 1}])
    write_rows(tmp_path, "mixed/part-00001-of-00002.parquet", [{"text": "a", "level": "b"}])
    for suffix in ("jsonl", "parquet"):
        write_rows(tmp_path, f"twice/train.{suffix}", [{"text": "a"}])
    (tmp_path / "datasets/own/data/test.jsonl").write_text('{"text": "a"}\n{"text"\n')
    serve(tmp_path)
    assert list(load_split("own/data/easy", "train", ["text"]).rows) == [{"text": "easy"}]
    with pytest.raises(ValueError, match="has twice/train as jsonl, parquet; use another"):
        load_split("own/data/twice", "train", ["text"])
    with pytest.raises(ValueError, match="several folders.*own/data/all"):
        load_split("own/data", "train", ["text"])
    with pytest.raises(ValueError, match="no dev among its files all/train.jsonl"):
        load_split("own/data", "dev", ["text"])
    with pytest.raises(ValueError, match=r"train\.jsonl has no column words, only text"):
        load_split("own/data/easy", "train", ["words"])
    with pytest.raises(ValueError, match=r"test\.jsonl, line 2: not JSON"):
        load_split("own/data", "test", ["text"])
    with pytest.raises(ValueError, match=r"own/data: files mixed/part-0.* different types .*level"):
        load_split("own/data/mixed", "part", ["text", "level"])
    with pytest.raises(ValueError, match="invalid hub repository 'data'"):
        load_split("data", "train", ["text"])
    with pytest.raises(UsageError, match="no dataset own/nothing"):
        load_split("own/nothing", "test", ["text"])


def test_unreachable_hub_error_has_a_fix(serve, monkeypatch, tmp_path):
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path))
    server = serve()
    server.shutdown()
    server.server_close()
    monkeypatch.setattr(hub_files, "PATIENCE_SECONDS", 0.5)
    with pytest.raises(UsageError, match="run the same command again"):
        len(make_task("aqua", "train"))


# ------------------------------------------------------------------------------------------------
# Every row


@pytest.mark.parametrize("name, split", SPLITS)
def test_every_row_is_valid_and_its_reference_scores_1(serve, name, split):
    serve()
    task = task_of(name, split)
    assert len(task) == ROWS[name][split]
    assert sorted(task.order) == list(range(len(task)))
    for i, conversation in enumerate(task):
        assert find_error(conversation) is None and chat_format.merge_turns(conversation)
        if task.kind == "choice":
            assert conversation[-1]["content"] in task.letters(i)
        if task.kind != "talk" and name != "humaneval":  # has its own test
            assert task.score(conversation, answer_text(conversation[-1])) == 1.0


@pytest.mark.parametrize("split, calls", [("train", 23_716), ("test", 4_282)])
def test_calculator_reproduces_every_gsm8k_calculation(serve, split, calls):
    serve()
    task = task_of("gsm8k", split)
    seen = 0
    for i, (_, answer) in enumerate(task):
        raw = task.row(i)["answer"]
        parts = answer["content"]
        called = [p["text"] for p in parts if p["type"] == "python"]
        answered = [p["text"] for p in parts if p["type"] == "python_output"]
        assert len(called) == len(answered) == raw.count("<<")
        assert [Fraction(calculate(c) or "") for c in called] == list(map(Fraction, answered))
        seen += len(called)
        assert answer_text(answer) == CALCULATION.sub("", raw)
        assert not re.search("<<|>>", answer_text(answer))
    assert seen == calls


@pytest.mark.parametrize("split", ROWS["aqua"])
def test_aqua_rationales_end_with_the_right_letter(serve, split):
    serve()
    task, letters = task_of("aqua", split), task_of("aqua_letter", split)
    assert isinstance(task, AQuA)
    for i, (question, answer) in enumerate(task):
        row = task.row(i)
        assert [option[:2] for option in row["options"]] == ["A)", "B)", "C)", "D)", "E)"]
        assert all(task.question(i).options)
        assert MARKER.findall(answer["content"])[-1] == row["correct"]
        assert answer["content"].startswith(row["rationale"].strip())
        assert letters[i][1]["content"] == row["correct"]
        assert question["content"].count("Answer") == question["content"].count("Answer: and the")


def test_row_order_mixes_subjects(serve, hub):
    serve()
    task = task_of("mmlu", "test")
    [path] = (hub / "datasets/cais/mmlu/all").glob("test-*.parquet")
    subjects = pq.read_table(path, columns=["subject"])["subject"].to_pylist()
    assert len(set(subjects[:570])) < 6
    assert len({subjects[row] for row in task.order[:570]}) > 50


def test_R27_training_mixture_fetches_no_evaluation_file(serve, monkeypatch):
    serve()
    fetched: list[str] = []
    fetch = hub.HubRepo.fetch

    def record(self, file, *rest):
        fetched.append(file)
        return fetch(self, file, *rest)

    monkeypatch.setattr(hub.HubRepo, "fetch", record)
    load_shared.cache_clear()  # earlier tests opened smoltalk
    trained = [n for n in registry.TASKS if "train" in registry.TASKS[n].splits]
    absent = ("jsonl", "hub", "openthoughts3", "rstar_coder", "yisang")
    names = [n if n != "smoltalk" else f"smoltalk:{CHAT}" for n in trained if n not in absent]
    sizes = {bucket.name: len(bucket.train) for bucket in buckets(",".join(names))}
    assert sizes["mmlu"] == 9533
    assert len(fetched) == 9  # two parts of smoltalk, two forms of aqua
    assert all("train" in file for file in fetched)
    assert not [file for file in fetched if re.search("test|val|dev", file)]


# ------------------------------------------------------------------------------------------------
# Overlap

# (training task, evaluation task) -> test items with 13 consecutive words from training. On
# inspection, they are the same question in both (ARC), the same question with new numbers (GSM8K,
# AQuA), or common phrases, lists of numbers and lines of code (SmolTalk, MMLU with itself).
KNOWN = {
    ("ARC-Easy", "ARC-Easy"): 19,
    ("ARC-Easy", "ARC-Challenge"): 1,
    ("ARC-Challenge", "ARC-Easy"): 4,
    ("ARC-Challenge", "ARC-Challenge"): 5,
    ("ARC-Challenge", "MMLU"): 1,
    ("MMLU", "ARC-Easy"): 24,
    ("MMLU", "ARC-Challenge"): 6,
    ("MMLU", "MMLU"): 1,
    ("KMMLU", "KMMLU"): 2,
    ("GSM8K", "GSM8K"): 3,
    ("AQUA", "AQUA"): 3,
    ("SmolTalk", "ARC-Easy"): 1,
    ("SmolTalk", "HumanEval"): 3,
}


def test_R27_train_and_test_share_only_known_items(serve):
    serve()
    train: list[Task] = [task_of(name, "train") for name in ROWS if "train" in ROWS[name]]
    train[-1] = Subset(train[-1], 10_000)  # a third of SmolTalk, to take only seconds
    held_out = [task_of(name, "test") for name in ROWS if name != "smoltalk"]
    found = overlaps(train, held_out)
    assert {(o.train, o.held_out): len(o.shared) for o in found if o.shared} == KNOWN
    assert sum(o.checked for o in found) > 0.97 * sum(o.items for o in found)
