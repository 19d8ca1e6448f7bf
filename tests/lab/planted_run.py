"""
A training process with planted results: python -m tests.lab.planted_run <module> <flags>

Sweeps start it instead of the pipeline's scripts, see the fixture `planted_runs`. The best
init_lr_frac is 0.3; base models follow a known scaling law. faults.json under the base directory:
seed -> exit status, or "sleep".
"""

import json
import math
import os
import random
import signal
import sys
import time
from pathlib import Path

from nanochat.records import Cost, item_scores, write_record

module, *words = sys.argv[1:]
flags = dict(word.lstrip("-").split("=", 1) for word in words if "=" in word)
faults = Path(os.environ["NANOCHAT_BASE_DIR"], "faults.json")
fault = json.loads(faults.read_text()).get(flags.get("seed")) if faults.exists() else None
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
print("threads:", os.environ.get("OMP_NUM_THREADS"), flush=True)
if fault == "sleep":
    time.sleep(60)
elif fault:
    sys.exit(fault)

noise = random.Random(flags.get("seed")).gauss(0, 0.01)
loss = 1 + 0.1 * math.log(float(flags.get("init_lr_frac", 0.3)) / 0.3) ** 2 + noise
values, items = {"Final validation bpb": loss, "val_bpb:x": 2 * loss}, {}
if module == "scripts.chat_rl":
    names = ("pass@1 before", "pass@1 after", "pass@1 change", "pass@16 after")
    values = {name: {"value": 2 - loss, "n": 4, "se": 0.1} for name in names}
elif module == "scripts.chat_eval":
    values, items = (
        {"ARC": {"value": 0.5, "n": 4, "se": 0.1}},
        {"ARC": item_scores(range(4), [1, 1, 0, 0])},
    )
elif module == "scripts.base_train":
    n = 1e5 * int(flags["depth"]) ** 2
    tokens = float(flags["target_flops"]) / (6 * n)
    values = {
        "Number of FLOPs per token": 6 * n,
        "Number of training tokens": tokens,
        "Final validation bpb": 1 + 60 * n**-0.35 + 200 * tokens**-0.4,
    }
write_record(module, flags, values, {}, Cost(0.0), items=items)
