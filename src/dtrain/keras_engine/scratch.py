"""Folders in which files are written before they get their names; those of killed processes are deleted.

A folder is in use as long as a process holds its lock, which a process that ends loses, however it ends.
Where a file system has no locks, nothing of others is deleted.
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
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]


@contextlib.contextmanager
def scratch_beside(target: Path) -> Iterator[Path]:
    """A new folder beside `target`, deleted afterwards; so are those that killed processes left for it."""
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
    """Delete this user's folders whose names begin so and which nobody holds any more."""
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
    """A new folder, and its lock, or None where there are no locks."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        try:
            lock = _lock(folder)
        except (BlockingIOError, FileNotFoundError):
            continue  # another process took it for abandoned before it was locked
        if folder.is_dir():
            return folder, lock
        if lock is not None:
            os.close(lock)


def _lock(folder: Path) -> int | None:
    """The descriptor that holds a folder's lock; None where there are no locks.

    Raises:
        BlockingIOError: another process has it.
    """
    if fcntl is None:
        return None
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        if isinstance(error, BlockingIOError):
            raise
        return None
    return descriptor
