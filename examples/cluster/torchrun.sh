#!/bin/bash
# torchrun, once on each host: examples/cluster/torchrun.sh PROGRAM ARGS...
# NODES hosts with PROCESSES processes each; NODE_RANK is this host's number, and HEAD the name of
# host 0. The processes meet at PORT, and at PORT + 1.
set -euo pipefail

NODES="${NODES:-1}"
PROCESSES="${PROCESSES:-8}"
NODE_RANK="${NODE_RANK:-0}"
HEAD="${HEAD:-127.0.0.1}"
PORT="${PORT:-29500}"

if [ "$#" -eq 0 ]; then
  set -- examples/cluster/total.py
fi
exec "${TORCHRUN:-torchrun}" --nnodes "$NODES" --nproc-per-node "$PROCESSES" \
  --node-rank "$NODE_RANK" --master-addr "$HEAD" --master-port "$PORT" "$@"
