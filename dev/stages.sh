# Sourced by the scripts that run stages one after the other, after dev/profile.sh and dev/setup.sh.

export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$([ "$processes" -gt 1 ] && echo 1 || nproc 2>/dev/null || echo 4)}"

# A PyTorch that cannot use the GPUs would train on the CPU without a word.
if [ "$gpus" -gt 0 ]; then
    seen=$(python -W ignore -c 'import torch; print(torch.cuda.device_count(), torch.version.cuda)')
    if [ "${seen% *}" -lt "$processes" ]; then
        driver=$( (nvidia-smi --query-gpu=driver_version --format=csv,noheader || true) | head -n 1)
        echo "error: nvidia-smi lists $gpus GPUs and profile $PROFILE uses $processes, but PyTorch finds ${seen% *}; \
the driver is $driver, this build of PyTorch is for CUDA ${seen#* }
  fix:  update the driver, or install another build of PyTorch: TORCH_BACKEND=auto before the same command
        runs \`uv pip install torch --torch-backend=auto\` (cu126, cu128, ... choose one); or PROFILE=cpu" >&2
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
    echo "stage '$name' failed with status $status; run this script again to continue" >&2
    exit "$status"
}
train() { # train <module> <flags...>: one process, or one per GPU
    if [ "$processes" -gt 1 ]; then
        local module=$1
        shift # behind the -- torchrun takes no flag for its own: --run is short for its --run_path
        torchrun --standalone --nproc_per_node="$processes" -m "$module" -- "$@"
    else
        python -m "$@"
    fi
}

# CORE's tasks are fetched before anything is trained: an address that is dead costs this section of
# the report, not the run. EVAL_BUNDLE=<folder, zip or URL> names another one. Sets few_shot, the flags
# of base_eval (suite) and those of base_train (estimate).
fetch_suite() {
    few_shot=1 estimate=()
    local bundle=(${EVAL_BUNDLE:+--eval_bundle="$EVAL_BUNDLE"})
    suite=(--suite=dclm ${bundle[@]+"${bundle[@]}"})
    if python -m scripts.base_eval "${suite[@]}" --only_fetch; then
        estimate=(${bundle[@]+"${bundle[@]}"} --core_metric_every=2000) # and at the end
    else
        few_shot=0
        echo "the tasks of CORE cannot be downloaded; going on without them" >&2
    fi
}
