# Sourced by the scripts that run stages: PROFILE by what this machine has, unless it is given.

gpus=$( (nvidia-smi -L 2>/dev/null || true) | grep -c '^GPU' || true)
if [ -z "${PROFILE:-}" ]; then
    PROFILE=cpu
    if [ "$gpus" -ge 8 ]; then
        PROFILE=h100x8
    elif [ "$gpus" -ge 1 ]; then
        PROFILE=gpu1
    fi
fi
