"""
Print the training FLOPs of a base model.

    python -m dev.spent d4

Reads   base_checkpoints/<tag>/
"""

import contextlib
import sys

from nanochat.checkpoint import find_checkpoint

if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("usage: python -m dev.spent <model_tag>")
    with contextlib.redirect_stdout(sys.stderr):  # keeps warnings out of stdout
        checkpoint = find_checkpoint("base", sys.argv[1])
    print(checkpoint.state["progress"]["flops"])
