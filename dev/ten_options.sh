#!/usr/bin/env bash
# Do questions with up to ten options, made from ARC's own, teach anything about four, or about ten?
#
#   HF_ENDPOINT=http://127.0.0.1:8400 bash dev/ten_options.sh     # after dev/korean_study.sh: its bases
#
# The control learns ARC-Easy as it is, the arm as many tokens of it with further options (BM25).
# Both are asked ARC's test questions with four options and with ten. Writes the section
# "Sweep ten-options" and sweeps/ten-options/ below NANOCHAT_BASE_DIR.
set -euo pipefail
cd "$(dirname "$0")/.."
source .venv/bin/activate

python -m scripts.lab.sweep --name=ten-options --devices=2 --bases=d4 --source=base \
    --mixture=dev/ten_options.json --arms="swap:arc_easy->more" \
    --num_iterations=150 --total_batch_size=2048 --seeds=3 --arm_seeds=3 \
    --flags="--val_mixture=arc_easy,more --eval_tokens=131072 --init_lr_frac=0.15" \
    --tasks="ARC-Easy|ARC-Easy-10|ARC-Challenge|ARC-Challenge-10"
