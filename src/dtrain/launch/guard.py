"""Leaves no process of a job behind: finds all of them by a mark in their environment, and kills them.

The launcher calls `kill_marked` when the job ends; the program in this file does so when the launcher itself
was killed. It decides nothing about the job and imports nothing of dtrain.

Usage: python -I -S guard.py MARK, with a pipe from the launcher as standard input; the pipe's end without the
byte that `release` means by it is the launcher's death.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

MARK_VARIABLE = "DTRAIN_LAUNCH_ID"
RELEASE = b"done"


def marked_processes(mark: str) -> list[int]:
    """The ids of all processes of this user, other than this one, that carry the mark; [] where /proc is not.

    The mark stands in MARK_VARIABLE; a job that was started inside another carries both marks.
    """
    needle = mark.encode()
    prefix = MARK_VARIABLE.encode() + b"="
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        pid = int(entry.name)
        try:
            if pid == os.getpid() or entry.stat().st_uid != os.getuid():
                continue
            variables = (entry / "environ").read_bytes().split(b"\0")
        except OSError:  # gone meanwhile, or not ours to read
            continue
        if any(v.startswith(prefix) and needle in v[len(prefix) :].split(b"/") for v in variables):
            found.append(pid)
    return found


def kill_marked(mark: str, *, patience: float = 2.0) -> int:
    """Send SIGKILL to all marked processes until none is left or `patience` seconds are over.

    Returns:
        How many different processes were found.
    """
    deadline = time.monotonic() + patience
    killed: set[int] = set()
    # Again and again, for a process may have made another between our look and our signal.
    while found := marked_processes(mark):
        for pid in found:
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                continue
            killed.add(pid)
        if time.monotonic() > deadline:
            break
        time.sleep(0.01)
    return len(killed)


def main() -> None:
    """Wait until the launcher releases this guard or dies; in the second case kill the job."""
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    if sys.stdin.buffer.read() != RELEASE:
        kill_marked(sys.argv[1], patience=10.0)


if __name__ == "__main__":
    main()
