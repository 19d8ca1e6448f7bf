"""Tasks: a recorded row of every dataset, scoring, mixtures, spelling and disjoint splits."""

import json
import re
from collections import Counter
from typing import NamedTuple

import pytest

from nanochat.common import MissingInput, fingerprint
from scripts import chat_rl, chat_sft, mid_train
from scripts.chat_eval import ChatEval, default_tasks, why_unavailable
from tasks import base, registry
from tasks.base import Mixture, NumberTask, assistant, final_value, text, tool_call, user
from tasks.buckets import buckets, chat_mixture, held_out_questions, rl_questions
from tasks.hub import HubTask
from tasks.questions import AQuA, AQuALetter
from tasks.registry import eval_task, key_of
from tasks.spelling import SimpleSpelling, SpellingBee
from tasks.world.task import WorldProblems
from tests.hub_server import publish

# ---- Every scored dataset: a row as published, the conversation and the answers expected from it -


class Case(NamedTuple):
    file: str
    row: dict
    asked: str
    """Question without its instruction."""
    answer: str | list
    wrong: list[str]
    bad: list[dict] = []
    """Changes of the row that make it unusable."""


KMMLU = {"question": " 물은? ", "options": ["가", "나", "다", "라"], "solution": "3"}
FOUR = "물은?\n- 가=A\n- 나=B\n- 다=C\n- 라=D"
HAERAE = {"question": "뜻은?", **dict(zip("abcde", "가나다라마", strict=True)), "answer": "d"}
CLINICAL = {"question": "진단은?", "exam": "", "answer": "B"}
CLINICAL["options"] = str({f"option_{c}": c * 2 for c in "ABCD"} | {"option_E": None})
CLICK = {"paragraph": "글", "question": "누구?", "choices": ["왕", "신하"], "answer": "신하"}
KOBALT = {"Question": "대화:\nA: 안녕\nB: 응\n\nA: 하나\nB: 둘\nC: 셋", "Answer": "C"}
GPQA = {"Question": "Which?", "Correct Answer": "yes "}
GPQA |= {f"Incorrect Answer {n}": f"no {n}" for n in (1, 2, 3)}
ARC_CHOICES = {"text": ["ash", "bog", "cup"], "label": ["1", "2", "3"]}
ARC = {"question": "Which burns?", "answerKey": "3", "choices": ARC_CHOICES}
MMLU = {"question": " Which? ", "choices": ["p", "q", "r", "s"], "answer": 1}
GSM8K = {"question": "How many?", "answer": "It is 2*3=<<2*3=6>>6.\n#### 6"}
GSM8K_PARTS = [text("It is 2*3="), *tool_call("2*3", "6"), text("6.\n#### 6")]
AQUA = {"question": "How far?", "rationale": "Answer: B would be too short. \n", "correct": "D",
    "options": ["A)1 (one)", "B)2", "C)3", "D)4", "E)5"]}  # fmt: skip
FIVE = "How far?\n- 1 (one)=A\n- 2=B\n- 3=C\n- 4=D\n- 5=E"
LETTER = [" ", "Z", "c", "A", "Answer: C"]
MARKED = ["Answer: D, or rather\nAnswer: A", "answer: D", "Answer: d", "D", "Answer: Dozens", ""]
MARKED += ["<|output_start|>Answer: D<|output_end|>", "cut off before its"]
NUMBERS = ["6", "#### 5", "<|python_start|>#### 6", "#### 6\n#### 7"]
KMMLU_CSV = dict(question="물은?", answer=3, A="가", B="나", C="다", D="라")
CASES = {
    "arc_easy": Case("ARC-Easy/test.parquet", ARC,
        "Which burns?\n- ash=A\n- bog=B\n- cup=C", "C", LETTER, [{"answerKey": "4"}]),
    "mmlu": Case("all/test-00000-of-00001.parquet", MMLU, "Which?\n- p=A\n- q=B\n- r=C\n- s=D",
        "B", LETTER, [{"answer": 4}, {"question": ""}]),
    "kmmlu": Case("data/Criminal-Law-test.csv", KMMLU_CSV, FOUR, "C", LETTER, [{"answer": 5}]),
    "kmmlu_redux": Case("kmmlu_redux/test/0000.parquet", KMMLU, FOUR, "C", LETTER,
        [{"solution": "5"}, {"solution": None}, {"options": ["가"]}]),
    "hae_rae": Case("data/HAERAE-Bench-v1-LW.csv", HAERAE,
        "뜻은?\n- 가=A\n- 나=B\n- 다=C\n- 라=D\n- 마=E", "D", LETTER, [{"answer": "f"}]),
    "clinical_qa": Case("data/train-00000-of-00001.parquet", CLINICAL,
        "진단은?\n- AA=A\n- BB=B\n- CC=C\n- DD=D", "B", LETTER, [{"answer": "E"}]),
    "click": Case("default/train/0000.parquet", CLICK, "글\n\n누구?\n- 왕=A\n- 신하=B", "B", LETTER,
        [{"answer": "없음"}]),
    "kobalt": Case("kobalt_v1/raw/0000.parquet", KOBALT,
        "대화:\nA: 안녕\nB: 응\n- 하나=A\n- 둘=B\n- 셋=C", "C", LETTER, [{"Question": "없다"}]),
    "gpqa": Case("gpqa_diamond.csv", GPQA, "Which?\n- yes=A\n- no 1=B\n- no 3=C\n- no 2=D", "A",
        ["B", "a"], [{"Incorrect Answer 2": ""}]),
    "aqua": Case("raw/test-00000-of-00001.parquet", AQUA, FIVE,
        "Answer: B would be too short.\nAnswer: D", MARKED,
        [{"correct": "F"}, {"options": ["A)1"]}]),
    "gsm8k": Case("main/test-00000-of-00001.parquet", GSM8K, "How many?", GSM8K_PARTS, NUMBERS),
    "mclm_ko": Case("mt-math100.parquet", {"ko": "문제 ", "answer": r"\frac{1}{2}"}, "문제",
        r"#### \frac{1}{2}", [r"\frac{1}{2}", "#### 2"], [{"answer": None}]),
    "hrm8k": Case("HRM8K/gsm8k_test.csv", {"question": "문제", "answer": 18.0}, "문제",
        "#### 18", ["18", "#### 1\n#### 81"]),
}  # fmt: skip


@pytest.mark.parametrize("key", CASES)
def test_row_of_a_dataset_becomes_a_conversation(key, tmp_path, monkeypatch, capsys):
    case = CASES[key]
    rows = [case.row, *(case.row | change for change in case.bad)]
    publish({case.file: rows, "other/README.csv": [{"x": 1}]}, tmp_path, monkeypatch)
    task = eval_task(key)
    assert len(task) == 1 and task.identity == eval_task(key).identity
    skipped = f"{task.name}: skipped {len(case.bad)} of {len(rows)} rows"
    assert (skipped in capsys.readouterr().out) == bool(case.bad)
    asked, answer = task[0]
    assert asked["content"].startswith(case.asked) and answer["content"] == case.answer
    assert (task.kind == "choice") == asked["content"].endswith(f"\n\n{base.BY_LETTER}")
    right = base.answer_text(answer)
    assert task.score(0, f"{right}<|assistant_end|>") == 1.0
    assert not any(task.score(0, wrong) for wrong in case.wrong if wrong != right)
    assert task.baseline <= 0.25 and (task.baseline > 0) == isinstance(task, base.QuestionTask)


# ---- Scoring -------------------------------------------------------------------------------------


class OneNumber(NumberTask):
    """A question with the number `right`."""

    def __init__(self, right: str):
        self.right = right

    def __getitem__(self, i: int) -> list:
        return [user("?"), assistant(f"#### {self.right}")]


@pytest.mark.parametrize(
    ("right", "same", "other"),
    [
        ("1234567", ["1,234,567.", "1234567\nmore"], ["123", "1,23", ",", "many"]),
        ("-3.5", ["$-3.50 each", "-$3.5", "−3.5"], ["3.5"]),
        ("18.0", ["**18**", "**$18**", "1 and then #### 18", "+18", "18 dollars a day"], ["18:30"]),
        ("18", ["18 (개)", "18개입니다.", "18 ft", "18,"], ["18π", "18½", "18만 원", "18분의 1"]),
        (".5", ["<|output_start|>#### 41<|output_end|>.5"], ["<|python_start|>.5"]),
        (
            "5",
            ["5.0", "5" + " " * 9999],
            ["5" + " " * 9999 + "=", "5/2", "5 / 2", "5 * 4 = 20", "5e0", "5^{2}", "5 or 6"],
        ),
        ("1200", ["1,200.", r"\$1,200\text{ in all}", r"\boxed{1200}"], ["1200/4", "1200x"]),
        ("90", [r"$90^\circ$", "90°", r"90\%", "90 km/h", "90℃"], [r"90\sqrt{2}", "90pi"]),
        ("12", [r"$12\text{ cm}^2$", "12 m²"], ["12²", "12xy", "12 x", "12^{10}"]),
    ],
)
def test_number_after_the_last_marker_is_scored(right, same, other):
    task = OneNumber(right)
    assert [task.score(0, f"so\n#### {answer}") for answer in same] == [1.0] * len(same)
    assert not any(task.score(0, f"#### {answer}") for answer in other)
    assert not task.score(0, right)


def test_final_formula_is_compared_without_spaces():
    right = final_value(r"#### \left(3, \frac{\pi}{2}\right)")
    assert final_value(r"#### (3,\dfrac{\pi}{2})") == right != final_value("#### 3")
    assert final_value("3") is None


# ---- Subsets and mixtures ------------------------------------------------------------------------


def test_mixture_without_a_seed_is_the_first_conversations():
    task = WorldProblems("test")
    part = Mixture([task], count=2)
    assert list(part) == [task[0], task[1]] and part.locate(1) == (task, 1)
    assert len(Mixture([task], count=9999)) == len(task) and len(Mixture([task], count=0)) == 0
    with pytest.raises(ValueError, match="has no split 'dev'; it has train, val, test"):
        WorldProblems("dev")


def test_mixture_repeats_and_shuffles_its_tasks():
    few, many = (Mixture([WorldProblems("test")], count=n) for n in (5, 20))
    mixed, again, other = (Mixture([few, many, few], seed) for seed in (3, 3, 4))
    assert sorted(map(str, mixed)) == sorted(map(str, [*few, *many, *few]))
    assert list(mixed) == list(again) != list(other)
    assert base.shuffled(range(10), 7) == [8, 6, 3, 1, 0, 5, 9, 7, 4, 2]  # on every machine


def test_identity_changes_with_data_options_wording_and_code(tmp_path, monkeypatch):
    publish({"raw/train.parquet": [AQUA]}, tmp_path, monkeypatch)
    few, aqua = WorldProblems("test"), AQuA("train")
    tasks = [few, WorldProblems("val"), aqua, AQuALetter("train")]
    tasks += [Mixture([few], count=5), Mixture([few], count=6), Mixture([few], 1)]
    tasks += [Mixture([few, few]), Mixture([few, aqua]), Mixture([aqua, few])]
    names = {fingerprint(task.identity) for task in tasks}
    monkeypatch.setattr("tasks.questions.REASON", "Think, then say Answer: and the letter.")
    names.add(fingerprint(aqua.identity))
    monkeypatch.setattr("tasks.base.code_digest", len)
    assert len({*names, fingerprint(aqua.identity)}) == len(tasks) + 2
    assert aqua.identity["commit"] and [*aqua.identity["sha256"]] == ["raw/train.parquet"]


def test_identity_of_a_task_of_ones_own_changes_with_every_conversation():
    class Own(base.Task):
        name, kind, splits = "Own", "talk", ("train",)

        def __len__(self):
            return len(asked)

        def __getitem__(self, i):
            return [base.user(asked[i]), base.assistant("Yes.")]

    asked = [f"Is it {i}?" for i in range(200)]
    before = fingerprint(Own("train").identity)
    asked[150] = "Is it another?"
    assert fingerprint(Own("train").identity) != before


# ---- Spelling ------------------------------------------------------------------------------------


def test_spelling_bee_counts_letters_with_the_tool(word_list):
    task = SpellingBee("train")
    for i in range(300):
        asked, answer = task[i]
        called = [part["text"] for part in answer["content"] if part["type"] == "python"]
        [(word, letter)] = re.findall(r'"(.+)"\.count\("(.)"\)', called[0])
        count = word.count(letter)
        assert f" {word}" in asked["content"] and letter in asked["content"]
        assert tool_call(called[0], str(count))[1] in answer["content"]
        said = base.answer_text(answer)
        assert said.startswith("-".join(word) + "\n") and said.count(f"\n{letter} ") == count
        assert task.score(i, said) == 1.0
    plain = SimpleSpelling("test")
    assert set(plain[0][1]["content"][1::2]) == {"-"} and not plain.score(0, "a")


def test_spelling_without_words_has_a_fix(base):
    with pytest.raises(MissingInput, match=r"no word list(.|\n)*scripts\.tok_train"):
        SpellingBee("train")[0]
    assert "no word list" in (why_unavailable("spelling", ChatEval()) or "")


# ---- Tasks by name, and as buckets ---------------------------------------------------------------


def test_tasks_are_found_by_key_and_report_name():
    for key, entry in registry.TASKS.items():
        assert key_of(key) == key_of(entry.name) == key
    with pytest.raises(ValueError, match="'gsm8'; use one of arc_easy, "):
        key_of("gsm8")


@pytest.mark.parametrize(
    "spec, message",
    [
        ("gsm8k,", "'' in the mixture"),
        ("gsm8k,aqua,gsm8k=5", "gsm8k appears twice"),
        ("smaltalk", "unknown task 'smaltalk'"),
        ("humaneval", "HumanEval has no split 'train'"),
        ("aqua:local/own", "AQUA takes no data source"),
        ("jsonl", "jsonl:<path>"),
    ],
)
def test_invalid_mixture_error_has_a_fix(spec, message):
    with pytest.raises(ValueError, match=message):
        [bucket.train for bucket in buckets(spec)]


def test_rl_amounts_must_be_questions_or_repeats():
    assert len(rl_questions("world_facts=5*2,world_spelling=3")) == 13
    with pytest.raises(ValueError, match=r"'world_facts\*0' has no questions to train on"):
        rl_questions("world_facts*0")
    for spec in ("world_facts*1.5", "world_facts=500t"):
        with pytest.raises(ValueError, match="use a number of questions"):
            rl_questions(spec)
    for questions in (rl_questions, held_out_questions):
        with pytest.raises(ValueError, match="SmolTalk is training-only: it has no reference"):
            questions("gsm8k,smoltalk", 20)


def test_held_out_questions_are_balanced_over_tasks():
    asked = held_out_questions("world_facts=5,world_spelling*3", 20)
    counts = Counter(asked.locate(i)[0].name for i in range(len(asked)))
    assert counts == {"World-Facts": 10, "World-Spelling": 10}
    assert {task.split for task in asked.tasks} == {"test"}


def test_default_mixtures_and_tasks_are_valid():
    for stage in (mid_train, chat_sft):
        for spec in (stage.MIXTURE, stage.BUILTIN_MIXTURES["embedded"]):
            assert len(buckets(spec)) > 3
    for name in (*default_tasks({}), *default_tasks({"dataset": "embedded"})):
        assert registry.TASKS[name].kind != "talk"
    assert chat_rl.TASK in registry.TASKS
    assert len(held_out_questions(chat_rl.BUILTIN_TASKS["embedded"], 4)) > 0


@pytest.mark.parametrize("key", registry.TASKS)
def test_R27_splits_share_no_data(key, word_list):
    kind = registry.TASKS[key]
    if "train" not in kind.splits:
        with pytest.raises(ValueError, match="no split 'train'"):
            buckets(key)[0].open("train")
    elif issubclass(kind, HubTask):  # test_hub_chats.py: those of one file
        stems = [*kind.splits.values()]
        assert kind.kind == "talk" or len({*stems}) == len(stems)
        assert "train" in kind.splits["train"]
    elif key != "world_chat":  # its greetings repeat
        seen = set()
        for split in kind.splits:
            asked = {str(each[0]) for each in buckets(key)[0].open(split, 2000)}
            assert not asked & seen
            seen |= asked


# ---- Mixtures ------------------------------------------------------------------------------------


def test_mixture_reads_names_sources_counts_and_repeats():
    spec = "SmolTalk:local/chat=10000, gsm8k*1.5,aqua,jsonl:~/own.jsonl=5*3,hub:a/b{x: y, z: w}=2"
    found = buckets(f"{spec},mmlu=3*500t")
    assert [(b.name, b.source, b.count, b.repeats, b.tokens) for b in found] == [
        ("smoltalk:local/chat", "local/chat", 10_000, 1.0, None),
        ("gsm8k", None, None, 1.5, None),
        ("aqua", None, None, 1.0, None),
        ("jsonl:~/own.jsonl", "~/own.jsonl", 5, 3.0, None),
        ("hub:a/b{x: y, z: w}", "a/b{x: y, z: w}", 2, 1.0, None),
        ("mmlu", None, 3, 1.0, 500),
    ]


def test_tables_report_shares_by_bucket_and_tag(tmp_path, capsys):
    own = {name: {"task": "world_facts", "language": name} for name in ("en", "ko")}
    path = tmp_path / "own.json"
    path.write_text(json.dumps({"mixture": "en,ko*5", "buckets": own}))
    about = {"conversations": 9, "tokens": 200, "trained": 60, "used_tokens": 1000}
    counts = {"en": about, "ko": {**about, "used_tokens": 3000}}
    by_bucket, by_tag = chat_mixture(str(path)).tables(counts)
    name, tags, *amounts = by_bucket["rows"][1]
    assert (name, tags) == ("ko", "facts, ko, synthetic, MIT, world, free")
    assert amounts == ["9", "200", "60", "15", "75.0%"]
    assert by_tag["rows"] == [["language", "en", "25.0%"], ["language", "ko", "75.0%"]]
    assert "more than 4 repeats of ko" in capsys.readouterr().out
