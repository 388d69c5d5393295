"""Local SGD: averages the replicas' weights every few steps of a `fit`, instead of all-reducing gradients.

Between two averagings each replica updates its own weights with its own gradients; `gradients.py` leaves
these as they are. Which steps follow each other is decided in `step_function.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from dtrain.base.log import logger
from dtrain.engine.loops.local_state import LocalState
from dtrain.engine.replica.context import all_reduce_sum, local_update
from dtrain.engine.sharding.sharding_plan import is_sharded
from dtrain.errors import ConfigurationError
from dtrain.interfaces.replica_layout import ReplicaLayout
from dtrain.telemetry import events
from dtrain.upstream import keras_optimizers
from dtrain.upstream.tf_variables import underlying


class WeightAverages(LocalState):
    """The weights that the replicas of one `fit` update by themselves.

    An averaging replaces each weight, and each of the optimizer's floats that belong to one, by its mean over
    the replicas. It follows `average_every` steps after the one before, and the last step of each
    epoch. So all replicas are equal in validation, in callbacks between epochs and in checkpoints, which
    wait for the next averaging. No later number depends on when a checkpoint is saved.

    Args:
        model: a compiled model.
        layout: the layout of its strategy, whose gradient hook sets `average_every`.
        callbacks: the callbacks of the `fit`.

    Raises:
        ConfigurationError: the optimizer's state cannot be averaged, or a callback of Keras' saves in the
            middle of an epoch, where the replicas differ.
    """

    def __init__(self, model: Any, layout: ReplicaLayout, callbacks: Sequence[Any]) -> None:
        super().__init__()
        _check_optimizer(model.optimizer)
        _check_callbacks(callbacks)
        self._model = model
        self._layout = layout
        self._every = layout.average_every
        self._since = 0  # steps since the last averaging

    @property
    def savable(self) -> bool:  # type: ignore[override]
        """Whether all replicas are equal now."""
        return self._equal

    @property
    def round_begins(self) -> bool:  # type: ignore[override]
        """Whether the next step is the first one of a round."""
        return self._since % self._every == 0

    def fitting(self, steps: int) -> int:
        """The most steps, up to `steps`, that end with a round; `steps` if no round ends before."""
        first = self._every - self._since % self._every
        return steps if steps < first else steps - (steps - first) % self._every

    def next_run(self, most: int) -> tuple[str | None, int]:
        """The usual way to treat gradients, at most until the next averaging."""
        return None, min(most, self._every - self._since)

    def note(self, steps: int) -> None:
        """Counts the steps, and averages if it is time."""
        self._since += steps
        if self._since >= self._every:
            self._average()()
            self._since = 0

    def close(self) -> None:
        """Averages, unless the replicas are equal already."""
        if self._since:
            average = self._average()
            with events.waiting_for_others():  # no step runs whose time includes this waiting
                average()
            self._since = 0

    def abandon(self) -> None:
        """After an error: one worker averages; several cannot, because the others may not come."""
        if self._layout.workers == 1:
            self.close()
        elif not self._equal:
            logger.warning("fit ended while replicas trained alone: each worker has weights of its own.")

    @property
    def _equal(self) -> bool:
        """Whether all replicas have the same weights now."""
        return self._since == 0

    def _average(self) -> Callable[[], Any]:
        return self.traced(self._model.distribute_strategy, self._in_replica)

    def _in_replica(self) -> None:
        optimizer = self._model.optimizer
        variables = []
        for weight in self._model.trainable_variables:
            variables += [weight, *keras_optimizers.slots_of(optimizer, weight)]
        variables += self._model.non_trainable_variables
        mine = [variable for variable in map(underlying, variables) if variable.dtype.is_floating]
        sums = all_reduce_sum([tf.cast(variable.read_value(), wide(variable.dtype)) for variable in mine])
        with local_update():
            for variable, total in zip(mine, sums, strict=True):
                variable.assign(tf.cast(total / self._layout.replicas, variable.dtype))


def wide(dtype: tf.DType) -> tf.DType:
    """The type in which values are summed."""
    return dtype if dtype.size >= 4 else tf.float32


def _check_optimizer(optimizer: Any) -> None:
    """Checks that the state of an optimizer can be averaged.

    Raises:
        ConfigurationError: it cannot.
    """
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        reason = "each replica would look for overflow, and change the loss scale, by itself"
    elif not isinstance(optimizer, keras.optimizers.Optimizer) or hasattr(optimizer, "optimizers"):
        reason = f"the state of a {type(optimizer).__name__} is not known"
    elif is_sharded(optimizer):
        reason = "its state is divided over the replicas"
    else:
        return
    raise ConfigurationError(
        f"With local SGD or DiLoCo, replicas train alone, but {reason}.",
        hint="use one of Keras' optimizers with its whole state, in float32 or bfloat16",
    )


def _check_callbacks(callbacks: Sequence[Any]) -> None:
    """Checks that Keras saves nothing between two averagings; dtrain's own checkpoints wait for the next one.

    Raises:
        ConfigurationError: a callback saves by a number of batches.
    """
    for callback in callbacks:
        keras_own = isinstance(callback, keras.callbacks.ModelCheckpoint) or (
            type(callback) is keras.callbacks.BackupAndRestore
        )
        if keras_own and callback.save_freq != "epoch":
            raise ConfigurationError(
                f"{type(callback).__name__}(save_freq={callback.save_freq!r}) saves between two rounds "
                "of local SGD or DiLoCo, where each replica has weights of its own.",
                hint="set save_freq='epoch', or use dtrain.BackupAndRestore",
            )
