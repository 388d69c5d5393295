"""The sections on time: bars and tables of the time by part, of causes of lost time, and of slow workers.

It sums and shows what the runs' events say. It does not find the causes of lost time; the events name them.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Sequence

from markupsafe import Markup

from dtrain.monitor.report import text
from dtrain.monitor.report.bars import (
    Bar,
    bar_chart,
    flat_bar,
    grouped,
    ordered,
    part_legend,
    part_name,
)
from dtrain.monitor.report.markup import drawings
from dtrain.monitor.report.markup import parts as markup
from dtrain.monitor.report.tables import Row, numbers, table
from dtrain.monitor.report.thinning import thin_list
from dtrain.monitor.run_data import Run, WorkerEpoch, summed
from dtrain.slowness import SLOW, is_slow

_MOST_EPOCHS = 60
_MOST_BY_EPOCH = 8
_MOST_CALLBACKS = 6
_MOST_WORKERS = 300  # in all runs together


class _Worker:
    """One worker over all epochs: its mean step time with (`step`) and without (`own`) waiting for peers."""

    def __init__(self, epochs: Sequence[WorkerEpoch]) -> None:
        self.task = epochs[0].task
        self.hosts = list(dict.fromkeys(each.host for each in epochs if each.host))
        self.step = _mean(each.step_seconds for each in epochs)
        self.own = _mean(each.own_step_seconds for each in epochs)
        self.parts = summed(each.parts for each in epochs)


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def time_section(runs: Sequence[Run]) -> tuple[Markup, list[str]]:
    """The section on time by part, for all epochs and by epoch, with the causes of lost time; and notes."""
    told = [(place, run) for place, run in enumerate(runs) if run.parts]
    if not told:
        return Markup(), []
    notes: list[str] = []
    body = _of_one(runs[0], notes) if len(runs) == 1 else _of_several(runs, told, notes)
    return body + _callbacks(told, several=len(runs) > 1) + _causes(runs, told), notes


def _of_one(run: Run, notes: list[str]) -> Markup:
    parts = run.parts
    total = sum(parts.values())
    rows = []
    for name in ordered(parts):
        share = text.percent(parts[name] / total)
        rows.append(Row([part_name(name), text.seconds(parts[name]), share, _EXPLAINED.get(name, "")]))
    rows.append(Row(["all", text.seconds(total), "100%", ""], style="sum"))
    columns = [("part", ""), *numbers("time", "share"), ("what it is", "")]
    shown = table("Where the time of all epochs went", columns, rows)
    return markup.beside(epoch_bars(run, "time of each epoch", notes), shown) + _by_epoch(run, notes)


def epoch_bars(run: Run, title: str, notes: list[str], most: int = 40) -> Markup:
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


def _by_epoch(run: Run, notes: list[str]) -> Markup:
    """The table of the seconds and the share of each part in each epoch."""
    told = [epoch for epoch in run.epochs if epoch.parts]
    names = ordered(run.parts)
    shown, left_out = thin_list(told, _MOST_EPOCHS)
    if left_out:
        notes.append(f"The table by epoch leaves out {left_out} epochs in the middle.")
    rows = []
    for epoch in shown:
        total = sum(epoch.parts.values())
        cells = [
            markup.part_time(epoch.parts.get(name, 0.0), epoch.parts.get(name, 0.0) / total) for name in names
        ]
        rate = text.number(epoch.examples_per_second)
        named = ", ".join(f"{_worded(cause.cause)} {text.percent(cause.share)}" for cause in epoch.causes)
        rows.append(Row([f"{epoch.number + 1}", text.seconds(epoch.seconds or total), rate, *cells, named]))
    columns = [("epoch", ""), *numbers("time", "examples/s", *names), ("causes", "")]
    found = table("Time of each epoch by part", columns, rows, tall=True)
    return markup.folded("each epoch in numbers", found)


def _of_several(runs: Sequence[Run], told: Sequence[tuple[int, Run]], notes: list[str]) -> Markup:
    names = ordered({name: 0.0 for _, run in told for name in run.parts})
    rows = []
    for place, run in told:
        parts, total = run.parts, sum(run.parts.values())
        shares = [text.percent(parts.get(name, 0.0) / total) for name in names]
        rows.append(Row([flat_bar(parts, run.name), text.seconds(total), *shares], run=place))
    columns = [("shares", "wide"), *numbers("epochs", *names)]
    shown = part_legend(names) + table("Where the time of all epochs went, by run", columns, rows, runs=runs)
    if len(told) > _MOST_BY_EPOCH:
        return shown
    charts = [epoch_bars(run, run.name, notes, most=20) for _, run in told]
    return shown + markup.folded("each run by epoch", drawings.charts(charts, ""))


def _callbacks(told: Sequence[tuple[int, Run]], *, several: bool) -> Markup:
    """The callbacks that took longest, for each run."""
    said = []
    for _, run in told:
        seconds = summed(epoch.callbacks for epoch in run.epochs)
        longest = sorted(seconds.items(), key=lambda item: -item[1])[:_MOST_CALLBACKS]
        if longest:
            names = ", ".join(f"{name} {text.seconds(each)}" for name, each in longest)
            said.append(f"{f'{run.name}: ' if several else ''}{names}")
    return markup.longest_callbacks(said) if said else Markup()


def _causes(runs: Sequence[Run], told: Sequence[tuple[int, Run]]) -> Markup:
    """The table of causes of lost time, with one row for each cause of a run."""
    rows = []
    for place, run in told:
        named: dict[str, list[tuple[float, str]]] = {}
        for epoch in run.epochs:
            for cause in epoch.causes:
                named.setdefault(cause.cause or "other", []).append((cause.share or 0.0, cause.text))
        for name, found in sorted(named.items(), key=lambda item: -sum(share for share, _ in item[1])):
            share = text.percent(statistics.fmean(share for share, _ in found))
            cells = [_worded(name), f"{len(found)} of {len(run.epochs)}", share, max(found)[1]]
            rows.append(Row(cells, run=place))
    if not rows:
        return markup.quiet("No epoch named a cause for lost time.")
    columns = [("cause", ""), *numbers("epochs", "share in them"), ("where it was worst", "long")]
    return markup.causes(table("What time was lost to", columns, rows, runs=runs))


def _worded(cause: str) -> str:
    return cause.replace("_", " ")


def worker_section(runs: Sequence[Run]) -> Markup:
    """The section on workers: one row for each worker, with slow workers marked."""
    most = max(_MOST_WORKERS // len(runs), 4)
    rows, slow_count, left_out = [], 0, 0
    for place, run in enumerate(runs):
        workers = _workers(run)
        usual = _usual(workers)
        slow = _slow(run, workers, usual)
        slow_count += len(slow)
        if len(workers) > most:
            left_out += len(workers) - most
            workers = sorted(workers, key=lambda worker: -(worker.own or 0.0))[:most]
        rows += [_worker_row(worker, usual, worker.task in slow, place) for worker in workers]
    if not rows:
        return Markup()
    columns = [("worker", ""), ("host", ""), *numbers("step", "own step", "to the usual"), ("time", "wide")]
    columns += numbers(*_OF_WORKERS)
    said = (
        "A worker's own step is what it takes without waiting for the others. "
        f"Slow is who needs {SLOW:g} times the usual worker's and holds up others, or was named as a cause."
    )
    if left_out:
        said += f" Of {text.plural(left_out, 'faster worker')} no row is shown."
    verdict = f"{text.plural(slow_count, 'worker')} slow. " if slow_count else "No worker is slow. "
    shown = table("Workers", columns, rows, tall=True, runs=runs)
    return markup.workers(verdict, said, shown)


def _worker_row(worker: _Worker, usual: float | None, slow: bool, place: int) -> Row:
    own = worker.own
    ratio = f"{own / usual:.2f} \N{MULTIPLICATION SIGN}" if own is not None and usual else text.UNKNOWN
    total = sum(worker.parts.values())
    shares = [
        text.percent(worker.parts.get(name, 0.0) / total) if total else text.UNKNOWN for name in _OF_WORKERS
    ]
    cells = [
        markup.worker(worker.task, slow),
        ", ".join(worker.hosts),
        text.seconds(worker.step),
        text.seconds(own),
        ratio,
        flat_bar(worker.parts, worker.task),
        *shares,
    ]
    return Row(cells, style="slow" if slow else "", run=place)


def _workers(run: Run) -> list[_Worker]:
    found: dict[str, list[WorkerEpoch]] = {}
    for epoch in run.epochs:
        for each in epoch.workers:
            found.setdefault(each.task, []).append(each)
    return [_Worker(epochs) for epochs in found.values()]


def _usual(workers: Sequence[_Worker]) -> float | None:
    """The own step time of the usual worker: the low median, so that of two workers the faster one counts."""
    own = [worker.own for worker in workers if worker.own is not None]
    return statistics.median_low(own) if own else None


def _slow(run: Run, workers: Sequence[_Worker], usual: float | None) -> set[str]:
    if usual is None or len(workers) < 2:
        return set()
    named = " ".join(c.text for epoch in run.epochs for c in epoch.causes if c.cause == "slow_worker")
    return {
        worker.task
        for worker in workers
        if is_slow(worker.own or 0.0, usual, worker.step or 0.0) or _mentions(named, worker.task)
    }


def _mentions(sentence: str, task: str) -> bool:
    """Whether a sentence names a task; a sentence with `worker 12` does not name `worker 1`."""
    return re.search(rf"{re.escape(task)}(?![^\W_])", sentence) is not None


_OF_WORKERS = ("input", "compute", "communication")
_EXPLAINED = {
    "compute": "steps of the model",
    "input": "waiting for data",
    "communication": "adding up with, and waiting for, other workers",
    "checkpoint": "training stood still while a state was saved",
    "callbacks": "between steps, in callbacks",
    "validation": "evaluation at the epoch's end",
    "start": "tracing and compiling",
    "other": "what is none of these",
}
