"""Locks a folder of checkpoints, so that only one job at a time uses it.

The leader of each group of workers holds an operating system's lock on a file in the folder; a killed process
loses its lock. A later attempt of the same job takes it over from a process that is stopped or cut off; that
process notices before it commits. Object stores, and file systems without locks, cannot be locked.

A later attempt leaves its file behind when it releases the lock: an earlier one finds a file that is not its
own. A file that is missing was deleted with the folder; it is made and locked again.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import threading
import time
from datetime import datetime
from pathlib import Path
from typing import Any

from dtrain.base import safe_files
from dtrain.base.clock import REAL, Clock
from dtrain.base.counts import is_count
from dtrain.checkpoint.group import Group
from dtrain.checkpoint.pauses import pause_watch
from dtrain.checkpoint.storages import storage_of
from dtrain.environments import settings
from dtrain.errors import CheckpointError, UnsafeFileError
from dtrain.interfaces.replica_layout import ReplicaLayout
from dtrain.process_group.value_exchange import exchange

NAME = ".in-use"
PATIENCE = 10.0
"""Seconds to wait for the lock: its owner may just be ending, such as a preempted job."""

_PAUSE = 0.1
_MOST_BYTES = 4096  # of a file that says who holds the lock
_changing = threading.Lock()  # the training thread and the writing thread both check
_held: dict[str, tuple[int, int]] = {}  # path -> (descriptor, how often it is held by this process)
_seen: dict[str, float] = {}  # path -> when this process last saw that it had the lock


class FolderLock:
    """Locks a folder for this job; all workers create it, and all raise if any group's folder is in use.

    Args:
        folder: this worker's folder.
        layout: the strategy's layout.
        group: the workers that share the folder; the group's leader holds the lock.
        clock: on which to wait for another process, for `PATIENCE` seconds.

    Raises:
        CheckpointError: another running job holds the lock, or its file is no regular file.
    """

    def __init__(self, folder: str, layout: ReplicaLayout, group: Group, *, clock: Clock = REAL) -> None:
        locks = group.leads and storage_of(folder).local
        self.file = f"{folder.rstrip('/')}/{NAME}"
        self._path = self.file if locks else None
        problem = hint = ""
        try:
            owner = "" if self._path is None else _take(self._path, clock)
            if owner:
                problem = f"The folder {folder} is in use {owner}."
                hint = "Give each job a folder of its own, or end the other job first."
        except UnsafeFileError as error:
            problem, hint = error.message, error.hint
        if problem:
            self._path = None
        reported_problem, hint = next(
            (report for report in exchange(layout, (problem, hint)) if report[0]), ("", "")
        )
        if reported_problem:
            self.release()
            raise CheckpointError(reported_problem, hint=hint)

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

    def release(self, *, delete: bool = False) -> None:
        """Releases the lock; calling it again does nothing.

        Args:
            delete: whether to delete the file in any case; a later attempt else leaves it.
        """
        path, self._path = self._path, None
        if path is not None:
            _unlock(path, delete=delete or settings.attempt() == 0)


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
                    safe_files.remove(path)  # its process keeps the lock, but of a deleted file
                continue
            if deadline.passed():
                return f"by {_owner(path)}"
            clock.sleep(_PAUSE)
            continue
        except UnsafeFileError:
            raise
        except OSError:
            return ""  # files cannot be locked, or not even written: then the first save reports it
        if taken is not None:
            _held[path] = taken, 1
            _seen[path] = pause_watch().tick()
            return ""


def _try(path: str) -> int | None:
    """Tries once to lock the file.

    Returns:
        The descriptor that holds the lock; None if the file was deleted meanwhile.

    Raises:
        BlockingIOError: another process holds the lock.
        UnsafeFileError: it is no regular file, which could be changed without harm; or its folder is none.
    """
    folder = Path(path).parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        hint = "Name a folder, or a path at which nothing is yet."
        raise UnsafeFileError(
            folder, "a file is there, or in the place of a folder above", hint=hint
        ) from error
    descriptor = safe_files.open_regular(path, os.O_RDWR | os.O_CREAT, mode=0o644)
    try:
        try:
            # Not flock: a forked process that outlives its parent would keep a lock of flock.
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except PermissionError as error:  # some systems raise this instead of BlockingIOError
            raise BlockingIOError(str(error)) from error
        with contextlib.suppress(FileNotFoundError):
            if _is_file(path, descriptor):
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


def _unlock(path: str, *, delete: bool) -> None:
    descriptor, times = _held.pop(path, (-1, 0))
    if times > 1:
        _held[path] = descriptor, times - 1
    elif times == 1:
        with contextlib.suppress(OSError):
            if delete and _is_file(path, descriptor):
                safe_files.remove(path)
        with contextlib.suppress(OSError):
            os.close(descriptor)


def _is_file(path: str, descriptor: int) -> bool:
    """Whether a path leads to an open file; an error of the system is raised."""
    at_path, own = os.lstat(path), os.fstat(descriptor)
    return (at_path.st_dev, at_path.st_ino) == (own.st_dev, own.st_ino)


def _holds(path: str) -> bool:
    """Whether this process has the lock, and no later attempt; True if the file cannot be examined."""
    with _changing:
        if path not in _held:
            return True  # files cannot be locked here
        try:
            now = pause_watch().tick()
            held = _is_file(path, _held[path][0])
            _seen[path] = now if held else _seen[path]
            return held
        except FileNotFoundError:
            # While this process was stopped, a later attempt may have ended and deleted the whole folder.
            return not pause_watch().was_paused(_seen[path]) and _lock_again(path)
        except OSError:
            return True


def _lock_again(path: str) -> bool:
    """Locks the file anew after it was deleted; returns False if another process has done so before."""
    try:
        while (taken := _try(path)) is None:
            pass  # it was deleted once more
    except BlockingIOError:
        return False
    except OSError:
        return True  # the save reports why nothing can be written
    descriptor, times = _held[path]
    _held[path] = taken, times
    os.close(descriptor)
    return True


def _of_earlier_attempt(path: str) -> bool:
    """Whether the lock is that of an earlier attempt of this job: the launcher has replaced its process."""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
        record: dict[str, Any] = safe_files.read_json(path, _MOST_BYTES)
        job = settings.restarted_job()
        mine = job is not None and record["job"] == job
        return mine and is_count(record["attempt"]) and record["attempt"] < settings.attempt()
    return False


def _owner(path: str) -> str:
    """Describes the process that holds the lock."""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError, OverflowError):
        record: dict[str, Any] = safe_files.read_json(path, _MOST_BYTES)
        since = datetime.fromtimestamp(float(record["since"])).strftime("%Y-%m-%d %H:%M:%S")
        return f"process {int(record['pid'])} on {str(record['host'])[:100]!r}, since {since}"
    return "another process"
