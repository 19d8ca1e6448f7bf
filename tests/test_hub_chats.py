"""Conversations and preference pairs from files and the Hub: layouts, splits, invalid rows."""

import json

import pytest

from scripts.chat_dpo import Preferences
from tasks.base import Task, assistant, text, tool_call, user
from tasks.buckets import buckets
from tasks.chats import HOLD_OUT_EVERY, JSONL, Chats
from tasks.registry import TASKS, eval_task
from tests.hub_server import publish


def chat(question: str, answer: str = "a") -> list[dict]:
    return [user(question), assistant(answer)]


def questions(*splits: Task) -> list[str]:
    """The first message of each conversation, sorted."""
    return sorted(conversation[0]["content"] for task in splits for conversation in task)


def thought(question: str, answer: str = "a", role: str = "gpt") -> dict:
    pair = [{"from": "human", "value": question}, {"from": role, "value": answer}]
    return {"domain": "math", "conversations": pair}


def passed(question: str, **change) -> dict:
    return {"question": question, "response": "a", "is_passed": True, **change}


WRONG = [3, [], [1], chat("q")[1:], [user("q"), assistant([{"type": "image", "text": "q"}])]]
WRONG += [[None, *chat("q")], json.dumps(chat("q")), chat("q")[:1], chat("\ud800")]
WRONG += [[{"role": ["user"], "content": "q"}, assistant("a")], chat("q", ""), None]
# task: file, function that makes a row, rows that are no valid conversations of the task
LAYOUTS = {
    "smoltalk": ("train.jsonl", lambda q: {"messages": chat(q)},
        [None, [1], {"other": 1}, *({"messages": wrong} for wrong in WRONG)]),
    "openthoughts3": ("data/train-00000-of-00120.parquet", thought,
        [thought("q", ""), thought("q", "a", "system"), {**thought("q"), "conversations": None}]),
    "rstar_coder": ("seed_sft/data-00001-of-00020.parquet", passed,
        [passed("q", is_passed=False), passed("q", response="")]),
    "yisang": ("default/partial-train/0000.parquet", lambda q: {"instruction": q, "response": "a"},
        [{"instruction": "q", "response": None}]),
}  # fmt: skip


@pytest.mark.parametrize("key", LAYOUTS)
def test_R27_published_chats_are_read_and_split(key, tmp_path, monkeypatch, capsys):
    file, make, bad = LAYOUTS[key]
    known = [f"q{i}" for i in range(40)]
    files = {file: [*map(make, known), *bad], "data/train-00010-of-00120.parquet": [make("other")]}
    if key == "smoltalk":
        files = {file: [*map(make, known[1:]), *bad], "test.jsonl": [make("q0")]}
    publish(files, tmp_path, monkeypatch)
    train, val = TASKS[key]("train"), TASKS[key]("val")
    assert questions(train, val) == sorted(known) and 1 <= len(val) < len(train)
    assert train[0][1] == assistant("a") and (key != "smoltalk" or questions(val) == ["q0"])
    assert f"{train.name}: skipped {len(bad)} of " in capsys.readouterr().out
    with pytest.raises(ValueError, match="training-only"):
        eval_task(key)


def test_any_columns_files_and_rows_are_selected_in_a_mixture(tmp_path, monkeypatch, capsys):
    rows = [{"inquiry": f"q{i}", "reply": "a" * 3_000_000, "kind": f"k{i % 2}"} for i in range(4)]
    publish({"more/own.csv": rows, "held.parquet": rows[1:2]}, tmp_path, monkeypatch)
    columns = "prompt: inquiry, answer: reply, train: own, val: held"
    [hub, smoltalk] = buckets(
        f"hub:me/mine{{{columns}, where: kind=k1}}=2,smoltalk:me/mine{{{columns}}}"
    )
    assert questions(hub.train) == ["q1", "q3"] and questions(hub.val) == ["q1"]
    assert "skipped 2 of 4 rows of me/mine: kind is k0" in capsys.readouterr().out
    assert questions(smoltalk.val) == ["q1"]  # instead of the task's own file


def test_other_repository_of_a_known_task_has_its_own_files(tmp_path, monkeypatch):
    rows = [{"messages": chat(f"q{i}", "a")} for i in range(40)]
    publish({"train.jsonl": rows}, tmp_path, monkeypatch)
    [bucket] = buckets("smoltalk:me/mine")
    assert len(bucket.train) + len(bucket.val) == 40 and len(bucket.val) < 9


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("me/mine", "no conversation in the fields inquiry, reply; read are"),
        ("me/mine{message: a}", "<owner>/<name>.*with the keys answer, messages"),
        (
            "me/mine{prompt: inquiry, answer: reply, train: own}",
            r"own as no file among \[.train.par",
        ),
        ("me/mine{prompt: inquiry, answer: reply, where: inquiry=x}", "inquiry is q"),
        ("me/mine{prompt: inquiry, answer: reply}", "me/mine has one prompt; at least two"),
    ],
)
def test_wrong_source_error_names_what_there_is(tmp_path, monkeypatch, source, message):
    files = {"train.parquet": [{"inquiry": "q", "reply": "a"}] * 3}
    publish(files, tmp_path, monkeypatch)
    with pytest.raises(ValueError, match=message):
        len(Chats("train", source))


# ---- A file of your own --------------------------------------------------------------------------


def write_lines(path, *lines: object) -> str:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


@pytest.mark.parametrize("count", [2, 400])
def test_R27_file_of_conversations_has_disjoint_splits(tmp_path, count):
    lines = [chat(f"q{i}", answer) for i in range(count) for answer in "ab"]
    other = thought("q0", "b")["conversations"]  # {from, value}
    path = write_lines(tmp_path / "own.jsonl", {"messages": lines[0]}, other, *lines[2:])
    train, val = questions(JSONL("train", path)), questions(JSONL("val", path))
    assert train and val and len(train) + len(val) == 2 * count and not {*train} & {*val}
    assert len(val) == 2 * max(1, count // HOLD_OUT_EVERY)


# ---- Preference pairs ----------------------------------------------------------------------------

GOOD, BAD = [user("Hi"), assistant("Yes.")], [user("Hi"), assistant("No.")]


def row(i: int = 0, chosen="Yes.", rejected="No.") -> dict:
    return {"prompt": f"Is {i} a number?", "chosen": chosen, "rejected": rejected}


PROMPT, PARTS = [*GOOD, user("2*3?")], [*tool_call("2*3", "6"), text("6")]


@pytest.mark.parametrize(
    ("line", "pair"),
    [
        ({"prompt": "Hi", "chosen": "Yes.", "rejected": "No."}, [GOOD, BAD]),
        ({"prompt": "Hi", "chosen": GOOD, "rejected": BAD}, [GOOD, BAD]),  # as UltraFeedback
        ({"chosen": GOOD, "rejected": BAD}, [GOOD, BAD]),
        (
            {"prompt": PROMPT, "chosen": [assistant(PARTS)], "rejected": "7"},
            [[*PROMPT, assistant(PARTS)], [*PROMPT, assistant("7")]],
        ),
    ],
)
def test_every_layout_gives_a_pair(tmp_path, line, pair):
    path = write_lines(tmp_path / "pairs.jsonl", *map(row, range(9)), line)
    assert pair in Preferences("train", path).items + Preferences("val", path).items


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"prompt": "Hi", "chosen": "Yes."}, "no rejected among the fields prompt, chosen"),
        (row(chosen="No."), "chosen and rejected are equal"),
        ({**row(), "chosen": GOOD}, "different prompts"),
    ],
)
def test_invalid_pair_is_reported_with_file_and_reason(tmp_path, line, message):
    path = write_lines(tmp_path / "pairs.jsonl", row(), line)
    with pytest.raises(ValueError, match=rf"pairs\.jsonl, line 2: .*{message}"):
        len(Preferences("train", path))


def test_R27_pairs_of_a_prompt_are_in_one_split(tmp_path):
    lines = [row(i, chosen) for i in range(100) for chosen in ("Yes.", "It is.")]
    path = write_lines(tmp_path / "pairs.jsonl", *lines)
    train, val = Preferences("train", path), Preferences("val", path)
    assert (len(train), len(val)) == (190, 10)  # one prompt in 20
    assert not {str(c[0]) for c in train} & {str(c[0]) for c in val}
    other = write_lines(tmp_path / "other.jsonl", *lines[1:], row(0, "Yes.", "Never."))
    assert Preferences("train", other).identity != train.identity


def test_invalid_rows_of_the_hub_are_skipped_and_counted(tmp_path, monkeypatch):
    empty = [user("Hi"), assistant("")]
    picked = ([GOOD, BAD], (BAD, BAD), (empty, GOOD), (BAD, GOOD))
    rows = [{"prompt": "Hi", "chosen": a, "rejected": b} for a, b in picked]
    end = "00000-of-00001-f841e7bac70c0ce7.parquet"  # as of UltraFeedback Binarized
    files = {f"data/test_prefs-{end}": rows, f"data/train_prefs-{end}": rows[:1]}
    publish({f"data/train_gen-{end}": [], **files}, tmp_path, monkeypatch)
    train, val = (Preferences(split) for split in ("train", "val"))
    assert GOOD in val and BAD in val and len(val) == 2 and list(train) == [GOOD]
