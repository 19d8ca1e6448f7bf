#!/usr/bin/env bash
# From nothing to a trained model and its report card, on whatever this machine is.
#
#   bash speedrun.sh                       # detect the machine
#   PROFILE=gpu1 DEPTH=8 bash speedrun.sh  # or say it: h100x8, gpu1, cpu; depth is the one dial
#   PROFILE=smoke bash speedrun.sh         # every stage for a moment: does it work here?
#
# Safe to run again: a finished stage is skipped by the fingerprint of its inputs, an interrupted
# training continues. Everything generated goes to out/, or to NANOCHAT_BASE_DIR. WANDB_RUN=<name>
# logs to Weights & Biases; REPORT_OUT=<folder> takes the copy of the report card.
set -euo pipefail
cd "$(dirname "$0")"

# ---- The machine --------------------------------------------------------------------------------
gpus=$( (nvidia-smi -L 2>/dev/null || true) | grep -c '^GPU' || true)
if [ -z "${PROFILE:-}" ]; then
    PROFILE=cpu
    [ "$gpus" -ge 1 ] && PROFILE=gpu1
    [ "$gpus" -ge 8 ] && PROFILE=h100x8
fi

# Per profile: text, vocabulary, shape and horizon; the minutes each stage is expected to take and
# the disk it needs. cpu: measured on 2 cores, 2026-11. GPUs: derived from published rates
# (50% utilisation of the peak at depth 24 on H100s), not measured yet.
score=()
case "$PROFILE" in
h100x8)
    depth=${DEPTH:-24} processes=8 gigabytes=90 rate=24
    text=(--dataset=karpathy/climbmix-400b-shuffle)
    tokenizer=(--vocab_size=32768 --max_chars=2000000000)
    shape=(--max_seq_len=2048 --target_param_data_ratio=8)
    minutes=(3 2 100 5)
    ;;
gpu1)
    depth=${DEPTH:-12} processes=1 gigabytes=40 rate=3
    text=(--dataset=karpathy/climbmix-400b-shuffle)
    tokenizer=(--vocab_size=32768 --max_chars=1000000000)
    shape=(--max_seq_len=2048)
    minutes=(3 2 60 5)
    ;;
cpu)
    depth=${DEPTH:-4} processes=1 gigabytes=7 rate=0
    text=(--dataset=embedded)
    tokenizer=(--vocab_size=4096)
    shape=(--max_seq_len=256 --num_iterations=400 --total_batch_size=4096 --eval_every=100)
    minutes=(1 1 5 1)
    ;;
smoke)
    depth=${DEPTH:-2} processes=1 gigabytes=7 rate=0
    text=(--dataset=embedded --num_shards=2)
    tokenizer=(--vocab_size=1024)
    shape=(--max_seq_len=64 --num_iterations=20 --total_batch_size=512 --eval_tokens=2048)
    minutes=(1 1 1 1)
    score=(--split_tokens=2048 --max_documents=8 --sliding_documents=4)
    ;;
*)
    echo "error: PROFILE is h100x8, gpu1, cpu or smoke, not '$PROFILE'" >&2
    exit 2
    ;;
esac

total=0
for m in "${minutes[@]}"; do total=$((total + m)); done
money=$(awk "BEGIN { printf \"%.2f\", $total / 60 * $rate }")
free=$(df -Pk . | awk 'NR == 2 { print int($4 / 1048576) }')
cat <<PLAN
speedrun: profile $PROFILE (${gpus} GPUs found), depth $depth
  tokenizer            about ${minutes[0]} min
  tokenizer evaluation about ${minutes[1]} min
  base model           about ${minutes[2]} min
  base model loss      about ${minutes[3]} min
  in all               about $total min, \$$money at \$$rate an hour, after the installation (1-3 min)
  disk                 $gigabytes GB needed with the installation, $free GB free
PLAN

# ---- The stages ---------------------------------------------------------------------------------
source dev/setup.sh
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$([ "$processes" -gt 1 ] && echo 1 || nproc 2>/dev/null || echo 4)}"

stage() { # stage <name> <command...>
    local name=$1 status=0
    shift
    echo
    echo "=== $name"
    "$@" || status=$?
    [ "$status" -eq 0 ] && return
    echo "speedrun: stage '$name' failed with status $status; run this script again to continue" >&2
    exit "$status"
}
train() { # one process, or one per GPU
    if [ "$processes" -gt 1 ]; then
        torchrun --standalone --nproc_per_node="$processes" -m "$@"
    else
        python -m "$@"
    fi
}

stage "tokenizer" python -m scripts.tok_train "${text[@]}" "${tokenizer[@]}" --once
stage "tokenizer evaluation" python -m scripts.tok_eval --once
stage "base model" train scripts.base_train --depth="$depth" "${shape[@]}" \
    --run="${WANDB_RUN:-dummy}" --resume=auto --once
stage "base model loss" train scripts.base_loss --model_tag="d$depth" "${score[@]}" --once

python -m scripts.report --out="${REPORT_OUT:-.}" --hourly_rate="$rate"
echo
echo "speedrun: done. The report card is report.md."
