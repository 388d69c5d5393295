"""Gradients that workers send in 8 bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from dtrain.base.quantization import Quantization
from dtrain.gradient_hooks.hook_state import StatefulHook, common_variable, is_matrix
from dtrain.interfaces.gradient_hook import check_integer
from dtrain.interfaces.managed_strategy import managed

_MOST_CALLS = 4096  # of a step: the numbers of its calls follow those of the step before


class Int8(StatefulHook):
    """Sends the gradients of matrices between workers in 8 bits, with a scale for each 256 numbers.

    Rounding is stochastic, so the mean of what arrives is what was sent. The rounding of a step depends on
    the seed and the number of the step only. Both the parts that workers sum and the sums are sent so. Within
    a process nothing is sent. Vectors and sparse gradients are sent as they are.

    It needs dtrain's own transports: MPI or sockets.

    Args:
        seed: of the rounding.

    Raises:
        ConfigurationError: `seed` is not an integer of at least 0.

    Example:
        ```python
        strategy = dtrain.MirroredStrategy(gradient_hook="int8")
        ```

    Source: Alistarh et al. (arXiv 1610.02132); a scale for each block: Dettmers et al. (arXiv 2110.02861).
    """

    bits = 8

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        check_integer(seed, "seed", least=0)
        self._quantization = Quantization(self.bits, seed)

    def reduce(
        self,
        gradients: list[tf.Tensor],
        variables: list[Any],
        all_reduce: Callable[[list[tf.Tensor]], list[tf.Tensor]],
    ) -> list[tf.Tensor]:
        """As `GradientHook.reduce`: each process sums over its replicas first."""
        states, matrices, whole = self._own_states(variables)
        reduced = dict(zip(whole, all_reduce([gradients[i] for i in whole]), strict=True))
        groups = managed(tf.distribute.get_strategy()).reduction_groups([gradients[i] for i in matrices])
        for call, group in enumerate(groups if matrices else ()):
            numbers = [matrices[place] for place in group]
            step = states[numbers[0]][0].read_value()
            vector = tf.concat([tf.reshape(tf.cast(gradients[i], tf.float32), [-1]) for i in numbers], axis=0)
            total = tf.distribute.get_replica_context().merge_call(
                self._summed, args=(vector, step * _MOST_CALLS + call)
            )
            sizes = [int(np.prod(gradients[i].shape)) for i in numbers]
            for i, part in zip(numbers, tf.split(total, sizes), strict=True):
                reduced[i] = tf.cast(tf.reshape(part, gradients[i].shape), gradients[i].dtype)
        for i in matrices:
            states[i][0].assign_add(1)
        return [reduced[i] for i in range(len(gradients))]

    def _summed(self, strategy: Any, vector: Any, number: Any) -> tf.Tensor:
        """The sum over all replicas of the job."""
        total = tf.add_n(strategy.experimental_local_results(vector))
        calls = managed(strategy).calls
        if calls is None:
            return total
        return calls.quantized_sum(total, self._quantization, strategy.experimental_local_results(number)[0])

    def _make(self, weight: Any) -> list[tf.Variable]:
        """The number of a matrix' steps."""
        return [common_variable(tf.zeros([], tf.int64), "quantized_steps")] if is_matrix(weight) else []
