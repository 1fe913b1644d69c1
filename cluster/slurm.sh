#!/bin/bash
# Slurm, from the folder of this repository, on a file system that all nodes share; on a node with a
# network first: make .venv GPU=1 && .venv/bin/python data/prepare.py
#
#   sbatch cluster/slurm.sh    measures on one node what `make report` does; STUDIES=stages,ladder in
#                              the environment: these alone; submitted again, it goes on
#   sbatch --nodes=2 --gpus-per-node=8 cluster/slurm.sh SCRIPT [options]    trains on all nodes' GPUs;
#                              with --resume it is restarted, three times at most, if a rank fails
#
# sbatch's own options, which stand before the name of this file, take the place of these:
#SBATCH --job-name=gpt-speed
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=1
#SBATCH --cpus-per-task=16
#SBATCH --time=08:00:00
#SBATCH --signal=TERM@120
#SBATCH --open-mode=append

python=${PYTHON:-.venv/bin/python}
if [ ! -e measure.py ]; then
    echo "error: $PWD isn't the folder of measure.py: submit it from there" >&2
    exit 1
elif ! command -v "$python" > /dev/null; then
    echo "error: there is no $python: run make .venv GPU=1, or submit it with PYTHON=..." >&2
    exit 1
fi

on_node=(srun --cpus-per-task="$SLURM_CPUS_PER_TASK")  # srun doesn't inherit it from the job
if [ $# -eq 0 ]; then
    # Two minutes before the job's time is over SIGTERM comes: the page is written, with all so far.
    exec "${on_node[@]}" --nodes=1 --ntasks=1 "$python" measure.py report --minutes 100000 \
        --studies "$STUDIES"
fi

export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=75  # from PyTorch 2.13 on; before, it is 30
restarts=0  # a script that doesn't resume would begin anew
for option in "$@"; do
    case $option in --resume | --resume=*) restarts=3 ;; esac
done
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
exec "${on_node[@]}" "$python" -m torch.distributed.run --nnodes="$SLURM_NNODES" \
    --nproc_per_node="$SLURM_GPUS_ON_NODE" --rdzv-backend=c10d --rdzv-endpoint="$first:29400" \
    --rdzv-id="$SLURM_JOB_ID" --max-restarts="$restarts" "$@"
