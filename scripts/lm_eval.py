"""
Run EleutherAI's evaluation harness on our checkpoints (model `nanochat`), with its own flags.

    uv sync --inexact --group interop
    python -m scripts.lm_eval run --model=nanochat --model_args=source=base --tasks=arc_easy

Reads   a checkpoint, and datasets that the harness downloads
Writes  results to --output_path
"""

import sys

try:
    from lm_eval.__main__ import cli_evaluate

    import nanochat.hf.lm_eval  # noqa: F401  (registers the model)
except ModuleNotFoundError as error:
    sys.exit(f"error: {error.name} is not installed\n  run:  uv sync --inexact --group interop")

if __name__ == "__main__":
    cli_evaluate()
