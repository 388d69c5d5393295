"""Kills all processes that a job leaves behind; it finds them by a mark in their environment.

The launcher calls `kill_marked` when the job ends. This file is also a program that does the same when the
launcher itself was killed. It decides nothing about the job and imports nothing of dtrain.

Usage: python -I -S guard.py, with a pipe from the launcher as standard input. The first line is a JSON object
with the mark and the folders to delete. If the pipe then ends without RELEASE, the launcher has died. The
mark is not an argument because every user of the machine could read it there.
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
    """The launcher's line to a guard: the processes' mark, and the folders to delete after them."""
    return json.dumps({"mark": mark, "folders": list(folders)}).encode() + b"\n"


def unmarked() -> dict[str, str]:
    """The environment for a guard: the end of an outer job must not kill it before it has deleted."""
    return {name: value for name, value in os.environ.items() if name != MARK_VARIABLE}


_MEMORY = Path("/dev/shm")
# The shared-memory files of MPI libraries that cannot be placed in a folder of the job.
_LEFT_IN_MEMORY = ("mpich_shm_*", "Intel_MPI_*", "sm_segment.*")


def marked_processes(mark: str) -> list[int]:
    """The ids of this user's processes, except this one, that carry the mark; [] on systems without /proc.

    The mark is in MARK_VARIABLE. Processes of a job that was started inside another job carry both marks.
    """
    needle = mark.encode()
    prefix = MARK_VARIABLE.encode() + b"="
    pids = []
    for entry in Path("/proc").glob("[0-9]*"):
        pid = int(entry.name)
        try:
            if pid == os.getpid() or entry.stat().st_uid != os.getuid():
                continue
            variables = (entry / "environ").read_bytes().split(b"\0")
        except OSError:  # the process has ended, or this user may not read its environment
            continue
        if any(v.startswith(prefix) and needle in v[len(prefix) :].split(b"/") for v in variables):
            pids.append(pid)
    return pids


def kill_marked(mark: str, *, patience: float = 2.0) -> int:
    """Send SIGKILL to all marked processes until none is left or `patience` seconds are over.

    Returns:
        The number of different processes that were sent SIGKILL.
    """
    deadline = time.monotonic() + patience
    killed: set[int] = set()
    # Repeat, because a process may have started another one between the search and its SIGKILL.
    while pids := marked_processes(mark):
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                continue
            killed.add(pid)
        if time.monotonic() > deadline:
            break
        time.sleep(0.01)
    return len(killed)


def remove_folder(folder: str, *, patience: float) -> None:
    """Delete a folder with all in it, again if a process that is about to end has just written into it.

    Args:
        folder: its path.
        patience: seconds after which it is left as it is.
    """
    deadline = time.monotonic() + patience
    while os.path.lexists(folder):
        shutil.rmtree(folder, ignore_errors=True)
        if time.monotonic() > deadline:
            return
        time.sleep(0.01)


def remove_shared_memory(since: float, *, patience: float = 0.0) -> None:
    """Delete the shared-memory files that killed MPI ranks leave behind.

    It deletes only this user's files, and only those that no process has mapped.

    Args:
        since: seconds since the epoch; files last modified over a second earlier are kept.
        patience: seconds to wait for processes that have a file mapped, as they may be about to end.
    """
    deadline = time.monotonic() + patience
    while files := {path for name in _LEFT_IN_MEMORY for path in _MEMORY.glob(name) if _is_ours(path, since)}:
        mapped = set()
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                maps = (process / "maps").read_text(encoding="utf-8", errors="replace")
                mapped |= {path for path in files if str(path) in maps}
        for path in files - mapped:
            with contextlib.suppress(OSError):
                path.unlink()
        if not mapped or time.monotonic() > deadline:
            return
        time.sleep(0.1)


def _is_ours(path: Path, since: float) -> bool:
    with contextlib.suppress(OSError):
        status = path.stat()
        return status.st_uid == os.getuid() and status.st_mtime >= since - 1.0
    return False


def main() -> None:
    """Wait for the launcher's release or death; after its death, kill the job and delete its folders."""
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(ignored, signal.SIG_IGN)
    began = time.time()
    job, _, word = sys.stdin.buffer.read().partition(b"\n")
    if word != RELEASE and job:
        content = json.loads(job)
        kill_marked(content["mark"], patience=10.0)
        for folder in content["folders"]:
            remove_folder(folder, patience=5.0)
        remove_shared_memory(began, patience=10.0)


if __name__ == "__main__":
    main()
