"""Conversations from Hub repositories: published layouts, skipped rows, and the notation."""

import json
from collections.abc import Callable

import pytest

from tasks.buckets import buckets
from tasks.hub_chats import HubChats, OpenThoughts3
from tests.published import publish

CHAT = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]


@pytest.fixture
def published(tmp_path, monkeypatch) -> Callable:
    return lambda files: publish(files, tmp_path / "hub", monkeypatch)


def pairs(*splits) -> list[tuple[str, str]]:
    """Question and answer of each conversation, sorted."""
    return sorted((c[0]["content"], c[1]["content"]) for task in splits for c in task)


def thought(question: str, answer: str, role: str = "gpt") -> dict:
    pair = [{"from": "human", "value": question}, {"from": role, "value": answer}]
    return {"domain": "math", "conversations": pair}


def test_openthoughts3_is_read_and_its_bad_rows_are_counted(published, capsys):
    rows = [thought(f"q{i}", f"<think>\n\n</think>\n{i}") for i in range(40)]
    bad = [thought("q", ""), thought("q", "a", "system"), {**rows[0], "conversations": None}]
    files = {"data/train-00000-of-00120.parquet": [*rows, *bad]}
    published({**files, "data/train-00010-of-00120.parquet": rows})  # the eleventh file
    train, val = OpenThoughts3("train"), OpenThoughts3("val")
    expected = [(f"q{i}", f"<think>\n\n</think>\n{i}") for i in range(40)]
    assert pairs(train, val) == sorted(expected) and len(val) >= 1
    assert train.left_out == train.identity["left_out"] == 3
    assert "skipped 3 of 43 rows of open-thoughts/OpenThoughts3-1.2M" in capsys.readouterr().out


def test_lines_that_are_no_conversations_are_skipped_and_counted(published, capsys):
    good = [{"messages": [{**CHAT[0], "content": f"q{i}"}, CHAT[1]]} for i in range(30)]
    wrong_user = {"role": ["user"], "content": "q"}
    contents = [3, None, [], [1], [None, *CHAT], json.dumps(CHAT), CHAT[:1], [wrong_user, CHAT[1]]]
    contents += [[{**CHAT[0], "content": wrong}, CHAT[1]] for wrong in (None, "", "\ud800")]
    bad = [None, [1], {"other": 1}, *({"messages": content} for content in contents)]
    published({f"train-0000{n}-of-00002.jsonl": [*bad, *good][n::2] for n in range(2)})
    train, val = (HubChats(split, "me/mine{messages: messages}") for split in ("train", "val"))
    assert pairs(train, val) == sorted((f"q{i}", "a") for i in range(30))
    assert train.left_out == len(bad)
    assert f"Hub: skipped {len(bad)} of {30 + len(bad)} rows of me/mine" in capsys.readouterr().out


def test_any_columns_files_and_rows_are_selected_in_a_mixture(published, capsys):
    rows = [{"inquiry": f"q{i}", "reply": f"a{i}", "kind": f"k{i % 2}"} for i in range(8)]
    rows += [{"inquiry": "", "reply": "a", "kind": kind} for kind in ("k0", "k1")]
    published({"more/own.parquet": rows, "held.parquet": rows[1:2]})
    columns = "prompt: inquiry, answer: reply, train: own, val: held"
    [bucket] = buckets(f"hub:me/mine{{{columns}, where: kind=k1}}=2")
    assert len(bucket.train) == 2 and all(q[1:] in "1357" for q, _ in pairs(bucket.train))
    assert pairs(bucket.val) == [("q1", "a1")]
    assert "skipped 1 of 5 rows of me/mine own: message 1 is empty" in capsys.readouterr().out
    [bucket] = buckets(f"smoltalk:me/mine{{{columns}}}")
    assert pairs(bucket.val) == [("q1", "a1")]  # instead of the task's own file


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (None, "hub needs a repository"),
        ("me/mine", "me/mine: which columns hold the conversations"),
        ("me/mine{message: a}", "use <owner>/<name>.*with the keys messages, prompt"),
        ("me/mine{prompt: question, answer: reply}", "no column question, only inquiry, reply"),
        ("me/mine{prompt: c, answer: a, train: x}", "x.csv has no column c, only a, b"),
        ("me/mine{prompt: inquiry, answer: reply, train: own}", "no own among its files train.par"),
        (
            "me/mine{prompt: inquiry, answer: reply, where: inquiry=x}",
            "no row .* inquiry=x; .* values are q",
        ),
        ("me/mine{prompt: inquiry, answer: reply}", "has one prompt; at least two"),
    ],
)
def test_wrong_source_gets_an_error_that_names_what_there_is(published, source, message):
    published({"train.parquet": [{"inquiry": "q", "reply": "a"}], "x.csv": [{"a": 1, "b": 2}]})
    with pytest.raises(ValueError, match=message):
        len(HubChats("train", source))


@pytest.mark.xfail(strict=True, reason="a CSV cell must fit in a block of 1 MB")
def test_csv_cell_of_several_megabytes_is_read(published):
    published({"train.csv": [{"q": "one", "a": "x" * 3_000_000}, {"q": "two", "a": "b"}]})
    source = "me/mine{prompt: q, answer: a}"
    assert len(pairs(HubChats("train", source), HubChats("val", source))) == 2
