"""Filters of conversations; questions in other styles, in new orders and with more options."""

import pytest

from nanochat.lab import filters
from nanochat.lab.filters import EXAMPLES, RULES, apply_filters, parse_filters
from tasks.augment import STYLES, augment
from tasks.base import LETTERS, MCQuestion, QuestionTask
from tasks.buckets import buckets
from tasks.questions import GSM8K
from tasks.registry import eval_task
from tests.hub_server import publish

ANIMALS = "cat dog horse mouse whale eagle salmon frog spider beetle".split()


class Animals(QuestionTask):
    """Three kinds of questions about ten animals."""

    name, splits, baseline = "Animals", ("train", "test"), 0.25

    def __len__(self):
        return 30

    def question(self, i):
        right = ANIMALS[i % 10]
        others = [ANIMALS[(i + n) % 10] for n in (1, 2, 3)]
        about = ("eats grass", "lives in water", "has many legs")[i // 10]
        options = [*others[: i % 4], right, *others[i % 4 :]]
        return MCQuestion(f"Which animal number {i} {about}?", tuple(options), i % 4)


TASK = Animals("train")


def augmented(how: str) -> QuestionTask:
    task = augment(Animals, how)("train")
    assert isinstance(task, QuestionTask)
    return task


@pytest.mark.parametrize(("how", "sizes"), [("order", {4}), ("options", {4, 5, 6, 7, 8, 9, 10})])
def test_right_option_survives_new_orders_and_options(how, sizes):
    task = augmented(how)
    questions = [task.question(i) for i in range(30)]
    for i, now in enumerate(questions):
        was = TASK.question(i)
        assert now.options[now.right] == was.options[was.right] and task.question(i) == now
        assert set(was.options) <= set(now.options) and len(set(now.options)) == len(now.options)
    assert {len(question.options) for question in questions} == sizes
    assert len({question.right for question in questions}) >= 4
    assert task.identity != TASK.identity


def test_every_style_is_asked_and_answered():
    task, used = augmented("styles"), set()
    for i, (asked, answer) in enumerate(task):
        letter = LETTERS[TASK.question(i).right]
        [instruction] = [each for each in STYLES if each in asked["content"]]  # no second one
        assert answer["content"] == STYLES[instruction].replace("X", letter)
        used.add(instruction)
    assert used == set(STYLES)


def test_ten_options_come_from_training_questions(tmp_path, monkeypatch):
    test = {"question": "물은?", "options": ["가", "나", "다", "라"], "solution": "3"}
    train = [
        dict(question=f"{n}번 물은?", answer=1, A="얼음", B=f"바다 {n}", C=f"강 {n}", D=f"비 {n}")
        for n in range(8)
    ]
    files = {"kmmlu_redux/test/0000.parquet": [test], "data/Math-train.csv": train}
    publish(files, tmp_path, monkeypatch)
    task = eval_task("KMMLU-Redux-10")
    assert isinstance(task, QuestionTask)
    asked = task.question(0)
    assert asked.options[asked.right] == "다" and task.baseline == 0.1
    assert len(set(asked.options)) == 10 and set("가나다라") <= set(asked.options)
    assert "얼음" not in asked.options  # right in another question


def test_augmented_bucket_has_its_name_and_needs_letters():
    declared = {"arc-styles": {"task": "arc_easy", "augment": "styles"}}
    [bucket] = buckets("arc-styles=20", declared)
    assert bucket.name == "arc-styles"
    with pytest.raises(ValueError, match="GSM8K is not answered with a letter"):
        augment(GSM8K, "order")


# ---- Filters -------------------------------------------------------------------------------------


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
        (
            "no_image",
            map(
                row,
                [
                    "Imagine a picture.",
                    "Look at https://a.b. Is there a cycle in the graph with these edges?",
                    "How do I take a screenshot on Windows?",
                    "Write an email with an attachment.",
                    "파일을 첨부하는 방법",
                ],
            ),
            map(
                row,
                [
                    "![x](y.png) what?",
                    "See the image below.",
                    "https://a.b/c",
                    "첨부한 파일",
                    "What is wrong in this screenshot?",
                ],
            ),
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
            [
                row(said="so\n#### $1,200.00", gold=1200),
                row(said="Paris", gold="paris"),
                row(said="3 + 15 is 18, I think.", gold=18),
                *PROMPTS,
            ],
            [row(said="#### 13", gold=12), row(said="In all, 18 of 20.", gold=18)],
        ),
        ("no_duplicate", [row("Hi there!"), row("3 + 4"), row("3 - 4")], [row("hi, THERE")]),
        (
            "no_near_duplicate",
            [row(WORDS), row(WORDS[:800] + "x " * 99), row("", ""), row("", "")],
            [row(WORDS.replace("word90", "other")), row(WORDS)],
        ),
        (
            "no_overlap",
            [row("Which animal lives here?")],
            [row(f"Tell me. {Animals('test')[3][0]['content']} Thanks.")],
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


@pytest.mark.parametrize("spec", "nothing,length,length=5,length=5:x,script=klingon:3%".split(","))
def test_invalid_filter_is_named(spec):
    with pytest.raises(ValueError, match=rf"invalid filter '{spec}'.*\blength=10:2000,"):
        parse_filters(f"no_image,{spec}")
    assert len(parse_filters(EXAMPLES)) == len(RULES)
