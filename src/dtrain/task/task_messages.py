"""The messages from tasks to their launcher, and the parser of the channel's lines.

A line is a JSON object in which one key is the kind of the message. Any process with the pipe may write to
it, so invalid lines are ignored. Sending and receiving is in `channel`.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dtrain.base.plain_text import cleaned
from dtrain.environments.topology import KNOWN_JOBS, Task

REASON_LIMIT = 500
"""The largest number of characters of a text in a message."""

_COUNT_LIMIT = 1 << 63  # step counts are smaller


@dataclass(frozen=True)
class Request:
    """A request to kill a stuck task; the job's rules then decide whether it is restarted.

    Attributes:
        task: the task to kill.
        reason: what is wrong with the task, for the user.
        pid: the id of the process to kill, so that a newer process of the task is spared; None for any.
    """

    task: Task
    reason: str
    pid: int | None = None


@dataclass(frozen=True)
class Progress:
    """The progress of a task in its `fit`, `evaluate` or `predict`.

    Attributes:
        task: the task.
        pid: the id of its process.
        step: the training steps completed: the optimizer's count, which continues after a checkpoint.
        phase: "input", "step", "callbacks", "evaluate", "checkpoint" or "idle".
        seconds_per_step: the mean duration of a step, including the time between steps; None if too few
            steps are known.
        own_seconds: the part of `seconds_per_step` without waiting for other workers; None if not measured.
        train: whether the task trains; otherwise it evaluates or predicts.
        done: the steps of any kind that this process has completed; if the message has none, it equals
            `step`.
        own_input: the part of `own_seconds` that the task waits for its next batch, or None.
        own_callbacks: the part of `own_seconds` between two steps, which callbacks take, or None.
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
    """A checkpoint was committed, or a task has begun to use a folder of checkpoints.

    A task that sends this message saves a checkpoint when it receives SIGTERM.

    Attributes:
        task: the task that sent the message.
        step: the training step of the checkpoint; -1 if the folder has no checkpoint yet.
        folder: the folder of the checkpoints.
    """

    task: Task
    step: int
    folder: str


@dataclass(frozen=True)
class RemoveNote:
    """A path to delete after the job has succeeded."""

    path: str


@dataclass(frozen=True)
class ConnectedNote:
    """A task has created a strategy that connects it to its peers."""

    task: Task


@dataclass(frozen=True)
class RendezvousNote:
    """A task waits for its peers before training.

    Attributes:
        task: the task.
        over: whether the wait is over because all peers have come.
    """

    task: Task
    over: bool


@dataclass(frozen=True)
class FailureNote:
    """An uncaught exception ends the task's program.

    Attributes:
        task: the task.
        exception: the exception's type and the first line of its message.
        lost_peer: whether the exception shows that a peer is gone.
        hint: what to write in the program instead, or "".
    """

    task: Task
    exception: str
    lost_peer: bool = False
    hint: str = ""


@dataclass(frozen=True)
class ImportsNote:
    """What a task has imported, and the environment variables that it changed; see `task_hooks`.

    Attributes:
        task: the task.
        variables: the library variables that the program changed before TensorFlow's import, with their new
            values; None for a deleted variable.
        later: those that it changed after the import, likewise.
        modules: the imported modules that a spare may import before its program begins.
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
    """The message in a line, or None if the line is invalid."""
    try:
        content = json.loads(line)
        kind = next(kind for kind in _KINDS if kind in content)
        make, first, fields = _KINDS[kind]
        content = {"done": content.get("step"), **content, first: content[kind]}
        return make(**{name: read(content.get(name)) for name, read in fields.items()})
    except (ValueError, TypeError, AttributeError, RecursionError, StopIteration):
        return None


def line_of(message: Message) -> str:
    """The line, without its end, that `parse` makes this message of."""
    kind, first = next((kind, first) for kind, (make, first, _) in _KINDS.items() if make is type(message))
    content = {name: getattr(message, name) for name in _KINDS[kind][2]}
    if "task" in content:
        content["task"] = f"{content['task'].job}:{content['task'].index}"
    return json.dumps({**content, kind: content[first]})


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


# `os.kill` takes 0 and negative ids for process groups, and 1 is the init process.
_pid, _count = _number(2, 1 << 31), _number(0, _COUNT_LIMIT)

# For each kind of line: the message's class, the attribute that is the kind's value, the attributes' parsers.
_KINDS: dict[str, tuple[Callable[..., Message], str, dict[str, Callable[[Any], Any]]]] = {
    "restart": (
        Request,
        "task",
        {"task": _task, "reason": _shown, "pid": lambda value: None if value is None else _pid(value)},
    ),
    "progress": (
        Progress,
        "task",
        {
            "task": _task,
            "pid": _pid,
            "step": _count,
            "phase": lambda value: cleaned(_text(value)),
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
