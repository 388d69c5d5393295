"""Draws the metrics of a run by epoch, on the training and the validation data, into a PNG file.

It draws the history of a `fit` that has ended, and needs no display. It shows nothing during training.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dtrain.base import safe_files
from dtrain.base.log import logger
from dtrain.errors import UnsupportedVersionError

_COLUMNS = 3
_MOST = 9
_NOT_METRICS = ("examples_per_second", "learning_rate", "staleness", "staleness_max")
_TRAIN = "#1f5fa8"
_VALIDATION = "#d2691e"


def drawn(path: Path, draw: Callable[[Path], None]) -> bool:
    """Draws a picture; if matplotlib is not installed, logs a warning and leaves the picture out.

    Args:
        path: the picture's file.
        draw: draws the picture; called with `path`.

    Returns:
        Whether the picture was drawn.
    """
    try:
        draw(path)
    except UnsupportedVersionError as error:
        logger.warning("%s is left out. %s %s", path.name, error.message, error.hint)
        return False
    return True


def plot_curves(history: Mapping[str, Sequence[float]], path: Path, *, title: str = "") -> None:
    """Draw one panel for each metric, with the training curve and, if there is one, the validation curve.

    Args:
        history: for each metric its value at the end of every epoch, as in `keras.callbacks.History.history`;
            `val_loss` holds the validation values of `loss`. At most nine metrics are drawn, `loss` first;
            rates such as `examples_per_second` are not drawn.
        path: the PNG file to write.
        title: a line above the panels.

    Raises:
        UnsupportedVersionError: matplotlib is not installed.

    Example:
        ```python
        from pathlib import Path

        history = {"loss": [0.9, 0.5, 0.3], "val_loss": [1.0, 0.7, 0.6]}
        dtrain.monitor.plot_curves(history, Path("curves.png"), title="mine")
        ```
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UnsupportedVersionError(
            f"The curves are drawn by matplotlib, which cannot be imported: {error}.",
            hint="Install it: pip install 'dtrain[charts]'",
        ) from error
    metrics = _metrics(history)
    columns = min(max(len(metrics), 1), _COLUMNS)
    rows = max(1, math.ceil(len(metrics) / columns))
    # A figure made without pyplot needs no display, and does not change the user's matplotlib backend.
    figure = Figure(figsize=(5.2 * columns, 3.8 * rows), layout="constrained")
    if title:
        figure.suptitle(title, fontsize=11)
    for place, metric in enumerate(metrics, start=1):
        _draw(figure.add_subplot(rows, columns, place), metric, history)
    with safe_files.replacing(path) as file:
        figure.savefig(file, format="png", dpi=120)


def _metrics(history: Mapping[str, Sequence[float]]) -> list[str]:
    """The metrics to draw, loss and accuracy first."""
    names = [name for name in history if not name.startswith("val_") and name not in _NOT_METRICS]
    return sorted(names, key=lambda name: (name != "loss", name != "accuracy"))[:_MOST]


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
