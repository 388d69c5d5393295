"""Starts the workers of `transport_workers.py`, also by an MPI starter, and checks their reports."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from contract.harness import free_ports
from contract.mpi_starter import mpi_command, mpi_environment, mpi_missing

PROGRAM = Path(__file__).with_name("transport_workers.py")


def check_transport(
    out: Path,
    communication: str,
    workers: int,
    *,
    seconds: float,
    by_mpi: bool = False,
    only: str = "",
    environment: dict[str, str] | None = None,
    first: str = "",
) -> dict[str, str]:
    """Run the cases; fails at the first case with an error, or with different bits on different workers.

    Args:
        out: an empty folder.
        communication: the strategy's argument `communication`.
        workers: number of workers.
        seconds: time limit for all cases.
        by_mpi: whether an MPI starter starts the workers.
        only: names of cases, separated by commas; "" for all cases.
        environment: variables to set for the workers.
        first: a program that each worker runs before it makes the strategy; "" for none.

    Returns:
        The first worker's `dtrain_communication` of the strategy.
    """
    if by_mpi and (why := mpi_missing()):
        pytest.skip(why)
    cluster = {"worker": [f"127.0.0.1:{port}" for port in free_ports(workers)]}
    command = [sys.executable, str(PROGRAM), str(out), communication, json.dumps(cluster)]
    options = ["--only", only] if only else []
    (out / "first.py").write_text(first, encoding="utf-8")
    setting = os.environ | (environment or {}) | (mpi_environment() if by_mpi else {})
    if by_mpi:
        commands = [[*mpi_command(workers), *command, *options]]
    else:
        commands = [[*command, str(rank), *options] for rank in range(workers)]
    logs = [out / f"log.{i}.txt" for i in range(len(commands))]
    processes = []
    for task_command, log in zip(commands, logs, strict=True):
        with log.open("wb") as file:
            processes.append(
                subprocess.Popen(task_command, stdout=file, stderr=file, env=setting, start_new_session=True)
            )
    try:
        codes = [process.wait(seconds) for process in processes]
    except subprocess.TimeoutExpired:
        pytest.fail(f"not done in {seconds} s:\n{_tails(logs)}")
    finally:
        for process in processes:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
    files = [out / f"{rank}.json" for rank in range(workers)]
    if not all(file.exists() for file in files):
        pytest.fail(f"ended with {codes}:\n{_tails(logs)}")
    reports: list[dict[str, Any]] = [json.loads(file.read_text()) for file in files]
    for name, first in reports[0]["cases"].items():
        for rank, report in enumerate(reports):
            assert not report["cases"][name]["wrong"], (
                f"{name}, worker {rank}: {report['cases'][name]['wrong']}"
            )
            assert report["cases"][name]["digest"] == first["digest"], f"{name}: worker {rank} has other bits"
    assert codes == [0] * len(codes), _tails(logs)
    communication_found: dict[str, str] = reports[0]["communication"]
    return communication_found


def _tails(logs: list[Path]) -> str:
    return "\n".join(f"--- {log.name}\n{log.read_text(errors='replace')[-3000:]}" for log in logs)
