"""Runs one row of a bench after the other, each within its time limit, and leaves no process of any behind.

What the runs have measured stands in their directories; `results.py` reads it.
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
from dtrain.launch.session import Session, new_mark

LOG = "log.txt"
_GRACE = 10.0  # seconds for a launcher to end its tasks, before everything is killed
_LOOK = 0.1  # seconds between two looks whether a run has ended
_TAIL = 4000  # characters of a log in which the reason of a failure is looked for


class StoppedError(Exception):
    """A signal asked for the end, such as Ctrl-C.

    Attributes:
        signal: which.
    """

    def __init__(self, number: int) -> None:
        self.signal = number
        super().__init__(signal.Signals(number).name)


class Ended(NamedTuple):
    """What became of a run's processes.

    Attributes:
        problem: why it is not to be used; "" if it ended well.
        seconds: from its start to its end.
        tail: the last lines that it printed, where it failed.
        others: the share of the cores that other programs took meanwhile; None where it is not known.
    """

    problem: str
    seconds: float
    tail: tuple[str, ...] = ()
    others: float | None = None


class Runner:
    """Runs rows; a context manager, which catches signals and kills what is left.

    Args:
        asked: what is trained.
        cores: those that all rows use.
    """

    def __init__(self, asked: Asked, cores: Sequence[int]) -> None:
        self._asked, self._cores = asked, cores
        self._session = Session()

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """While the `with` block runs, signals are noted; `run` answers them."""
        with self._session.opened():
            yield

    def run(self, row: Row, folder: Path) -> Ended:
        """Train one row in a new directory.

        Args:
            row: that can run here.
            folder: is made; the run's files and what it prints go there.

        Raises:
            StoppedError: a signal came; the run's processes are gone.
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
                env=self._session.environment(_environment(), mark),
                # Ctrl-C is for us, who end it in order. And a session of its own, as the tasks of a launched
                # job have: where Linux deals out its cores by session, all rows get theirs alike.
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
        """Whether it has ended before the limit.

        Signals are looked for once more when it has: one that came as the last run ended would be lost.
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
    """This process's, without what would make the run a part of another job, or divide its CPU."""
    found = task_environment(None, None, {"TF_CPP_MIN_LOG_LEVEL": "1"})
    for name in ("DTRAIN_DEVICES_PER_WORKER", "DTRAIN_LAUNCHED"):
        found.pop(name, None)
    return found


def _end(process: subprocess.Popen[bytes], mark: str) -> None:
    """Ask what still runs to end, and kill what does not, with all that it has started."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE)
    guard.kill_marked(mark)
    if process.poll() is None:  # where there is no /proc to find it by its mark
        process.kill()
    process.wait()


def _tail(log: Path) -> tuple[str, ...]:
    """The last lines of a log, without those that a progress bar has written over."""
    with log.open("rb") as file:
        file.seek(max(os.fstat(file.fileno()).st_size - _TAIL, 0))
        text = file.read().decode(errors="replace")
    lines = [line.rpartition("\r")[2].rstrip() for line in text.replace("\r\n", "\n").splitlines()]
    return tuple(line for line in lines if line.strip())[-20:]


def reason(tail: Sequence[str]) -> str:
    """Why a run failed, on one line: the last one that names an error, else the last."""
    lines = [line.strip() for line in tail]
    named = [line for line in lines if "Error" in line or "error:" in line]
    return (named or lines or [""])[-1][:300]
