"""Starts the user's script as a real job, ends it after two steps, and reports on it.

`dtrain explain` shows what it finds. Each task runs `first_steps.py`; `profile_job.py` starts another program
around a script in the same way. The checks of hosts are in
`host_checks.py` and `peer_checks.py`.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, TextIO

from dtrain.base.words import counted
from dtrain.diagnosis.check import CheckResult
from dtrain.diagnosis.first_steps import STEPS
from dtrain.environments.gpus import visible_gpus
from dtrain.errors import ProcessEnd
from dtrain.launch import launch_local

_GRACE = 1.0  # seconds between SIGTERM and SIGKILL
_AGAIN = 0.1  # seconds after which a signal is sent again that came when no job was there to catch it
_LAUNCHER = "[dtrain] "  # how the launcher's own lines begin
_SHOWN = 20  # last lines of the output of a job that failed

Report = dict[str, Any]


class FirstSteps(NamedTuple):
    """What two steps of a script have shown.

    Attributes:
        findings: the names of the checks, and their results.
        reports: what each task that has made a step reports.
    """

    findings: list[tuple[str, CheckResult]]
    reports: list[Report]

    @property
    def failed(self) -> bool:
        """Whether a check has failed."""
        return any(finding.status == "fail" for _, finding in self.findings)


class ScriptRun(NamedTuple):
    """A script that has run as a job.

    Attributes:
        folder: where the program around it has written.
        status: the exit status of the job.
        late: whether it was ended, because its time was over.
        lines: its output.
    """

    folder: Path
    status: int
    late: bool
    lines: list[str]


def run_first_steps(
    command: Sequence[str],
    *,
    workers: int,
    limit: float,
    shown: TextIO,
    devices_per_worker: int | None = None,
) -> FirstSteps:
    """Runs two steps of a script as a job of the real launcher.

    Args:
        command: the script and its arguments.
        workers: the number of processes.
        limit: seconds after which the job is ended.
        shown: the stream to which the last lines of a failed job are written.
        devices_per_worker: the logical devices of each process; None leaves the choice to the strategy.

    Raises:
        ProcessEnd: this process received a signal that ended the job.
    """
    program = "dtrain.diagnosis.first_steps"
    with launched_script(
        program, command, workers=workers, limit=limit, devices_per_worker=devices_per_worker
    ) as run:
        reports = _reports(run.folder)
        findings = list(_judged(reports, run.status, limit if run.late else None, workers, run.lines))
        result = FirstSteps(findings, [report for report in reports if report["steps"]])
        if result.failed:
            shown.writelines(f"{line}\n" for line in run.lines[-_SHOWN:])
            shown.flush()
        return result


@contextlib.contextmanager
def launched_script(
    program: str,
    command: Sequence[str],
    *,
    workers: int,
    limit: float,
    devices_per_worker: int | None = None,
) -> Iterator[ScriptRun]:
    """Runs a script, by a program that observes it, as a job of the real launcher; yields how it has run.

    The folder for what the program writes is its first argument, and is removed at the end of the context.

    Args:
        program: the module of the program.
        command, workers, limit, devices_per_worker: as for `run_first_steps`.

    Raises:
        ProcessEnd: this process received a signal that ended the job.
    """
    with tempfile.TemporaryDirectory(prefix="dtrain-explain-") as folder, tempfile.TemporaryFile("w+") as log:
        gpus = visible_gpus()
        with _time_limit(limit) as late:
            status = launch_local(
                [sys.executable, "-m", program, folder, *command],
                workers=workers,
                gpus=gpus[:workers] if len(gpus) >= workers else [],
                devices_per_worker=devices_per_worker,
                max_restarts=0,
                grace=_GRACE,
                stdout=log,
                stderr=log,
            )
        if status in (128 + signal.SIGINT, 128 + signal.SIGTERM, 128 + signal.SIGHUP) and not late.is_set():
            raise ProcessEnd(status)
        log.seek(0)
        yield ScriptRun(Path(folder), status, late.is_set(), log.read().splitlines())


@contextlib.contextmanager
def _time_limit(limit: float) -> Iterator[threading.Event]:
    """Ends the job that runs inside the context by SIGTERM after `limit` seconds; yields whether it did."""
    late, missed, over = threading.Event(), threading.Event(), threading.Event()

    def end() -> None:
        if over.wait(limit):
            return
        late.set()
        missed.set()
        while not over.is_set():
            if missed.is_set():
                missed.clear()
                os.kill(os.getpid(), signal.SIGTERM)
            over.wait(_AGAIN)

    def miss(signum: int, frame: FrameType | None) -> None:
        """Notes a signal that arrives before the job catches signals, or when it has just ended."""
        missed.set()

    thread = threading.Thread(target=end, name="dtrain-time-limit", daemon=True)
    before = signal.signal(signal.SIGTERM, miss)
    thread.start()
    try:
        yield late
    finally:
        over.set()
        thread.join()
        signal.signal(signal.SIGTERM, before)


def _reports(folder: Path) -> list[Report]:
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("[!.]*.json"))]


def _judged(
    reports: Sequence[Report], status: int, limit: float | None, workers: int, lines: Sequence[str]
) -> Iterator[tuple[str, CheckResult]]:
    """The results of the check.

    Args:
        reports: the reports of the tasks that have written one.
        status: the exit status of the job.
        limit: the seconds after which it was ended; None if it ended by itself.
        workers: the number of processes.
        lines: the output of the job.
    """
    failed = sorted(
        (report for report in reports if "error" in report), key=lambda report: report["lost_peer"]
    )
    steps = min((report["steps"] for report in reports), default=0) if len(reports) == workers else 0
    if limit is not None:
        yield "job", _too_late(reports, limit, workers)
    elif failed and not failed[0]["lost_peer"]:
        yield "job", _fail(f"{failed[0]['task']}: {failed[0]['error']}", failed[0]["hint"])
    elif status:
        messages = [line.removeprefix(_LAUNCHER) for line in lines if line.startswith(_LAUNCHER)]
        error = failed[0]["error"] if failed else f"the job ended with status {status}"
        yield "job", _fail((messages or [error])[-1].rstrip("."), failed[0]["hint"] if failed else "")
    elif not steps:
        yield (
            "job",
            _fail(
                "the script ended by itself, and no step of `fit` under a strategy of dtrain's was seen",
                'make the strategy by dtrain.strategy("auto"), the model in its scope, and train by '
                "model.fit; a training loop of your own cannot be checked here, so launch it",
            ),
        )
    else:
        early = "" if steps >= STEPS else "; then the script ended by itself"
        made = f"{counted(workers, 'worker')} made {counted(steps, 'step')} each{early}"
        yield "job", CheckResult(status="ok", found=made)
    trained = [report for report in reports if report["steps"]]
    if trained and not failed:
        yield from _seen(trained, workers)


def _too_late(reports: Sequence[Report], limit: float, workers: int) -> CheckResult:
    came = (
        f"{len(reports)} of {workers} workers made {counted(STEPS, 'step')}"
        if reports
        else "no step was seen"
    )
    return _fail(
        f"{came} within {limit:g} s, and the job was ended",
        "the last lines show where it was; give a script that only needs longer more (--time-limit); a "
        "training loop of your own cannot be checked here, only `fit`",
    )


def _fail(found: str, remedy: str) -> CheckResult:
    return CheckResult(
        status="fail",
        found=found,
        remedy=remedy or "correct the error in the last lines of its output, which are shown above",
    )


def _seen(reports: Sequence[Report], workers: int) -> Iterator[tuple[str, CheckResult]]:
    first = reports[0]
    under = f"{first['strategy']}, {counted(first['replicas'], 'replica')}"
    if workers > 1 and first["workers"] == 1:
        yield (
            "strategy",
            CheckResult(
                status="warn",
                found=f"each of the {workers} processes trains by itself, under {under}",
                remedy='make the strategy by dtrain.strategy("auto") or ("multi_worker")',
            ),
        )
    else:
        yield "strategy", CheckResult(status="ok", found=under)
    devices = "; ".join(f"{report['task']}: {', '.join(report['devices'])}" for report in reports)
    yield "devices", CheckResult(status="ok", found=devices)
    if first["transport"]:
        yield "transport", CheckResult(status="ok", found=first["transport"])
    slowest = max(
        (report for report in reports if "seconds" in report),
        key=lambda report: report["seconds"],
        default=None,
    )
    if slowest is not None:
        traced = "" if slowest["usual"] else ", with tracing and compiling"
        yield "step", CheckResult(status="ok", found=f"{slowest['seconds']:.4f} s per step{traced}")
