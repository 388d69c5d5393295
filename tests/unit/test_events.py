"""Which listener gets which event."""

from __future__ import annotations

import pytest

from dtrain.telemetry import events


class RecordingListener:
    """Records the steps of the events that it gets."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def _handle_training_resumes(self, event: events.TrainingResumes) -> None:
        self.steps.append(event.step)


def test_a_fit_inside_of_another_has_listeners_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "_always", {})
    always, outside, outer, inner = (RecordingListener() for _ in range(4))
    events.listen_always(always)
    events.listen(outside)  # there is no fit
    with events.one_fit():
        events.listen(outer)
        events.listen(outer)  # gets each event once all the same
        events.emit(events.TrainingResumes(1))
        with events.one_fit():
            events.listen(inner)
            events.emit(events.TrainingResumes(2))
        events.emit(events.TrainingResumes(3))
    events.emit(events.TrainingResumes(4))
    assert (always.steps, outside.steps) == ([1, 2, 3, 4], [])
    assert (outer.steps, inner.steps) == ([1, 3], [2])


def test_an_event_that_there_is_not_is_an_error() -> None:
    class Mistaken:
        def _handle_step_end(self, event: object) -> None:
            """The event is `StepsEnd`."""

    with events.one_fit(), pytest.raises(KeyError, match="StepEnd"):
        events.listen(Mistaken())
