"""Hugging Face export and import: equal logits, token ids, prompts and generations."""

import copy
import itertools
import json
import random
import re
import sys
from dataclasses import asdict, replace

import pytest
import torch
import torch.nn.functional as F

from nanochat.chat_format import render, render_prompt
from nanochat.checkpoint import find_checkpoint, save_checkpoint, stage_folder
from nanochat.common import read_json
from nanochat.engine import Engine, Sampling
from nanochat.gpt import MLP
from nanochat.hf.export import is_native, read_hf, write_hf
from nanochat.records import read_lines
from nanochat.recursion.model import new_model, read_config
from nanochat.tokenizer import Tokenizer
from tasks.world.corpus import documents
from tests.conftest import GOLF_CHANGES, TINY, lively

transformers = pytest.importorskip("transformers")

from nanochat.hf.modeling import NanochatConfig, NanochatForCausalLM  # noqa: E402

ONE_EACH = dict.fromkeys(("n_prelude", "n_core", "n_coda"), 1)
RECURSIVE_CHANGES = {**ONE_EACH, "n_layer": 3, "n_loops": 3, "supervise": "full"}
ARCHITECTURES = {
    "classic": {},
    "default": {"window_pattern": "SL", "n_layer": 3},
    "golf": {**GOLF_CHANGES, "n_layer": 3},
    "recursive": RECURSIVE_CHANGES,
}
TEXTS = list(itertools.islice(documents(0, "val"), 100))
ODD = [
    "Grüße, 안녕, 12345 \r\n\t don't YOU'LL",
    "",
    "  ",
    "\n",
    "a\n\nb",
    "😀é語",
    "{{ x }}",
    "/#'’",
]
TOKENIZER = Tokenizer.train([*TEXTS, *ODD], 600)
IDS = torch.randint(600, (2, 40), generator=torch.Generator().manual_seed(1))
ONES = torch.ones_like(IDS)
STATE = {
    "source": {"dataset": "embedded"},
    "provenance": {"seed": 4, "inputs": {"tokenizer": TOKENIZER.fingerprint}},
    "batch_tokens": 4096,
}


def model_of(name):
    cfg = replace(TINY, vocab_size=600, max_seq_len=192)
    cfg = (
        cfg.classic() if name == "classic" else read_config({**asdict(cfg), **ARCHITECTURES[name]})
    )
    model = new_model(cfg)
    model.init_weights(torch.Generator().manual_seed(3))
    return lively(model)


def save(model, stage="base", tag="d2", step=9):
    state = {**STATE, "stage": stage}
    return save_checkpoint(stage_folder(stage) / tag, step, model, None, TOKENIZER, state)


def trust(folder):
    native = read_json(folder / "config.json")["model_type"] == "nanochat"
    return {} if native else {"trust_remote_code": True}


def load(folder):
    """Load model and tokenizer through transformers' Auto classes."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, **trust(folder))
    return model.eval(), transformers.AutoTokenizer.from_pretrained(folder, **trust(folder))


@pytest.fixture(scope="module", params=ARCHITECTURES)
def exported(request, tmp_path_factory):
    """Our model, its export folder, and the model and tokenizer that transformers loads from it."""
    folder = tmp_path_factory.mktemp(request.param)
    ours = model_of(request.param)
    write_hf(folder, ours, TOKENIZER)
    with torch.no_grad():
        yield ours, folder, *load(folder)


@pytest.fixture(scope="module")
def chat_tokenizer(tmp_path_factory):
    """Our tokenizer, loaded by transformers."""
    folder = tmp_path_factory.mktemp("chat")
    write_hf(folder, model_of("classic"), TOKENIZER)
    return transformers.AutoTokenizer.from_pretrained(folder)


def near(found, wanted, atol=1e-4):
    torch.testing.assert_close(found, wanted, rtol=0, atol=atol)


def generate(model, ids, num_new=6, **options):
    """Greedy continuation of ids (B, T), only the new tokens."""
    options = {"attention_mask": torch.ones_like(ids), "do_sample": False, **options}
    return model.generate(input_ids=ids, max_new_tokens=num_new, **options)[:, ids.size(1) :]


# ---- The model -----------------------------------------------------------------------------------


@torch.no_grad()
def test_logits_and_loss_equal_ours(exported):
    ours, folder, theirs, _ = exported
    modules = [file.read_text() for file in folder.glob("*.py")]
    assert bool(modules) != is_native(ours) and "from nanochat" not in "".join(modules)
    for text in TEXTS[:25]:
        ids = torch.tensor([[TOKENIZER.bos_id, *TOKENIZER.encode(text)][:192]])
        near(theirs(ids).logits, ours(ids))
    logits = ours(IDS)
    labels = IDS.masked_fill(torch.arange(40) < 20, -100)
    nats = ours.token_losses(IDS[:, :-1], IDS[:, 1:])[:, 19:]
    near(theirs(IDS, labels=labels).loss, nats.mean())
    half = type(theirs).from_pretrained(folder, device_map="auto", dtype=torch.bfloat16)
    near(half(IDS).logits.float(), logits, atol=0.1)


@torch.no_grad()
def test_positions_pack_documents_and_padding_is_invisible(exported):
    ours, _, theirs, _ = exported
    native, counted = is_native(ours), torch.arange(40)[None]
    starts = torch.cat((counted[:, :15], counted[:, :25]), 1)
    options = {"use_cache": False} if native else {}  # ours then decides so itself
    segments = (counted >= 15).long().expand(2, -1)
    wanted = ours.logits(ours.hidden(IDS, segments=segments))
    near(theirs(IDS, position_ids=starts, **options).logits, wanted)

    mask = ONES.clone()
    mask[0, 30:] = mask[1, :14] = 0
    for use_cache in () if native else (False, True):  # the native class counts padding
        found = theirs(IDS, attention_mask=mask, use_cache=use_cache).logits
        near(found[:1, :30], ours(IDS[:1, :30]))
        near(found[1:, 14:], ours(IDS[1:, 14:]), atol=1e-3)


@torch.no_grad()
def test_generation_equals_the_engine_whatever_the_options(exported):
    ours, _, theirs, tokenizer = exported
    engine = Engine(ours, TOKENIZER, 4)
    prompts = [
        [TOKENIZER.bos_id, *TOKENIZER.encode(t)][: 9 + 5 * i] for i, t in enumerate(TEXTS[:6])
    ]
    greedy = Sampling(max_new_tokens=12, temperature=0.0)
    wanted = [[*c.ids, *filter(None, [c.end])] for (c,) in engine.generate(prompts, greedy)]
    for prompt, answer in zip(prompts, wanted, strict=True):
        assert generate(theirs, torch.tensor([prompt]), 12)[0].tolist() == answer
    padded = tokenizer.pad({"input_ids": prompts}, return_tensors="pt")
    ids, mask = padded["input_ids"], padded["attention_mask"]
    for options in ({}, {"use_cache": False}):
        rows = generate(theirs, ids, 12, attention_mask=mask, **options).tolist()
        assert [row[: len(a)] for row, a in zip(rows, wanted, strict=True)] == wanted, options
    beams = {"attention_mask": mask, "num_beams": 3}
    plain = generate(theirs, ids, **beams, use_cache=False)
    assert torch.equal(generate(theirs, ids, **beams), plain)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_exports_can_be_fine_tuned_and_saved(exported, tmp_path):
    _, _, theirs, tokenizer = exported
    model, ids = copy.deepcopy(theirs).train(), IDS.clone()
    ids[1, 0] = TOKENIZER.bos_id

    def gradients():
        model.zero_grad()
        with torch.enable_grad():
            model(ids, labels=ids).loss.backward()
        return {name: weight.grad.clone() for name, weight in model.named_parameters()}

    wanted = gradients()
    assert all(gradient.any() for gradient in wanted.values())
    assert model.get_input_embeddings().weight.grad[TOKENIZER.bos_id].any()
    model.gradient_checkpointing_enable()
    for name, gradient in gradients().items():
        torch.testing.assert_close(gradient, wanted[name], rtol=1e-4, atol=1e-6)

    theirs.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    near(load(tmp_path)[0](IDS).logits, theirs(IDS).logits, atol=1e-6)

    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(copy.deepcopy(theirs), lora)
    with torch.enable_grad():
        adapted(input_ids=IDS, labels=IDS).loss.backward()
    trained = [weight.grad for weight in adapted.parameters() if weight.requires_grad]
    assert trained and None not in trained


def test_pipeline_and_code_of_the_model_card_run(exported, capsys):
    folder = exported[1]
    (code,) = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)
    capsys.readouterr()
    exec(code.replace("<this folder>", str(folder)), {})
    assert capsys.readouterr().out
    answer = transformers.pipeline("text-generation", str(folder), device="cpu", **trust(folder))
    messages = [{"role": "user", "content": "Hello!"}]
    output = answer(messages, max_new_tokens=4)[0]["generated_text"]
    assert output[:-1] == messages and output[-1]["role"] == "assistant"


@torch.no_grad()
def test_generation_of_transformers_5_24_can_pass_cache():
    cfg = NanochatConfig(gpt=asdict(replace(TINY, vocab_size=600)))
    model, cache = lively(NanochatForCausalLM(cfg).eval()), transformers.DynamicCache()
    for part, seen in ((slice(0, 20), 20), (slice(20, 40), 40)):
        found = model(IDS[:, part], attention_mask=ONES[:, :seen], cache=cache, use_cache=True)
        assert (found.get("cache") or found.get("past_key_values")) is cache
    near(found.logits, model(IDS).logits[:, 20:])


# ---- The tokenizer -------------------------------------------------------------------------------


def test_exported_tokenizer_ids_equal_ours(chat_tokenizer):
    rng = random.Random(0)
    pool = [*"aZ é語한😀 \n\t\r.,'’-_/#1234567890", "don't", " the", "\n\n", "  ", "ÅNG"]
    odd = ["".join(rng.choices(pool, k=rng.randrange(40))) for _ in range(2_000)]
    texts = [*TEXTS, *odd]
    found = chat_tokenizer(texts, add_special_tokens=False)["input_ids"]
    for text, ids in zip(texts, found, strict=True):
        assert ids == TOKENIZER.encode(text)


def drawn_conversation(rng):
    """Random messages of all roles, in any order."""
    messages = []
    for _ in range(rng.randrange(1, 9)):
        role = rng.choice(["system", "user", "user", "assistant", "assistant"])
        kinds = ["text", "python", "python_output"] if role == "assistant" else ["text"]
        # If no special token follows the trained text, transformers ends the mask at the first of
        # the last character's tokens. Ending with a period is safe: a period is one token.
        parts = [
            {"type": rng.choice(kinds), "text": rng.choice(["", rng.choice(ODD) + "."])}
            for _ in range(rng.randrange(5))
        ]
        content = rng.choice(ODD) + "." if rng.random() < 0.5 else parts
        messages.append({"role": role, "content": content})
    return messages


def test_chat_template_equals_render_on_any_conversation(chat_tokenizer):
    rng, apply = random.Random(0), chat_tokenizer.apply_chat_template
    for messages in (drawn_conversation(rng) for _ in range(300)):
        found = apply(messages, return_assistant_tokens_mask=True)
        ids, mask = render(TOKENIZER, messages)
        assert (found["input_ids"], found["assistant_masks"]) == (ids, mask), messages
        prompt = apply(messages, add_generation_prompt=True, return_dict=False)
        assert prompt == render_prompt(TOKENIZER, messages)
        if messages[-1]["content"] != []:  # transformers cannot continue an empty message
            found = apply(messages, continue_final_message=True, return_dict=False)
            assert found == render_prompt(TOKENIZER, messages, continue_last=True)
        text = apply(messages, tokenize=False)
        assert chat_tokenizer(text, add_special_tokens=False)["input_ids"] == ids
    assert chat_tokenizer("Hi.")["input_ids"] == [TOKENIZER.bos_id, *TOKENIZER.encode("Hi.")]
    for role, content in (("tool", "x"), ("user", None)):
        with pytest.raises(Exception, match="message 1"):
            apply([{"role": "user", "content": "Hi"}, {"role": role, "content": content}])


# ---- Scripts -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "stage"),
    [("classic", "base"), ("default", "sft"), ("golf", "base"), ("recursive", "rl")],
)
def test_exported_and_imported_model_is_the_same_checkpoint(base, command, name, stage):
    model = model_of(name)
    saved = save(model, stage)
    command.works("export", "-i", stage, "-g", "d2", "-s", "9")
    folder = base / "export" / f"{stage}-d2"
    command.works("import_hf", f"--hf_path={folder}")
    back = find_checkpoint(stage, "imported")
    assert back.step == 9 and back.state["files"] == saved.state["files"]
    assert all(back.state[key] == saved.state[key] for key in ("source", "provenance", "stage"))
    config = read_json(folder / "config.json")
    del config["nanochat"]  # as written by others
    (folder / "config.json").write_text(json.dumps(config))
    foreign = ("import_hf", f"--hf_path={folder}", "--stage=mid", "--model_tag=foreign")
    command.works(*foreign)
    found = find_checkpoint("mid", "foreign")
    assert (found.step, found.state["files"]) == (0, saved.state["files"])
    assert "already has checkpoints" in command.rejects(*foreign)
    command.works("export", "-i", stage, "--dtype=bfloat16", f"--out={base / 'half'}")
    for key, weight in read_hf(base / "half").weights.items():
        assert torch.equal(weight, model.state_dict()[key].bfloat16().float()), key


@pytest.mark.parametrize("name", ["classic", "default"])
def test_R40_export_of_edited_code_is_right_or_rejected(base, command, monkeypatch, name):
    monkeypatch.setattr(MLP, "forward", lambda self, x: self.down(F.gelu(self.up(x))))
    ours = model_of(name)
    save(ours)
    if command("export").status == 0:
        near(load(base / "export" / "base-d2")[0](IDS).logits, ours(IDS))


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("config.json", {"model_type": "llama"}, "'llama'.*--hf_path"),
        ("config.json", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "'linear'"),
        ("config.json", {"num_hidden_layers": 3}, "missing or unexpected tensors"),
        ("config.json", {"hidden_size": None}, "config.json has a missing or unknown setting"),
        ("tokenizer.json", {"model": {"vocab": {"a": 5}}}, "tokenizer.json"),
    ],
)
def test_unsupported_models_are_rejected_with_a_reason(tmp_path, command, file, change, message):
    assert "config.json" in command.rejects("import_hf", f"--hf_path={tmp_path}")
    (tmp_path / "adapter_config.json").touch()
    assert "merge_and_unload" in command.rejects("import_hf", f"--hf_path={tmp_path}")
    (tmp_path / "adapter_config.json").unlink()
    write_hf(tmp_path, model_of("classic"), TOKENIZER)
    (tmp_path / "tokenizer.json").rename(tmp_path / "kept")
    assert "tokenizer.save_pre" in command.rejects("import_hf", f"--hf_path={tmp_path}")
    (tmp_path / "kept").rename(tmp_path / "tokenizer.json")
    (tmp_path / file).write_text(json.dumps({**read_json(tmp_path / file), **change}))
    assert re.search(message, command.rejects("import_hf", f"--hf_path={tmp_path}"))


def test_files_that_are_no_export_are_kept(base, command, tmp_path):
    save(model_of("classic"))
    (tmp_path / "out").mkdir()
    for name, words in (("README.md", ("export",)), ("a.golf", ("export", "--format=artifact"))):
        path = tmp_path / "out" / name
        path.write_text("mine")
        out = path.parent if name == "README.md" else path
        assert re.search("earlier export|another file", command.rejects(*words, f"--out={out}"))
        assert path.read_text() == "mine"
        path.unlink()
    for _ in range(2):  # the second one over the first
        command.works("export", f"--out={tmp_path / 'out'}")


def test_exported_model_scores_equal_ours_item_by_item(base, command, tmp_path):
    model = model_of("default")
    save(model)
    hf_path = tmp_path / "hf"
    write_hf(hf_path, model, TOKENIZER)
    flags = "--suite=embedded --max_per_task=6 --dtype=float32 --device_type=cpu".split()
    command.works("base_eval", *flags)
    command.works("base_eval", *flags, f"--hf_path={hf_path}", "--trust_remote_code")
    ours, theirs = read_lines(base / "report" / "records.jsonl")
    assert theirs["section"] == f"Evaluation of {hf_path}" and theirs["items"] == ours["items"]


def test_remote_code_and_missing_packages_name_the_fix(monkeypatch, tmp_path, command):
    write_hf(tmp_path, model_of("default"), TOKENIZER)
    line = ("base_eval", f"--hf_path={tmp_path}")
    with pytest.raises(ValueError, match="trust_remote_code=True"):
        command(*line)
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert "uv sync --inexact --group interop" in command.rejects(*line)
