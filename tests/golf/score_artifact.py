"""Score an artifact with nothing but the code that counts toward its size; prints what was used."""

import json
import sys
from pathlib import Path

import torch

from nanochat.distributed import DistContext
from nanochat.eval_bpb import document_bpb
from nanochat.golf.artifact import read_artifact

dist = DistContext(0, 0, 1, torch.device("cpu"), torch.float32)
artifact, texts = read_artifact(Path("model.golf")), json.loads(Path("texts.json").read_text())
bpb = document_bpb(artifact.build(dist), texts, artifact.tokenizer, 8, 4, dist)
loaded = [name for name, module in sys.modules.items() if not hasattr(module, "__path__")]
print(json.dumps({"bpb": bpb.value, "from": sys.modules["nanochat"].__path__[0], "loaded": loaded}))
