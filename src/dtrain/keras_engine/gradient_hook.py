"""The seam between the backward pass and the update: how the gradients of the replicas are reduced.

Without a hook, gradients are all-reduced as they are. Hooks are not called where there is one replica, and
not on parameter servers, where each worker's gradients are applied by themselves.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from dtrain.errors import ConfigurationError, known_are


class GradientHook(abc.ABC):
    """Reduces gradients over the replicas; given to a strategy as `gradient_hook=`.

    One object serves all replicas of a process. It is called while a step is traced, so it must compute with
    TensorFlow's operations, and in the same way on all replicas and workers.
    """

    @abc.abstractmethod
    def reduce(
        self,
        gradients: list[tf.Tensor],
        variables: list[Any],
        all_reduce: Callable[[list[tf.Tensor]], list[tf.Tensor]],
    ) -> list[tf.Tensor]:
        """Returns the gradients that the step goes on with, in place of the all-reduced ones.

        It is called in a replica, once for each backward pass whose gradients are reduced. With local
        accumulation that is once for each update.

        Args:
            gradients: this replica's dense gradients, each of its variable's shape; rows that were looked up
                in a table, before they are summed, have the shape `(rows, *table.shape[1:])`. They are
                weighted by the replica's share of the examples, so their sum over the replicas is the
                gradient of the global batch. Sparse gradients (`tf.IndexedSlices`) are all-reduced without
                the hook.
            variables: the variable of each gradient, as the program names it: Keras' or TensorFlow's.
            all_reduce: returns the sums of tensors over all replicas. The first call gets the
                tensors of all replicas, so every replica must call it equally often, outside of `tf.cond`.

        Returns:
            A tensor of the same shape and dtype for each gradient, in their order. Another number of tensors
            ends the step with a `StepError`.
        """


class Compressed(GradientHook):
    """All-reduces gradients in a narrower type of floats, and converts the sums back.

    Args:
        dtype: such as `tf.float16`; gradients that are not wider are all-reduced as they are.
    """

    def __init__(self, dtype: tf.DType) -> None:
        self._dtype = dtype

    def reduce(
        self,
        gradients: list[tf.Tensor],
        variables: list[Any],
        all_reduce: Callable[[list[tf.Tensor]], list[tf.Tensor]],
    ) -> list[tf.Tensor]:
        """The sums of the narrowed gradients, in the gradients' own types."""
        del variables
        sums = all_reduce([tf.cast(g, self._dtype) if self._narrows(g) else g for g in gradients])
        return [tf.cast(each, g.dtype) for each, g in zip(sums, gradients, strict=True)]

    def _narrows(self, gradient: tf.Tensor) -> bool:
        return bool(gradient.dtype.is_floating and gradient.dtype.size > self._dtype.size)


HOOKS: dict[str, Callable[[], GradientHook]] = {
    "float16": lambda: Compressed(tf.float16),
    "bfloat16": lambda: Compressed(tf.bfloat16),
}
"""Makes a hook, by the name that a strategy's `gradient_hook` takes; add your own."""


def hook_of(given: str | GradientHook | None) -> GradientHook | None:
    """The hook that a strategy's `gradient_hook` argument means.

    Raises:
        ConfigurationError: it is neither a registered name nor a `GradientHook`.
    """
    if given is None or isinstance(given, GradientHook):
        return given
    make = HOOKS.get(given) if isinstance(given, str) else None
    if make is None:
        raise ConfigurationError(
            f"gradient_hook={given!r} is neither the name of a hook nor a GradientHook.",
            hint=known_are(HOOKS, str(given)),
        )
    return make()
