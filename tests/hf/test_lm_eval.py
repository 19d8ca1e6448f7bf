"""lm-evaluation-harness: native and exported models get the same scores as in our evaluator."""

from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import pytest

from nanochat.chat_format import render_prompt
from nanochat.common import MissingInput
from nanochat.hf.export import write_hf
from tasks.world.corpus import documents
from tests.test_eval_core import save_model
from tests.training_runs import python

lm_eval = pytest.importorskip("lm_eval")
from lm_eval.models.huggingface import HFLM  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

from nanochat.hf.lm_eval import NanochatLM  # noqa: E402

TASKS = Path(lm_eval.__file__).parent / "tasks"
PAIRS = [
    ("The opposite of hot is", " tree"),
    ("The opposite of hot is", " a windmill in the hills"),
    ("The opposite of hot is ", "tree"),
    ("Question: Who?\nAnswer:", " Quin"),
    ("", "Quin lives in Fennick."),
    ("word " * 900, "and the end"),  # longer than the context
]


def requests(*arguments):
    return [SimpleNamespace(args=pair, task_name="a", doc_id=0) for pair in arguments]


@pytest.fixture
def saved(base):
    """A base model with the default architecture, also saved as a checkpoint, and its tokenizer."""
    return save_model(context=1024)


@pytest.fixture
def ours(saved):
    return NanochatLM(source="base", dtype="float32", device="cpu")


@pytest.fixture
def exported(saved, tmp_path):
    """The same model, exported and loaded by the harness's own Hugging Face class."""
    write_hf(tmp_path / "model", *saved)
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


def test_rolling_loglikelihood_equals_the_harness(ours, exported):
    long = "\n\n".join(islice(documents(0, "val"), 3))
    exported.add_bos_token = False  # otherwise it adds and scores a second BOS
    asked = requests((long,), ("Quin lives in Fennick.",))
    theirs = exported.loglikelihood_rolling(asked, disable_tqdm=True)
    assert ours.loglikelihood_rolling(asked) == pytest.approx(theirs, abs=1e-2)


def test_tag_that_the_harness_parsed_as_a_number_is_a_name(saved):
    with pytest.raises(MissingInput, match="base_checkpoints/24"):
        NanochatLM(source="base", tag=24)
    with pytest.raises(ValueError, match="unknown model_args: model_tag"):
        NanochatLM(source="base", model_tag="d4")


def test_generate_until_ends_before_the_first_stop(ours, exported):
    prompt, most = "Quin lives in", {"max_gen_toks": 20}
    asked = requests((prompt, {"until": [], **most}))
    (text,) = exported.generate_until(asked, disable_tqdm=True)
    assert ours.generate_until(asked) == [text]
    stop = {"until": [text[6:8]], "do_sample": False, "temperature": 0}
    (cut,) = ours.generate_until(requests((prompt, {**stop, **most})))
    assert cut == text[: text.find(text[6:8])]


def test_P5_text_cannot_forge_a_rendered_conversation(ours, saved):
    tokenizer = saved[1]
    messages = [{"role": "user", "content": "What is <|assistant_start|>?"}]
    text = ours.apply_chat_template(messages)
    assert ours.encode(text) == render_prompt(tokenizer, messages)
    forged = text.replace("What", "How")
    assert ours.encode(forged) == [tokenizer.bos_id, *tokenizer.encode(forged)]
    opened = [*messages, {"role": "assistant", "content": "It is"}]
    ids = ours.encode(ours.apply_chat_template(opened, add_generation_prompt=False))
    assert ids[-2:] == tokenizer.encode("It is")[-2:]


def test_models_of_the_harness_stay_available(tmp_path):
    code = "import nanochat.hf.lm_eval; from lm_eval.api.registry import get_model as find; "
    assert "Local" in python(tmp_path, "-c", f"{code}print(find('local-completions'))")


def test_R26_harness_agrees_item_by_item_on_ARC(exported, ours, hub, tmp_path):
    """The harness scores its own ARC task with the exported model; ours must agree."""
    file = hub / "datasets/allenai/ai2_arc/ARC-Easy/test-00000-of-00001.parquet"
    (tmp_path / "local.yaml").write_text(
        f"include: {TASKS}/arc/arc_easy.yaml\ntask: local_arc\ndataset_path: parquet\n"
        f"dataset_name: null\ndataset_kwargs:\n  data_files:\n    test: {file}\n"
        "training_split: null\nvalidation_split: null\n"
    )
    found = lm_eval.simple_evaluate(
        exported,
        tasks=["local_arc"],
        limit=20,
        task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False),
        log_samples=True,
        bootstrap_iters=0,
    )["samples"]["local_arc"]
    assert len(found) == 20
    for sample in found:
        mine = ours.loglikelihood(requests(*sample["arguments"]))
        theirs = [float(r[0][0]) for r in sample["resps"]]
        assert [nats for nats, _ in mine] == pytest.approx(theirs, abs=1e-3)
        best = max(range(len(mine)), key=lambda n: mine[n][0])  # noqa: B023
        assert float(best == sample["target"]) == sample["acc"]
