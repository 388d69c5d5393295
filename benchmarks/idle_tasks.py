"""What `dtrain launch` itself costs: jobs whose tasks only wait, and import no TensorFlow.

    python benchmarks/idle_tasks.py [--tasks 16 64 256]

It prints a table: seconds until all tasks run and until all have ended, the launchers' processor time while
they watch, and the memory of the launchers and of a task with its guard (proportional set size).
"""

from __future__ import annotations

import argparse
import contextlib
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

LIMIT = 120.0  # seconds to start or to end
WATCHED = 4.0  # seconds in which processor time is measured

TASK = """
import pathlib, sys, time, os
folder = pathlib.Path(sys.argv[1])
(folder / f"runs-{os.getpid()}").touch()
while not (folder / "end").exists():
    time.sleep(0.05)
"""


def commands(nodes: int, tasks: int, folder: Path) -> list[list[str]]:
    """The commands of a job, one for each node; with one node, the local launcher's."""
    launch = [sys.executable, "-m", "dtrain", "launch"]
    program = [str(folder / "task.py"), str(folder)]
    if nodes == 1:
        return [[*launch, "--workers", str(tasks), *program]]
    with socket.create_server(("127.0.0.1", 0)) as free:
        rendezvous = f"127.0.0.1:{free.getsockname()[1]}"
    options = ["--nnodes", str(nodes), "--nproc-per-node", str(tasks // nodes), "--rendezvous", rendezvous]
    return [[*launch, *options, "--node-rank", str(rank), *program] for rank in range(nodes)]


@contextlib.contextmanager
def job(nodes: int, tasks: int, folder: Path) -> Iterator[list[psutil.Popen]]:
    """The launchers of a job, which are ended at the end if they still run."""
    (folder / "task.py").write_text(TASK)
    with (folder / "output").open("w") as output:
        started = [
            psutil.Popen(command, stdout=output, stderr=output) for command in commands(nodes, tasks, folder)
        ]
        try:
            yield started
        finally:
            for process in started:
                if process.poll() is None:
                    process.terminate()
            psutil.wait_procs(started, timeout=30.0)


def seconds_until(done: Callable[[], bool], what: str) -> float:
    """How long it takes until something is so.

    Raises:
        TimeoutError: it is not so within `LIMIT`.
    """
    begun = time.perf_counter()
    while not done():
        if time.perf_counter() - begun > LIMIT:
            raise TimeoutError(what)
        time.sleep(0.01)
    return time.perf_counter() - begun


def mebibytes(processes: list[psutil.Process]) -> float:
    """The memory of processes; what several share counts once."""
    return float(sum(process.memory_full_info().pss for process in processes)) / 2**20


def processor_seconds(processes: list[psutil.Process]) -> float:
    """The processor time that processes have used so far."""
    return float(sum(sum(process.cpu_times()[:2]) for process in processes))


def measured(nodes: int, tasks: int) -> str:
    """A row of the table.

    Raises:
        RuntimeError: a launcher ended with a status other than 0.
    """
    with tempfile.TemporaryDirectory() as name, job(nodes, tasks, folder := Path(name)) as launchers:
        start = seconds_until(lambda: len(list(folder.glob("runs-*"))) == tasks, "the start of all tasks")
        before = processor_seconds(launchers)
        time.sleep(WATCHED)
        watching = (processor_seconds(launchers) - before) / WATCHED
        own = mebibytes(launchers)
        children = [child for launcher in launchers for child in launcher.children(recursive=True)]
        of_task = mebibytes(children) / tasks
        (folder / "end").touch()
        stop = seconds_until(
            lambda: all(launcher.poll() is not None for launcher in launchers), "the end of the job"
        )
        if any(launcher.returncode for launcher in launchers):
            raise RuntimeError((folder / "output").read_text()[-2000:])
    return f"| {nodes} | {tasks} | {start:.2f} | {stop:.2f} | {watching:.1%} | {own:.0f} | {of_task:.1f} |"


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tasks", type=int, nargs="+", default=[16, 64, 256])
    asked = parser.parse_args()
    print("| nodes | tasks | start, s | stop, s | launchers, of a core | launchers, MiB | a task, MiB |")
    print("|---:|---:|---:|---:|---:|---:|---:|")
    for nodes in (1, 2):
        for tasks in asked.tasks:
            print(measured(nodes, tasks), flush=True)


if __name__ == "__main__":
    main()
