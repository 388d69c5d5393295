"""The engine's typed events, and their delivery to listeners such as the training clock and a run's files.

`emit` calls the listeners synchronously, in the emitting thread. An event only says what has happened. The
engine does not know the listeners, and this module reacts to no event itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

PARTS = (
    "input",
    "compute",
    "communication",
    "checkpoint",
    "callbacks",
    "validation",
    "start",
    "other",
)
"""The parts of the wall time; every moment of training belongs to one of them.

`input`: waiting for batches. `compute`: the steps themselves. `communication`: communication with other
replicas, including waiting for them. `checkpoint`: the time for which saving blocks training. `callbacks`:
other callbacks, and Keras' loop. `validation`: the evaluations of `fit`. `start`: building, tracing and
compiling. `other`: outside of `fit`.
"""


class LoopBegins(NamedTuple):
    """A loop begins.

    Attributes:
        kind: "fit", "evaluate" or "predict".
        outer: the kind of the loop that this one runs inside of, or "".
        step: returns the optimizer's step count before the first step of this `fit`; None for other loops.
    """

    kind: str
    outer: str
    step: Callable[[], int] | None = None


class LoopEnds(NamedTuple):
    """A loop ends, with or without an error; the attributes are those of `LoopBegins`."""

    kind: str
    outer: str


class TrainingResumes(NamedTuple):
    """Training resumes from a checkpoint.

    Attributes:
        step: the number of steps that are done, in all epochs; the next one is `step` + 1.
        done: how many of them belong to the epoch in which training resumes.
    """

    step: int
    done: int = 0


class InputBegins(NamedTuple):
    """The engine begins to read the next batch from `source`, an iterator."""

    source: Any


class StepBegins(NamedTuple):
    """The batch was read, and the step begins."""


class StepsEnd(NamedTuple):
    """One or more steps are done.

    Attributes:
        steps: the number of steps.
        train: whether they were training steps.
        usual: whether their times are typical: nothing was traced or compiled for them.
        inside: the seconds since `StepBegins` that went into reading batches between the steps; None if
            that is not measured.
        waiting: the seconds that the steps waited for other workers; None if that is not measured.
        communication: the seconds that the steps spent on communication with other replicas, including
            `waiting`; None means the same as `waiting`.
        examples: the number of examples in the steps' batches, over all workers; None or a negative number
            if unknown.
    """

    steps: int = 1
    train: bool = True
    usual: bool = True
    inside: float | None = 0.0
    waiting: float | None = None
    communication: float | None = None
    examples: int | None = None


class StepDivided(NamedTuple):
    """A step that is divided over replicas was traced, and has run once.

    Attributes:
        train: whether it is the train step.
        describe: returns what the replicas communicate in it, as plain data
            (`engine.step.step_plan.as_record`).
    """

    train: bool
    describe: Callable[[], dict[str, Any]]


class CallEnds(NamedTuple):
    """The train or test function that `fit` or `evaluate` calls has returned its logs.

    Attributes:
        train: whether it was the train function.
        usual: as in `StepsEnd`, for the whole call.
        communication: the seconds that computing the logs spent on communication with other replicas.
    """

    train: bool
    usual: bool = True
    communication: float = 0.0


class BatchesTaken(NamedTuple):
    """Batches were given to other processes, the workers of parameter servers, which train on them.

    Attributes:
        steps: the number of steps, one per batch.
        examples: the number of examples in the batches; None if unknown.
    """

    steps: int
    examples: int | None


class BetweenSteps(NamedTuple):
    """The loop is between two steps; `done` steps of the running epoch are done, 0 before the first."""

    done: int


class PartChanges(NamedTuple):
    """From now on, time belongs to another of `PARTS`."""

    part: str


class PartBegins(NamedTuple):
    """All time until the matching `PartEnds` belongs to one part, whatever begins within it.

    Attributes:
        part: one of `PARTS`.
        doing: the part from which the launcher's progress reports take the phase meanwhile.
    """

    part: str
    doing: str


class PartEnds(NamedTuple):
    """The part of the last `PartBegins` ends.

    Attributes:
        part: one of `PARTS`.
        name: a name under which the seconds are recorded as well, or "".
    """

    part: str
    name: str


class EpochEnds(NamedTuple):
    """An epoch has ended.

    Attributes:
        record: the epoch's entry in `History.time_report`. The event may be emitted again for one epoch.
        logs: Keras' logs.
    """

    record: dict[str, Any]
    logs: dict[str, Any]


class Alarm(NamedTuple):
    """Something that the user should look at.

    Attributes:
        alarm: "nan", "spike" or "slow_checkpoint".
        value: the number that raised the alarm.
        text: the alarm in a sentence.
        place: when it happened: `epoch` and `epoch_step`, or `step`.
    """

    alarm: str
    value: float
    text: str
    place: Mapping[str, int | None]


class CheckpointSaved(NamedTuple):
    """A checkpoint was committed.

    Attributes:
        step: the training step that it holds.
        seconds: how long training was blocked by saving.
        text: the checkpoint in words.
    """

    step: int
    seconds: float
    text: str


class TrainingEnds(NamedTuple):
    """`fit` has trained all epochs on all workers; the last epoch's record may be emitted once more."""

    history: Any


class FitEnds(NamedTuple):
    """`fit` is over.

    Attributes:
        status: "finished", "interrupted" or "failed".
        history: what `fit` returns, if it has finished.
    """

    status: str
    history: Any = None


_PREFIX = "_handle_"
_Handlers = dict[type, list[Callable[[Any], None]]]

_always: _Handlers = {}
_fits: list[_Handlers] = []
_loops: list[str] = []


def emit(event: NamedTuple) -> None:
    """Call all listeners of the event's type, if there are any."""
    kind = type(event)
    for handle in _always.get(kind, ()):
        handle(event)
    if _fits:
        for handle in tuple(_fits[-1].get(kind, ())):
            handle(event)


def listen(listener: object) -> None:
    """Register a listener until the running `fit` is over.

    A `fit` inside of another has its own listeners. Outside of any `fit`, this call has no effect.

    Args:
        listener: an object with one method for each event that it handles, such as `_handle_steps_end` for
            `StepsEnd`.
    """
    if _fits:
        _register(listener, _fits[-1])


def listen_always(listener: object) -> None:
    """Register a listener until the process ends. Listeners are called in the order of registration."""
    _register(listener, _always)


def _register(listener: object, handlers: _Handlers) -> None:
    for name in dir(listener):
        if name.startswith(_PREFIX):
            kind = globals()[name.removeprefix(_PREFIX).title().replace("_", "")]
            handle = getattr(listener, name)
            if handle not in handlers.setdefault(kind, []):
                handlers[kind].append(handle)


@contextlib.contextmanager
def one_fit() -> Iterator[None]:
    """The scope of one `fit`: a listener registered inside it is removed when the scope ends."""
    handlers: _Handlers = {}
    _fits.append(handlers)
    try:
        yield
    finally:
        _fits.remove(handlers)


@contextlib.contextmanager
def loop(kind: str, step: Callable[[], int] | None = None) -> Iterator[None]:
    """The scope of one loop: emits `LoopBegins` and `LoopEnds`, whose attributes are the arguments."""
    outer = _loops[-1] if _loops else ""
    _loops.append(kind)
    emit(LoopBegins(kind, outer, step))
    try:
        yield
    finally:
        _loops.pop()
        emit(LoopEnds(kind, outer))


def in_loop() -> bool:
    """Whether a `fit`, `evaluate` or `predict` is running."""
    return bool(_loops)


@contextlib.contextmanager
def part(part: str, name: str = "", *, doing: str = "") -> Iterator[None]:
    """A scope whose whole time belongs to one part: emits `PartBegins` and `PartEnds`.

    Args:
        part: one of `PARTS`.
        name: a name under which the seconds are recorded as well, or "".
        doing: the part that progress reports show instead of this one, or "".
    """
    emit(PartBegins(part, doing or part))
    try:
        yield
    finally:
        emit(PartEnds(part, name))


def waiting_for_others() -> contextlib.AbstractContextManager[None]:
    """A scope in which this process waits for the other workers, between two steps or outside of steps."""
    return part("communication")
