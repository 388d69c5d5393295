"""Finds processes of this machine, and waits until a condition holds. It starts and ends no process."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

import psutil


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie, which has ended but was not waited for, does not."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def processes_with(*words: str) -> dict[int, str]:
    """The processes that run and have all these words in their command lines, by process id."""
    found = {}
    for process in psutil.process_iter(["status", "cmdline"]):
        command = " ".join(process.info["cmdline"] or ())
        if process.info["status"] != psutil.STATUS_ZOMBIE and all(word in command for word in words):
            found[process.pid] = command
    return found


def wait_until(condition: Callable[[], bool], limit: float = 120.0) -> None:
    """Waits until a condition holds; AssertionError after `limit` seconds, enough for a busy machine."""
    deadline = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)
