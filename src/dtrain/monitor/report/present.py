"""The section of a live page on what happens now: how far training has come, and what each task does.

The states of the tasks come from their launcher; without one, they are what the run's own files say.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from markupsafe import Markup

from dtrain.monitor.line_files import finite
from dtrain.monitor.report import text
from dtrain.monitor.report.header import Figure
from dtrain.monitor.report.markup import parts, sections
from dtrain.monitor.run_data import RATE, RunData


class TaskRow(NamedTuple):
    """What a task does now.

    Attributes:
        task: the task, such as `worker 1`.
        state: its state in words.
        step: the training step that it has reached; None if unknown.
        step_seconds: the seconds of its steps; None if unknown.
        heard: the seconds since it said so; None if unknown.
        bad: whether it has failed.
    """

    task: str
    state: str
    step: int | None
    step_seconds: float | None
    heard: float | None
    bad: bool = False

    @property
    def style(self) -> str:
        """The style of the task's row."""
        return "bad" if self.bad else ""


def present_section(run: RunData | None, tasks: Sequence[TaskRow]) -> Markup:
    """The section: a run's last figures, and a row for each task.

    Args:
        run: the run; None before it has begun.
        tasks: the tasks as their launcher knows them; empty without a launcher.
    """
    figures = [] if run is None else [figure for figure in _figures(run) if figure.value != text.UNKNOWN]
    shown: Markup = parts.tiles(figures) if figures else parts.quiet("No run has begun yet.")
    if tasks:
        return shown + sections.tasks("Tasks", tasks)
    return shown + sections.tasks("Workers of the last epoch", [] if run is None else _recorded(run))


def _figures(run: RunData) -> list[Figure]:
    last = run.attempts[-1] if run.attempts else None
    epochs = finite(run.record.get("epochs")) if last is None or last.epochs is None else last.epochs
    step = reached(run)
    steps = None if last is None or last.steps is None or epochs is None else last.steps * epochs
    latest = {name: column[-1] if column else None for name, column in run.steps.values.items()}
    return [
        Figure("epochs completed", text.count(len(run.epochs)), "" if epochs is None else f"of {epochs:g}"),
        Figure("step", text.count(step), "" if steps is None else f"of {steps:,.0f}"),
        Figure("examples/s", text.number(latest[RATE]), "in the last second or so"),
        Figure("loss", text.number(latest["loss"]), "of the epoch so far"),
        Figure("attempts", text.count(len(run.attempts) or None), "starts of the program"),
    ]


def reached(run: RunData) -> int | None:
    """The last step that the run's files name; None if they name none."""
    noted = run.steps.step[-1] if run.steps.step else None
    counted = sum(epoch.steps or 0 for epoch in run.epochs)
    last = max(counted, 0.0 if noted is None or noted != noted else noted)
    return int(last) if last else None


def _recorded(run: RunData) -> list[TaskRow]:
    """The workers of the last epoch; all are in the run's state, at the step that its files name."""
    workers = run.epochs[-1].workers if run.epochs else ()
    words = {"running": "training", "left": "gone"}.get(run.state, run.state)
    bad = run.state in ("failed", "left")
    return [
        TaskRow(worker.task, words, reached(run), worker.step_seconds, None, bad=bad) for worker in workers
    ]
