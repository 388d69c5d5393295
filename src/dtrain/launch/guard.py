"""Leaves no process of a job behind: finds all of them by a mark in their environment, and kills them.

The launcher calls `kill_marked` when the job ends; the program in this file does so when the launcher itself
was killed. It decides nothing about the job and imports nothing of dtrain.

Usage: python -I -S guard.py, with a pipe from the launcher as standard input: a JSON object in a line, with
the mark and the folders to delete. The pipe's end without RELEASE behind it is the launcher's death.
Arguments would be shown to every user of the machine.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

MARK_VARIABLE = "DTRAIN_LAUNCH_ID"
RELEASE = b"done"


def order(mark: str, folders: Sequence[str]) -> bytes:
    """What tells a guard its job: the mark of its processes, and what to delete after them."""
    return json.dumps({"mark": mark, "folders": list(folders)}).encode() + b"\n"


_MEMORY = Path("/dev/shm")
# The shared memory of MPI libraries, where it cannot be put into a folder of the job's.
_LEFT_IN_MEMORY = ("mpich_shm_*", "Intel_MPI_*", "sm_segment.*")


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


def remove_shared_memory(since: float) -> None:
    """Delete what killed ranks leave of MPI's shared memory: files of ours, in nobody's use, not older."""
    files = {path for name in _LEFT_IN_MEMORY for path in _MEMORY.glob(name) if _is_ours(path, since)}
    if not files:
        return
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            maps = (process / "maps").read_text(encoding="utf-8", errors="replace")
            files = {path for path in files if str(path) not in maps}
    for path in files:
        with contextlib.suppress(OSError):
            path.unlink()


def _is_ours(path: Path, since: float) -> bool:
    with contextlib.suppress(OSError):
        status = path.stat()
        return status.st_uid == os.getuid() and status.st_mtime >= since - 1.0
    return False


def main() -> None:
    """Wait until the launcher releases this guard or dies; in the second case kill the job."""
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    began = time.time()
    job, _, word = sys.stdin.buffer.read().partition(b"\n")
    if word != RELEASE and job:
        found = json.loads(job)
        kill_marked(found["mark"], patience=10.0)
        for folder in found["folders"]:
            shutil.rmtree(folder, ignore_errors=True)
        remove_shared_memory(began)


if __name__ == "__main__":
    main()
