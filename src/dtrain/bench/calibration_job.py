"""Runs the jobs that measure what `dtrain plan` needs to know of communication and of shared cores.

Each job of some workers over a transport runs `calibration_worker.py`. `planning/measured_calibration.py`
makes a calibration of what they find.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from dtrain.base import safe_files
from dtrain.bench.calibration_worker import WorkerCosts
from dtrain.errors import TaskFailedError
from dtrain.launch import launch_local

Start = Callable[[list[str], str, int], int]
"""Starts a program as every worker of a job: of the program, its transport and workers. Gives a status."""

_MOST_BYTES = 1 << 16


def launched(log: TextIO) -> Start:
    """Starts jobs on this machine, as `dtrain launch` does; their output goes to a file."""

    def start(program: list[str], transport: str, workers: int) -> int:
        launcher = "mpi" if transport == "mpi" and workers > 1 else "local"
        return launch_local(
            program, workers=workers, launcher=launcher, max_restarts=0, stdout=log, stderr=log
        )

    return start


def measure_job(transport: str, workers: int, start: Start) -> list[WorkerCosts]:
    """What each worker of a job measures.

    Raises:
        TaskFailedError: the job failed.
    """
    with tempfile.TemporaryDirectory(prefix="dtrain-calibration-") as folder:
        program = [sys.executable, "-m", "dtrain.bench.calibration_worker", folder, transport]
        status = start(program, transport, workers)
        files = sorted(Path(folder).glob("worker-*.json"))
        if status or len(files) < workers:
            raise TaskFailedError(
                f"A job of {workers} workers over {transport}, which measures, ended with status {status}.",
                task="worker",
                exit_code=status,
                hint="Its last lines are shown above.",
            )
        return [WorkerCosts(**safe_files.read_json(path, _MOST_BYTES)) for path in files]
