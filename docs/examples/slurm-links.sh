#!/usr/bin/env bash
# What joins the GPUs of two hosts, a process per GPU: sbatch docs/examples/slurm-links.sh; then: flopcast fit links
#SBATCH --job-name=flopcast-links
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --time=00:20:00
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:-.}"
# srun tells each process who it is, but not where the first one listens
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -1)
export MASTER_ADDR MASTER_PORT=29500
exec srun .venv/bin/flopcast bench --suite collectives --out links
