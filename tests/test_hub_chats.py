"""Conversations from Hub repositories: published layouts, skipped rows, and the notation."""

import json
import random
from pathlib import Path

import pytest

from nanochat.mixture import parse_mixture
from tasks.buckets import buckets
from tasks.hub_chats import HubChats, OpenThoughts3, RStarCoder, YiSang
from tests.published import publish


@pytest.fixture
def published(tmp_path, monkeypatch):
    return lambda files: publish(files, tmp_path / "hub", monkeypatch)


def thought(question: str, answer: str, role: str = "gpt") -> dict:
    pair = [{"from": "human", "value": question}, {"from": role, "value": answer}]
    return {"difficulty": 7, "source": "s", "domain": "math", "conversations": pair}


def solved(question: str, passed: bool) -> dict:
    found = {"question_id": question, "question": question, "starter_code": "", "code": "pass"}
    return {**found, "response": f"<think>\n</think>\n{question}", "is_passed": passed}


def every(task) -> list[tuple[str, str]]:
    """Question and answer of each conversation, sorted."""
    return sorted((c[0]["content"], c[1]["content"]) for c in task)


def test_openthoughts3_reads_from_and_value(published, capsys):
    rows = [thought(f"q{i}", f"<think>\n\n</think>\n{i}") for i in range(40)]
    bad = [thought("q", ""), thought("q", "a", "system"), {**rows[0], "conversations": None}]
    files = {"data/train-00000-of-00120.parquet": [*rows, *bad]}
    published({**files, "data/train-00010-of-00120.parquet": rows})  # the eleventh file
    train, val = OpenThoughts3("train"), OpenThoughts3("val")
    assert len(val) >= 1
    assert sorted(every(train) + every(val)) == sorted(
        (f"q{i}", f"<think>\n\n</think>\n{i}") for i in range(40)
    )
    assert train.left_out == train.identity["left_out"] == 3
    assert "OpenThoughts3: skipped 3 of 43 rows of open-thoughts/OpenThoughts3-1.2M" in (
        capsys.readouterr().out
    )


def test_rows_of_json_lines_that_are_no_conversations_are_counted(published, capsys):
    pair = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    good = [{"messages": [{**pair[0], "content": f"q{i}"}, pair[1]]} for i in range(30)]
    bad = [None, [1], {"messages": json.dumps(pair)}, {"messages": [None, *pair]}, {"messages": 3}]
    bad += [{"messages": [{"role": ["user"], "content": "q"}, pair[1]]}, {"other": 1}]
    bad += [{"messages": [1]}, {"messages": []}, {"messages": [{**pair[0], "content": None}]}]
    bad += [{"messages": [{**pair[0], "content": "\ud800"}, pair[1]]}, {"messages": 2**70}]
    random.Random(0).shuffle(bad)
    published(
        {
            "train-00000-of-00002.jsonl": [*bad, *good],
            "train-00001-of-00002.jsonl": [good[0] | {"messages": None}],
        }
    )
    train, val = (HubChats(split, "me/mine{messages: messages}") for split in ("train", "val"))
    assert len(train) + len(val) == 30 and train.left_out == 13
    assert "Hub: skipped 13 of 43 rows of me/mine train" in capsys.readouterr().out


def test_only_selected_rows_are_counted(published, capsys):
    rows = [
        {"inquiry": f"q{i}", "reply": "a" if i > 1 else "", "kind": f"k{i % 2}"} for i in range(40)
    ]
    published({"train.jsonl": [{"inquiry": "no kind", "reply": "a"}, *rows]})
    columns = "prompt: inquiry, answer: reply"
    task = HubChats("train", f"me/mine{{{columns}, where: kind=k1}}")
    assert task.left_out == 1 and len(task.kept) == 19
    assert "skipped 1 of 20 rows of me/mine train: message 2 is empty" in capsys.readouterr().out
    with pytest.raises(ValueError, match="with kind=k2; the most frequent values are k0, k1"):
        len(HubChats("train", f"me/mine{{{columns}, where: kind=k2}}"))


def test_rstar_coder_reads_only_programs_that_passed(published):
    rows = [solved(f"q{i}", i % 2 == 0) for i in range(10)]
    files = {"seed_sft/data-00000-of-00020.parquet": rows}
    published({**files, "seed_sft/data-00010-of-00020.parquet": rows})
    found = every(RStarCoder("train")) + every(RStarCoder("val"))
    assert sorted(found) == [(f"q{i}", f"<think>\n</think>\nq{i}") for i in range(0, 10, 2)]


@pytest.mark.parametrize("folder", ["train", "partial-train"])
def test_yisang_is_read_from_the_branch_of_parquet_files(published, folder, capsys):
    rows = [{"instruction": f"질문 {i}", "response": f"답 {i}"} for i in range(4)]
    rows += [{"instruction": "질문", "response": ""}, {"instruction": None, "response": "답"}]
    files = {f"default/{folder}/000{n}.parquet": rows[3 * n : 3 * n + 3] for n in range(2)}
    published(files)
    found = every(YiSang("train")) + every(YiSang("val"))
    assert sorted(found) == [(f"질문 {i}", f"답 {i}") for i in range(4)]
    assert "YiSang: skipped 2 of 6 rows of KOREAson/YiSang-HighQuality" in capsys.readouterr().out


def test_yisang_buckets_of_the_korean_study_select_a_category(published):
    rows = [
        {"instruction": f"{kind} {i}", "response": "답", "category": kind}
        for i in range(20)
        for kind in ("Daily", "Code", "Science", "Medical", "Exams")
    ]
    published({"default/train/0000.parquet": rows})
    declared = json.loads(Path("dev/korean_public.json").read_text())["buckets"]
    for kind in ("Daily", "Code", "Science", "Medical"):
        source = declared[f"web-{kind.lower()}"]["source"]
        found = every(YiSang("train", source)) + every(YiSang("val", source))
        assert sorted(found) == sorted((f"{kind} {i}", "답") for i in range(20))


def test_any_columns_are_read_by_a_mixture(published):
    rows = [{"inquiry": f"q{i}", "reply": f"a{i}", "kind": f"k{i % 2}"} for i in range(8)]
    published({"more/own.parquet": rows, "dev.parquet": rows[:1]})
    spec = "hub:me/mine{prompt: inquiry, answer: reply, train: own, val: dev, where: kind=k1}=2"
    [part] = parse_mixture(spec)
    assert part.rows == 2
    [bucket] = buckets(spec)
    assert bucket.name == spec.removesuffix("=2")
    assert len(bucket.train) == 2 and all(q[1:] in "1357" for q, _ in every(bucket.train))
    with pytest.raises(ValueError, match="me/mine dev has no row .* kind=k1; .* values are k0"):
        len(bucket.val)  # its only row is of another kind


def test_val_names_the_held_out_file_of_a_task_with_splits_of_its_own(published):
    pair = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    other = [{"role": "user", "content": "other"}, pair[1]]
    files = {"train": [pair] * 9, "test": [pair] * 9, "held": [other] * 9}
    published({f"{n}.parquet": [{"messages": c} for c in chats] for n, chats in files.items()})
    [bucket] = buckets("smoltalk:me/mine{messages: messages, val: held}")
    assert every(bucket.val) == [("other", "a")] * 9


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (None, "hub needs a repository"),
        ("me/mine", "me/mine: which columns hold the conversations"),
        ("me/mine{prompt: inquiry}", "which columns hold the conversations"),
        ("me/mine{messages: a, prompt: b, answer: c}", "which columns hold the conversations"),
        ("me/mine{messages: }", "invalid source"),
        ("me/mine{message: a}", "use <owner>/<name>.*with the keys messages, prompt"),
        ("me/mine{messages: inquiry", "invalid source"),
    ],
)
def test_invalid_source_error_names_the_notation(source, message):
    with pytest.raises(ValueError, match=message):
        HubChats("train", source)


def test_missing_column_and_file_errors_list_what_there_is(published):
    published({"train.parquet": [{"inquiry": "q", "reply": "a"}], "x.csv": [{"a": 1, "b": 2}]})
    with pytest.raises(ValueError, match="has no column question, only inquiry, reply"):
        len(HubChats("train", "me/mine{prompt: question, answer: reply}"))
    with pytest.raises(ValueError, match="x.csv has no column c, only a, b"):
        len(HubChats("train", "me/mine{prompt: c, answer: a, train: x}"))
    with pytest.raises(ValueError, match="me/mine has no own among its files train.parquet"):
        len(HubChats("train", "me/mine{prompt: inquiry, answer: reply, train: own}"))
    with pytest.raises(ValueError, match="has one prompt; at least two"):
        len(HubChats("train", "me/mine{prompt: inquiry, answer: reply}"))
