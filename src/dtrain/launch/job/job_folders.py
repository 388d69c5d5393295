"""The folders of a job's launcher: made for this user alone, and deleted by a later start if they are left.

The launcher deletes its folders, and its guard does if the launcher is killed. If both are killed, the next
start of the same user finds the folders: a process that lives holds a lock in each of its own.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import stat
import tempfile
from pathlib import Path

MEMORY = Path("/dev/shm")
"""Where files are kept in memory."""

_LOCK = "lock"  # the file that the process has locked, without content
_NAME = re.compile(r"dtrain-(mpi-)?[0-9]+-[A-Za-z0-9_]+")
_PRIVATE = 0o700
_OF_RANK = 1 << 24  # bytes of the shared memory of a rank of Open MPI
_locks: dict[Path, int] = {}  # the descriptors that hold the locks, by folder


def make(place: str | Path, kind: str = "") -> Path:
    """A new folder of this process, which this user alone may enter; `remove` deletes it.

    However this process ends, a later start may delete the folder then.

    Args:
        place: where to make it.
        kind: what its name says after "dtrain-": "" or "mpi-".

    Raises:
        OSError: it cannot be made there.
    """
    # mkdtemp gives the folder mode 0700 and a random name, so nobody can have created it before. Until it is
    # locked, it has a name that `clear_dead` ignores.
    new = Path(tempfile.mkdtemp(prefix=f".dtrain-{kind}{os.getpid()}-", dir=place))
    try:
        lock = os.open(new / _LOCK, os.O_RDONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError:
        shutil.rmtree(new, ignore_errors=True)
        raise
    named = new
    with contextlib.suppress(OSError):  # a file system without locks: the folder keeps its first name
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the kernel releases it at the end of this process
        named = new.rename(new.with_name(new.name[1:]))
    _locks[named] = lock
    return named


def remove(folder: Path) -> None:
    """Delete a folder that this process has made."""
    shutil.rmtree(folder, ignore_errors=True)
    if folder in _locks:
        os.close(_locks.pop(folder))


def make_in_memory(kind: str = "") -> Path | None:
    """As `make`, in shared memory; None if the machine has none, or if it is full or read-only."""
    with contextlib.suppress(OSError):
        return make(MEMORY, kind)
    return None


def for_shared_memory(folder: Path, memory: Path | None, ranks: int) -> Path:
    """Where Open MPI's ranks keep the memory that they share.

    Args:
        folder: a folder on a disk.
        memory: a folder of `make_in_memory`, or None.
        ranks: the number of ranks that need room.
    """
    with contextlib.suppress(OSError):
        if memory is not None and shutil.disk_usage(memory).free >= ranks * _OF_RANK:
            return memory
    return folder


def clear_dead(*places: str | Path) -> None:
    """Delete the folders of processes of this user that have ended; all others are left as they are."""
    for place in places:
        with contextlib.suppress(OSError):
            for entry in os.scandir(place):
                if _NAME.fullmatch(entry.name) and _is_dead(entry.path):
                    shutil.rmtree(entry.path, ignore_errors=True)  # follows no link


def _is_dead(folder: str) -> bool:
    """Whether a folder is this user's, and the process that had locked it has ended.

    A folder without the file, as earlier versions made it, tells nothing: its process may live in a namespace
    where this process does not see it.
    """
    with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
        # A link, a file or another user's folder cannot be opened, or is found out here.
        opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        stack.callback(os.close, opened)
        status = os.fstat(opened)
        if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) != _PRIVATE:
            return False
        lock = os.open(_LOCK, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=opened)
        stack.callback(os.close, lock)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False
