"""
EleutherAI's evaluation harness with our checkpoints as its model `nanochat`; its own flags.

    uv sync --inexact --group interop
    python -m scripts.lm_eval run --model=nanochat --model_args=source=base --tasks=arc_easy

Reads   a checkpoint of a stage, and what the harness downloads for its tasks
Writes  what the harness is told to (--output_path)
"""

import sys

try:
    from lm_eval.__main__ import cli_evaluate

    import nanochat.hf.lm_eval  # noqa: F401  (makes the model known)
except ModuleNotFoundError as error:
    sys.exit(f"error: {error.name} is missing\n  make it with:  uv sync --inexact --group interop")

if __name__ == "__main__":
    cli_evaluate()
