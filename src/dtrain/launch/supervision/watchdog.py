"""Finds the task that blocks a synchronous job, or slows it down, from the progress that the tasks report.

It names the task and the reason. `synchronous` decides what happens to the task.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from dtrain.base.clock import REAL, Clock, RunClock
from dtrain.environments.topology import Task
from dtrain.task.task_messages import Progress
from dtrain.telemetry.training_clock import in_words, is_slow, slow_line

START_LIMIT = 600.0
"""Seconds without progress that are no hang before the first step, which is traced and compiled."""

LEAST_LIMIT = 30.0
"""Seconds without progress that are never a hang, unless the user sets a shorter `hang_timeout`."""

_STEPS = 10.0  # the limit is at least this many times the usual duration of a step
_PAUSES = 2.0  # and at least this many times the longest pause after which the job continued
_SILENT = 3.0  # seconds without a report, due every second, after which a process counts as silent
_CHECK = 1.0  # seconds between two checks
_SUSTAINED = 6.0  # seconds that a task must stay slow; longer than the window of the reported mean
_RECOVERED = 2.0  # a slow task has recovered when it takes less than this many times the others' time
_RECOVERY = 30.0  # for this many seconds; only then can it be reported as slow again

_PHASES = {
    "input": "it waits for its next batch",
    "step": "it is in a step",
    "callbacks": "it is in a callback",
    "evaluate": "it begins an evaluation",
    "checkpoint": "it writes a checkpoint",
    "idle": "it is outside of fit",
}


@dataclass(frozen=True)
class Diagnosis:
    """A task that blocks or slows the job.

    Attributes:
        kind: "hung" if the whole job makes no progress because of the task, or "slow".
        task: the task that causes it.
        line: the line to show to the user.
    """

    kind: Literal["hung", "slow"]
    task: Task
    line: str


@dataclass
class _Record:
    """What one process of a task has reported; all times are on the watchdog's `RunClock`."""

    last: Progress
    heard: float  # when it last sent a report
    moved: float  # when it last reported new progress
    begun: float | None  # when it entered `fit`, `evaluate` or `predict`; None once it has completed a step
    slow_since: float | None = None  # since when every check has found it slow
    slow_at: float | None = None  # after it was reported as slow: when it was last seen to be slow

    @property
    def inside(self) -> bool:
        return self.last.phase != "idle"

    @property
    def started(self) -> bool:
        return self.last.done > 0


class Watchdog:
    """Detects hung and slow tasks from the progress of all tasks.

    A job hangs if no task has made progress for a time limit while at least one task is inside `fit`,
    `evaluate` or `predict`. The limit is `hang_timeout`, or by default the longest of 30 s, 10 usual steps,
    and twice the longest pause after which the job continued, its first step included. While a task has not
    completed its first step, or is outside of `fit` while others wait for it, the limit is at least 600 s and
    at least 10 times the longest first step; this does not apply if a task's process is stopped. Jobs with
    parameter servers are not watched: their workers' steps do not wait for each other. Only the time counts
    in which the launcher ran (`RunClock`): it has read no report in any other.

    Args:
        hang_timeout: the limit in seconds, or None for the default.
        clock: on which these limits are.
        stopped: tells whether a task's process is stopped by a signal, given the process id that the task
            reported; None if nobody can tell.
    """

    def __init__(
        self,
        hang_timeout: float | None,
        clock: Clock = REAL,
        stopped: Callable[[Task, int], bool] | None = None,
    ) -> None:
        self._given = hang_timeout
        self._clock = clock
        self._running = RunClock(clock, _CHECK)
        self._stopped = stopped or (lambda task, pid: False)
        self._records: dict[Task, _Record] = {}
        self._ended: list[Task] = []
        self._moved = 0.0  # when the job last made progress, by `_running`
        self._checked = 0.0
        self._longest_pause = 0.0
        self._longest_start = 0.0
        self._judged = False  # whether the present hang was reported

    def on_start(self, task: Task, pid: int) -> None:
        """A task was started, perhaps again: forget what its earlier process reported."""
        self._records.pop(task, None)
        if task in self._ended:
            self._ended.remove(task)
        self._rest()

    def on_exit(self, task: Task) -> None:
        """A task has ended."""
        if self._records.pop(task, None) is not None:
            self._ended.append(task)

    def on_progress(self, progress: Progress) -> None:
        """A task has reported its progress."""
        now = self._running.now()
        watching = self._watching()
        record = self._records.get(progress.task)
        if record is None or record.last.pid != progress.pid:
            # The id can also change because the started program runs the training in a child process.
            record = self._records[progress.task] = _Record(progress, now, now, None)
        elif not _moved(record.last, progress):
            record.last, record.heard = progress, now
            return
        record.last, record.heard, record.moved = progress, now, now
        self._note_start(record, now)
        self._job_moved(now, watching)

    def next_check(self) -> float | None:
        """When to call `check` next, on the clock; None while no task is inside `fit`."""
        if not self._watching():
            return None
        due = self._checked + _CHECK
        now = self._running.now()
        deadline = self._clock.now() + self._moved + self._limit(now) - now
        return due if self._judged else min(due, max(deadline, self._checked + 0.01))

    def check(self) -> Diagnosis | None:
        """The hung or slow task, if any. Each hang is reported once; a slow task once until it recovers."""
        self._look()
        if not self._watching():
            self._rest()
            return None
        now = self._running.now()
        if not self._judged and now - self._moved >= self._limit(now):
            self._judged = True
            return self._hung(now)
        return self._slow(now)

    def _note_start(self, record: _Record, now: float) -> None:
        if record.started and record.begun is not None:
            self._longest_start = max(self._longest_start, now - record.begun)
        if record.started or not record.inside:
            record.begun = None
        elif record.begun is None:
            record.begun = now

    def _job_moved(self, now: float, watching: bool) -> None:
        if watching:
            self._longest_pause = max(self._longest_pause, now - self._moved)
        else:
            self._look()
        self._moved = now
        self._judged = False

    def _rest(self) -> None:
        self._look()
        self._moved = self._running.now()
        self._judged = False

    def _look(self) -> None:
        self._running.check()
        self._checked = self._clock.now()

    def _watching(self) -> bool:
        return any(record.inside for record in self._records.values())

    def _limit(self, now: float) -> float:
        """The seconds without progress that count as a hang in the present state."""
        usual = [seconds for r in self._records.values() if (seconds := r.last.seconds_per_step) is not None]
        limit = self._given
        if limit is None:
            step = statistics.median(usual) if usual else 0.0
            limit = max(LEAST_LIMIT, _STEPS * step, _PAUSES * self._longest_pause)
        records = self._records.values()
        if all(r.inside and r.started for r in records) or any(self._dead(r, now) for r in records):
            return limit
        return max(limit, START_LIMIT, _STEPS * self._longest_start)

    def _dead(self, record: _Record, now: float) -> bool:
        return now - record.heard > _SILENT and self._stopped(record.last.task, record.last.pid)

    def _hung(self, now: float) -> Diagnosis:
        task, why = self._culprit(now)
        record = self._records[task]
        usual = record.last.seconds_per_step
        line = (
            f"{task} has made no progress for {in_words(now - record.moved)}: {why}, "
            f"{'last heard of ' if now - record.heard > _SILENT else ''}at step {record.last.step}"
            f"{_after_start(record)}"
            f"{'' if usual is None else f'; usual step {in_words(usual)}'}"
        )
        return Diagnosis("hung", task, line)

    def _culprit(self, now: float) -> tuple[Task, str]:
        """The task that the others wait for, and what that task is doing."""
        everyone = dict(sorted(self._records.items(), key=lambda item: (item[0].job, item[0].index)))
        for task, record in everyone.items():
            if self._dead(record, now):  # one that is stopped for a moment reports again soon
                return task, "its process is stopped (SIGSTOP)"
        silent = [task for task, record in everyone.items() if now - record.heard > _SILENT]
        if len(silent) == 1 or (silent and len(silent) < len(everyone)):
            return silent[0], "its process does not answer, as if one thread held Python's lock for ever"
        apart = [task for task, record in everyone.items() if record.last.phase != "step"]
        if len(apart) == 1:
            record = everyone[apart[0]]
            others = " while the others wait for it" if len(everyone) > 1 else ""
            return apart[0], _PHASES.get(record.last.phase, f"it is at {record.last.phase!r}") + others
        if len(everyone) == 1:
            return next(iter(everyone)), "it is in a step, or reading its data"
        among = {task: everyone[task] for task in apart} or everyone
        return self._behind(among, everyone)

    def _behind(self, among: dict[Task, _Record], everyone: dict[Task, _Record]) -> tuple[Task, str]:
        lowest = min(record.last.step for record in among.values())
        behind = [task for task, record in among.items() if record.last.step == lowest]
        task = behind[0]
        phase = _PHASES.get(among[task].last.phase, "")
        if len(behind) < len(among) or len(among) < len(everyone):
            return task, f"{phase} while others wait"
        phases = ", ".join(f"{task} {_PHASES.get(r.last.phase, '')[3:]}" for task, r in everyone.items())
        gone = f"; {', '.join(map(str, self._ended))} ended before" if self._ended else ""
        return task, f"no worker has, and the log does not show which one is the cause ({phases}{gone})"

    def _slow(self, now: float) -> Diagnosis | None:
        own = {
            task: record.last.own_seconds
            for task, record in self._records.items()
            if record.last.train and record.last.own_seconds is not None
        }
        for task, mine in own.items():
            record = self._records[task]
            others = [seconds for other, seconds in own.items() if other != task]
            if not others:
                return None
            usual = statistics.median(others)
            if record.slow_at is not None:
                if mine >= _RECOVERED * usual:
                    record.slow_at = now
                elif now - record.slow_at > _RECOVERY:
                    record.slow_at = None
            elif not is_slow(mine, usual, record.last.seconds_per_step or 0.0):
                record.slow_since = None
            elif record.slow_since is None:
                record.slow_since = now
            elif now - record.slow_since >= _SUSTAINED:
                record.slow_since, record.slow_at = None, now
                return Diagnosis("slow", task, _slow_line(record.last, mine, usual))
        return None


def _moved(old: Progress, new: Progress) -> bool:
    return (old.done, old.step, old.phase, old.train) != (new.done, new.step, new.phase, new.train)


def _slow_line(last: Progress, mine: float, usual: float) -> str:
    between = last.own_callbacks or 0.0
    return slow_line(str(last.task), mine, usual, reading=last.own_input, between=between)


def _after_start(record: _Record) -> str:
    return "" if record.started else " (the first that this process makes)"
