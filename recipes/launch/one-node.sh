#!/usr/bin/env bash
# Trains on all GPUs of this machine, and starts again after a failure.
#
#   bash recipes/launch/one-node.sh recipes/qwen3-8b-8gpus.toml data.path=prepared
#
# Reads from the environment:
#   GPUS       processes to start (default: one for each GPU)
#   RESTARTS   how often to start again after a failure (default: 3)
set -euo pipefail

# After a failure all processes meet anew. torchrun would let them do so in the store they met in
# before, where they find dead addresses and wait for ever; this gives them a new one.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

exec torchrun \
    --standalone \
    --nproc-per-node "${GPUS:-gpu}" \
    --max-restarts "${RESTARTS:-3}" \
    -m longshore.cli.main train "$@"
