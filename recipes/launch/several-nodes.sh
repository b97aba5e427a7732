#!/usr/bin/env bash
# Trains on several machines. Run it on each of them, with the same values.
#
#   NODES=2 HEAD=10.0.0.1 RUN=first bash recipes/launch/several-nodes.sh recipes/qwen3-8b-2nodes.toml
#
# Reads from the environment:
#   NODES      how many machines
#   HEAD       name or address of one of them, where all meet
#   RUN        a new name for each run, the same on all machines; a restarted job finds its run
#              by this name
#   PORT       a free port on HEAD (default: 29500)
#   GPUS       processes to start on this machine (default: one for each GPU)
#   RESTARTS   how often to start again after a failure (default: 3)
#
# To try the machines before: the same with `doctor` for `train RECIPE` in the last line. If they
# do not meet, name the network between them: NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME.
set -euo pipefail

# After a failure all processes meet anew. torchrun would let them do so in the store they met in
# before, where they find dead addresses and wait for ever; this gives them a new one.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

exec torchrun \
    --nnodes "${NODES:?set it to the number of machines}" \
    --nproc-per-node "${GPUS:-gpu}" \
    --rdzv-backend c10d \
    --rdzv-endpoint "${HEAD:?set it to the name or address of one machine}:${PORT:-29500}" \
    --rdzv-id "${RUN:?set it to a new name for this run, the same on all machines}" \
    --max-restarts "${RESTARTS:-3}" \
    -m longshore.cli.main train "$@"
