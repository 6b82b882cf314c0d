#!/usr/bin/env bash
# torchrun with a rendezvous on the first node. Run the same line on every node, in any order.
set -euo pipefail

exec torchrun \
    --nnodes "${NNODES:-2}" --nproc_per_node "${NPROC_PER_NODE:-8}" \
    --rdzv_backend c10d --rdzv_endpoint "${MASTER_ADDR:-node1}:${MASTER_PORT:-29500}" --rdzv_id "${RUN_ID:-ds_trainer}" \
    -m ds_trainer train "$@"
