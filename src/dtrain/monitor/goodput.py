"""Goodput: the part of a run's wall time that went into steps which count, and where the rest went.

It is computed from the events of all attempts (`events.jsonl`), whose lines say how many seconds of each part
(`events.PARTS`) the process had spent by then. Nothing is measured here; `elapsed` and the training clock do.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from dtrain.monitor.line_files import finite
from dtrain.telemetry.events import PARTS

KINDS: Mapping[str, str] = {
    "productive": "steps that count: computing, and exchanging with other replicas",
    "start": "starting processes, importing, and making strategy, data and model",
    "tracing": "building, tracing and compiling",
    "input": "waiting for batches in steps",
    "waiting": "waiting for other workers in steps",
    "checkpoint": "saving state, as far as training waited for it, from start to end",
    "restore": "finding and restoring a checkpoint",
    "repeated": "steps done again by a later attempt, and the time after the last line of a failed one",
    "restart": "the time from a failure to the first process of the next attempt",
    "away": "other workers of a quorum were away: their share of the workers, of the productive time",
    "validation": "evaluation during training",
    "callbacks": "other callbacks, and Keras' loop",
    "other": "the time between trainings and after them",
}
"""The kinds of a run's wall time, and what each holds. Every moment belongs to one of them."""

_HIGHEST = 10**12  # of a number of steps or attempts; a higher one counts as unknown


@dataclass(frozen=True)
class Goodput:
    """Where the wall time of a run went, over all its attempts.

    Attributes:
        seconds: for each of KINDS its seconds; their sum is the wall time.
        steps: the number of steps that count.
        repeated_steps: the number of steps that were done and then done again by a later attempt.
        attempts: the number of attempts that began to train.
    """

    seconds: Mapping[str, float]
    steps: int
    repeated_steps: int
    attempts: int

    def without(self, away: float) -> Goodput:
        """This goodput, less what other workers of a job with a quorum did not do.

        Args:
            away: the seconds for which they were away, summed over them and divided by the number of workers.
        """
        lost = min(max(0.0, away), self.seconds["productive"])
        productive = self.seconds["productive"] - lost
        return dataclasses.replace(self, seconds={**self.seconds, "productive": productive, "away": lost})

    @property
    def wall_seconds(self) -> float:
        """The wall time from the start of the first attempt to the end."""
        return sum(self.seconds.values())

    @property
    def share(self) -> float:
        """The goodput: the productive part of the wall time, from 0 to 1."""
        return self.seconds["productive"] / self.wall_seconds if self.wall_seconds > 0 else 0.0

    @property
    def lost(self) -> dict[str, float]:
        """The seconds of all kinds but the productive one, the largest first, without zeros."""
        lost = {kind: seconds for kind, seconds in self.seconds.items() if seconds > 0}
        lost.pop("productive", None)
        return dict(sorted(lost.items(), key=lambda item: -item[1]))

    def as_record(self) -> dict[str, Any]:
        """The entry of `run.json`: the seconds to the millisecond, whose sum is `wall_seconds`."""
        seconds = {kind: round(value, 3) for kind, value in self.seconds.items()}
        return {
            "share": round(self.share, 4),
            "wall_seconds": round(sum(seconds.values()), 3),
            "steps": self.steps,
            "repeated_steps": self.repeated_steps,
            "attempts": self.attempts,
            "seconds": seconds,
        }


def of_record(entry: object) -> Goodput | None:
    """The goodput in `run.json`; None if the entry is missing or malformed."""
    if not isinstance(entry, dict) or not isinstance(entry.get("seconds"), dict):
        return None
    found = {"away": 0.0, **entry["seconds"]}  # earlier versions had no such kind
    seconds = {kind: finite(found.get(kind)) for kind in KINDS}
    counts = [_count(entry.get(name)) for name in ("steps", "repeated_steps", "attempts")]
    if None in counts or any(value is None or value < 0 for value in seconds.values()):
        return None
    return Goodput({kind: value or 0.0 for kind, value in seconds.items()}, *(count or 0 for count in counts))


def goodput_of(events: Iterable[Mapping[str, Any]]) -> Goodput | None:
    """The goodput of a run, from the events of all its attempts.

    Args:
        events: the events in the order of the file; each has a `kind` and a finite `time`, all else is
            unchecked. An event of a kind that the file lacks may follow, which says where the process is now.

    Returns:
        The goodput; None if no attempt says how much time it has spent, as with earlier versions.
    """
    account = None
    for event in events:
        spent = _parts(event.get("elapsed"))
        if spent is not None:
            account = account or _Account()
            account.add(event, spent)
    return None if account is None else account.result()


class _Stretch(NamedTuple):
    """The training between two lines: the steps done before and after it, and its seconds by kind."""

    before: int
    after: int
    productive: float
    input: float
    waiting: float

    def times(self, share: float, before: int, after: int) -> _Stretch:
        """A share of it, which has other steps."""
        return _Stretch(before, after, self.productive * share, self.input * share, self.waiting * share)


class _Account:
    """The seconds by kind, as the events of attempts come in."""

    def __init__(self) -> None:
        self._seconds = dict.fromkeys(KINDS, 0.0)
        self._stretches: list[_Stretch] = []  # of the steps that count so far
        self._repeated_steps = self._attempts = 0
        # Of the newest line:
        self._process: float | None = None
        self._attempt: int | None = None
        self._spent = dict.fromkeys(_SPENT, 0.0)
        self._time = 0.0
        self._step = 0
        self._end = ""  # the status if training has ended

    def add(self, event: Mapping[str, Any], spent: Mapping[str, float]) -> None:
        """The next event, and what its process has spent by then.

        A process whose training was complete when it started has no `begin` event.
        """
        anew = self._attempts == 0 or finite(event.get("process")) != self._process
        if anew or event["kind"] == "begin":
            self._begin(event, spent, anew=anew)
        else:
            self._go_on(event, spent)
        self._time, self._spent = event["time"], dict(spent)
        if event["kind"] != "now":
            self._end = str(event.get("status")) if event["kind"] == "end" else ""

    def _begin(self, event: Mapping[str, Any], spent: Mapping[str, float], *, anew: bool) -> None:
        """A `fit` begins, in a new process or in the one before."""
        opened = _parts(event.get("opened")) or dict.fromkeys(_SPENT, 0.0)
        passed = _since(spent, opened if anew else self._spent)
        before_fit = _total(passed) - passed["start"] - passed["checkpoint"]
        if anew:
            began = event["time"] - _total(passed)
            before_fit = max(0.0, before_fit - (self._pause(event, began) - began))
        self._seconds["start" if anew else "other"] += before_fit
        self._seconds["tracing"] += passed["start"]
        self._seconds["restore"] += passed["checkpoint"]
        if event["kind"] == "begin":
            step = _count(event.get("step")) or 0
            if self._attempts:
                known = anew and self._follows(event) and not self._end
                done = _count(event.get("failed_step")) if known else None
                self._resume(step, max(self._step, done or 0), anew=anew)
            self._step = step
        self._attempts += anew
        self._process, self._attempt = finite(event.get("process")), _count(event.get("attempt"))

    def _go_on(self, event: Mapping[str, Any], spent: Mapping[str, float]) -> None:
        """The process has come so far; time after the end of `fit` is no training."""
        passed = _since(spent, self._spent)
        step = max(self._step, _count(event.get("step")) or 0)
        if self._end:
            self._seconds["other"] += _total(passed)
        else:
            waiting = min(passed["waiting"], passed["communication"])
            computing = passed["compute"] + passed["communication"] - waiting
            self._stretches.append(_Stretch(self._step, step, computing, passed["input"], waiting))
            self._seconds["tracing"] += passed["start"]
            self._seconds["other"] += passed["before"]
            for kind in ("checkpoint", "validation", "callbacks", "other"):
                self._seconds[kind] += passed[kind]
        self._step = step

    def result(self) -> Goodput:
        """The goodput so far."""
        seconds = dict(self._seconds)
        for stretch in self._stretches:
            for kind in ("productive", "input", "waiting"):
                seconds[kind] += getattr(stretch, kind)
        return Goodput(
            {kind: max(0.0, value) for kind, value in seconds.items()},
            sum(stretch.after - stretch.before for stretch in self._stretches),
            self._repeated_steps,
            self._attempts,
        )

    def _follows(self, event: Mapping[str, Any]) -> bool:
        """Whether the event begins the attempt after the newest one, so that it knows how that one failed."""
        return self._attempt is not None and _count(event.get("attempt")) == self._attempt + 1

    def _pause(self, event: Mapping[str, Any], began: float) -> float:
        """Counts the time before a new process; returns when the time of its attempt begins.

        A process may have started before that, as spares do.

        Args:
            event: the event with which its attempt begins.
            began: when the process started, or the run in it.
        """
        now: float = event["time"]
        if not self._attempts:
            job_began = finite(event.get("job_began"))
            if job_began is not None and "opened" not in event:
                kind = "restart" if _count(event.get("attempt")) else "start"
                self._seconds[kind] += max(0.0, began - job_began)
            return began
        if now < self._time:  # the system clock was set back
            return began
        failed_at = finite(event.get("failed_at")) if self._follows(event) else None
        failed = self._time if failed_at is None else min(max(failed_at, self._time), now)
        edge = max(began, failed)
        lost = failed - self._time if self._end in ("", "finished") else 0.0
        self._seconds["repeated"] += lost
        self._seconds["restart"] += edge - self._time - lost
        return edge

    def _resume(self, step: int, done: int, *, anew: bool) -> None:
        """Counts the steps after `step` as repeated.

        Args:
            step: the step that training resumes after.
            done: the step that had been done.
            anew: whether training resumes in another process, so that a step that was begun is lost, too.
        """
        self._repeated_steps += max(0, done - max(step, self._step))
        if step > self._step:
            self._stretches.append(_Stretch(self._step, step, 0.0, 0.0, 0.0))
        while self._stretches and (
            self._stretches[-1].after > step or (anew and self._stretches[-1].before >= step)
        ):
            last = self._stretches.pop()
            kept = last.times(0.0, last.before, last.before)
            if last.before < step:
                kept = last.times((step - last.before) / (last.after - last.before), last.before, step)
                self._stretches.append(kept)
            self._repeated_steps += last.after - max(last.before, step)
            self._seconds["repeated"] += sum(last[2:]) - sum(kept[2:])


_SPENT = (*PARTS, "before", "waiting")


def _parts(value: object) -> dict[str, float] | None:
    """The seconds that a process has spent, by part; None if the event does not say so."""
    if not isinstance(value, dict):
        return None
    return {name: finite(value.get(name)) or 0.0 for name in _SPENT}


def _since(spent: Mapping[str, float], earlier: Mapping[str, float]) -> dict[str, float]:
    return {name: spent[name] - earlier[name] for name in _SPENT}


def _total(passed: Mapping[str, float]) -> float:
    """All seconds; `waiting` is a part of `communication`."""
    return sum(passed.values()) - passed["waiting"]


def _count(value: object) -> int | None:
    number = finite(value)
    return int(number) if number is not None and 0 <= number <= _HIGHEST else None
