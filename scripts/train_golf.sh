#!/usr/bin/env bash
# Parameter golf: the best model within limits on file size and training time.
#
#   bash scripts/train_golf.sh                          # detect the machine
#   PROFILE=gpu SEEDS="0 1 2" bash scripts/train_golf.sh      # h100x8, gpu (1 to 7 GPUs), cpu
#
# For each seed: train until the time limit, export (fails above the size limit), then evaluate
# from the files alone. TEXT is a folder, "embedded", or a repository, of which SHARDS files are used. Extra
# arguments are passed to base_train; use a new TAG for a new recipe. Writes to out/golf or
# NANOCHAT_BASE_DIR; section "Parameter golf". If interrupted, rerun the same command.
set -euo pipefail
cd "$(dirname "$0")/.."
source dev/profile.sh
export NANOCHAT_BASE_DIR="${NANOCHAT_BASE_DIR:-$PWD/out/golf}"
SEEDS=${SEEDS:-0}

# All profiles: tied embeddings, MLP ratio 3, quantization-aware training for the last 15%.
# GPU profiles use the shape of the Parameter Golf record entry with a vocabulary of 4,096, and
# weight decay to keep weights small; for the CPU profile, see git show 70e4b1b:dev/LOG.md.
recipe=(--tie_embeddings --mlp_ratio=3 --qat_start=0.85 --eval_every=0 --window_pattern=L)
case "$PROFILE" in
h100x8 | gpu)
    text=karpathy/climbmix-400b-shuffle shards=${SHARDS:-140}
    tokenizer=(--vocab_size=4096 --max_chars=2000000000)
    row=(--max_seq_len=2048)
    shape=(--depth=8 --d_model=512 --head_dim=64 --n_kv_head=4 --value_every=0 --rope_dims=32
        --xsa_last_n=2 --qk_gain_init=1.5)
    budget=(--total_batch_size=524288 --max_wallclock_seconds=600 --num_iterations=20000)
    rates=(--matrix_lr=0.03 --tied_lr=0.03 --decay_rule=decoupled --weight_decay=0.04
        --quantize="embed.*=int8,*=int6")
    scoring=(--eval_stride=128 --max_documents=50000)
    limit=(--limit_bytes=16000000)
    if [ "$PROFILE" = gpu ]; then # the last of duplicate flags wins
        shards=${SHARDS:-20} tokenizer+=(--max_chars=1000000000)
        budget+=(--total_batch_size="$(($(whole 64) * 2048))")
        rates+=(--tied_lr=0.02)
    fi
    ;;
cpu)
    text=embedded shards=${SHARDS:-1}
    tokenizer=(--vocab_size=1024 --max_chars=100000000)
    row=(--max_seq_len=512)
    shape=(--depth=4 --d_model=128 --head_dim=32 --n_kv_head=1)
    budget=(--total_batch_size=4096 --max_wallclock_seconds=300
        --num_iterations=20000)
    rates=(--matrix_lr=0.03 --tied_lr=0.02 --weight_decay=0.5 --quantize="*.mlp.*=int5,*=int6")
    scoring=(--eval_stride=128 --max_documents=300)
    limit=(--limit_bytes=800000)
    ;;
esac
text=${TEXT:-$text}; [ ! -e "$text" ] && [ "$text" != embedded ] || shards=None # all files

# Text is packed before the timed training; each seed has its own record folder.
stage "tokenizer" python -m scripts.tok_train --dataset="$text" --num_shards="$shards" "${tokenizer[@]}" --skip_if_done
stage "rows" python -m scripts.data "${row[@]}"
files=()
for seed in $SEEDS; do
    tag="${TAG:-golf}-$seed"
    NANOCHAT_REPORT_DIR="$NANOCHAT_BASE_DIR/seeds/$seed" \
        stage "base model, seed $seed" train scripts.golf.base_train "${recipe[@]}" "${row[@]}" "${shape[@]}" \
        "${budget[@]}" "${rates[@]}" --seed="$seed" --model_tag="$tag" --run="${WANDB_RUN:-dummy}" \
        --resume=auto --skip_if_done "$@"
    stage "artifact, seed $seed" python -m scripts.export --format=artifact --source=base \
        --model_tag="$tag" --out="$NANOCHAT_BASE_DIR/export/$tag.golf" "${limit[@]}"
    files+=("$NANOCHAT_BASE_DIR/export/$tag.golf")
done
stage "parameter golf" train scripts.golf.evaluate --artifacts "${files[@]}" "${scoring[@]}" "${limit[@]}"
python -m scripts.report
