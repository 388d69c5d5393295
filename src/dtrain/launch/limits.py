"""What is said where the system gives this user no more processes, open files or memory for a job."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator

from dtrain.cluster.sockets import EXHAUSTED
from dtrain.errors import ConfigurationError

_LIMITS = (*EXHAUSTED, errno.EAGAIN)


@contextlib.contextmanager
def system_limits_told() -> Iterator[None]:
    """Give the system's refusals as errors that say what to do.

    Raises:
        ConfigurationError: a process, a pipe or a file could not be had.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in _LIMITS:
            raise
        raise ConfigurationError(
            f"The processes of the job cannot be started: {error.strerror}.",
            hint="Start fewer workers, or raise the limits: ulimit -n (open files), ulimit -u (processes).",
        ) from error
