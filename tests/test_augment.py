"""Augmented questions: correct answers survive new formats, orders and extra options."""

import pytest

from tasks.augment import STYLES, MoreOptions, Reordered, Styled, read_letter
from tasks.base import LETTERS, MCQuestion, QuestionTask
from tasks.buckets import buckets
from tasks.gsm8k import GSM8K
from tasks.registry import eval_task, make_task
from tests.published import publish

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


@pytest.mark.parametrize(
    ("task", "sizes"), [(Reordered(TASK), {4}), (MoreOptions(TASK), {4, 5, 6, 7, 8, 9, 10})]
)
def test_right_option_survives_new_orders_and_options(task, sizes):
    questions = [task.question(i) for i in range(30)]
    for i, now in enumerate(questions):
        was = TASK.question(i)
        assert now.options[now.right] == was.options[was.right] and task.question(i) == now
        assert set(was.options) <= set(now.options) and len(set(now.options)) == len(now.options)
    assert {len(question.options) for question in questions} == sizes
    assert len({question.right for question in questions}) >= 4
    assert task.identity != TASK.identity


def test_every_style_is_parsed_and_scored():
    task, used = Styled(TASK), set()
    for i, (asked, answer) in enumerate(task):
        letter = LETTERS[TASK.question(i).right]
        [instruction] = [each for each in STYLES if each in asked["content"]]  # no second one
        assert answer["content"] == STYLES[instruction].replace("X", letter)
        for form in STYLES.values():  # any format is accepted
            scores = [task.score([asked, answer], form.replace("X", x)) for x in (letter, "Z")]
            assert scores == [1, 0]
        used.add(instruction)
    assert used == set(STYLES)
    assert read_letter("A, or maybe (B) or Option C is correct") is read_letter("no idea") is None


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
    assert "강" not in task.material(0)
    with pytest.raises(ValueError, match="no split 'train'; it has val, test"):
        make_task("arc_easy_10", "train")


def test_augmented_bucket_has_its_tag_and_needs_letters():
    declared = {"arc-styles": {"task": "arc_easy", "augment": "styles"}}
    [bucket] = buckets("arc-styles=20", declared)
    assert bucket.name == "arc-styles" and bucket.tags.augmented == "styles"
    with pytest.raises(ValueError, match="augment 'x' is not one of styles, order, options"):
        buckets("y", {"y": {"task": "arc_easy", "augment": "x"}})
    with pytest.raises(ValueError, match="GSM8K is not answered with a letter"):
        Reordered(GSM8K("train"))
