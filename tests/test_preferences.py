"""Preference pairs: layouts, invalid lines, held-out prompts, rows of the Hub."""

import pytest

from tasks.base import assistant, text, tool_call, user
from tasks.preferences import Preferences
from tests.published import publish
from tests.test_hub_chats import write_lines

GOOD, BAD = [user("Hi"), assistant("Yes.")], [user("Hi"), assistant("No.")]


def row(i: int = 0, chosen="Yes.", rejected="No.") -> dict:
    return {"prompt": f"Is {i} a number?", "chosen": chosen, "rejected": rejected}


PROMPT, PARTS = [*GOOD, user("2*3?")], [*tool_call("2*3", "6"), text("6")]


@pytest.mark.parametrize(
    ("line", "pair"),
    [
        ({"prompt": "Hi", "chosen": "Yes.", "rejected": "No."}, (GOOD, BAD)),
        ({"prompt": "Hi", "chosen": GOOD, "rejected": BAD}, (GOOD, BAD)),  # as UltraFeedback
        ({"chosen": GOOD, "rejected": BAD}, (GOOD, BAD)),
        (
            {"prompt": PROMPT, "chosen": [assistant(PARTS)], "rejected": "7"},
            ([*PROMPT, assistant(PARTS)], [*PROMPT, assistant("7")]),
        ),
    ],
)
def test_every_layout_gives_a_pair(tmp_path, line, pair):
    path = write_lines(tmp_path / "pairs.jsonl", *map(row, range(9)), line)
    assert pair in Preferences("train", path).items + Preferences("val", path).items


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"prompt": "Hi", "chosen": "Yes."}, "KeyError.'rejected'"),
        ({**row(), "rejected": ""}, "a message is empty"),
        (row(chosen="No."), "chosen and rejected are equal"),
        ({**row(), "chosen": GOOD}, "different prompts"),
    ],
)
def test_invalid_line_is_reported_with_file_and_reason(tmp_path, line, message):
    path = write_lines(tmp_path / "pairs.jsonl", row(), line)
    with pytest.raises(ValueError, match=rf"pairs\.jsonl, line 2: .*{message}"):
        len(Preferences("train", path))


def test_R27_pairs_of_a_prompt_are_in_one_split(tmp_path):
    lines = [row(i, chosen) for i in range(100) for chosen in ("Yes.", "It is.")]
    path = write_lines(tmp_path / "pairs.jsonl", *lines)
    train, val = Preferences("train", path), Preferences("val", path)
    assert (len(train), len(val)) == (190, 10)  # one prompt in 20
    assert not {str(c[0]) for c in train} & {str(c[0]) for c in val}
    assert list(val) == [pair.chosen for pair in val.items]
    other = write_lines(tmp_path / "other.jsonl", *lines[1:], row(0, "Yes.", "Never."))
    assert Preferences("train", other).identity != train.identity


def test_invalid_rows_of_the_hub_are_skipped_and_counted(tmp_path, monkeypatch):
    empty = [user("Hi"), assistant("")]
    picked = ((GOOD, BAD), (BAD, BAD), (empty, GOOD), (BAD, GOOD))
    rows = [{"prompt": "Hi", "chosen": a, "rejected": b} for a, b in picked]
    end = "00000-of-00001-f841e7bac70c0ce7.parquet"  # as of UltraFeedback Binarized
    files = {f"data/test_prefs-{end}": rows, f"data/train_prefs-{end}": rows[:1]}
    publish({f"data/train_gen-{end}": [], **files}, tmp_path, monkeypatch)
    train, val = (Preferences(split, "own/pairs") for split in ("train", "val"))
    assert GOOD in val and BAD in val and len(val) == 2 == val.num_skipped and list(train) == [GOOD]
