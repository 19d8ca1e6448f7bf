"""Filters: which rows each drops, counts and samples."""

import pytest

from tasks import filters
from tasks.filters import apply_filters, parse_filters
from tests.test_augment import Animals


def row(asked="How many?", said="Four of them.", **more):
    messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]
    return {"messages": messages, **more}


def kept(spec, *rows, count=len):
    """Whether each row is kept, and the rows of the table of filters."""
    left, table = apply_filters(rows, parse_filters(spec), count)
    return [any(each is one for one in left) for each in rows], table["rows"]


WORDS = " ".join(f"word{i}" for i in range(200))
PROMPTS = [{"prompt": "2 + 2?", "gold": "4"}, {"messages": row()["messages"][:1], "gold": "4"}]


@pytest.mark.parametrize(
    ("spec", "keeps", "drops"),
    [
        ("length=10:100", [row("a" * 50, "")], [row("a" * 5, ""), row("a" * 500, "")]),
        ("longest=60%", [row("a", ""), row("a" * 5, "")], [row("a" * 50, "")]),
        (
            "no_image",
            map(row, ["Imagine a picture.", "Look at https://a.b"]),
            map(row, ["![x](y.png) what?", "See the image below.", "https://a.b/c", "첨부한 파일"]),
        ),
        (
            "script=hangul:30%",
            [row("안녕하세요 42!", "네, 안녕하세요"), row("12 + 5?", "17")],
            [row("안녕하세요", "Hello there, friend")],
        ),
        (
            "not_degenerate",
            [row(finish="stop"), row(said=WORDS), *PROMPTS],
            [row(said="word " * 50), row(said=""), row(finish="length")],
        ),
        (
            "verified",
            [row(said="so\n#### $1,200.00", gold=1200), row(said="Paris", gold="paris"), *PROMPTS],
            [row(said="#### 13", gold=12)],
        ),
        ("no_duplicate", [row("Hi there!"), row("Hi there!", "other")], [row("hi, THERE")]),
        (
            "no_near_duplicate",
            [row(WORDS), row(WORDS[:800] + "x " * 99), row("", ""), row("", "")],
            [row(WORDS.replace("word90", "other")), row(WORDS)],
        ),
        (
            "no_overlap",
            [row("Which animal lives here?")],
            [row(f"Tell me. {Animals('test').material(3)} Thanks.")],
        ),
        (
            "length_shift",
            [*(row("x" * (20 + i % 5), original="y" * 18) for i in range(30)), row()],
            [row("x" * n, original="y" * 18) for n in (1, 100)],
        ),
    ],
)
def test_filter_keeps_and_drops_rows(spec, keeps, drops, monkeypatch):
    monkeypatch.setattr(filters, "eval_task", lambda _: Animals("test"))
    keeps, drops = list(keeps), list(drops)
    assert kept(spec, *keeps, *drops)[0] == [True] * len(keeps) + [False] * len(drops)


def test_filters_apply_in_order_and_report_counts():
    rows = [row("a b", "c"), row("a " * 70, "d"), row("a " * 70, "d"), PROMPTS[0]]
    found, table = kept("length=2:9,no_duplicate,verified", *rows, count=lambda t: len(t.split()))
    assert found == [True, False, False, True]
    assert [line[1:4] for line in table] == [["2", "2", "0"], ["2", "0", "0"], ["2", "0", "2"]]
    assert table[0][0] == "length=2:9" and table[0][4].startswith("a a a")


@pytest.mark.parametrize(
    "spec", "nothing,length,length=5,script=klingon:3%,longest=x,longest=0.99".split(",")
)
def test_invalid_filter_is_named(spec):
    with pytest.raises(ValueError, match=f"invalid filter '{spec}'"):
        parse_filters(f"no_image,{spec}")
