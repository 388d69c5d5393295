"""What a run's events say together: attempts, epochs, steps, alarms and checkpoints, in order.

It gives meaning to events that `dtrain.monitor.event_file` has read. Fields that are missing, or of another
kind than they should be, count as not known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from itertools import pairwise
from math import nan
from typing import Any, TypeVar

from dtrain.monitor.event_file import finite
from dtrain.monitor.run_data import (
    RATE,
    Alarm,
    Attempt,
    Cause,
    Checkpoint,
    Epoch,
    EventSummary,
    Steps,
    WorkerEpoch,
)
from dtrain.training_rate import Figures, of_epoch

Event = Mapping[str, Any]
_T = TypeVar("_T")
_LONGEST = 1000  # characters of a text in an event


def summarize_events(events: Sequence[Event]) -> EventSummary:
    """Put events in order: by attempt, and of what was told twice the later."""
    if not events:
        return EventSummary()
    spans = _attempt_spans(events)
    attempts = tuple(_attempt(number, events[start:stop]) for number, (start, stop) in enumerate(spans))
    epochs = {
        number: _epoch(number, event)
        for event in events
        if event["kind"] == "epoch" and (number := _count(event.get("epoch"))) is not None
    }
    return EventSummary(
        epochs=tuple(epochs[number] for number in sorted(epochs)),
        steps=_steps([events[start:stop] for start, stop in spans], attempts),
        alarms=tuple(
            _made(Alarm, event, kind=_text(event.get("alarm")) or "alarm")
            for event in events
            if event["kind"] == "alarm"
        ),
        checkpoints=tuple(_made(Checkpoint, event) for event in events if event["kind"] == "checkpoint"),
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
    return _made(
        Attempt,
        begin,
        number=number if said is None else said,
        began=float(events[0]["time"]),
        last=max(float(event["time"]) for event in events),
        status=_text(end.get("status")),
    )


def _steps(parts: Iterable[Sequence[Event]], attempts: Sequence[Attempt]) -> Steps:
    found = Steps()
    columns = {"step": found.step, "seconds": found.seconds, "steps": found.steps, **found.values}
    before = latest = 0.0
    for attempt, events in zip(attempts, parts, strict=True):
        for event in events:
            if event["kind"] != "steps":
                continue
            # A clock that was set back must not draw a line backwards.
            latest = max(latest, before + float(event["time"]) - attempt.began)
            found.clock.append(latest)
            for name, column in columns.items():
                value = finite(event.get(name))
                column.append(nan if value is None else value)
        before += attempt.seconds
        latest = max(latest, before)
    return found


def _epoch(number: int, event: Event) -> Epoch:
    logs = event.get("logs")
    return _made(
        Epoch,
        event,
        number=number,
        steady=_steady(event),
        logs={
            name: finite(value)
            for name, value in (logs.items() if isinstance(logs, dict) else ())
            if name != RATE and (value is None or isinstance(value, int | float))
        },
        workers=tuple(
            _made(WorkerEpoch, each, task=_text(each.get("task")) or "a worker")
            for each in _dictionaries(event.get("workers"))
        ),
        causes=tuple(_made(Cause, each) for each in _dictionaries(event.get("causes"))),
    )


def _steady(event: Event) -> Figures | None:
    """The epoch's steps for which nothing was traced; None where the event does not tell them."""
    steady = event.get("steady")
    record: dict[str, Any] = {name: finite(event.get(name)) for name in ("steps", "examples")}
    record["parts"] = _seconds(event.get("parts"))
    if isinstance(steady, dict):
        record["steady"] = {name: finite(steady.get(name)) for name in Figures._fields}
    steps, seconds, examples, waiting = of_epoch(record)
    if not steps or not seconds:
        return None
    return Figures(int(steps), seconds, None if examples is None else int(examples), waiting or 0.0)


def _dictionaries(value: object) -> list[dict[str, Any]]:
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


def _seconds(value: object) -> dict[str, float]:
    """The parts of a time that are more than nothing."""
    if not isinstance(value, dict):
        return {}
    found = {name: finite(seconds) for name, seconds in value.items()}
    return {name: seconds for name, seconds in found.items() if seconds is not None and seconds > 0}


def _number(value: object) -> float:
    return finite(value) or 0.0


def _count(value: object) -> int | None:
    found = finite(value)
    return int(found) if found is not None and found >= 0 else None


def _text(value: object) -> str:
    return value[:_LONGEST] if isinstance(value, str) else ""


_BY_TYPE: Mapping[str, Callable[[object], Any]] = {
    "str": _text,
    "float": _number,
    "float | None": finite,
    "int | None": _count,
    "Mapping[str, float]": _seconds,
}


def _made(cls: type[_T], event: Event, /, **known: Any) -> _T:
    """An object of a dataclass, each field read by its type from what the event says under its name.

    Args:
        cls: the dataclass.
        event: what is not of the field's type counts as not known.
        known: fields that are not read that way.
    """
    read = {
        each.name: _BY_TYPE[str(each.type)](event.get(each.name))
        for each in fields(cls)  # type: ignore[arg-type]
        if each.name not in known
    }
    return cls(**read, **known)
