"""The message channel from the tasks of a job to their launcher: a pipe that the tasks inherit.

It is one-way, with one line of JSON per message. The launcher decides what a message leads to. This module
uses neither TensorFlow nor the network.
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

from dtrain import environments
from dtrain.base.json_messages import to_json
from dtrain.environments import settings
from dtrain.environments.topology import Task
from dtrain.errors import DtrainError, RunAgain
from dtrain.task import task_hooks
from dtrain.task.task_messages import (
    REASON_LIMIT,
    CheckpointNote,
    ConnectedNote,
    FailureNote,
    ImportsNote,
    Message,
    Progress,
    RemoveNote,
    RendezvousNote,
    Request,
    parse,
)

VARIABLE = "DTRAIN_CHANNEL_FD"
"""The environment variable that holds the pipe's address; see `Listener.address`."""

RUN_AGAIN = RunAgain.STATUS
"""The exit status (EX_TEMPFAIL) of a task that saved a checkpoint and asks for its job to be run again."""

_LINE_LIMIT = 4096  # bytes (PIPE_BUF) that Linux writes to a pipe atomically
_CATCH_UP = 1.0  # seconds for the launcher to read the pipe's content
_FLUSH_SECONDS = 5.0  # seconds that an exiting process waits for a launcher that does not read


def request_restart(job: str, index: int, reason: str, *, pid: int | None = None) -> bool:
    """Ask the launcher to kill a stuck task, and to restart it as after any failure.

    Args:
        job: the task's job, such as `worker`.
        index: the task's index in that job.
        reason: what is wrong with the task, for the line that the launcher shows; cut at 500 characters.
        pid: the id of the process to kill, so that a newer process of the task is spared; None for any.

    Returns:
        Whether the request was sent or queued; the launcher may still ignore it.
    """
    return _send(Request(Task(job, index), pid, reason[:REASON_LIMIT]))


def report_progress(
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
    """Report this task's progress to the launcher without blocking; the arguments are those of `Progress`.

    Returns:
        Whether the report was sent; False without a launcher, or while the launcher does not read the pipe.
    """
    pipe = _pipe()
    if pipe is None:
        return False
    _introduce(pipe)
    done = step if done is None else done
    times = seconds_per_step, own_seconds, own_input, own_callbacks
    message = Progress(_task(), os.getpid(), step, phase, done, train, *times)
    with contextlib.suppress(OSError):  # the pipe is full, or the launcher is gone
        _write(pipe.descriptor, _line(message))
        return True
    return False


def report_checkpoint(step: int, folder: str) -> bool:
    """Tell the launcher that a checkpoint was committed; the arguments are those of `CheckpointNote`.

    It does not block. If the launcher does not read the pipe now, a thread sends the message later.

    Returns:
        Whether the message was sent or queued; False without a launcher.
    """
    return _send(CheckpointNote(_task(), step, folder))


def request_removal(path: str) -> bool:
    """Ask the launcher to delete a path after the job has succeeded; otherwise as `report_checkpoint`."""
    return _send(RemoveNote(path))


def report_connected() -> bool:
    """Tell the launcher that this task is connected to its peers; otherwise as `report_checkpoint`."""
    return _send(ConnectedNote(_task()))


@contextlib.contextmanager
def rendezvous() -> Iterator[None]:
    """Tell the launcher that this task waits for its peers while the `with` block runs.

    If the block raises, no message says that the wait is over: the task is not connected to its peers.
    """
    _send(RendezvousNote(_task(), over=False))
    yield
    _send(RendezvousNote(_task(), over=True))


def report_failure(exception: str, *, lost_peer: bool = False, hint: str = "") -> bool:
    """Tell the launcher why this task fails; the arguments are those of `FailureNote`."""
    return _send(FailureNote(_task(), exception[:REASON_LIMIT], lost_peer, hint))


def connected() -> bool:
    """Whether this process is a task with a message channel to its launcher."""
    return _pipe() is not None


def _send(message: Message) -> bool:
    """Send a message that must arrive; returns whether it was sent or queued."""
    pipe = _pipe()
    if pipe is None:
        return False
    _introduce(pipe)
    return _notes.send(pipe.descriptor, _line(message))


def _introduce(pipe: _Pipe) -> None:
    """Before the first message, send the imports of this task and the variables that they read."""
    if not pipe.introduced:
        pipe.introduced = True
        if (imports := task_hooks.imports()) is not None:
            _send(ImportsNote(_task(), **imports))


class _Notes:
    """Sends messages that must arrive: at once if the pipe has room, otherwise later from a thread."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # reentrant: a signal handler may interrupt a `send` of its own thread
        self._waiting: collections.deque[tuple[int, bytes]] = collections.deque()
        self._thread: threading.Thread | None = None

    def send(self, descriptor: int, line: bytes) -> bool:
        """Send or queue a line.

        Returns:
            False if the launcher is gone, or the line is longer than the limit; the line is dropped then.
        """
        if len(line) > _LINE_LIMIT:
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

    def flush(self, patience: float = _FLUSH_SECONDS) -> None:
        """Wait until all queued lines are sent, at most `patience` seconds."""
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
                time.sleep(0.01)  # another task has filled the pipe again
                continue
            except (OSError, ValueError):
                pass  # the launcher is gone: drop the line
            with self._lock:
                self._waiting.popleft()
                if not self._waiting:
                    self._thread = None
                    return


_notes = _Notes()
atexit.register(_notes.flush)


class _Pipe:
    """The pipe to the launcher.

    Attributes:
        inherited: the descriptor and the inode of the pipe that this process inherited.
        descriptor: a non-blocking descriptor of the pipe. If the system cannot open the pipe anew, it is the
            inherited one, which may block.
        introduced: whether the message that comes before all others was sent.
        task: this task, once the environment tells it.
    """

    def __init__(self, inherited: tuple[int, int], descriptor: int) -> None:
        self.inherited = inherited
        self.descriptor = descriptor
        self.introduced = False
        self.task: Task | None = None


_opened: _Pipe | None = None


def _pipe() -> _Pipe | None:
    """The pipe to the launcher, or None without a launcher. The environment is read until it is found."""
    global _opened
    if _opened is not None and _is_pipe(*_opened.inherited):
        return _opened
    channel = settings.channel()
    # A program that a task started inherits the variable but not the pipe, so the number may be another file.
    if channel is None or not _is_pipe(*channel):
        return None
    # The inherited descriptor is shared with the launcher and all tasks, and so would be its blocking mode.
    try:
        own = os.open(f"/proc/self/fd/{channel[0]}", os.O_WRONLY | os.O_NONBLOCK)
    except OSError:  # no /proc, or no reader left
        return _Pipe(channel, channel[0])
    if _opened is not None:
        with contextlib.suppress(OSError):
            os.close(_opened.descriptor)
    _opened = _Pipe(channel, own)
    return _opened


def _task() -> Task:
    """The task that this process is; `worker 0` as long as the environment does not tell it."""
    pipe = _pipe()
    if pipe is not None and pipe.task is None:
        with contextlib.suppress(DtrainError):
            if (topology := environments.current()) is not None:
                pipe.task = topology.task
    return (pipe and pipe.task) or Task("worker", 0)


def _write(descriptor: int, line: bytes) -> None:
    """Write a line atomically; raises BlockingIOError if the pipe is full, even on a blocking descriptor."""
    if not select.select([], [descriptor], [], 0)[1]:
        raise BlockingIOError
    os.write(descriptor, line)


def _is_pipe(descriptor: int, inode: int) -> bool:
    with contextlib.suppress(OSError):
        status = os.fstat(descriptor)
        return stat.S_ISFIFO(status.st_mode) and status.st_ino == inode
    return False


def _line(message: Message) -> bytes:
    # For a character that UTF-8 cannot encode, Python's backslash escape is valid JSON as well.
    return json.dumps(to_json(message), ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"


class Listener:
    """The launcher's end of the channel: a thread that receives the tasks' messages.

    Args:
        on_message: called in that thread with each valid message.

    Attributes:
        descriptor: the pipe's write end, which tasks inherit.
        address: the pipe's descriptor and inode, as `VARIABLE` holds them.
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
        """Wait until `on_message` has been called for all messages sent so far, at most about a second."""
        with self._closing:
            if not self._closed and select.select([], [self.descriptor], [], _CATCH_UP)[1]:
                self._marked.clear()
                os.write(self.descriptor, self._mark)
                self._marked.wait(_CATCH_UP)

    def close(self) -> None:
        """Receive the messages sent so far, and stop. Call it when no task is left."""
        # Another process may still hold the write end, so closing it here might not end the pipe.
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
