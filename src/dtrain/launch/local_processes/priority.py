"""Reads and sets the scheduling priority of a process and of its session.

With `sched_autogroup_enabled`, the default of most distributions, Linux shares the processor between sessions
first. A process's own priority then counts only within its session. This module decides no priority.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

LEAST = 19
"""The lowest priority, as `nice` counts."""

_TRIES = 50  # without privileges, Linux accepts one change of a session's priority per 100 ms, system-wide
_PAUSE = 0.1  # seconds


def of_session(pid: int) -> int | None:
    """The priority of a process's session, on the scale of `nice`; None if sessions have no priority.

    Args:
        pid: the process id.
    """
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(_file(pid).read_text(encoding="ascii").split()[-1])
    return None


def set_of_session(pid: int, value: int) -> bool:
    """Set the priority of a process's session, retrying for about 5 s while the system refuses.

    Args:
        pid: the id of a process of this user.
        value: on the scale of `nice`; without privileges, at least 0.

    Returns:
        Whether the session has this priority now, or has none at all.
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
    """Restore the priorities of a process, of all its threads, and of its session.

    Args:
        pid: the process id.
        value: the priority of the process, on the scale of `nice`.
        of_its_session: the session's priority as `of_session` returned it; None leaves it unchanged.

    Returns:
        Whether the session has its priority again; errors for the threads are ignored.
    """
    with contextlib.suppress(OSError):
        # Linux sets the priority per thread, and threads that a library started inherited the low one.
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, int(thread.name), value)
    return of_its_session is None or set_of_session(pid, of_its_session)


def _file(pid: int) -> Path:
    return Path(f"/proc/{pid}/autogroup")
