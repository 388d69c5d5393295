"""Finds what decides which strategies this machine can run: cores, GPUs, a TPU's name, MPI, sockets.

It gathers facts; `feasibility.py` draws the conclusions. TensorFlow is imported in another process.
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

from dtrain.cluster import current, settings
from dtrain.cluster.tpu import tpu_name
from dtrain.errors import ConfigurationError, MPIError, UnsupportedVersionError
from dtrain.launch.mpi_starter import find_starter
from dtrain.launch.ports import reserve_ports

_PATIENCE = 300.0  # seconds for TensorFlow to be imported on a machine that is busy
_PORTS = 4  # of a job of two workers, a chief and a parameter server


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What was found.

    Attributes:
        processor: its model.
        cores: the numbers of those that this process may use.
        gpus: TensorFlow's names of them.
        logical_cpus: how many the CPU is divided into (DTRAIN_DEVICES_PER_WORKER); 1 where nobody said.
        tpu: the name of a TPU that the environment gives; None without one.
        mpi_problem: why workers cannot be ranks of MPI; "" if they can.
        servers_problem: why no process can serve others on this machine; "" if one can.
        job_workers: the workers of the job that this process is part of; 0 where it is alone.
        job_servers: its parameter servers.
        auto: the strategy that `auto` chooses.
        auto_reason: and why.
        tensorflow: its version.
        keras: its version.
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


def look_at_machine() -> Machine:
    """Look at this machine; it takes the seconds that importing TensorFlow takes.

    Raises:
        ConfigurationError: the environment contradicts itself.
        UnsupportedVersionError: TensorFlow cannot be imported, or not within five minutes.
    """
    topology = current()
    seen = _look()
    return Machine(
        processor=processor_name(),
        cores=tuple(sorted(os.sched_getaffinity(0))),
        gpus=tuple(seen["gpus"]),
        logical_cpus=settings.devices_per_worker() or 1,
        tpu=tpu_name(),
        mpi_problem=_mpi_problem(),
        servers_problem=_servers_problem(),
        job_workers=0 if topology is None else len(topology.jobs.get("worker", ())),
        job_servers=0 if topology is None else len(topology.jobs.get("ps", ())),
        auto=seen["auto"],
        auto_reason=seen["auto_reason"],
        tensorflow=seen["tensorflow"],
        keras=seen["keras"],
    )


def _look() -> dict[str, Any]:
    try:
        done = subprocess.run(
            [sys.executable, "-m", "dtrain.strategies.probe_devices"],
            capture_output=True,
            stdin=subprocess.DEVNULL,
            text=True,
            errors="replace",
            timeout=_PATIENCE,
            env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
        )
        seen = json.loads(done.stdout.strip().rpartition("\n")[2] or "null")
        last = done.stderr.strip().rpartition("\n")[2] or f"it ended with {done.returncode}"
    except subprocess.TimeoutExpired:
        seen, last = None, f"it took more than {_PATIENCE:.0f} seconds"
    except ValueError as error:
        seen, last = None, str(error)
    if seen is None:
        raise UnsupportedVersionError(
            f"TensorFlow was to tell which devices this machine has, but: {last}.",
            hint="See what `python -c 'import tensorflow'` says; pip install 'dtrain[cpu]' installs it.",
        )
    if "problem" in seen:
        raise ConfigurationError(seen["problem"], hint=seen["hint"])
    return seen


def _mpi_problem() -> str:
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
