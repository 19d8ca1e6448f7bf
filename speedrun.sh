#!/usr/bin/env bash
# Train a chat model from scratch and write its report, on CPU or GPUs.
#
#   bash speedrun.sh                       # detect the hardware
#   bash speedrun.sh --plan                # install, print the plan (time, cost), and exit
#   PROFILE=gpu DEPTH=8 bash speedrun.sh   # h100x8, gpu (1 to 7 GPUs) or cpu; depth sets the model size
#   DRY_RUN=1 bash speedrun.sh             # a few steps of every stage, in out/dry-run
#
# If a run is interrupted, rerun the same command: finished stages are skipped if their inputs have
# not changed, and an interrupted training is resumed. All output goes to NANOCHAT_BASE_DIR (default:
# out/), also report.md; REPORT_OUT=<folder> gets a copy of it. WANDB_RUN=<name> logs to Weights &
# Biases, SEED=<n> sets the random seed (use a separate NANOCHAT_BASE_DIR).
case "${BASH_VERSION:-0}" in
[0-3]* | 4.[0-3].*) echo "error: run it as: bash speedrun.sh (bash 4.4 or newer)" >&2 && exit 2 ;;
esac
set -euo pipefail
cd "$(dirname "$0")"

case "$*" in
"") ;;
--plan) plan_only=1 ;;
*) echo "error: unknown argument '$*'; use --plan, or the environment variables at the top of speedrun.sh" >&2; exit 2 ;;
esac
source dev/profile.sh # installs, and detects the hardware

# ---- Flags of each stage per profile ------------------------------------------------------------
score=() core=() mid=() sft=() rl=() chat=()
case "$PROFILE" in
h100x8)
    depth=${DEPTH:-24}
    text=(--dataset=karpathy/climbmix-400b-shuffle)
    tokenizer=(--vocab_size=32768 --max_chars=2000000000)
    shape=(--max_seq_len=2048 --target_param_data_ratio=8 --save_every=500 --compile=autotune)
    rl=(--examples_per_step="$(whole 32)") # a rank decodes 4 questions x 16 samples at a time
    ;;
gpu)
    depth=${DEPTH:-12}
    text=(--dataset=karpathy/climbmix-400b-shuffle)
    tokenizer=(--vocab_size=32768 --max_chars=1000000000)
    shape=(--max_seq_len=2048 --save_every=500)
    mid=(--mixture=smoltalk=100000,mmlu,gsm8k,spelling=5000)
    rl=(--num_iterations=100 --num_samples=8 --examples_per_step="$(whole 16)")
    chat=(--max_problems=500)
    core=(--max_per_task=500)
    ;;
cpu)
    depth=${DEPTH:-4}
    text=(--dataset=embedded)
    tokenizer=(--vocab_size=4096)
    shape=(--max_seq_len=256 --num_iterations=320 --total_batch_size=4096 --eval_every=80
        --eval_tokens=65536)
    score=(--split_tokens=65536 --max_documents=300)
    mid=(--num_iterations=400 --init_lr_frac=0.85 --eval_every=200 --eval_tokens=32768)
    sft=(--num_iterations=80 --eval_every=20 --eval_tokens=32768)
    rl=(--num_iterations=100 --init_lr_frac=0.04 --resample_zero_signal=1 --num_samples=8 --max_new_tokens=96
        --eval_examples=200 --eval_every=50)
    chat=(--max_problems=200 --max_new_tokens=96)
    ;;
esac

if [ -n "${DRY_RUN:-}" ]; then # the last of duplicate flags wins
    export NANOCHAT_BASE_DIR="${NANOCHAT_BASE_DIR:-$PWD/out}/dry-run"
    unset NANOCHAT_REPORT_DIR
    [ "$gpus" -gt 0 ] || [ "$PROFILE" = cpu ] || shape+=(--total_batch_size=$((2048 * processes)))
    text+=(--num_shards=1)
    tokenizer+=(--max_chars=1000000)
    shape+=(--num_iterations=2 --eval_tokens=1 --core_metric_max_per_task=2 --compile=auto)
    score=(--split_tokens=1 --max_documents=8)
    core=(--max_per_task=2)
    mid+=(--num_iterations=2 --eval_tokens=1)
    sft+=(--num_iterations=2 --eval_tokens=1)
    rl+=(--num_iterations=2 --num_samples=2 --max_new_tokens=8 --eval_examples=8 --eval_samples=2)
    chat=(--max_problems=8 --max_new_tokens=8)
fi

# ---- Plan ---------------------------------------------------------------------------------------
[ -n "${plan_only:-}${DRY_RUN:-}" ] || save=--save # for the report
python -m dev.plan --profile="$PROFILE" --depth="$depth" --processes="$processes" --gpu="$gpu_name" ${save:-}
[ -z "${plan_only:-}" ] || exit 0
if [[ $gpu_name =~ H100|H200|H800|H20 ]]; then
    uv sync --quiet --inexact ${SYNC_FLAGS-} --group fa3 ||
        echo "speedrun: FlashAttention 3 was not installed; training works without it"
fi

if [ -f "${REPORT_OUT:-}/report.md" ] && ! grep -q "^# nanochat training report" "$REPORT_OUT/report.md"; then
    echo "error: $REPORT_OUT/report.md is not a report of training; use another REPORT_OUT" >&2
    exit 2
fi

# ---- Stages -------------------------------------------------------------------------------------
few_shot=1 suite=() estimate=() # the embedded dataset has its own few-shot tasks
[ "$PROFILE" = cpu ] || fetch_suite

tag="d$depth"
go=(--run="${WANDB_RUN:-dummy}" --seed="${SEED:-0}" --resume=auto --skip_if_done)
evaluate() { train scripts.chat_eval --source="$1" --model_tag="$tag" "${chat[@]}" --skip_if_done; }

stage "tokenizer" python -m scripts.tok_train "${text[@]}" "${tokenizer[@]}" --skip_if_done
stage "tokenizer evaluation" python -m scripts.tok_eval --skip_if_done
stage "base model" train scripts.base_train --depth="$depth" "${shape[@]}" "${estimate[@]}" "${go[@]}"
stage "base model loss" train scripts.base_loss --model_tag="$tag" "${score[@]}" --skip_if_done
[ "$few_shot" = 0 ] ||
    stage "base model evaluation" train scripts.base_eval --model_tag="$tag" "${core[@]}" "${suite[@]}" --skip_if_done
stage "chat evaluation base" evaluate base
stage "midtraining" train scripts.mid_train --model_tag="$tag" "${mid[@]}" "${go[@]}"
stage "chat evaluation mid" evaluate mid
stage "chat sft" train scripts.chat_sft --model_tag="$tag" "${sft[@]}" "${go[@]}"
offer "Chat with the model so far, in a second terminal" "chat_cli -i sft -g $tag"
stage "chat evaluation sft" evaluate sft
stage "chat rl" train scripts.chat_rl --model_tag="$tag" "${rl[@]}" "${go[@]}"
stage "chat evaluation rl" evaluate rl

python -m scripts.report ${REPORT_OUT:+--out="$REPORT_OUT"}
echo "speedrun: done. The report is ${REPORT_OUT:-${NANOCHAT_REPORT_DIR:-${NANOCHAT_BASE_DIR:-out}}}/report.md."
offer "Chat with your model" "chat_web    # browser; terminal: chat_cli"
