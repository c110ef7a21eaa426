#!/bin/bash
# A Slurm job: one process per GPU on two nodes. srun sets the rank of each process, and partita reads it.
#   sbatch examples/slurm.sh [JOB] [--set key=value ...]
#SBATCH --job-name=partita
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --time=04:00:00
# Two minutes before the time limit, every process gets SIGTERM: the run saves a checkpoint and exits with 130, and this
# script requeues the job. After a preemption or the failure of a node, Slurm requeues it.
#SBATCH --signal=TERM@120
#SBATCH --requeue
set -euo pipefail

job="${1:-examples/train_stdlib.yaml}"

# Use a folder that all nodes share. A run resumes from the newest checkpoint in it.
code=0
srun partita train "$job" --set engine.checkpoint.dir="${CHECKPOINTS:-runs/slurm}" "${@:2}" || code=$?
if [[ $code == 130 ]]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
