"""What the tasks of a job tell the launcher that started them, over a pipe that they inherit.

One line of JSON a message, one way. It says what can be asked for; what comes of it is the launcher's to
decide. No TensorFlow, and nothing on a network.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import threading
from collections.abc import Callable
from dataclasses import dataclass

from dtrain.cluster import settings
from dtrain.topology import KNOWN_JOBS, Task

VARIABLE = "DTRAIN_CHANNEL_FD"
"""The environment variable in which a task finds the pipe; see `Listener.address`."""

_LINE_LIMIT = 4096  # bytes that Linux writes to a pipe in one piece, whoever else writes
_REASON_LIMIT = 500  # characters


@dataclass(frozen=True)
class Request:
    """The wish that a task be killed, and so started again where the job's rules say so.

    Attributes:
        task: which one.
        reason: what is wrong with it, for the user.
        pid: the process that is meant, so that one which took its place meanwhile is spared; None for any.
    """

    task: Task
    reason: str
    pid: int | None = None


def request_restart(job: str, index: int, reason: str, *, pid: int | None = None) -> bool:
    """Ask the launcher to kill a task that is stuck, and to start it again by the rules for its failures.

    Args:
        job: the task's job, such as `worker`.
        index: its index there.
        reason: what is wrong with it, as the launcher shows it to the user.
        pid: the process that is meant, so that no newer one is killed; None for whichever runs.

    Returns:
        Whether there is a launcher that takes requests; not yet that it has done anything.
    """
    descriptor = _pipe()
    if descriptor is None:
        return False
    message = {"restart": f"{job}:{index}", "reason": reason[:_REASON_LIMIT], "pid": pid}
    line = json.dumps(message).encode() + b"\n"
    if len(line) > _LINE_LIMIT:  # ASCII escapes have made it long
        line = json.dumps({**message, "reason": "no reason that can be shown"}).encode() + b"\n"
    try:
        os.write(descriptor, line)
    except OSError:  # the launcher is gone
        return False
    return True


def _pipe() -> int | None:
    found = settings.channel()
    if found is None:
        return None
    descriptor, inode = found
    # A program started by a task has the variable, but not the pipe: the number may mean anything there.
    with contextlib.suppress(OSError):
        status = os.fstat(descriptor)
        if stat.S_ISFIFO(status.st_mode) and status.st_ino == inode:
            return descriptor
    return None


class Listener:
    """The launcher's end: hears what the tasks say, in a thread of its own.

    Args:
        on_request: called in that thread with every request that can be understood.
    """

    def __init__(self, on_request: Callable[[Request], None]) -> None:
        self._on_request = on_request
        self._reading, self.descriptor = os.pipe()
        self.address = f"{self.descriptor}:{os.fstat(self.descriptor).st_ino}"
        self._thread = threading.Thread(target=self._listen, name="dtrain-channel", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Hear nothing more. Call it when no task is left."""
        os.close(self.descriptor)
        # A stranger may still hold the other end: then the thread waits on, and ends with this process.
        self._thread.join(timeout=1.0)

    def _listen(self) -> None:
        with os.fdopen(self._reading, "rb") as pipe:
            while line := pipe.readline(_LINE_LIMIT):
                request = parse(line)
                if request is not None:
                    self._on_request(request)


def parse(line: bytes) -> Request | None:
    """The request in a line, or None where it is none."""
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(message, dict):
        return None
    job, _, index = str(message.get("restart", "")).rpartition(":")
    if job not in KNOWN_JOBS or not (index.isascii() and index.isdigit()):
        return None
    pid = message.get("pid")
    return Request(
        Task(job, int(index)), str(message.get("reason", "")), pid if isinstance(pid, int) else None
    )
