"""The loop of TensorFlow's guide to parameter servers, as a user writes it: what `fit` is measured against.

It knows no dtrain; under dtrain's strategy it shows what a loop of one's own costs there.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


class PlainLoop:
    """Schedules a step a call; data are on the workers, the loss stays where it is.

    Args:
        strategy: a parameter-server strategy, TensorFlow's or dtrain's.
        model: called in the strategy's scope, gives a built Keras model; the loss is mean squared error.
        data: called for every worker, gives batches without end.
        optimizer: as Keras calls it; None: the step subtracts 0.01 times the gradients itself.
        keeps_loss: whether a Keras metric keeps the mean of the loss, as `fit` does.
        steps_a_call: how many steps a scheduled function makes.
    """

    def __init__(
        self,
        strategy: Any,
        model: Callable[[], Any],
        data: Callable[[], Any],
        *,
        optimizer: str | None,
        keeps_loss: bool = False,
        steps_a_call: int = 1,
    ) -> None:
        import keras
        import tensorflow as tf

        self._steps_a_call = steps_a_call
        self._coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
        with strategy.scope():
            network = model()
            variables = network.trainable_variables
            updater = keras.optimizers.get(optimizer or "sgd")
            updater.build(variables)
            mean_loss = keras.metrics.Mean()
        self._iterator = iter(self._coordinator.create_per_worker_dataset(data))

        def replica_step(batch: Any) -> Any:
            x, y = batch
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((network(x, training=True) - y) ** 2)
            gradients = tape.gradient(loss, [v.value for v in variables])
            if optimizer is None:
                for variable, gradient in zip(variables, gradients, strict=True):
                    variable.value.assign_sub(0.01 * gradient)
            else:
                updater.apply_gradients(zip(gradients, variables, strict=True))
            if keeps_loss:
                mean_loss.update_state(loss)
            return loss

        @tf.function
        def step(iterator: Any) -> Any:
            loss = tf.constant(0.0)
            if steps_a_call == 1:
                return strategy.run(replica_step, args=(next(iterator),))
            for _ in tf.range(steps_a_call):
                loss = strategy.run(replica_step, args=(next(iterator),))
            return loss

        self._step = step
        self(steps_a_call * 20)  # traces, on every worker

    def __call__(self, steps: int) -> float:
        """Seconds a step, from the first `schedule` to the return of `join`."""
        start = time.perf_counter()
        for _ in range(steps // self._steps_a_call):
            self._coordinator.schedule(self._step, args=(self._iterator,))
        self._coordinator.join()
        return (time.perf_counter() - start) / steps
