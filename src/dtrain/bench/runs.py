"""Runs the rows of a bench, each within its time limit, and leaves no process behind.

It does not read the measurements; `measured.py` reads them from the runs' directories.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from dtrain.bench.busy import Others
from dtrain.bench.plan import Asked, Row
from dtrain.launch import guard
from dtrain.launch.environment import task_environment
from dtrain.launch.local_launcher import LocalLauncher, new_mark
from dtrain.launch.session import Session

LOG = "log.txt"
_GRACE = 10.0  # seconds for a launcher to end its tasks, before everything is killed
_LOOK = 0.1  # seconds between two looks whether a run has ended
_TAIL = 4000  # bytes at the end of a log that are searched for the reason of a failure


class StoppedError(Exception):
    """A signal, such as that of Ctrl-C, asked the bench to end.

    Attributes:
        signal: the number of the signal.
    """

    def __init__(self, number: int) -> None:
        self.signal = number
        super().__init__(signal.Signals(number).name)


class Ended(NamedTuple):
    """How a run's processes ended.

    Attributes:
        problem: why the run cannot be used; "" if it succeeded.
        seconds: from its start to its end.
        tail: its last lines of output if it failed.
        others: the share of the cores that other programs used meanwhile; None if unknown or if it failed.
    """

    problem: str
    seconds: float
    tail: tuple[str, ...] = ()
    others: float | None = None


class Runner:
    """Runs rows, in the context that `opened` provides.

    Args:
        asked: the options of the bench.
        cores: the numbers of all cores that the rows use.
    """

    def __init__(self, asked: Asked, cores: Sequence[int]) -> None:
        self._asked, self._cores = asked, cores
        self._session = Session()
        self._launcher = LocalLauncher(self._session)

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """A context in which signals are queued instead of ending the process; `run` raises StoppedError."""
        with self._session.opened(), self._launcher.opened():
            yield

    def run(self, row: Row, folder: Path) -> Ended:
        """Train one row in a new directory.

        Args:
            row: a row that can run on this machine.
            folder: the directory to make; the run's files and its output go there.

        Raises:
            StoppedError: a signal was received; the run's processes have ended.
            OSError: the directory cannot be made or written to.
        """
        folder.mkdir(parents=True)
        mark = new_mark()
        started, others = time.monotonic(), Others(self._cores)
        with (folder / LOG).open("wb") as log:
            process = subprocess.Popen(
                row.command(self._asked, folder / "run"),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._launcher.environment(_environment(), mark),
                # Ctrl-C must reach only this process, which then ends the run in order. Tasks of a launched
                # job have their own session, too: Linux may share cores by session, so that all rows are
                # equal.
                start_new_session=True,
            )
            try:
                limit = started + self._asked.time_limit
                in_time = self._waited(process, limit)
            finally:
                _end(process, mark)
        seconds = time.monotonic() - started
        if not in_time:
            tail = _tail(folder / LOG)
            said = f", and was at: {tail[-1]}" if tail else ""
            return Ended(f"not done within {self._asked.time_limit:g} s (--time-limit){said}", seconds, tail)
        if process.returncode:
            tail = _tail(folder / LOG)
            return Ended(reason(tail) or f"it ended with status {process.returncode}", seconds, tail)
        return Ended("", seconds, others=others.share())

    def _waited(self, process: subprocess.Popen[bytes], limit: float) -> bool:
        """Wait for a process; returns whether it ended before the limit.

        The queue of signals is read once more after the end, because a signal that arrives as the last run
        ends would otherwise be lost.

        Raises:
            StoppedError: a signal was received.
        """
        ended = False
        while not ended and time.monotonic() < limit:
            ended = process.poll() is not None
            with contextlib.suppress(queue.Empty):
                event = self._session.events.get(timeout=0.0 if ended else _LOOK)
                if isinstance(event, int):
                    raise StoppedError(event)
        return ended


def _environment() -> dict[str, str]:
    """This process's environment, without variables that assign it to a job or divide its CPU."""
    found = task_environment(None, None, {"TF_CPP_MIN_LOG_LEVEL": "1"})
    for name in ("DTRAIN_DEVICES_PER_WORKER", "DTRAIN_LAUNCHED"):
        found.pop(name, None)
    return found


def _end(process: subprocess.Popen[bytes], mark: str) -> None:
    """Terminate a process; after a grace period, kill it and all processes that it started."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE)
    guard.kill_marked(mark)
    if process.poll() is None:  # without /proc, `kill_marked` cannot find it by its mark
        process.kill()
    process.wait()


def _tail(log: Path) -> tuple[str, ...]:
    """The last lines of a log; of a line that a progress bar rewrites, only the last state."""
    with log.open("rb") as file:
        file.seek(max(os.fstat(file.fileno()).st_size - _TAIL, 0))
        text = file.read().decode(errors="replace")
    lines = [line.rpartition("\r")[2].rstrip() for line in text.replace("\r\n", "\n").splitlines()]
    return tuple(line for line in lines if line.strip())[-20:]


def reason(tail: Sequence[str]) -> str:
    """The reason why a run failed: its last line of output that names an error, or else its last line."""
    lines = [line.strip() for line in tail]
    named = [line for line in lines if "Error" in line or "error:" in line]
    return (named or lines or [""])[-1][:300]
