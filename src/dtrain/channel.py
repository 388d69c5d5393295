"""What the tasks of a job tell the launcher that started them, over a pipe that they inherit.

One line of JSON a message, one way. It says what can be asked for and what is reported; what comes of it is
the launcher's to decide. No TensorFlow, and nothing on a network.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import json
import os
import select
import stat
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from dtrain import cluster, task_hooks
from dtrain.cluster import settings
from dtrain.errors import DtrainError
from dtrain.task_messages import REASON_LIMIT, Message, parse
from dtrain.topology import Task

VARIABLE = "DTRAIN_CHANNEL_FD"
"""The environment variable in which a task finds the pipe; see `Listener.address`."""

RUN_AGAIN = 75
"""The exit status (EX_TEMPFAIL) of a task that saved a checkpoint and wants its job to be run again."""

_LINE_LIMIT = 4096  # bytes that Linux writes to a pipe in one piece, whoever else writes
_CATCH_UP = 1.0  # seconds for the launcher to read what lies in the pipe
_LAST_WORDS = 5.0  # seconds that a process that ends waits for a launcher that does not listen


def request_restart(job: str, index: int, reason: str, *, pid: int | None = None) -> bool:
    """Ask the launcher to kill a task that is stuck, and to start it again by the rules for its failures.

    Args:
        job: the task's job, such as `worker`.
        index: its index there.
        reason: what is wrong with it, as the launcher shows it to the user.
        pid: the process that is meant, so that no newer one is killed; None for whichever runs.

    Returns:
        Whether there is a launcher that takes requests; not yet that it has done anything.
    """
    return _notes.send(_line({"restart": f"{job}:{index}", "reason": reason[:REASON_LIMIT], "pid": pid}))


def tell_progress(
    step: int,
    phase: str,
    *,
    train: bool,
    seconds_per_step: float | None = None,
    own_seconds: float | None = None,
    done: int | None = None,
    own_input: float | None = None,
    own_callbacks: float | None = None,
) -> bool:
    """Tell the launcher where this task is; arguments as the attributes of `Progress`. It never waits.

    Returns:
        Whether it was sent: not where no launcher listens, nor while one does not read.
    """
    message = {
        "progress": _myself(),
        "pid": os.getpid(),
        "step": step,
        "phase": phase,
        "seconds_per_step": seconds_per_step,
        "own_seconds": own_seconds,
        "train": train,
        "done": step if done is None else done,
        "own_input": own_input,
        "own_callbacks": own_callbacks,
    }
    _introduce()
    descriptor = _pipe()
    with contextlib.suppress(OSError):  # full, or the launcher is gone
        if descriptor is not None:
            _write(descriptor, _line(message))
            return True
    return False


def tell_checkpoint(step: int, folder: str) -> bool:
    """Tell the launcher that a checkpoint was committed; arguments as the attributes of `CheckpointNote`.

    It never waits. Where the launcher does not read now, it is told as soon as it does.

    Returns:
        Whether there is a launcher.
    """
    return _notes.send(_line({"checkpoint": _myself(), "step": step, "folder": folder}))


def tell_removal(path: str) -> bool:
    """Ask the launcher to delete a path once the job has ended well; otherwise as `tell_checkpoint`."""
    return _notes.send(_line({"remove": path}))


def tell_connected() -> bool:
    """Tell the launcher that this task is connected to the others; otherwise as `tell_checkpoint`."""
    return _notes.send(_line({"connected": _myself()}))


@contextlib.contextmanager
def rendezvous() -> Iterator[None]:
    """Tell the launcher that this task waits for the others, while the `with` block runs."""
    _notes.send(_line({"rendezvous": _myself(), "over": False}))
    yield
    _notes.send(_line({"rendezvous": _myself(), "over": True}))


def tell_failure(exception: str, *, lost_peer: bool = False, hint: str = "") -> bool:
    """Tell the launcher why this task ends; arguments as the attributes of `FailureNote`."""
    text = exception[:REASON_LIMIT]
    return _notes.send(_line({"failure": _myself(), "exception": text, "lost_peer": lost_peer, "hint": hint}))


def _introduce() -> None:
    """Tell the launcher, before the first message, what the libraries of this task found at their import."""
    if (found := task_hooks.imports()) is not None:
        _notes.send(_line({"imports": _myself(), **found}))


def connected() -> bool:
    """Whether this process is a task of a launcher that listens."""
    return _pipe() is not None


def own_task() -> Task:
    """Which task this process is; `worker 0` where it is the only one."""
    with contextlib.suppress(DtrainError):
        if (topology := cluster.current()) is not None:
            return topology.task
    return Task("worker", 0)


class _Notes:
    """Sends what must arrive: at once where the pipe has room, otherwise from a thread that waits for it."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a signal handler may send while its own thread does
        self._waiting: collections.deque[tuple[int, bytes]] = collections.deque()
        self._thread: threading.Thread | None = None

    def send(self, line: bytes) -> bool:
        """Whether there is a pipe to send a line over, now or later; no line is longer than the limit."""
        _introduce()
        descriptor = _pipe()
        if descriptor is None or len(line) > _LINE_LIMIT:
            return False
        with self._lock:
            if not self._waiting:
                try:
                    _write(descriptor, line)
                    return True
                except BlockingIOError:
                    pass
                except OSError:  # the launcher is gone
                    return False
            self._waiting.append((descriptor, line))
            if self._thread is None:
                self._thread = threading.Thread(target=self._deliver, name="dtrain-notes", daemon=True)
                self._thread.start()
        return True

    def flush(self, patience: float = _LAST_WORDS) -> None:
        """Wait until everything is sent, at most `patience` seconds."""
        thread = self._thread
        if thread is not None:
            thread.join(patience)

    def _deliver(self) -> None:
        while True:
            descriptor, line = self._waiting[0]
            try:
                select.select([], [descriptor], [])
                _write(descriptor, line)
            except BlockingIOError:
                time.sleep(0.01)  # another task was quicker
                continue
            except (OSError, ValueError):
                pass  # the launcher is gone, and nobody is left to be told
            with self._lock:
                self._waiting.popleft()
                if not self._waiting:
                    self._thread = None
                    return


_notes = _Notes()
atexit.register(_notes.flush)

# The inherited pipe's (descriptor, inode), and this process's own way to it.
_opened: tuple[tuple[int, int], int] | None = None


def _pipe() -> int | None:
    """A descriptor of the pipe that never blocks, or None where no launcher listens."""
    global _opened
    found = settings.channel()
    if found is None:
        return None
    if _opened is not None and _opened[0] == found and _is_pipe(*found):
        return _opened[1]
    # A program started by a task has the variable, but not the pipe: the number may mean anything there.
    if not _is_pipe(*found):
        return None
    # The way that was inherited is shared with the launcher and all tasks, and so would be its mode.
    try:
        own = os.open(f"/proc/self/fd/{found[0]}", os.O_WRONLY | os.O_NONBLOCK)
    except OSError:  # no /proc, or no reader left
        return found[0]
    if _opened is not None and _opened[1] != _opened[0][0]:
        with contextlib.suppress(OSError):
            os.close(_opened[1])
    _opened = found, own
    return own


def _write(descriptor: int, line: bytes) -> None:
    """Writes a line in one piece or raises BlockingIOError, also where the descriptor itself would block."""
    if not select.select([], [descriptor], [], 0)[1]:
        raise BlockingIOError
    os.write(descriptor, line)


def _is_pipe(descriptor: int, inode: int) -> bool:
    with contextlib.suppress(OSError):
        status = os.fstat(descriptor)
        return stat.S_ISFIFO(status.st_mode) and status.st_ino == inode
    return False


def _myself() -> str:
    task = own_task()
    return f"{task.job}:{task.index}"


def _line(message: dict[str, Any]) -> bytes:
    # Where a character cannot be encoded, Python's escape is JSON's too.
    return json.dumps(message, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"


class Listener:
    """The launcher's end: hears what the tasks say, in a thread of its own.

    Args:
        on_message: called in that thread with everything that can be understood.
    """

    def __init__(self, on_message: Callable[[Message], None]) -> None:
        self._on_message = on_message
        self._reading, self.descriptor = os.pipe()
        self.address = f"{self.descriptor}:{os.fstat(self.descriptor).st_ino}"
        self._end = f"end of {self.address}\n".encode()
        self._mark = f"mark of {self.address}\n".encode()
        self._marked = threading.Event()
        self._closing = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._listen, name="dtrain-channel", daemon=True)
        self._thread.start()

    def catch_up(self) -> None:
        """Return when `on_message` was called with all that was said until now, or after a second."""
        with self._closing:
            if not self._closed and select.select([], [self.descriptor], [], _CATCH_UP)[1]:
                self._marked.clear()
                os.write(self.descriptor, self._mark)
                self._marked.wait(_CATCH_UP)

    def close(self) -> None:
        """Hear what was said until now, and nothing more. Call it when no task is left."""
        # A stranger may still hold the other end, so that the pipe alone would not end.
        with self._closing:
            self._closed = True
            if select.select([], [self.descriptor], [], _CATCH_UP)[1]:
                with contextlib.suppress(BrokenPipeError):
                    os.write(self.descriptor, self._end)
            os.close(self.descriptor)
        self._thread.join(timeout=1.0)

    def _listen(self) -> None:
        with os.fdopen(self._reading, "rb") as pipe:
            while line := pipe.readline(_LINE_LIMIT):
                if line.endswith(self._end):
                    return
                if line.endswith(self._mark):
                    self._marked.set()
                    continue
                message = parse(line)
                if message is not None:
                    self._on_message(message)
