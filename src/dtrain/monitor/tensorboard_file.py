"""The scalars of a run's TensorBoard files, for runs that left nothing else to read them from.

It uses the readers of the package tensorboard that need no TensorFlow. It knows scalars only.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from dtrain.monitor.event_file import finite

_EPOCH_TAG = "epoch_"
_VALIDATION = "validation"
_SCALARS = "scalars"

Scalars = dict[str, dict[int, float | None]]
"""By name, for each step its value; None for NaN."""


def read_tensorboard(directory: Path) -> tuple[Scalars, Scalars, list[str]]:
    """The scalars of all event files in and below a directory.

    Args:
        directory: that of Keras' TensorBoard callback, with `train` and `validation` below it.

    Returns:
        Those by epoch, under the names of Keras' logs (`loss`, `val_loss`); all others, under their tags; and
        one sentence for each file that could not be read to its end.
    """
    by_epoch: Scalars = {}
    others: Scalars = {}
    problems = []
    for file in sorted(directory.rglob("*tfevents*")):
        place = file.relative_to(directory)
        prefix = "val_" if _VALIDATION in place.parts[:-1] else ""
        found, problem = _read_file(file)
        if problem:
            problems.append(f"tensorboard/{place} cannot be read {problem}")
        for tag, values in found.items():
            if tag.startswith(_EPOCH_TAG):
                by_epoch.setdefault(prefix + tag.removeprefix(_EPOCH_TAG), {}).update(values)
            elif not tag.endswith("_vs_iterations"):  # Keras' second drawing of what is there by epoch
                others.setdefault(prefix + tag, {}).update(values)
    return by_epoch, others, problems


def _read_file(file: Path) -> tuple[Scalars, str]:
    """The scalars of one file, and why it was not read to its end."""
    try:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.tensorflow_stub import errors
        from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import PyRecordReader_New
    except ImportError as error:
        return {}, f"without the package tensorboard, which cannot be imported: {error}."
    found: Scalars = {}
    count = 0
    try:
        reader = PyRecordReader_New(str(file))
        while True:
            reader.GetNext()
            event = Event.FromString(reader.record())
            count += 1
            for value in event.summary.value:
                number = _scalar(value)
                if number is not None:
                    found.setdefault(value.tag, {})[int(event.step)] = finite(number)
    except errors.OutOfRangeError:
        return found, ""
    except errors.DataLossError:
        return found, f"past record {count}: the file is damaged or cut off there."
    except Exception as error:  # the parser of records that are whole, but no events, raises its own
        return found, f"past record {count}: {type(error).__name__}: {error}."


def _scalar(value: Any) -> float | None:
    """The number of a summary; None for what is none. NaN is one."""
    if value.HasField("simple_value"):
        return float(value.simple_value)
    if not value.HasField("tensor") or value.metadata.plugin_data.plugin_name != _SCALARS:
        return None
    from tensorboard.util.tensor_util import make_ndarray

    array = make_ndarray(value.tensor)
    return float(array) if array.size == 1 and array.ndim == 0 else math.nan
