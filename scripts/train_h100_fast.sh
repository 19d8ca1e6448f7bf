#!/usr/bin/env bash
# Recursion, phase 1: aggressive preset on H100s, 1,000 steps, compared with plain models.
#
#   bash scripts/train_h100_fast.sh                             # eight H100s
#   PROFILE=cpu bash scripts/train_h100_fast.sh                 # h100x8, gpu (1 to 7 GPUs), cpu
#
# SEEDS="0 1 2" measures the spread too. Extra arguments are passed to base_train. Writes to
# out/recursion-fast or NANOCHAT_BASE_DIR. Exits with status 1 if a criterion is not met: gradients
# finite, loss falling, loops improving, first loop unharmed, better than an equal-FLOPs plain model.
# Uses the default learning rates. If interrupted, rerun the same command.
set -euo pipefail

name=fast preset=aggressive
iterations=1000 rows=512 save_every=200 eval_every=100 device_rows=32 eval_tokens=524288
shards=${SHARDS:-80} chars=500000000 warmup=150
source "$(dirname "$0")/../dev/recursion.sh"
