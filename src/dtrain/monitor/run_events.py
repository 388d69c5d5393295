"""The story that a run's events tell: attempts, epochs, steps, alarms and checkpoints, in order.

It gives meaning to events that `dtrain.monitor.event_file` has read. Fields that are missing, or of another
kind than they should be, count as not known.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import nan
from typing import Any

from dtrain.monitor.event_file import finite
from dtrain.monitor.run_data import (
    RATE,
    STEP_COLUMNS,
    Alarm,
    Attempt,
    Cause,
    Checkpoint,
    Epoch,
    Steps,
    WorkerEpoch,
)
from dtrain.training_rate import TRAINING, Figures

Event = Mapping[str, Any]
_LONGEST = 1000  # characters of a text in an event


@dataclass(frozen=True)
class Story:
    """What the events say; `end` is the status that the last attempt ended with, `last` the last time."""

    epochs: tuple[Epoch, ...] = ()
    steps: Steps = field(default_factory=Steps)
    alarms: tuple[Alarm, ...] = ()
    checkpoints: tuple[Checkpoint, ...] = ()
    attempts: tuple[Attempt, ...] = ()
    end: str = ""
    last: float | None = None


def tell(events: Sequence[Event]) -> Story:
    """Put events in order: by attempt, and of what was told twice the later."""
    if not events:
        return Story()
    spans = _attempt_spans(events)
    attempts = tuple(_attempt(number, events[start:stop]) for number, (start, stop) in enumerate(spans))
    epochs = {
        number: _epoch(number, event)
        for event in events
        if event["kind"] == "epoch" and (number := _count(event.get("epoch"))) is not None
    }
    return Story(
        epochs=tuple(epochs[number] for number in sorted(epochs)),
        steps=_steps([events[start:stop] for start, stop in spans], attempts),
        alarms=tuple(_alarm(event) for event in events if event["kind"] == "alarm"),
        checkpoints=tuple(_checkpoint(event) for event in events if event["kind"] == "checkpoint"),
        attempts=attempts,
        end=attempts[-1].status,
        last=max(float(event["time"]) for event in events),
    )


def _attempt_spans(events: Sequence[Event]) -> list[tuple[int, int]]:
    """Where each attempt's events begin and end. What stands before the first `begin` belongs to it."""
    starts = [place for place, event in enumerate(events) if event["kind"] == "begin"][1:]
    edges = [0, *starts, len(events)]
    return list(pairwise(edges))


def _attempt(number: int, events: Sequence[Event]) -> Attempt:
    begin: Event = next((event for event in events if event["kind"] == "begin"), {})
    end = next((event for event in reversed(events) if event["kind"] == "end"), {})
    said = _count(begin.get("attempt"))
    return Attempt(
        number=number if said is None else said,
        began=float(events[0]["time"]),
        last=max(float(event["time"]) for event in events),
        strategy=_text(begin.get("strategy")),
        workers=_count(begin.get("workers")),
        replicas=_count(begin.get("replicas")),
        first_epoch=_count(begin.get("first_epoch")),
        status=_text(end.get("status")),
    )


def _steps(parts: Iterable[Sequence[Event]], attempts: Sequence[Attempt]) -> Steps:
    found = Steps()
    columns = [(name, found.values[name]) for name in STEP_COLUMNS]
    before = latest = 0.0
    for attempt, events in zip(attempts, parts, strict=True):
        for event in events:
            if event["kind"] != "steps":
                continue
            # A clock that was set back must not draw a line backwards.
            latest = max(latest, before + float(event["time"]) - attempt.began)
            found.clock.append(latest)
            for name, column in (
                ("step", found.step),
                ("seconds", found.seconds),
                ("steps", found.steps),
                *columns,
            ):
                value = event.get(name)
                column.append(_or_nan(value))
        before += attempt.seconds
        latest = max(latest, before)
    return found


def _or_nan(value: object) -> float:
    found = finite(value)
    return nan if found is None else found


def _epoch(number: int, event: Event) -> Epoch:
    logs = event.get("logs")
    workers, causes = event.get("workers"), event.get("causes")
    return Epoch(
        number=number,
        steps=_count(event.get("steps")),
        seconds=finite(event.get("seconds")),
        examples_per_second=finite(event.get("examples_per_second")),
        steady=_steady(event),
        parts=_seconds(event.get("parts")),
        callbacks=_seconds(event.get("callbacks")),
        logs={
            name: finite(value)
            for name, value in (logs.items() if isinstance(logs, dict) else ())
            if name != RATE and (value is None or isinstance(value, int | float))
        },
        workers=tuple(_worker(each) for each in workers if isinstance(each, dict))
        if isinstance(workers, list)
        else (),
        causes=tuple(_cause(each) for each in causes if isinstance(each, dict))
        if isinstance(causes, list)
        else (),
    )


def _steady(event: Event) -> Figures | None:
    """The epoch's steps for which nothing was traced; None where the event does not tell them."""
    found = event.get("steady")
    told: dict[str, float | None]
    if isinstance(found, dict):
        told = {name: finite(found.get(name)) for name in Figures._fields}
    else:  # of an earlier version: all of its steps
        parts = _seconds(event.get("parts"))
        told = {name: finite(event.get(name)) for name in ("steps", "examples")}
        told["seconds"] = sum(parts.get(part, 0.0) for part in TRAINING)
        told["waiting"] = parts.get("input")
    steps, seconds, examples, waiting = (told[name] for name in Figures._fields)
    if not steps or not seconds:
        return None
    return Figures(int(steps), seconds, None if examples is None else int(examples), waiting or 0.0)


def _worker(value: Event) -> WorkerEpoch:
    return WorkerEpoch(
        task=_text(value.get("task")) or "a worker",
        host=_text(value.get("host")),
        step_seconds=finite(value.get("step_seconds")),
        own_step_seconds=finite(value.get("own_step_seconds")),
        parts=_seconds(value.get("parts")),
    )


def _cause(value: Event) -> Cause:
    return Cause(
        cause=_text(value.get("cause")), share=finite(value.get("share")), text=_text(value.get("text"))
    )


def _alarm(event: Event) -> Alarm:
    return Alarm(
        kind=_text(event.get("alarm")) or "alarm",
        time=float(event["time"]),
        epoch=_count(event.get("epoch")),
        step=_count(event.get("step")),
        value=finite(event.get("value")),
        text=_text(event.get("text")),
    )


def _checkpoint(event: Event) -> Checkpoint:
    return Checkpoint(
        time=float(event["time"]),
        step=_count(event.get("step")),
        seconds=finite(event.get("seconds")),
        text=_text(event.get("text")),
    )


def _seconds(value: object) -> dict[str, float]:
    """The parts of a time that are more than nothing."""
    if not isinstance(value, dict):
        return {}
    found = {name: finite(seconds) for name, seconds in value.items()}
    return {name: seconds for name, seconds in found.items() if seconds is not None and seconds > 0}


def _count(value: object) -> int | None:
    found = finite(value)
    return int(found) if found is not None and found >= 0 else None


def _text(value: object) -> str:
    return value[:_LONGEST] if isinstance(value, str) else ""
