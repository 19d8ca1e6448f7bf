"""Few-shot scoring is correct and independent of batching; no item is its own example."""

import math
import re
import threading
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch

from nanochat import eval_core, summary
from nanochat.checkpoint import build_model, save_checkpoint, stage_folder
from nanochat.common import read_json
from nanochat.distributed import DistConfig, DistContext
from nanochat.eval_core import (
    EXAMPLE_DELIMITER,
    EvalModel,
    FewShotTask,
    Question,
    core,
    eval_model_of,
    evaluate_task,
    score_batch,
    score_options,
    tokenize,
)
from nanochat.tokenizer import Tokenizer
from scripts import base_eval
from tasks.world import write
from tests.conftest import TINY, lively

CPU = torch.device("cpu")
WORDS = "red green blue sun moon tree fish bird house river stone wind".split()


class Letters:
    """Tokenizer with one token per character; BOS is 0."""

    bos_id = 0

    def encode(self, text):
        return [1 + ord(c) % 63 for c in text]


class Words:
    """Tokenizer that attaches a space to the next word, as ours do."""

    bos_id = 0

    def __init__(self):
        self.ids = {}

    def encode(self, text):
        pieces = re.findall(r" ?\w+|\s|[^\w\s]", text)
        return [self.ids.setdefault(piece, len(self.ids) + 1) for piece in pieces]


class Pairs:
    """Character bigram model with the given probabilities."""

    def __init__(self, **chances):
        self.table = torch.full((64, 64), math.log(0.001))
        for (before, after), chance in chances.items():
            b, a = Letters().encode(before + after)
            self.table[b, a] = math.log(chance)
        rest = 1 - self.table.exp().sum(dim=1)
        self.table[:, 0] = (rest + 0.001).log()  # so that rows are distributions

    def hidden(self, tokens, cache=None):
        assert cache is None
        return tokens[..., None]

    def logits(self, hidden):
        return self.table[hidden[:, 0]]


def task(kind, items, num_fewshot=0, baseline=0.0, delimiter=""):
    return FewShotTask("t", kind, num_fewshot, baseline, delimiter, items)


def outcomes(model, one_task, machine):
    """Outcome of every item, in the original order of the task."""
    score = evaluate_task(EvalModel(model, Letters(), 100), one_task, machine)
    by_item = dict(zip(map(str, score.task.items), score.outcomes, strict=True))
    return [by_item[str(item)] for item in one_task.items]


# ------------------------------------------------------------------------------------------------
# The three kinds of tasks


def test_choice_minimizes_the_mean_loss_not_the_sum(machine):
    model = Pairs(xa=0.3, xb=0.5, bc=0.5, cd=0.5)  # a: 1.20 nats; bcd: 3 times 0.69
    item = {"query": "x", "choices": ["a", "bcd"], "gold": 1}
    assert outcomes(model, task("multiple_choice", [item, {**item, "gold": 0}]), machine) == [1, 0]


def test_choice_is_scored_after_the_common_prefix(machine):
    model = Pairs(xa=0.01, ab=0.2, ac=0.4)
    item = {"query": "x", "choices": ["ab", "ac"], "gold": 1}
    question = tokenize(task("multiple_choice", [item]), 0, Letters(), 100)
    assert question.starts == [3, 3]
    readings = score_batch(EvalModel(model, Letters(), 100), [question])[0]
    assert [r.nats for r in readings] == pytest.approx([-math.log(0.2), -math.log(0.4)], rel=1e-5)


def test_schema_is_scored_on_the_common_ending_only(machine):
    model = Pairs(xa=0.01, xb=0.9, ac=0.5, bc=0.2, cd=0.5)  # b is likelier, but its ending is not
    item = {"context_options": ["xa", "xb"], "continuation": "cd", "gold": 0}
    question = tokenize(task("schema", [item]), 0, Letters(), 100)
    assert question.starts == [3, 3]
    assert outcomes(model, task("schema", [item, {**item, "gold": 1}]), machine) == [1, 0]


def test_continuation_is_correct_if_every_token_is_argmax(machine):
    model = Pairs(ab=0.6, bc=0.4, bd=0.3, cd=0.9)
    items = [{"context": "a", "continuation": c} for c in ("b", "bc", "bcd", "bd", "cd")]
    assert outcomes(model, task("language_modeling", items), machine) == [1, 1, 1, 0, 0]


def test_token_with_the_delimiter_belongs_to_the_continuation():
    item = {"context": "The capital of Alm is", "continuation": "Ost"}
    tokenizer = Words()
    question = tokenize(task("language_modeling", [item], delimiter=" "), 0, tokenizer, 100)
    scored = question.options[0][question.starts[0] :]
    assert scored == [tokenizer.ids[" Ost"]]


def test_separate_token_of_the_delimiter_is_scored_too():
    item = {"context": "In", "continuation": "1963"}
    question = tokenize(task("language_modeling", [item], delimiter=" "), 0, Letters(), 100)
    assert question.options[0][question.starts[0] :] == Letters().encode(" 1963")


@pytest.mark.parametrize("options", [["ab", "abc"], ["abc", "ab"], ["ab", "ab"]])
def test_option_contained_in_another_has_scored_tokens(options):
    choice = {"query": "", "choices": options, "gold": 0}
    schema = {"context_options": [text[::-1] for text in options], "continuation": "x", "gold": 0}
    for kind, item in (("multiple_choice", choice), ("schema", schema)):
        question = tokenize(task(kind, [item]), 0, Letters(), 100)
        for ids, start in zip(question.options, question.starts, strict=True):
            assert 0 < start < len(ids)
        assert len(score_batch(EvalModel(Pairs(), Letters(), 100), [question])[0]) == 2


# ------------------------------------------------------------------------------------------------
# Examples and contexts


def test_examples_are_drawn_from_all_other_items():
    items = [{"context": f"<{i}>", "continuation": "!"} for i in range(8)]
    one_task = task("language_modeling", items, num_fewshot=3)
    seen = set()
    for i in range(8):
        shown = one_task.examples(i).split(EXAMPLE_DELIMITER)
        assert len(set(shown)) == 4 and shown[-1] == ""
        assert f"<{i}>!" not in shown
        seen |= set(shown)
    assert seen == {"", *(f"<{i}>!" for i in range(8))}


def test_examples_show_the_correct_option():
    choice = {"query": "q", "choices": ["a", "b"], "gold": 1}
    schema = {"context_options": ["u", "v"], "continuation": "w", "gold": 0}
    assert task("multiple_choice", [choice] * 2, 1, delimiter=":").examples(0) == "q:b\n\n"
    assert task("schema", [schema] * 2, 1, delimiter=":").examples(1) == "u:w\n\n"


@pytest.mark.parametrize("size", [1, 3])
def test_B10_num_fewshot_is_capped_at_items_minus_one(size, machine):
    items = [{"context": f"<{i}>", "continuation": "!"} for i in range(size)]
    one_task = task("language_modeling", items, num_fewshot=10)
    for i in range(size):
        shown = [f"<{j}>!" for j in range(size) if j != i]
        assert sorted(one_task.examples(i).split(EXAMPLE_DELIMITER)[:-1]) == shown
    assert len(outcomes(Pairs(), one_task, machine)) == size


def test_max_items_keeps_the_first_items_of_a_fixed_order():
    items = [{"context": f"<{i}>", "continuation": "!"} for i in range(20)]
    one_task = task("language_modeling", items, num_fewshot=2)
    five, whole = one_task.shuffled(5), one_task.shuffled()
    assert one_task.shuffled(99) == whole and list(whole.items[:5]) == list(five.items)
    assert list(whole.items) != items and sorted(map(str, whole.items)) == sorted(map(str, items))
    drawn = {whole.examples(i) for i in range(20)}
    assert len(drawn) > 15  # items draw different examples
    kept = {f"{item['context']}!" for item in five.items}
    for i in range(5):  # examples come from the kept items
        assert set(five.examples(i).split(EXAMPLE_DELIMITER)) <= kept | {""}


def test_long_prompt_is_truncated_on_the_left_and_counted(machine):
    query = "".join(WORDS)
    items = [
        {"query": query, "choices": ["ab", "acde"], "gold": 0},
        {"query": "x", "choices": ["a", "b"], "gold": 0},
        {"query": "x", "choices": ["abcdefghijklmnopqrstuvwxyz", "b"], "gold": 0},
    ]
    one_task, tokenizer = task("multiple_choice", items), Letters()
    long, short, endless = (tokenize(one_task, i, tokenizer, 10) for i in range(3))
    assert [len(ids) for ids in long.options] == [9, 11]  # 10 inputs and the last target
    for ids, start, ending in zip(long.options, long.starts, ("b", "cde"), strict=True):
        assert ids == [0, *tokenizer.encode(query + "a")[-7:], *tokenizer.encode(ending)]
        assert ids[start:] == tokenizer.encode(ending)
    assert not short.truncated
    assert endless.options[0] == [0, *tokenizer.encode("qrstuvwxyz")] and endless.starts == [1, 1]
    score = evaluate_task(EvalModel(Pairs(), tokenizer, 10), one_task, machine)
    assert score.num_truncated == 2 and len(score.outcomes) == 3


@pytest.mark.parametrize(
    "change", [{"kind": "essay"}, {"items": []}, {"random_baseline": 1.0}, {"num_fewshot": -1}]
)
def test_error_names_invalid_task(change):
    good = task("schema", [{"context_options": ["a", "b"], "continuation": "c", "gold": 0}])
    with pytest.raises(ValueError, match="task t"):
        replace(good, **change)


# ------------------------------------------------------------------------------------------------
# Prefix sharing, compared with full sequences


@pytest.fixture(scope="module")
def gpt():
    """Three layers; the first attends to the last 128 tokens only."""
    cfg = replace(TINY, max_seq_len=400, window_pattern="SL", n_layer=3)
    return lively(build_model(cfg, CPU, torch.float32, seed=0))


def made_up_suite():
    """Tasks of all kinds with items of very different lengths; some exceed the window."""
    rng = np.random.default_rng(0)

    def words(low, high):
        return " ".join(rng.choice(WORDS, rng.integers(low, high)))

    choices = [
        {"query": words(1, 9), "choices": [words(1, 5) for _ in range(4)], "gold": i % 4}
        for i in range(21)
    ]
    schemas = [
        {
            "context_options": [words(1, 20), words(1, 20)],
            "continuation": words(1, 6),
            "gold": i % 2,
        }
        for i in range(11)
    ]
    endings = [{"context": words(1, 30), "continuation": words(1, 2)[:1]} for _ in range(30)]
    return [
        FewShotTask("choice", "multiple_choice", 5, 0.25, "\n", choices),
        FewShotTask("choice without examples", "multiple_choice", 0, 0.25, "\n", choices),
        FewShotTask("schema", "schema", 3, 0.5, " ", schemas),
        FewShotTask("ending", "language_modeling", 2, 0.0, " ", endings),
    ]


def questions_of(one_task):
    return [tokenize(one_task, i, Letters(), 400) for i in range(len(one_task.items))]


@pytest.mark.parametrize("one_task", made_up_suite(), ids=lambda t: t.name)
def test_shared_prefix_scores_equal_full_sequence_scores(gpt, one_task):
    fast = eval_model_of(gpt, Letters())
    questions = questions_of(one_task)
    assert one_task.kind == "language_modeling" or any(q.shared > 20 for q in questions)
    got = score_batch(fast, questions)
    plain = score_batch(replace(fast, new_cache=None), questions)
    for q, quick, slow in zip(questions, got, plain, strict=True):
        for ids, start, a, b in zip(q.options, q.starts, quick, slow, strict=True):
            row = torch.tensor([ids])
            nats = gpt.token_losses(row[:, :-1], row[:, 1:])[0, start - 1 :]
            first = gpt(row[:, :-1])[0, start - 1 :].argmax(dim=1) == row[0, start:]
            assert a.nats == pytest.approx(float(nats.mean()), abs=1e-4)
            assert b.nats == pytest.approx(float(nats.mean()), abs=1e-4)
            assert a.is_greedy == b.is_greedy == bool(first.all())
        best = [min(range(len(r)), key=lambda n, r=r: r[n].nats) for r in (quick, slow)]
        assert best[0] == best[1]


def test_shared_prefix_processes_fewer_tokens(gpt):
    questions = questions_of(made_up_suite()[0])
    count = []

    class Counted:
        def hidden(self, tokens, cache=None):
            count.append(tokens.numel())
            return gpt.hidden(tokens, cache)

        logits = staticmethod(gpt.logits)

    fast = replace(eval_model_of(gpt, Letters()), model=Counted())
    score_batch(fast, questions)
    quick, count[:] = sum(count), []
    score_batch(replace(fast, new_cache=None), questions)
    assert quick < sum(count) / 2


@dataclass(frozen=True)
class Together(DistContext):
    """A rank that runs as a thread in this process."""

    box: list = field(kw_only=True)
    barrier_: threading.Barrier = field(kw_only=True)

    def gather(self, value):
        self.box[self.rank] = value
        self.barrier_.wait(timeout=60)
        return list(self.box)


@pytest.mark.parametrize(("world_size", "pass_tokens"), [(1, 1), (1, 700), (2, 700), (5, 10**6)])
def test_score_is_independent_of_ranks_and_batch_size(gpt, machine, world_size, pass_tokens):
    subject = eval_model_of(gpt, Letters())
    ranked = replace(subject, pass_tokens=pass_tokens)
    for one_task in made_up_suite():
        expected = evaluate_task(subject, one_task, machine, max_items=17)
        box, barrier = [None] * world_size, threading.Barrier(world_size)
        results = {}

        def run(rank, one_task=one_task, box=box, barrier=barrier, results=results):
            ours = Together(rank, rank, world_size, CPU, torch.float32, box=box, barrier_=barrier)
            results[rank] = evaluate_task(ranked, one_task, ours, 17)

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world_size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert all(results[rank] == expected for rank in range(world_size))
        assert len(expected.outcomes) == min(17, len(one_task.items))


def test_R31_scoring_of_a_task_reports_its_activity(gpt, machine, active_work):
    one_task, names = next(iter(made_up_suite())), []
    subject = eval_model_of(gpt, Letters())

    def stopping():
        names.extend(active_work)
        return False

    evaluate_task(subject, one_task, machine, 3, stopping=stopping)
    assert set(names) == {f"scoring {one_task.name}"}


def test_model_with_nan_losses_is_rejected(machine):
    broken = lively(build_model(TINY, CPU, torch.float32, 0))
    broken.head.weight.data[3] = math.nan
    subject = replace(eval_model_of(broken, Letters()), context=400, pass_tokens=10**6)
    with pytest.raises(ValueError, match="choice: losses of item [0-9]+ are .nan, nan, nan, nan."):
        evaluate_task(subject, made_up_suite()[0], machine)


def test_options_without_common_ending_score_their_last_token(gpt):
    item = {"context_options": ["it rained", "it was sunny!"], "continuation": "", "gold": 0}
    schema = FewShotTask("schema", "schema", 0, 0.5, "", [item])
    question = tokenize(schema, 0, Letters(), 400)
    assert [len(ids) - 1 for ids in question.options] == list(question.starts)
    (readings,) = score_batch(eval_model_of(gpt, Letters()), [question])
    assert all(math.isfinite(reading.nats) for reading in readings)


def test_prefix_is_not_shared_if_it_saves_too_little(gpt):
    """Shared tokens per question: 8 of 40 and 16 of 40; together: 24 of 80."""
    widths = []

    class Seen:
        def hidden(self, tokens, cache=None):
            widths.append(tokens.size(1))
            return gpt.hidden(tokens, cache)

        logits = staticmethod(gpt.logits)

    subject = replace(eval_model_of(gpt, Letters()), model=Seen())
    little, much = (
        Question(n, [[*range(20)], [*range(n), *range(30, 50 - n)]], [19, 19], n, False)
        for n in (8, 16)
    )
    for questions, passes in (([little], [19]), ([much], [16, 3]), ([little, much], [16, 11])):
        score_batch(subject, questions)
        assert widths == passes
        widths.clear()


def test_batches_contain_every_question_once_within_the_limit(monkeypatch):
    questions = [Question(i, [[0] * n] * 2, [1, 1], 0, False) for i, n in enumerate([9, 3, 50])]
    found = []
    monkeypatch.setattr(
        eval_core, "score_batch", lambda subject, batch: found.append(batch) or batch
    )
    list(score_options(EvalModel(None, None, 50, pass_tokens=40), questions))
    assert [[q.number for q in batch] for batch in found] == [[2], [0, 1]]


def test_R17_out_of_memory_splits_the_batch(gpt, machine):
    class Small:
        def hidden(self, tokens, cache=None):
            if tokens.size(0) > 4:
                raise torch.OutOfMemoryError("too many rows")
            return gpt.hidden(tokens, cache)

        logits = staticmethod(gpt.logits)

    subject, one_task = eval_model_of(gpt, Letters()), made_up_suite()[0]
    small = replace(subject, model=Small())
    assert evaluate_task(small, one_task, machine) == evaluate_task(subject, one_task, machine)


def test_core_is_the_mean_of_centered_scores(machine):
    sure = Pairs(xa=0.9)
    right = {"query": "x", "choices": ["a", "b"], "gold": 0}
    half = task("multiple_choice", [right, {**right, "gold": 1}], baseline=0.25)
    whole = task("language_modeling", [{"context": "x", "continuation": "a"}] * 3)
    scores = [evaluate_task(EvalModel(sure, Letters(), 9), t, machine) for t in (half, whole)]
    assert scores[0].centered_accuracy == pytest.approx((1 / 3, 2, math.sqrt(0.125) / 0.75))
    assert core(scores) == pytest.approx((2 / 3, 5, math.sqrt(0.125) / 0.75 / 2))


# ------------------------------------------------------------------------------------------------
# The script


def save_base(tag, seed, dataset):
    """Save a checkpoint of a tiny base model trained on `dataset`."""
    tokenizer = Tokenizer.train([" ".join(WORDS)], 290)
    cfg = replace(TINY, vocab_size=tokenizer.vocab_size, max_seq_len=64)
    model = lively(build_model(cfg, CPU, torch.float32, seed))
    origin = {"run_id": "run-1", "seed": seed, "inputs": {"tokenizer": tokenizer.fingerprint}}
    state = {"source": {"dataset": dataset}, "provenance": origin}
    save_checkpoint(stage_folder("base") / tag, 7, model, None, tokenizer, state)


def evaluate(base, tag, suite=None, eval_bundle=None, **settings):
    """Run the script and return its record."""
    flags = {"model_tag": tag, "suite": suite, "eval_bundle": eval_bundle, **settings}
    base_eval.main(base_eval.BaseEval(machine=DistConfig("cpu", "float32"), **flags))
    return read_json(base / "report" / "base-model-evaluation.json")


@pytest.fixture
def small_suite(monkeypatch):
    """Replace the embedded world's suite with a made-up one."""
    tasks = [dict(vars(one_task)) for one_task in made_up_suite()]
    monkeypatch.setattr(write.suite, "suite", lambda: tasks)
    return tasks


def test_script_records_scores_with_standard_errors_and_items(base, small_suite, capsys):
    save_base("one", 1, "embedded")
    record = evaluate(base, "one")
    values = record["values"]
    names = [one_task.name for one_task in made_up_suite()]
    assert list(values) == ["Model", "CORE metric", *names, "Tasks", "Suite", "Truncated items"]
    assert (values["Tasks"], values["Suite"]) == ("4", "embedded world")
    assert [row[0] for row in record["tables"][0]["rows"]] == names
    assert values["Model"] == "base_model (step 7)"
    assert (
        values["CORE metric"]["n"] == sum(values[name]["n"] for name in names) == 21 * 2 + 11 + 30
    )
    assert values["CORE metric"]["value"] == pytest.approx(
        np.mean([values[name]["value"] for name in names])
    )
    assert values["Truncated items"] > 0 and values["choice"]["se"] > 0
    text = (base / "report.md").read_text()
    assert (
        "## Base model evaluation" in text
        and "- Model: base_model (step 7)\n- World few-shot: " in text
    )
    assert "choice: accuracy 0." in capsys.readouterr().out


def test_models_are_compared_on_the_items_both_were_scored_on(base, small_suite):
    for tag, seed in (("one", 1), ("two", 2)):
        save_base(tag, seed, "embedded")
    one, two = (evaluate(base, tag, max_per_task=20) for tag in ("one", "two"))
    paired = summary.compare_items("CORE metric", one["items"], two["items"])
    change = two["values"]["CORE metric"]["value"] - one["values"]["CORE metric"]["value"]
    assert paired.n == one["values"]["CORE metric"]["n"] == 71
    assert paired.difference == pytest.approx(change) and paired.difference != 0
    all_items = evaluate(base, "two")["items"]
    assert summary.compare_items("CORE metric", one["items"], all_items) is None


def test_scoring_is_skipped_unless_the_suite_changes(base, small_suite, capsys, monkeypatch):
    save_base("one", 1, "embedded")
    first = evaluate(base, "one", skip_if_done=True)
    assert evaluate(base, "one", skip_if_done=True) == first
    assert "finished already" in capsys.readouterr().out
    small_suite.pop()
    monkeypatch.setattr(write, "VERSION", "another")
    assert len(evaluate(base, "one", skip_if_done=True)["items"]) == len(first["items"]) - 1


def test_aborted_evaluation_resumes_with_the_next_task(base, small_suite, capsys, monkeypatch):
    save_base("one", 1, "embedded")
    straight = evaluate(base, "one")
    (base / "report" / "base-model-evaluation.json").unlink()
    third = made_up_suite()[2].name

    def abort_at(subject, one_task, *rest):
        if one_task.name == third:
            raise OSError("no space left on device")
        return evaluate_task(subject, one_task, *rest)

    with monkeypatch.context() as patch, pytest.raises(OSError, match="no space"):
        patch.setattr(base_eval, "evaluate_task", abort_at)
        evaluate(base, "one", skip_if_done=True)
    partial = read_json(base / "report" / "base-model-evaluation.json")
    assert len(partial["items"]) == 2 and "CORE metric" not in partial["values"]
    assert partial["values"]["Tasks"] == "2 of 4, evaluation not finished"

    capsys.readouterr()
    resumed = evaluate(base, "one", skip_if_done=True)
    scored = re.findall(r"^(\S+): accuracy .*, centered", capsys.readouterr().out, re.M)
    assert scored == [one_task.name for one_task in made_up_suite()[2:]]
    assert resumed["values"] == straight["values"] and resumed["items"] == straight["items"]


def test_embedded_suite_is_opt_in_for_models_trained_on_other_text(base, small_suite):
    save_base("web", 1, "somebody/web")
    folder = base / "nothing"
    with pytest.raises(FileNotFoundError, match=f"{folder}.*--eval_bundle"):
        evaluate(base, "web", eval_bundle=str(folder))
    assert evaluate(base, "web", suite="embedded")["values"]["CORE metric"]["n"] > 0
    with pytest.raises(ValueError, match="needs no bundle"):
        evaluate(base, "web", suite="embedded", eval_bundle=str(folder))
    with pytest.raises(ValueError, match="max_per_task"):
        evaluate(base, "web", max_per_task=0)
