"""Reads the scalars of a run's TensorBoard files, for runs that have neither events nor `metrics.csv`.

It uses those readers of the package tensorboard that need no TensorFlow. It reads scalars only.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dtrain.base import safe_files
from dtrain.monitor.line_files import finite

_EPOCH_TAG = "epoch_"
_VALIDATION = "validation"
_SCALARS = "scalars"
_MOST_BYTES = 1 << 30  # of one file
_MOST_RECORDS = 5_000_000
_HIGHEST = 10**12  # of a step
_DEEPEST = 8  # folders inside of each other

Scalars = dict[str, dict[int, float | None]]
"""For each name, the value of each step; None for NaN."""


def read_tensorboard(directory: Path) -> tuple[Scalars, Scalars, list[str]]:
    """The scalars of all event files in and below a directory.

    Args:
        directory: the directory of Keras' TensorBoard callback, which holds `train` and `validation`.

    Returns:
        The scalars by epoch, under the names of Keras' logs (`loss`, `val_loss`); all others, under their
        tags; and one sentence for each file that could not be read to its end.
    """
    by_epoch: Scalars = {}
    others: Scalars = {}
    problems = []
    for file in sorted(_event_files(directory)):
        place = file.relative_to(directory)
        prefix = "val_" if _VALIDATION in place.parts[:-1] else ""
        scalars, problem = _read_file(file)
        if problem:
            problems.append(f"tensorboard/{place} cannot be read {problem}")
        for tag, values in scalars.items():
            if tag.startswith(_EPOCH_TAG):
                by_epoch.setdefault(prefix + tag.removeprefix(_EPOCH_TAG), {}).update(values)
            elif not tag.endswith("_vs_iterations"):  # Keras writes the values by epoch a second time
                others.setdefault(prefix + tag, {}).update(values)
    return by_epoch, others, problems


def _event_files(directory: Path, depth: int = _DEEPEST) -> Iterator[Path]:
    """The event files in and below a directory, without what links lead to."""
    with contextlib.suppress(OSError):
        for path in directory.iterdir():
            if safe_files.is_link(path):
                continue
            if path.is_dir():
                if depth:
                    yield from _event_files(path, depth - 1)
            elif "tfevents" in path.name:
                yield path


def _read_file(file: Path) -> tuple[Scalars, str]:
    """The scalars of one file, and the reason why it was not read to its end, or ""."""
    try:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.tensorflow_stub import errors
        from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import PyRecordReader_New
    except ImportError as error:
        return {}, f"without the package tensorboard, which cannot be imported: {error}."
    scalars: Scalars = {}
    count = 0
    try:
        if safe_files.size(file) > _MOST_BYTES:
            return {}, f": it has {safe_files.size(file)} bytes; at most {_MOST_BYTES} are read."
        reader = PyRecordReader_New(str(file))
        while count < _MOST_RECORDS:
            reader.GetNext()
            event = Event.FromString(reader.record())
            count += 1
            for value in event.summary.value:
                number = _scalar(value)
                if number is not None and 0 <= event.step <= _HIGHEST:
                    scalars.setdefault(value.tag, {})[int(event.step)] = finite(number)
        return scalars, f"past record {count}: no more are read."
    except errors.OutOfRangeError:
        return scalars, ""
    except errors.DataLossError:
        return scalars, f"past record {count}: the file is damaged or cut off there."
    except Exception as error:  # a complete record that is no event raises the parser's own errors
        return scalars, f"past record {count}: {type(error).__name__}: {error}."


def _scalar(value: Any) -> float | None:
    """The number of a summary, which may be NaN; None if the summary is no scalar."""
    if value.HasField("simple_value"):
        return float(value.simple_value)
    if not value.HasField("tensor") or value.metadata.plugin_data.plugin_name != _SCALARS:
        return None
    from tensorboard.util.tensor_util import make_ndarray

    if value.tensor.tensor_shape.dim:  # a few bytes could declare an array of any size
        return math.nan
    array = make_ndarray(value.tensor)
    return float(array) if array.size == 1 else math.nan
