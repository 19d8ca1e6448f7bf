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

if [ "$0" = "${BASH_SOURCE[0]}" ]; then # else the values of scripts/train_h100_extreme.sh
    name=fast preset=aggressive
    iterations=1000 rows=512 save_every=200 eval_every=100 device_rows=32 eval_tokens=524288
    shards=${SHARDS:-80} chars=500000000 warmup=150
fi

cd "$(dirname "$0")/.."
source dev/profile.sh
seeds=${SEEDS:-$([ "$PROFILE" = cpu ] && echo "0 1 2" || echo 0)}
depth=${DEPTH:-12}

case "$PROFILE" in
h100x8 | gpu)
    [ "$PROFILE" = h100x8 ] || device_rows=None # automatic
    text=karpathy/climbmix-400b-shuffle
    tokenizer=(--vocab_size=65536 --max_chars="$chars")
    shape=(--depth="$depth" --max_seq_len=2048)
    run=(--total_batch_size="$(($(whole "$rows") * 2048))" --num_iterations="${ITERATIONS:-$iterations}"
        --device_batch_size="$device_rows" --save_every="$save_every" --eval_every="$eval_every"
        --sample_every="$eval_every" --eval_tokens="$eval_tokens" --warmup_steps="$warmup"
        --grad_clip=1.0)
    judge=(--eval_tokens="$eval_tokens")
    ;;
cpu)
    text=embedded shards=None depth=${DEPTH:-4}
    tokenizer=(--vocab_size=1024 --max_chars=100000000)
    shape=(--depth="$depth" --max_seq_len=256)
    run=(--total_batch_size=4096 --num_iterations="${ITERATIONS:-60}" --eval_every=30
        --eval_tokens=32768 --grad_clip=1.0)
    judge=(--eval_tokens=65536)
    ;;
esac
shape+=(--window_pattern=L)
text=${TEXT:-$text}; [ ! -e "$text" ] && [ "$text" != embedded ] || shards=None # all files

flags=("$@")
echo "$name: preset $preset, profile $PROFILE, seeds $seeds"
unset NANOCHAT_REPORT_DIR && export NANOCHAT_BASE_DIR="${NANOCHAT_BASE_DIR:-$PWD/out/recursion-$name}"

# For every seed: the recursive model, then two plain ones with the same layers, one trained on the
# same number of tokens, one with the same FLOPs. The flags in `plainly` override the user's.
plainly=(--recursion_preset=none --n_loops=None --n_prelude=None --n_core=None --n_coda=None --supervise=None
    --supervision_base=None --improvement_bonus=None --bptt_loops=None)
stage "tokenizer" python -m scripts.tok_train --dataset="$text" --num_shards="$shards" "${tokenizer[@]}" --skip_if_done
recursive=() plain=()
for seed in $seeds; do
    tag="$name-$seed" folder=$NANOCHAT_BASE_DIR/seeds
    common=("${shape[@]}" "${run[@]}" --run="${WANDB_RUN:-dummy}" "${flags[@]}" --seed="$seed"
        --resume=auto --skip_if_done)
    report=$folder/$tag
    [ "$seed" != "${seeds%% *}" ] || report=$NANOCHAT_BASE_DIR # first seed: main report
    NANOCHAT_REPORT_DIR="$report" stage "recursive model, seed $seed" train \
        scripts.recursion.base_train --recursion_preset="$preset" "${common[@]}" --model_tag="$tag"
    NANOCHAT_REPORT_DIR="$folder/plain-$tag" stage "plain model, equal tokens, seed $seed" train \
        scripts.recursion.base_train "${common[@]}" "${plainly[@]}" --model_tag="plain-$tag"
    flops=$(python -c 'import json, sys; print(json.load(open(sys.argv[1]))["values"]["Total training flops"])' \
        "$report/report/base-model-training.json")
    NANOCHAT_REPORT_DIR="$folder/longer-$tag" stage "plain model, equal FLOPs, seed $seed" train \
        scripts.recursion.base_train "${common[@]}" "${plainly[@]}" --num_iterations=None \
        --target_flops="$flops" --model_tag="longer-$tag"
    recursive+=("$tag")
    plain+=("plain-$tag" "longer-$tag")
done

stage "recursion evaluation" train scripts.recursion.evaluate --model_tags "${recursive[@]}" \
    --plain_tags "${plain[@]}" "${judge[@]}"
python -m scripts.report
if grep -q '"NOT MET' "$NANOCHAT_BASE_DIR/report/recursion.json"; then
    echo "finished, but not all criteria are met"
    exit 1
fi
