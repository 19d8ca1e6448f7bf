#!/usr/bin/env bash
# Repeats the run whose report was the starting point of this project: a classic model of depth 8
# (92,274,688 parameters) with fine-tuning and RL focused on AQuA, algebra word problems with five
# options.
#
#   bash scripts/train_aqua.sh               # detect the machine
#   PROFILE=gpu bash scripts/train_aqua.sh   # h100x8 (original settings), gpu (1 to 7 GPUs), cpu
#
# Downloads real data from the Hub: TEXT is the pretraining dataset, TALK the conversations,
# EVAL_BUNDLE the few-shot tasks (folder, zip or URL). Writes to out/aqua or NANOCHAT_BASE_DIR. If
# interrupted, rerun the same command.
set -euo pipefail
cd "$(dirname "$0")/.."
source dev/profile.sh
export NANOCHAT_BASE_DIR="${NANOCHAT_BASE_DIR:-$PWD/out/aqua}"
TEXT=${TEXT:-karpathy/climbmix-400b-shuffle}
TALK=${TALK:-HuggingFaceTB/smol-smoltalk}

# AQuA has 254 validation and 254 test questions; loss, RL and evaluation use all of them.
depth=8 talk=10000
tokenizer=(--vocab_size=65536 --max_chars=2000000000)
base=(--max_seq_len=2048 --num_iterations=200 --total_batch_size=524288)
loss=(--max_documents=500)
mid=(--num_iterations=200 --mixture="smoltalk:$TALK,mmlu,gsm8k")
rl=(--examples_per_step=16 --num_samples=4 --max_new_tokens=64 --eval_examples=254)
chat=(--max_new_tokens=512)
core=() sft=() others=()
case "$PROFILE" in # the last of duplicate flags wins
h100x8) ;;
gpu)
    tokenizer+=(--max_chars=1000000000)
    base+=(--total_batch_size="$(($(whole 256) * 2048))")
    mid+=(--num_iterations=100)
    rl+=(--examples_per_step="$(whole 16)" --num_iterations=300)
    chat=(--max_new_tokens=256)
    ;;
cpu)
    depth=${DEPTH:-4} talk=1000
    tokenizer=(--vocab_size=8192 --max_chars=50000000)
    base=(--max_seq_len=512 --num_iterations="${ITERATIONS:-200}" --total_batch_size=8192 --num_shards=1
        --eval_every=100 --core_metric_max_per_task=20)
    core=(--max_per_task=20)
    loss=(--max_documents=100 --split_tokens=32768)
    mid=(--num_iterations="${ITERATIONS:-60}" --mixture="smoltalk:$TALK=4000,mmlu=2000,gsm8k=2000")
    sft=(--num_iterations="${ITERATIONS:-60}" --eval_tokens=1048576 --eval_every=0)
    rl+=(--examples_per_step=4 --num_iterations="${ITERATIONS:-8}" --eval_samples=1)
    chat=(--max_new_tokens=64)
    others=(--max_problems=50)
    ;;
*)
    echo "error: PROFILE must be h100x8, gpu or cpu, not '$PROFILE'" >&2
    exit 2
    ;;
esac

source dev/setup.sh
tag="d$depth"
go=(--run="${WANDB_RUN:-dummy}" --resume=auto --skip_if_done)
learned="arc_easy,arc_challenge,aqua=20000,gsm8k,smoltalk:$TALK=$talk"
evaluate() { # all AQuA questions, then the other tasks
    local score=(scripts.chat_eval --source="$1" --model_tag="$tag" "${chat[@]}" --skip_if_done)
    train "${score[@]}" --task_name="AQUA" &&
        train "${score[@]}" --task_name="GSM8K|ARC-Easy|ARC-Challenge|MMLU" ${others[@]+"${others[@]}"}
}
fetch_suite

stage "tokenizer" python -m scripts.tok_train --dataset="$TEXT" "${tokenizer[@]}" --skip_if_done
stage "tokenizer evaluation" python -m scripts.tok_eval --skip_if_done
stage "base model" train scripts.base_train --depth="$depth" --arch=classic "${base[@]}" \
    ${estimate[@]+"${estimate[@]}"} "${go[@]}"
stage "base model loss" train scripts.base_loss --model_tag="$tag" "${loss[@]}" --skip_if_done
[ "$few_shot" = 0 ] || stage "base model evaluation" train scripts.base_eval --model_tag="$tag" \
    "${suite[@]}" ${core[@]+"${core[@]}"} --skip_if_done
stage "midtraining" train scripts.mid_train --model_tag="$tag" "${mid[@]}" "${go[@]}"
stage "chat evaluation mid" evaluate mid
stage "chat sft" train scripts.chat_sft --model_tag="$tag" --mixture="$learned" \
    --init_lr_frac=0.02 ${sft[@]+"${sft[@]}"} "${go[@]}"
stage "chat evaluation sft" evaluate sft
stage "chat rl" train scripts.chat_rl --model_tag="$tag" --task=aqua --temperature=0.7 \
    "${rl[@]}" "${go[@]}"
stage "chat evaluation rl" evaluate rl
python -m scripts.report
