#!/usr/bin/env bash
# ./examples/megatron/run.sh ray grpo_colocated [--key value ...]: a file of this folder, on Ray
# ./examples/megatron/run.sh torchrun grpo_colocated [--key value ...]: the same under torchrun
# NPROC, NNODES, RDZV: GPUs of a node, nodes, and host:port of the first, for torchrun; the defaults are one node's.
set -euo pipefail
cd "$(dirname "$0")/../.."
way=$1 name=$2
shift 2

case $name in
    grpo_* | walkthrough) trainer=grpo ;;
    gkd_* | opsd) trainer=gkd ;;
    sft_*) trainer=sft ;;
    *) echo "error: there is no example $name" >&2; exit 2 ;;
esac
case $name in
    gkd_rollout_colocate_teacher_colocate | opsd) nproc=4 ;;
    *) nproc=8 ;;
esac
arguments=("$trainer" --config "examples/megatron/$name.yaml" "$@")

case $way in
    ray) exec .venv/bin/rayhelper "${arguments[@]}" --use_ray true ;;
    torchrun)
        nodes=(--nnodes "${NNODES:-1}" --nproc-per-node "${NPROC:-$nproc}")
        [[ -n ${RDZV:-} ]] && nodes+=(--rdzv-backend c10d --rdzv-endpoint "$RDZV")
        exec .venv/bin/torchrun "${nodes[@]}" -m rayhelper.trainers "${arguments[@]}"
        ;;
    *) echo "error: $way is neither ray nor torchrun" >&2; exit 2 ;;
esac
