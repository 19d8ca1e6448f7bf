"""Scripts that create buckets: filtered conversations, answers from a teacher."""

import json
import time
from types import SimpleNamespace

import pytest

from nanochat.common import UsageError, read_json
from scripts.lab import filter as filter_script
from scripts.lab import generate
from scripts.lab.filter import Filter
from scripts.lab.generate import Generate
from tasks.jsonl import JSONL


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def read(path):
    return [json.loads(line) for line in open(path, encoding="utf-8")]


def talk(prompt, answer):
    return [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]


def test_filtered_file_is_a_bucket(tmp_path, base):
    rows = [{"messages": talk(f"Question {i}?", f"Answer {i % 40}")} for i in range(60)]
    rows += [{"messages": talk("See the image below.", "A cat.")}] + rows[:5]
    out = str(tmp_path / "good.jsonl")
    cfg = Filter(out, "no_image,no_duplicate", rows=write(tmp_path / "in.jsonl", rows))
    filter_script.main(cfg)
    assert len(read(out)) == 60
    assert len(JSONL("train", source=out)) + len(JSONL("val", source=out)) == 60
    record = read_json(base / "report" / "filters-good.json")
    assert record["values"] == {"Kept": 60, "Dropped": 6}
    assert [row[:3] for row in record["tables"][0]["rows"]] == [
        ["no_image", "65", "1"],
        ["no_duplicate", "60", "5"],
    ]
    assert "See the image below." in record["tables"][0]["rows"][0][4]


def test_training_conversations_of_a_task_are_filtered(tmp_path):
    out = str(tmp_path / "short.jsonl")
    filter_script.main(Filter(out, "longest=50%", bucket="world_problems=40"))
    assert 20 <= len(read(out)) <= 25


def test_empty_filter_result_and_invalid_rows_are_rejected(tmp_path):
    rows = write(tmp_path / "in.jsonl", [{"messages": talk("a", "b")}])
    out = str(tmp_path / "out.jsonl")
    with pytest.raises(ValueError, match="the filters length=50:60 drop all of"):
        filter_script.main(Filter(out, "length=50:60", rows=rows))
    bad = write(tmp_path / "bad.jsonl", [{"messages": [{"role": "user", "content": "a"}]}])
    with pytest.raises(ValueError, match="bad.jsonl, line 1: roles must alternate user/assistant"):
        filter_script.main(Filter(out, "no_image", rows=bad))
    with pytest.raises(ValueError, match="either --bucket or --rows"):
        Filter(out)
    with pytest.raises(ValueError, match="must be one bucket"):
        filter_script.main(Filter(out, "no_image", bucket="world_problems@500000t"))


class Teacher:
    """Mock teacher: records prompts; fails on "fail", returns an empty answer on "empty"."""

    def __init__(self):
        self.requests = []
        self.interrupted_at = -1
        self.chat = SimpleNamespace(completions=SimpleNamespace(create=self.create))

    def create(self, *, model, messages, **settings):
        self.requests.append(messages)
        words = messages[-1]["content"]
        if "fail" in words:
            raise RuntimeError("no answer")
        if len(self.requests) == self.interrupted_at:
            raise KeyboardInterrupt
        time.sleep(0.2 if 0 < self.interrupted_at < len(self.requests) else 0)
        message = SimpleNamespace(content=None if "empty" in words else f"{model}: {words}")
        choice = SimpleNamespace(
            message=message, finish_reason="length" if "7" in words else "stop"
        )
        usage = SimpleNamespace(completion_tokens=len(words))
        return SimpleNamespace(choices=[choice], usage=usage)


@pytest.fixture
def teacher(monkeypatch):
    found = Teacher()
    monkeypatch.setattr(generate, "connect", lambda cfg: (found, "sage"))
    return found


def test_pilot_is_required_and_no_prompt_is_sent_twice(tmp_path, base, teacher):
    rows = [{"prompt": f"Question {i}", "gold": i} for i in range(20)]
    files = {"prompts": write(tmp_path / "asked.jsonl", rows), "out": str(tmp_path / "made.jsonl")}
    with pytest.raises(UsageError, match="--pilot=2000 first"):
        generate.main(Generate(**files))
    assert not teacher.requests
    generate.main(Generate(**files, pilot=5, system="Be brief."))
    assert len(teacher.requests) == len(read(files["out"])) == 5
    assert teacher.requests[0][0] == {"role": "system", "content": "Be brief."}
    assert {row["gold"] for row in read(files["out"])} != set(range(5))  # not just the first five
    generate.main(Generate(**files))
    made = read(files["out"])
    assert len(teacher.requests) == 20 and sorted(row["gold"] for row in made) == list(range(20))
    assert {row["finish"] for row in made} == {"stop", "length"}
    assert all(row["messages"][-1]["content"] == f"sage: {row['prompt']}" for row in made)
    values = read_json(base / "report" / "generation-made.json")["values"]
    assert (values["Prompts"], values["Answered before"], values["Answered"]) == (20, 5, 15)
    assert [row["gold"] for row in made if row["finish"] == "length"] in ([7, 17], [17, 7])


def test_rows_with_the_same_prompt_are_all_answered(tmp_path, base, teacher):
    rows = [{"prompt": "Question", "gold": i} for i in (0, 1, 1)]
    files = {"prompts": write(tmp_path / "asked.jsonl", rows), "out": str(tmp_path / "made.jsonl")}
    generate.main(Generate(**files, pilot=1))
    generate.main(Generate(**files))
    assert sorted(row["gold"] for row in read(files["out"])) == [0, 1, 1]


def test_failed_prompt_is_retried_on_rerun(tmp_path, teacher):
    rows = [{"messages": talk("fine", "old answer")}, {"prompt": "fail"}]
    files = {"prompts": write(tmp_path / "asked.jsonl", rows), "out": str(tmp_path / "made.jsonl")}
    for _ in range(2):
        generate.main(Generate(**files, pilot=9))
    assert [row["messages"][-1]["content"] for row in read(files["out"])] == ["sage: fine"]
    assert len(teacher.requests) == 3  # one success, two failures


def test_empty_answer_is_not_saved(tmp_path, teacher, capsys):
    rows = [{"prompt": "empty"}, {"prompt": "fine"}]
    files = {"prompts": write(tmp_path / "asked.jsonl", rows), "out": str(tmp_path / "made.jsonl")}
    generate.main(Generate(**files, pilot=9))
    assert len(read(files["out"])) == 1
    assert "empty answer, finish reason 'stop'" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ("hi", "line 2: conversation must be a list"),
        ([{"content": "x"}], "line 2: message 0"),
        ([{"role": "assistant", "content": "x"}], "line 2: "),
    ],
)
def test_invalid_prompts_are_rejected_with_their_line(tmp_path, teacher, messages, message):
    rows = [{"prompt": "fine"}, {"messages": messages}]
    files = {"prompts": write(tmp_path / "asked.jsonl", rows), "out": str(tmp_path / "made.jsonl")}
    with pytest.raises(ValueError, match=message):
        generate.main(Generate(**files, pilot=9))
    assert not teacher.requests


def test_pilot_must_have_answers_from_the_same_teacher(tmp_path, teacher, monkeypatch):
    files = {"prompts": "", "out": str(tmp_path / "made.jsonl")}
    files["prompts"] = write(tmp_path / "asked.jsonl", [{"prompt": f"fail {i}"} for i in range(3)])
    with pytest.raises(UsageError, match="all 2 prompts failed"):
        generate.main(Generate(**files, pilot=2))
    with pytest.raises(UsageError, match="--pilot=2000 first"):
        generate.main(Generate(**files))
    files["prompts"] = write(tmp_path / "asked.jsonl", [{"prompt": f"fine {i}"} for i in range(3)])
    generate.main(Generate(**files, pilot=2))
    monkeypatch.setattr(generate, "connect", lambda cfg: (teacher, "fool"))
    with pytest.raises(UsageError, match="the pilot used teacher sage, not fool"):
        generate.main(Generate(**files))


def test_translated_prompts_are_filtered_and_answered(tmp_path, teacher):
    rows = [{"prompt": f"Question number {i}", "gold": i} for i in range(10, 50)]
    paths = [tmp_path / f"{name}.jsonl" for name in ("english", "translated", "prompts", "made")]
    english, translated, prompts, made = map(str, paths)
    write(paths[0], [{"messages": talk("Question number 7 " * 40, "old")}, *rows])
    generate.main(Generate(english, translated, pilot=99, as_prompt=True, system="Translate."))
    assert teacher.requests[0][0] == {"role": "system", "content": "Translate."}
    found = read(translated)
    assert len(found) == 36  # answers with a 7 are cut off
    assert not any("messages" in row for row in found)
    assert all(row["prompt"] == f"sage: {row['original']}" for row in found)
    write(paths[1], [*found, {"prompt": "far too long " * 9, "original": "Short?"}])
    filter_script.main(Filter(prompts, "length_shift,no_duplicate", rows=translated))
    assert read(prompts) == found
    generate.main(Generate(prompts, made, pilot=99))
    answered = read(made)
    assert {row["original"]: row["gold"] for row in answered} == {
        row["original"]: row["gold"] for row in found
    }
    for row in answered:
        assert row["messages"] == talk(row["prompt"], f"sage: sage: {row['original']}")
    filter_script.main(Filter(str(tmp_path / "good.jsonl"), "length_shift", rows=made))
    with pytest.raises(ValueError, match="line 1: message 1: content must be a string"):
        filter_script.main(Filter(prompts, "length_shift", rows=write(paths[3], [{"prompt": 5}])))


def test_interrupt_keeps_answers_and_sends_no_more_prompts(tmp_path, teacher):
    rows = [{"prompt": f"Question {i}"} for i in range(40)]
    files = {"prompts": write(tmp_path / "asked.jsonl", rows), "out": str(tmp_path / "made.jsonl")}
    teacher.interrupted_at = 6
    with pytest.raises(KeyboardInterrupt):
        generate.main(Generate(**files, pilot=40, parallel=1))
    assert 5 <= len(read(files["out"])) == len(teacher.requests) - 1 < 20
