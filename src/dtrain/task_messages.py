"""What tasks tell the launcher that started them, and how a line of the channel becomes such a message.

A line is a JSON object that begins with the kind of the message. What comes over it may be anybody's: what
cannot be understood is nothing.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dtrain.plain_text import cleaned
from dtrain.topology import KNOWN_JOBS, Task

REASON_LIMIT = 500
"""Characters of what a task says in words."""

_COUNT_LIMIT = 1 << 63  # no step has a higher number


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
class RendezvousNote:
    """A task waits for the others of its job before training.

    Attributes:
        task: which one.
        over: whether all are there.
    """

    task: Task
    over: bool


@dataclass(frozen=True)
class FailureNote:
    """An exception that nobody caught ends the task's program.

    Attributes:
        task: which one.
        exception: its type and the first line of its message.
        lost_peer: whether it says that another task is gone.
        hint: what to write instead, or "".
    """

    task: Task
    exception: str
    lost_peer: bool = False
    hint: str = ""


@dataclass(frozen=True)
class ImportsNote:
    """What the libraries of a task found when they were imported; see `task_hooks`.

    Attributes:
        task: which one.
        variables: those that libraries read at import and the program had changed until then; None: deleted.
        later: those that it has changed since.
        modules: what it has imported, of what may be imported before a program begins.
    """

    task: Task
    variables: Mapping[str, str | None]
    later: Mapping[str, str | None]
    modules: Sequence[str]


Message = (
    Request
    | Progress
    | CheckpointNote
    | RemoveNote
    | ConnectedNote
    | RendezvousNote
    | FailureNote
    | ImportsNote
)


def parse(line: bytes) -> Message | None:
    """The message in a line, or None where there is none that can be understood."""
    try:
        found = json.loads(line)
        kind = next(kind for kind in _KINDS if kind in found)
        make, first, fields = _KINDS[kind]
        found = {"done": found.get("step"), **found, first: found[kind]}
        return make(**{name: read(found.get(name)) for name, read in fields.items()})
    except (ValueError, TypeError, AttributeError, RecursionError, StopIteration):
        return None


def _task(found: Any) -> Task:
    job, _, index = str(found).rpartition(":")
    if not (job in KNOWN_JOBS and index.isascii() and index.isdigit()):
        raise ValueError(found)
    return Task(job, int(index))


def _number(least: int, limit: int) -> Callable[[Any], int]:
    def read(found: Any) -> int:
        if type(found) is not int or not least <= found < limit:
            raise ValueError
        return found

    return read


def _text(found: Any) -> str:
    if not isinstance(found, str):
        raise TypeError(found)
    return found


def _path(found: Any) -> str:
    if not _text(found):
        raise ValueError(found)
    return str(found)


def _shown(found: Any) -> str:
    return cleaned(found if isinstance(found, str) else "", REASON_LIMIT)


def _seconds(found: Any) -> float | None:
    if isinstance(found, bool) or not isinstance(found, int | float):
        return None
    with contextlib.suppress(OverflowError):
        if math.isfinite(found):
            return float(found)
    return None


def _variables(found: Any) -> dict[str, str | None]:
    return {_text(name): None if value is None else _text(value) for name, value in found.items()}


# 0, 1 and negative numbers of processes mean others to `os.kill`.
_pid, _count = _number(2, 1 << 31), _number(0, _COUNT_LIMIT)

# How a line begins; what it becomes, which of the attributes stands at the beginning, and how each is read.
_KINDS: dict[str, tuple[Callable[..., Message], str, dict[str, Callable[[Any], Any]]]] = {
    "restart": (
        Request,
        "task",
        {"task": _task, "reason": _shown, "pid": lambda found: None if found is None else _pid(found)},
    ),
    "progress": (
        Progress,
        "task",
        {
            "task": _task,
            "pid": _pid,
            "step": _count,
            "phase": lambda found: cleaned(_text(found)),
            "train": bool,
            "done": _count,
            **dict.fromkeys(("seconds_per_step", "own_seconds", "own_input", "own_callbacks"), _seconds),
        },
    ),
    "checkpoint": (
        CheckpointNote,
        "task",
        {"task": _task, "step": _number(-1, _COUNT_LIMIT), "folder": _text},
    ),
    "remove": (RemoveNote, "path", {"path": _path}),
    "connected": (ConnectedNote, "task", {"task": _task}),
    "rendezvous": (RendezvousNote, "task", {"task": _task, "over": bool}),
    "failure": (
        FailureNote,
        "task",
        {"task": _task, "exception": _shown, "lost_peer": bool, "hint": _shown},
    ),
    "imports": (
        ImportsNote,
        "task",
        {"task": _task, "variables": _variables, "later": _variables, "modules": lambda f: [*map(_text, f)]},
    ),
}
