# Sourced by the scripts that run stages. Sets `gpus` (number of GPUs), PROFILE (from `gpus` unless
# set) and `processes` (default: one per GPU). whole <n> rounds n to a multiple of `processes`.

gpus=$( (nvidia-smi -L 2>/dev/null || true) | grep -c '^GPU' || true)
if [ -n "${CUDA_VISIBLE_DEVICES+set}" ]; then
    chosen=$(printf '%s' "$CUDA_VISIBLE_DEVICES" | tr ',' '\n' | grep -c '^[^-]' || true) # -1 hides all
    [ "$gpus" -le "$chosen" ] || gpus=$chosen
fi
gpu_name=""
[ "$gpus" -eq 0 ] || gpu_name=$( (nvidia-smi --query-gpu=name --format=csv,noheader || true) | head -n 1)
if [ -z "${PROFILE:-}" ]; then
    PROFILE=cpu
    if [ "$gpus" -ge 8 ]; then
        PROFILE=h100x8
    elif [ "$gpus" -ge 1 ]; then
        PROFILE=gpu
    fi
fi
if [ "$PROFILE" = gpu ] || [ "$PROFILE" = h100x8 ]; then
    if [ "$gpus" -eq 0 ] && [ -z "${DRY_RUN:-}" ]; then
        echo "error: PROFILE=$PROFILE needs GPUs, but nvidia-smi lists none
  fix:  repair the driver until \`nvidia-smi -L\` lists them, or use PROFILE=cpu" >&2
        exit 2
    fi
fi
if [ "$PROFILE" = cpu ]; then # hide GPUs, if any
    gpus=0 gpu_name=""
    export CUDA_VISIBLE_DEVICES=""
fi
case "$PROFILE" in
h100x8)
    processes=8
    if [ "$gpus" -gt 0 ] && [ "$gpus" -lt 8 ]; then # 0: a dry run on CPU
        echo "error: PROFILE=h100x8 needs 8 GPUs, but nvidia-smi lists $gpus
  fix:  use PROFILE=gpu, for any number of GPUs" >&2
        exit 2
    fi
    ;;
gpu) processes=$((gpus > 1 ? gpus : 1)) ;;
*) processes=1 ;;
esac
whole() { echo $((($1 + processes / 2) / processes * processes)); }
