"""
Run a script with a slow rank 0: python -m tests.slow_rank <seconds> <job> <script> <flags>

Runs scripts.<script>; on rank 0, the job's first call takes <seconds> longer. Jobs: `pack` (a
shard of text), `encode` (a bucket of conversations), `verify` and `write` (a checkpoint), `suite`
(few-shot tasks), and `step` (a training step, which reports no work).
"""

import importlib
import os
import runpy
import sys
import time

SECONDS, JOB, SCRIPT = float(sys.argv[1]), sys.argv[2], sys.argv[3]
TARGETS = {
    "pack": ("nanochat.packing", "pack_shard"),
    "encode": ("nanochat.chat_packing", "write_encoded"),
    "verify": ("nanochat.checkpoint", "read_state"),
    "write": ("nanochat.checkpoint", "save_checkpoint"),
    "suite": ("nanochat.evaluators", "open_suite"),
    "step": ("nanochat.train", "train_step"),
}

if __name__ == "__main__":
    if os.environ["RANK"] == "0":
        module, name = importlib.import_module(TARGETS[JOB][0]), TARGETS[JOB][1]
        plain = getattr(module, name)

        def slow(*words, **flags):
            setattr(module, name, plain)  # once
            print(f"rank 0 is in {JOB}", flush=True)
            time.sleep(SECONDS)
            return plain(*words, **flags)

        setattr(module, name, slow)
    sys.argv[1:4] = []
    runpy.run_module(f"scripts.{SCRIPT}", run_name="__main__", alter_sys=True)
