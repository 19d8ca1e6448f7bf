#!/usr/bin/env bash
# The first minutes on a GPU: what works, how fast it is, and whether it learns.
#
#   bash dev/gpu_check.sh 1    tests, every stage at depth 2, memory at depth 24
#   bash dev/gpu_check.sh 2    speed of training by depth and kernel, of fp8 and of the engine
#   bash dev/gpu_check.sh 3    training against the CPU, resume, RL, server under load
#
# A part takes at most 9 minutes and needs no network, only an environment with the project's
# packages and its group dev (`python` on PATH). A check that fails or takes too long is recorded,
# and the next one starts. $OUT (default: out/gpu_check) gets checks.jsonl, a log per check and the figures
# as JSON; dev/bench-gpu.md gets a table of them. SMALL=1 shrinks models and leaves out tests and
# the profile, to try the script itself.
set -uo pipefail
cd "$(dirname "$0")/.."
export OUT="$(realpath -m "${OUT:-out/gpu_check}")"
export NANOCHAT_BASE_DIR="$OUT/base" WANDB_MODE=disabled OMP_NUM_THREADS="${OMP_NUM_THREADS:-4}"
part=${1:?part: 1, 2 or 3}
small=${SMALL:-}
mkdir -p "$OUT"
PART_SECONDS=${PART_SECONDS:-540}

# check <name> <seconds of 540> <module> <flags>: run it within the limit; record status and seconds
check() {
    local name=$1 limit=$(($2 * PART_SECONDS / 540)) began=$SECONDS status=0
    shift 2
    [ "$limit" -le $((PART_SECONDS - SECONDS)) ] || limit=$((PART_SECONDS - SECONDS))
    if [ "$limit" -le 0 ]; then
        status=skipped
    else # GPU_RUNNER: a module that runs the other, for a GPU that computes nothing
        timeout -k 10 "$limit" python -m ${GPU_RUNNER:-} "$@" >"$OUT/$name.log" 2>&1 || status=$?
    fi
    [ "$status" != 124 ] || status=timeout
    printf '{"part": %d, "check": "%s", "status": "%s", "seconds": %d, "commit": "%s"}\n' \
        "$part" "$name" "$status" $((SECONDS - began)) "$(git rev-parse --short HEAD)" \
        >>"$OUT/checks.jsonl"
    echo "$name: $status, $((SECONDS - began)) s"
}

rows=(--max_seq_len=2048 --vocab_size=32768 --rows=16 --repeats=2 --steps=2)
deep=24 middle=12 depths=(8 12 24) trained=8 steps=300
run=(--max_seq_len=256 --total_batch_size=8192 --eval_every=0 --eval_tokens=32768
    --core_metric_every=0 --sample_every=0 --window_pattern=L)
if [ -n "$small" ]; then
    rows=(--max_seq_len=128 --vocab_size=1024 --rows=2 --repeats=1 --steps=1)
    deep=2 middle=2 depths=(2) trained=2 steps=60
fi
tokenizer() { # small and quick to train, from the embedded text
    [ -d "$NANOCHAT_BASE_DIR/tokenizer" ] ||
        check tokenizer 60 scripts.tok_train --dataset=embedded --vocab_size=4096
}

stages() {
    tokenizer
    local short=(--num_iterations=4 --eval_tokens=1024 ${small:+--compile=0})
    check base 120 scripts.base_train --depth=2 --max_seq_len=128 --num_iterations=20 \
        --total_batch_size=4096 --eval_tokens=2048 --core_metric_every=0
    check base_eval 60 scripts.base_eval --max_per_task=4
    check mid 90 scripts.mid_train --mixture=world_chat=60,world_choice=20 "${short[@]}"
    check sft 90 scripts.chat_sft --mixture=world_chat=40,world_problems=20 "${short[@]}"
    check rl 90 scripts.chat_rl --num_iterations=2 --examples_per_step=2 --num_samples=2 \
        --max_new_tokens=8 --eval_examples=2 --eval_samples=2
    check chat_eval 60 scripts.chat_eval --source=sft --max_problems=3 --max_new_tokens=8
    check chat 60 scripts.chat_cli --source=sft --prompt=Hello --max_new_tokens=8
}

case $part in
1) # side by side, because compilation on the CPU takes most of the time
    check versions 60 torch.utils.collect_env
    stages &
    if [ -z "$small" ]; then
        check tests_gpu 120 pytest -q -m gpu -k "not resume" &
        check tests_kernels 240 pytest -q tests/test_attention.py tests/test_kernels.py \
            tests/test_fp8.py tests/test_loss.py tests/test_optim.py tests/test_gpt.py &
        check tests_resume 400 pytest -q -m gpu -k resume & # seven compiled runs
    fi
    wait
    check memory 180 tests.training_memory --depth=$deep --compile=1
    check memory_fp8 180 tests.training_memory --depth=$middle --compile=1 --fp8=1
    ;;
2)
    for depth in "${depths[@]}"; do
        check "train_d$depth" 120 scripts.bench --what=train --depth="$depth" "${rows[@]}" \
            --findings="$OUT/train_d$depth.json"
    done
    check steps 240 dev.gpu_check --depth=$middle ${small:+--max_seq_len=128 --rows=2}
    [ -n "$small" ] || check profile 90 dev.gpu_check --depth=$middle --profile
    check engine 120 scripts.bench --what=engine --depth=$middle "${rows[@]}" \
        --findings="$OUT/engine.json"
    ;;
3)
    tokenizer
    tag=(scripts.base_train --depth=$trained --num_iterations=$steps --dtype=bfloat16
        --resume=auto "${run[@]}")
    # all continue one checkpoint, because a CPU and a GPU draw other weights from a seed
    cpu=("${tag[@]}" --model_tag=cpu --device_type=cpu --compile=0)
    gpu=("${tag[@]}" --compile=1) # a resumed run otherwise stays eager
    rm -rf "$NANOCHAT_BASE_DIR/base_checkpoints"
    OMP_NUM_THREADS=$(nproc) check start 120 dev.gpu_check --stop_after=1 -- "${cpu[@]}"
    if [ -d "$NANOCHAT_BASE_DIR/base_checkpoints/cpu" ]; then
        for name in whole stopped; do
            cp -r "$NANOCHAT_BASE_DIR"/base_checkpoints/{cpu,$name}
        done
        check train 150 "${gpu[@]}" --model_tag=whole
        check stop 60 dev.gpu_check --stop_after=$((steps / 3)) -- "${gpu[@]}" --model_tag=stopped
        check resume 150 "${gpu[@]}" --model_tag=stopped
        OMP_NUM_THREADS=$(nproc) check cpu 150 dev.gpu_check --stop_after=$((steps / 30 + 1)) -- "${cpu[@]}"
    fi
    check sft_d$trained 120 scripts.chat_sft --source=base:whole --eval_tokens=1024 \
        --mixture=world_chat=200,world_problems=200 --num_iterations=20 ${small:+--compile=0}
    check rl_d$trained 120 scripts.chat_rl --num_iterations=10 --examples_per_step=8 \
        --num_samples=8 --max_new_tokens=32 --eval_examples=16 --eval_samples=2
    check server 90 dev.gpu_check --users=64
    ;;
*)
    echo "part must be 1, 2 or 3, got $part" >&2
    exit 2
    ;;
esac
python -m dev.gpu_check --write
