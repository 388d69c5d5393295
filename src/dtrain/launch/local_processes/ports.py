"""Reserves free ports of this machine for the tasks of one job.

A reservation keeps other jobs and outgoing connections off a port, but lets the task listen on it. It does
not protect against a program that asks for that very port.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from dtrain.base.tcp import bind_everywhere
from dtrain.errors import ConfigurationError


@contextlib.contextmanager
def reserve_ports(count: int) -> Iterator[list[int]]:
    """Reserve `count` free ports of this machine while the `with` block runs; gives their numbers.
    Raises:
        ConfigurationError: the system refuses so many ports or open files.
    """
    with contextlib.ExitStack() as stack:
        ports: list[int] = []
        try:
            for _ in range(count):
                sock = stack.enter_context(bind_everywhere(0))
                ports.append(sock.getsockname()[1])
        except OSError as error:
            raise ConfigurationError(
                f"{count} free ports were asked for and {len(ports)} found: {error}.",
                hint="Start fewer workers, or raise the limit of open files (ulimit -n).",
            ) from error
        yield ports
