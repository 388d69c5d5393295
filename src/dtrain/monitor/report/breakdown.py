"""The sections on time: bars and tables of the time by part, goodput, causes of lost time, and slow workers.

It sums and shows what the runs' events say. It does not find the causes of lost time; the events name them.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from markupsafe import Markup

from dtrain.monitor.goodput import KINDS, Goodput
from dtrain.monitor.report import text
from dtrain.monitor.report.bars import Bar, bar_chart, flat_bar, grouped
from dtrain.monitor.report.markup import drawings, ordered, sections
from dtrain.monitor.report.markup import parts as markup
from dtrain.monitor.report.thinning import thin_list
from dtrain.monitor.run_data import RunData, WorkerEpoch, summed
from dtrain.telemetry.training_clock import SLOW, is_slow

_MOST_EPOCHS = 60
_MOST_BY_EPOCH = 8
_MOST_CALLBACKS = 6
_MOST_LOSSES = 3
_MOST_WORKERS = 300  # in all runs together


class _LostTime(NamedTuple):
    """A cause of lost time in a run: its name, in how many epochs, its share in them, and the worst case."""

    cause: str
    epochs: str
    share: float
    worst: str


class _GoodputRow(NamedTuple):
    """A run's goodput, its parts that are not zero, their bar, and the largest losses in words."""

    of: Goodput
    parts: Mapping[str, float]
    bar: Markup
    lost: str


class _Worker:
    """One worker over all epochs: its mean step time with (`step`) and without (`own`) waiting for peers.

    `ratio` is its own step time relative to that of the run's usual worker.
    """

    def __init__(self, epochs: Sequence[WorkerEpoch]) -> None:
        self.task = epochs[0].task
        self.hosts = list(dict.fromkeys(epoch.host for epoch in epochs if epoch.host))
        self.step = _mean(epoch.step_seconds for epoch in epochs)
        self.own = _mean(epoch.own_step_seconds for epoch in epochs)
        self.parts = summed(epoch.parts for epoch in epochs)
        self.bar = flat_bar(self.parts, self.task)
        self.ratio: float | None = None
        self.slow = False

    @property
    def style(self) -> str:
        """The style of the worker's row."""
        return "slow" if self.slow else ""


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def time_section(runs: Sequence[RunData], names: Sequence[Markup]) -> tuple[Markup, list[str]]:
    """The section on time by part, for all epochs and by epoch, with the causes of lost time; and notes."""
    timed = [(place, run) for place, run in enumerate(runs) if run.parts]
    if not timed:
        return Markup(), []
    notes: list[str] = []
    body = _of_several(runs, timed, names, notes) if names else _of_one(runs[0], notes)
    unknown = {part for _, run in timed for epoch in run.epochs for part in epoch.unmeasured}
    if unknown:
        notes.append(
            f"In runs with deterministic operations, {' and '.join(sorted(unknown))} within steps counts as "
            "compute and was not measured, because reading a clock is not deterministic."
        )
    causes = [(place, cause) for place, run in timed for cause in _causes(run)]
    return body + _callbacks(timed, several=bool(names)) + sections.causes(causes, names), notes


def goodput_section(runs: Sequence[RunData], names: Sequence[Markup]) -> Markup:
    """The section on goodput: for each run its wall time by kind, and what was lost to what."""
    rows = []
    for place, run in enumerate(runs):
        if (goodput := run.goodput) is None or not goodput.wall_seconds:
            continue
        parts = {kind: seconds for kind, seconds in goodput.seconds.items() if seconds > 0}
        lost = ", ".join(
            f"{kind} {text.seconds(seconds)}" for kind, seconds in list(goodput.lost.items())[:_MOST_LOSSES]
        )
        rows.append((place, _GoodputRow(goodput, parts, flat_bar(parts, run.name), lost)))
    kinds = ordered({kind: 0.0 for _, row in rows for kind in row.parts})
    return sections.goodput(rows, names, kinds, KINDS)


def _of_one(run: RunData, notes: list[str]) -> Markup:
    chart = epoch_bars(run, "time of each epoch", notes)
    shown, left_out = thin_list([epoch for epoch in run.epochs if epoch.parts], _MOST_EPOCHS)
    if left_out:
        notes.append(f"The table by epoch leaves out {left_out} epochs in the middle.")
    by_epoch = sections.time_by_epoch(shown, ordered(run.parts))
    by_part = markup.beside(chart, sections.time_by_part(run.parts, _EXPLAINED))
    return by_part + markup.folded("each epoch in numbers", by_epoch)


def epoch_bars(run: RunData, title: str, notes: list[str], most: int = 40) -> Markup:
    """The chart of the time of a run's epochs by part; adds to `notes` if a bar stands for several epochs."""
    bars = [
        Bar(f"{epoch.number + 1}", f"epoch {epoch.number + 1}", epoch.parts)
        for epoch in run.epochs
        if epoch.parts
    ]
    shown, size = grouped(bars, most)
    if size > 1:
        notes.append(f"Each bar of {run.name} is the mean of {size} epochs.")
    return bar_chart(title, shown, "epoch")


def _of_several(
    runs: Sequence[RunData], timed: Sequence[tuple[int, RunData]], names: Sequence[Markup], notes: list[str]
) -> Markup:
    parts = ordered({name: 0.0 for _, run in timed for name in run.parts})
    shown = sections.time_by_run(timed, names, parts, [flat_bar(run.parts, run.name) for run in runs])
    if len(timed) > _MOST_BY_EPOCH:
        return shown
    charts = [epoch_bars(run, run.name, notes, most=20) for _, run in timed]
    return shown + markup.folded("each run by epoch", drawings.charts(charts, ""))


def _callbacks(timed: Sequence[tuple[int, RunData]], *, several: bool) -> Markup:
    """The callbacks that took longest, for each run."""
    lines = []
    for _, run in timed:
        seconds = summed(epoch.callbacks for epoch in run.epochs)
        longest = sorted(seconds.items(), key=lambda item: -item[1])[:_MOST_CALLBACKS]
        if longest:
            names = ", ".join(f"{name} {text.seconds(duration)}" for name, duration in longest)
            lines.append(f"{f'{run.name}: ' if several else ''}{names}")
    return markup.longest_callbacks(lines) if lines else Markup()


def _causes(run: RunData) -> list[_LostTime]:
    """The causes of lost time in a run, the largest first."""
    named: dict[str, list[tuple[float, str]]] = {}
    for epoch in run.epochs:
        for cause in epoch.causes:
            named.setdefault(cause.cause or "other", []).append((cause.share or 0.0, cause.text))
    by_share = sorted(named.items(), key=lambda item: -sum(share for share, _ in item[1]))
    return [
        _LostTime(
            name,
            f"{len(causes)} of {len(run.epochs)}",
            statistics.fmean(share for share, _ in causes),
            max(causes)[1],
        )
        for name, causes in by_share
    ]


def worker_section(runs: Sequence[RunData], names: Sequence[Markup]) -> Markup:
    """The section on workers: one row for each worker, with slow workers marked."""
    most = max(_MOST_WORKERS // len(runs), 4)
    shown, slow, left_out = [], 0, 0
    for place, run in enumerate(runs):
        workers = _workers(run)
        slow += sum(worker.slow for worker in workers)
        if len(workers) > most:
            left_out += len(workers) - most
            workers = sorted(workers, key=lambda worker: -(worker.own or 0.0))[:most]
        shown += [(place, worker) for worker in workers]
    return sections.workers(shown, names, slow, left_out, SLOW)


def _workers(run: RunData) -> list[_Worker]:
    """The workers of a run, compared with the usual one: the worker with the median own step time.

    Of an even number of workers it is the faster of the middle two, so of two workers the faster one.
    """
    by_task: dict[str, list[WorkerEpoch]] = {}
    for epoch in run.epochs:
        for worker_epoch in epoch.workers:
            by_task.setdefault(worker_epoch.task, []).append(worker_epoch)
    workers = [_Worker(epochs) for epochs in by_task.values()]
    own = [worker.own for worker in workers if worker.own is not None]
    if not own:
        return workers
    usual = statistics.median_low(own)
    named = " ".join(c.text for epoch in run.epochs for c in epoch.causes if c.cause == "slow_worker")
    for worker in workers:
        if worker.own is not None and usual:
            worker.ratio = worker.own / usual
        if len(workers) > 1:
            holds_up = is_slow(worker.own or 0.0, usual, worker.step or 0.0)
            worker.slow = holds_up or _mentions(named, worker.task)
    return workers


def _mentions(sentence: str, task: str) -> bool:
    """Whether a sentence names a task; a sentence with `worker 12` does not name `worker 1`."""
    return re.search(rf"{re.escape(task)}(?![^\W_])", sentence) is not None


_EXPLAINED = {
    "compute": "steps of the model",
    "input": "waiting for data",
    "communication": "all-reducing with, and waiting for, other workers",
    "checkpoint": "saving state, as far as training waited for it, within the epochs",
    "callbacks": "between steps, in callbacks",
    "validation": "evaluation at the epoch's end",
    "start": "tracing and compiling",
    "other": "everything else",
}
