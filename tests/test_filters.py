"""Filters: dropped and kept rows, counts and samples."""

import pytest

from tasks.filters import apply_filters, parse_all
from tests.test_augment import Animals


def row(asked="How many?", said="Four of them.", **more):
    messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]
    return {"messages": messages, **more}


def kept(spec, *rows, count=len, benchmarks=()):
    """Whether each row is kept, and the table's rows of the filters."""
    left, table = apply_filters(rows, parse_all(spec, count, benchmarks))
    return [any(each is one for one in left) for each in rows], table["rows"]


def test_length_shift_drops_unusual_translations():
    usual = [row("x" * (20 + i % 5), original="y" * 18) for i in range(30)]
    odd = [row("x" * 100, original="y" * 18), row("x", original="y" * 18)]
    found, [done] = kept("length_shift", *usual, *odd, row("no original"))
    assert found == [True] * 30 + [False, False, True]
    assert done[1:4] == ["31", "2", "1"]
    assert done[4].startswith("xxx")


def test_length_filters_use_the_given_counting_function():
    rows = [row("a" * n, "") for n in (5, 50, 500)]
    assert kept("length=10:100", *rows)[0] == [False, True, False]
    assert kept("longest=60%", *rows)[0] == [True, True, False]
    assert kept("longest=0%", *rows)[0] == [True, False, False]
    words = [row("a b c", "d"), row("a " * 40, "d")]
    assert kept("length=2:10", *words, count=lambda text: len(text.split()))[0] == [True, False]


def test_prompts_that_need_an_image_are_dropped():
    needs = ["![x](y.png) what is it?", "See the image below.", "<img src=a>", "https://a.b/c",
             "첨부한 파일을 보세요", "다음 그림을 보고 답하시오"]  # fmt: skip
    fine = [
        "Imagine a picture.",
        "How do I attach a file in Python?",
        "Look at https://a.b and say",
    ]
    assert kept("no_image", *map(row, needs), *map(row, fine))[0] == [False] * 6 + [True] * 3


def test_script_filter_checks_prompt_and_answer():
    rows = [
        row("안녕하세요 42!", "네, 안녕하세요"),
        row("안녕하세요", "Hello there, friend"),
        row("Hello", "안녕하세요"),
        row("12 + 5?", "17"),
    ]
    found, [done] = kept("script=hangul:30%", *rows)
    assert found == [True, False, False, True] and done[3] == "1"


def test_degenerate_answers_are_dropped():
    rows = [
        row(said="word " * 50),
        row(said=""),
        row(said="It was cut off", finish="length"),
        row(said="It ended", finish="stop"),
        row(said=" ".join(f"w{i}" for i in range(50))),
    ]
    assert kept("not_degenerate", *rows)[0] == [False, False, False, True, True]


@pytest.mark.parametrize("rule", ["not_degenerate", "verified"])
def test_rows_without_an_answer_are_kept_and_not_judged(rule):
    prompts = {"prompt": "2 + 2?", "gold": "4"}, {"messages": row()["messages"][:1], "gold": "4"}
    found, [done] = kept(rule, *prompts)
    assert found == [True, True] and done[3] == "2"


def test_answers_are_verified_against_gold():
    rows = [
        row(said="3 * 4 = 12\n#### 12", gold="12"),
        row(said="#### 1,200", gold=1200),
        row(said="#### 13", gold="12"),
        row(said="Paris", gold="paris"),
        row(said="London", gold="Paris"),
        row(said="anything"),
    ]
    found, [done] = kept("verified", *rows)
    assert found == [True, True, False, True, False, True] and done[3] == "1"


@pytest.mark.parametrize(
    "said, gold, right",
    [
        ("#### 1/2", "1/3", False),
        ("#### 1/3", "1/3", True),
        ("#### 3", "3x+5", False),
        ("#### 10:30", "10:45", False),
        ("that is $1,200.", "1200", False),  # text around the number
        ("#### $1,200.00", "1200", True),
        ("-3", "3", False),
    ],
)
def test_answer_must_equal_the_gold_number_or_text(said, gold, right):
    assert kept("verified", row(said=said, gold=gold))[0] == [right]


def test_near_duplicates_are_dropped():
    words = [f"word{i}" for i in range(200)]
    nearly = [*words[:90], "other", *words[91:]]
    half = [*words[:100], *(f"new{i}" for i in range(100))]
    rows = [row(" ".join(text)) for text in (words, nearly, half, words)] + [row("", "")] * 2
    assert kept("no_near_duplicate", *rows)[0] == [True, False, True, False, True, True]


def test_first_of_duplicate_rows_is_kept():
    rows = [row("Hi there!"), row("hi, THERE"), row("Hi there!", "other")]
    assert kept("no_duplicate", *rows)[0] == [True, False, True]


def test_rows_with_a_benchmark_item_are_dropped():
    item = Animals("test").material(3)
    rows = [row(f"Tell me. {item} Thanks."), row("Which animal lives here?")]
    assert kept("no_overlap", *rows, benchmarks=[Animals("test")])[0] == [False, True]


def test_filters_apply_and_report_in_order():
    left, table = apply_filters(
        [row("a" * 9), row("a" * 90), row("a" * 90)],
        parse_all("length=20:500,no_duplicate", len, ()),
    )
    assert [row[:3] for row in table["rows"]] == [
        ["length=20:500", "3", "0"],
        ["no_duplicate", "2", "1"],
    ]
    assert len(left) == 2


@pytest.mark.parametrize(
    "spec",
    [
        "nothing",
        "length",
        "length=5",
        "script=klingon:3%",
        "longest=x",
        "longest=0.99",
        "script=hangul:0.3",
    ],
)
def test_invalid_filters_raise(spec):
    with pytest.raises(ValueError, match="invalid filter"):
        parse_all(spec, len, ())
