#!/usr/bin/env bash
# Ours side by side with karpathy/nanochat ("upstream") on one H100 or H200.
#
#   bash dev/gpu_peer.sh prepare <clone of upstream>   here: packs what travels into out/peer/
#   bash dev/gpu_peer.sh 1    learning: depth 12, 180 steps of 131,072 tokens, held-out rows
#   bash dev/gpu_peer.sh 2    training speed: depth 16, bf16 and fp8; then FlashAttention 3
#   bash dev/gpu_peer.sh 3    decoding: depths 12 and 24, batches of 1 and 64
#
# A part takes at most 4 minutes and needs no network, only PyTorch and NumPy: prepare copies the
# other packages that parts import, for the same or a later Python on the same platform. $OUT
# (default: out/gpu_peer) gets the table, row by row, and the compiler's messages. Upstream's files
# stay in the ignored folder PEER (default: out/peer), under 64 MiB.
#
# COMMIT (default: 92d63d4, July 2026) selects upstream's version. Rows are packed from DATASET
# (default: the one of speedrun.sh) and its first NUM_SHARDS training shards (default: 2) with a
# tokenizer of 32,768 ids under NANOCHAT_BASE_DIR, which is trained once. SMALL=1 shrinks
# everything, to try the script on a CPU.
set -euo pipefail
cd "$(dirname "$0")/.."
peer="$(realpath -m "${PEER:-out/peer}")"
out="$(realpath -m "${OUT:-out/gpu_peer}")"
part=${1:?part: prepare, 1, 2 or 3}

if [ "$part" = prepare ]; then
    clone=${2:?a clone of upstream} commit=${COMMIT:-92d63d4}
    rm -rf "$peer/nanochat"
    mkdir -p "$peer"
    git -C "$clone" archive "$commit" nanochat LICENSE | tar -x -C "$peer"
    git -C "$clone" rev-parse --short=7 "$commit" >"$peer/COMMIT"
    data=(--tokenizer_tag=peer --dataset="${DATASET:-karpathy/climbmix-400b-shuffle}"
        --num_shards="${NUM_SHARDS:-2}")
    python -m scripts.tok_train "${data[@]}" --vocab_size=32768 --max_chars=500000000 --skip_if_done
    python -m scripts.data "${data[@]}" --max_seq_len=2048
    exec python -m dev.gpu_peer pack --folder="$peer"
fi
mkdir -p "$out"
python -c "import tyro, rustbpe" 2>/dev/null || export PYTHONPATH="$peer/packages:${PYTHONPATH:-}"
export HF_HUB_OFFLINE=1 # no retries
export PYTORCH_ALLOC_CONF="${PYTORCH_ALLOC_CONF:-expandable_segments:True}" # as upstream sets it
timeout -k 5 "${PART_SECONDS:-240}" python -m dev.gpu_peer "$part" --folder="$peer" ${SMALL:+--small} \
    2>"$out/part$part.err" | tee "$out/part$part.txt" ||
    { status=$? && tail "$out/part$part.err" >&2 && exit "$status"; }
