#!/usr/bin/env bash
# Repeats the run whose report was the starting point of this project: a classic model of depth 8
# (92,274,688 parameters) with fine-tuning and RL focused on AQuA, algebra word problems with five
# options.
#
#   bash scripts/train_aqua.sh               # eight GPUs (original settings)
#   PROFILE=gpu bash scripts/train_aqua.sh   # 1 to 7 GPUs
#
# TEXT is the pretraining dataset, TALK the conversations. Writes to out/aqua or NANOCHAT_BASE_DIR.
# If interrupted, rerun the same command.
set -euo pipefail
cd "$(dirname "$0")/.."
source dev/profile.sh
export NANOCHAT_BASE_DIR="${NANOCHAT_BASE_DIR:-$PWD/out/aqua}"
text=${TEXT:-karpathy/climbmix-400b-shuffle}
talk=smoltalk:${TALK:-HuggingFaceTB/smol-smoltalk}

# AQuA has 254 validation and 254 test questions; loss, RL and evaluation use all of them.
tokenizer=(--vocab_size=65536 --max_chars=2000000000)
base=(--depth=8 --arch=classic --max_seq_len=2048 --num_iterations=200 --total_batch_size=524288)
mid=(--num_iterations=200 --mixture="$talk,mmlu,gsm8k")
rl=(--task=aqua --temperature=0.7 --examples_per_step=16 --num_samples=4 --max_new_tokens=64
    --eval_examples=254)
chat=(--model_tag=d8 --max_new_tokens=512)
case "$PROFILE" in # the last of duplicate flags wins
gpu)
    tokenizer+=(--max_chars=1000000000)
    base+=(--total_batch_size="$(($(whole 256) * 2048))")
    mid+=(--num_iterations=100)
    rl+=(--examples_per_step="$(whole 16)" --num_iterations=300)
    chat+=(--max_new_tokens=256)
    ;;
cpu) fail "scripts/train_aqua.sh needs a GPU" "on a CPU, use speedrun.sh" ;;
esac

go=(--run="${WANDB_RUN:-dummy}" --resume=auto --skip_if_done)
tuned=(--model_tag=d8 "${go[@]}")
evaluate() { # all AQuA questions, then the other tasks
    local score=(scripts.chat_eval --source="$1" "${chat[@]}" --skip_if_done)
    train "${score[@]}" --task_name="AQUA" &&
        train "${score[@]}" --task_name="GSM8K|ARC-Easy|ARC-Challenge|MMLU"
}
fetch_suite

stage "tokenizer" python -m scripts.tok_train --dataset="$text" "${tokenizer[@]}" --skip_if_done
stage "tokenizer evaluation" python -m scripts.tok_eval --skip_if_done
stage "base model" train scripts.base_train "${base[@]}" "${estimate[@]}" "${go[@]}"
stage "base model loss" train scripts.base_loss --model_tag=d8 --max_documents=500 --skip_if_done
[ "$few_shot" = 0 ] ||
    stage "base model evaluation" train scripts.base_eval --model_tag=d8 "${suite[@]}" --skip_if_done
stage "midtraining" train scripts.mid_train "${mid[@]}" "${tuned[@]}"
stage "chat evaluation mid" evaluate mid
stage "chat sft" train scripts.chat_sft --init_lr_frac=0.02 \
    --mixture="arc_easy,arc_challenge,aqua=20000,gsm8k,$talk=10000" "${tuned[@]}"
stage "chat evaluation sft" evaluate sft
stage "chat rl" train scripts.chat_rl "${rl[@]}" "${tuned[@]}"
stage "chat evaluation rl" evaluate rl
python -m scripts.report
