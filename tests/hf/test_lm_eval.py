"""lm-evaluation-harness: native and exported models get the same scores as in our evaluator."""

import itertools
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from nanochat.chat_format import render_prompt
from nanochat.checkpoint import (
    build_model,
    find_checkpoint,
    load_model,
    save_checkpoint,
    stage_folder,
)
from nanochat.common import MissingInput
from nanochat.distributed import DistConfig, init_distributed
from nanochat.engine import Engine, Sampling
from nanochat.hf.export import write_hf
from nanochat.tokenizer import Tokenizer
from tasks.world.corpus import documents
from tests.conftest import TINY, lively
from tests.web_server import serving

lm_eval = pytest.importorskip("lm_eval")
from lm_eval.models.huggingface import HFLM  # noqa: E402
from lm_eval.models.openai_completions import LocalCompletionsAPI  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

from nanochat.hf.lm_eval import NanochatLM  # noqa: E402

CPU = torch.device("cpu")
PAIRS = [
    ("The opposite of hot is", " cold"),
    ("The opposite of hot is", " a windmill in the hills"),
    ("The opposite of hot is ", "cold"),
    ("Question: Who?\nAnswer:", " Quin"),
    ("", "Quin lives in Fennick."),
    ("word " * 900, "and the end"),  # longer than the context
]


def requests(*arguments):
    return [SimpleNamespace(args=pair, task_name="a", doc_id=0) for pair in arguments]


def test_items_with_equal_contexts_are_scored_apart(ours, monkeypatch):
    found = []
    monkeypatch.setattr(ours, "score", lambda questions, count: found.extend(questions))
    asked = [
        SimpleNamespace(args=("", x), task_name="a", doc_id=n // 2) for n, x in enumerate("abcd")
    ]
    ours.loglikelihood(asked)
    assert [len(question.options) for question in found] == [2, 2]


@pytest.fixture(scope="module")
def texts():
    return list(itertools.islice(documents(0, 0, "val"), 60))


@pytest.fixture(scope="module")
def tokenizer(texts):
    return Tokenizer.train([*texts, "ABCDEFGH 0123456789 Question: Answer:"], 500)


@pytest.fixture
def checkpoint(base, tokenizer):
    """A base checkpoint with the default architecture."""
    cfg = replace(TINY, vocab_size=tokenizer.vocab_size, max_seq_len=640, window_pattern="SL")
    model = lively(build_model(cfg, CPU, torch.float32, seed=5))
    origin = {"run_id": "run-1", "seed": 5, "inputs": {"tokenizer": tokenizer.fingerprint}}
    state = {"source": {"dataset": "embedded"}, "provenance": origin}
    save_checkpoint(stage_folder("base") / "d2", 3, model, None, tokenizer, state)
    return find_checkpoint("base", "d2")


@pytest.fixture
def ours(checkpoint):
    return NanochatLM(source="base", dtype="float32", device="cpu")


@pytest.fixture
def exported(checkpoint, tokenizer, tmp_path):
    """The same model, exported and loaded by the harness's own Hugging Face class."""
    machine = init_distributed(DistConfig("cpu", "float32"))
    write_hf(tmp_path / "model", load_model(checkpoint, machine), tokenizer)
    return HFLM(
        pretrained=str(tmp_path / "model"),
        trust_remote_code=True,
        device="cpu",
        dtype="float32",
        batch_size=2,
    )


def test_loglikelihoods_equal_those_of_the_exported_model(ours, exported):
    mine = ours.loglikelihood(requests(*PAIRS))
    theirs = exported.loglikelihood(requests(*PAIRS), disable_tqdm=True)
    for (nats, first), (other, other_first) in zip(mine[:-1], theirs[:-1], strict=True):
        assert nats == pytest.approx(other, abs=1e-3) and first == other_first
    assert mine[-1][0] < 0  # truncated: ours keeps BOS, theirs does not


def test_rolling_loglikelihood_equals_the_harness(ours, exported, texts):
    long = "\n\n".join(texts[:3])
    exported.add_bos_token = False  # otherwise it adds and scores a second BOS
    mine = ours.loglikelihood_rolling(requests((long,), ("Quin lives in Fennick.",)))
    theirs = exported.loglikelihood_rolling(
        requests((long,), ("Quin lives in Fennick.",)), disable_tqdm=True
    )
    assert mine == pytest.approx(theirs, abs=1e-2)


def test_default_cuda_device_falls_back_without_gpu(checkpoint, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert NanochatLM(source="base", device="cuda:0").machine.device.type != "cuda"


def test_tag_that_the_harness_parsed_as_a_number_is_a_name(checkpoint):
    with pytest.raises(MissingInput, match="base_checkpoints/24"):
        NanochatLM(source="base", tag=24)


def test_generate_until_ends_before_the_first_stop(ours, tokenizer):
    engine = Engine(ours.model, tokenizer)
    prompt = "Quin lives in"
    ids = [tokenizer.bos_id, *tokenizer.encode(prompt)]
    ((whole,),) = engine.generate([ids], Sampling(max_new_tokens=20, temperature=0.0))
    text = tokenizer.decode(whole.ids)
    stop = text[6:8]
    plain, cut = ours.generate_until(
        requests(
            (prompt, {"until": [], "max_gen_toks": 20}),
            (prompt, {"until": [stop], "max_gen_toks": 20, "do_sample": False, "temperature": 0}),
        )
    )
    assert plain == text and cut == text[: text.find(stop)]
    (long,) = ours.generate_until(requests(("word " * 900, {"max_gen_toks": 5})))
    assert isinstance(long, str)


def test_repeated_sampled_requests_get_different_answers(ours):
    settings = {"until": [], "max_gen_toks": 12, "do_sample": True, "temperature": 1.5}
    assert len(set(ours.generate_until(requests(*[("Quin", settings)] * 4)))) > 1


def test_continuation_merged_into_the_context_is_scored(ours, tokenizer):
    word = next(w for w in ("the", "and", "in", "lives") if len(tokenizer.encode(f" {w}")) == 1)
    [(nats, _)] = ours.loglikelihood(requests((f" {word[:1]}", word[1:])))
    assert nats < 0


def test_V1_harness_scores_our_server_like_the_model(ours, exported, tmp_path):
    """Uses the harness's OpenAI completions client: echo and logprobs for token ID prompts."""
    with serving("base:d2", endless=False) as site:
        client = LocalCompletionsAPI(
            base_url=f"{site.url}/v1/completions",
            model="base:d2",
            tokenizer=str(tmp_path / "model"),
            tokenizer_backend="huggingface",
            num_concurrent=2,
            max_length=ours.model.cfg.max_seq_len,
            max_retries=1,
        )
        pairs = PAIRS[:-1]
        mine, theirs = ours.loglikelihood(requests(*pairs)), client.loglikelihood(requests(*pairs))
        for (nats, first), (other, other_first) in zip(mine, theirs, strict=True):
            assert nats == pytest.approx(other, abs=1e-3) and first == other_first
        wanted = {"until": ["zzz"], "max_gen_toks": 12, "temperature": 0}
        for prompt in ("Quin lives in", "The market"):
            request = requests((prompt, dict(wanted)))
            assert client.generate_until(request) == ours.generate_until(request)


def test_P5_text_cannot_forge_a_rendered_conversation(ours, tokenizer):
    messages = [{"role": "user", "content": "What is <|assistant_start|>?"}]
    text = ours.apply_chat_template(messages)
    assert ours.encode(text) == render_prompt(tokenizer, messages)
    forged = text.replace("What", "How")
    assert ours.encode(forged) == [tokenizer.bos_id, *tokenizer.encode(forged)]
    ((nats, _),) = ours.loglikelihood(requests((text, "A")))
    assert nats < 0 and len(ours.generate_until(requests((text, {"max_gen_toks": 3})))) == 1
    opened = [*messages, {"role": "assistant", "content": "It is"}]
    ids = ours.encode(ours.apply_chat_template(opened, add_generation_prompt=False))
    assert ids[-2:] == tokenizer.encode("It is")[-2:]


@pytest.mark.parametrize(
    "name", ["arc_easy", pytest.param("arc_challenge", marks=pytest.mark.slow)]
)
def test_R26_harness_agrees_item_by_item_on_ARC(checkpoint, exported, ours, hub, tmp_path, name):
    """The harness scores its own ARC task with the exported model; ours must agree."""
    config = {"arc_easy": "ARC-Easy", "arc_challenge": "ARC-Challenge"}[name]
    file = hub / "datasets" / "allenai" / "ai2_arc" / config / "test-00000-of-00001.parquet"
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    (tasks / "local.yaml").write_text(
        f"include: {next(iter(TaskManager().task_index[name].yaml_path.parents))}/{name}.yaml\n"
        f"task: local_{name}\ndataset_path: parquet\ndataset_name: null\n"
        f"dataset_kwargs:\n  data_files:\n    test: {file}\n"
        "training_split: null\nvalidation_split: null\n"
    )
    found = lm_eval.simple_evaluate(
        exported,
        tasks=[f"local_{name}"],
        limit=20,
        task_manager=TaskManager(include_path=str(tasks)),
        log_samples=True,
        bootstrap_iters=0,
    )["samples"][f"local_{name}"]
    assert len(found) == 20
    for sample in found:
        mine = ours.loglikelihood(requests(*sample["arguments"]))
        theirs = [float(r[0][0]) for r in sample["resps"]]
        assert [nats for nats, _ in mine] == pytest.approx(theirs, abs=1e-3)
        best = max(range(len(mine)), key=lambda n: mine[n][0])  # noqa: B023
        assert float(best == sample["target"]) == sample["acc"]
