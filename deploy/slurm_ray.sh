#!/bin/bash
# A Ray cluster on the nodes of a SLURM job, and one run on it.
#   sbatch --nodes 2 deploy/slurm_ray.sh grpo --config mine.yaml --use_ray true
# RayHelper, the configuration, the model and output_dir lie under the same paths on all nodes.
#SBATCH --job-name=rayhelper
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --signal=B:USR1@600
set -euo pipefail

head=${RAY_HEAD:-$(hostname --ip-address | cut -d' ' -f1)} # this script runs on the first node
port=${RAY_PORT:-6379}
export head port
RAY_AUTH_TOKEN=$(openssl rand -hex 32) # of this job's cluster: srun passes it on, and Ray 2.52 or later asks for it
export RAY_AUTH_TOKEN RAY_AUTH_MODE=token

# Returns when the first node answers, or fails after two minutes.
wait_for_head() {
    timeout 120 bash -c 'until (exec 3<>"/dev/tcp/$head/$port") 2>/dev/null; do sleep 1; done'
}
export -f wait_for_head

srun --cpu-bind=none bash -c '
if [ "$SLURM_NODEID" = 0 ]; then
    exec ray start --head --node-ip-address="$head" --port="$port" --block
fi
wait_for_head && exec ray start --address="$head:$port" --block' &

wait_for_head
export RAY_ADDRESS="$head:$port" # only for the run: `ray start` gets its addresses as options
exec rayhelper "$@" # exec: the signal before the end of the job reaches Python, which saves a checkpoint
