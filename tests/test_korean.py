"""Korean benchmarks and GPQA: small files of the published layouts."""

import pytest

from tasks.base import answer_text
from tasks.registry import BENCHMARKS, eval_task, make_task
from tests.published import publish

KMMLU = {"question": " 물은? ", "options": ["가", "나", "다", "라"], "solution": "3"}
HAERAE = {**dict(zip("abcde", "가나다라마", strict=True)), "question": "뜻은?"}
CLINICAL = {f"option_{c}": c * 2 for c in "ABCD"} | {"option_E": None}
CLICK = {"id": "x", "question": "누구?", "choices": ["왕", "신하", "백성", "승려"]}
TEN = "\n".join(f"{letter}: 보기 {letter}" for letter in "ABCDEFGHIJ")
GPQA = {"Question": "Which?", "Correct Answer": "yes "}
GPQA |= {f"Incorrect Answer {n}": f"no {n}" for n in (1, 2, 3)}

# key: file, good rows, the question, its options and the right one of the last row, bad rows
CHOICES = {
    "kmmlu": (
        "data/Criminal-Law-test.csv",
        [dict(question="물은?", answer=3, A="가", B="나", C="다", D="라")],
        ("물은?", ["가", "나", "다", "라"], "다"),
        [dict(question="물은?", answer=5, A="가", B="나", C="다", D="라")],
    ),
    "kmmlu_redux": (
        "kmmlu_redux/test/0000.parquet",
        [KMMLU],
        ("물은?", ["가", "나", "다", "라"], "다"),
        [{**KMMLU, "solution": "5"}, {**KMMLU, "solution": None}],
    ),
    "kmmlu_pro": (
        "kmmlu_pro/test/0000.parquet",
        [{**KMMLU, "options": [*KMMLU["options"], "마"], "solution": "5"}],
        ("물은?", ["가", "나", "다", "라", "마"], "마"),
        [{**KMMLU, "options": ["가"], "solution": "1"}],
    ),
    "hae_rae": (
        "data/HAERAE-Bench-v1-LW.csv",
        [{**HAERAE, "answer": "d"}],
        ("뜻은?", list("가나다라마"), "라"),
        [{**HAERAE, "answer": "f"}],
    ),
    "clinical_qa": (
        "data/train-00000-of-00001.parquet",
        [{"question": "진단은?", "exam": "", "options": CLINICAL, "answer": "B"}],
        ("진단은?", ["AA", "BB", "CC", "DD"], "BB"),
        [{"question": "진단은?", "exam": "", "options": CLINICAL, "answer": "E"}],
    ),
    "click": (
        "default/train/0000.parquet",
        [{**CLICK, "paragraph": "글", "answer": "백성"}],
        ("글\n\n누구?", ["왕", "신하", "백성", "승려"], "백성"),
        [{**CLICK, "paragraph": "", "answer": "없음"}],
    ),
    "kobalt": (
        "kobalt_v1/raw/0000.parquet",
        [{"Question": f"대화:\nA: 안녕\nB: 응\n\n{TEN}", "Answer": "J", "Level": 1}],
        ("대화:\nA: 안녕\nB: 응", [f"보기 {letter}" for letter in "ABCDEFGHIJ"], "보기 J"),
        [{"Question": "보기가 없다", "Answer": "J", "Level": 1}],
    ),
    "gpqa": (
        "gpqa_diamond.csv",
        [GPQA],
        ("Which?", ["no 1", "no 2", "no 3", "yes"], "yes"),
        [{**GPQA, "Incorrect Answer 2": ""}],
    ),
}


@pytest.mark.parametrize("key", CHOICES)
def test_choice_benchmark_reads_its_published_layout(key, tmp_path, monkeypatch, capsys):
    file, good, (text, options, right), bad = CHOICES[key]
    publish({file: [*good, *bad], "other/README.csv": [{"x": 1}]}, tmp_path / "hub", monkeypatch)
    task = eval_task(key)
    assert len(task) == len(good) and f"skipped {len(bad)} of" in capsys.readouterr().out
    [asked] = [task.question(i) for i in range(len(task))]  # type: ignore[attr-defined]
    assert asked.text == text and sorted(asked.options) == sorted(options)
    assert key == "gpqa" or list(asked.options) == options
    assert asked.options[asked.right] == right
    assert task.score(task[0], answer_text(task[0][-1])) == 1.0
    assert task.score(task[0], "Z") == 0.0 and task.baseline in (0.1, 0.2, 0.25)


@pytest.mark.parametrize("key", CHOICES)
def test_missing_column_error_lists_what_there_is(key, tmp_path, monkeypatch):
    file, [row], *_ = CHOICES[key]
    lacks = next(name for name in make_task(key, "test").columns if name in row)
    rows = [{"other": 1, **{name: x for name, x in row.items() if name != lacks}}]
    publish({file: rows}, tmp_path / "hub", monkeypatch)
    with pytest.raises(ValueError, match=f"has no column {lacks}.*, only other, "):
        len(eval_task(key))


def test_kmmlu_redux_with_ten_options(tmp_path, monkeypatch):
    train = [
        dict(question=f"{n}번 물은?", answer=1, A="얼음", B=f"바다 {n}", C=f"강 {n}", D=f"비 {n}")
        for n in range(8)
    ]
    files = {"kmmlu_redux/test/0000.parquet": [KMMLU], "data/Math-train.csv": train}
    publish(files, tmp_path / "hub", monkeypatch)
    task = eval_task("KMMLU-Redux-10")
    [asked] = [task.question(i) for i in range(len(task))]  # type: ignore[attr-defined]
    assert asked.options[asked.right] == "다" and task.baseline == 0.1
    assert len(set(asked.options)) == 10 and set("가나다라") <= set(asked.options)
    assert "얼음" not in asked.options  # right in another question
    assert "강" not in task.material(0) and "pool" in task.identity


MATH = {
    "mclm_ko": ("mt-math100.parquet", "ko", ["12", r"\frac{1}{2}"], [None]),
    "hrm8k": ("HRM8K/gsm8k_test.csv", "question", [18.0, 2.5], []),
}


@pytest.mark.parametrize("key", MATH)
def test_math_benchmark_reads_its_published_layout(key, tmp_path, monkeypatch):
    file, column, answers, bad = MATH[key]
    rows = [{column: f"문제 {n}", "answer": a, "en": "?"} for n, a in enumerate([*answers, *bad])]
    files = {file: rows}
    if key == "hrm8k":  # in another file, answers are text
        files["HRM8K/ksm_test.csv"] = [{column: "문제", "answer": "a+b", "en": "?"}]
    publish(files, tmp_path / "hub", monkeypatch)
    task = eval_task(key)
    assert len(task) == len(answers) + len(files) - 1 and task.kind == "generate"
    for conversation in task:
        assert task.score(conversation, answer_text(conversation[-1])) == 1.0
        assert task.score(conversation, "#### 7") == task.score(conversation, "12") == 0.0


@pytest.mark.parametrize(
    ("right", "answer", "score"),
    [
        ("18.0", "so 18\n#### 18", 1.0),
        ("1200", "#### 1,200.", 1.0),
        (r"\frac{1}{2}", r"#### $\dfrac{1}{2}$", 1.0),
        (r"\left(3, \frac{\pi}{2}\right)", r"#### (3,\frac{\pi}{2})", 1.0),
        ("18", "#### 1\n#### 81", 0.0),
        ("2", "2", 0.0),
        ("3", "#### 3개입니다.", 1.0),
        ("3", "#### 3 cm", 1.0),
        ("90", r"#### $90^\circ$", 1.0),
        (r"90^\circ", "#### 90", 1.0),
        (r"90^\circ", "#### 90°", 1.0),
        (r"90^\circ", "#### 80", 0.0),
        ("1200", r"#### \$1,200\text{ in all}", 1.0),
        ("5", r"#### 5\%", 1.0),
        ("3", "#### 3 (개)", 1.0),
        ("3", r"#### 3\text{ 개}입니다.", 1.0),
        ("3", "#### 3 m", 1.0),
        ("12", r"#### $12\text{ cm}^2$", 1.0),
        ("12", "#### 12 m²", 1.0),
        ("30", "#### 30 km/h", 1.0),
        ("25", "#### 25℃", 1.0),
        ("3", "#### 3π", 0.0),
        ("3", "#### 3½", 0.0),
        ("3", "#### 3만 원", 0.0),
        ("3", "#### 3분의 1", 0.0),
        ("2", "#### 2²", 0.0),
        ("2", "#### 2xy", 0.0),
        ("3", "#### 3 x", 0.0),
        ("3", "#### 3/4", 0.0),
        ("3", r"#### 3\pi", 0.0),
        ("3", "#### 3pi", 0.0),
        ("3", r"#### 3\sqrt{2}", 0.0),
        ("2", "#### 2^{10}", 0.0),
        ("12", "#### 12x+5", 0.0),
        ("12", "#### 12x", 0.0),
    ],
)
def test_final_answer_is_compared_by_value_or_formula(right, answer, score, tmp_path, monkeypatch):
    publish({"mt-math100.parquet": [{"ko": "?", "answer": right}]}, tmp_path / "hub", monkeypatch)
    task = eval_task("MCLM")
    assert task.score(task[0], answer) == score and task.answered(answer) == ("####" in answer)


def test_new_benchmarks_have_aliases_and_are_not_downloaded_by_default():
    assert eval_task("GPQA Diamond").name == "GPQA" and eval_task("LCB").name == "LiveCodeBench"
    assert eval_task("HAE-RAE Bench").name == "HAE-RAE"
    assert not {"gpqa", "hrm8k", "kmmlu_pro", "livecodebench"} & set(BENCHMARKS)
