"""Helpers of the tests of MPI starts: whether MPI is available, and starters."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from pathlib import Path

import pytest

BESIDE = Path(sys.executable).parent / "mpirun"
STARTER = str(BESIDE) if BESIDE.exists() else shutil.which("mpirun")
ROOT = ["--allow-run-as-root"] if os.geteuid() == 0 else []


def _missing() -> str:
    if importlib.util.find_spec("mpi4py") is None:
        return "mpi4py is not installed (dtrain[mpi])"
    return "" if STARTER else "there is no mpirun"


needs_mpi = pytest.mark.skipif(bool(_missing()), reason=_missing() or "MPI is there")


def by_hand(ranks: int, *command: str) -> list[str]:
    """A command that starts ranks without dtrain."""
    return [str(STARTER), *ROOT, "--oversubscribe", "--bind-to", "none", "-n", str(ranks), *command]


def script(path: Path, text: str) -> str:
    """Write a shell script, as a test's own MPI starter; its path."""
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)
