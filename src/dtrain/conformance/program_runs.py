"""Runs the programs under one strategy on one side, in processes of their own; none is left behind.

If a program hangs or ends its process, that is recorded as its error, and the other programs run in new
processes. This module compares nothing.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from dtrain.conformance.strategy_layouts import LAYOUTS
from dtrain.conformance.worker import READY, RESTART, START_SECONDS, result
from dtrain.environments.topology import Task
from dtrain.launch.job.job_session import Session
from dtrain.launch.job.task_environment import measured_environment
from dtrain.launch.local_processes.local_launcher import LocalLauncher
from dtrain.launch.supervision.reports import describe_exit
from dtrain.launch.supervision.running_tasks import Job, JobOutcome, TaskCommand

_VARIABLES = {"CUDA_VISIBLE_DEVICES": "-1", "KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "2"}
_TIMEOUT = "Timeout ("  # what faulthandler writes before it ends a process


class ProgramAnswer(NamedTuple):
    """The result of a program.

    Attributes:
        values: its numbers by name; empty if it failed.
        error: why it failed; "" if it did not.
    """

    values: dict[str, Any]
    error: str = ""


class SignalledError(Exception):
    """A signal, such as that of Ctrl-C, ended the run.

    Attributes:
        signal: its number.
    """

    def __init__(self, signal: int) -> None:
        self.signal = signal
        super().__init__(f"signal {signal}")


class ProgramRunner:
    """Runs programs, in the context that `opened` provides.

    Args:
        time_limit: the seconds that one program may take.
        log: where the output of all processes goes.
    """

    def __init__(self, time_limit: float, log: TextIO) -> None:
        self._time_limit = time_limit
        self._session = Session(stdout=log, stderr=log)
        self._launcher = LocalLauncher(self._session)

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """A context in which signals end the run with `SignalledError`."""
        with self._session.opened(), self._launcher.opened():
            yield

    def run(
        self, strategy: str, side: str, names: Sequence[str], tell: Callable[[str, ProgramAnswer], None]
    ) -> dict[str, ProgramAnswer]:
        """Run programs under one strategy.

        Args:
            strategy: a name of `LAYOUTS`.
            side: of `SIDES`.
            names: the programs.
            tell: called with each answer as soon as its processes have ended.

        Raises:
            SignalledError: a signal was received; all processes have ended.
        """
        answers: dict[str, ProgramAnswer] = {}
        while left := [name for name in names if name not in answers]:
            folder = Path(tempfile.mkdtemp(prefix="conformance-", dir=self._session.scratch()))
            try:
                new = self._attempt(strategy, side, left, folder)
            finally:
                shutil.rmtree(folder, ignore_errors=True)
            for name, answer in new.items():
                tell(name, answer)
            answers |= new
        return answers

    def _attempt(self, strategy: str, side: str, names: list[str], folder: Path) -> dict[str, ProgramAnswer]:
        """Start processes that run the programs until all are done or one fails in a way that ends them."""
        tasks = LAYOUTS[strategy].tasks
        several = len(tasks) > 1
        arguments = [strategy, side, str(folder), str(self._time_limit), *names]
        command = [sys.executable, "-m", "dtrain.conformance.worker", *arguments]
        with self._launcher.assign(tasks, {}) as assignments:
            commands = [
                TaskCommand(
                    task, command, measured_environment(assignment.topology if several else None, _VARIABLES)
                )
                for task, assignment in zip(tasks, assignments, strict=True)
            ]
            outcome = Job(commands, self._launcher).run()
        if outcome.signal is not None:
            raise SignalledError(outcome.signal)
        trained = [task for task in tasks if LAYOUTS[strategy].trains(task)]
        answers: dict[str, ProgramAnswer] = {}
        for name in names:
            answer = _read(folder, name, trained)
            if answer is None:
                break
            answers[name] = answer
        if not (folder / READY).exists():
            problem = f"the strategy cannot be made: {_reason(outcome, START_SECONDS)}"
            return dict.fromkeys(names, ProgramAnswer({}, problem))
        failed = outcome.first_failure
        restarts = failed is not None and outcome.exit_codes[failed] == RESTART
        if len(answers) < len(names) and not (restarts and answers):
            answers[names[len(answers)]] = ProgramAnswer({}, _reason(outcome, self._time_limit))
        return answers


def _read(folder: Path, name: str, tasks: Sequence[Task]) -> ProgramAnswer | None:
    """A program's answer; None if not all tasks have given one and none of them an error."""
    import numpy as np

    answers: list[dict[str, Any]] = []
    for task in tasks:
        file = result(folder, name, task)
        if not file.exists():
            continue
        content = file.read_bytes()
        if content.startswith(b"{"):
            return ProgramAnswer({}, json.loads(content)["error"])
        with np.load(file, allow_pickle=False) as arrays:
            answers.append({key: arrays[key] for key in arrays.files})
    if len(answers) < len(tasks):
        return None
    for other in answers[1:]:
        apart = [
            key for key in answers[0] if key not in other or answers[0][key].tobytes() != other[key].tobytes()
        ]
        if apart:
            return ProgramAnswer({}, f"the workers have different numbers in {apart[0]}")
    return ProgramAnswer(answers[0])


def _reason(outcome: JobOutcome, limit: float) -> str:
    """Why the processes of an attempt ended before all programs had run."""
    if any(line.startswith(_TIMEOUT) for tail in outcome.tails.values() for line in tail):
        return f"hang: not done within {limit:g} s"
    failed = outcome.first_failure
    if failed is None:
        return "its processes ended early"
    tail = [line.strip() for line in outcome.tails[failed] if line.strip()]
    code = outcome.exit_codes[failed]
    named = [line for line in tail if "Error" in line]
    return f"the process {describe_exit(code)}{f': {named[-1][:200]}' if named and code > 0 else ''}"
