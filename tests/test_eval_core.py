"""Few-shot scores equal an independent implementation; damaged or unsafe bundles are rejected."""

import json
import re
import threading
import zipfile
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from os.path import commonprefix  # also works on lists
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
import yaml
from torch.nn.functional import cross_entropy

from nanochat import eval_core
from nanochat.checkpoint import save_checkpoint, stage_folder
from nanochat.common import read_json, sha256_file
from nanochat.dist import DistConfig
from nanochat.eval_core import open_suite
from nanochat.gpt import GPT
from nanochat.records import read_scores
from nanochat.tokenizer import Tokenizer
from scripts import base_eval
from tests.conftest import byte_model
from tests.training_runs import SMALL, all_ranks, curve, folder

WORDS = "red green blue sun moon tree fish bird house river stone wind".split()


def save_model(stage="base", dataset="a/b", context=200) -> tuple[GPT, Tokenizer]:
    """Save a random model whose base model was trained on `dataset`, as <stage>/d2."""
    tokenizer = Tokenizer.train([" ".join(WORDS)], 290)
    shape = {"max_seq_len": context, "n_layer": 3, "window_pattern": "SL"}
    model = byte_model(vocab_size=290, **shape)
    model.head.weight.data[list(b"rgbsmtfhw")] *= 4  # some greedy answers begin words
    origin = {"seed": 0, "inputs": {"tokenizer": tokenizer.fingerprint}}
    state = {"stage": stage, "source": {"dataset": dataset}, "provenance": origin}
    save_checkpoint(stage_folder(stage) / "d2", 7, model, None, tokenizer, state)
    return model, tokenizer


def evaluate(base: Path, **settings) -> dict:
    """Run the script in this process; returns its record."""
    dist = DistConfig("cpu", "float32")
    base_eval.main(base_eval.BaseEval(dist=dist, **settings))
    return read_json(base / "report" / "base-model-evaluation.json")


def write_bundle(folder: Path) -> Path:
    """
    Write a bundle with all kinds of tasks and one without items. Lengths differ, some prompts
    exceed the context, and options may contain each other or be equal.
    """
    rng = np.random.default_rng(0)

    def words(low: int, high: int) -> str:
        return " ".join(rng.choice(WORDS, rng.integers(low, high)))

    choices = [
        {"query": words(1, 9), "choices": [words(1, 5) for _ in range(4)], "gold": i % 4}
        for i in range(21)
    ]
    choices[3]["choices"] = ["red", "red green", "redgreen", "red"]
    schemas = [
        {"context_options": [words(1, 20), words(1, 20)], "continuation": words(1, 6)}
        for _ in range(11)
    ]
    schemas[2] |= {"context_options": ["it rained", "it was sunny!"], "continuation": ""}
    schemas = [schema | {"gold": i % 2} for i, schema in enumerate(schemas)]
    endings = [{"context": words(1, 30), "continuation": words(1, 2)[:1]} for _ in range(30)]
    tasks = {
        "copa": ("multiple_choice", 5, 50, "\n", choices),
        "piqa": ("multiple_choice", 0, 25, " ", choices),
        "boolq": ("multiple_choice", 10, 25, ": ", choices[:3]),
        "winograd": ("schema", 2, 50, " ", schemas),
        "jeopardy": ("language_modeling", 2, 0, "\nAnswer: ", endings),
        "squad": ("language_modeling", 0, 0, "=", endings),
        "coqa": ("language_modeling", 0, 0, " ", []),
    }
    entries, baselines = [], ["Eval Task,Random baseline"]
    (folder / "eval_data").mkdir(parents=True)
    for label, (kind, shots, baseline, delimiter, items) in tasks.items():
        entry = {"label": label, "dataset_uri": f"{label}.jsonl", "icl_task_type": kind}
        entries.append(entry | {"num_fewshot": [shots], "continuation_delimiter": delimiter})
        baselines.append(f"{label},{baseline}")
        if items:
            lines = "".join(json.dumps(item) + "\n" for item in items)
            (folder / "eval_data" / f"{label}.jsonl").write_text(lines)
    (folder / "core.yaml").write_text(json.dumps({"icl_tasks": entries}))
    (folder / "eval_meta_data.csv").write_text("\n".join(baselines))
    return folder


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return write_bundle(tmp_path / "bundle")


# ---- An independent implementation: one full forward pass per option -----------------------------


def options_of(item: dict, delimiter: str) -> list[tuple[str, str]]:
    """(context, ending) of each option."""
    if "choices" in item:
        return [(item["query"] + delimiter, choice) for choice in item["choices"]]
    contexts = item.get("context_options") or [item["context"].strip()]
    return [(context + delimiter, item["continuation"]) for context in contexts]


def outcomes_of(model, tokenizer, entry: dict, items: list[dict]) -> tuple[list[int], int]:
    """Outcome of each item, and how many were truncated."""
    context, outcomes, truncated = model.cfg.max_seq_len, [], 0
    delimiter = entry.get("continuation_delimiter", " ")
    for i, item in enumerate(items):
        others = items[:i] + items[i + 1 :]
        shown = Random(1234 + i).sample(others, min(entry["num_fewshot"][0], len(others)))
        pairs = [options_of(other, delimiter)[other.get("gold", 0)] for other in shown]
        front = "".join("".join(pair) + "\n\n" for pair in pairs)
        options = options_of(item, delimiter)
        rows = [[tokenizer.bos_id, *tokenizer.encode(front + a + b)] for a, b in options]
        if entry["icl_task_type"] == "schema":
            end = max(1, len(commonprefix([row[:0:-1] for row in rows])))
        else:
            alone = [tokenizer.bos_id, *tokenizer.encode((front + options[0][0]).rstrip())]
            start = len(commonprefix(rows if len(rows) > 1 else [*rows, alone]))
            start, end = min(start, *(len(row) - 1 for row in rows)), 0
        over = max(0, max(map(len, rows)) - context - 1)
        truncated += over > 0
        nats, greedy = [], False
        for row in rows:
            target = torch.tensor(row[len(row) - end if end else start :])
            logits = model(torch.tensor([row[:1] + row[1 + over : -1]]))[0, -len(target) :]
            nats.append(cross_entropy(logits, target).item())
            greedy = bool((logits.argmax(1) == target).all())
        outcomes.append(int(nats.index(min(nats)) == item["gold"] if "gold" in item else greedy))
    return outcomes, truncated


@pytest.mark.parametrize("name", ["made up", "published"])
def test_R26_B10_scores_equal_an_independent_implementation(base, bundle, request, name):
    real = name == "published"
    folder = request.getfixturevalue("hub") / "eval_bundle" if real else bundle
    model, tokenizer = save_model(context=1200 if real else 200)
    record = evaluate(base, eval_bundle=str(folder), max_per_task=2 if real else None)
    values, centered, truncated = record["values"], [], 0
    table = (folder / "eval_meta_data.csv").read_text().splitlines()
    columns = table[0].split(",")
    for entry in yaml.safe_load((folder / "core.yaml").read_text())["icl_tasks"]:
        label, file = entry["label"], folder / "eval_data" / entry["dataset_uri"]
        if label == "coqa":  # has no items
            assert "without coqa" in values["Suite"]
            continue
        items = [json.loads(line) for line in file.read_text().splitlines()]
        Random(1337).shuffle(items)
        outcomes, cut = outcomes_of(model, tokenizer, entry, items[: 2 if real else None])
        [row] = (line for line in table if line.startswith(f"{label},"))
        chance = float(row.split(",")[columns.index("Random baseline")]) / 100
        n, accuracy, truncated = len(outcomes), np.mean(outcomes), truncated + cut
        centered.append((accuracy - chance) / (1 - chance))
        scores = read_scores(record["items"][label])
        assert scores == pytest.approx([(x - chance) / (1 - chance) for x in outcomes], abs=1e-5)
        se = np.std(outcomes, ddof=1) / np.sqrt(n) / (1 - chance)
        assert [*values[label].values()] == pytest.approx([centered[-1], se, n])
    assert values["CORE metric"]["value"] == pytest.approx(np.mean(centered))
    assert values["Truncated items"] == truncated and (truncated > 0 or real)
    assert f"{len(centered)} of 22 tasks" in values["Suite"] and "not comparable" in values["Suite"]


def test_R24_scores_do_not_depend_on_the_number_of_ranks(base, bundle):
    save_model()
    flags = [f"--eval_bundle={bundle}", "--device_type=cpu", "--dtype=float32"]
    all_ranks(base, "-m", "scripts.base_eval", *flags)
    two = read_json(base / "report" / "base-model-evaluation.json")
    one = evaluate(base, eval_bundle=str(bundle))
    assert (one["items"], one["values"]) == (two["items"], two["values"])


# ---- Faults --------------------------------------------------------------------------------------


def test_R17_out_of_memory_splits_the_batch(base, bundle, monkeypatch):
    save_model()
    expected, plain = evaluate(base, eval_bundle=str(bundle)), GPT.hidden

    def hidden(model, tokens, *rest):
        if len(tokens) > 4:
            raise torch.OutOfMemoryError
        return plain(model, tokens, *rest)

    monkeypatch.setattr(GPT, "hidden", hidden)
    assert evaluate(base, eval_bundle=str(bundle))["items"] == expected["items"]


def test_model_with_nan_losses_is_rejected(base, bundle, monkeypatch):
    save_model()
    monkeypatch.setattr(GPT, "logits", lambda model, x: x.new_full((len(x), 290), np.nan))
    with pytest.raises(ValueError, match="copa: losses of item [0-9]+ are .nan, nan, nan, nan."):
        evaluate(base, eval_bundle=str(bundle))


def test_finished_evaluation_is_skipped_unless_items_change(base, bundle, capsys):
    save_model()
    flags = {"eval_bundle": str(bundle), "skip_if_done": True}
    evaluate(base, **flags)
    evaluate(base, **flags)
    assert "finished already" in capsys.readouterr().out
    file = bundle / "eval_data" / "squad.jsonl"
    file.write_text("\n".join(file.read_text().splitlines()[1:]))
    assert evaluate(base, **flags)["values"]["squad"]["n"] == 29


def test_embedded_suite_is_the_default_for_its_models(base, bundle, capsys):
    save_model(dataset="embedded")
    values = evaluate(base, max_per_task=2)["values"]
    assert re.search("^World few-shot .* over 9 tasks", capsys.readouterr().out, re.M)
    assert "world; at most 2 items" in values["Suite"] and values["Tasks"] == 9
    assert "copa" in evaluate(base, max_per_task=2, eval_bundle=str(bundle))["values"]
    save_model(dataset="somebody/web")
    assert evaluate(base, max_per_task=2, suite="embedded")["values"] == values


# ---- Bundles -------------------------------------------------------------------------------------

FETCH = ("base_eval", "--suite=dclm", "--only_fetch")


@pytest.fixture
def archive(bundle: Path, tmp_path: Path) -> Path:
    """The bundle as a zip file with a top-level folder, like the published one."""
    path = tmp_path / "bundle.zip"
    with zipfile.ZipFile(path, "w") as file:
        for part in bundle.rglob("*"):
            file.write(part, f"eval_bundle/{part.relative_to(bundle)}")
    return path


@pytest.fixture
def url(archive: Path):
    """Where the archive is served."""
    handler = partial(SimpleHTTPRequestHandler, directory=str(archive.parent))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/bundle.zip"
        server.shutdown()


def test_R35_folder_archive_and_url_hold_the_same_suite(bundle, archive, url):
    suite = open_suite(str(bundle))
    assert suite == open_suite(str(archive)) == open_suite(url)
    archive.unlink()
    assert open_suite(url) == suite  # downloaded once
    assert suite.about.startswith("DCLM, 6 of 22 tasks") and "without coqa" in suite.about


def test_B17_dead_bundle_url_error_has_a_fix(url, command):
    printed = command.rejects(*FETCH, f"--eval_bundle={url}.missing")
    assert "404" in printed and "--eval_bundle" in printed
    printed = command.rejects(*FETCH, "--eval_bundle=http://127.0.0.1:1/refused.zip")
    assert "--eval_bundle" in printed


def test_S14_published_bundle_with_wrong_digest_is_rejected(
    url, archive, base, command, monkeypatch
):
    monkeypatch.setattr(eval_core, "PUBLISHED_URL", url)
    monkeypatch.setattr(eval_core, "PUBLISHED_SHA256", "0" * 64)
    assert sha256_file(archive) in command.rejects(*FETCH)
    assert not [path for path in base.rglob("*") if path.is_file()]  # nothing remains on disk
    monkeypatch.setattr(eval_core, "PUBLISHED_SHA256", sha256_file(archive))
    command.works(*FETCH)
    [copy] = base.rglob("*.zip")
    copy.write_bytes(b"damaged since")
    assert "6 of 22 tasks" in command.works(*FETCH)


def test_S14_huge_archive_is_rejected(archive, command, monkeypatch):
    with zipfile.ZipFile(archive, "a", zipfile.ZIP_DEFLATED) as file:
        file.writestr("eval_bundle/bomb", bytes(8 << 20))
    monkeypatch.setattr(eval_core, "MAX_UNPACKED_BYTES", 2**20)
    printed = command.rejects(*FETCH, f"--eval_bundle={archive}")
    assert re.search("(?s)8,[0-9,]+ bytes unpacked.*--eval_bundle", printed)


def test_S14_error_names_the_damaged_member(archive, command):
    content = bytearray(archive.read_bytes())
    content[content.index(b"eval_data/copa.jsonl") + 100] ^= 1
    archive.write_bytes(content)
    assert re.search("(?s)bundle.zip.*copa", command.rejects(*FETCH, f"--eval_bundle={archive}"))


COPA = "eval_data/copa.jsonl"
ITEM = {"query": "I ran, so", "choices": ["I won.", "I ate."], "gold": 1}


@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        ("core.yaml", '"icl_tasks"', '"tasks"', "icl_tasks"),
        ("core.yaml", '"copa.jsonl"', '"../up"', "'../up' of copa is not a path inside eval_data"),
        ("core.yaml", '"schema"', '"essay"', "essay"),
        (COPA, None, '{"query": 1}\n{"que', "copa.jsonl, line 2"),
        *(
            (COPA, None, f"{json.dumps(ITEM)}\n{json.dumps(ITEM | bad)}", "copa.jsonl, line 2")
            for bad in ({"gold": 2}, {"gold": 1.0}, {"choices": [], "gold": 0})
        ),
    ],
)
def test_S14_invalid_bundle_file_is_named(bundle, command, file, old, new, message):
    text = (bundle / file).read_text()
    (bundle / file).write_text(text.replace(old or text, new))
    printed = command.rejects(*FETCH, f"--eval_bundle={bundle}")
    assert re.search(f"(?s){message}.*--eval_bundle", printed)


def test_core_metric_runs_at_its_cadence_and_at_the_end(trained, bundle, command):
    flags = "--num_iterations=5 --core_metric_every=2 --core_metric_max_per_task=3".split()
    flags.append("--weight_decay=0")
    command.works("base_train", *SMALL, *flags, "--model_tag=core", f"--eval_bundle={bundle}")
    found = curve(folder(trained, "core"), "core_metric")
    values = read_json(trained / "report" / "base-model-training.json")["values"]
    assert len(found) == 3 and values["CORE metric estimate"]["n"] == 18
    assert values["weight_decay"] == 0
    assert found[-1] == values["CORE metric estimate"]["value"]
