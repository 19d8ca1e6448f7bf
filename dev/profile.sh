# Sourced by the scripts that run stages, before dev/setup.sh. Sets `gpus` (number of GPUs),
# `gpu_name`, PROFILE (from `gpus` unless set) and `processes` (one per GPU), and defines the
# functions below. OMP_NUM_THREADS is the number of threads of each process.

gpus=$( (nvidia-smi -L 2>/dev/null || true) | grep -c '^GPU' || true)
if [ -n "${CUDA_VISIBLE_DEVICES+set}" ]; then
    chosen=$(printf '%s' "$CUDA_VISIBLE_DEVICES" | tr ',' '\n' | grep -c '^[^-]' || true) # -1 hides all
    [ "$gpus" -le "$chosen" ] || gpus=$chosen
fi
gpu_name=""
[ "$gpus" -eq 0 ] || gpu_name=$( (nvidia-smi --query-gpu=name --format=csv,noheader || true) | head -n 1)
if [ -z "${PROFILE:-}" ]; then
    PROFILE=$([ "$gpus" -ge 8 ] && echo h100x8 || { [ "$gpus" -ge 1 ] && echo gpu || echo cpu; })
fi
processes=1
case "$PROFILE" in
cpu) # hide GPUs, if any
    gpus=0 gpu_name=""
    export CUDA_VISIBLE_DEVICES=""
    ;;
gpu | h100x8)
    least=1 processes=$((gpus > 1 ? gpus : 1))
    [ "$PROFILE" = gpu ] || least=8 processes=8
    if [ "$gpus" -lt "$least" ] && ! { [ "$gpus" -eq 0 ] && [ -n "${DRY_RUN:-}" ]; }; then
        echo "error: PROFILE=$PROFILE needs $least or more GPUs, but nvidia-smi lists $gpus
  fix:  repair the driver until \`nvidia-smi -L\` lists them, or use PROFILE=gpu (any number) or PROFILE=cpu" >&2
        exit 2
    fi
    ;;
esac
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$([ "$processes" -gt 1 ] && echo 1 || nproc 2>/dev/null || echo 4)}"
# Seconds that torchrun gives the ranks after a stop request, for the checkpoint of a large model
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT="${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-480}"

whole() { echo $((($1 + processes / 2) / processes * processes)); } # rounded to a multiple of `processes`

stage() { # stage <name> <command...>
    local name=$1 status=0
    shift
    echo
    echo "=== $name"
    "$@" || status=$?
    [ "$status" -eq 0 ] && return
    echo "stage '$name' failed with status $status; rerun the same command to resume" >&2
    exit "$status"
}

train() { # train <module> <flags...>, in one process or one per GPU
    if [ "$processes" -gt 1 ]; then
        local module=$1
        shift # without --, torchrun would parse --run as its own --run_path
        torchrun --standalone --nproc_per_node="$processes" -m "$module" -- "$@"
    else
        python -m "$@"
    fi
}

# Download the CORE tasks before training. If that fails, the run continues without few-shot
# evaluation. EVAL_BUNDLE=<folder, zip or URL> selects another source. Sets few_shot, suite (flags
# of base_eval) and estimate (flags of base_train).
fetch_suite() {
    few_shot=1 estimate=()
    local bundle=(${EVAL_BUNDLE:+--eval_bundle="$EVAL_BUNDLE"})
    suite=(--suite=dclm ${bundle[@]+"${bundle[@]}"})
    if python -m scripts.base_eval "${suite[@]}" --only_fetch; then
        estimate=(${bundle[@]+"${bundle[@]}"} --core_metric_every=2000) # and at the end
    else
        few_shot=0
        echo "cannot download the CORE tasks; continuing without few-shot evaluation" >&2
    fi
}
