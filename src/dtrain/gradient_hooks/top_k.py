"""Top-k: of a gradient, only the largest numbers are sent, and the others remembered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from dtrain.base.words import is_number
from dtrain.errors import ConfigurationError
from dtrain.gradient_hooks.hook_state import StatefulHook, error_memory
from dtrain.interfaces.gradient_hook import check_steps


class TopK(StatefulHook):
    """Sends the largest numbers of each gradient with their places, and adds the others to the next gradient.

    Each replica chooses its own numbers, by their absolute values. Each gets those of all others, so with
    n replicas up to n times as many numbers change. A replica sends 12 bytes for each, to each other worker.
    Sparse gradients are sent as they are, and so are weights of which more than a third of the numbers would
    be sent, as that saves nothing.

    Args:
        ratio: the part of a gradient's numbers that is sent, at least one number.
        start: the first steps of a model, whose gradients are sent as they are; in `fit` only.

    Raises:
        ConfigurationError: `ratio` is not a number above 0 and below 1, `start` not an integer of at least 0.

    Example:
        ```python
        strategy = dtrain.MirroredStrategy(gradient_hook=dtrain.TopK(0.05))
        with strategy.scope():
            model = keras.Sequential([keras.Input((16,)), keras.layers.Dense(16), keras.layers.Dense(1)])
            model.compile("sgd", "mse")
        model.fit(np.ones((64, 16)), np.ones((64, 1)), batch_size=8, verbose=0)
        ```

    Source: Aji and Heafield (arXiv 1704.05021); why the others are remembered: Stich et al. (arXiv
    1809.07599).
    """

    def __init__(self, ratio: float = 0.01, *, start: int = 0) -> None:
        super().__init__()
        if not is_number(ratio) or not 0.0 < ratio < 1.0:
            raise ConfigurationError(
                f"ratio is {ratio!r}, not a number above 0 and below 1.",
                hint="it is the part of a gradient's numbers that is sent; 0.01 sends one in a hundred",
            )
        check_steps(start, "start", least=0)
        self.ratio, self.start = ratio, start

    def reduce(
        self,
        gradients: list[tf.Tensor],
        variables: list[Any],
        all_reduce: Callable[[list[tf.Tensor]], list[tf.Tensor]],
    ) -> list[tf.Tensor]:
        """As `GradientHook.reduce`: the sum of what all replicas have sent."""
        states, chosen, whole = self._own_states(variables)
        places, values, offset = [], [], 0
        sizes = [int(np.prod(states[i][0].shape)) for i in chosen]
        for i, size in zip(chosen, sizes, strict=True):
            (unsent,) = states[i]
            flat = tf.reshape(tf.cast(gradients[i], tf.float32) + unsent, [-1])
            _, largest = tf.math.top_k(tf.abs(flat), self._number(size), sorted=False)
            sent = tf.gather(flat, largest)
            left = tf.tensor_scatter_nd_update(flat, largest[:, tf.newaxis], tf.zeros_like(sent))
            unsent.assign(tf.reshape(left, unsent.shape))
            places.append(tf.cast(largest, tf.int64) + offset)
            values.append(sent)
            offset += size
        given: list[Any] = [gradients[i] for i in whole]
        if chosen:
            shape = tf.constant([offset], tf.int64)
            given.append(tf.IndexedSlices(tf.concat(values, 0), tf.concat(places, 0), shape))
        sums = all_reduce(given)
        reduced = dict(zip(whole, sums[: len(whole)], strict=True))
        if chosen:
            total = tf.math.unsorted_segment_sum(sums[-1].values, sums[-1].indices, offset)
            for i, part in zip(chosen, tf.split(total, sizes), strict=True):
                reduced[i] = tf.cast(tf.reshape(part, states[i][0].shape), gradients[i].dtype)
        return [reduced[i] for i in range(len(gradients))]

    def _number(self, size: int) -> int:
        return max(1, round(self.ratio * size))

    def _make(self, weight: Any) -> list[tf.Variable]:
        """What was not sent of a weight's gradients."""
        size = int(np.prod(weight.shape))
        small = size < 3 * self._number(size) or not weight.dtype.is_floating
        return [] if small else [error_memory(weight)]
