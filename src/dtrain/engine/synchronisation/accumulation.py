"""Lets each replica sum its own gradients of several micro-batches, so that an update takes one all-reduce.

The partial sums exist only while an epoch of `fit` runs; during validation and between epochs every replica
holds the total, as in Keras. Where that is not possible, every micro-batch is all-reduced; when a step runs
is decided in `step_function.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from dtrain.base.log import logger
from dtrain.engine.loops.local_state import LocalState
from dtrain.engine.replica.context import all_reduce_sum, local_update
from dtrain.interfaces.replica_layout import ReplicaLayout
from dtrain.telemetry import events
from dtrain.upstream import keras_optimizers, tf_replicas

PARTS = "parts"
"""The phase of steps in which each replica's accumulators hold a part of the sums."""


class MicroBatchSums(LocalState):
    """The gradient sums that one optimizer accumulates over micro-batches, while `fit` runs.

    The sums are in the optimizer's accumulators. This object knows whether these hold partial sums, one a
    replica, or the total on every replica.

    Args:
        optimizer: a Keras optimizer with `gradient_accumulation_steps`.
        strategy: the optimizer's strategy.
        layout: the layout of that strategy.
    """

    def __init__(self, optimizer: Any, strategy: Any, layout: ReplicaLayout) -> None:
        super().__init__()
        self._optimizer = optimizer
        self._strategy = strategy
        self._layout = layout
        self._open = False
        # Whether each replica holds the total; else it holds a partial sum.
        self._whole = True

    def open(self) -> None:
        """Allows the replicas to hold partial sums from now on."""
        self._open = True

    def next_run(self, most: int) -> tuple[str | None, int]:
        """`PARTS` for all of the next micro-batches, or None where every micro-batch is all-reduced."""
        if not self._open:
            return None, most
        if self._whole:
            self._everywhere(self._keep_one)()
            self._whole = False
        return PARTS, most

    def close(self) -> None:
        """All-reduces the partial sums, so that every replica holds the total. All workers must call it."""
        self._open = False
        if not self._whole:
            join = self._everywhere(self._join)
            with events.waiting_for_others():  # no step runs whose time includes this waiting
                join()
        self._whole = True

    @property
    def apart(self) -> bool:  # type: ignore[override]
        """Whether the replicas hold partial sums now."""
        return not self._whole

    def restore(self, *, apart: bool) -> None:
        """Notes that a checkpoint was restored to the accumulators.

        Args:
            apart: whether they now hold partial sums; else every replica holds the total.
        """
        self._whole = not apart

    def abandon(self) -> None:
        """Cleans up after an error in `fit`.

        One worker alone all-reduces the partial sums of its replicas. Several workers set them to zero: other
        workers may have accumulated nothing, and a wrong sum is worse than none.
        """
        self._open = False
        if self._whole:
            return
        if self._layout.workers == 1:
            self.close()
            return
        logger.warning(
            "fit ended in the middle of an accumulation; the gradients accumulated so far are dropped."
        )
        self._everywhere(self._drop)()
        self._whole = True

    def _everywhere(self, function: Callable[[], None]) -> Callable[[], Any]:
        if not self._optimizer.built:  # it has no accumulators yet
            return lambda: None
        return self.traced(self._strategy, function)

    def _keep_one(self) -> None:
        """Keeps the total on the first of all replicas, and sets the sums of the others to zero."""
        if self._layout.first_replica + tf_replicas.local_replica_index() > 0:
            self._drop()

    def _drop(self) -> None:
        with local_update():
            for accumulator in keras_optimizers.accumulators_of(self._optimizer):
                accumulator.assign(tf.zeros(accumulator.shape, accumulator.dtype))

    def _join(self) -> None:
        accumulators = keras_optimizers.accumulators_of(self._optimizer)
        totals = all_reduce_sum([tf.convert_to_tensor(accumulator.value) for accumulator in accumulators])
        with local_update():
            for accumulator, total in zip(accumulators, totals, strict=True):
                accumulator.assign(total)


def abandon(state: LocalState) -> None:
    """Cleans up what replicas held by themselves in a `fit` that an exception ended.

    An error in the cleaning up is logged and not raised, because it must not hide that exception.
    """
    try:
        state.abandon()
    except Exception as error:
        logger.warning(
            "fit failed, and so did the cleanup of what each replica held: %s: %s. "
            "Create the model and the optimizer again before the next fit.",
            type(error).__name__,
            error,
        )


def can_sum_locally(model: Any, layout: ReplicaLayout) -> bool:
    """Whether each replica can accumulate a model's micro-batches by itself.

    It cannot with loss scaling, which looks for overflow in the global batch's gradients at every micro-batch
    and does not count a micro-batch that it skips. It cannot either with a single replica, under central
    storage, with an optimizer that is not Keras', where a variable is overwritten by its gradient, or where
    the model runs eagerly.
    """
    optimizer = model.optimizer
    if (
        layout.replicas == 1
        or layout.central
        or layout.divided
        or model.run_eagerly
        or not isinstance(optimizer, keras.optimizers.Optimizer)
    ):
        return False
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return False
    overwritten = any(getattr(v, "overwrite_with_gradient", False) for v in model.trainable_variables)
    return bool(optimizer.gradient_accumulation_steps) and not overwritten
