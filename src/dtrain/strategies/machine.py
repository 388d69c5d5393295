"""Gathers the facts that decide which strategies this machine can run: cores, GPUs, TPU name, MPI, sockets.

`feasibility` draws the conclusions. TensorFlow is imported in another process only.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dtrain.environments import current, settings
from dtrain.environments.tpu_name import tpu_name
from dtrain.errors import ConfigurationError, MPIError, UnsupportedVersionError
from dtrain.launch.local_processes.ports import reserve_ports
from dtrain.launch.mpi.mpi_starter import find_starter

_PATIENCE = 300.0  # seconds that importing TensorFlow may take on a busy machine
_PORTS = 4  # for a job of two workers, a chief and a parameter server


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The facts about one machine.

    Attributes:
        processor: the model of the processor.
        cores: the numbers of the cores that this process may use.
        gpus: TensorFlow's names of the GPUs.
        logical_cpus: the number of logical CPUs to split the CPU into (DTRAIN_DEVICES_PER_WORKER); 1 if not
            set.
        tpu: the name of the TPU that the environment gives; None if it gives none.
        mpi_problem: why workers cannot be started by MPI; "" if they can.
        servers_problem: why no process can serve others on this machine; "" if it can.
        job_workers: the number of workers of the job that this process is part of; 0 if it is part of none.
        job_servers: the number of parameter servers of that job.
        auto: the strategy that `auto` chooses.
        auto_reason: why `auto` chooses it.
        tensorflow: TensorFlow's version.
        keras: Keras' version.
    """

    processor: str
    cores: tuple[int, ...]
    gpus: tuple[str, ...] = ()
    logical_cpus: int = 1
    tpu: str | None = None
    mpi_problem: str = ""
    servers_problem: str = ""
    job_workers: int = 0
    job_servers: int = 0
    auto: str = "default"
    auto_reason: str = ""
    tensorflow: str = ""
    keras: str = ""


def examine_machine() -> Machine:
    """Gathers the facts about this machine; it takes seconds, because another process imports TensorFlow.

    Raises:
        ConfigurationError: the environment contradicts itself, or the other process reported a problem.
        UnsupportedVersionError: TensorFlow cannot be imported, or not within five minutes.
    """
    topology = current()
    seen = probe_devices()
    return Machine(
        processor=processor_name(),
        cores=tuple(sorted(os.sched_getaffinity(0))),
        gpus=tuple(seen["gpus"]),
        logical_cpus=settings.devices_per_worker() or 1,
        tpu=tpu_name(),
        mpi_problem=find_mpi_problem(),
        servers_problem=_servers_problem(),
        job_workers=0 if topology is None else len(topology.jobs.get("worker", ())),
        job_servers=0 if topology is None else len(topology.jobs.get("ps", ())),
        auto=seen["auto"],
        auto_reason=seen["auto_reason"],
        tensorflow=seen["tensorflow"],
        keras=seen["keras"],
    )


def probe_devices(patience: float = _PATIENCE) -> dict[str, Any]:
    """What `probe_devices`, the program, finds in a process of its own, within `patience` seconds.

    Raises:
        ConfigurationError: that process reported a problem.
        UnsupportedVersionError: TensorFlow cannot be imported, or not within this time.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-m", "dtrain.strategies.probe_devices"],
            capture_output=True,
            stdin=subprocess.DEVNULL,
            text=True,
            errors="replace",
            timeout=patience,
            env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
        )
        seen = json.loads(done.stdout.strip().rpartition("\n")[2] or "null")
        last = done.stderr.strip().rpartition("\n")[2] or f"it ended with {done.returncode}"
    except subprocess.TimeoutExpired:
        seen, last = None, f"it took more than {patience:.0f} seconds"
    except ValueError as error:
        seen, last = None, str(error)
    if seen is None:
        raise UnsupportedVersionError(
            f"TensorFlow could not list the devices of this machine: {last}.",
            hint="See what `python -c 'import tensorflow'` says; pip install 'dtrain[cpu]' installs it.",
        )
    if "problem" in seen:
        raise ConfigurationError(seen["problem"], hint=seen["hint"])
    return seen


def find_mpi_problem() -> str:
    """Why workers cannot be started by MPI; "" if they can."""
    try:
        find_starter(None)
    except MPIError as error:
        return error.message
    return ""


def _servers_problem() -> str:
    try:
        with reserve_ports(_PORTS):
            return ""
    except ConfigurationError as error:
        return error.message


def processor_name() -> str:
    """The model of this machine's processor, or the name of its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
