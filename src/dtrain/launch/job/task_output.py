"""Copies the tasks' output to the launcher's output, line by line, each line prefixed with its task.

It drops known noise from standard error, and keeps only each task's last lines, for the report of a failure.
"""

from __future__ import annotations

import collections
import os
import selectors
import threading
from collections.abc import Callable
from typing import TextIO

from dtrain.base.clock import REAL, Clock
from dtrain.environments.topology import Task
from dtrain.upstream.noise import is_noise
from dtrain.upstream.noise import wanted as noise_wanted

_LINE_LIMIT = 64 * 1024  # bytes; longer lines are cut
_REFRESH = 5.0  # seconds between two displays of a line that is still being overwritten


class Console:
    """The launcher's output streams, shared by all readers; a lock keeps lines whole.

    Args:
        stdout, stderr: the streams to write to.
        on_broken: called when nobody reads a stream any more, as in `dtrain launch ... | head`.

    Attributes:
        attempt: the number of the present attempt, from 0.
        copy: called with each line of a task, the task and the attempt, or None; it must not block.
    """

    def __init__(self, stdout: TextIO, stderr: TextIO, *, on_broken: Callable[[], None]) -> None:
        self._streams = {"stdout": stdout, "stderr": stderr}
        self._on_broken = on_broken
        self._lock = threading.Lock()
        self.attempt = 0
        self.copy: Callable[[Task, int, str], None] | None = None

    def write_task_line(self, task: Task, line: str, *, to: str = "stdout", host: str = "") -> None:
        """Write a line of a task, prefixed with the task and, if it is given, with its host."""
        if self.copy is not None:
            self.copy(task, self.attempt, line)
        self.write_line(f"[{task}{f' on {host}' if host else ''}] {line}", to=to)

    def write_line(self, line: str, *, to: str = "stdout") -> None:
        """Write one whole line to `stdout` or `stderr`; the line is dropped if that stream is closed."""
        stream = self._streams[to]
        with self._lock:
            try:
                try:
                    stream.write(line + "\n")
                except UnicodeEncodeError:
                    encoding = stream.encoding or "ascii"
                    stream.write(line.encode(encoding, "backslashreplace").decode(encoding) + "\n")
                stream.flush()
            except BrokenPipeError:
                self._on_broken()
            except (OSError, ValueError):  # closed by other code: the job must not fail because of its output
                pass


class OutputReader(threading.Thread):
    """A thread that reads one pipe of one task until its end and writes the lines to the console.

    A progress bar overwrites its own line. Its present state is shown every 5 s, and once the line ends.

    Args:
        pipe: the file descriptor to read; closed at the end.
        task: whose lines they are.
        console: where the lines are written.
        to: the console's stream, `stdout` or `stderr`.
        tail: collects the finished lines; shared by the readers of one task.
        clock: on which the 5 s pass.
    """

    def __init__(
        self,
        pipe: int,
        task: Task,
        console: Console,
        *,
        to: str,
        tail: collections.deque[str],
        clock: Clock = REAL,
    ) -> None:
        super().__init__(name=f"dtrain-output {task} {to}", daemon=True)
        self._clock = clock
        self._pipe = pipe
        self._task = task
        self._console = console
        self._to = to
        self._tail = tail
        self._pending = b""
        self._pending_since = 0.0
        self._shown = ""
        self._finishing = threading.Event()
        self._noise_wanted = noise_wanted()

    def run(self) -> None:
        """Read until the pipe ends, or until it is empty after `finish` was called."""
        os.set_blocking(self._pipe, False)
        with selectors.DefaultSelector() as selector:
            selector.register(self._pipe, selectors.EVENT_READ)
            while True:
                selector.select(timeout=0.1 if self._finishing.is_set() else 0.5)
                finishing = self._finishing.is_set()
                # A wait that a stop of this process has ended says that nothing is there, whatever there is.
                chunk = self._read()
                if chunk == b"" or (chunk is None and finishing):
                    break
                if chunk:
                    self._feed(chunk)
                self._refresh()
        if self._pending:
            self._finish_line(self._pending)
        os.close(self._pipe)

    def _read(self) -> bytes | None:
        """What is in the pipe, b"" at its end; None if nothing is there."""
        try:
            return os.read(self._pipe, 65536)
        except BlockingIOError:
            return None

    def finish(self) -> None:
        """Ask the thread to end once the pipe is empty, even if another process still holds its write end."""
        self._finishing.set()

    def _feed(self, chunk: bytes) -> None:
        if not self._pending:
            self._pending_since = self._clock.now()
        *lines, self._pending = (self._pending + chunk).split(b"\n")
        if lines:
            self._pending_since = self._clock.now()
        for line in lines:
            self._finish_line(line)
        if len(self._pending) > _LINE_LIMIT:
            shown = visible_line(self._pending)
            if len(shown) > _LINE_LIMIT // 2:
                self._finish_line(self._pending)
                self._pending = b""
            else:  # a long series of overwrites, of which only the short visible part is kept
                self._pending = shown.encode() + (b"\r" if self._pending.endswith(b"\r") else b"")

    def _finish_line(self, raw: bytes) -> None:
        line = visible_line(raw)
        self._shown = ""
        if self._to == "stderr" and not self._noise_wanted and is_noise(line):
            return
        self._tail.append(line)
        self._console.write_task_line(self._task, line, to=self._to)

    def _refresh(self) -> None:
        now = self._clock.now()
        if not self._pending or now - self._pending_since < _REFRESH:
            return
        self._pending_since = now
        line = visible_line(self._pending)
        if line.strip() and line != self._shown:
            self._shown = line
            self._console.write_task_line(self._task, line, to=self._to)


def visible_line(raw: bytes) -> str:
    """The text that a terminal shows for a line with carriage returns and backspaces."""
    text = raw.decode("utf-8", "replace")
    parts = text.split("\r") if "\r" in text else [text]
    shown = next((part for part in reversed(parts) if part.strip(" \b")), "")
    if "\b" not in shown:
        return shown
    kept: list[str] = []
    for char in shown:
        if char != "\b":
            kept.append(char)
        elif kept:
            kept.pop()
    return "".join(kept)
