"""Score an artifact with nothing but what that needs; prints our modules that were loaded."""

import sys
from pathlib import Path

import torch

from nanochat.dist import DistContext
from nanochat.eval_bpb import document_bpb
from nanochat.golf.artifact import read_artifact

dist = DistContext(0, 0, 1, torch.device("cpu"), torch.float32)
artifact = read_artifact(Path(sys.argv[1]))
document_bpb(artifact.build(dist), ["Tom is here.", "a"], artifact.tokenizer, 8, 4, dist)
for name, module in sys.modules.items():
    package, _, rest = name.partition(".")
    if package in ("nanochat", "rustbpe", "tasks") and not hasattr(module, "__path__"):
        print(rest)
