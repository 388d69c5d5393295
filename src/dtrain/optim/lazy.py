"""Adam that updates only those rows of an embedding that a batch looks up.

Keras' Adam updates every row at every step, because momentum moves rows without a gradient too. With a table
of millions of rows this takes most of the step. LazyAdam does not give Adam's numbers for such tables.
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from dtrain.upstream import keras_optimizers


@keras.saving.register_keras_serializable(package="dtrain")
class LazyAdam(keras.optimizers.Adam):  # type: ignore[misc]
    """Adam that updates moments and weights only in rows that have a gradient, under any strategy.

    For dense gradients it equals Adam. For the gradients of an embedding lookup the numbers differ from
    Adam's: the moments of a row do not decay while no batch looks the row up. A row that a batch looks up
    twice is updated once, with the sum of its gradients. The arguments are those of `keras.optimizers.Adam`.

    Example:
        ```python
        layers = [keras.layers.Embedding(1000, 8), keras.layers.Flatten(), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((5,)), *layers])
        model.compile(dtrain.optim.LazyAdam(0.01), "mse")
        ```
    """

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """Update a variable as Adam does; for `tf.IndexedSlices`, only the rows with a gradient."""
        if not isinstance(gradient, tf.IndexedSlices):
            super().update_step(gradient, variable, learning_rate)
            return
        rows, places = tf.unique(gradient.indices)
        summed = tf.math.unsorted_segment_sum(gradient.values, places, tf.size(rows))
        summed = tf.cast(summed, variable.dtype)
        number = keras_optimizers.number_of_variable(self, variable)
        rate = self._rate(tf.cast(learning_rate, variable.dtype))
        momentum = self._moved(self._momentums[number], summed, self.beta_1, rows)
        velocity = self._moved(self._velocities[number], tf.square(summed), self.beta_2, rows)
        if self.amsgrad:
            largest = self._velocity_hats[number]
            velocity = tf.maximum(tf.gather(largest.value, rows), velocity)
            self.assign(largest, tf.IndexedSlices(velocity, rows))
        change = rate * momentum / (tf.sqrt(velocity) + self.epsilon)
        self.assign_sub(variable, tf.IndexedSlices(change, rows))

    def _rate(self, learning_rate: tf.Tensor) -> tf.Tensor:
        """The learning rate with the bias correction of both moments."""
        step = tf.cast(self.iterations + 1, learning_rate.dtype)
        first, second = 1.0 - tf.pow(self.beta_1, step), 1.0 - tf.pow(self.beta_2, step)
        return learning_rate * tf.sqrt(second) / first

    def _moved(self, slot: Any, value: tf.Tensor, decay: float, rows: tf.Tensor) -> tf.Tensor:
        """Update some rows of a moment; returns their new values."""
        moved = tf.gather(slot.value, rows)
        moved = moved + (value - moved) * (1.0 - decay)
        self.assign(slot, tf.IndexedSlices(moved, rows))
        return moved
