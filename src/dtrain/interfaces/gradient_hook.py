"""The seam between the backward pass and the update: how gradients are sent, and when weights are averaged.

Without a hook, gradients are sent and all-reduced as they are. Who calls a hook: `gradients.py` for
replicas, `block.py` for parameter servers, `weight_averages.py` for local SGD, `outer_steps.py` for DiLoCo.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from dtrain.errors import ConfigurationError


class GradientHook:
    """Changes what happens to gradients before the update; given to a strategy as `gradient_hook=`.

    One object serves all replicas of a process. It is called while a step is traced, so it must compute with
    TensorFlow's operations, and in the same way on all replicas and workers. It gets dense gradients only:
    sparse ones (`tf.IndexedSlices`) are sent as they are.

    Attributes:
        average_every: steps after which the replicas' weights are averaged, instead of an all-reduce of each
            step's gradients (local SGD); then no method is called. 0 all-reduces the gradients.
        start: the steps of a model's first `fit` whose gradients are all-reduced without the hook.
        outer: the optimizer that moves the weights by the mean of what the replicas changed (DiLoCo); None
            if the weights become their mean.
        bits: of a number that workers send, by dtrain's own transports only; None for numbers as they are.
        fragments: of DiLoCo, the groups of weights that are moved in turn.
        overlap: of DiLoCo, the steps that replicas take while what they have changed is sent.
        quorum: of hooks that average, the fewest workers of a round, as the job was started with; 0 if the
            hook does not say.
    """

    average_every: int = 0
    start: int = 0
    outer: Any = None
    bits: int | None = None
    fragments: int = 1
    overlap: int = 0
    quorum: int = 0

    def state_of(self, variables: Sequence[Any]) -> list[tf.Variable]:
        """What the hook keeps from step to step for these weights, such as what it has not sent yet.

        By default nothing. A hook with such a state makes it when it is asked for a weight the first time,
        and returns the same variables later. It is asked in the strategy's scope and outside of graphs,
        before `reduce` is called with the weight. The variables belong to the checkpoints of a model.

        A variable of which each replica has its own value is made with `ON_READ` and `SUM`. Where a run goes
        on with another number of replicas, the first one gets the sum.

        Args:
            variables: trainable weights, Keras' or TensorFlow's.
        """
        del variables
        return []

    @property
    def keeps_state(self) -> bool:
        """Whether the hook has a state."""
        return type(self).state_of is not GradientHook.state_of

    def compress(self, gradient: tf.Tensor, variable: Any) -> tf.Tensor:
        """What is sent in place of a gradient; by default the gradient itself.

        Args:
            gradient: of its variable's shape; rows that were looked up in a table, before they are summed,
                have the shape `(rows, *table.shape[1:])`.
            variable: the gradient's variable, as the program names it: Keras' or TensorFlow's.
        """
        return gradient

    def decompress(self, received: tf.Tensor, variable: Any) -> tf.Tensor:
        """The inverse of `compress`, for one gradient or for the sum over the replicas.

        The caller casts the result to the gradient's dtype.

        On parameter servers it runs on the variable's server.
        """
        return received

    def reduce(
        self,
        gradients: list[tf.Tensor],
        variables: list[Any],
        all_reduce: Callable[[list[tf.Tensor]], list[tf.Tensor]],
    ) -> list[tf.Tensor]:
        """Reduces gradients over the replicas; not called on parameter servers.

        It is called in a replica, once for each backward pass whose gradients are reduced. With local
        accumulation that is once for each update.

        Args:
            gradients: this replica's, weighted by its share of the examples, so their sum over the replicas
                is the gradient of the global batch.
            variables: the variable of each gradient.
            all_reduce: returns the sums of tensors over all replicas. The first call gets the
                tensors of all replicas, so every replica must call it equally often, outside of `tf.cond`.

        Returns:
            A tensor of the same shape and dtype for each gradient, in their order. Another number of tensors
            ends the step with a `StepError`.
        """
        sums = all_reduce([self.compress(g, v) for g, v in zip(gradients, variables, strict=True)])
        return [
            tf.cast(self.decompress(total, v), g.dtype)
            for total, v, g in zip(sums, variables, gradients, strict=True)
        ]


def check_integer(value: Any, name: str, *, least: int, hint: str = "") -> None:
    """Checks an argument of a hook.

    Raises:
        ConfigurationError: it is not an integer of at least `least`.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigurationError(
            f"{name} is {value!r}, not an integer of at least {least}.", hint=hint or f"set {name}={least}"
        )


def check_steps(value: Any, name: str, *, least: int) -> None:
    """As `check_integer`, for a number of steps."""
    check_integer(value, name, least=least, hint="it is a number of steps")
