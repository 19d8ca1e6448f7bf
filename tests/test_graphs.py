"""Compiled graphs: a run compiles none after the first use of each feature."""

import builtins
import re
import shutil
from functools import partial

import pytest
import torch
from torch.nn.attention import flex_attention

from nanochat import attention
from nanochat.engine import Engine, Sampling
from nanochat.gpt import inference_copy
from nanochat.tokenizer import Tokenizer
from tests.test_engine import compiled_graphs, compiler, model_of, run_eagerly
from tests.training_runs import SMALL, folder

BASE = (
    "--compile=on --eval_every=2 --sample_every=4 --core_metric_every=4 --save_every=2 "
    "--core_metric_max_per_task=4 --model_tag=graphs --num_iterations=6"
).split()


def graphs_by_step(text):
    """Number of graphs compiled when the loss of each step is printed, and at the end."""
    steps = re.findall(r"^graphs (\d+) \| step +\d+/.* loss ", text, re.MULTILINE)
    return [*map(int, [*steps, *re.findall(r"^graphs (\d+) \|", text, re.MULTILINE)[-1:]])]


@pytest.mark.parametrize("backend", ["blocks", "flex"])
@compiler(run_eagerly)
def test_R36_second_use_compiles_nothing(backend, monkeypatch):
    monkeypatch.setattr(attention, "compiled_flex", partial(getattr, flex_attention))  # on a CPU
    tokenizer, tokens = Tokenizer.train(["a b"], 265), torch.arange(300).view(2, 150) % 250
    model = model_of(tokenizer, n_layer=2, window_pattern="SL", max_seq_len=150)
    for block in model.blocks:
        block.attention.backend = backend
    model.compile()

    def use(T):
        """Train, score rows, score and continue prompts of about T tokens."""
        if backend != "flex":  # has no gradients on a CPU
            model.loss(tokens, tokens).backward()
        for segments in (None, tokens // 99):
            model.token_losses(tokens, tokens, segments)
        engine = Engine(inference_copy(model), tokenizer, slots=2, compiled=True)
        engine.model.token_losses(tokens[:, :T], tokens[:, :T])
        for prompts in ([[1] * T, [2]], [[3] * (T + 1)]):
            engine.generate(prompts, Sampling(max_new_tokens=4, temperature=0.0))
        return compiled_graphs()

    assert use(3) == use(8) > 0


@pytest.mark.slow
@pytest.mark.timeout(1200)
@compiler(run_eagerly)
def test_R36_no_graph_is_compiled_after_first_use(trained, command, monkeypatch):
    plain, start = builtins.print, compiled_graphs()

    def counted(*words, **options):
        plain(f"graphs {compiled_graphs()} |", *words, **options)

    monkeypatch.setattr(builtins, "print", counted)
    first, _, third, _, fifth, _, last = graphs_by_step(command.works("base_train", *SMALL, *BASE))
    assert first > start  # training compiles, and so does the first validation, after step 2
    assert third == fifth == last, "validation, samples, CORE or saving compiled"
    shutil.rmtree(folder(trained, "graphs") / "step_000006")
    torch._dynamo.reset()
    again = graphs_by_step(command.works("base_train", *SMALL, *BASE))
    assert again[-1] - last == last - start, "the resumed run compiled more"
