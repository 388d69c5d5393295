"""What Ray runs for each task of a job: an actor that starts an agent, and forwards its messages.

Ray may end the actor's process at any time. The agent's input then ends, on which the agent ends too.
"""

from __future__ import annotations

import collections
import contextlib
import os
import socket
import subprocess
import sys
import threading
from typing import IO

_AGENT = (sys.executable, "-m", "dtrain.launch.hosts.agent")
_LAST = 20  # lines
_END_SECONDS = 5.0  # seconds for the agent to end after its output has


class AgentActor:
    """An agent whose pipes are read and written by method calls; each method in one thread at a time."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            _AGENT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            bufsize=0,
        )
        self._last_lines: collections.deque[str] = collections.deque(maxlen=_LAST)
        self._listener = threading.Thread(target=self._listen, args=(self._process.stderr,), daemon=True)
        self._listener.start()

    def where(self) -> tuple[str, str]:
        """The name of this host, and the address by which other nodes of the cluster know it."""
        import ray.util

        return socket.gethostname(), ray.util.get_node_ip_address()

    def read(self) -> bytes:
        """The next bytes that the agent has written, at least one; b"" when it has ended."""
        return b"" if self._process.stdout is None else os.read(self._process.stdout.fileno(), 1 << 16)

    def write(self, data: bytes) -> None:
        """Write to the agent; does nothing if it has ended."""
        rest = memoryview(data)
        with contextlib.suppress(OSError, ValueError):
            while rest and self._process.stdin is not None:
                rest = rest[self._process.stdin.write(rest) :]

    def close(self) -> None:
        """Close the agent's input, on which the agent ends its task and itself."""
        with contextlib.suppress(OSError):
            if self._process.stdin is not None:
                self._process.stdin.close()

    def ended(self) -> tuple[int | None, list[str]]:
        """The agent's exit status (None if it does not end), and the last lines of its standard error."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_SECONDS)
        self._listener.join(_END_SECONDS)
        return self._process.returncode, list(self._last_lines)

    def _listen(self, pipe: IO[bytes]) -> None:
        with pipe:
            for line in pipe:
                self._last_lines.append(line.decode(errors="replace").rstrip())
