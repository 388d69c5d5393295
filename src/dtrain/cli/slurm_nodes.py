"""`srun dtrain launch`: each launcher that Slurm has started is a node of one job.

It derives the options of the job from Slurm's variables; `launch` runs the job.
"""

from __future__ import annotations

import argparse
from typing import Any

from dtrain.environments import slurm_step
from dtrain.environments.cores import limit_threads
from dtrain.environments.gpus import visible_gpus
from dtrain.errors import ConfigurationError

_ASKED = ("nnodes", "node_rank", "rendezvous")


def from_slurm(args: argparse.Namespace) -> dict[str, Any]:
    """The options of `launch.NodeOptions` that follow from the job step and were not given.

    It also limits the threads of the tasks to the cores that Slurm gives to this launcher.

    Args:
        args: the arguments of `dtrain launch`.

    Returns:
        Values by name, `nnodes` as an integer; {} if `srun` has not started several launchers.

    Raises:
        ConfigurationError: an option is for one machine; or several launchers of a host see the same GPUs.
    """
    limit_threads()
    step = slurm_step.launchers()
    if step is None or all(hasattr(args, name) for name in _ASKED):
        return {}
    started = f"srun has started {len(step.hosts)} launchers, which form one job"
    if args.workers or getattr(args, "mpi", False):
        option, instead = (
            ("--workers", "give --nproc-per-node, the number of workers of each launcher")
            if args.workers
            else ("--mpi", "start the script itself: srun --mpi=pmix python train.py")
        )
        raise ConfigurationError(
            f"{option} is for one machine, but {started}.",
            hint=f"Leave it out, and {instead}. Or start one launcher: srun --ntasks=1.",
        )
    options: dict[str, Any] = {
        "nnodes": len(step.hosts),
        "node_rank": step.rank,
        "rendezvous": step.addresses[0],
    }
    if slurm_step.shares_host(step) and visible_gpus() and not slurm_step.divides_gpus():
        raise ConfigurationError(
            f"{started}, but the launchers on a host all see the same GPUs.",
            hint="Start one launcher on each host (srun --ntasks-per-node=1), which runs a worker for each "
            "GPU; or let Slurm give each launcher its own GPU (srun --gpus-per-task=1).",
        )
    return {name: value for name, value in options.items() if not hasattr(args, name)}
