"""Counts what a program writes to variables outside of steps, as a callback does.

All workers must write the same values there: no step makes their copies equal again. The count goes with each
operation of a worker, so the workers compare it. The writes of steps are not counted here.
"""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import tensorflow as tf

from dtrain.process_group.running_operations import must_agree

_SOME = 16  # values of an array that are compared
_NOISE = 1e-6  # values that are all smaller may be what rounding has left of zeros
_LEVELS = 64  # of the values of an array, up to its largest one

_count = 0
_digest = 0  # of all written values, in their order
_last = ""  # the name of the variable that was written last


def note(name: str, value: Any) -> None:
    """Notes that a value is written to a variable on this worker.

    Args:
        name: the name of the variable.
        value: a tensor, an array, or a nest of these, such as the rows that are written and their numbers;
            the content of values of single replicas is not compared.
    """
    global _count, _digest, _last
    _count, _last = _count + 1, name
    if not isinstance(value, tf.distribute.DistributedValues):
        _digest = digest(value, _digest)


def digest(value: Any, before: int = 0) -> int:
    """A digest of a few values of each array, the same on processors that round differently.

    Args:
        value: a nest of tensors, arrays and None.
        before: the digest of what comes before.
    """
    for leaf in tf.nest.flatten(value, expand_composites=True):
        if leaf is not None:
            before = zlib.crc32(_rounded(np.asarray(leaf)), before)
    return before


def words() -> str:
    """What this worker has written, for the text of an operation; "" for nothing."""
    if not _count:
        return ""
    values = "value" if _count == 1 else "values"
    return f" after {_count} {values} set outside of steps ({_digest:08x}), the last that of {_last}"


must_agree.append(words)


def _rounded(value: np.ndarray) -> bytes:
    """A few values of an array, rounded: processors of different kinds may compute other last bits."""
    some = value.reshape(-1)[
        np.unique(np.linspace(0, max(value.size - 1, 0), _SOME).astype(np.int64))[: value.size]
    ]
    if value.dtype.kind in "biuSUO":
        return str(some.tolist()).encode()
    some = np.abs(some) if value.dtype.kind == "c" else some.astype(np.float64)
    most = float(np.abs(some).max(initial=0.0))
    if not np.isfinite(most):
        return str(np.isfinite(some).tolist()).encode()
    return f"{most:.3g} {np.rint(some / most * _LEVELS).tolist()}".encode() if most > _NOISE else b"0"
