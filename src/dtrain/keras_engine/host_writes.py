"""Counts what a program writes to replicated variables outside of steps, as a callback does.

All workers must write the same values there: no step makes their copies equal again. `operation.py` sends the
count with each operation, so the workers compare it. The writes of steps are not counted here.
"""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import tensorflow as tf

_count = 0
_digest = 0  # of all written values, in their order
_last = ""  # the name of the variable that was written last


def note(name: str, value: Any) -> None:
    """Notes that a value is written to a variable on this worker.

    Args:
        name: the name of the variable.
        value: a tensor or an array; the content of values of single replicas is not compared.
    """
    global _count, _digest, _last
    _count, _last = _count + 1, name
    if not isinstance(value, tf.distribute.DistributedValues):
        content = np.asarray(value)
        _digest = zlib.crc32(str(value).encode() if content.dtype == object else content.tobytes(), _digest)


def words() -> str:
    """What this worker has written, for the text of an operation; "" for nothing."""
    if not _count:
        return ""
    values = "value" if _count == 1 else "values"
    return f" after {_count} {values} set outside of steps ({_digest:08x}), the last that of {_last}"
