"""Scratch folders, in which files are written before they get their final names.

A process locks its folder, and loses the lock when it ends, even when killed; unlocked folders are deleted.
On a file system without locks, no process deletes another's folder.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows has no `fcntl`
    fcntl = None  # type: ignore[assignment]


@contextlib.contextmanager
def scratch_beside(target: Path) -> Iterator[Path]:
    """A new folder beside `target`, deleted at the end; first deletes those that killed processes left."""
    prefix = f".{target.name}.saving-"
    remove_abandoned(target.parent, prefix)
    folder, lock = _new(target.parent, prefix)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def remove_abandoned(parent: Path, prefix: str) -> None:
    """Deletes this user's folders in `parent` whose names begin with `prefix` and that no process locks."""
    with contextlib.suppress(OSError):
        for folder in sorted(parent.iterdir()):
            if folder.name.startswith(prefix) and not folder.is_symlink() and folder.is_dir():
                _remove_abandoned(folder)


def _remove_abandoned(folder: Path) -> None:
    with contextlib.suppress(OSError):
        if folder.stat().st_uid != os.geteuid():
            return
        lock = _lock(folder)
        if lock is not None:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)


def _new(parent: Path, prefix: str) -> tuple[Path, int | None]:
    """A new folder and the descriptor of its lock; None instead of it on a file system without locks."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        try:
            lock = _lock(folder)
        except (BlockingIOError, FileNotFoundError):
            continue  # before this process locked it, another process deleted it as abandoned
        if folder.is_dir():
            return folder, lock
        if lock is not None:
            os.close(lock)


def _lock(folder: Path) -> int | None:
    """Locks a folder; returns the descriptor that holds the lock, or None if locks are not supported.

    Raises:
        BlockingIOError: another process holds the lock.
    """
    if fcntl is None:
        return None
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        if isinstance(error, BlockingIOError):
            raise
        return None
    return descriptor
