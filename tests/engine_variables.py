"""Recorded environment variables that Open MPI, Ray and Slurm set for a task, as far as dtrain reads them.

Tests of a single process use them instead of a real engine. The tests that run an engine compare its
variables with these, so that a version with other variables is noticed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

OPEN_MPI_RANK = {
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "PMIX_RANK": "1",
}
"""The variables of Open MPI 5, in the second of two ranks on a host."""

RAY_ACTOR = {
    "RAY_CLIENT_MODE": "0",
    "RAY_JOB_ID": "ffffffff",
    "RAY_LD_PRELOAD_ON_WORKERS": "0",
    "RAY_RAYLET_PID": "10896",
}
"""The variables of Ray 2.60, in an actor, in a task, and in processes that these start."""

SLURM_STEPS = {
    "srun -N2 -n3": {
        "SLURMD_NODENAME": "host2",
        "SLURM_CPUS_ON_NODE": "1",
        "SLURM_JOB_ID": "2",
        "SLURM_PROCID": "2",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": "host[1-2]",
        "SLURM_STEP_NUM_TASKS": "3",
        "SLURM_STEP_TASKS_PER_NODE": "2,1",
    },
    "srun -N2 -n4 -m cyclic": {
        "SLURMD_NODENAME": "host1",
        "SLURM_CPUS_ON_NODE": "3",
        "SLURM_DISTRIBUTION": "cyclic",
        "SLURM_JOB_ID": "1",
        "SLURM_PROCID": "3",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": "host[1-2]",
        "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_STEP_TASKS_PER_NODE": "3,1",
    },
    "srun -N2 -n6 -m plane=2": {
        "SLURMD_NODENAME": "host1",
        "SLURM_CPUS_ON_NODE": "4",
        "SLURM_DISTRIBUTION": "plane",
        "SLURM_DIST_PLANESIZE": "2",
        "SLURM_JOB_ID": "2",
        "SLURM_PROCID": "5",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": "host[1-2]",
        "SLURM_STEP_NUM_TASKS": "6",
        "SLURM_STEP_TASKS_PER_NODE": "4,2",
    },
    "srun -w host2 -n1 : -w host1 -n2": {
        "SLURMD_NODENAME": "host1",
        "SLURM_CPUS_ON_NODE": "2",
        "SLURM_DISTRIBUTION": "block",
        "SLURM_HET_SIZE": "2",
        "SLURM_JOB_ID": "5",
        "SLURM_JOB_NODELIST_PACK_GROUP_0": "host2",
        "SLURM_JOB_NODELIST_PACK_GROUP_1": "host1",
        "SLURM_PROCID": "2",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": "host[1-2]",
        "SLURM_STEP_NUM_TASKS": "3",
        "SLURM_STEP_TASKS_PER_NODE": "2,1",
    },
    "salloc -N2 -n4 -c2 srun": {
        "SLURMD_NODENAME": "host2",
        "SLURM_CPUS_ON_NODE": "4",
        "SLURM_CPUS_PER_TASK": "2",
        "SLURM_DISTRIBUTION": "block",
        "SLURM_JOB_ID": "5",
        "SLURM_PROCID": "3",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": "host[1-2]",
        "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    },
}
"""The variables of Slurm 22.05, for the last task of each step, on two hosts with four CPUs."""

SLURM_NO_STEP = {
    "srun -n1": {
        "SLURM_CPUS_ON_NODE": "1",
        "SLURM_JOB_ID": "7",
        "SLURM_PROCID": "0",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": "host1",
        "SLURM_STEP_NUM_TASKS": "1",
        "SLURM_STEP_TASKS_PER_NODE": "1",
    },
    "sbatch -N2 -n4": {
        "SLURM_CPUS_ON_NODE": "3",
        "SLURM_JOB_ID": "6",
        "SLURM_NTASKS": "4",
        "SLURM_PROCID": "0",
        "SLURM_TASKS_PER_NODE": "3,1",
    },
    "salloc -n4": {"SLURM_JOB_ID": "8", "SLURM_NTASKS": "4", "SLURM_TASKS_PER_NODE": "4"},
}
"""The same for a process that is no task of a step of several tasks."""


def assert_as_recorded(
    env: Mapping[str, str], recorded: Mapping[str, str], *, varying: Collection[str] = ()
) -> None:
    """Fail unless an engine has set the recorded variables, to the recorded values unless they vary."""
    differ = {
        name: env.get(name)
        for name, value in recorded.items()
        if name not in env or (env[name] != value and name not in varying)
    }
    assert not differ, f"set to {differ}, and recorded is {recorded}"
