#!/bin/bash
# One run under torchrun on all GPUs of a SLURM job, without Ray.
#   sbatch --nodes 2 deploy/slurm_torchrun.sh grpo --config mine.yaml
# RayHelper, the configuration, the model and output_dir lie under the same paths on all nodes.
#SBATCH --job-name=rayhelper
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --signal=USR1@600
set -euo pipefail

head=${TORCHRUN_HEAD:-$(hostname --ip-address | cut -d' ' -f1)} # this script runs on the first node
RAYHELPER_KEY=$(openssl rand -hex 32) # the same on every node: srun passes it on
export RAYHELPER_KEY

exec srun --cpu-bind=none torchrun --nnodes="$SLURM_JOB_NUM_NODES" --nproc-per-node=gpu \
    --rdzv-id="$SLURM_JOB_ID" --rdzv-backend=c10d --rdzv-endpoint="$head:29500" \
    --signals-to-handle=SIGTERM,SIGINT,SIGUSR1 --shutdown-timeout=300 \
    -m rayhelper.trainers "$@"
