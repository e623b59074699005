#!/usr/bin/env bash
# One GPU a task: sbatch --array=0-7 docs/examples/slurm-array.sh; then, on any machine: flopcast fit out
#SBATCH --job-name=flopcast
#SBATCH --gres=gpu:1
#SBATCH --cpus-per-task=8
#SBATCH --time=00:20:00
#SBATCH --output=flopcast-%a.log
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:-.}"
# fit takes folders named gpu0, gpu1, ... for cards of one kind; a task that starts again goes on where it was
exec .venv/bin/flopcast bench --suite standard --out "out/gpu${SLURM_ARRAY_TASK_ID:?run me as an array: sbatch --array=0-7}"
