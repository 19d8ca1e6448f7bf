#!/usr/bin/env bash
# Data efficiency benchmark: document bpb of a depth-4 model after 3.9M tokens of real text, and the
# difference between validation and training text, 3 seeds.
#
#   bash dev/learning.sh                                # half an hour on two cores
#   bash dev/learning.sh no_bigrams --bigram_rows=0     # arm name, then flags of base_train
#
# If it is interrupted, rerun the same command. The first argument names the ablation arm. STEPS=600,
# DEPTH=6 and SEEDS="0 1" override the defaults. DATASET: a text dataset on the Hub. The results in
# dev/LOG.md used local/mini-pretrain on a private hub (HF_ENDPOINT): 133 MB of old books and
# encyclopedias, technical documents and public Python code. Writes under NANOCHAT_BASE_DIR.
set -euo pipefail
cd "$(dirname "$0")/.."
source .venv/bin/activate
arm=${1:-default}
shift || true
depth=${DEPTH:-4} steps=${STEPS:-960}
export NANOCHAT_BASE_DIR="${NANOCHAT_BASE_DIR:-$PWD/out/learning}"

python -m scripts.tok_train --dataset="${DATASET:-karpathy/climbmix-400b-shuffle}" --num_shards=5 \
    --vocab_size=8192 --skip_if_done
python -m scripts.data --max_seq_len=512
for seed in ${SEEDS:-0 1 2}; do
    tag="$arm-d$depth-$steps-$seed" reports="$NANOCHAT_BASE_DIR/learning/$arm-d$depth-$steps-$seed"
    python -m scripts.base_train --depth="$depth" --max_seq_len=512 --num_iterations="$steps" \
        --total_batch_size=4096 --eval_every=240 --eval_tokens=524288 --seed="$seed" \
        --model_tag="$tag" --report_dir="$reports" --resume=auto --skip_if_done "$@"
    python -m scripts.base_loss --model_tag="$tag" --split_tokens=262144 \
        --report_dir="$reports" --skip_if_done
done
python - "$NANOCHAT_BASE_DIR/learning/$arm-d$depth-$steps" ${SEEDS:-0 1 2} <<'PYTHON'
import json, statistics, sys
folder, *seeds = sys.argv[1:]
runs = [json.load(open(f"{folder}-{s}/base-model-loss.json"))["values"] for s in seeds]
gaps = [run["val bpb"] - run["train bpb"] for run in runs]
for name, found in ("document bpb", [run["document bpb"] for run in runs]), ("val minus train bpb", gaps):
    spread = statistics.stdev(found) if len(found) > 1 else float("nan")
    print(f"{name} {statistics.mean(found):.4f}, standard deviation over seeds {spread:.4f}:", *found)
PYTHON
