"""`dtrain doctor --tpu-ready`: finds what a TPU would reject in a script's training step and its data.

It starts `tpu_trial.py`, the process that examines the script, and passes on its results.
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

from dtrain.diagnosis.check import CheckResult
from dtrain.environments.detected_job import plain_environment
from dtrain.environments.topology import Task
from dtrain.errors import ProcessEnd
from dtrain.launch.job.job_session import Session
from dtrain.launch.job.task_handle import TaskCommand
from dtrain.launch.local_processes.local_launcher import LocalLauncher
from dtrain.launch.supervision.reports import describe_exit
from dtrain.launch.supervision.running_tasks import Job, JobOutcome

_TASK = Task("script", 0)
_VARIABLES = {"KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "2", "PYTHONUNBUFFERED": "1"}


def check_tpu_ready(command: Sequence[str], limit: float, shown: TextIO) -> Iterator[tuple[str, CheckResult]]:
    """Examines the first `fit` of a script.

    Args:
        command: the script and its arguments.
        limit: seconds after which the script is ended.
        shown: the stream to which the last lines of a script are written that could not be examined.

    Yields:
        The name of the check, and a result.

    Raises:
        ProcessEnd: this process received a signal.
    """
    with tempfile.TemporaryDirectory(prefix="dtrain-doctor-") as folder, tempfile.TemporaryFile("w+") as log:
        report = Path(folder) / "report.json"
        outcome = _run(
            [sys.executable, "-m", "dtrain.diagnosis.tpu_trial", str(report), *command], limit, log
        )
        if outcome.signal is not None:
            raise ProcessEnd(128 + outcome.signal)
        findings: list[dict[str, Any]] = []
        with contextlib.suppress(OSError, ValueError):
            findings = json.loads(report.read_text(encoding="utf-8"))
        if not findings:
            shown.writelines(f"{line}\n" for line in outcome.tails[_TASK])
            shown.flush()
            yield "script", _unfinished(outcome, limit)
    for finding in findings:
        yield finding.pop("check"), CheckResult(**finding)


def _run(command: Sequence[str], limit: float, log: TextIO) -> JobOutcome:
    environment = plain_environment() | _VARIABLES
    environment.pop("DTRAIN_DEVICES_PER_WORKER", None)
    session = Session(stdout=log, stderr=log)
    launcher = LocalLauncher(session)
    with session.opened(), launcher.opened():
        return Job([TaskCommand(_TASK, list(command), environment)], launcher, timeout=limit).run()


def _unfinished(outcome: JobOutcome, limit: float) -> CheckResult:
    if outcome.timed_out:
        return CheckResult(
            status="fail",
            found="the script did not reach its first `fit`, or did not finish reading its data, within "
            f"{limit:g} s",
            remedy="give it less data, or more time (--time-limit)",
        )
    return CheckResult(
        status="fail",
        found=f"the process of the script {describe_exit(outcome.exit_codes[_TASK])}",
        remedy="see its last lines above",
    )
