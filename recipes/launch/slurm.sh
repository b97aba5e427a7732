#!/usr/bin/env bash
#SBATCH --job-name=longshore
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --output=%x-%j.out
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@300
#SBATCH --requeue
# Trains on several machines under Slurm: one task a machine, and torchrun starts its GPUs.
#
#   sbatch recipes/launch/slurm.sh recipes/qwen3-8b-2nodes.toml data.path=/shared/prepared
#   sbatch --nodes=4 recipes/launch/slurm.sh …
#
# Five minutes before the time is up the run is asked to stop: it saves a checkpoint after its step,
# and the job is queued again. A job that starts again, also after a preemption, resumes its run.
#
# Reads from the environment, besides what Slurm sets:
#   RESTARTS   how often to start again after a failure (default: 3)
#
# Activate your Python environment here if the job does not inherit it.
set -euo pipefail

hosts="$(scontrol show hostnames "$SLURM_JOB_NODELIST")"
head="${hosts%%$'\n'*}"
# A port of its own for each job, in case two share a machine.
port=$((20000 + SLURM_JOB_ID % 20000))

# After a failure all processes meet anew. torchrun would let them do so in the store they met in
# before, where they find dead addresses and wait for ever; this gives them a new one.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

# For ranks that were asked to stop to finish their step and save; torchrun's own limit is 30 s.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=240

if [ "${SLURM_RESTART_COUNT:-0}" -gt 0 ] && [[ " $* " != *" --resume "* ]]; then
    set -- "$@" --resume
fi

requeue=""
stop() {
    requeue=yes
    scancel --signal=TERM "$SLURM_JOB_ID.0" # its first step, the srun below
}
trap stop USR1

# If one machine gives up for good, the others must not wait for it.
srun --kill-on-bad-exit=1 torchrun \
    --nnodes "$SLURM_JOB_NUM_NODES" \
    --nproc-per-node gpu \
    --rdzv-backend c10d \
    --rdzv-endpoint "$head:$port" \
    --rdzv-id "$SLURM_JOB_ID" \
    --max-restarts "${RESTARTS:-3}" \
    -m longshore.cli.main train "$@" &
run=$!

# A signal ends `wait`, not what it waits for.
while true; do
    code=0
    wait "$run" || code=$?
    kill -0 "$run" 2>/dev/null || break
done
if [ -n "$requeue" ] && [ "$code" -ne 0 ]; then
    exec scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
