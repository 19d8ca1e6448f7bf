#!/usr/bin/env bash
# Which data make a model reason in Korean? Four ablations of a fine-tuning mixture, on two bases:
# each bucket alone and left out, a swap, more of one bucket, more English, and ten options.
#
#   bash dev/korean_study.sh               # the public buckets, on GPUs
#   DATA=standins bash dev/korean_study.sh # the built-in world under the names of the buckets
#
# The buckets, arms and benchmarks follow the development log of Ko-R1-3 (onelineai.com/blog); the
# log publishes no sizes, so those of dev/korean_public.json are ours; the name of YiSang's column
# of categories is an assumption. The first step opens all data and fails if one is not as expected
# or gated. The public study declares six benchmarks final in this base directory for good, and
# trains on KMMLU although one of them is KMMLU-Pro ("waived"). If it is interrupted, rerun the same
# command. Writes sections "Overlap" and "Sweep korean" or "Sweep korean-standins" with its figure,
# and sweeps/ under NANOCHAT_BASE_DIR.
set -euo pipefail
cd "$(dirname "$0")/.."
source .venv/bin/activate
DATA=${DATA:-public}
case "$DATA" in
public)
    name=korean text=(--dataset=HAERAE-HUB/KOREAN-WEBTEXT) depths=${DEPTHS:-12 16} vocab=65536 T=4096
    base=() run=(--num_iterations=40 --total_batch_size=524288) train="--eval_tokens=1048576"
    tasks="KMMLU-Redux|KMMLU-Redux-10|HAE-RAE|MCLM-Ko|Clinical-QA" score="--max_new_tokens=3072"
    final="kmmlu_pro|gpqa|hrm8k|livecodebench|click|kobalt"
    python -m scripts.lab.hold_out --mixture=dev/korean_public.json --benchmarks="$tasks|$final"
    python -m scripts.lab.hold_out --final="$final"
    ;;
standins)
    name=korean-standins text=(--dataset=embedded) depths=${DEPTHS:-2 3} vocab=2048 T=256
    base=(--num_iterations=300 --total_batch_size=4096 --eval_every=0 --eval_tokens=32768)
    run=(--num_iterations=40 --total_batch_size=2048) train="--eval_tokens=32768"
    tasks="World-Choice" score="--max_problems=200"
    python -m scripts.lab.hold_out --mixture=dev/korean_standins.json --benchmarks="$tasks"
    ;;
*)
    echo "error: unknown DATA '$DATA'; use public or standins" >&2
    exit 2
    ;;
esac
buckets="openthoughts3 rstar-coder web-daily web-code web-science web-medical styles"
arms="swap:web-medical->web-code|scale:web-medical*2|swap:styles->options"
arms+="|ratio:language ko:en=1:1|ratio:language ko:en=1:4"
arms+="|drop:rstar-coder then ratio:language ko:en=1:1|drop:rstar-coder then ratio:language ko:en=1:4"
for bucket in $buckets; do arms+="|only:$bucket|drop:$bucket"; done

python -m scripts.tok_train "${text[@]}" --vocab_size=$vocab --skip_if_done
bases=""
for depth in $depths; do
    python -m scripts.base_train --depth="$depth" --max_seq_len=$T "${base[@]}" --resume=auto --skip_if_done
    bases+="${bases:+|}d$depth"
done
python -m scripts.lab.sweep --name=$name --devices="${DEVICES:-2}" --bases="$bases" --source=base \
    --mixture=dev/korean_$DATA.json --arms="${ARMS:-$arms}" --arm_floor="styles=5%" "${run[@]}" \
    --seeds=3 --arm_seeds=2 --flags="$train" --tasks="$tasks" --eval_flags="$score"
python -m scripts.report
