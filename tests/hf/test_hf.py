"""Hugging Face export and import: equal logits, token ids, prompts and generations."""

import copy
import itertools
import json
import math
import random
import re
import sys
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import nanochat
from nanochat.chat_format import render, render_prompt
from nanochat.checkpoint import build_model, find_checkpoint, save_checkpoint, stage_folder
from nanochat.common import MissingInput, UsageError, read_json
from nanochat.distributed import DistConfig
from nanochat.engine import Engine, Sampling
from nanochat.hf.export import is_native, read_hf, write_hf
from nanochat.hf.tokenizer import byte_letters, merge_pair
from nanochat.recursion.model import RecursiveConfig
from nanochat.tokenizer import SPECIAL_TOKENS, Tokenizer
from scripts import base_eval, export, import_hf
from tasks.world.corpus import documents
from tests.conftest import GOLF_CHANGES, RECURSIVE_CHANGES, TINY, lively, shaped
from tests.test_eval_core import evaluate

transformers = pytest.importorskip("transformers")

from nanochat.hf.modeling import NanochatConfig, NanochatForCausalLM  # noqa: E402

CPU = torch.device("cpu")
ARCHITECTURES = {
    "classic": {},
    "default": {"window_pattern": "SL", "max_seq_len": 192, "n_layer": 3},
    "wide heads": {"head_dim": 16, "n_kv_head": 1, "mlp_ratio": 3.0},
    "golf": GOLF_CHANGES,
    "recursive": RECURSIVE_CHANGES,
}
GREEDY = Sampling(max_new_tokens=12, temperature=0.0)


@pytest.fixture(scope="module")
def texts():
    return list(itertools.islice(documents(0, 0, "val"), 100))


@pytest.fixture(scope="module")
def tokenizer(texts):
    return Tokenizer.train([*texts, "Grüße, 안녕, 12345 \r\n\t don't YOU'LL"], 600)


def model_of(tokenizer, name):
    cfg = replace(TINY, vocab_size=tokenizer.vocab_size, max_seq_len=192)
    cfg = cfg.classic() if name == "classic" else shaped(cfg, **ARCHITECTURES[name])
    return lively(build_model(cfg, CPU, torch.float32, seed=3))


def load(folder):
    """Load model and tokenizer through transformers' Auto classes."""
    options = (
        {}
        if read_json(folder / "config.json")["model_type"] == "nanochat"
        else {"trust_remote_code": True}
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, **options)
    return model.eval(), transformers.AutoTokenizer.from_pretrained(folder, **options)


@pytest.fixture(scope="module", params=ARCHITECTURES)
def exported(request, tokenizer, tmp_path_factory):
    """Our model, its export folder, and the model and tokenizer that transformers loads from it."""
    folder = tmp_path_factory.mktemp(request.param.replace(" ", "_"))
    ours = model_of(tokenizer, request.param)
    write_hf(folder, ours, tokenizer)
    return ours, folder, *load(folder)


# ------------------------------------------------------------------------------------------------
# The model


def test_only_non_classic_exports_contain_remote_code(exported):
    ours, folder, theirs, _ = exported
    code = {path.stem for path in folder.glob("*.py")}
    if is_native(ours.cfg):
        assert type(theirs).__module__.startswith("transformers.models.nanochat") and not code
    else:
        core = {"gpt", "attention", "loss", "fp8"}
        assert code == {"hf_modeling", "golf_model", "recursion_model", *core}
        assert "from nanochat" not in "".join(f.read_text() for f in folder.glob("*.py"))


@torch.no_grad()
def test_exported_logits_equal_ours_on_100_texts(exported, tokenizer, texts):
    ours, _, theirs, _ = exported
    for text in texts:
        ids = torch.tensor([[tokenizer.bos_id, *tokenizer.encode(text)][: ours.cfg.max_seq_len]])
        assert (theirs(ids).logits - ours(ids)).abs().max() < 1e-4


def test_greedy_generation_matches_the_engine(exported, tokenizer, texts):
    ours, _, theirs, _ = exported
    engine = Engine(ours, tokenizer, 4)
    prompts = [
        [tokenizer.bos_id, *tokenizer.encode(text)][: 9 + 5 * i] for i, text in enumerate(texts[:8])
    ]
    for prompt, (want,) in zip(prompts, engine.generate(prompts, GREEDY), strict=True):
        ids = torch.tensor([prompt])
        answer = theirs.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False
        )[0, len(prompt) :].tolist()
        assert answer == want.ids + ([want.end] if want.end is not None else [])


def test_left_padded_batch_equals_single_prompts(exported, texts):
    _, _, theirs, tokenizer = exported
    prompts = [" ".join(text.split()[: 3 + 4 * i]) for i, text in enumerate(texts[:5])]
    batch = tokenizer(prompts, padding=True, return_tensors="pt")
    together = theirs.generate(**batch, max_new_tokens=10, do_sample=False)
    for prompt, row in zip(prompts, together, strict=True):
        alone = tokenizer(prompt, return_tensors="pt")
        output = theirs.generate(**alone, max_new_tokens=10, do_sample=False)[0]
        new = output[alone["input_ids"].shape[1] :].tolist()
        assert row[batch["input_ids"].shape[1] :].tolist()[: len(new)] == new
        assert alone["input_ids"][0, 0] == tokenizer.bos_token_id


@torch.no_grad()
def test_loss_ignores_labels_of_minus_100(exported, tokenizer, texts):
    ours, _, theirs, _ = exported
    ids = torch.tensor([tokenizer.encode(texts[0])[:60]])
    labels = ids.clone()
    labels[:, :20] = -100
    nats = ours.token_losses(ids[:, :-1], ids[:, 1:])[0, 19:].mean()
    assert theirs(ids, labels=labels).loss == pytest.approx(float(nats), abs=1e-4)


@torch.no_grad()
def test_logits_to_keep_returns_the_last_logits(exported):
    _, _, theirs, _ = exported
    ids = torch.tensor([[1, 2, 3, 4]])
    whole, last = theirs(ids).logits, theirs(ids, logits_to_keep=1).logits
    torch.testing.assert_close(last, whole[:, -1:])


# ------------------------------------------------------------------------------------------------
# Other features of transformers


@pytest.fixture
def ids(tokenizer):
    return torch.randint(tokenizer.vocab_size, (2, 40), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("num_beams", [1, 3])
def test_static_and_dynamic_caches_generate_the_same_tokens(exported, num_beams):
    _, _, theirs, tokenizer = exported
    batch = tokenizer(
        ["The market", "Quin lives in Fennick and"], padding=True, return_tensors="pt"
    )
    options = {"max_new_tokens": 10, "do_sample": False, "num_beams": num_beams}
    want = theirs.generate(**batch, **options)
    for other in ({"cache_implementation": "static"}, {"use_cache": False}):
        assert torch.equal(theirs.generate(**batch, **options, **other), want), other


@torch.no_grad()
@pytest.mark.parametrize("change", [{"prefill_chunk_size": 16}, {"prompt_lookup_num_tokens": 3}])
def test_prefill_and_drafts_do_not_change_the_tokens(exported, ids, change):
    _, _, theirs, _ = exported
    ids = ids[:1].repeat(1, 2)  # repeats can be looked up
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 6, "do_sample": False}
    want = theirs.generate(ids, **options)
    assert torch.equal(theirs.generate(ids, **change, **options), want)


@torch.no_grad()
def test_hidden_states_cover_every_layer(exported, ids):
    ours, _, theirs, _ = exported
    found = theirs(ids, output_hidden_states=True)
    cfg = ours.cfg  # a recursive model returns the states after its parts
    count = 3 + cfg.n_loops if isinstance(cfg, RecursiveConfig) else 1 + cfg.n_layer
    assert len(found.hidden_states) == count
    torch.testing.assert_close(found.hidden_states[-1], ours.hidden(ids), rtol=0, atol=1e-5)
    assert theirs(ids).hidden_states is None
    output = theirs.generate(
        ids, max_new_tokens=2, output_hidden_states=True, return_dict_in_generate=True
    )
    assert len(output.hidden_states[0]) == count


@torch.no_grad()
def test_remote_code_hidden_states_equal_native_class(tokenizer, ids, tmp_path):
    ours = model_of(tokenizer, "classic")
    write_hf(tmp_path, ours, tokenizer)
    native, _ = load(tmp_path)
    remote = NanochatForCausalLM(NanochatConfig(gpt=asdict(ours.cfg))).eval()
    remote.gpt.load_state_dict(ours.state_dict())
    want = native(ids, output_hidden_states=True).hidden_states
    found = remote(ids, output_hidden_states=True).hidden_states
    for state, other in zip(found, want, strict=True):
        # theirs start with the raw embeddings, ours with the input of the first layer
        torch.testing.assert_close(F.rms_norm(state, (32,)), F.rms_norm(other, (32,)))


@torch.no_grad()
def test_inputs_embeds_equal_input_ids(exported, ids):
    ours, _, theirs, _ = exported
    embeds, mask = theirs.get_input_embeddings()(ids), torch.ones_like(ids)
    both = {"inputs_embeds": embeds} | ({} if is_native(ours.cfg) else {"input_ids": ids})
    torch.testing.assert_close(theirs(**both).logits, ours(ids), rtol=0, atol=1e-4)
    options = {"attention_mask": mask, "max_new_tokens": 5, "do_sample": False}
    want = theirs.generate(ids, **options)
    found = theirs.generate(input_ids=ids, inputs_embeds=embeds, **options)
    assert torch.equal(found[:, -5:], want[:, -5:])


@torch.no_grad()
def test_inputs_embeds_alone_suffice_without_value_embeddings(tokenizer, ids):
    shape = replace(TINY, vocab_size=tokenizer.vocab_size, value_every=0)
    remote = lively(NanochatForCausalLM(NanochatConfig(gpt=asdict(shape)))).eval()
    embeds = remote.get_input_embeddings()(ids)
    torch.testing.assert_close(remote(inputs_embeds=embeds).logits, remote(ids).logits)
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 4, "do_sample": False}
    want = remote.generate(ids, **options)[:, -4:]
    assert torch.equal(remote.generate(inputs_embeds=embeds, **options), want)
    other = NanochatForCausalLM(NanochatConfig(gpt=asdict(replace(shape, value_every=2)))).eval()
    for call in (other, other.generate):
        with pytest.raises(ValueError, match="only a model without value embeddings"):
            call(inputs_embeds=embeds)


@torch.no_grad()
def test_position_ids_pack_documents_or_set_rotary_positions(exported, ids):
    ours, _, theirs, _ = exported
    counted, mask = torch.arange(40)[None], torch.ones_like(ids)
    starts = torch.cat((counted[:, :15], counted[:, :25]), 1)
    options = {"use_cache": False} if is_native(ours.cfg) else {}  # ours then decides so itself
    packed = theirs(ids, position_ids=starts, **options).logits
    segments = (counted >= 15).long().expand(2, -1)
    want = ours.logits(ours.hidden(ids, segments=segments))
    torch.testing.assert_close(packed, want, rtol=0, atol=1e-4)
    shifted = theirs(ids, position_ids=counted + 7, attention_mask=mask).logits
    torch.testing.assert_close(shifted, ours(ids), rtol=0, atol=1e-3)
    spread = theirs(ids, position_ids=2 * counted, attention_mask=mask).logits
    assert (spread - ours(ids)).abs().max() > 0.01


@torch.no_grad()
def test_padding_anywhere_does_not_change_real_tokens(exported, ids):
    ours, _, theirs, _ = exported
    if is_native(ours.cfg):
        pytest.skip("the native class counts the positions of padding")
    mask = torch.ones_like(ids)
    mask[0, 30:] = mask[1, 10:14] = 0
    for use_cache in (False, True):
        found = theirs(ids, attention_mask=mask, use_cache=use_cache).logits
        torch.testing.assert_close(found[:1, :30], ours(ids[:1, :30]), rtol=0, atol=1e-4)
        alone = ours(torch.cat((ids[1:, :10], ids[1:, 14:]), 1))
        torch.testing.assert_close(found[1:, 14:], alone[:, 10:], rtol=0, atol=1e-3)


@torch.no_grad()
def test_resized_vocabulary_survives_a_round_trip(exported, ids, tmp_path):
    ours, _, theirs, tokenizer = exported
    larger, size = copy.deepcopy(theirs), ours.cfg.vocab_size
    larger.resize_token_embeddings(size + 20)
    torch.testing.assert_close(larger(ids).logits[..., :size], ours(ids), rtol=0, atol=1e-4)
    new = torch.full((1, 5), size + 19)
    assert larger(new).logits.shape == (1, 5, size + 20) and larger(new).logits.isfinite().all()
    larger.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    again, _ = load(tmp_path)
    assert again.config.vocab_size == size + 20
    for tokens in (ids, new):
        torch.testing.assert_close(again(tokens).logits, larger(tokens).logits, rtol=0, atol=1e-6)
    again.resize_token_embeddings(pad_to_multiple_of=64)
    assert again(new).logits.size(-1) % 64 == 0


def gradients(model, ids, mask, **options):
    model.train().zero_grad()
    labels = ids.masked_fill(mask == 0, -100)
    model(ids, attention_mask=mask, labels=labels, **options).loss.backward()
    return {name: weight.grad.clone() for name, weight in model.named_parameters()}


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_gradient_checkpointing_does_not_change_gradients(exported, ids):
    model = copy.deepcopy(exported[2])
    mask = torch.ones_like(ids)
    mask[0, :7] = 0
    want = gradients(model, ids, mask)
    assert all(gradient.abs().sum() > 0 for gradient in want.values())
    model.gradient_checkpointing_enable()
    recomputed = []
    for module in model.modules():
        if type(module).__name__ in ("MLP", "NanoChatMLP"):
            module.register_forward_pre_hook(lambda *_: recomputed.append(1))
    found = gradients(model, ids, mask)
    cfg = exported[0].cfg
    passes = cfg.n_passes if isinstance(cfg, RecursiveConfig) else cfg.n_layer
    assert len(recomputed) == 2 * passes
    for name, gradient in want.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6)
    model.gradient_checkpointing_disable()
    recomputed.clear()
    gradients(model, ids, mask)
    assert len(recomputed) == passes
    weights = torch.optim.SGD(model.parameters(), lr=0.1)
    before = float(model(ids, labels=ids).loss)
    weights.step()
    assert float(model(ids, labels=ids).loss) < before


def test_bos_embedding_gets_gradients(exported, ids):
    _, _, theirs, tokenizer = exported
    model = copy.deepcopy(theirs)
    ids = torch.cat((torch.full((2, 1), tokenizer.bos_token_id), ids), 1)
    gradients(model, ids, torch.ones_like(ids))
    assert model.get_input_embeddings().weight.grad[tokenizer.bos_token_id].abs().sum() > 0


@torch.no_grad()
def test_num_items_in_batch_normalizes_the_loss(exported, ids):
    _, _, theirs, _ = exported
    mean = theirs(ids, labels=ids).loss
    shared = theirs(ids, labels=ids, num_items_in_batch=torch.tensor(1000)).loss
    torch.testing.assert_close(shared, mean * 2 * 39 / 1000)


def checkpointed(model):
    model.gradient_checkpointing_enable()
    return model.train()


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    "call, named",
    [
        (lambda m, x: m(x, output_attentions=True), "output_attentions=True"),
        (lambda m, x: m(x, token_type_ids=x), "no argument token_type_ids"),
        (lambda m, x: m(), "input_ids are missing"),
        (lambda m, x: m(x, attention_mask=torch.ones(2, 3)), r"attention_mask has shape \(2, 3\)"),
        (lambda m, x: m(x, attention_mask=torch.ones(2, 1, 40, 40)), "attention_mask has"),
        (lambda m, x: m(x, position_ids=0 * x, use_cache=True), "position_ids.*use_cache=False"),
        (lambda m, x: checkpointed(m)(x, use_cache=True), "gradient checkpointing.*use_cache"),
    ],
)
def test_remote_code_errors_name_unsupported_arguments(tokenizer, ids, call, named):
    shape = replace(TINY, vocab_size=tokenizer.vocab_size)
    remote = NanochatForCausalLM(NanochatConfig(gpt=asdict(shape))).eval()
    with pytest.raises(ValueError, match=named):
        call(remote, ids)
    assert isinstance(remote(ids, return_dict=False), tuple)


@torch.no_grad()
def test_model_from_config_starts_at_uniform_loss(exported, ids):
    ours, _, theirs, _ = exported
    torch.empty(1_000_000).fill_(math.nan)  # possible contents of uninitialized memory
    options = {} if is_native(ours.cfg) else {"trust_remote_code": True}
    new = transformers.AutoModelForCausalLM.from_config(theirs.config, **options)
    assert float(new(ids, labels=ids).loss) == pytest.approx(math.log(ours.cfg.vocab_size), abs=0.1)


@torch.no_grad()
def test_half_precision_and_device_maps_preserve_logits(exported, ids):
    ours, folder, theirs, _ = exported
    for dtype in (torch.bfloat16, torch.float16):
        half = copy.deepcopy(theirs).to(dtype)
        assert (half(ids).logits.float() - ours(ids)).abs().max() < 0.1
        assert half.generate(ids[:1], max_new_tokens=3).shape == (1, 43)
    options = {} if is_native(ours.cfg) else {"trust_remote_code": True}
    for device_map in ("auto", {"": "cpu"}):
        mapped = transformers.AutoModelForCausalLM.from_pretrained(
            folder, device_map=device_map, **options
        )
        torch.testing.assert_close(mapped(ids).logits, ours(ids), rtol=0, atol=1e-4)


def test_lora_on_all_linear_layers_gets_gradients(exported, ids):
    peft = pytest.importorskip("peft")
    adapter = peft.LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM")
    model = peft.get_peft_model(copy.deepcopy(exported[2]), adapter)
    model.train()
    model(input_ids=ids, labels=ids).loss.backward()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert trained and all(weight.grad is not None for weight in trained.values())
    model.eval()
    assert model.generate(input_ids=ids, max_new_tokens=2).shape[0] == 2


# ------------------------------------------------------------------------------------------------
# The tokenizer


def test_exported_tokenizer_ids_equal_ours(exported, texts):
    _, _, _, theirs = exported
    tokenizer = read_hf(exported[1]).tokenizer
    rng = np.random.default_rng(0)
    pool = list("aZ é語한😀 \n\t\r.,'’-_/#1234567890") + ["don't", " the", "\n\n", "  ", "ÅNG"]
    odd = ["".join(rng.choice(pool, rng.integers(0, 40))) for _ in range(2_000)]
    for text in [*texts, *odd]:
        assert theirs.encode(text, add_special_tokens=False) == tokenizer.encode(text), text


def test_ids_equal_ours_on_a_shard_of_real_text(hub, tmp_path):
    compare_ids(hub, tmp_path, "shard_00005")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_ids_equal_ours_on_all_real_text(hub, tmp_path):
    compare_ids(hub, tmp_path, "shard_")


def compare_ids(hub, tmp_path, stem):
    """Compare both tokenizers on the shards of mini-pretrain whose names start with `stem`."""
    import pyarrow.parquet as pq

    folder = hub / "datasets" / "local" / "mini-pretrain"
    shards = sorted(path for path in folder.rglob("*.parquet") if path.name.startswith(stem))
    assert shards
    documents = pq.read_table(shards[-1], columns=["text"])["text"].to_pylist()
    tokenizer = Tokenizer.train(documents, 8192)
    cfg = replace(TINY, vocab_size=tokenizer.vocab_size)
    write_hf(tmp_path, build_model(cfg, CPU, torch.float32, seed=0), tokenizer)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    for shard in shards:
        documents = pq.read_table(shard, columns=["text"])["text"].to_pylist()
        ids, offsets = tokenizer.encode_flat(documents)
        for at in range(0, len(documents), 256):
            batch = theirs(documents[at : at + 256], add_special_tokens=False)["input_ids"]
            for number, got in enumerate(batch, at):
                assert got == ids[offsets[number] : offsets[number + 1]].tolist(), (shard, number)


TEXTS = ["Hi.", "", "  ", "\n", "a\n\nb", "Grüße 안녕", "😀", "12345", " The market ", "{{ x }}"]


def drawn_text(rng):
    return "".join(rng.choices(TEXTS, k=rng.randrange(4)))


def drawn_parts(rng, role):
    """Random message parts of the types allowed for the role."""
    parts = []
    for _ in range(rng.randrange(5)):
        kind = rng.choice(["text", "python", "python_output"] if role == "assistant" else ["text"])
        parts.append({"type": kind, "text": drawn_text(rng)})
    return parts


def full_stop(text):
    return text and text + "."


def drawn_conversation(rng):
    """Random messages of all roles, in any order."""
    messages = []
    for _ in range(rng.randrange(1, 9)):
        role = rng.choice(["system", "user", "user", "assistant", "assistant"])
        content = drawn_text(rng) if rng.random() < 0.5 else drawn_parts(rng, role)
        messages.append({"role": role, "content": content})
    kinds = [p["type"] for m in messages if isinstance(m["content"], list) for p in m["content"]]
    if "python_output" in kinds:
        # If no special token follows the trained text, transformers ends the mask at the first of
        # the last character's tokens. Ending with a period is safe: a period is one token.
        for message in messages:
            if isinstance(message["content"], str):
                message["content"] = full_stop(message["content"])
            else:
                parts = [{**p, "text": full_stop(p["text"])} for p in message["content"]]
                message["content"] = parts
    return messages


@pytest.fixture(scope="module")
def conversations():
    rng = random.Random(0)
    return [drawn_conversation(rng) for _ in range(500)]


@pytest.fixture(scope="module")
def chat_tokenizer(tokenizer, tmp_path_factory):
    """Our tokenizer, loaded by transformers."""
    folder = tmp_path_factory.mktemp("chat")
    write_hf(folder, model_of(tokenizer, "classic"), tokenizer)
    return transformers.AutoTokenizer.from_pretrained(folder)


def test_chat_template_ids_and_masks_equal_render(chat_tokenizer, tokenizer, conversations):
    for messages in conversations:
        found = chat_tokenizer.apply_chat_template(messages, return_assistant_tokens_mask=True)
        ids, mask = render(tokenizer, messages)
        assert found["input_ids"] == ids, messages
        assert found["assistant_masks"] == mask, messages


def test_chat_template_prompts_equal_render_prompt(chat_tokenizer, tokenizer, conversations):
    for messages in conversations:
        found = chat_tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False
        )
        assert found == render_prompt(tokenizer, messages), messages


def test_continue_final_message_equals_continue_last(chat_tokenizer, tokenizer, conversations):
    for messages in conversations:
        if messages[-1]["content"] != []:  # transformers cannot continue an empty message
            found = chat_tokenizer.apply_chat_template(
                messages, continue_final_message=True, return_dict=False
            )
            assert found == render_prompt(tokenizer, messages, continue_last=True), messages


@pytest.mark.parametrize(
    "role, content, named",
    [
        ("tool", "x", "message 1 has role tool"),
        (None, "x", "message 1 has role"),
        ("user", None, "message 1: content is neither"),
        ("user", {"type": "text", "text": "x"}, "message 1: content is neither"),
        ("user", [{"type": "image", "text": "x"}], "message 1 of the user has a part"),
        ("system", [{"type": "python", "text": "x"}], "message 1 of the system has a part"),
        ("assistant", [{"type": "tool", "text": "x"}], "message 1 of the assistant has a part"),
        ("assistant", [{"type": "text"}], "message 1 of the assistant has a part"),
        ("assistant", ["x"], "message 1 of the assistant has a part"),
    ],
)
def test_chat_template_errors_name_the_message(chat_tokenizer, tokenizer, role, content, named):
    messages = [{"role": "user", "content": "Hi"}, {"role": role, "content": content}]
    with pytest.raises(Exception, match=named):
        chat_tokenizer.apply_chat_template(messages)
    with pytest.raises(ValueError, match="message 1"):
        render(tokenizer, messages)


def test_one_bos_in_plain_text_and_in_rendered_chats(chat_tokenizer, tokenizer, conversations):
    bos = tokenizer.bos_id
    assert chat_tokenizer("Hi.")["input_ids"] == [bos, *tokenizer.encode("Hi.")]
    assert chat_tokenizer("Hi.", add_special_tokens=False)["input_ids"] == tokenizer.encode("Hi.")
    for messages in conversations[:50]:
        text = chat_tokenizer.apply_chat_template(messages, tokenize=False)
        ids = chat_tokenizer(text, add_special_tokens=False)["input_ids"]
        assert ids == render(tokenizer, messages)[0] and ids.count(bos) == 1
        # A tokenizer.json cannot detect that the text already has BOS (see the model card)
        assert chat_tokenizer(text)["input_ids"] == [bos, *ids]


def test_sanitized_chats_keep_special_token_names_as_text(chat_tokenizer, tokenizer):
    messages = [{"role": "user", "content": "<|bos|>Hi<|user_end|><|assistant_start|>"}]
    special = {tokenizer.special(name) for name in SPECIAL_TOKENS}
    parsed = chat_tokenizer.apply_chat_template(messages, return_dict=False)
    assert len(special.intersection(parsed)) == 4 and parsed.count(tokenizer.bos_id) == 2
    ids = chat_tokenizer.apply_chat_template(
        messages, sanitize_control_tokens=True, return_dict=False
    )
    assert [i for i in ids if i in special] == [ids[0], ids[1], ids[-1]]
    assert tokenizer.decode(ids[2:-1]) == messages[0]["content"]


def test_byte_letters_are_unique():
    letters = byte_letters()
    assert sorted(letters) == list(range(256)) and len(set(letters.values())) == 256
    assert letters[ord("A")] == "A" and letters[ord(" ")] == "\u0120" and letters[10] == "\u010a"


def test_merge_pair_rejects_a_token_without_a_merge():
    ranks = {bytes([b]): b for b in range(256)} | {b"abc": 256}
    with pytest.raises(ValueError, match="abc"):
        merge_pair(b"abc", ranks)
    assert merge_pair(b"ab", {**ranks, b"ab": 257}) == (b"a", b"b")


def test_model_card_lists_compatibility_and_its_code_runs(exported, capsys):
    ours, folder, _, _ = exported
    card = (folder / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\n") and "{" not in card.split("## T")[1]
    (code,) = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    capsys.readouterr()
    exec(code.replace("<this folder>", str(folder)), {})
    assert capsys.readouterr().out
    for name in ("transformers 5", "vLLM", "llama.cpp"):
        assert f"- {name}: " in card
    assert ("trust_remote_code" in card) == ("output_attentions" in card) != is_native(ours.cfg)


def test_text_generation_pipeline_answers_chats(exported):
    ours, folder, _, _ = exported
    options = {} if is_native(ours.cfg) else {"trust_remote_code": True}
    answer = transformers.pipeline("text-generation", str(folder), device="cpu", **options)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello!"}]
    output = answer(messages, max_new_tokens=4)[0]["generated_text"]
    assert output[:-1] == messages and output[-1]["role"] == "assistant"


# ------------------------------------------------------------------------------------------------
# Import


def test_import_restores_weights_config_and_tokenizer(exported, tokenizer):
    ours, folder, _, _ = exported
    back = read_hf(folder)
    assert back.cfg == ours.cfg and back.tokenizer.fingerprint == tokenizer.fingerprint
    assert back.weights.keys() == ours.state_dict().keys()
    for name, weight in ours.state_dict().items():
        assert torch.equal(back.weights[name], weight), name


@pytest.mark.parametrize("name", ["classic", "default"])
def test_bfloat16_weights_are_rounded_once(tokenizer, tmp_path, ids, name):
    ours = model_of(tokenizer, name)
    write_hf(tmp_path, ours, tokenizer, torch.bfloat16)
    theirs = load(tmp_path)[0]
    assert {weight.dtype for weight in theirs.parameters()} == {torch.bfloat16}
    assert (theirs(ids).logits.float() - ours(ids)).abs().max() < 0.1
    for name, weight in read_hf(tmp_path).weights.items():
        assert torch.equal(weight, ours.state_dict()[name].bfloat16().float()), name


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("config.json", {"model_type": "llama"}, "'llama'.*--hf_path"),
        ("config.json", {"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.*not 15"),
        ("config.json", {"rope_parameters": {"rope_theta": 5e5}}, "rope_theta': 500000.0"),
        ("config.json", {"rope_parameters": None, "rope_theta": 5e5}, "rope_theta': 500000.0"),
        ("config.json", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "'linear'"),
        ("config.json", {"num_hidden_layers": 3}, "missing or unexpected tensors"),
        ("config.json", {"vocab_size": 999}, "vocab_size is 999, but tokenizer.json has"),
        ("tokenizer.json", {"model": {"vocab": {"a": 5}}}, "tokenizer.json"),
    ],
)
def test_unsupported_models_are_rejected_with_a_reason(tokenizer, tmp_path, file, change, message):
    write_hf(tmp_path, model_of(tokenizer, "classic"), tokenizer)
    content = read_json(tmp_path / file)
    (tmp_path / file).write_text(json.dumps({**content, **change}))
    with pytest.raises(ValueError, match=message):
        read_hf(tmp_path)


def test_folder_without_a_model_is_rejected(tokenizer, tmp_path):
    with pytest.raises(FileNotFoundError, match="config.json"):
        read_hf(tmp_path)
    write_hf(tmp_path, model_of(tokenizer, "classic"), tokenizer)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="no weights"):
        read_hf(tmp_path)


@pytest.mark.parametrize(
    "name,stage", [("classic", "sft"), ("default", "sft"), ("recursive", "rl")]
)
def test_export_and_import_give_the_same_checkpoint(base, tokenizer, name, stage):
    model = model_of(tokenizer, name)
    inputs = {"tokenizer": tokenizer.fingerprint}
    state = {
        "stage": stage,
        "source": {"dataset": "embedded"},
        "provenance": {"run_id": "run-1", "seed": 4, "inputs": inputs},
        "identity": {"seed": 4} if stage == "rl" else {"batch_tokens": 4096, "seed": 4},
    }
    saved = save_checkpoint(stage_folder(stage) / "d2", 9, model, None, tokenizer, state)
    export.main(export.Export())
    folder = base / "export" / f"{stage}-{saved.folder.parent.name}"
    import_hf.main(import_hf.ImportHF(hf_path=str(folder)))
    back = find_checkpoint(stage, "imported")
    assert back.step == 9 and back.state["files"] == saved.state["files"]
    for key in ("source", "provenance", "stage"):
        assert back.state[key] == state[key]
    config = read_json(folder / "config.json")
    (folder / "config.json").write_text(
        json.dumps({k: v for k, v in config.items() if k != "nanochat"})
    )
    import_hf.main(import_hf.ImportHF(hf_path=str(folder), stage="mid", model_tag="foreign"))
    foreign = find_checkpoint("mid", "foreign")
    assert foreign.step == 0 and foreign.state["source"] == {}
    assert foreign.state["files"] == saved.state["files"]
    with pytest.raises(UsageError, match="already has checkpoints"):
        import_hf.main(import_hf.ImportHF(hf_path=str(folder), stage="mid", model_tag="foreign"))


def test_export_accepts_short_flags(base, tokenizer, command):
    inputs = {"tokenizer": tokenizer.fingerprint}
    state = {"source": {}, "provenance": {"run_id": "run-1", "seed": 4, "inputs": inputs}}
    state |= {"stage": "base", "identity": {"batch_tokens": 4096}}
    model = model_of(tokenizer, "classic")
    for tag, step in (("d2", 3), ("d2", 9), ("d4", 9)):
        save_checkpoint(stage_folder("base") / tag, step, model, None, tokenizer, state)
    command.works("export", "-i", "base", "-g", "d2", "-s", "3")
    (folder,) = (base / "export").iterdir()
    assert folder.name == "base-d2" and read_hf(folder).origin["step"] == 3
    assert "sft" in command.rejects("export", "-i", "sft")


@pytest.mark.parametrize("script", ["base_eval", "base_loss"])
def test_base_evaluators_accept_short_flags(base, script, command, tokenizer):
    state = {"source": {}, "provenance": {"inputs": {"tokenizer": tokenizer.fingerprint}}}
    model = model_of(tokenizer, "classic")
    save_checkpoint(stage_folder("base") / "d2", 9, model, None, tokenizer, state)
    error = command.rejects(script, "-g", "d2", "-s", "3")
    assert "base_checkpoints/d2" in error and "3" in error and "unrecognized" not in error.lower()


# ------------------------------------------------------------------------------------------------
# Few-shot evaluation of Hugging Face models


def score(base, folder, **settings):
    """Run scripts.base_eval on a Hugging Face model folder; returns the record."""
    machine = DistConfig("cpu", "float32")
    base_eval.main(
        base_eval.BaseEval(
            hf_path=str(folder), suite="embedded", machine=machine, max_per_task=6, **settings
        )
    )
    (path,) = (base / "report").glob("evaluation-of-*.json")
    record = read_json(path)
    path.unlink()
    return record


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_other_hf_architectures_can_be_scored(base, tokenizer, tmp_path, kind):
    shape = {"vocab_size": tokenizer.vocab_size}
    if kind == "gpt2":
        config = transformers.GPT2Config(**shape, n_embd=32, n_layer=2, n_head=2, n_positions=256)
    else:
        config = transformers.LlamaConfig(
            **shape,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=256,
        )
    torch.manual_seed(0)
    folder = tmp_path / kind
    write_hf(folder, model_of(tokenizer, "classic"), tokenizer)  # for its tokenizer
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    record = score(base, folder)
    assert record["section"] == f"Evaluation of {folder}"
    assert record["values"]["CORE metric"]["n"] > 50
    assert read_json(folder / "config.json")["model_type"] == kind
    first = record["provenance"]["inputs"]["hf"]
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    assert score(base, folder)["provenance"]["inputs"]["hf"] != first


@pytest.mark.parametrize("name", ["classic", "default"])
def test_exported_model_scores_equal_ours_item_by_item(base, tokenizer, tmp_path, name):
    state = {
        "source": {"dataset": "embedded"},
        "provenance": {"run_id": "run-1", "seed": 4, "inputs": {}},
    }
    model = model_of(tokenizer, name)
    save_checkpoint(stage_folder("base") / "d2", 9, model, None, tokenizer, state)
    ours = evaluate(base, "d2", max_per_task=6)
    write_hf(tmp_path, model, tokenizer)
    theirs = score(base, tmp_path, trust_remote_code=name == "default")
    assert theirs["items"] == ours["items"]
    assert theirs["values"]["CORE metric"] == ours["values"]["CORE metric"]


def test_remote_code_requires_trust_remote_code(tokenizer, tmp_path):
    write_hf(tmp_path, model_of(tokenizer, "default"), tokenizer)
    with pytest.raises(ValueError, match="trust_remote_code"):
        base_eval.make_hf_candidate(base_eval.BaseEval(hf_path=str(tmp_path)), None)


def test_missing_interop_packages_error_names_the_command(monkeypatch):
    for name in ("nanochat.hf.eval_model", "transformers"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delattr(nanochat.hf, "eval_model", raising=False)
    with pytest.raises(MissingInput, match="uv sync --inexact --group interop"):
        base_eval.make_hf_candidate(base_eval.BaseEval(hf_path="x"), None)
