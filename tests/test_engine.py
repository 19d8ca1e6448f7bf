"""Engine output equals that of the plain model and does not depend on the rest of the batch."""

from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import pairwise
from unittest import mock

import pytest
import torch
from torch.nn.attention import flex_attention

from nanochat import attention
from nanochat.engine import TURN_TOKENS, Engine, PenalizedSampling, Sampling, penalize, sample
from nanochat.gpt import GPT, inference_copy
from nanochat.loss import IGNORE, cap
from nanochat.tokenizer import Tokenizer
from tests.conftest import TINY, byte_model

GREEDY = Sampling(max_new_tokens=12, temperature=0.0)
PROMPTS = [[(7 * i + j) % 250 for j in range(n)] for i, n in enumerate((1, 20, 3, 11, 7))]
OPTIONS = {
    "default": {},
    "windows": {"window_pattern": "SL", "max_seq_len": 256},
    "one kv head, no smear": {"n_kv_head": 1, "smear": False},
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """A tokenizer of bytes and special tokens only."""
    return Tokenizer.train(["a b"], 265)


def run_eagerly(graph, *args, **settings):
    return graph.forward


@contextmanager
def compiler(backend):
    """Replace what torch.compile does with the graphs that it traces, which takes minutes."""
    torch._dynamo.reset()
    with mock.patch("torch._inductor.compile_fx.compile_fx", backend):
        yield
    torch._dynamo.reset()


def compiled_graphs():
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def complete(engine, prompts=PROMPTS, settings=GREEDY, **options):
    """Token ids of the completions, all samples of a prompt in one list."""
    groups = engine.generate(prompts, settings, **options)
    return [[each.ids for each in group] for group in groups]


def finish(engine):
    while engine.busy:
        engine.step()


def decode_without_cache(model, prompt, ends):
    """Greedy decoding with a full forward pass per token."""
    ids = []
    while len(ids) < GREEDY.max_new_tokens:
        token = int(model(torch.tensor([prompt + ids]))[0, -1].argmax())
        if token in ends:
            break
        ids.append(token)
    return ids


@pytest.mark.parametrize("option", OPTIONS)
@torch.no_grad()
def test_greedy_decoding_equals_full_forward_without_cache(tokenizer, option):
    model = byte_model(**OPTIONS[option])
    ends = set(map(tokenizer.special, TURN_TOKENS))
    prompts = [*PROMPTS, [9] * 200] if option == "windows" else PROMPTS
    found = complete(Engine(inference_copy(model), tokenizer, slots=3), prompts)
    assert found == [[decode_without_cache(model, prompt, ends)] for prompt in prompts]


def test_V10_completions_do_not_depend_on_the_batch(tokenizer):
    model, alone = byte_model(), Engine(byte_model(), tokenizer, slots=1)
    engine, groups = Engine(model, tokenizer, slots=4), []
    for i in range(9):  # completions end, and others take their slots, at different steps
        settings = Sampling(3 + 2 * i, 0.8 + 0.1 * i, (None, 40)[i % 2], min_p=i / 99, seed=i)
        if i % 3 == 0:
            settings = PenalizedSampling(**vars(settings), presence_penalty=2.0)
        groups.append(engine.submit([i + 1, 2 * i + 5, 9], settings, n=2))
    finish(engine)
    for one, other in groups:
        assert complete(alone, [one.prompt], one.settings, n=2) == [[one.ids, other.ids]]
    assert len({len(one.ids) for one, _ in groups}) > 3


# ---- Tools and ends ------------------------------------------------------------------------------


class Script:
    """Token ids of a tool call, its result and what follows; a model that recites them."""

    def __init__(self, tokenizer, sharpness=1.0):
        special, encode = tokenizer.special, tokenizer.encode
        start, end, stop = map(special, ("<|python_start|>", "<|python_end|>", "<|assistant_end|>"))
        self.call = [start, *encode("6*7"), end]
        self.result = [special("<|output_start|>"), *encode("42"), special("<|output_end|>")]
        self.answer, self.no_answer = encode("ok"), encode("N?")
        self.no_call = [*encode("abc"), end, *self.no_answer]  # nothing has started
        # Token t is followed by u: the head's row of u is the embedding of t; layers add nothing
        self.model = GPT(replace(TINY, vocab_size=265, d_model=64, max_seq_len=48).classic())
        self.model.init_weights(torch.Generator().manual_seed(0))
        head, embed = self.model.head.weight.data, self.model.embed.weight.data
        answered = [self.result[-1], *self.answer, stop]
        called, uncalled = [1, *self.call, *self.no_answer, stop], [2, *self.no_call[:4]]
        for ids in (called, answered, uncalled, [9, 9]):
            for token, following in pairwise(ids):
                head[following] += sharpness * embed[token]


def failed_call(code):
    done: Future[str | None] = Future()
    done.set_exception(MemoryError("no room"))
    return done


@pytest.mark.parametrize(
    ("tool", "answers"),
    [({"6*7": "42"}.get, True), ({}.get, False), (None, False), (failed_call, False)],
)
def test_tool_results_are_injected_and_marked_as_not_sampled(tokenizer, tool, answers):
    script = Script(tokenizer)
    engine = Engine(script.model, tokenizer, slots=2, tool=tool)
    (called,), (plain,) = engine.generate([[3, 1], [4, 2]], replace(GREEDY, max_new_tokens=40))
    result, rest = (script.result, script.answer) if answers else ([], script.no_answer)
    assert called.ids == script.call + result + rest
    assert called.sampled == [True] * len(script.call) + [False] * len(result) + [True] * 2
    assert plain.ids == script.no_call and all(plain.sampled)
    assert called.finish == plain.finish == "stop"


def test_slow_tool_call_frees_the_slot_and_changes_no_token(tokenizer):
    script, later = Script(tokenizer, sharpness=0.25), Future()
    script.model.head.weight.data[script.answer] = 0  # after the result, all tokens are likely
    settings = Sampling(30, seed=2)
    instant = Engine(script.model, tokenizer, tool={"6*7": "xyz"}.get)
    engine = Engine(script.model, tokenizer, slots=1, tool=lambda code: later)
    (slow,), (other,) = (engine.submit(prompt, settings) for prompt in ([3, 1], [4, 2]))
    while other.finish is None:
        engine.step()
    assert slow.ids == script.call and slow.finish is None and engine.busy
    assert engine.step() == []
    later.set_result("xyz")
    finish(engine)
    assert complete(instant, [[3, 1]], settings) == [[slow.ids]] and len(slow.ids) > 15


def test_completion_stops_at_max_new_tokens_or_context_end(tokenizer):
    engine = Engine(Script(tokenizer).model, tokenizer, capacity=16)
    for most, expected in ((5, 5), (500, 14)):
        ((row,),) = engine.generate([[1, 9]], replace(GREEDY, max_new_tokens=most))
        assert (row.ids, row.finish) == ([9] * expected, "length")
    with pytest.raises(ValueError, match="the prompt has 16 tokens.* 1 to 15"):
        engine.check([1] * 16)


# ---- Dtypes and compilation ----------------------------------------------------------------------


def test_B14_the_cache_has_the_compute_dtype(tokenizer):
    want = complete(Engine(byte_model(), tokenizer))
    for dtype in (torch.bfloat16, torch.float16):
        model = inference_copy(byte_model(dtype=dtype))
        cache = model.new_cache(2)
        assert {x.dtype for x in (*cache.keys, *cache.values, cache.embeds)} == {dtype}
        found = complete(Engine(model, tokenizer))
    assert found == want  # float16 is precise enough for that


@pytest.mark.parametrize("works", [True, False])
def test_compiled_engine_equals_eager_with_a_changing_batch(tokenizer, works, capsys):
    model, before = inference_copy(byte_model()), compiled_graphs()
    with compiler(run_eagerly if works else mock.Mock(side_effect=RuntimeError("no compiler"))):
        found = complete(Engine(model, tokenizer, slots=3, compiled=True))
    assert found == complete(Engine(model, tokenizer, slots=3))
    assert (compiled_graphs() > before) == works != ("no compiler" in capsys.readouterr().out)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_gpu_graphs_equal_eager_steps_in_every_thread(tokenizer):
    model = inference_copy(byte_model().cuda())
    want = complete(Engine(model, tokenizer, slots=3))
    engine = Engine(model, tokenizer, slots=3, compiled=True)
    for _ in range(2):
        with ThreadPoolExecutor(1) as thread:
            assert thread.submit(complete, engine).result() == want


# ---- Sampling ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({"temperature": 2.0, "top_k": 9}, [0, 1, 2, 3, 4]),
        ({"top_k": 2}, [0, 4]),
        ({"top_p": 0.4}, [0]),  # probabilities: .47 .17 .06 .02 .28
        ({"top_k": 3, "top_p": 0.7}, [0, 4]),
        ({"temperature": 2.0, "top_p": 0.9, "min_p": 0.5}, [0, 1, 4]),
    ],
)
def test_sampling_follows_the_probabilities_of_kept_tokens(settings, kept):
    n, logits = 4000, torch.tensor([2.0, 1.0, 0.0, -1.0, 1.5])
    uniform = torch.rand(n, generator=torch.Generator().manual_seed(1)).tolist()
    uniform[-1] = 1 - 2**-53
    drawn = sample(logits.repeat(n, 1), [Sampling(**settings)] * n, uniform)
    scaled = torch.full((5,), -torch.inf)
    scaled[kept] = logits[kept] / settings.get("temperature", 1.0)
    found = torch.bincount(torch.tensor(drawn), minlength=5) / n
    torch.testing.assert_close(found, scaled.softmax(0), atol=0.03, rtol=0)
    assert set(drawn) == set(kept)


def test_penalties_and_biases_change_logits_of_their_row_only():
    logits = torch.tensor([[2.0, 1.0, -1.0, 0.5]] * 3)
    one = PenalizedSampling(frequency_penalty=0.5, presence_penalty=0.25, repetition_penalty=2.0)
    other = PenalizedSampling(presence_penalty=-1.0, logit_bias={3: 100.0, 0: -1.0})
    ids = [[0, 2, 0], [0, 0], [0, 1, 2, 3]]
    want = [[1 - 1.25, 1.0, -2 - 0.75, 0.5], [2 + 1.0 - 1, 1.0, -1.0, 100.5], logits[2].tolist()]
    penalize(logits, [one, other, Sampling()], ids)
    assert logits.tolist() == want


@pytest.mark.parametrize("settings", [{}, {"top_k": 5}, {"top_p": 0.8}, {"temperature": 0.0}])
def test_capping_only_the_candidates_samples_the_same(settings):
    generator = torch.Generator().manual_seed(3)
    logits, uniform = 20 * torch.randn(50, 40, generator=generator), [i / 50 for i in range(50)]
    every = [Sampling(**settings)] * 50
    assert sample(logits, every, uniform, capped=False) == sample(cap(logits), every, uniform)


def test_tiny_temperatures_are_greedy():
    logits = 3 * torch.randn(3, 30, generator=torch.Generator().manual_seed(2))
    found = sample(logits, [Sampling(temperature=t) for t in (0, 1e-37, 1e-300)], [0.99] * 3)
    assert found == logits.argmax(1).tolist()


@pytest.mark.parametrize("backend", ["sdpa", "flex"])
@compiler(run_eagerly)
def test_R36_second_use_compiles_nothing(backend, monkeypatch):
    monkeypatch.setattr(attention, "compiled_flex", partial(getattr, flex_attention))  # on a CPU
    tokenizer, tokens = Tokenizer.train(["a b"], 265), torch.arange(300).view(2, 150) % 250
    model = byte_model(window_pattern="SL", max_seq_len=150)
    model.backend = backend
    model.compile()

    def use(T):
        """Train, score rows, score and continue prompts of about T tokens."""
        if backend != "flex":  # has no gradients on a CPU
            model.loss(tokens, tokens).backward()
            model.loss(tokens, tokens.where(tokens % T > 0, IGNORE)).backward()
        for segments in (None, tokens // 99):
            model.token_losses(tokens, tokens, segments)
        engine = Engine(inference_copy(model), tokenizer, slots=2, compiled=True)
        engine.model.token_losses(tokens[:, :T], tokens[:, :T])
        for prompts in ([[1] * T, [2]], [[3] * (T + 1)]):
            engine.generate(prompts, Sampling(max_new_tokens=4, temperature=0.0))
        return compiled_graphs()

    before = compiled_graphs()
    assert before < use(3) == use(8)
