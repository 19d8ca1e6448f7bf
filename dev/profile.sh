# Sourced by the scripts that run stages: `gpus`, how many GPUs there are; PROFILE, by them unless it
# is given; `processes`, the default: one per GPU. whole <n>: the nearest multiple of `processes`.

gpus=$( (nvidia-smi -L 2>/dev/null || true) | grep -c '^GPU' || true)
if [ -n "${CUDA_VISIBLE_DEVICES+set}" ]; then # it chooses some of them
    chosen=$(printf '%s' "$CUDA_VISIBLE_DEVICES" | tr ',' '\n' | grep -c . || true)
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
        echo "error: PROFILE=$PROFILE trains on GPUs, but nvidia-smi lists none
  fix:  repair the driver until \`nvidia-smi -L\` lists them, or PROFILE=cpu" >&2
        exit 2
    fi
fi
if [ "$PROFILE" = cpu ]; then # also where there are GPUs
    gpus=0 gpu_name=""
    export CUDA_VISIBLE_DEVICES=""
fi
case "$PROFILE" in
h100x8)
    processes=8
    if [ "$gpus" -gt 0 ] && [ "$gpus" -lt 8 ]; then # none: a dry run on the CPU
        echo "error: PROFILE=h100x8 uses 8 GPUs, but there are $gpus
  fix:  PROFILE=gpu uses all of them" >&2
        exit 2
    fi
    ;;
gpu) processes=$((gpus > 1 ? gpus : 1)) ;;
gpu1 | h100x1)
    echo "error: PROFILE=$PROFILE is now PROFILE=gpu, which uses every GPU; CUDA_VISIBLE_DEVICES=0 chooses one" >&2
    exit 2
    ;;
*) processes=1 ;;
esac
whole() { echo $((($1 + processes / 2) / processes * processes)); }
