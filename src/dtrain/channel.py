"""What the tasks of a job tell the launcher that started them, over a pipe that they inherit.

One line of JSON a message, one way. It says what can be asked for and what is reported; what comes of it is
the launcher's to decide. No TensorFlow, and nothing on a network.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import json
import math
import os
import select
import stat
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeGuard

from dtrain import cluster
from dtrain.cluster import settings
from dtrain.errors import DtrainError
from dtrain.plain_text import cleaned
from dtrain.topology import KNOWN_JOBS, Task

VARIABLE = "DTRAIN_CHANNEL_FD"
"""The environment variable in which a task finds the pipe; see `Listener.address`."""

RUN_AGAIN = 75
"""The exit status (EX_TEMPFAIL) of a task that saved a checkpoint and wants its job to be run again."""

_LINE_LIMIT = 4096  # bytes that Linux writes to a pipe in one piece, whoever else writes
_REASON_LIMIT = 500  # characters
_COUNT_LIMIT = 1 << 63  # no step has a higher number
_PID_LIMIT = 1 << 31
_LAST_WORDS = 5.0  # seconds that a process that ends waits for a launcher that does not listen


@dataclass(frozen=True)
class Request:
    """The wish that a task be killed, and so started again where the job's rules say so.

    Attributes:
        task: which one.
        reason: what is wrong with it, for the user.
        pid: the process that is meant, so that one which took its place meanwhile is spared; None for any.
    """

    task: Task
    reason: str
    pid: int | None = None


@dataclass(frozen=True)
class Progress:
    """Where a task is in its `fit`, `evaluate` or `predict`.

    Attributes:
        task: which one.
        pid: its process.
        step: training steps completed: the optimizer's count, so that it goes on where a checkpoint ended.
        phase: "input", "step", "callbacks", "evaluate", "checkpoint" or "idle".
        seconds_per_step: its usual step, from one to the next, or None where too few are known.
        own_seconds: what of that it does not spend waiting for the other workers, or None if not measured.
        train: whether it trains; otherwise it evaluates or predicts.
        done: steps of any kind completed in this life of the process; whoever does not count them is taken
            to have done as many as `step` says.
        own_input: what of `own_seconds` is spent on getting the next batch, or None.
        own_callbacks: what of it is spent between two steps, or None.
    """

    task: Task
    pid: int
    step: int
    phase: str
    seconds_per_step: float | None
    own_seconds: float | None
    train: bool
    done: int = 0
    own_input: float | None = None
    own_callbacks: float | None = None


@dataclass(frozen=True)
class CheckpointNote:
    """A checkpoint was committed.

    Attributes:
        task: who says so.
        step: the training step that it holds; -1 while a folder is in use and nothing saved yet, which also
            says that the task answers SIGTERM by saving.
        folder: the checkpoints' folder.
    """

    task: Task
    step: int
    folder: str


@dataclass(frozen=True)
class RemoveNote:
    """A path that nobody needs any more once the job has ended well."""

    path: str


@dataclass(frozen=True)
class ConnectedNote:
    """A task has made a strategy that connects it to the others of its job."""

    task: Task


@dataclass(frozen=True)
class MeetingNote:
    """A task waits for the others of its job before training.

    Attributes:
        task: which one.
        over: whether it has met them.
    """

    task: Task
    over: bool


Message = Request | Progress | CheckpointNote | RemoveNote | ConnectedNote | MeetingNote


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
    message = {"restart": f"{job}:{index}", "reason": reason[:_REASON_LIMIT], "pid": pid}
    if len(_line(message)) > _LINE_LIMIT:  # ASCII escapes have made it long
        message["reason"] = "no reason that can be shown"
    return _notes.send(_line(message))


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
        "done": done,
        "own_input": own_input,
        "own_callbacks": own_callbacks,
    }
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
def meeting() -> Iterator[None]:
    """Tell the launcher that this task waits for the others, while the `with` block runs."""
    _notes.send(_line({"meeting": _myself(), "over": False}))
    yield
    _notes.send(_line({"meeting": _myself(), "over": True}))


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
    return json.dumps(message).encode() + b"\n"


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
        self._thread = threading.Thread(target=self._listen, name="dtrain-channel", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Hear what was said until now, and nothing more. Call it when no task is left."""
        # A stranger may still hold the other end, so that the pipe alone would not end.
        if select.select([], [self.descriptor], [], 1.0)[1]:
            with contextlib.suppress(BrokenPipeError):
                os.write(self.descriptor, self._end)
        os.close(self.descriptor)
        self._thread.join(timeout=1.0)

    def _listen(self) -> None:
        with os.fdopen(self._reading, "rb") as pipe:
            while line := pipe.readline(_LINE_LIMIT):
                if line.endswith(self._end):
                    return
                message = parse(line)
                if message is not None:
                    self._on_message(message)


def parse(line: bytes) -> Message | None:
    """The message in a line, or None where there is none that can be understood."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict):
        return None
    for kind, read in _READERS.items():
        if kind in found:
            return read(found)
    return None


def _request(found: dict[str, Any]) -> Request | None:
    task = _task(found["restart"])
    if task is None:
        return None
    pid, reason = found.get("pid"), found.get("reason")
    if pid is not None and not _is_pid(pid):
        return None
    return Request(task, cleaned(reason if isinstance(reason, str) else "", _REASON_LIMIT), pid)


def _progress(found: dict[str, Any]) -> Progress | None:
    task = _task(found["progress"])
    pid, step, phase = found.get("pid"), found.get("step"), found.get("phase")
    if task is None or not (_is_pid(pid) and _is_count(step) and isinstance(phase, str)):
        return None
    done = found.get("done")
    return Progress(
        task,
        pid,
        step,
        cleaned(phase),
        _seconds(found.get("seconds_per_step")),
        _seconds(found.get("own_seconds")),
        bool(found.get("train")),
        done=done if _is_count(done) else step,
        own_input=_seconds(found.get("own_input")),
        own_callbacks=_seconds(found.get("own_callbacks")),
    )


def _checkpoint(found: dict[str, Any]) -> CheckpointNote | None:
    task, step, folder = _task(found["checkpoint"]), found.get("step"), found.get("folder")
    if task is None or not (_is_count(step, least=-1) and isinstance(folder, str)):
        return None
    return CheckpointNote(task, step, folder)


def _removal(found: dict[str, Any]) -> RemoveNote | None:
    path = found["remove"]
    return RemoveNote(path) if isinstance(path, str) and path else None


def _connected(found: dict[str, Any]) -> ConnectedNote | None:
    task = _task(found["connected"])
    return None if task is None else ConnectedNote(task)


def _meeting(found: dict[str, Any]) -> MeetingNote | None:
    task = _task(found["meeting"])
    return None if task is None else MeetingNote(task, found.get("over") is True)


_READERS: dict[str, Callable[[dict[str, Any]], Message | None]] = {
    "restart": _request,
    "progress": _progress,
    "checkpoint": _checkpoint,
    "remove": _removal,
    "connected": _connected,
    "meeting": _meeting,
}


def _task(text: Any) -> Task | None:
    job, _, index = str(text).rpartition(":")
    known = job in KNOWN_JOBS and index.isascii() and index.isdigit()
    return Task(job, int(index)) if known else None


def _is_pid(found: Any) -> TypeGuard[int]:
    """Whether it can be the number of a task's process; 0, 1 and negative ones mean others to `os.kill`."""
    return type(found) is int and 1 < found < _PID_LIMIT


def _is_count(found: Any, least: int = 0) -> TypeGuard[int]:
    return type(found) is int and least <= found < _COUNT_LIMIT


def _seconds(found: Any) -> float | None:
    if isinstance(found, bool) or not isinstance(found, int | float):
        return None
    with contextlib.suppress(OverflowError):
        if math.isfinite(found):
            return float(found)
    return None
