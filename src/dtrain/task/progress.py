"""Reports to the launcher, if there is one, what this process is doing in `fit`, `evaluate` or `predict`.

A separate thread sends the reports, so the training thread only counts. The launcher, not this module,
decides which task hangs or is slow.
"""

from __future__ import annotations

import collections
import faulthandler
import signal
import threading
from collections.abc import Callable
from typing import Any

from dtrain.task import channel
from dtrain.telemetry import events
from dtrain.telemetry.training_clock import Totals, TrainingClock, clock

REPORT_SECONDS = 0.2
"""Seconds between two reports while there is progress."""

ALIVE_SECONDS = 1.0
"""Seconds between two reports without progress. A process that sends none is stopped, or its GIL is held."""

STACKS_SIGNAL = getattr(signal, "SIGUSR2", None)
"""On this signal, a process that reports its progress dumps all its threads' stacks to standard error."""

# A mean covers at least `_WINDOW_STEPS` steps and `_WINDOW_SECONDS`, or else `_LONGEST_WINDOW` seconds.
_WINDOW_STEPS = 20
_WINDOW_SECONDS = 5.0
_LONGEST_WINDOW = 10.0
_STDERR = 2
_PHASES = {
    "input": "input",
    "compute": "step",
    "communication": "step",
    "validation": "evaluate",
    "checkpoint": "checkpoint",
}
"""The reported phase for each part of the time; "callbacks" for all other parts."""


class ProgressReporter:
    """The progress of this process: the training thread records it, and a second thread sends it.

    Args:
        clock: knows which part of the time the process is in, how long the steps take, and the time.

    Attributes:
        step: the training step: the optimizer's count, if it is known.
        done: the steps of any kind that this process has completed.
        reads: tells whether the steps of the running call wait for a batch now; None if unknown.
    """

    def __init__(self, clock: TrainingClock) -> None:
        self.step = self.done = 0
        self.reads: Callable[[], bool] | None = None
        self._clock = clock
        self._kind = ""  # the kind of the innermost running loop
        self._first_step: Callable[[], int] | None = None  # as in `LoopBegins`; None once called
        self._between = (0, 0)  # the count of the last `BetweenSteps` event, and `self.done` at that time
        self._thread: threading.Thread | None = None
        self._wake = threading.Event()
        self._means = StepMeans()
        self._sent: tuple[Any, ...] = ()
        self._sent_at = 0.0

    @property
    def phase(self) -> str:
        """The present phase: "input", "step", "callbacks", "evaluate", "checkpoint" or "idle"."""
        if not self._kind:
            return "idle"
        phase = _PHASES.get(self._clock.doing, "callbacks")
        return "input" if phase == "step" and self.reads is not None and self.reads() else phase

    def _handle_loop_begins(self, event: events.LoopBegins) -> None:
        self._kind = event.kind
        if event.kind == "fit":
            self._first_step = event.step
        self._start()
        self._wake.set()

    def _handle_loop_ends(self, event: events.LoopEnds) -> None:
        self._kind = event.outer
        if not event.outer and self._thread is not None:
            # Send now: the loop may have ended by an error, and the launcher compares the steps of failures.
            channel.report_progress(self.step, "idle", train=event.kind == "fit", done=self.done)
        self._wake.set()

    def _handle_training_resumes(self, event: events.TrainingResumes) -> None:
        self.step, self._first_step = event.step, None

    def _handle_input_begins(self, event: events.InputBegins) -> None:
        if self._first_step is not None and self._kind == "fit":
            self.step = self._first_step() if channel.connected() else 0
            self._first_step = None

    def _handle_steps_end(self, event: events.StepsEnd) -> None:
        self._count(event.steps, train=event.train)

    def _handle_between_steps(self, event: events.BetweenSteps) -> None:
        """Count a step of a train or test function that does not emit `StepsEnd` itself."""
        if event.done > self._between[0] and self.done == self._between[1]:
            self._count(1, train=self._kind == "fit")
        self._between = event.done, self.done

    def _count(self, steps: int, *, train: bool) -> None:
        self.step += steps if train else 0
        self.done += steps
        if self.done == steps:
            self._wake.set()  # report the first step of this process at once

    def _start(self) -> None:
        """Start the reporting thread, once per process; a forked child starts its own."""
        if (self._thread is not None and self._thread.is_alive()) or not channel.connected():
            return
        if STACKS_SIGNAL is not None and signal.getsignal(STACKS_SIGNAL) == signal.SIG_DFL:
            # Write to the descriptor directly: a deadlock may hold the file object's lock and the GIL.
            faulthandler.register(STACKS_SIGNAL, file=_STDERR, all_threads=True)
        self._thread = threading.Thread(target=self._report, name="dtrain-progress", daemon=True)
        self._thread.start()

    def _report(self) -> None:
        while True:
            self._wake.wait(REPORT_SECONDS)
            self._wake.clear()
            self.report()

    def report(self) -> None:
        """Sends a report if there is progress, or if the last one is `ALIVE_SECONDS` old."""
        state = step, phase, done, train = self.step, self.phase, self.done, self._kind == "fit"
        now = self._clock.now()
        per_step, own, reading, between = self._means.after(now, self._clock.totals)
        if state == self._sent and now - self._sent_at < ALIVE_SECONDS:
            return
        if channel.report_progress(
            step,
            phase,
            train=train,
            done=done,
            seconds_per_step=per_step,
            own_seconds=own,
            own_input=reading,
            own_callbacks=between,
        ):
            self._sent, self._sent_at = state, now


class StepMeans:
    """Means per step over a window of the most recent steps."""

    def __init__(self) -> None:
        self._seen: collections.deque[tuple[float, Totals]] = collections.deque()
        self._known: tuple[float | None, ...] = (None,) * 4

    def after(self, now: float, totals: Totals) -> tuple[float | None, ...]:
        """The means of `Totals.per_step` over the most recent window; None where unknown.

        Args:
            now: the time in seconds.
            totals: the present totals.
        """
        if not self._seen or totals.steps != self._seen[-1][1].steps:
            self._seen.append((now, totals))
            while len(self._seen) > 1 and self._enough(self._seen[1], now, totals):
                self._seen.popleft()
            if len(self._seen) > 1 and self._enough(self._seen[0], now, totals):
                self._known = totals.per_step(self._seen[0][1])
        return self._known

    def _enough(self, since: tuple[float, Totals], now: float, totals: Totals) -> bool:
        steps, seconds = totals.steps - since[1].steps, now - since[0]
        return (steps >= _WINDOW_STEPS and seconds >= _WINDOW_SECONDS) or seconds >= _LONGEST_WINDOW


reporter = ProgressReporter(clock)
"""The reporter of this process."""

events.listen_always(reporter)
