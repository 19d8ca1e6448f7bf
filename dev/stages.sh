# Sourced by the scripts that run stages, after dev/profile.sh and dev/setup.sh.

export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$([ "$processes" -gt 1 ] && echo 1 || nproc 2>/dev/null || echo 4)}"
# Seconds that torchrun gives the ranks after a stop request, for the checkpoint of a large model
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT="${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-480}"

# Without this check, a PyTorch build that cannot use the GPUs would silently train on CPU.
if [ "$gpus" -gt 0 ]; then
    seen=$(python -W ignore -c 'import torch; print(torch.cuda.device_count(), torch.version.cuda)')
    if [ "${seen% *}" -lt "$processes" ]; then
        driver=$( (nvidia-smi --query-gpu=driver_version --format=csv,noheader || true) | head -n 1)
        echo "error: nvidia-smi lists $gpus GPUs and profile $PROFILE needs $processes, but PyTorch finds ${seen% *} \
(driver $driver, PyTorch built for CUDA ${seen#* })
  fix:  update the driver; or set TORCH_BACKEND=auto (or cu126, cu128, ...), which installs another build with
        \`uv pip install torch --torch-backend=auto\`; or use PROFILE=cpu" >&2
        exit 2
    fi
fi

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
