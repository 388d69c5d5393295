"""PowerSGD: gradients of matrices are sent as two thin matrices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from dtrain.gradient_hooks.hook_state import StatefulHook, common_variable, error_memory, is_matrix
from dtrain.interfaces.gradient_hook import check_integer, check_steps


class PowerSGD(StatefulHook):
    """Sends the gradient of a matrix as two matrices of a low rank, and remembers what they leave out.

    A gradient of shape `(..., n)` is a matrix M with n columns. The replicas sum M Q of shape `(rows, rank)`,
    make its columns orthonormal, which gives P, and sum transposed(M) P, which is the next step's Q. The
    reduced gradient is P times transposed(Q). What it lacks of a replica's own gradient is added to that
    replica's next one. Vectors, sparse gradients, and matrices so small that nothing would be saved are sent
    as they are.

    The reduced gradient depends on the sum over the replicas only, not on how they share the examples.

    Args:
        rank: the columns of both matrices. A higher one is more precise, and sends more.
        start: the first steps of a model, whose gradients are sent as they are; in `fit` only.
        seed: of the first Q.

    Raises:
        ConfigurationError: `rank` is not an integer of at least 1, `start` or `seed` not one of at least 0.

    Example:
        ```python
        strategy = dtrain.MirroredStrategy(gradient_hook=dtrain.PowerSGD(rank=2))
        with strategy.scope():
            model = keras.Sequential([keras.Input((16,)), keras.layers.Dense(16), keras.layers.Dense(1)])
            model.compile("sgd", "mse")
        model.fit(np.ones((64, 16)), np.ones((64, 1)), batch_size=8, verbose=0)
        ```

    Source: Vogels, Karimireddy and Jaggi (arXiv 1905.13727).
    """

    def __init__(self, rank: int = 4, *, start: int = 0, seed: int = 0) -> None:
        super().__init__()
        check_integer(rank, "rank", least=1)
        check_steps(start, "start", least=0)
        check_integer(seed, "seed", least=0)
        self.rank, self.start, self.seed = rank, start, seed

    def reduce(
        self,
        gradients: list[tf.Tensor],
        variables: list[Any],
        all_reduce: Callable[[list[tf.Tensor]], list[tf.Tensor]],
    ) -> list[tf.Tensor]:
        """As `GradientHook.reduce`: what all replicas get is the same product of two matrices."""
        states, low, whole = self._own_states(variables)
        matrices = {i: _matrix(tf.cast(gradients[i], tf.float32) + states[i][0]) for i in low}
        products = [matrices[i] @ states[i][1] for i in low]
        sums = all_reduce([*products, *(gradients[i] for i in whole)])
        reduced = dict(zip(whole, sums[len(low) :], strict=True))
        bases = [tf.linalg.qr(total).q for total in sums[: len(low)]]
        mine = [tf.matmul(matrices[i], base, transpose_a=True) for i, base in zip(low, bases, strict=True)]
        for i, base, part, total in zip(low, bases, mine, all_reduce(mine) if low else [], strict=True):
            unsent, factor = states[i]
            unsent.assign(tf.reshape(matrices[i] - tf.matmul(base, part, transpose_b=True), unsent.shape))
            factor.assign(total)
            product = tf.matmul(base, total, transpose_b=True)
            reduced[i] = tf.cast(tf.reshape(product, unsent.shape), gradients[i].dtype)
        return [reduced[i] for i in range(len(gradients))]

    def _make(self, weight: Any) -> list[tf.Variable]:
        """What was not sent of a matrix, and Q."""
        if not is_matrix(weight):
            return []
        columns = weight.shape[-1]
        rows = int(np.prod(weight.shape[:-1]))
        if self.rank * (rows + columns) >= rows * columns:
            return []
        first = tf.random.stateless_normal([columns, self.rank], [self.seed, 0])
        return [error_memory(weight), common_variable(first, "low_rank_factor")]


def _matrix(gradient: tf.Tensor) -> tf.Tensor:
    return tf.reshape(gradient, [-1, gradient.shape[-1]])
