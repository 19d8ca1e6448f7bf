"""Preference pairs: formats, invalid lines, held-out prompts, rows of the Hub."""

import json

import pytest

from tasks import hub, preferences
from tasks.base import assistant, find_error, text, tool_call, user
from tasks.hub import match_files
from tasks.jsonl import HOLD_OUT_EVERY
from tasks.preferences import STEMS, Preferences, parse_pair

SYSTEM = {"role": "system", "content": "Be brief."}


def row(i: int = 0, chosen="Yes.", rejected="No.") -> dict:
    return {"prompt": f"Is {i} a number?", "chosen": chosen, "rejected": rejected}


def write_lines(path, *lines: object) -> str:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def test_all_layouts_give_the_same_pair():
    good, bad = [user("Hi"), assistant("Yes.")], [user("Hi"), assistant("No.")]
    for each in (
        {"prompt": "Hi", "chosen": "Yes.", "rejected": "No."},
        {"prompt": [user("Hi")], "chosen": "Yes.", "rejected": [assistant("No.")]},
        {"prompt": "Hi", "chosen": good[1:], "rejected": bad[1:]},
        {"prompt": "Hi", "chosen": good, "rejected": bad},  # UltraFeedback Binarized
        {"chosen": good, "rejected": bad},
    ):
        assert parse_pair(each) == (good, bad)


def test_prompt_may_have_several_turns_and_answer_may_call_tools():
    prompt = [SYSTEM, user("Hi"), assistant("Hello."), user("2*3?")]
    parts = [*tool_call("2*3", "6"), text("6")]
    pair = parse_pair({"prompt": prompt, "chosen": [assistant(parts)], "rejected": "7"})
    assert pair.chosen == [*prompt, assistant(parts)] and pair.rejected[-1]["content"] == "7"
    assert find_error(pair.chosen) is None


@pytest.mark.parametrize(
    "line, message",
    [
        (["Hi"], "expected"),
        ({"prompt": "Hi", "chosen": "Yes."}, "expected"),
        ({"chosen": "Yes.", "rejected": "No."}, "chosen: roles must alternate"),
        ({**row(), "rejected": ""}, "rejected: message 2 is empty"),
        ({**row(), "chosen": 7}, "chosen: expected a list"),
        ({**row(), "chosen": [user("Hi"), user("Hi")]}, "chosen: roles"),
        (row(chosen="No."), "chosen and rejected are equal"),
        ({**row(), "chosen": [user("Hi"), assistant("Yes.")]}, "different prompts"),
    ],
)
def test_invalid_line_is_reported_with_file_and_reason(tmp_path, line, message):
    path = write_lines(tmp_path / "pairs.jsonl", row(), line)
    with pytest.raises(ValueError, match=rf"pairs\.jsonl, line 2: .*{message}"):
        len(Preferences("train", path))


def test_pairs_of_a_prompt_are_in_one_split(tmp_path):
    lines = [row(i, chosen) for i in range(400) for chosen in ("Yes.", "It is.")]
    path = write_lines(tmp_path / "pairs.jsonl", *lines)
    train, val = Preferences("train", path), Preferences("val", path)
    prompts = [{c[0]["content"] for c in split} for split in (train, val)]
    assert len(train) + len(val) == 800 and not prompts[0] & prompts[1]
    assert 0.5 < len(prompts[1]) * HOLD_OUT_EVERY / 400 < 2
    assert [pair for pair in map(parse_pair, lines) if pair in train.pairs] == train.pairs
    assert list(val) == [pair.chosen for pair in val.pairs]


def test_file_needs_two_prompts_and_must_exist(tmp_path):
    path = write_lines(tmp_path / "pairs.jsonl", row(), row(chosen="It is."))
    with pytest.raises(ValueError, match=r"pairs\.jsonl has one prompt; at least two"):
        len(Preferences("val", path))
    with pytest.raises(FileNotFoundError, match="nowhere.jsonl"):
        len(Preferences("train", str(tmp_path / "nowhere.jsonl")))
    with pytest.raises(ValueError, match="invalid hub repository 'nowhere'"):
        len(Preferences("train", "nowhere"))


def test_identity_changes_with_a_rejected_answer(tmp_path):
    one = write_lines(tmp_path / "one.jsonl", row(1), row(2))
    two = write_lines(tmp_path / "two.jsonl", row(1), row(2, rejected="Never."))
    assert Preferences("train", one).identity != Preferences("train", two).identity


def test_invalid_rows_of_the_hub_are_skipped_and_counted(monkeypatch):
    chats = [[user("Hi"), assistant(words)] for words in ("Yes.", "No.", "")]
    rows = [
        {"prompt": "Hi", "chosen": chats[a], "rejected": chats[b]}
        for a, b in ((0, 1), (1, 1), (2, 0), (1, 0))
    ]

    def load_split(repo, stem, columns):
        table = hub.pa.Table.from_pylist(rows).select(list(columns))
        return hub.TaskData(hub.TaskRows(table), f"{repo} {stem}", {})

    monkeypatch.setattr(preferences, "load_split", load_split)
    val = Preferences("val", "own/pairs")
    assert [p.chosen for p in val.pairs] == [chats[0], chats[1]] == list(val)
    assert val.num_skipped == 2
    assert val.origin["commit"] == f"own/pairs {STEMS['val']}"


def test_stems_match_files_of_ultrafeedback_binarized():
    names = [f"{kind}_{what}" for kind in ("train", "test") for what in ("gen", "prefs", "sft")]
    for suffix in ("", "-f841e7bac70c0ce7"):
        files = [f"data/{name}-00000-of-00001{suffix}.parquet" for name in names]
        assert match_files(STEMS["train"], files, "own/pairs") == [files[1]]
        assert match_files(STEMS["val"], files, "own/pairs") == [files[4]]
