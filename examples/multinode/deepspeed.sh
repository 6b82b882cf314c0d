#!/usr/bin/env bash
# The deepspeed launcher on the nodes of a hostfile. Run it on every node: NODE_RANK=0 on the first, 1 on the second.
# Where the first node reaches the others by ssh without a password, drop --no_ssh and --node_rank, and run it there only.
set -euo pipefail
here=$(dirname "$0")

exec deepspeed \
    --hostfile "${HOSTFILE:-$here/hostfile}" --no_ssh --node_rank "$NODE_RANK" \
    --master_addr "${MASTER_ADDR:-node1}" --master_port "${MASTER_PORT:-29500}" \
    --module ds_trainer train "$@"
