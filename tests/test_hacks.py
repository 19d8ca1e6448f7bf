"""
Every diff of docs/hacks.md applies to the code. Afterwards, a run equals itself resumed in the
middle and on two ranks, and the next stage, evaluation, chat and export work.
"""

import re
import subprocess
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from nanochat.common import REPOSITORY, read_json
from nanochat.records import read_metrics
from tests.training_runs import (
    all_ranks,
    begin,
    copy_code,
    copy_until,
    curve,
    equal,
    losses,
    python,
    rest_of,
    tensors,
)

PAGE = (REPOSITORY / "docs" / "hacks.md").read_text()
DIFFS = dict(re.findall(r"^### (.+?)\n.*?^```diff\n(.+?)^```$", PAGE, re.MULTILINE | re.DOTALL))
QUICK = "z-loss in pretraining", "Average of the weights", "PPO"  # the others are slow

# Scripts of a copy of the code, one after another in one process. Untrained models get rewards, too
RUN = """
import os, runpy, shlex, sys
OURS = "nanochat", "tasks", "tests"
for name in [name for name in sys.modules if name.split(".")[0] in OURS]:
    del sys.modules[name]
folder, *lines = sys.argv[1:]
os.chdir(folder)
sys.path.insert(0, folder)
from nanochat import rl
rl.score_answer = lambda task, i, answer: float(len(answer) % 2)
for line in lines:
    sys.argv = shlex.split(line)
    runpy.run_module(f"scripts.{sys.argv[0]}", run_name="__main__", alter_sys=True)
"""
SHORT = "--num_iterations=6 --save_every=3 --keep=9 --eval_tokens=1024 --dtype=float32"
BASE = f"base_train --depth=2 --max_seq_len=32 --total_batch_size=512 {SHORT}"
SFT = f"chat_sft --total_batch_size=1024 --max_seq_len=64 --mixture=world_choice=200 {SHORT}"
RL = (
    "chat_rl --task=world_spelling=50 --examples_per_step=4 --num_samples=4 --max_new_tokens=8 "
    "--eval_examples=6 --eval_samples=2 --num_iterations=6 --save_every=3 --keep=9 --dtype=float32"
)
FOLDERS = {BASE: "base", SFT: "chatsft", RL: "chatrl"}


class Edited(NamedTuple):
    """A copy of the code with a diff of the page applied, and a base directory."""

    code: Path
    base: Path

    def run(self, *lines: str) -> str:
        """Output of scripts, which must succeed."""
        return python(self.base, "-c", RUN, str(self.code), *lines)

    def rejects(self, line: str) -> str:
        """Output of a script that must fail with a user error."""
        process = begin(self.base, "-c", RUN, str(self.code), line)
        text = rest_of(process)
        assert process.returncode == 2, text[-3000:]
        return text

    def train(self, line: str, flags: str = "", rtol: float = 1e-4) -> Path:
        """Train whole, resumed and on two ranks. Returns the folder of the whole run."""
        runs, words = self.base / f"{FOLDERS[line]}_checkpoints", f"{line} {flags}"
        self.run(f"{words} --model_tag=whole")
        copy_until(3, runs / "whole", runs / "cut")
        assert "resumed" in self.run(f"{words} --model_tag=cut --resume=auto")
        all_ranks(self.base, "-c", RUN, str(self.code), f"{words} --model_tag=two")
        for file in ("model", "optim"):
            assert equal(*(tensors(runs / tag, 6, file) for tag in ("cut", "whole")))
        one, two = (curve(runs / tag, "loss") for tag in ("whole", "two"))
        np.testing.assert_allclose(two, one, rtol=rtol, atol=1e-6)
        return runs / "whole"

    def use(self, stage: str, *more: str) -> str:
        """Evaluate, chat with and export the model `whole` of a stage, after further commands."""
        which = f"-i {stage} -g whole"
        return self.run(
            *more,
            f"chat_eval {which} -a world_facts --max_problems=4 --max_new_tokens=4",
            f'chat_cli {which} -p "Where does Mira live?"',
            f"export {which}",
        )


AFTER_BASE = f"{SFT} --source=base:whole"
AFTER_SFT = f"{RL} --source=sft:whole --num_iterations=1"


@pytest.fixture
def edited(trained: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Edited:
    """The code with the diff that the test's mark names."""
    code, diff = tmp_path / "code", DIFFS[request.node.callspec.params["name"]]
    copy_code(code, "nanochat", "scripts", "tasks", "rustbpe/src")
    subprocess.run(["git", "apply", "-"], cwd=code, input=diff, text=True, check=True)
    return Edited(code, trained)


def hack(name: str):
    """Mark the test of one diff."""
    assert name in DIFFS
    marks = () if name in QUICK else (pytest.mark.slow,)
    return pytest.mark.parametrize("name", [pytest.param(name, marks=marks)])


@pytest.mark.parametrize("name", DIFFS)
def test_diff_applies(name):
    check = ["git", "apply", "--check", "-"]
    done = subprocess.run(check, cwd=REPOSITORY, input=DIFFS[name], text=True, capture_output=True)
    assert done.returncode == 0, done.stderr


# ---- Loss ----------------------------------------------------------------------------------------


@hack("z-loss in pretraining")
def test_z_loss(edited, name):
    run = edited.train(BASE, "--z_loss=0.0001")
    rise = curve(run, "loss")[0] - losses(edited.base, "one")[0]
    assert rise == pytest.approx(1e-4 * np.log(512) ** 2, rel=0.01)  # all tokens equally likely
    text = edited.rejects(f"{BASE} --model_tag=cut --resume=auto --z_loss=0.001")
    assert "--z_loss: was 0.0001, now 0.001" in text
    edited.use("sft", AFTER_BASE)


@hack("Label smoothing in SFT")
def test_label_smoothing(edited, name):
    line = f"{SFT} --source=base:one"
    run = edited.train(SFT, "--source=base:one --label_smoothing=0.1")
    edited.run(f"{line} --model_tag=plain")
    assert curve(run, "loss")[-1] > curve(run.parent / "plain", "loss")[-1]
    text = edited.rejects(f"{line} --model_tag=cut --resume=auto --label_smoothing=0")
    assert "--label_smoothing: was 0.1, now 0.0" in text
    edited.use("sft", AFTER_SFT)


@hack("Loss on the user's turns")
def test_user_turns(edited, name):
    run = edited.train(SFT, "--source=base:one")
    assert read_metrics(run / "metrics.jsonl")[0]["loss"] > 0
    edited.use("sft", AFTER_SFT)


# ---- Optimizer and schedule ----------------------------------------------------------------------


@hack("AdamW instead of Muon")
def test_adamw(edited, name):
    run = edited.train(BASE)
    state = tensors(run, 6, "optim")
    assert state["blocks.0.mlp.up.weight.second"].shape == (512, 128)  # Muon's has one column
    edited.use("sft", AFTER_BASE)
    assert not tensors(edited.base / "chatsft_checkpoints" / "whole", 6, "optim").keys() ^ state


@hack("Lion")
def test_lion(edited, name):
    run = edited.train(BASE, rtol=1e-3)  # a sign may differ by rounding
    state = tensors(run, 6, "optim")
    assert not state["blocks.0.mlp.up.weight.second"].any() and state["head.weight.second"].any()
    edited.use("sft", AFTER_BASE)


@hack("Cosine schedule")
def test_cosine(edited, name):
    run = edited.train(BASE, "--warmup_steps=2")
    assert curve(run, "lr") == pytest.approx([0.5, 0.933, 0.75, 0.5, 0.25, 0.067], abs=1e-3)
    edited.use("sft", AFTER_BASE)


@hack("Half the batch at first")
def test_half_batch(edited, name):
    run = edited.train(BASE, "--num_iterations=6")
    record = read_json(run / "step_000006" / "state.json")["progress"]
    assert record["rows"] == 8 + 5 * 16
    rate = [entry for entry in read_metrics(run / "metrics.jsonl") if "step_seconds" in entry]
    tokens = [round(entry["tokens_per_second"] * entry["step_seconds"]) for entry in rate]
    assert tokens == [256, *[512] * 5]
    edited.use("sft", AFTER_BASE, "base_loss --model_tag=whole --split_tokens=1024")


@hack("Average of the weights")
def test_average_of_weights(edited, name):
    run = edited.train(BASE)
    model, saved = tensors(run, 6), tensors(run, 6, "optim")
    average = {n.removeprefix("run."): x for n, x in saved.items() if n.startswith("run.")}
    assert equal(model, average)
    before = tensors(run, 3), tensors(run, 3, "optim")
    assert not equal(before[0], {name: before[1][f"run.{name}"] for name in before[0]})
    edited.use("sft", AFTER_BASE)


@hack("Gradient norm of each layer")
def test_gradient_norms(edited, name):
    run = edited.train(BASE)
    norms = [curve(run, f"grad_norm/{layer}") for layer in (0, 1)]
    other = [curve(run.parent / "two", f"grad_norm/{layer}") for layer in (0, 1)]
    np.testing.assert_allclose(other, norms, rtol=1e-3)
    assert (np.square(norms).sum(0) < np.square(curve(run, "grad_norm"))).all()
    assert np.min(norms) > 0


# ---- Model ---------------------------------------------------------------------------------------


@hack("GELU")
def test_gelu(edited, name):
    text = edited.run(f"{SFT} --source=base:one")
    assert "was trained by other code: nanochat/gpt.py changed" in text
    edited.train(BASE)
    assert "other code" not in edited.use("sft", AFTER_BASE)
    edited.run(f"{BASE} --arch=classic --model_tag=plain")
    assert "computes other logits" in edited.rejects("export -i base -g plain")


@hack("Learned weights in RMSNorm")
def test_norm_weights(edited, name):
    run = edited.train(BASE)
    assert tensors(run, 6)["blocks.1.norm2"].std() > 0
    edited.use("sft", AFTER_BASE)
    edited.run(f"{BASE} --arch=classic --model_tag=plain", "export -i base -g plain")


@hack("Embedding and head tied")
def test_tied(edited, name):
    edited.train(BASE)
    edited.use("sft", AFTER_BASE)
    for stage in ("base", "chatsft"):
        model = tensors(edited.base / f"{stage}_checkpoints" / "whole", 6)
        assert model["embed.weight"].equal(model["head.weight"])


@hack("Mixture of experts")
def test_experts(edited, name):
    run = edited.train(BASE, "--n_expert=4")
    model = tensors(run, 6)
    assert model["blocks.0.mlp.up"].shape == (4, 512, 128) and model["blocks.1.mlp.down"].any()
    assert all(x.std() > 0 for x in model["blocks.1.mlp.router.weight"])
    edited.use("sft", AFTER_BASE)
    edited.run(f"{BASE} --n_expert=4 --compile=on --model_tag=fast")
    fast = curve(run.parent / "fast", "loss")
    np.testing.assert_allclose(fast, curve(run, "loss"), rtol=1e-3)


# ---- Chat and RL ---------------------------------------------------------------------------------


@hack("PPO")
def test_ppo(edited, name):
    run = edited.train(RL, "--source=base:one --length_penalty=0.5", rtol=1e-3)
    reward = curve(run, "reward")  # of the answers to the same questions
    assert reward[::2] == reward[1::2] and len(set(reward)) > 1
    assert any(curve(run, "grad_norm"))
    edited.use("rl")


@hack("A tool")
def test_tool(edited, name):
    code = "import sys; sys.path.insert(0, sys.argv[1]); " + RUN.split("folder,")[0]
    code += "sys.path.insert(0, sys.argv[1])\nfrom nanochat.sandbox import Tools\n"
    code += "print(Tools()('today'), Tools()('2*3'))"
    text = python(edited.base, "-c", code, str(edited.code))
    assert re.fullmatch(r"\d{4}-\d\d-\d\d 6\n", text)


@hack("A task from a file")
def test_task_from_file(edited, name):
    file, line = edited.base / "quiz.tsv", f"{SFT} --source=base:one --mixture=quiz*20"
    file.write_text("".join(f"What is {n} + 1?\t{n + 1}\n" for n in range(60)))
    edited.run(f"{line} --model_tag=whole", f"{AFTER_SFT} --task=quiz")
    text = edited.use("sft", "chat_eval -i sft -g whole -a quiz --max_new_tokens=4")
    assert "Quiz" in text
    file.write_text(file.read_text().replace("59 + 1?\t60", "59 + 1?\t61"))
    assert "mixture: was" in edited.rejects(f"{line} --model_tag=whole --resume=auto")
