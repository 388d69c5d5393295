"""What TensorFlow says about itself when it starts, which nobody has asked for. It does not import it.

Warnings and errors are never noise. With TF_CPP_MIN_LOG_LEVEL=0 in the environment all is shown.
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
# A line of the level INFO of a C++ source (absl writes a program's own lines in the same way); and what is
# said before the level is known, in TensorFlow 2.21 twice a process.
_NOISE = re.compile(
    r"WARNING: All log messages before absl::InitializeLog\(\) is called are written to STDERR\s*$"
    r"|I\d{4} \d\d:\d\d:\d+\.\d+ +\d+ \S+\.(cc|cpp|h|cu):\d+\] "
)


def is_noise(line: str) -> bool:
    """Whether a line of a process' standard error is of this kind."""
    return _NOISE.match(line) is not None


def wanted() -> bool:
    """Whether the user wants to see it."""
    return os.environ.get(LEVEL, "").strip() == "0"


@contextlib.contextmanager
def held_back() -> Iterator[None]:
    """While it lasts, standard error goes through a process that leaves the noise out. Meant for an import.

    That process shows all that has come when this one dies, however it dies.
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
    """The other process: lines without the noise, until nobody writes any more."""
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
    """Waits until all is shown, but not for a program that holds the pipe open."""
    deadline = time.monotonic() + _PATIENCE
    while time.monotonic() < deadline and os.waitpid(process, os.WNOHANG) == (0, 0):
        time.sleep(0.005)
