"""Freezes processes for a moment, one at a time, at random: when, and which one, is given by a seed.

It does not know what the processes are, and never leaves one stopped that it has stopped itself.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from .processes import Process, seen

_LOOK = 0.02  # seconds between two looks at a frozen process
_STOP_BIT = 1 << (signal.SIGSTOP - 1)


def freeze_at_random(
    candidates: Callable[[], Sequence[Process]],
    ended: threading.Event,
    *,
    seconds: float,
    mean: float,
    seed: int,
    tell: Callable[[Process], None] = lambda process: None,
) -> None:
    """Freezes one process after another until `ended` is set.

    Args:
        candidates: returns the processes of which one is chosen, always in the same order.
        ended: ends it; the process that it has frozen then runs again.
        seconds: how long a process is frozen.
        mean: the mean of the random time from the end of a freeze to the next, in seconds.
        seed: determines these times, and the choice where the processes are the same.
        tell: is called with each process that is frozen, once it is.
    """
    for pause, choice in schedule(seed, mean):
        if ended.wait(pause):
            return
        if found := candidates():
            freeze(found[int(choice * len(found))], seconds, ended, tell)


def schedule(seed: int, mean: float) -> Iterator[tuple[float, float]]:
    """Endless pairs: the seconds until the next freeze, and a number from 0 to 1 that chooses the process."""
    chance = random.Random(seed)
    while True:
        yield chance.expovariate(1 / mean), chance.random()


def freeze(
    process: Process,
    seconds: float,
    ended: threading.Event,
    tell: Callable[[Process], None] = lambda process: None,
) -> bool:
    """Stop a process for some seconds, or until `ended` is set.

    Tests stop and continue processes too: one that is stopped already is left alone, one that the test
    continues early is not touched again, and one that the test stops meanwhile stays stopped.

    Returns: whether the process was frozen.
    """
    try:
        handle = os.pidfd_open(process.pid)
    except OSError:
        return False
    try:
        now = process.now()  # after the handle is open, which stays with this process
        if now is None or now.stopped:
            return False
        signal.pidfd_send_signal(handle, signal.SIGSTOP)
        ours = True
        try:
            ours = _hold(process, time.monotonic() + seconds, ended, tell)
        finally:
            if ours:
                signal.pidfd_send_signal(handle, signal.SIGCONT)
                _continue_nsenter(process)
    except ProcessLookupError:
        return False
    finally:
        os.close(handle)
    return True


def _continue_nsenter(process: Process) -> None:
    """Continues the `nsenter` that has started a process: it stops itself when it sees that process stopped.

    It would continue the process when it is continued, but nobody would continue it.
    """
    above = seen(process.parent)
    if above is not None and above.stopped and above.command().startswith("nsenter "):
        with contextlib.suppress(ProcessLookupError):
            os.kill(above.pid, signal.SIGCONT)


def _hold(process: Process, end: float, ended: threading.Event, tell: Callable[[Process], None]) -> bool:
    """Waits for the end of a freeze; returns whether nobody else has continued or stopped the process."""
    told = False
    while True:
        over = ended.is_set() or time.monotonic() >= end
        now = process.now()
        if now is None or (told and not now.stopped):
            return False
        if now.stopped and not told:
            told = True
            tell(process)
        if over:
            return not (now.stopped and _another_stop_waits(process.pid))
        ended.wait(_LOOK)


def _another_stop_waits(pid: int) -> bool:
    """Whether a stopped process has been sent SIGSTOP again, which the kernel keeps until it continues."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines()
    except OSError:
        return False
    waiting = [line.split()[1] for line in lines if line.startswith(("SigPnd:", "ShdPnd:"))]
    return any(int(each, 16) & _STOP_BIT for each in waiting)
