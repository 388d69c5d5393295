"""A folder of checkpoints is written by one job at a time: its workers' leader holds a lock on it.

The lock is the operating system's, on a file in the folder, so a process that is killed holds it no longer.
Folders of object stores, and file systems without locks, cannot be held; there nothing is refused.
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
from dtrain.errors import CheckpointError
from dtrain.keras_engine.protocol import ReplicaLayout
from dtrain.keras_engine.talk import exchange

NAME = ".in-use"
PATIENCE = 10.0
"""Seconds to wait for an owner that may just be ending, such as a job that was told to make room."""

_PAUSE = 0.1
_held: dict[str, tuple[int, int]] = {}  # path -> (descriptor, how often it is held by this process)


class FolderLock:
    """Holds a folder for this job; all workers make it, and all get the error if one cannot have its own.

    Args:
        folder: this worker's.
        layout: the strategy's.
        group: who shares the folder; its leader holds the lock.

    Raises:
        CheckpointError: another job that lives holds it.
    """

    def __init__(self, folder: str, layout: ReplicaLayout, group: Group) -> None:
        self._path = None if "://" in folder or not group.leads else f"{folder.rstrip('/')}/{NAME}"
        problem = "" if self._path is None else _take(self._path)
        if problem:
            self._path = None
        found = next(filter(None, exchange(layout, problem)), "")
        if found:
            self.release()
            raise CheckpointError(
                f"The folder {folder} is in use {found}.",
                hint="Give each job a folder of its own, or end the other job first.",
            )

    def release(self) -> None:
        """Let go of the folder; calling it again does nothing."""
        path, self._path = self._path, None
        if path is not None:
            _let_go(path)


def _take(path: str) -> str:
    """Holds the file; returns by whom it is held already, or "" where it is ours or nobody can hold it."""
    if path in _held:
        descriptor, times = _held[path]
        _held[path] = descriptor, times + 1
        return ""
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            taken = _try(path)
        except BlockingIOError:
            if time.monotonic() > deadline:
                return f"by {_owner(path)}"
            time.sleep(_PAUSE)
            continue
        except OSError:
            return ""  # nobody can lock here, or even write: then the first save says why
        if taken is not None:
            _held[path] = taken, 1
            return ""


def _try(path: str) -> int | None:
    """A descriptor that holds the file, or None where it was deleted meanwhile.

    Raises:
        BlockingIOError: another process holds it.
    """
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            # Not flock: a process that was forked, and outlives its parent, would hold that too.
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except PermissionError as error:  # what some systems say where others say that it would block
            raise BlockingIOError(str(error)) from error
        with contextlib.suppress(FileNotFoundError):
            if os.stat(path).st_ino == os.fstat(descriptor).st_ino:  # noqa: PTH116
                text = json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "since": time.time()})
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, text.encode(), 0)
                return descriptor
    except BaseException:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None


def _let_go(path: str) -> None:
    descriptor, times = _held.pop(path, (-1, 0))
    if times > 1:
        _held[path] = descriptor, times - 1
    elif times == 1:
        with contextlib.suppress(OSError):
            Path(path).unlink()
        with contextlib.suppress(OSError):
            os.close(descriptor)


def _owner(path: str) -> str:
    """Who holds the file, in words."""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        found: dict[str, Any] = json.loads(Path(path).read_text(encoding="utf-8"))
        since = datetime.fromtimestamp(float(found["since"])).strftime("%Y-%m-%d %H:%M:%S")
        return f"process {int(found['pid'])} on {str(found['host'])[:100]!r}, since {since}"
    return "another process"
