# Sourced by the scripts that run stages: PROFILE by what this machine has, unless it is given.

gpus=$( (nvidia-smi -L 2>/dev/null || true) | grep -c '^GPU' || true)
if [ -z "${PROFILE:-}" ]; then
    PROFILE=cpu
    [ "$gpus" -ge 1 ] && PROFILE=gpu1
    [ "$gpus" -ge 8 ] && PROFILE=h100x8
fi
