"""Decides which strategies this machine can run now, with how many replicas, and why it cannot run others.

It applies a rule for each span of strategies to the facts that `machine` has gathered, and looks at no device
itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from dtrain.base.words import counted
from dtrain.strategies.machine import Machine
from dtrain.strategies.registry import STRATEGIES, Span


class Feasibility(NamedTuple):
    """Whether one machine can run a strategy.

    Attributes:
        can: whether the strategy can run.
        replicas: how many replicas it has now; None if that is decided when a job starts.
        why: the reason.
    """

    can: bool
    replicas: int | None
    why: str


def feasibilities(machine: Machine) -> dict[str, Feasibility]:
    """The feasibility of each strategy on a machine, by the strategy's name."""
    return {name: _RULES[entry.spans](machine) for name, entry in STRATEGIES.items()}


def _on_one_device(machine: Machine) -> Feasibility:
    return Feasibility(True, 1, "on the first GPU" if machine.gpus else "on the CPU")


def _on_devices(machine: Machine) -> Feasibility:
    """The rule for strategies with a replica on each device of one machine."""
    if machine.gpus:
        count = len(machine.gpus)
        return Feasibility(True, count, "one GPU: the same as one device" if count == 1 else f"{count} GPUs")
    if machine.logical_cpus > 1:
        return Feasibility(True, machine.logical_cpus, "no GPU; logical CPUs share the cores")
    return Feasibility(True, 1, "no GPU: one CPU, which dtrain train --devices K divides for tests")


def _on_workers(machine: Machine) -> Feasibility:
    if machine.job_servers:
        return Feasibility(False, None, "this job has parameter servers")
    if machine.job_workers > 1:
        return Feasibility(True, _of_job(machine), f"this job has {machine.job_workers} workers")
    if machine.servers_problem:
        return Feasibility(False, None, f"workers cannot reach each other: {machine.servers_problem}")
    backends = ["NCCL"] if machine.gpus else ["ring", *([] if machine.mpi_problem else ["MPI"])]
    missing = f"; no MPI: {machine.mpi_problem}" if machine.mpi_problem and not machine.gpus else ""
    return Feasibility(True, None, f"with --workers N, over {' or '.join(backends)}{missing}")


def _of_job(machine: Machine) -> int:
    """The number of replicas of all workers, if the other workers have as many devices as this one."""
    return machine.job_workers * (len(machine.gpus) or machine.logical_cpus)


def _on_tpu(machine: Machine) -> Feasibility:
    if machine.tpu is None:
        return Feasibility(False, None, "the environment names no TPU (TPU_NAME)")
    return Feasibility(
        True, None, f"the environment names a TPU ({machine.tpu}); whether it answers was not tried"
    )


def _on_servers(machine: Machine) -> Feasibility:
    if machine.job_servers:
        servers = counted(machine.job_servers, "parameter server")
        return Feasibility(True, 1, f"this job has {servers}")
    if machine.job_workers > 1:
        return Feasibility(False, None, "this job has no parameter servers")
    if machine.servers_problem:
        return Feasibility(False, None, f"no process can serve others: {machine.servers_problem}")
    return Feasibility(True, 1, "with --workers N --ps M")


_RULES: dict[Span, Callable[[Machine], Feasibility]] = {
    "device": _on_one_device,
    "devices": _on_devices,
    "workers": _on_workers,
    "servers": _on_servers,
    "tpu": _on_tpu,
}
