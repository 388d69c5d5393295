"""What the engine does, as typed events, for those who listen: time breakdown, launcher, a run's files.

`emit` calls the listeners at once, in the thread that emits. An event says what has happened; what follows
from it is the listeners' business, so the engine knows none of them.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple


class LoopBegins(NamedTuple):
    """A `fit`, `evaluate` or `predict` begins; `outer` is the one that it runs inside of, or "".

    `step` tells how many steps the optimizer has counted before the first one of this `fit`.
    """

    kind: str
    outer: str
    step: Callable[[], int] | None = None


class LoopEnds(NamedTuple):
    """A `fit`, `evaluate` or `predict` ends, with or without an error."""

    kind: str
    outer: str


class TrainingFrom(NamedTuple):
    """The next training step is the one after `step`, as a checkpoint says."""

    step: int


class InputBegins(NamedTuple):
    """The next batch is being read from `source`, an iterator."""

    source: Any


class StepBegins(NamedTuple):
    """The batch is there, and the step begins."""


class StepsEnd(NamedTuple):
    """Some steps, mostly one, are done.

    Attributes:
        steps: how many.
        train: whether they trained.
        usual: whether their times are usual ones: nothing was traced or compiled for them.
        inside: seconds since `StepBegins` in which batches were read between the steps.
        waiting: seconds in which they waited for other workers; None if that is not measured.
        communication: seconds that they spent on other replicas, `waiting` included; None for `waiting`.
        examples: in their batches, over all workers; None or less than 0 if that is not known.
    """

    steps: int = 1
    train: bool = True
    usual: bool = True
    inside: float = 0.0
    waiting: float | None = None
    communication: float | None = None
    examples: int | None = None


class CallEnds(NamedTuple):
    """The function that `fit` or `evaluate` calls returns, its logs computed.

    Attributes:
        train: whether it trained.
        usual: as in `StepsEnd`, for the whole call.
        communication: seconds that computing the logs spent on the other replicas.
    """

    train: bool
    usual: bool = True
    communication: float = 0.0


class BatchesTaken(NamedTuple):
    """So many more steps train somewhere else, on so many examples (None: not known)."""

    steps: int
    examples: int | None


class BetweenSteps(NamedTuple):
    """`done` steps of the running epoch are done; 0 before its first."""

    done: int


class PartChanges(NamedTuple):
    """From here on, the time is spent on another of `time_breakdown.PARTS`."""

    part: str


class PartBegins(NamedTuple):
    """All that follows is of this part, until `PartEnds`; `doing` says what a launcher is told meanwhile."""

    part: str
    doing: str


class PartEnds(NamedTuple):
    """The end of what the last `PartBegins` began; its seconds are also kept under `name`, if it has one."""

    part: str
    name: str
    seconds: float


class EpochEnds(NamedTuple):
    """An epoch has ended: its entry in `History.time_report`, which may come again, and Keras' logs."""

    record: dict[str, Any]
    logs: dict[str, Any]


class Alarm(NamedTuple):
    """Something that a user should look at.

    Attributes:
        alarm: "nan", "spike" or "slow_checkpoint".
        value: the number that is wrong.
        text: a sentence.
        place: `epoch` and `epoch_step`, or `step`.
    """

    alarm: str
    value: float
    text: str
    place: Mapping[str, int | None]


class CheckpointSaved(NamedTuple):
    """The checkpoint of a step counts from now on; `seconds` is how long training stood still for it."""

    step: int
    seconds: float
    text: str


class Trained(NamedTuple):
    """`fit` has trained to its end, on all workers; its last record is still to come."""

    history: Any


class FitEnds(NamedTuple):
    """`fit` is over: "finished", with what it returns, "interrupted" or "failed"."""

    status: str
    history: Any = None


_PREFIX = "_handle_"
_Handlers = dict[type, list[Callable[[Any], None]]]

_always: _Handlers = {}
_fits: list[_Handlers] = []
_loops: list[str] = []


def emit(event: NamedTuple) -> None:
    """Tells an event to all who listen to its type; nobody need."""
    kind = type(event)
    for handle in _always.get(kind, ()):
        handle(event)
    if _fits:
        for handle in tuple(_fits[-1].get(kind, ())):
            handle(event)


def listen(listener: object) -> None:
    """Calls an object's methods for events until the running `fit` is over.

    A `fit` inside of another has listeners of its own. Outside of any, nothing is listened to.

    Args:
        listener: for each event that it wants it has a method, such as `_handle_steps_end` for `StepsEnd`.
    """
    if _fits:
        _register(listener, _fits[-1])


def listen_always(listener: object) -> None:
    """Like `listen`, as long as the process lives. Who listens first is called first."""
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
    """A `fit`: whoever begins to listen within it hears what is emitted within it, and no longer."""
    handlers: _Handlers = {}
    _fits.append(handlers)
    try:
        yield
    finally:
        _fits.remove(handlers)


@contextlib.contextmanager
def loop(kind: str, step: Callable[[], int] | None = None) -> Iterator[None]:
    """The loop of a `fit`, `evaluate` or `predict`; `step` as in `LoopBegins`."""
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
    """While it lasts, all time is of one part.

    Args:
        part: one of `time_breakdown.PARTS`.
        name: under which its seconds are kept, too.
        doing: the part that a launcher is told, if not this one.
    """
    emit(PartBegins(part, doing or part))
    begun = time.perf_counter()
    try:
        yield
    finally:
        emit(PartEnds(part, name, time.perf_counter() - begun))


def waiting_for_others() -> contextlib.AbstractContextManager[None]:
    """While this process waits for the other workers, between two steps or outside of any."""
    return part("communication")
