"""Sorts a run's events into attempts, epochs, steps, alarms and checkpoints.

It interprets the events that `dtrain.monitor.line_files` has parsed, and reads no file. A field that is
missing or of a wrong type counts as unknown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from itertools import pairwise
from math import nan
from typing import Any, TypeVar

from dtrain.monitor.goodput import goodput_of
from dtrain.monitor.line_files import finite
from dtrain.monitor.run_data import (
    RATE,
    Cause,
    Checkpoint,
    CommunicationPlan,
    Epoch,
    EventSummary,
    GatheredOperation,
    PlannedCommunication,
    RunAlarm,
    RunAttempt,
    Steps,
    WorkerEpoch,
)
from dtrain.telemetry.events import PARTS
from dtrain.telemetry.training_rate import Figures, of_epoch

Event = Mapping[str, Any]
_T = TypeVar("_T")
_HIGHEST = 10**12  # of a number of steps, epochs or workers; a higher one counts as unknown
_LONGEST = 1000  # characters of a text in an event


def summarize_events(events: Sequence[Event]) -> EventSummary:
    """Sort events into an `EventSummary`; of two events for one epoch the later counts."""
    if not events:
        return EventSummary()
    spans = _attempt_spans(events)
    attempts: list[RunAttempt] = []
    for start, stop in spans:
        attempts.append(_attempt(events[start:stop], attempts))
    epochs = {
        number: _epoch(number, event)
        for event in events
        if event["kind"] == "epoch" and (number := _count(event.get("epoch"))) is not None
    }
    return EventSummary(
        epochs=tuple(epochs[number] for number in sorted(epochs)),
        steps=_steps([events[start:stop] for start, stop in spans], attempts),
        alarms=tuple(
            _made(RunAlarm, event, kind=_text(event.get("alarm")) or "alarm")
            for event in events
            if event["kind"] == "alarm"
        ),
        checkpoints=tuple(_made(Checkpoint, event) for event in events if event["kind"] == "checkpoint"),
        attempts=tuple(attempts),
        plan=next((_plan(event) for event in reversed(events) if event["kind"] == "plan"), None),
        end=attempts[-1].status,
        goodput=goodput_of(events),
        last=max(float(event["time"]) for event in events),
    )


def _attempt_spans(events: Sequence[Event]) -> list[tuple[int, int]]:
    """The (start, stop) of each attempt's events; events before the first `begin` belong to the first."""
    starts = [place for place, event in enumerate(events) if event["kind"] == "begin"][1:]
    edges = [0, *starts, len(events)]
    return list(pairwise(edges))


def _attempt(events: Sequence[Event], earlier: Sequence[RunAttempt]) -> RunAttempt:
    begin: Event = next((event for event in events if event["kind"] == "begin"), {})
    end = next((event for event in reversed(events) if event["kind"] == "end"), {})
    given = _count(begin.get("attempt"))
    began = float(events[0]["time"])
    return _made(
        RunAttempt,
        begin,
        number=len(earlier) if given is None else given,
        pause=max(began - earlier[-1].last, 0.0) if earlier else None,
        began=began,
        last=max(float(event["time"]) for event in events),
        status=_text(end.get("status")),
    )


def _steps(parts: Iterable[Sequence[Event]], attempts: Sequence[RunAttempt]) -> Steps:
    steps = Steps()
    columns = {"step": steps.step, "seconds": steps.seconds, "steps": steps.steps, **steps.values}
    before = latest = 0.0
    for attempt, events in zip(attempts, parts, strict=True):
        for event in events:
            if event["kind"] != "steps":
                continue
            # If the system clock was set back, the curve must not run backwards.
            latest = max(latest, before + float(event["time"]) - attempt.began)
            steps.clock.append(latest)
            for name, column in columns.items():
                value = finite(event.get(name))
                column.append(nan if value is None else value)
        before += attempt.seconds
        latest = max(latest, before)
    return steps


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
            _made(WorkerEpoch, worker, task=_text(worker.get("task")) or "a worker")
            for worker in _dictionaries(event.get("workers"))
        ),
        causes=tuple(_made(Cause, cause) for cause in _dictionaries(event.get("causes"))),
        unmeasured=_unmeasured(event.get("unmeasured")),
    )


def _plan(event: Event) -> CommunicationPlan:
    return _made(
        CommunicationPlan,
        event,
        communications=tuple(
            _made(PlannedCommunication, communication)
            for communication in _dictionaries(event.get("communications"))
        ),
        gathered=tuple(
            _made(GatheredOperation, operation) for operation in _dictionaries(event.get("gathered"))
        ),
    )


def _steady(event: Event) -> Figures | None:
    """The figures of the epoch's steps in which no function was traced; None if the event lacks them."""
    steady = event.get("steady")
    record: dict[str, Any] = {name: finite(event.get(name)) for name in ("steps", "examples")}
    record["parts"] = _seconds(event.get("parts"))
    if isinstance(steady, dict):
        record["steady"] = {name: finite(steady.get(name)) for name in Figures._fields}
    steps, seconds, examples, waiting = of_epoch(record)
    if not steps or not seconds:
        return None
    return Figures(int(steps), seconds, None if examples is None else int(examples), waiting)


def _unmeasured(value: object) -> tuple[str, ...]:
    return tuple(part for part in PARTS if part in value) if isinstance(value, list) else ()


def _dictionaries(value: object) -> list[dict[str, Any]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _seconds(value: object) -> dict[str, float]:
    """The seconds by name, without values that are zero, negative or no number."""
    if not isinstance(value, dict):
        return {}
    by_name = {name: finite(seconds) for name, seconds in value.items()}
    return {name: seconds for name, seconds in by_name.items() if seconds is not None and seconds > 0}


def _number(value: object) -> float:
    return finite(value) or 0.0


def _count(value: object) -> int | None:
    number = finite(value)
    return int(number) if number is not None and 0 <= number <= _HIGHEST else None


def _text(value: object) -> str:
    return value[:_LONGEST] if isinstance(value, str) else ""


_BY_TYPE: Mapping[str, Callable[[object], Any]] = {
    "str": _text,
    "bool": lambda value: value is True,
    "float": _number,
    "float | None": finite,
    "int | None": _count,
    "Mapping[str, float]": _seconds,
}


def _made(cls: type[_T], event: Event, /, **known: Any) -> _T:
    """Make an object of a dataclass: each field is read, by its type, from the event's entry of its name.

    Args:
        cls: the dataclass.
        event: the event; an entry of a wrong type counts as unknown.
        known: values of fields that are not read from the event.
    """
    read = {
        field.name: _BY_TYPE[str(field.type)](event.get(field.name))
        for field in fields(cls)  # type: ignore[arg-type]
        if field.name not in known
    }
    return cls(**read, **known)
