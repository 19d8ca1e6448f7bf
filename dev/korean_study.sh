#!/usr/bin/env bash
# A small ablation of training data (Korean chat, GSM8K, Korean-English ratio) on two base models.
#
#   HF_ENDPOINT=http://127.0.0.1:8400 bash dev/korean_study.sh     # about an hour on two cores
#
# If it is interrupted, rerun the same command. Reads from the Hub: local/mini-pretrain,
# mini-pretrain-korean, chat-instruct and chat-korean; GSM8K, ARC, AQuA and KMMLU. Writes section
# "Sweep korean" and files under NANOCHAT_BASE_DIR. No training on ARC or KMMLU test questions.
set -euo pipefail
cd "$(dirname "$0")/.."
source .venv/bin/activate
text=(--mixture=dev/korean_text.json)
as_measured=(--bigram_rows=0 --value_every=2) # the defaults when the study was measured

python -m scripts.tok_train "${text[@]}" --vocab_size=4096 --max_chars=40000000 --skip_if_done
python -m scripts.data "${text[@]}" --max_seq_len=512

# Two base models, one core each
for depth in 2 4; do
    OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE python -m scripts.base_train --depth=$depth "${text[@]}" \
        --max_seq_len=512 --num_iterations=400 --total_batch_size=8192 --eval_every=200 \
        --eval_tokens=131072 --save_every=100 --resume=auto --skip_if_done "${as_measured[@]}" \
        --report_dir="${NANOCHAT_BASE_DIR:-out}/bases/d$depth" &
done
wait -n
wait -n

python -m scripts.lab.sweep --name=korean --devices=2 --bases="d2|d4" --source=base \
    --num_iterations=200 --total_batch_size=4096 --mixture=dev/korean_chat.json \
    --arm_floor="arc_easy=5%" \
    --arms="only:chat-korean|drop:gsm8k|ratio:language ko:en=1:1|ratio:language ko:en=1:4" \
    --seeds=3 --arm_seeds=2 --flags="--eval_tokens=196608 --save_every=50" \
    --tasks="ARC-Easy|ARC-Challenge|KMMLU"
