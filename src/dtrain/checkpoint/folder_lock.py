"""Locks a folder of checkpoints, so that only one job at a time uses it.

The leader of each group of workers holds an operating system's lock on a file in the folder; a killed process
loses its lock. A later attempt of the same job takes it over from a process that is stopped or cut off; that
process notices before it commits. Object stores, and file systems without locks, cannot be locked.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import time
from datetime import datetime
from pathlib import Path
from typing import Any

from dtrain.checkpoint.group import Group
from dtrain.checkpoint.storages import storage_of
from dtrain.clock import REAL, Clock
from dtrain.cluster import settings
from dtrain.errors import CheckpointError
from dtrain.keras_engine.peer_exchange import exchange
from dtrain.keras_engine.protocol import ReplicaLayout

NAME = ".in-use"
PATIENCE = 10.0
"""Seconds to wait for the lock: its owner may just be ending, such as a preempted job."""

_PAUSE = 0.1
_held: dict[str, tuple[int, int]] = {}  # path -> (descriptor, how often it is held by this process)


class FolderLock:
    """Locks a folder for this job; all workers create it, and all raise if any group's folder is in use.

    Args:
        folder: this worker's folder.
        layout: the strategy's layout.
        group: the workers that share the folder; the group's leader holds the lock.
        clock: on which to wait for another process, for `PATIENCE` seconds.

    Raises:
        CheckpointError: another running job holds the lock.
    """

    def __init__(self, folder: str, layout: ReplicaLayout, group: Group, *, clock: Clock = REAL) -> None:
        locks = group.leads and storage_of(folder).local
        self._path = f"{folder.rstrip('/')}/{NAME}" if locks else None
        problem = "" if self._path is None else _take(self._path, clock)
        if problem:
            self._path = None
        found = next(filter(None, exchange(layout, problem)), "")
        if found:
            self.release()
            raise CheckpointError(
                f"The folder {folder} is in use {found}.",
                hint="Give each job a folder of its own, or end the other job first.",
            )

    def check(self) -> None:
        """Checks that no later attempt has taken the folder over.

        Raises:
            CheckpointError: one has, so this process must write nothing more.
        """
        if self._path is not None and not _holds(self._path):
            raise CheckpointError(
                f"A later attempt of this job has the folder {self._path.rpartition('/')[0]}: this process "
                "was replaced while it was stopped or cut off.",
                hint="Nothing is lost: the later attempt has resumed from the last checkpoint.",
            )

    def release(self) -> None:
        """Releases the lock; calling it again does nothing."""
        path, self._path = self._path, None
        if path is not None:
            _unlock(path)


def _take(path: str, clock: Clock) -> str:
    """Locks the file; waits up to `PATIENCE` seconds for another process.

    Returns:
        Which process holds the lock, as "by ..."; "" if it is locked now, or if files cannot be locked here.
    """
    if path in _held:
        descriptor, times = _held[path]
        _held[path] = descriptor, times + 1
        return ""
    deadline = clock.deadline(PATIENCE)
    while True:
        try:
            taken = _try(path)
        except BlockingIOError:
            if _of_earlier_attempt(path):
                with contextlib.suppress(OSError):
                    Path(path).unlink()  # its process keeps the lock, but of a deleted file
                continue
            if deadline.passed():
                return f"by {_owner(path)}"
            clock.sleep(_PAUSE)
            continue
        except OSError:
            return ""  # files cannot be locked, or not even written: then the first save reports it
        if taken is not None:
            _held[path] = taken, 1
            return ""


def _try(path: str) -> int | None:
    """Tries once to lock the file.

    Returns:
        The descriptor that holds the lock; None if the file was deleted meanwhile.

    Raises:
        BlockingIOError: another process holds the lock.
    """
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            # Not flock: a forked process that outlives its parent would keep a lock of flock.
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except PermissionError as error:  # some systems raise this instead of BlockingIOError
            raise BlockingIOError(str(error)) from error
        with contextlib.suppress(FileNotFoundError):
            if os.stat(path).st_ino == os.fstat(descriptor).st_ino:  # noqa: PTH116
                about = {"host": socket.gethostname(), "pid": os.getpid(), "since": time.time()}
                about |= {"job": settings.restarted_job(), "attempt": settings.attempt()}
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, json.dumps(about).encode(), 0)
                return descriptor
    except BaseException:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None


def _unlock(path: str) -> None:
    descriptor, times = _held.pop(path, (-1, 0))
    if times > 1:
        _held[path] = descriptor, times - 1
    elif times == 1:
        with contextlib.suppress(OSError):
            if _is_file(path, descriptor):
                Path(path).unlink()
        with contextlib.suppress(OSError):
            os.close(descriptor)


def _is_file(path: str, descriptor: int) -> bool:
    """Whether a path leads to an open file; an error of the system is raised."""
    found, own = os.stat(path), os.fstat(descriptor)  # noqa: PTH116
    return (found.st_dev, found.st_ino) == (own.st_dev, own.st_ino)


def _holds(path: str) -> bool:
    """Whether this process has the lock, and no later attempt; True if the file cannot be examined."""
    if path not in _held:
        return True  # files cannot be locked here
    try:
        return _is_file(path, _held[path][0])
    except FileNotFoundError:
        return False
    except OSError:
        return True


def _of_earlier_attempt(path: str) -> bool:
    """Whether the lock is that of an earlier attempt of this job: the launcher has replaced its process."""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
        found: dict[str, Any] = json.loads(Path(path).read_text(encoding="utf-8"))
        job = settings.restarted_job()
        return job is not None and found["job"] == job and int(found["attempt"]) < settings.attempt()
    return False


def _owner(path: str) -> str:
    """Describes the process that holds the lock."""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        found: dict[str, Any] = json.loads(Path(path).read_text(encoding="utf-8"))
        since = datetime.fromtimestamp(float(found["since"])).strftime("%Y-%m-%d %H:%M:%S")
        return f"process {int(found['pid'])} on {str(found['host'])[:100]!r}, since {since}"
    return "another process"
