"""The picture of a run: loss and accuracy by epoch, on the training and on the validation data.

It draws a finished history into a PNG file, without a display; it shows nothing live.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dtrain.errors import UnsupportedVersionError

_TRAIN = "#1f5fa8"
_VALIDATION = "#d2691e"


def plot_curves(history: Mapping[str, Sequence[float]], path: Path, *, title: str = "") -> None:
    """Draw one panel a metric, with the training curve and, where there is one, the validation curve.

    Args:
        history: for each metric its value at the end of every epoch, as in `keras.callbacks.History.history`;
            the validation values of `loss` are those of `val_loss`. `loss` and `accuracy` are drawn.
        path: the PNG file to write.
        title: a line above the panels.

    Raises:
        UnsupportedVersionError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UnsupportedVersionError(
            f"The curves are drawn by matplotlib, which cannot be imported: {error}.",
            hint="Install it: pip install matplotlib",
        ) from error

    metrics = [name for name in ("loss", "accuracy") if name in history]
    # A figure without pyplot needs no display, and leaves the backend that the user has chosen alone.
    figure = Figure(figsize=(5.2 * max(len(metrics), 1), 3.8), layout="constrained")
    if title:
        figure.suptitle(title, fontsize=11)
    for column, metric in enumerate(metrics, start=1):
        _draw(figure.add_subplot(1, len(metrics), column), metric, history)
    unfinished = path.with_name(f".{path.name}.tmp")
    figure.savefig(unfinished, format="png", dpi=120)
    unfinished.replace(path)


def _draw(axes: Any, metric: str, history: Mapping[str, Sequence[float]]) -> None:
    from matplotlib.ticker import MaxNLocator

    curves = [("train", metric, _TRAIN, "o"), ("validation", f"val_{metric}", _VALIDATION, "s")]
    for label, key, colour, marker in curves:
        if key in history:
            values = history[key]
            epochs = range(1, len(values) + 1)
            axes.plot(epochs, values, label=label, color=colour, marker=marker, markersize=4, linewidth=1.6)
    axes.set_xlabel("epoch")
    axes.set_ylabel(metric)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
