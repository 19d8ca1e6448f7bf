#!/usr/bin/env bash
# Recursion, phase 2: extreme preset on H100s, 5,000 steps, compared with plain models.
#
#   bash scripts/train_h100_extreme.sh                          # eight H100s
#   PROFILE=cpu bash scripts/train_h100_extreme.sh              # h100x8, gpu (1 to 7 GPUs), cpu
#
# Otherwise like scripts/train_h100_fast.sh, with half as many rows per step. Both use enough shards
# for the equal-FLOPs plain run.
set -euo pipefail

name=extreme preset=extreme
iterations=5000 rows=256 save_every=500 eval_every=250 device_rows=16 eval_tokens=1048576
shards=${SHARDS:-200} chars=1000000000 warmup=200
source "$(dirname "$0")/train_h100_fast.sh"
