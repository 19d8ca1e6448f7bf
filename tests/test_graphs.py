"""Compiled graphs: a run compiles none after the first use of each feature."""

import re
import shutil
from pathlib import Path

import pytest
import torch

from nanochat.checkpoint import build_model
from nanochat.eval_core import FewShotTask, eval_model_of, evaluate_task
from nanochat.evaluators import generate_samples
from nanochat.gpt import GPTConfig, inference_copy
from tests.conftest import lively
from tests.lab.test_canaries import TOKENIZER, suite_of
from tests.training_runs import SMALL, folder, python

# Runs a script and prefixes every printed line with the number of compiled graphs. With "eager",
# Dynamo traces as usual, but graphs run uncompiled: seconds instead of minutes.
COUNTED = """
import builtins, functools, runpy, sys
import torch
from torch._dynamo.utils import counters

def counted(*words, plain=print, **options):
    plain(f"graphs {counters['stats']['unique_graphs']} |", *words, **options)

backend, *sys.argv = sys.argv[1:]
torch.compile = functools.partial(torch.compile, backend=backend)
builtins.print = counted
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""
STEPS = 6
BASE = (
    "--compile=True --eval_every=2 --sample_every=4 --core_metric_every=4 --save_every=2 "
    f"--core_metric_max_per_task=4 --model_tag=graphs --num_iterations={STEPS}"
).split()
SFT = (
    "--source=base:graphs --model_tag=graphs --compile=True --mixture=world_facts=300 "
    f"--num_iterations={STEPS} --total_batch_size=512 --max_seq_len=128 --eval_tokens=1024 "
    "--eval_every=2 --canaries=warn --dtype=float32"
).split()


def graphs(text: str) -> dict[int, int]:
    """Step -> number of graphs compiled by the time its loss is logged; key -1: by the end."""
    steps = re.findall(r"^graphs (\d+) \| step +(\d+)/.* loss ", text, re.MULTILINE)
    counts = {int(step): int(count) for count, step in steps}
    return {**counts, -1: int(re.findall(r"^graphs (\d+) \|", text, re.MULTILINE)[-1])}


def test_R36_canaries_samples_and_core_compile_nothing(machine):
    counters = torch._dynamo.utils.counters["stats"]
    cfg = GPTConfig(265, 2, 32, 4, 2, 8, 64)
    model = lively(build_model(cfg, machine.device, machine.dtype, 0))
    model.compile(backend="eager")
    tokens = torch.randint(250, (4, 64), generator=torch.Generator().manual_seed(0))
    items = [{"context": f"{n} and", "continuation": f" {n + 1}"} for n in range(9)]
    task = FewShotTask("count", "language_modeling", 2, 0.0, "", items)

    def use() -> int:
        model.loss(tokens, tokens).backward()
        model.token_losses(tokens, tokens)
        return counters["unique_graphs"]

    before = use()
    generate_samples(model, TOKENIZER)
    suite_of().measure(model)
    evaluate_task(eval_model_of(inference_copy(model), TOKENIZER), task, machine)
    assert use() == before > 0


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_R36_no_graph_is_compiled_after_first_use(trained: Path, backend: str):
    base = trained
    train = ["-c", COUNTED, backend, "scripts.base_train", *SMALL, *BASE]
    found = graphs(python(base, *train))
    assert found[1] > 0  # training compiles, and so does the first validation, after step 2
    assert found[3] == found[STEPS - 1] == found[-1], "validation, samples, CORE or saving compiled"
    shutil.rmtree(folder(base, "graphs") / f"step_{STEPS:06d}")
    again = graphs(python(base, *train))
    assert again[-1] == found[-1], "the resumed run compiled more"

    tuned = graphs(python(base, "-c", COUNTED, backend, "scripts.chat_sft", *SFT))
    assert tuned[3] == tuned[-1], "canaries compiled"
