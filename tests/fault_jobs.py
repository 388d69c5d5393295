"""Starts real jobs of `fault_program`, lets tests break them from outside, and checks their results."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fault_program import EXAMPLES
from processes import processes_with, wait_until

PROGRAM = Path(__file__).with_name("fault_program.py")
RESTARTED = r"All are started again|The whole job is started again|it is started again"

_UNDISTURBED: dict[str, dict[str, Any]] = {}
"""The results of trainings without faults, by their options."""


@dataclass(frozen=True)
class Training:
    """One training of a job.

    Attributes:
        folder: the training's own folder.
        options: the options of `fault_program`.
    """

    folder: Path
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def faults(self) -> list[dict[str, Any]]:
        """The faults that its options plan."""
        return self.options.get("faults", [])

    def result(self) -> dict[str, Any]:
        """The training's result, with its CSV log."""
        result: dict[str, Any] = json.loads((self.folder / "result.json").read_text())
        return {**result, "log": (self.folder / "log.csv").read_text()}

    def steps(self) -> list[tuple[int, int, float]]:
        """Every step that was made: the process id, the step's number over all epochs, the Unix time."""
        lines = (self.folder / "steps").read_text().split("\n")
        return [(int(a), int(b), float(c)) for a, b, c in (line.split() for line in lines if line)]

    def starts(self) -> int:
        """How many tasks were started, in all attempts of all jobs."""
        return len((self.folder / "lives").read_text().splitlines())

    def fault(self, number: int) -> dict[str, Any]:
        """The time of a fault, and the newest committed checkpoint at that time."""
        fault: dict[str, Any] = json.loads((self.folder / f"fault-{number}").read_text())
        return fault


class Job:
    """A running `dtrain launch` of the program; use it as a context, which kills it at the end.

    Args:
        trainings: the trainings, made one after another.
        workers: number of workers.
        options: further options of `dtrain launch`.
        env: variables to add to the environment.
    """

    def __init__(
        self,
        trainings: Sequence[Training],
        *,
        workers: int = 1,
        options: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
    ) -> None:
        for training in trainings:
            training.folder.mkdir(parents=True, exist_ok=True)
        self.trainings = trainings
        self.lines: list[tuple[float, str]] = []
        command = [sys.executable, "-m", "dtrain", "launch", "--workers", str(workers), *options]
        self._process = subprocess.Popen(
            [*command, str(PROGRAM), *arguments(trainings)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", **(env or {})},
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *error: object) -> None:
        if self._process.poll() is None:
            self._process.kill()  # the guard and the kernel end the processes that the launcher started
            self._process.wait()
        self._reader.join()

    @property
    def pid(self) -> int:
        """The process id of the launcher."""
        return self._process.pid

    @property
    def over(self) -> bool:
        """Whether the launcher has ended."""
        return self._process.poll() is not None

    @property
    def text(self) -> str:
        """The output so far."""
        return "\n".join(line for _, line in self.lines)

    def wait(self) -> int:
        """Wait for the launcher's end; its exit status."""
        status = self._process.wait()
        self._reader.join()
        return status

    def signal(self, signum: int) -> None:
        """Sends the launcher a signal."""
        self._process.send_signal(signum)

    def first(self, pattern: str, *, after: float = 0.0) -> float:
        """The time of the first line after `after` that matches a pattern; AssertionError without one."""
        for at, line in self.lines:
            if at >= after and re.search(pattern, line):
                return at
        raise AssertionError(f"no line with {pattern!r} in\n{self.text}")

    def _read(self) -> None:
        for line in self._process.stdout or ():
            self.lines.append((time.time(), line.rstrip("\n")))


def run(trainings: Sequence[Training], *, status: int = 0, **options: Any) -> Job:
    """Run a job to its end; asserts the expected exit status, and that no process is left."""
    with Job(trainings, **options) as job:
        exit_code = job.wait()
    assert exit_code == status, f"status {exit_code}\n{job.text}"
    assert_nothing_runs(trainings)
    return job


def run_alone(trainings: Sequence[Training], env: Mapping[str, str] | None = None) -> None:
    """Run the trainings in one process, without a launcher."""
    for training in trainings:
        training.folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(
        [sys.executable, str(PROGRAM), *arguments(trainings)],
        check=True,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", **(env or {})},
    )


def arguments(trainings: Sequence[Training]) -> list[str]:
    """The command-line arguments of the program."""
    return [text for training in trainings for text in (str(training.folder), json.dumps(training.options))]


def undisturbed(folder: Path, strategy: str, *options: dict[str, Any]) -> list[dict[str, Any]]:
    """The results of trainings without faults and without checkpoints, one for each of `options`.

    Results that no earlier test of this process requested are computed in one job.
    """
    plain = [{"data": "arrays", **settings, "strategy": strategy, "save": None} for settings in options]
    names = [json.dumps(settings, sort_keys=True) for settings in plain]
    missing = {
        name: Training(folder / f"{number}", settings)
        for number, (name, settings) in enumerate(zip(names, plain, strict=True))
        if name not in _UNDISTURBED
    }
    if missing and strategy == "multi_worker":
        run([*missing.values()], workers=2, options=("--max-restarts", "0"))
    elif missing:
        run_alone([*missing.values()])
    _UNDISTURBED.update({name: training.result() for name, training in missing.items()})
    return [_UNDISTURBED[name] for name in names]


def assert_same(training: Training, expected: dict[str, Any], *, epochs: int | None = None) -> None:
    """Assert that the training ended with the same bits, and saw every example once in every epoch."""
    result = training.result()
    assert result == expected
    count = epochs or training.options.get("epochs", 3)
    assert result["epochs"] == list(range(count))
    assert result["history"]["seen_once"] == [EXAMPLES] * count
    assert len(result["log"].splitlines()) == count + 1


def assert_nothing_left(*trainings: Training) -> None:
    """Assert that neither a process nor a checkpoint is left."""
    assert_nothing_runs(trainings)
    for training in trainings:
        backup = training.folder / training.options.get("backup", "backup")
        assert not backup.exists(), sorted(map(str, backup.rglob("*")))


def assert_nothing_runs(trainings: Sequence[Training]) -> None:
    """Wait until no process of the job lives: one that outlives the job would live for ever."""
    wait_until(lambda: not processes_with(str(trainings[0].folder)))


def assert_recovered(job: Job, training: Training, number: int, *, noticed: str = RESTARTED) -> None:
    """Assert that the job noticed a fault and recovered, and repeated only unsaved steps."""
    fault, mark = training.faults[number], training.fault(number)
    detected = job.first(noticed, after=mark["time"]) - mark["time"]
    steps = training.steps()
    before = {pid for pid, _, at in steps if at <= mark["time"]}
    first = next(n for n, (pid, _, at) in enumerate(steps) if at > mark["time"] and pid not in before)
    done, (_, step, at) = steps[first - 1][1], steps[first]
    recovered = at - mark["time"]
    lost = done - (step - 1)
    print(
        f"{fault['kind']} of {fault.get('target', fault.get('worker', 'worker:0'))} at step {fault['step']}: "
        f"noticed after {detected:.2f} s, next step after {recovered:.2f} s, {lost} steps made again, "
        f"newest checkpoint of then: {mark['committed']}"
    )
    assert 0 <= lost <= done - mark["committed"]


def wait_for(condition: Callable[[], Any], job: Job) -> None:
    """Wait until a condition holds; fails if the job ends before."""
    while not condition():
        assert not job.over, f"the job has ended\n{job.text}"
        time.sleep(0.02)


@contextlib.contextmanager
def small_disk(folder: Path, size: str) -> Iterator[None]:
    """Mount a small file system on a new folder; CalledProcessError if that is not permitted."""
    folder.mkdir(parents=True)
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], check=True, capture_output=True
    )
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def kill(pid: int) -> None:
    """Send SIGKILL to a process, unless it has ended."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
