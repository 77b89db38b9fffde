#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# GPU nodes under Slurm, a task for each GPU:  sbatch scripts/cluster/slurm.sh
# Sixteen GPUs run one engine; --replicas=2 would make it two of eight, each with half of the input.
#SBATCH --job-name=headrace
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=04:00:00
set -euo pipefail

# Slurm tells each task which of how many it is, and where the first one runs. One that ends with
# an error has the others ended at once.
exec srun --kill-on-bad-exit=1 .venv/bin/python -m scripts.launch generate \
  --model="${MODEL:?a folder that all nodes see}" --mesh="${MESH:-data=2,tensor=8}" \
  --input="${INPUT:?prompts, a line each}" --output="${OUTPUT:?where the results go}"
