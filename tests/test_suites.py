"""The evaluation bundle: loading, downloads, unsafe archives, and prompts as published."""

import functools
import hashlib
import http.server
import json
import os
import random
import threading
import zipfile

import pytest
import yaml

from nanochat import eval_core, hub
from nanochat.common import EvaluationAborted, UsageError, read_json, sha256_file
from nanochat.eval_core import CORE_TASKS, EvalModel, FewShotTask, evaluate_task, fetch, open_suite
from nanochat.logger import read_metrics
from nanochat.tokenizer import Tokenizer, tokenizer_dir
from scripts import base_eval
from tasks.builtin import choose_bundle
from tests.test_eval_core import Letters, Pairs, evaluate, save_base

CORE_YAML = """
icl_tasks:
-
  label: copa
  dataset_uri: sense/copa.jsonl
  num_fewshot: [0]
  icl_task_type: multiple_choice
-
  label: jeopardy
  dataset_uri: knowledge/jeopardy_all.jsonl
  num_fewshot: [10]
  icl_task_type: language_modeling
  continuation_delimiter: "\\nAnswer: "
-
  label: winograd
  dataset_uri: sense/winograd.jsonl
  num_fewshot: [0]
  icl_task_type: schema
"""
TABLE = (
    "Eval Task,Task Category,Random baseline\ncopa,sense,50\njeopardy,knowledge,0\nwinograd,,50\n"
)
ITEMS = {
    "sense/copa.jsonl": [{"query": "I ran, so", "choices": ["I won.", "I ate."], "gold": 0}] * 100,
    "knowledge/jeopardy_all.jsonl": [
        {"context": f" GAMES: number {i} ", "continuation": f"Game {i}"} for i in range(12)
    ],
}


@pytest.fixture
def bundle(tmp_path):
    """A small bundle with one task whose items are missing."""
    folder = tmp_path / "bundle"
    for name, items in ITEMS.items():
        file = folder / "eval_data" / name
        file.parent.mkdir(parents=True)
        file.write_text("".join(json.dumps(item) + "\n" for item in items))
    (folder / "core.yaml").write_text(CORE_YAML)
    (folder / "eval_meta_data.csv").write_text(TABLE)
    return folder


@pytest.fixture
def archive(bundle, tmp_path):
    """The bundle as a zip file with a top-level folder, like the published one."""
    path = tmp_path / "bundle.zip"
    with zipfile.ZipFile(path, "w") as file:
        for part in bundle.rglob("*"):
            file.write(part, f"eval_bundle/{part.relative_to(bundle)}")
    return path


def test_bundle_is_read_from_core_yaml_and_the_table(bundle):
    suite = open_suite(str(bundle))
    copa, jeopardy = suite.tasks
    assert (copa.name, copa.kind, copa.num_fewshot) == ("copa", "multiple_choice", 0)
    assert (copa.random_baseline, copa.continuation_delimiter, len(copa.items)) == (0.5, " ", 100)
    assert (jeopardy.continuation_delimiter, jeopardy.num_fewshot) == ("\nAnswer: ", 10)
    assert jeopardy.options(jeopardy.items[3]) == [("GAMES: number 3\nAnswer: ", "Game 3")]


def test_missing_tasks_and_item_counts_are_reported(bundle):
    suite = open_suite(str(bundle))
    assert len(suite.missing) == 20 and "winograd" in suite.missing
    assert suite.about == (
        "DCLM, 2 of 22 tasks, 112 of 91,037 items; not comparable with published CORE"
    )


@pytest.mark.parametrize("uri", ["../../x.jsonl", "{outside}", "a/../../x.jsonl", "5", '""'])
@pytest.mark.parametrize("packed", [False, True])
def test_dataset_uri_outside_the_bundle_is_rejected(bundle, command, tmp_path, uri, packed):
    outside = tmp_path / "outside.jsonl"
    outside.write_text(json.dumps(ITEMS["sense/copa.jsonl"][0]))
    uri = uri.format(outside=outside)
    core = bundle / "core.yaml"
    core.write_text(CORE_YAML.replace("sense/copa.jsonl", uri))
    location = bundle
    if packed:
        location = tmp_path / "bundle.zip"
        with zipfile.ZipFile(location, "w") as file:
            for part in bundle.rglob("*"):
                file.write(part, part.relative_to(bundle))
    flags = ["--suite=dclm", f"--eval_bundle={location}", "--only_fetch"]
    stderr = command.rejects("base_eval", *flags)
    assert f"dataset_uri {yaml.safe_load(uri)!r} of copa is not a path inside eval_data" in stderr
    core.write_text(CORE_YAML)
    if not packed:
        assert "2 of 22 tasks" in command.works("base_eval", *flags)


def test_folder_and_zip_load_the_same_suite(bundle, archive):
    assert open_suite(str(archive)) == open_suite(str(bundle))
    (bundle / "eval_data" / "sense" / "copa.jsonl").write_text(
        json.dumps(ITEMS["sense/copa.jsonl"][0])
    )
    assert open_suite(str(archive)).fingerprint != open_suite(str(bundle)).fingerprint


def test_complete_bundle_is_reported_as_such(bundle, monkeypatch):
    monkeypatch.setattr(eval_core, "CORE_TASKS", ["copa", "jeopardy"])
    monkeypatch.setattr(eval_core, "PUBLISHED_ITEMS", 112)
    assert open_suite(str(bundle)).about == "DCLM, 2 of 2 tasks, 112 of 112 items"


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("core.yaml", "tasks: 3", "icl_tasks"),
        ("core.yaml", "icl_tasks:\n- label: copa\n", "icl_task_type"),
        ("eval_meta_data.csv", "a,b\n1,2\n", "Eval Task"),
        ("eval_meta_data.csv", "Eval Task,Random baseline\ncopa,50\n", "jeopardy"),
        ("eval_data/sense/copa.jsonl", '{"query": 1}\n{"que', "copa.jsonl, line 2"),
        ("eval_data/sense/copa.jsonl", "", "copa.*0 items"),
        ("eval_data/sense/copa.jsonl", "[" * 100_000, "copa.jsonl, line 1"),
    ],
)
def test_invalid_bundle_file_is_reported(bundle, file, text, message):
    (bundle / file).write_text(text)
    with pytest.raises(UsageError, match=f"(?s){bundle}.*{message}.*--eval_bundle"):
        open_suite(str(bundle))


def test_non_bundle_is_rejected_with_a_fix(tmp_path):
    (tmp_path / "text.txt").write_text("x")
    (tmp_path / "empty").mkdir()
    for name, message in (("text.txt", "File is not a zip file"), ("empty", "no core.yaml")):
        with pytest.raises(UsageError, match=f"(?s){message}.*--eval_bundle"):
            open_suite(str(tmp_path / name))
    with pytest.raises(FileNotFoundError, match="--eval_bundle"):
        fetch(str(tmp_path / "nowhere"))


@pytest.fixture
def web(tmp_path):
    """Serve `tmp_path` over HTTP; yield the URL and the list of requested paths."""
    asked = []

    class Handler(http.server.SimpleHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            super().do_GET()

        def log_message(self, *args):
            pass

    server = http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(Handler, directory=str(tmp_path))
    )
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", asked
    server.shutdown()


def test_url_is_downloaded_once(web, archive):
    address, asked = web
    first = open_suite(f"{address}/bundle.zip")
    assert first == open_suite(f"{address}/bundle.zip") == open_suite(str(archive)) and asked == [
        "/bundle.zip"
    ]


def test_suite_can_be_fetched_without_a_model(base, bundle, capsys):
    asked = base_eval.BaseEval(suite="dclm", eval_bundle=str(bundle), only_fetch=True)
    base_eval.main(asked)
    assert "2 of 22 tasks" in capsys.readouterr().out and not (base / "report").exists()


def test_B17_dead_bundle_url_error_has_a_fix(web, monkeypatch, capsys):
    with pytest.raises(UsageError, match="(?s)/gone.zip.*--eval_bundle"):
        fetch(f"{web[0]}/gone.zip")
    assert "retrying in" not in capsys.readouterr().out, "404 is final"
    monkeypatch.setattr(eval_core, "DOWNLOAD_TIMEOUT_SECONDS", 2.0)
    with pytest.raises(UsageError, match="(?s)gave up.*--eval_bundle"):
        fetch("http://127.0.0.1:1/refused.zip")
    assert "retrying in" in capsys.readouterr().out


def test_R35_silent_or_busy_bundle_server_is_retried(tmp_path, archive, monkeypatch):
    monkeypatch.setattr(eval_core, "TIMEOUT_SECONDS", 0.3)
    monkeypatch.setattr(hub, "PAUSE_SECONDS", 0.01)
    answers = ["silence", "429", "503", "file"]

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            answer = answers.pop(0) if len(answers) > 1 else answers[0]
            if answer == "silence":
                threading.Event().wait(1)
            elif answer == "file":
                self.send_response(200)
                self.end_headers()
                self.wfile.write(archive.read_bytes())
            else:
                self.send_response(int(answer))
                self.send_header("Retry-After", "0")
                self.end_headers()

        def log_message(self, *args):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    path = fetch(f"http://127.0.0.1:{server.server_port}/bundle.zip")
    server.shutdown()
    assert sha256_file(path) == sha256_file(archive) and answers == ["file"]


def test_S14_published_bundle_with_wrong_digest_is_rejected(web, archive, base, monkeypatch):
    address, asked = web
    monkeypatch.setattr(eval_core, "PUBLISHED_URL", f"{address}/bundle.zip")
    monkeypatch.setattr(eval_core, "PUBLISHED_SHA256", "0" * 64)
    with pytest.raises(
        UsageError, match=f"(?s)does not match the known hash.*{sha256_file(archive)}"
    ):
        open_suite(None)
    assert not [path for path in base.rglob("*") if path.is_file()], "nothing remains on disk"
    monkeypatch.setattr(eval_core, "PUBLISHED_SHA256", sha256_file(archive))
    assert open_suite(None) == open_suite(str(archive))
    (copy,) = (path for path in base.rglob("*.zip"))
    copy.write_bytes(b"damaged since")
    assert open_suite(None) == open_suite(str(archive))
    assert asked == ["/bundle.zip"] * 3


def member(name: str, mode: int = 0) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo(name)
    info.external_attr, info.compress_type = mode << 16, zipfile.ZIP_DEFLATED
    return info


UNSAFE = {
    "parent": (member("eval_bundle/../../up.txt"), b"x", "outside of the archive"),
    "absolute": (member("/tmp/absolute.txt"), b"x", "outside of the archive"),
    "backslash": (member("..\\up.txt"), b"x", "outside of the archive"),
    "symlink": (member("eval_bundle/link", 0o120777), b"/etc/passwd", "link"),
    "device": (member("eval_bundle/device", 0o020666), b"", "link or a device"),
    "bomb": (member("eval_bundle/bomb"), bytes(8 << 20), "8,[0-9,]+ bytes unpacked"),
}


@pytest.mark.parametrize("case", UNSAFE)
def test_S14_unsafe_archive_is_rejected_before_reading(web, archive, base, monkeypatch, case):
    info, content, message = UNSAFE[case]
    with zipfile.ZipFile(archive, "a") as file:
        file.writestr(info, content)
    monkeypatch.setattr(eval_core, "MAX_UNPACKED_BYTES", 2**20)
    monkeypatch.setattr(zipfile.ZipFile, "open", lambda *args: pytest.fail("it was read"))
    before = set(archive.parent.rglob("*"))
    for location in (str(archive), f"{web[0]}/bundle.zip"):
        with pytest.raises(UsageError, match=f"(?s){message}.*--eval_bundle"):
            open_suite(location)
    new = {path.name for path in set(archive.parent.rglob("*")) - before if path.is_file()}
    assert len(new) == 1 and new.pop().endswith("-bundle.zip"), "nothing is extracted"


def test_S14_error_names_the_damaged_archive(archive):
    content = bytearray(archive.read_bytes())
    name = b"eval_bundle/eval_data/sense/copa.jsonl"
    start = content.index(name) + len(name)
    content[start + 100] ^= 1
    archive.write_bytes(content)
    with pytest.raises(UsageError, match=f"(?s){archive.name}.*copa.jsonl"):
        open_suite(str(archive))


def test_S14_command_fails_without_a_traceback(archive, command):
    with zipfile.ZipFile(archive, "a") as file:
        file.writestr(*UNSAFE["parent"][:2])
    flags = ("--suite=dclm", "--only_fetch", f"--eval_bundle={archive}")
    assert "outside of the archive" in command.rejects("base_eval", *flags)


def test_embedded_world_suite_is_the_default_for_its_models(base, bundle):
    suite = open_suite(choose_bundle(None, None, "embedded"))
    assert suite.about == "embedded world" and len(suite.tasks) == 11 and not suite.missing
    assert open_suite(choose_bundle("embedded", None, "somebody/web")) == suite
    assert choose_bundle(None, str(bundle), "embedded") == str(bundle)
    assert choose_bundle("dclm", None, "embedded") is choose_bundle(None, None, None) is None
    with pytest.raises(ValueError, match="--suite=mmlu.*dclm, embedded"):
        choose_bundle("mmlu", None, None)


# ------------------------------------------------------------------------------------------------
# Real tasks with the published prompts


@pytest.fixture(scope="module")
def real():
    """The suite of the real bundle in NANOCHAT_TEST_HUB."""
    folder = os.environ.get("NANOCHAT_TEST_HUB")
    if not folder:
        pytest.skip("NANOCHAT_TEST_HUB is not set to a folder of real data")
    return open_suite(f"{folder}/eval_bundle")


def test_real_bundle_has_the_tasks_in_report_order(real):
    assert real.missing == ("coqa",)
    assert [task.name for task in real.tasks] == [name for name in CORE_TASKS if name != "coqa"]
    assert "21 of 22 tasks" in real.about and "not comparable" in real.about


def test_few_shot_examples_follow_the_published_seeds(real):
    """Compare with an independent implementation: shuffle, cut, one generator per item."""
    for task in real.tasks:
        data = list(task.items)
        random.Random(1337).shuffle(data)
        data = data[:40]
        drawn = task.shuffled(40)
        for index in (0, 7, len(data) - 1):
            others = [i for i in range(len(data)) if i != index]
            shown = random.Random(1234 + index).sample(others, min(task.num_fewshot, len(others)))
            text = ""
            for item in (data[i] for i in shown):
                if task.kind == "multiple_choice":
                    context, ending = item["query"], item["choices"][item["gold"]]
                elif task.kind == "schema":
                    context, ending = item["context_options"][item["gold"]], item["continuation"]
                else:
                    context, ending = item["context"].strip(), item["continuation"]
                text += context + task.continuation_delimiter + ending + "\n\n"
            assert drawn.examples(index) == text, task.name


# Three few-shot prompts of each kind: the end of the first, digests of all
PINNED = {
    "arc_easy": (
        "Which statement is an inference?\nAnswer: Island finches share a common ancestry with "
        "mainland finch species.",
        "08ce98997118eee0 f5f1ee2912bc6ac2 bae86b798d4c7305",
    ),
    "winograd": (
        "In the storm, the tree fell down and crashed through the roof of my house. Now, I have to "
        "get the roof repaired.",
        "e161950eae4b2f3e 23d7972279c84e30 afd0b10bccac870e",
    ),
    "bigbench_operators": (
        "Given the definition of the op operator, compute the result.\n"
        "i op j suppresses the j last digits of i.\n125690 op 2 = 1256",
        "c7e309c0534e819c 61dd2b4db17e4514 04196384c1e1487a",
    ),
}


@pytest.mark.parametrize("name", PINNED)
def test_prompts_of_each_kind_match_their_digests(real, name):
    task = next(task for task in real.tasks if task.name == name).shuffled()
    prompts = []
    for number in range(3):
        item = task.items[number]
        context, ending = task.options(item)[item.get("gold", 0)]
        prompts.append(task.examples(number) + context + ending)
    ending, digests = PINNED[name]
    assert prompts[0].endswith(ending)
    assert [hashlib.sha256(text.encode()).hexdigest()[:16] for text in prompts] == digests.split()


def test_base_eval_scores_a_model_on_a_bundle(base, bundle, capsys):
    save_base("web", 1, "somebody/web")
    record = evaluate(base, "web", eval_bundle=str(bundle), max_per_task=5)
    values = record["values"]
    assert values["CORE metric"]["n"] == 10 and values["copa"]["n"] == 5
    assert values["Tasks"].startswith("2, missing: hellaswag_zeroshot, ")
    assert record["settings"]["eval_bundle"] == str(bundle)
    rows = record["tables"][0]["rows"]
    assert [row[:3] for row in rows] == [["copa", 0, 5], ["jeopardy", 10, 5]]
    assert "CORE" in capsys.readouterr().out


def test_core_metric_runs_at_its_cadence_and_at_the_end(base, bundle, tmp_path, command):
    texts = [
        f"The boat number {i} sails north and wins the game. " * (i % 7 + 1) for i in range(90)
    ]
    Tokenizer.train(texts, 300).save(tokenizer_dir("main"))
    (tmp_path / "text").mkdir()
    for shard in range(2):
        lines = "".join(json.dumps({"text": text}) + "\n" for text in texts[shard::2])
        (tmp_path / "text" / f"{shard}.jsonl").write_text(lines)
    flags = (
        f"--dataset={tmp_path / 'text'} --depth=1 --max_seq_len=32 --total_batch_size=64 "
        "--num_iterations=5 --eval_every=0 --eval_tokens=64 --run=dummy --device_type=cpu "
        f"--eval_bundle={bundle} --core_metric_every=2 --core_metric_max_per_task=3"
    )
    command.works("base_train", *flags.split())
    metrics = read_metrics(base / "base_checkpoints" / "d1" / "metrics.jsonl")
    assert [m["step"] for m in metrics if "core_metric" in m] == [2, 4, 5]
    assert [m["step"] for m in metrics if "val_bpb" in m] == [5]
    values = read_json(base / "report" / "base-model-training.json")["values"]
    assert values["CORE metric estimate"]["n"] == 6
    assert metrics[-1]["core_metric"] == values["CORE metric estimate"]["value"]
    command.works("report")
    figure = base / "report" / "figures" / "base-model-training-training.svg"
    assert "Few-shot score" in figure.read_text()


def test_preemption_aborts_the_evaluation_on_every_rank(machine):
    model, items = Pairs(), [{"context": "a", "continuation": "b"}] * 9
    asked = FewShotTask("t", "language_modeling", 0, 0.0, "", items)
    calls = iter([False, False, True])
    subject = EvalModel(model, Letters(), 100, pass_tokens=1)
    with pytest.raises(EvaluationAborted):
        evaluate_task(subject, asked, machine, stopping=calls.__next__)
