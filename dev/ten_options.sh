#!/usr/bin/env bash
# Does training on ARC questions with up to ten options raise accuracy on four or ten options?
#
#   HF_ENDPOINT=http://127.0.0.1:8400 bash dev/ten_options.sh  # uses korean_study.sh's base models
#
# The control trains on ARC-Easy; the other arm trains on the same number of tokens of ARC-Easy with
# options added by BM25. Both are evaluated on ARC's test questions with four and ten options.
# Writes section "Sweep ten-options" and sweeps/ten-options/ under NANOCHAT_BASE_DIR.
set -euo pipefail
cd "$(dirname "$0")/.."
source .venv/bin/activate

python -m scripts.lab.sweep --name=ten-options --devices=2 --bases=d4 --source=base \
    --mixture=dev/ten_options.json --arms="swap:arc_easy->more" \
    --num_iterations=150 --total_batch_size=2048 --seeds=3 --arm_seeds=3 \
    --flags="--val_mixture=arc_easy,more --eval_tokens=131072 --init_lr_frac=0.15" \
    --tasks="ARC-Easy|ARC-Easy-10|ARC-Challenge|ARC-Challenge-10"
