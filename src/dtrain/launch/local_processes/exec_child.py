"""A program that asks Linux to kill it when the launcher dies, and then replaces itself by a given command.

It is a separate program because running Python code between fork and exec is unsafe in a launcher with
threads. It imports nothing of dtrain, so it takes only a few milliseconds.

Usage: python -I -S exec_child.py LAUNCHER_PID COMMAND [ARGUMENT ...]
"""

from __future__ import annotations

import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Set the parent-death signal, check that the launcher is still alive, and execute the command."""
    launcher, command = int(sys.argv[1]), sys.argv[2:]
    try:
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    except (ImportError, OSError, AttributeError):
        pass  # without libc, the signal cannot be set; the guard process still ends the job
    if os.getppid() != launcher:
        sys.exit(1)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.stderr.write(f"dtrain: cannot run {command[0]!r}: {error.strerror}\n")
        sys.exit(126 if isinstance(error, PermissionError) else 127)


if __name__ == "__main__":
    main()
