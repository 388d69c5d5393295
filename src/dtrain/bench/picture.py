"""Draws the picture of a bench: the training rate as bars, and loss and accuracy by epoch and by seconds.

It needs no display, and computes no results.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dtrain.bench.plan import Row
from dtrain.bench.results import Results, RowResult
from dtrain.monitor.curves import figure_class
from dtrain.paths import written_whole
from dtrain.words import counted

INCHES = (11.0, 10.5)
"""Width and height of the picture."""
DPI = 110
_COLOURS = ("#4c78a8", "#1f3a5f", "#72b7b2", "#54a24b", "#e4a11b", "#b279a2", "#8c6d4f", "#d1495b", "#7f7f7f")
_WIDE, _THIN = 7.0, 1.7  # line widths of curves, in points
_PANELS = (
    ("loss", "training loss", "epoch"),
    ("loss", "training loss", "seconds"),
    ("val_accuracy", "validation accuracy", "epoch"),
    ("val_accuracy", "validation accuracy", "seconds"),
)


def figure(results: Results) -> Any:
    """The picture as a `matplotlib.figure.Figure`: a panel of bars, and four of curves.

    Raises:
        UnsupportedVersionError: matplotlib is not installed.
    """
    measured = [outcome for outcome in results.outcomes if outcome.measured]
    made = figure_class("picture is")(figsize=INCHES, layout="constrained")
    gpus, cores = len(results.machine.gpus), len(results.machine.cores)
    place = counted(gpus, "GPU") if gpus else counted(cores, "core")
    made.suptitle(f"{results.asked.model}, global batch {results.asked.global_batch}, {place}", fontsize=12)
    above, below = made.subfigures(2, 1, height_ratios=[1, 1.9])
    _bars(above.add_subplot(), measured, results)
    panels = [below.add_subplot(2, 2, number + 1) for number in range(len(_PANELS))]
    for axes, (name, label, by) in zip(panels, _PANELS, strict=True):
        _curves(axes, measured, results, name=name, label=label, by=by)
    if measured:
        handles, labels = panels[1].get_legend_handles_labels()
        below.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    return made


def draw(results: Results, path: Path) -> None:
    """Write the picture as a PNG file.

    Raises:
        UnsupportedVersionError: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    made = figure(results)
    with written_whole(path) as unfinished:
        made.savefig(unfinished, format="png", dpi=DPI)


def _bars(axes: Any, measured: Sequence[RowResult], results: Results) -> None:
    rates = [outcome.median(lambda run: run.rate) or 0.0 for outcome in measured]
    colours = [_COLOURS[number % len(_COLOURS)] for number in range(len(measured))]
    bars = axes.barh([_named(outcome.row) for outcome in measured], rates, color=colours, height=0.68)
    axes.bar_label(bars, [_said(o, results) for o in measured], padding=5, fontsize=9)
    axes.invert_yaxis()  # the first row on top, as in the table
    axes.set_xlim(0, 1.45 * max(rates, default=1.0))  # room for the label of the longest bar
    axes.set_xlabel("examples/s (first epoch not counted)")
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _said(outcome: RowResult, results: Results) -> str:
    """The label of a bar: the rate, the speed-up over the base, and the efficiency of a replica."""
    rate = outcome.median(lambda run: run.rate) or 0.0
    times, efficiency = results.times(outcome, results.base), results.efficiency(outcome)
    parts = [f"{rate:,.0f}", *([] if times is None else [f"{times:.2f}x"])]
    if efficiency is not None and outcome.row.replicas > 1:
        parts.append(f"{100 * efficiency:.0f}% a replica")
    return "   ".join(parts)


def _curves(
    axes: Any, measured: Sequence[RowResult], results: Results, *, name: str, label: str, by: str
) -> None:
    from matplotlib.ticker import MaxNLocator

    for number, outcome in enumerate(measured):
        run = outcome.measured[0]
        values = run.history.get(name, ())
        epochs = list(range(1, len(values) + 1))
        places = epochs if by == "epoch" else run.seconds_by_epoch(results.asked.what.examples)
        axes.plot(
            places[: len(values)],
            values,
            label=_legend(outcome.row),
            color=_COLOURS[number % len(_COLOURS)],
            linestyle="-" if outcome.row.synchronous else "--",
            linewidth=_width(number, len(measured)) if by == "epoch" else _THIN,
            solid_capstyle="round",
        )
    axes.set_xlabel("epoch" if by == "epoch" else "seconds of training (the first epoch also traces)")
    axes.set_ylabel(label)
    if by == "seconds":
        axes.set_xlim(left=0)
    else:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def _width(number: int, count: int) -> float:
    """The line width by epoch. Equal curves overlap there, so lower curves are wider and stay visible."""
    return _WIDE - (_WIDE - _THIN) * number / max(count - 1, 1)


def _legend(row: Row) -> str:
    return row.title if row.synchronous else f"{row.title}, asynchronous"


def _named(row: Row) -> str:
    if row.replicas == 1:
        return row.title
    return f"{row.title}, {counted(row.replicas, 'worker' if row.workers else 'replica')}"
