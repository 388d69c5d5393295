"""How much of the processor a process gets beside others.

Where Linux groups processes by session (`sched_autogroup_enabled`, as most distributions have it), the
priority of a process counts inside of its session only, and the session has one of its own.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

LEAST = 19
"""The lowest priority, as `nice` counts."""

_TRIES = 50  # the system takes one change of a session's priority in 100 ms, whoever makes it
_PAUSE = 0.1  # seconds


def of_session(pid: int) -> int | None:
    """The priority of a process' session; None where sessions have none.

    Args:
        pid: of a process.
    """
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(_file(pid).read_text(encoding="ascii").split()[-1])
    return None


def set_of_session(pid: int, value: int) -> bool:
    """Sets the priority of a process' session, where it has one; whether it is so now.

    Args:
        pid: of a process of this user's.
        value: as `nice` counts; without privileges 0 at least.
    """
    for _ in range(_TRIES):
        if of_session(pid) in (None, value):
            return True
        try:
            _file(pid).write_text(f"{value}", encoding="ascii")
        except BlockingIOError:
            time.sleep(_PAUSE)
        except OSError:
            return False
    return of_session(pid) in (None, value)


def restore(pid: int, value: int, of_its_session: int | None) -> bool:
    """Gives a process, with all its threads, and its session their priorities back; whether that worked.

    Args:
        pid: of the process.
        value: its priority.
        of_its_session: as `of_session` gave it.
    """
    with contextlib.suppress(OSError):
        # Threads that a library has started have inherited it.
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, int(thread.name), value)
    return of_its_session is None or set_of_session(pid, of_its_session)


def _file(pid: int) -> Path:
    return Path(f"/proc/{pid}/autogroup")
