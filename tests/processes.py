"""Finds processes of this machine and folders of launchers, and waits. It starts and ends no process."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie, which has ended but was not waited for, does not."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def processes_with(*words: str) -> dict[int, str]:
    """The processes that run and have all these words in their command lines, by process id."""
    commands = {}
    for process in psutil.process_iter(["status", "cmdline"]):
        command = " ".join(process.info["cmdline"] or ())
        if process.info["status"] != psutil.STATUS_ZOMBIE and all(word in command for word in words):
            commands[process.pid] = command
    return commands


def traces(launcher: int | None = None) -> set[str]:
    """The folders that a launcher (by default this process) made and has not deleted.

    Folders older than this process are of an earlier launcher, killed with its machine, that had the same id.
    """
    began = psutil.Process().create_time()
    folders = set()
    for folder in (Path(tempfile.gettempdir()), Path("/dev/shm")):
        for path in folder.glob(f"dtrain-{launcher or os.getpid()}-*"):
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_mtime >= began:
                    folders.add(str(path))
    return folders


def wait_until(condition: Callable[[], bool], limit: float = 120.0) -> None:
    """Waits until a condition holds; AssertionError after `limit` seconds, enough for a busy machine."""
    deadline = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"  # wall clock: without it, a failure hangs
        time.sleep(0.02)
