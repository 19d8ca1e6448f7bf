"""Final benchmarks: declared by command, denied by default, every access logged."""

import json

from nanochat.common import read_json
from tasks import held_out
from tests.hub_server import publish

SCORE = "chat_eval -i base -g one -x 4 --max_new_tokens=4 --dtype=float32".split()
ANSWER = {"role": "assistant", "content": "b"}


def test_final_benchmark_needs_permission_and_is_logged(trained, command):
    command.works(*SCORE, "-a", "World-Choice")  # for development
    command.works("lab.hold_out", "--final=world_choice|HumanEval|AQUA-Letter")
    out = command.works("lab.hold_out", "--final=kmmlu")  # for good
    for name, parent in (("World-Choice", "world"), ("HumanEval", "humaneval"), ("KMMLU", "kmmlu")):
        assert f"final: {name}, made from {parent}" in out
    for name in ("World-Choice", "world_choice", "kmmlu_redux_10", "aqua"):  # in any form
        out = command.rejects(*SCORE, "-a", f"World-Facts|{name}")
        assert "is final: held out until the end" in out and "pass --final" in out
    assert not held_out.is_final("HAE-RAE")
    assert "'smoltalk' is not scored" in command.rejects("lab.hold_out", "--final=smoltalk")
    command.works(*SCORE, "-a", "World-Choice", "--final")
    log = (trained / held_out.ACCESS_LOG).read_text().splitlines()
    assert [json.loads(line)["benchmark"] for line in log] == ["World-Choice"]
    assert "World-Choice" in command.works("lab.hold_out").split("Access to final")[1]
    assert "### Access to final benchmarks" in (trained / "report.md").read_text()
    out = command.works(*SCORE, "-x", "1")  # without a choice of tasks, final ones are left out
    assert "skipping world_choice: final benchmark" in out
    held_out.declare({"world_answers": "world"})  # a few-shot task
    few_shot = ["base_eval", "-g", "one", "--max_per_task=1", "--dtype=float32"]
    out = command.works(*few_shot)
    assert "without final world_answers" in out and "world_answers:" not in out
    assert "world_answers:" in command.works(*few_shot, "--final", "--skip_if_done")


def test_training_on_the_family_of_a_final_benchmark_is_rejected(trained, command):
    command.works("lab.hold_out", "--final=world_facts")
    tune = "chat_sft --source=base:one --num_iterations=1 --eval_tokens=64".split()
    spec = trained / "mixture.json"
    for extra, rejected in (
        ({}, False),
        ({"parent": "world+x"}, True),
        ({"parent": "world", "waived": "World-Facts"}, False),
    ):
        declared = {"mine": {"task": "identity", **extra}}
        spec.write_text(json.dumps({"mixture": "mine=50", "buckets": declared}))
        run = command.rejects if rejected else command.works
        out = run(*tune, f"--mixture={spec}")
        assert ("as is final benchmark World-Facts" in out) == rejected
    assert "as is final" in command.rejects(*tune, "--mixture=world_facts")
    assert "is final" in command.rejects("chat_rl", "--source=base:one", "--task=world_facts")


def test_listed_benchmark_itself_is_compared(base, command, monkeypatch, tmp_path):
    question = "하나 둘 셋 넷 다섯 여섯 일곱 여덟 아홉 열은?"
    row = {"question": question, "options": ["가", "나", "다", "라"], "solution": "3"}
    publish({"kmmlu_redux/test/0000.parquet": [row]}, tmp_path, monkeypatch)
    chats = [[{"role": "user", "content": f"{question} {i}"}, ANSWER] for i in range(2)]
    own = tmp_path / "own.jsonl"
    own.write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    command.works("lab.hold_out", f"--mixture=jsonl:{own}", "--benchmarks=kmmlu_redux")
    [found] = read_json(base / "report" / "overlap.json")["tables"][0]["rows"]
    assert found[1:] == ["KMMLU-Redux", "1", "1", "1"]
