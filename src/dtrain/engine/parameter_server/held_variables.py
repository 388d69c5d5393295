"""The variables that the chief holds, such as metrics' variables: blocks start from them and change them.

The variables alone have the values. What a callback assigns between two batches is what the next block
starts from, and what a finished block has changed is added to it. No block is run here.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from dtrain.upstream.tf_variables import underlying

Values = list[np.ndarray]


class HeldVariables:
    """The variables of one session, and the change by its finished blocks that is not assigned yet.

    Only the thread that runs the callbacks may call `assign`, so no value changes during a callback. The
    caller makes sure that no two methods run at the same time.

    Args:
        variables: Keras or TensorFlow variables on the chief.
        device: the chief's device.
    """

    def __init__(self, variables: Sequence[object], device: str) -> None:
        # Keras variables stand for others while the chief traces a function.
        self._variables = [underlying(variable) for variable in variables]
        self._device = device
        self._change: tuple[Values, Values] | None = None  # the values before and after the finished blocks

    def values(self) -> Values:
        """What a block starts from: the variables' values, with the changes of all finished blocks."""
        now = self._read()
        return now if self._change is None else _each_merged(now, *self._change)

    def add(self, given: Values, returned: Values) -> None:
        """Adds the change of a finished block, which has started from `given`."""
        if self._change is None:
            self._change = given, returned
        else:
            before, after = self._change
            self._change = before, _each_merged(after, given, returned)

    def assign(self) -> None:
        """Assigns the changes of all finished blocks to the variables."""
        if self._change is None:
            return
        now = self._read()
        merged, self._change = _each_merged(now, *self._change), None
        for variable, old, new in zip(self._variables, now, merged, strict=True):
            if new is not old:
                variable.assign(new)

    def _read(self) -> Values:
        # The threads that run blocks have a worker's device as their own.
        with tf.device(self._device):
            return [np.asarray(variable.numpy()) for variable in self._variables]


def _each_merged(now: Values, before: Values, after: Values) -> Values:
    return [_merged(*values) for values in zip(now, before, after, strict=True)]


def _merged(now: np.ndarray, before: np.ndarray, after: np.ndarray) -> np.ndarray:
    """Makes a change to a value that others may have changed, too.

    Args:
        now: the value with the other changes.
        before: the value before the change.
        after: the value after the change.

    Returns:
        `now` if nothing changes it; `after` if nothing else has changed it, or if it is no number. Otherwise
        the sum of both changes.
    """
    if _same(before, after):
        return now
    if _same(now, before) or now.dtype == bool or now.dtype.kind in "OSU" or now.shape != before.shape:
        return after
    return np.asarray(now + (after - before), now.dtype)


def _same(one: np.ndarray, other: np.ndarray) -> bool:
    """Whether two values are the same; a NaN is the same as itself."""
    if one is other:
        return True
    if one.shape != other.shape:
        return False
    return np.array_equal(one, other) if one.dtype.kind in "OSU" else one.tobytes() == other.tobytes()
