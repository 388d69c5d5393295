"""The messages from tasks to their launcher: the dataclasses are the schema of the channel's lines.

A line is a message as a JSON object. Any process with the pipe may write to it, so invalid lines are ignored.
Sending and receiving is in `channel`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated

from dtrain.base.json_messages import Malformed, from_json, load
from dtrain.base.plain_text import cleaned
from dtrain.environments.topology import Task

REASON_LIMIT = 500
"""The largest number of characters of a text in a message."""

_Shown = Annotated[str, partial(cleaned, limit=REASON_LIMIT)]
_Pid = Annotated[int, range(2, 1 << 31)]  # `os.kill` takes 0 and less for process groups; 1 is init
_Count = Annotated[int, range(1 << 63)]


def _nonempty(text: str) -> str:
    if not text:
        raise ValueError
    return text


@dataclass(frozen=True)
class Request:
    """A request to kill a stuck task; the job's rules then decide whether it is restarted.

    Attributes:
        task: the task to kill.
        pid: the id of the process to kill, so that a newer process of the task is spared; None for any. It
            has no default, so that a wrong id is not taken for None.
        reason: what is wrong with the task, for the user.
    """

    task: Task
    pid: _Pid | None
    reason: _Shown = ""


@dataclass(frozen=True)
class Progress:
    """The progress of a task in its `fit`, `evaluate` or `predict`.

    Attributes:
        task: the task.
        pid: the id of its process.
        step: the training steps completed: the optimizer's count, which continues after a checkpoint.
        phase: "input", "step", "callbacks", "evaluate", "checkpoint" or "idle".
        done: the steps of any kind that this process has completed.
        train: whether the task trains; otherwise it evaluates or predicts.
        seconds_per_step: the mean duration of a step, including the time between steps; None if too few
            steps are known.
        own_seconds: the part of `seconds_per_step` without waiting for other workers; None if not measured.
        own_input: the part of `own_seconds` that the task waits for its next batch, or None.
        own_callbacks: the part of `own_seconds` between two steps, which callbacks take, or None.
    """

    task: Task
    pid: _Pid
    step: _Count
    phase: Annotated[str, cleaned]
    done: _Count
    train: bool = False
    seconds_per_step: float | None = None
    own_seconds: float | None = None
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
    step: Annotated[int, range(-1, 1 << 63)]
    folder: str


@dataclass(frozen=True)
class RemoveNote:
    """A path to delete after the job has succeeded."""

    path: Annotated[str, _nonempty]


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
    over: bool = False


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
    exception: _Shown = ""
    lost_peer: bool = False
    hint: _Shown = ""


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
        return from_json(load(line), Message, tolerant=True)
    except Malformed:
        return None
