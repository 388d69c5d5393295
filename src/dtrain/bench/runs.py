"""Runs the rows of a bench, each within its time limit, and leaves no process behind.

It does not read the measurements; `measured.py` reads them from the runs' directories.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, TextIO

from dtrain.bench.background_load import BackgroundLoad
from dtrain.bench.bench_plan import BenchOptions, Row
from dtrain.environments.topology import Task
from dtrain.launch.job.job_session import Session
from dtrain.launch.job.task_environment import measured_environment
from dtrain.launch.local_processes.local_launcher import LocalLauncher
from dtrain.launch.supervision.reports import describe_exit
from dtrain.launch.supervision.running_tasks import Job, TaskCommand


class StoppedError(Exception):
    """A signal, such as that of Ctrl-C, asked the bench to end.

    Attributes:
        signal: the number of the signal.
    """

    def __init__(self, number: int) -> None:
        self.signal = number
        super().__init__(signal.Signals(number).name)


class RowRun(NamedTuple):
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
        log: where the output of all runs goes, each line marked with its row and round.
    """

    def __init__(self, asked: BenchOptions, cores: Sequence[int], log: TextIO) -> None:
        self._asked, self._cores = asked, cores
        self._session = Session(stdout=log, stderr=log)
        self._launcher = LocalLauncher(self._session)

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """A context in which signals are queued instead of ending the process; `run` raises StoppedError."""
        with self._session.opened(), self._launcher.opened():
            yield

    def run(self, row: Row, number: int, run_dir: Path) -> RowRun:
        """Train one row.

        Args:
            row: a row that can run on this machine.
            number: the round, from 1.
            run_dir: the run directory to make.

        Raises:
            StoppedError: a signal was received; the run's processes have ended.
        """
        task = Task(row.key, number)
        env = measured_environment(None, {"TF_CPP_MIN_LOG_LEVEL": "1"})
        command = TaskCommand(task, row.command(self._asked, run_dir), env)
        started, others = time.monotonic(), BackgroundLoad(self._cores)
        outcome = Job([command], self._launcher, timeout=self._asked.time_limit).run()
        seconds = time.monotonic() - started
        if outcome.signal is not None:
            raise StoppedError(outcome.signal)
        tail, code = tuple(filter(str.strip, outcome.tails[task])), outcome.exit_codes[task]
        if outcome.timed_out:
            last = f", and was at: {tail[-1]}" if tail else ""
            return RowRun(f"not done within {self._asked.time_limit:g} s (--time-limit){last}", seconds, tail)
        if code:
            return RowRun(reason(tail) or f"it {describe_exit(code)}", seconds, tail)
        return RowRun("", seconds, others=others.share())


def reason(tail: Sequence[str]) -> str:
    """The reason why a run failed: its last line of output that names an error, or else its last line."""
    lines = [line.strip() for line in tail]
    named = [line for line in lines if "Error" in line or "error:" in line]
    return (named or lines or [""])[-1][:300]
