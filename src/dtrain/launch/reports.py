"""How a job ended, in words and as an exit status.

It reads outcomes; what is done about them is decided elsewhere.
"""

from __future__ import annotations

import signal

from dtrain.channel import RUN_AGAIN
from dtrain.launch.processes import Outcome
from dtrain.topology import Task

NOTICES = (signal.SIGTERM, signal.SIGUSR1)
"""The signals that say that this machine is about to be taken away."""


def report(outcome: Outcome) -> list[str]:
    """What to tell the user of how a job ended, line by line; nothing where it ended well."""
    lines = []
    if outcome.signal is not None:
        name = signal.Signals(outcome.signal).name
        saved = exit_status(outcome) == RUN_AGAIN
        what = f"has saved a checkpoint; run the job again (status {RUN_AGAIN})" if saved else "was ended"
        who = "the chief" if saved and _has_chief(outcome) else "every task"
        lines.append(f"[dtrain] {name} was received: {who} {what}.")
    failed = outcome.first_failure
    if failed is not None:
        what = outcome.reason or describe_exit(outcome.exit_codes[failed])
        lines.append(f"[dtrain] {failed} failed: it {what}.")
        lines += _tail(outcome, failed)
        lines.append(f"[dtrain] {failed} {what}; the job was ended.")
    return lines


def trace(outcome: Outcome) -> list[str]:
    """The last lines of the task that failed, where they say why: it ended with an error of its own."""
    failed = outcome.first_failure
    if failed is None or outcome.exit_codes[failed] < 0:
        return []
    return _tail(outcome, failed)


def _tail(outcome: Outcome, task: Task) -> list[str]:
    tail = outcome.tails[task]
    return [f"[dtrain] The last lines of {task}:", *(f"[{task}] {line}" for line in tail)] if tail else []


def exit_status(outcome: Outcome) -> int:
    """The status that a launcher should end with: the first failure's, or 128 + the signal it was sent.

    Where it was told that its time is over, and every task has saved and wants to be run again, so does it;
    where there is a chief, the others have nothing to save.
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


def _has_chief(outcome: Outcome) -> bool:
    return any(task.job == "chief" for task in outcome.exit_codes)


def describe_exit(code: int) -> str:
    """An exit code in words; negative codes are signals."""
    if code >= 0:
        return f"ended with exit status {code}"
    try:
        return f"was killed by signal {-code} ({signal.Signals(-code).name})"
    except ValueError:
        return f"was killed by signal {-code}"
