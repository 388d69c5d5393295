"""The variable classes of dtrain's strategies: TensorFlow's own, with two additions.

The training step sees their writes, and a replica can update them alone. They add no state: what is stored,
saved and restored is the same as in TensorFlow.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from dtrain.keras_engine.context import current_step, note_write, updating_locally
from dtrain.upstream import tensorflow_names

_Mirrored: Any = tensorflow_names.MIRRORED_VARIABLE.resolve()
_SyncOnRead: Any = tensorflow_names.SYNC_ON_READ.resolve()


class _Number:
    """Converts a distributed variable to a NumPy array or a number, as a plain `tf.Variable` does."""

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return np.asarray(self.numpy(), dtype=dtype)  # type: ignore[attr-defined]

    def __float__(self) -> float:
        return float(self.numpy())  # type: ignore[attr-defined]

    def __int__(self) -> int:
        return int(self.numpy())  # type: ignore[attr-defined]

    def __complex__(self) -> complex:
        return complex(self.numpy())  # type: ignore[attr-defined]


class ReplicatedVariable(_Number, _Mirrored):  # type: ignore[misc]
    """A variable with one copy for each replica."""

    def _update_replica(self, update_fn: Callable[..., Any], value: Any, **kwargs: Any) -> Any:
        if self.aggregation == tf.VariableAggregation.NONE:
            note_write(self)
        if updating_locally():
            return update_fn(self._get_on_device_or_primary(), value, **kwargs)
        return super()._update_replica(update_fn, value, **kwargs)


class SummedVariable(_Number, _SyncOnRead):  # type: ignore[misc]
    """A variable of which each replica holds a part, such as a metric's; reading it combines the parts."""


class CentralVariable(_Number, _Mirrored):  # type: ignore[misc]
    """A variable with a single copy for all replicas of the process."""

    def _get_replica(self, replica_id: int) -> Any:
        return self._values[0]

    def _get(self) -> Any:
        return self._values[0]

    def _get_on_device_or_primary(self) -> Any:
        return self._values[0]

    @property
    def handle(self) -> Any:
        """The handle of the only copy."""
        return self._values[0].handle

    def _update_replica(self, update_fn: Callable[..., Any], value: Any, **kwargs: Any) -> Any:
        step = current_step()
        if step is not None:
            step.note_shared_write(self)
        if updating_locally():
            return update_fn(self._values[0], value, **kwargs)
        if self.aggregation != tf.VariableAggregation.NONE:
            return super()._update_replica(update_fn, value, **kwargs)

        # All replicas computed the same value (a spectral norm, for example): write the first one's, once.
        def once(strategy: Any, merged: Any) -> Any:
            first = strategy.experimental_local_results(merged)[0]
            return self._update_cross_replica(update_fn, first, **kwargs)

        return tf.distribute.get_replica_context().merge_call(once, args=(value,))


def made_replicated(variable: Any) -> Any:
    """Converts a variable that TensorFlow's strategy created to dtrain's class; returns others unchanged.

    The class is changed in place, because TensorFlow has no way to specify the class to create.
    """
    if type(variable) is _Mirrored:
        variable.__class__ = ReplicatedVariable
    elif type(variable) is _SyncOnRead:
        variable.__class__ = SummedVariable
    return variable


def made_central(variable: Any) -> Any:
    """As `made_replicated`, for a variable with a single copy."""
    if type(variable) is _Mirrored:
        variable.__class__ = CentralVariable
    return variable
