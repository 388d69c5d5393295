"""Describes how a job ended, in words and as an exit status.

It only reads outcomes; `restarts` decides what follows.
"""

from __future__ import annotations

import signal

from dtrain.environments.topology import Task
from dtrain.launch.supervision.running_tasks import NOTICES, JobOutcome
from dtrain.task.channel import RUN_AGAIN


def report(outcome: JobOutcome) -> list[str]:
    """The lines that tell the user how a job ended; empty if it succeeded."""
    lines = []
    if outcome.signal is not None:
        name = signal.Signals(outcome.signal).name
        saved = exit_status(outcome) == RUN_AGAIN
        end = f"has saved a checkpoint; run the job again (status {RUN_AGAIN})" if saved else "was ended"
        who = "the chief" if saved and _has_chief(outcome) else "every task"
        lines.append(f"[dtrain] {name} was received: {who} {end}.")
    failed = outcome.first_failure
    if failed is not None:
        reason = outcome.reason or describe_exit(outcome.exit_codes[failed])
        lines.append(f"[dtrain] {failed} failed: it {reason}.")
        lines += _tail(outcome, failed)
        lines.append(f"[dtrain] {failed} {reason}; the job was ended.")
    return lines


def trace(outcome: JobOutcome) -> list[str]:
    """The last lines of the failed task; empty if a signal killed it, as its output does not show why."""
    failed = outcome.first_failure
    if failed is None or outcome.exit_codes[failed] < 0:
        return []
    return _tail(outcome, failed)


def _tail(outcome: JobOutcome, task: Task) -> list[str]:
    tail = outcome.tails[task]
    return [f"[dtrain] The last lines of {task}:", *(f"[{task}] {line}" for line in tail)] if tail else []


def exit_status(outcome: JobOutcome) -> int:
    """The launcher's exit status: the first failed task's, or 128 + the signal that the launcher received.

    It is `RUN_AGAIN` if the launcher received one of `NOTICES` and every task ended with `RUN_AGAIN`. In a
    job with a chief, only the chief's status counts.
    """
    if outcome.signal in NOTICES and outcome.exit_codes:
        chief = [code for task, code in outcome.exit_codes.items() if task.job == "chief"]
        if all(code == RUN_AGAIN for code in chief or outcome.exit_codes.values()):
            return RUN_AGAIN
        if outcome.first_failure is not None and outcome.exit_codes[outcome.first_failure] == RUN_AGAIN:
            return 128 + outcome.signal
    if outcome.first_failure is not None:
        code = outcome.exit_codes[outcome.first_failure]
        return (code or 1) if code >= 0 else 128 - code
    if outcome.signal is not None:
        return 128 + outcome.signal
    return 0


def _has_chief(outcome: JobOutcome) -> bool:
    return any(task.job == "chief" for task in outcome.exit_codes)


def describe_exit(code: int) -> str:
    """An exit code in words; a negative code is a death by that signal."""
    if code >= 0:
        return f"ended with exit status {code}"
    try:
        return f"was killed by signal {-code} ({signal.Signals(-code).name})"
    except ValueError:
        return f"was killed by signal {-code}"
