"""Mock run: writes a record with --score; can also sleep or exit with --status."""

import os
import signal
import sys
import time
from pathlib import Path

from nanochat import records

flags = dict(word.removeprefix("--").partition("=")[::2] for word in sys.argv[1:])
folder = Path(flags["report_dir"])
folder.mkdir(parents=True, exist_ok=True)
with (folder / "calls.txt").open("a") as calls:
    calls.write(f"{os.environ.get('OMP_NUM_THREADS')} {flags.get('tag')}\n")
if "sleep" in flags:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
    time.sleep(float(flags["sleep"]))
if "status" in flags:
    sys.exit(int(flags["status"]))
score = float(flags["score"])
values = {"Final validation bpb": score, "val_bpb:x": 2 * score}
if "task" in flags:  # RL
    names = ("pass@1 before", "pass@1 after", "pass@1 change", "Mean reward after")
    values = {name: records.estimate(score, 4, 0.1) for name in names}
items = [float(x) for x in flags.get("items", "").split(",") if x]
records.write_record(
    "Chat SFT", flags, values, records.Provenance("run", 0), records.Cost(0.0), folder
)
if items:
    mean = sum(items) / len(items)
    records.write_record(
        "Chat evaluation sft",
        flags,
        {"ARC": records.estimate(mean, len(items), 0.1)},
        records.Provenance("run", 0),
        records.Cost(0.0),
        folder,
        items={"ARC": records.item_scores(range(len(items)), items)},
    )
