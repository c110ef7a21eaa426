#!/bin/bash
# A job of Slurm's: one process for each GPU of two nodes; srun tells each its rank, and partita reads it there.
#   sbatch examples/slurm.sh [JOB] [--set key=value ...]
#SBATCH --job-name=partita
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --time=04:00:00
# Two minutes before its time is up every process is told to stop: the run is saved, and the job queued again.
#SBATCH --signal=TERM@120
#SBATCH --requeue
set -euo pipefail

job="${1:-examples/train_stdlib.yaml}"

# The folder is one that all nodes see. A run that finds a checkpoint there goes on from it.
srun partita train "$job" --set engine.checkpoint.dir="${CHECKPOINTS:-runs/slurm}" "${@:2}"
