"""Turns the system's refusal of processes, open files or memory into an error with a hint.

It raises no limit and retries nothing.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator

from dtrain.base.tcp import EXHAUSTED
from dtrain.errors import ConfigurationError

_LIMITS = (*EXHAUSTED, errno.EAGAIN)


@contextlib.contextmanager
def convert_limit_errors() -> Iterator[None]:
    """Convert the system's refusals inside the `with` block into errors that say what to do.

    Raises:
        ConfigurationError: the system refused a process, a pipe, a file or memory. Other errors pass
            unchanged.
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
