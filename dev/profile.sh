# Sourced by the scripts that run stages. Installs the packages and sets `gpus` (number of GPUs),
# `gpu_name`, PROFILE (from `gpus` unless set) and `processes` (one per GPU), and defines the
# functions below. OMP_NUM_THREADS is the number of threads of each process. With DRY_RUN or
# `plan_only`, a profile whose GPUs are missing uses the CPU.
source dev/setup.sh

read -r gpus gpu_name < <(python -c '
import torch
gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
print(gpus, torch.cuda.get_device_name() if gpus else "")')
if [ "$gpus" -eq 0 ] && [ "${PROFILE:-}" != cpu ] && nvidia-smi -L 2>/dev/null | grep '^GPU' >/dev/null &&
    [[ ${CUDA_VISIBLE_DEVICES-0} =~ ^[^-] ]]; then # nothing and -1 hide all
    driver=$( (nvidia-smi --query-gpu=driver_version --format=csv,noheader || true) | head -n 1)
    fail "nvidia-smi lists GPUs that PyTorch cannot use (driver $driver, PyTorch built for CUDA \
$(python -c 'import torch; print(torch.version.cuda)'))" \
        "update the driver; or replace PyTorch (docs/quickstart.md, Troubleshooting); or use PROFILE=cpu"
fi
if [ -z "${PROFILE:-}" ]; then
    PROFILE=$([ "$gpus" -ge 8 ] && echo h100x8 || { [ "$gpus" -ge 1 ] && echo gpu || echo cpu; })
fi
case "$PROFILE" in
cpu) least=0 processes=1 gpus=0 ;;
gpu) least=1 processes=$((gpus > 1 ? gpus : 1)) ;;
h100x8) least=8 processes=8 ;;
*) fail "unknown PROFILE '$PROFILE'" "use h100x8, gpu or cpu" ;;
esac
if [ "$gpus" -lt "$least" ]; then
    [ -n "${DRY_RUN:-}${plan_only:-}" ] ||
        fail "PROFILE=$PROFILE needs $least or more GPUs, but PyTorch finds $gpus" \
            "use PROFILE=gpu (1 to 7 GPUs) or PROFILE=cpu"
    gpus=0
fi
if [ "$gpus" -eq 0 ]; then # hide GPUs, if any
    gpu_name=""
    export CUDA_VISIBLE_DEVICES=""
fi
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

offer() { # offer <what> <script and flags>: print the command, for another terminal
    local where=${NANOCHAT_BASE_DIR:+"NANOCHAT_BASE_DIR=$(printf %q "$NANOCHAT_BASE_DIR") "}
    printf '\n%s:\n    source .venv/bin/activate && %spython -m scripts.%s\n' "$1" "$where" "$2"
}

train() { # train <module> <flags...>, in one process or one per GPU
    if [ "$processes" -gt 1 ]; then
        # without --, torchrun would parse --run as its own --run_path
        # a local address: a host's name may not resolve
        torchrun --standalone --local-addr=127.0.0.1 --nproc_per_node="$processes" -m "$1" -- "${@:2}"
    else
        python -m "$@"
    fi
}

# Download the CORE tasks before training; without them, the run continues. Sets few_shot (1 or 0),
# suite (flags of base_eval) and estimate (flags of base_train).
fetch_suite() {
    few_shot=1 suite=(${EVAL_BUNDLE:+--eval_bundle="$EVAL_BUNDLE"})
    estimate=("${suite[@]}" --core_metric_every=2000) # and at the end
    python -m scripts.base_eval "${suite[@]}" --only_fetch && return
    [ -z "${EVAL_BUNDLE:-}" ] || exit 2
    few_shot=0 estimate=()
    echo "cannot download the CORE tasks; continuing without few-shot evaluation" >&2
}
