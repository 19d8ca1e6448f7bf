"""Scripts that create buckets: filtered conversations, answers from a teacher behind an API."""

import json
from http.server import ThreadingHTTPServer
from threading import Thread

import pytest

from nanochat.common import read_json
from nanochat.records import read_lines
from tasks.chats import JSONL
from tests.hub_server import FakeHubHandler


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def talk(prompt, answer):
    return [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]


def test_filtered_file_is_a_bucket(tmp_path, base, command):
    rows = [{"messages": talk(f"Question {i}?", f"Answer {i % 40}")} for i in range(60)]
    rows += [{"messages": talk("See the image below.", "A cat.")}] + rows[:5]
    source, out = write(tmp_path / "in.jsonl", rows), tmp_path / "good.jsonl"
    run = ["lab.filter", f"--out={out}", "--filters=no_image,no_duplicate"]
    out.write_text("of others")
    assert f"{out} exists, and the report has no" in command.rejects(*run, f"--rows={source}")
    out.unlink()
    command.works(*run, f"--rows={source}")
    assert len(JSONL("train", source=str(out))) + len(JSONL("val", source=str(out))) == 60
    record = read_json(base / "report" / "filters-good.json")
    assert record["values"] == {"Kept": 60, "Dropped": 6}
    command.works(*run, "--filters=length=1:140", "--bucket=world_problems=40")
    assert 0 < len(read_lines(out)) < 40
    assert "drop all of" in command.rejects(*run, f"--rows={source}", "--filters=length=50:60")


class Teacher(FakeHubHandler):
    """Answers "sage: <prompt>"; fails on "fail", is empty on "empty", cuts prompts with a 7 off."""

    asked: list[list[dict]] = []

    def do_GET(self):
        self.answer(200, {"object": "list", "data": [{"id": "sage", "object": "model"}]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append(body["messages"])
        words = body["messages"][-1]["content"]
        if "fail" in words:
            return self.answer(400, {"error": {"message": "no answer"}})
        message = {"role": "assistant", "content": "" if "empty" in words else f"sage: {words}"}
        choice = {"message": message, "finish_reason": "length" if "7" in words else "stop"}
        self.answer(200, {"choices": [{"index": 0, **choice}]})


@pytest.fixture
def teacher():
    """Flags that select the teacher."""
    pytest.importorskip("openai")
    Teacher.asked = []
    with ThreadingHTTPServer(("127.0.0.1", 0), Teacher) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield ["lab.generate", f"--base_url=http://127.0.0.1:{server.server_port}/v1"]
        server.shutdown()


def test_pilot_comes_first_and_no_prompt_is_sent_twice(tmp_path, base, command, teacher):
    rows = [{"prompt": f"Question {i}", "gold": i} for i in (*range(20), 3)]
    out = tmp_path / "made.jsonl"
    run = [*teacher, f"--prompts={write(tmp_path / 'asked.jsonl', rows)}", f"--out={out}"]
    assert "--pilot=2000 first" in command.rejects(*run) and not Teacher.asked
    command.works(*run, "--pilot=5", "--system=Be brief.")
    assert len(Teacher.asked) == len(read_lines(out)) == 5
    assert Teacher.asked[0][0] == {"role": "system", "content": "Be brief."}
    assert {row["gold"] for row in read_lines(out)} != set(range(5))  # not just the first five
    command.works(*run)
    made = read_lines(out)
    assert len(Teacher.asked) == 20 and sorted(row["gold"] for row in made) == list(range(20))
    assert all(row["messages"] == talk(row["prompt"], f"sage: {row['prompt']}") for row in made)
    assert {row["gold"] for row in made if row["finish"] == "length"} == {7, 17}


def test_failed_prompts_are_retried_and_wrong_ones_rejected(tmp_path, command, teacher):
    prompts, out = tmp_path / "asked.jsonl", tmp_path / "made.jsonl"
    run = [*teacher, f"--prompts={prompts}", f"--out={out}", "--pilot=9"]
    write(prompts, [{"prompt": "fail"}, {"prompt": "empty"}])
    assert "2 of 2 prompts failed" in command.rejects(*run)
    write(prompts, [{"messages": talk("fine", "old answer")}, {"prompt": "empty"}])
    for _ in range(2):
        assert "empty answer, finish reason 'stop'" in command.works(*run)
    assert [row["messages"][-1]["content"] for row in read_lines(out)] == ["sage: fine"]
    assert len(Teacher.asked) == 5  # one success, four failures
    write(prompts, [{"messages": talk("old", "7"), "gold": n} for n in (1, 2)] + [{"prompt": "7"}])
    translated = ["--as_prompt", f"--out={tmp_path / 'translated.jsonl'}"]
    assert "incomplete prompt" in command.works(*run, *translated)  # it is cut off
    found = [
        (r["prompt"], r["original"], r["gold"]) for r in read_lines(tmp_path / "translated.jsonl")
    ]
    assert sorted(found) == [("sage: old", "old", 1), ("sage: old", "old", 2)]
