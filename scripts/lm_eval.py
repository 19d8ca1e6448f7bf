"""
EleutherAI's evaluation harness with our checkpoints as its model `nanochat`; its own flags.

    uv sync --inexact --group interop
    python -m scripts.lm_eval run --model=nanochat --model_args=source=base --tasks=arc_easy

Reads   a checkpoint of a stage, and what the harness downloads for its tasks
Writes  what the harness is told to (--output_path)
"""

from lm_eval.__main__ import cli_evaluate

import nanochat.lm_eval_model  # noqa: F401  (makes the model known)

if __name__ == "__main__":
    cli_evaluate()
