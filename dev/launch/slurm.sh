#!/usr/bin/env bash
# Pretrain on several machines under Slurm. After a time limit, preemption or node failure, the job
# is requeued and resumes from its newest checkpoint. docs/distributed.md says how to prepare it.
#
#   sbatch --nodes=2 dev/launch/slurm.sh --depth=24  # run in the repository; takes base_train flags
#SBATCH --job-name=nanochat
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=32
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=nanochat-%j.log
#SBATCH --signal=B:USR1@600
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:?submit this script with sbatch}"
source .venv/bin/activate

first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
per_node=${SLURM_GPUS_ON_NODE:-1} # without GPUs: one process, using all cores
export OMP_NUM_THREADS=$((${SLURM_CPUS_PER_TASK:-1} / per_node > 0 ? ${SLURM_CPUS_PER_TASK:-1} / per_node : 1))
# gives each torchrun attempt its own store, so that a node that joins late finds the others
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

# how long torchrun waits for a large model to be saved
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=480
launch=(python -m torch.distributed.run
    --nnodes="$SLURM_JOB_NUM_NODES" --nproc_per_node="$per_node" --max-restarts=3
    --rdzv_backend=c10d --rdzv_endpoint="$first:${PORT:-29500}"
    --rdzv_id="$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}")

# Ten minutes before the limit: have the ranks save and stop, then queue up again.
stopping=0
stop() {
    stopping=1
    echo "slurm.sh: time is nearly over; asking the run to save"
    scancel --signal=TERM "$SLURM_JOB_ID" # its steps, not this script
}
trap stop USR1

# srun does not inherit --cpus-per-task from sbatch; user flags come last, so they take precedence
srun --kill-on-bad-exit=1 --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" \
    "${launch[@]}" -m scripts.base_train -- --resume=auto --save_every=500 "$@" &
status=0
while wait "$!" || status=$?; kill -0 "$!" 2>/dev/null; do status=0; done # a signal ends a wait
if [ "$stopping" -eq 1 ] && [ "$status" -ne 0 ]; then
    echo "slurm.sh: queued again"
    exec scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
