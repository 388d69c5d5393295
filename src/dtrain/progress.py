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
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from dtrain import channel
from dtrain.time_parts import Ledger

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

    @property
    def seconds(self) -> float:
        """All of it."""
        return self.reading + self.stepping + self.together + self.between


class Examples(NamedTuple):
    """Examples that training has seen: those that were counted, and how many steps did not say.

    They are those of the whole job's steps, in this process' life.
    """

    counted: int = 0
    unsaid: int = 0

    def since(self, earlier: Examples) -> int | None:
        """How many came since; None if a step did not say."""
        return self.counted - earlier.counted if self.unsaid == earlier.unsaid else None

    def more(self, examples: int | None) -> Examples:
        """With those of further steps; None or less than 0 where that is not known."""
        if examples is None or examples < 0:
            return Examples(self.counted, self.unsaid + 1)
        return Examples(self.counted + examples, self.unsaid)

    def without(self, others: Examples) -> Examples:
        """These, but for others."""
        return Examples(self.counted - others.counted, self.unsaid - others.unsaid)


class Traced(NamedTuple):
    """Training steps in whose calls something was traced or compiled: their times tell nothing of others.

    Attributes:
        steps: how many.
        examples: that they saw.
        reading: seconds until their batches were there. All else that they took is counted as `start`.
    """

    steps: int = 0
    examples: Examples = Examples()
    reading: float = 0.0


class _State:
    """Written by the thread that trains, read by the one that reports."""

    __slots__ = (
        "begun",
        "between",
        "counted",
        "done",
        "ended",
        "examples",
        "first_step",
        "kinds",
        "phase",
        "source",
        "step",
        "totals",
        "traced",
        "trained",
        "waited",
    )

    def __init__(self) -> None:
        self.kinds: tuple[str, ...] = ()
        self.phase = "idle"
        self.done = 0  # steps of any kind, in this life
        self.step = 0  # training steps: the optimizer's count, where it is known
        self.trained = 0  # training steps, in this life
        self.examples = Examples()
        self.traced = Traced()  # of these steps and examples
        self.counted = ledger.seconds()  # when the newest steps, or what follows them, began
        self.first_step = True  # whether `fit` has to say at which step it begins
        self.totals = Totals()
        self.begun = 0.0
        self.ended = 0.0
        self.between = 0.0
        self.waited = 0.0  # of that, in `waiting`
        self.source: Any = None  # of the last batch; another one means that a pause lies between


ledger = Ledger()
"""Where the time of the thread that trains goes."""

_PARTS = {"input": "input", "step": "compute", "callbacks": "callbacks", "checkpoint": "checkpoint"}

_now = _State()
_outer: list[tuple[int, Examples, Traced]] = []  # what was counted when each of `_now.kinds` began
_reporter: threading.Thread | None = None
_wake = threading.Event()
_looks: Callable[[], bool] | None = None
_told = (0, 0)  # what `step_done` was last told, and `_now.done` then


def totals() -> Totals:
    """What training steps have taken so far in this process."""
    return _now.totals


def examples() -> Examples:
    """What this job was trained on."""
    return _now.examples


def trained() -> int:
    """How many training steps were made in this process' life."""
    return _now.trained


def traced() -> Traced:
    """Of `trained` and `examples`: the steps in whose calls something was traced."""
    return _now.traced


def nested() -> bool:
    """Whether a `fit`, `evaluate` or `predict` goes on."""
    return bool(_now.kinds)


def watched() -> bool:
    """Whether there is a launcher that wants to know."""
    return channel.connected()


def begin(kind: str) -> None:
    """`fit`, `evaluate` or `predict` begins, inside another or not."""
    _now.phase = "callbacks" if kind == "fit" else "evaluate"
    if not _now.kinds:
        ledger.take_over()
        ledger.enter("start" if kind == "fit" else "other")
    else:
        ledger.pin("validation")
    _outer.append((_now.trained, _now.examples, _now.traced))
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
    counted = _outer.pop() if _outer else None
    if _now.kinds:
        ledger.unpin()
        if counted is not None:  # what a `fit` inside of another did is none of the other's
            _now.trained, _now.examples, _now.traced = counted
    else:
        ledger.enter("other")
    if not _now.kinds and _reporter is not None:
        # At once: it may have ended by an error, and the launcher knows by the step whether it is the same.
        channel.tell_progress(_now.step, "idle", train=train, done=_now.done)
    _wake.set()


def phase(name: str) -> None:
    """What the process does now: "input", "step", "callbacks", "evaluate" or "checkpoint"."""
    _now.phase = name
    part = _PARTS.get(name)
    if part is not None:
        ledger.enter(part)


@contextlib.contextmanager
def waiting() -> Iterator[None]:
    """While this process waits for the other workers, outside of a step too, it is as in a step."""
    before, _now.phase = _now.phase, "step"
    begun = time.perf_counter()
    part = ledger.enter("communication")
    try:
        yield
    finally:
        _now.waited += time.perf_counter() - begun
        _now.phase = before
        ledger.enter(part)


def note_batches(steps: int, examples: int | None) -> None:
    """So many more steps train, on so many examples; None or less than 0 where that is not known."""
    _now.trained += steps
    _now.examples = _now.examples.more(examples)


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
    _now.counted = ledger.seconds()
    same = source is _now.source
    _now.waited = _now.waited if same else 0.0
    _now.between = now - _now.ended - _now.waited if same else 0.0
    _now.source = source
    _now.begun = now
    _now.phase = "input"
    ledger.enter("input")


def step_begins() -> float:
    """The batch is there, and the step begins; returns the seconds that reading took."""
    now = time.perf_counter()
    reading = now - _now.begun
    _now.begun = now
    _now.phase = "step"
    ledger.enter("compute")
    return reading


@contextlib.contextmanager
def tracing() -> Iterator[None]:
    """While a program is traced apart from the step that it is for."""
    part, before = ledger.enter("start"), _now.phase
    _now.phase = "step"
    try:
        yield
    finally:
        _now.phase = before
        ledger.enter(part)


def reading_seen_by(look: Callable[[], bool] | None) -> None:
    """How the reporter sees whether steps of one call wait for a batch now; None for no way."""
    global _looks
    _looks = look


def step_ends(
    reading: float,
    waiting: float | None,
    *,
    train: bool,
    usual: bool = True,
    steps: int = 1,
    inside: float = 0.0,
    communication: float | None = None,
    examples: int | None = None,
) -> None:
    """Some steps, mostly one, are done.

    Args:
        reading: seconds until their batches were there.
        waiting: seconds in which they waited for other workers; None if that is not measured.
        train: whether they trained.
        usual: whether they count for the usual times; not if something was traced or compiled for them, too.
        steps: how many.
        inside: of the reading, seconds that passed since `step_begins`: batches were read between steps.
        communication: seconds that they spent on other replicas, the waiting included; None for as long as
            they waited.
        examples: in their batches, over all workers; None if that is not known.
    """
    now = time.perf_counter()
    _note_parts(inside, (waiting or 0.0) if communication is None else communication, usual)
    if train:
        _now.step += steps
        note_batches(steps, examples)
        if not usual:
            found = _now.traced
            read = ledger.seconds()["input"] - _now.counted["input"]
            _now.traced = Traced(found.steps + steps, found.examples.more(examples), found.reading + read)
        else:
            t = _now.totals
            _now.totals = Totals(
                t.steps + steps,
                t.reading + reading,
                t.stepping + now - _now.begun - inside,
                t.waiting + (waiting or 0.0),
                t.together + _now.waited,
                t.between + _now.between,
                waiting is not None,
            )
    _now.ended = now
    _now.between = _now.waited = 0.0
    _now.counted = ledger.seconds()
    _count(steps)


def _note_parts(inside: float, communication: float, usual: bool) -> None:
    """Says of what a step took which part was not computing."""
    ledger.enter("compute")
    ledger.move("compute", "input", inside, since=_now.counted)
    if usual:
        ledger.move("compute", "communication", communication, since=_now.counted)
    else:
        _count_as_start()


def _count_as_start() -> None:
    """Nothing of the newest steps but their reading was usual; nor the waiting: others traced, too."""
    for part in ("compute", "communication"):
        ledger.move(part, "start", since=_now.counted)


def call_ends(*, train: bool, communication: float = 0.0, usual: bool = True) -> None:
    """The function that `fit` calls returns, its logs computed.

    Args:
        train: whether it trained.
        communication: seconds that computing the logs spent on the other replicas.
        usual: as in `step_ends`, for the whole call.
    """
    now = time.perf_counter()
    ledger.enter("callbacks")
    if usual:
        ledger.move("compute", "communication", communication, since=_now.counted)
    else:
        _count_as_start()
    if train and usual:
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


def _phase() -> str:
    look = _looks
    if look is None or _now.phase != "step":
        return _now.phase
    return "input" if look() else "step"


def _report() -> None:
    usual = _Usual()
    sent: tuple[Any, ...] = ()
    sent_at = -ALIVE_SECONDS
    while True:
        _wake.wait(REPORT_SECONDS)
        _wake.clear()
        kinds = _now.kinds
        found = (_now.step, _phase() if kinds else "idle", _now.done, kinds[-1:] == ("fit",))
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
                self._known = per_step(self._seen[0][1], totals)
        return self._known

    def _enough(self, since: tuple[float, Totals], now: float, totals: Totals) -> bool:
        steps, seconds = totals.steps - since[1].steps, now - since[0]
        return (steps >= _WINDOW_STEPS and seconds >= _WINDOW_SECONDS) or seconds >= _LONGEST_WINDOW


def per_step(old: Totals, new: Totals) -> tuple[float | None, ...]:
    """Seconds a step between two totals: all, without waiting, of that reading, and in callbacks.

    None for what is not known.
    """
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
