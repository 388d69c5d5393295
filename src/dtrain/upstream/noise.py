"""Filters the informational lines that TensorFlow writes to standard error when it is imported.

It never hides warnings and errors, and does not import TensorFlow. With TF_CPP_MIN_LOG_LEVEL=0 in the
environment, it filters nothing.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from typing import NoReturn

LEVEL = "TF_CPP_MIN_LOG_LEVEL"
_STDERR = 2
_PATIENCE = 2.0  # seconds
# A line of the level INFO from a C++ source (a program's own absl lines look the same); and the line that
# absl writes before logging is initialised, in TensorFlow 2.21 twice in a process.
_NOISE = re.compile(
    r"WARNING: All log messages before absl::InitializeLog\(\) is called are written to STDERR\s*$"
    r"|I\d{4} \d\d:\d\d:\d+\.\d+ +\d+ \S+\.(cc|cpp|h|cu):\d+\] "
)


def is_noise(line: str) -> bool:
    """Whether a line of standard error is one to filter."""
    return _NOISE.match(line) is not None


def wanted() -> bool:
    """Whether the user wants to see these lines (TF_CPP_MIN_LOG_LEVEL=0)."""
    return os.environ.get(LEVEL, "").strip() == "0"


@contextlib.contextmanager
def held_back() -> Iterator[None]:
    """Sends standard error, inside the context, through a child process that filters it. Meant for an import.

    If this process dies, the child still writes everything that it has received.
    """
    if wanted():
        yield
        return
    os.environ.setdefault(LEVEL, "1")
    sys.stderr.flush()
    own = os.dup(_STDERR)
    read, write = os.pipe()
    filtering = os.fork()
    if filtering == 0:
        _pass_on(read, write)
    os.close(read)
    os.dup2(write, _STDERR)
    os.close(write)
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(own, _STDERR)
        os.close(own)
        _await(filtering)


def _pass_on(read: int, write: int) -> NoReturn:
    """The child process: copies the lines that are not filtered, until the pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        os.close(write)
        with os.fdopen(read, "rb") as lines:
            for line in lines:
                if not is_noise(line.decode("utf-8", "replace")):
                    os.write(_STDERR, line)
    finally:
        os._exit(0)


def _await(process: int) -> None:
    """Waits until the child has written everything; not longer than `_PATIENCE`: others may hold the pipe."""
    deadline = time.monotonic() + _PATIENCE
    while time.monotonic() < deadline and os.waitpid(process, os.WNOHANG) == (0, 0):
        time.sleep(0.005)
