"""What this process is doing in `fit`, `evaluate` or `predict`, noted for whoever watches it.

Noting costs well under a microsecond; a thread tells the launcher, if there is one. It judges nothing: what
is a hang and who is slow is the watcher's to say.
"""

from __future__ import annotations

import collections
import contextlib
import faulthandler
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from dtrain import channel

REPORT_SECONDS = 0.2
"""Seconds between two reports while something happens."""

ALIVE_SECONDS = 1.0
"""Seconds between two reports while nothing happens; without them, it is stopped or its GIL held."""

STACKS_SIGNAL = getattr(signal, "SIGUSR2", None)
"""A process that is watched answers this signal with the stacks of all its threads, on standard error."""

_WINDOW_STEPS = 20  # numbers per step are means over as many steps,
_WINDOW_SECONDS = 5.0  # and over as much time,
_LONGEST_WINDOW = 10.0  # or over this
_STDERR = 2


class Totals(NamedTuple):
    """Seconds spent on training steps so far, by kind.

    Attributes:
        steps: how many.
        reading: until the next batch was there.
        stepping: in the step itself, waiting for the other workers included.
        waiting: of that, for the other workers.
        together: in computing the logs, and between steps in waiting for the other workers.
        between: the rest from one step's end to the next one's begin: callbacks.
        measured: whether waiting was measured.
    """

    steps: int = 0
    reading: float = 0.0
    stepping: float = 0.0
    waiting: float = 0.0
    together: float = 0.0
    between: float = 0.0
    measured: bool = False


class _State:
    """Written by the thread that trains, read by the one that reports."""

    __slots__ = (
        "begun",
        "between",
        "done",
        "ended",
        "first_step",
        "kinds",
        "phase",
        "source",
        "step",
        "totals",
        "waited",
    )

    def __init__(self) -> None:
        self.kinds: tuple[str, ...] = ()
        self.phase = "idle"
        self.done = 0  # steps of any kind, in this life
        self.step = 0  # training steps: the optimizer's count, where it is known
        self.first_step = True  # whether `fit` has to say at which step it begins
        self.totals = Totals()
        self.begun = 0.0
        self.ended = 0.0
        self.between = 0.0
        self.waited = 0.0  # of that, in `waiting`
        self.source: Any = None  # of the last batch; another one means that a pause lies between


_now = _State()
_reporter: threading.Thread | None = None
_wake = threading.Event()
_told = (0, 0)  # what `step_done` was last told, and `_now.done` then


def watched() -> bool:
    """Whether there is a launcher that wants to know."""
    return channel.connected()


def begin(kind: str) -> None:
    """`fit`, `evaluate` or `predict` begins, inside another or not."""
    _now.phase = "callbacks" if kind == "fit" else "evaluate"
    _now.kinds = (*_now.kinds, kind)
    _now.source = None
    if kind == "fit":
        _now.first_step = True
    _start()
    _wake.set()


def end() -> None:
    """What began last ends, well or not."""
    train = _now.kinds[-1:] == ("fit",)
    _now.kinds = _now.kinds[:-1]
    _now.phase = "callbacks" if _now.kinds else "idle"
    _now.source = None
    if not _now.kinds and _reporter is not None:
        # At once: it may have ended by an error, and the launcher knows by the step whether it is the same.
        channel.tell_progress(_now.step, "idle", train=train, done=_now.done)
    _wake.set()


def phase(name: str) -> None:
    """What the process does now: "input", "step", "callbacks", "evaluate" or "checkpoint"."""
    _now.phase = name


@contextlib.contextmanager
def waiting() -> Iterator[None]:
    """While this process waits for the other workers, outside of a step too, it is as in a step."""
    before, _now.phase = _now.phase, "step"
    begun = time.perf_counter()
    try:
        yield
    finally:
        _now.waited += time.perf_counter() - begun
        _now.phase = before


def step_done(done: int) -> None:
    """Between two steps: `done` steps of the running epoch are done, 0 before its first.

    It counts those of functions that do not note their steps themselves.
    """
    global _told
    if done > _told[0] and _now.done == _told[1]:
        _now.step += _now.kinds[-1:] == ("fit",)
        _count(1)
    _told = done, _now.done


def needs_step() -> bool:
    """Whether the next training step is the first of its `fit`, so that `training_from` is to be called."""
    return _now.first_step


def training_from(step: int) -> None:
    """The next training step is the one after `step`; where it is not said, steps count from this life's."""
    _now.step = step
    _now.first_step = False


def input_begins(source: Any) -> None:
    """The next batch is being read from an iterator."""
    now = time.perf_counter()
    same = source is _now.source
    _now.waited = _now.waited if same else 0.0
    _now.between = now - _now.ended - _now.waited if same else 0.0
    _now.source = source
    _now.begun = now
    _now.phase = "input"


def step_begins() -> float:
    """The batch is there, and the step begins; returns the seconds that reading took."""
    now = time.perf_counter()
    reading = now - _now.begun
    _now.begun = now
    _now.phase = "step"
    return reading


def step_ends(
    reading: float, waiting: float | None, *, train: bool, usual: bool = True, steps: int = 1
) -> None:
    """Some steps, mostly one, are done.

    Args:
        reading: seconds until their batches were there.
        waiting: seconds in which they waited for other workers; None if that is not measured.
        train: whether they trained.
        usual: whether they count for the usual times; not if they were traced or compiled, too.
        steps: how many.
    """
    now = time.perf_counter()
    if train:
        _now.step += steps
        if usual:
            t = _now.totals
            _now.totals = Totals(
                t.steps + steps,
                t.reading + reading,
                t.stepping + now - _now.begun,
                t.waiting + (waiting or 0.0),
                t.together + _now.waited,
                t.between + _now.between,
                waiting is not None,
            )
    _now.ended = now
    _now.between = _now.waited = 0.0
    _count(steps)


def call_ends(*, train: bool) -> None:
    """The function that `fit` calls returns, its logs computed."""
    now = time.perf_counter()
    if train:
        _now.totals = _now.totals._replace(together=_now.totals.together + now - _now.ended)
    _now.ended = now
    _now.phase = "callbacks"


def _count(steps: int) -> None:
    _now.done += steps
    if _now.done == steps:
        _wake.set()  # the first of this life is told at once


def _start() -> None:
    """Begins to report, once a process; a child that was forked begins anew."""
    global _reporter
    if (_reporter is not None and _reporter.is_alive()) or not watched():
        return
    if STACKS_SIGNAL is not None and signal.getsignal(STACKS_SIGNAL) == signal.SIG_DFL:
        # Into the descriptor itself: a deadlock may hold the lock of the file object, and the GIL.
        faulthandler.register(STACKS_SIGNAL, file=_STDERR, all_threads=True)
    _reporter = threading.Thread(target=_report, name="dtrain-progress", daemon=True)
    _reporter.start()


def _report() -> None:
    usual = _Usual()
    sent: tuple[Any, ...] = ()
    sent_at = -ALIVE_SECONDS
    while True:
        _wake.wait(REPORT_SECONDS)
        _wake.clear()
        kinds = _now.kinds
        found = (_now.step, _now.phase if kinds else "idle", _now.done, kinds[-1:] == ("fit",))
        now = time.monotonic()
        each, own, reading, between = usual.after(now, _now.totals)
        if found == sent and now - sent_at < ALIVE_SECONDS:
            continue
        step, name, done, train = found
        told = channel.tell_progress(
            step,
            name,
            train=train,
            done=done,
            seconds_per_step=each,
            own_seconds=own,
            own_input=reading,
            own_callbacks=between,
        )
        if told:
            sent, sent_at = found, now


class _Usual:
    """Means per step over the last steps: enough of them, or enough time."""

    def __init__(self) -> None:
        self._seen: collections.deque[tuple[float, Totals]] = collections.deque()
        self._known: tuple[float | None, ...] = (None,) * 4

    def after(self, now: float, totals: Totals) -> tuple[float | None, ...]:
        """Seconds a step: all, without waiting, of that reading, and between steps; None where unknown."""
        if not self._seen or totals.steps != self._seen[-1][1].steps:
            self._seen.append((now, totals))
            while len(self._seen) > 1 and self._enough(self._seen[1], now, totals):
                self._seen.popleft()
            if len(self._seen) > 1 and self._enough(self._seen[0], now, totals):
                self._known = _per_step(self._seen[0][1], totals)
        return self._known

    def _enough(self, since: tuple[float, Totals], now: float, totals: Totals) -> bool:
        steps, seconds = totals.steps - since[1].steps, now - since[0]
        return (steps >= _WINDOW_STEPS and seconds >= _WINDOW_SECONDS) or seconds >= _LONGEST_WINDOW


def _per_step(old: Totals, new: Totals) -> tuple[float | None, ...]:
    steps = new.steps - old.steps
    if steps <= 0:
        return (None,) * 4
    reading = (new.reading - old.reading) / steps
    between = (new.between - old.between) / steps
    stepping = (new.stepping - old.stepping) / steps
    together = (new.together - old.together) / steps
    each = reading + between + stepping + together
    if not new.measured:
        return each, None, None, None
    own = max(0.0, each - together - (new.waiting - old.waiting) / steps)
    return each, own, reading, between
