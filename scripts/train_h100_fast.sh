#!/usr/bin/env bash
# Recursion, first phase: preset aggressive on H100s, 1,000 steps, judged against plain models.
#
#   bash scripts/train_h100_fast.sh --hourly_rate=24            # eight H100s; what they cost an hour
#   PROFILE=cpu bash scripts/train_h100_fast.sh                 # h100x8, gpu, cpu, smoke
#
# SEEDS="0 1 2" gives the verdict a spread to judge by. Flags of base_train may follow. Writes to
# out/recursion-fast, or to NANOCHAT_BASE_DIR, and to logs/train.log. Ends with status 1 where a
# criterion is not met: gradients finite, loss falling, loops in order, first loop not held back,
# better than a plain model of equal FLOPs. The rates are those of any model here: the ones this phase
# once came with learned less (dev/LOG.md). Safe to run again.
set -euo pipefail

name=fast preset=aggressive
iterations=1000 save_every=200 eval_every=100 device_rows=32 eval_tokens=524288
shards=50 chars=500000000 warmup=150
source "$(dirname "$0")/../dev/recursion.sh"
