"""Making buckets: conversations filtered into files, prompts answered by a teacher."""

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


def talk(asked, said):
    return [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]


def test_what_filters_leave_of_a_file_is_a_bucket(tmp_path, base):
    rows = [{"messages": talk(f"Question {i}?", f"Answer {i % 40}")} for i in range(60)]
    rows += [{"messages": talk("See the image below.", "A cat.")}] + rows[:5]
    out = str(tmp_path / "good.jsonl")
    cfg = Filter(out, "no_image,no_duplicate", rows=write(tmp_path / "in.jsonl", rows))
    filter_script.main(cfg)
    assert len(read(out)) == 60
    assert len(JSONL("train", path=out)) + len(JSONL("val", path=out)) == 60
    record = read_json(base / "report" / "filters-good.json")
    assert record["values"] == {"Kept": 60, "Dropped": 6}
    assert [row[:3] for row in record["tables"][0]["rows"]] == [
        ["no_image", "65", "1"],
        ["no_duplicate", "60", "5"],
    ]
    assert "See the image below." in record["tables"][0]["rows"][0][4]


def test_the_training_conversations_of_a_task_can_be_filtered(tmp_path):
    out = str(tmp_path / "short.jsonl")
    filter_script.main(Filter(out, "longest=50%", bucket="world_problems=40"))
    assert 20 <= len(read(out)) <= 25


def test_filters_that_leave_nothing_or_rows_that_are_none_are_refused(tmp_path):
    rows = write(tmp_path / "in.jsonl", [{"messages": talk("a", "b")}])
    out = str(tmp_path / "out.jsonl")
    with pytest.raises(ValueError, match="leave nothing"):
        filter_script.main(Filter(out, "length=50:60", rows=rows))
    bad = write(tmp_path / "bad.jsonl", [{"messages": [{"role": "user", "content": "a"}]}])
    with pytest.raises(ValueError, match="bad.jsonl, line 1: user and assistant"):
        filter_script.main(Filter(out, "no_image", rows=bad))
    with pytest.raises(ValueError, match="either --bucket or --rows"):
        Filter(out)


class Teacher:
    """Answers every prompt but those that say so; notes what it was asked."""

    def __init__(self):
        self.asked = []
        self.interrupted_at = -1
        self.chat = SimpleNamespace(completions=SimpleNamespace(create=self.create))

    def create(self, *, model, messages, **settings):
        self.asked.append(messages)
        words = messages[-1]["content"]
        if "fail" in words:
            raise RuntimeError("no answer")
        if len(self.asked) == self.interrupted_at:
            raise KeyboardInterrupt
        time.sleep(0.005)
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


def test_a_pilot_comes_first_then_the_rest_and_nothing_is_asked_twice(tmp_path, base, teacher):
    rows = [{"prompt": f"Question {i}", "gold": i} for i in range(20)]
    files = {"prompts": write(tmp_path / "asked.jsonl", rows), "out": str(tmp_path / "made.jsonl")}
    with pytest.raises(UsageError, match="--pilot=2000 first"):
        generate.main(Generate(**files))
    assert not teacher.asked
    generate.main(Generate(**files, pilot=5, system="Be brief."))
    assert len(teacher.asked) == len(read(files["out"])) == 5
    assert teacher.asked[0][0] == {"role": "system", "content": "Be brief."}
    assert {row["gold"] for row in read(files["out"])} != set(range(5))  # not the first ones
    generate.main(Generate(**files))
    made = read(files["out"])
    assert len(teacher.asked) == 20 and sorted(row["gold"] for row in made) == list(range(20))
    assert {row["finish"] for row in made} == {"stop", "length"}
    assert all(row["messages"][-1]["content"] == f"sage: {row['prompt']}" for row in made)
    values = read_json(base / "report" / "generation-made.json")["values"]
    assert (values["Prompts"], values["Answered before"], values["Answered"]) == (20, 5, 15)
    assert [row["gold"] for row in made if row["finish"] == "length"] in ([7, 17], [17, 7])


def test_a_prompt_that_fails_costs_only_itself_and_is_tried_again(tmp_path, teacher):
    rows = [{"messages": talk("fine", "old answer")}, {"prompt": "fail"}]
    files = {"prompts": write(tmp_path / "asked.jsonl", rows), "out": str(tmp_path / "made.jsonl")}
    for _ in range(2):
        generate.main(Generate(**files, pilot=9))
    assert [row["messages"][-1]["content"] for row in read(files["out"])] == ["sage: fine"]
    assert len(teacher.asked) == 3  # the good one once, the other twice


def test_an_empty_answer_is_none(tmp_path, teacher, capsys):
    rows = [{"prompt": "empty"}, {"prompt": "fine"}]
    files = {"prompts": write(tmp_path / "asked.jsonl", rows), "out": str(tmp_path / "made.jsonl")}
    generate.main(Generate(**files, pilot=9))
    assert len(read(files["out"])) == 1
    assert "an empty answer, ended by 'stop'" in capsys.readouterr().out


def test_a_pilot_without_answers_or_of_another_teacher_opens_nothing(
    tmp_path, teacher, monkeypatch
):
    files = {"prompts": "", "out": str(tmp_path / "made.jsonl")}
    files["prompts"] = write(tmp_path / "asked.jsonl", [{"prompt": f"fail {i}"} for i in range(3)])
    with pytest.raises(UsageError, match="none of 2 prompts was answered"):
        generate.main(Generate(**files, pilot=2))
    with pytest.raises(UsageError, match="--pilot=2000 first"):
        generate.main(Generate(**files))
    files["prompts"] = write(tmp_path / "asked.jsonl", [{"prompt": f"fine {i}"} for i in range(3)])
    generate.main(Generate(**files, pilot=2))
    monkeypatch.setattr(generate, "connect", lambda cfg: (teacher, "fool"))
    with pytest.raises(UsageError, match="answered by sage, not by fool"):
        generate.main(Generate(**files))


def test_what_was_answered_before_an_interrupt_is_kept_and_nothing_more_is_asked(tmp_path, teacher):
    rows = [{"prompt": f"Question {i}"} for i in range(40)]
    files = {"prompts": write(tmp_path / "asked.jsonl", rows), "out": str(tmp_path / "made.jsonl")}
    teacher.interrupted_at = 6
    with pytest.raises(KeyboardInterrupt):
        generate.main(Generate(**files, pilot=40, parallel=1))
    assert 5 <= len(read(files["out"])) == len(teacher.asked) - 1 < 20
