"""
Run a script on a GPU whose kernels compute nothing. Code that branches on results is replaced.

    python -m tests.on_null_gpu scripts.base_train --depth=2

Sizes, dtypes, devices, memory and compiled graphs are as on a real GPU; all values are garbage.
"""

import runpy
import sys

import numpy as np
import torch

from nanochat import checkpoint, distributed, engine, eval_bpb, optim, preflight, rl, train

argmax, total = torch.Tensor.argmax, distributed.DistContext.sum
sum_on_device, copy_to_host = distributed.DistContext.sum_on_device, train.copy_to_host
GOOD = train.Verdict(
    loss=1.0, norm=1.0, scale=1.0, clipped_scale=1.0, tokens=4096, stopped=0, good=1
)


def sum_and_remember(machine, *values):
    """The last value of a step's sums is whether a stop was requested."""
    sum_and_remember.stopped = values[-1] is True
    return sum_on_device(machine, *values)


def copy_good_verdict(verdict, machine):
    """Wait for the device as in a real step; its values are garbage, but for a stop."""
    read, stopped = copy_to_host(verdict, machine), sum_and_remember.stopped
    return lambda: read() and GOOD._replace(stopped=int(stopped), good=int(not stopped))


torch.backends.cuda.enable_cudnn_sdp(False)  # avoid asking cuDNN for a plan
torch.exp2 = lambda x: torch.exp(x * 0.6931471805599453)  # exp2 is compiled on first use
optim.touched_rows = lambda grad: (torch.zeros(1, dtype=torch.int64, device="cuda"), grad[:1])
checkpoint.first_not_finite = lambda named: None
train.copy_to_host = copy_good_verdict
distributed.DistContext.sum_on_device = sum_and_remember
preflight.probe_attention = lambda backend, *shape: "not available" if backend == "fa3" else None
preflight.choose_engine_compile = lambda wanted, machine, most_tokens: bool(wanted)
engine.sample = lambda logits, settings, uniform: [int(logits.size(-1) * u) for u in uniform]
distributed.DistContext.sum = lambda machine, *x: np.nan_to_num(total(machine, *x)).tolist()
eval_bpb.Bpb.value = property(lambda scored: 1.0)
rl.RolloutLoader.reward = lambda self, i, answer: float(sum(answer.ids) % 2)
torch.Tensor.argmax = lambda x, dim=None: 0 * argmax(x).cpu() if dim is None else argmax(x, dim)

if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
