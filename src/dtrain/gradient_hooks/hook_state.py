"""The variables that a gradient hook keeps for each weight, and how a replica reads and writes its own."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from dtrain.upstream import tf_replicas
from dtrain.upstream.tf_variables import underlying


class HookState:
    """The state of a hook, by weight. It lives as long as the weight.

    Args:
        make: makes the variables of a weight; none for a weight that is sent as it is.
    """

    def __init__(self, make: Callable[[Any], list[tf.Variable]]) -> None:
        self._make = make
        self._variables: dict[int, list[tf.Variable]] = {}

    def of(self, weight: Any) -> list[tf.Variable]:
        """The variables of a weight, which are made at first."""
        weight = underlying(weight)
        key = id(weight)
        if key not in self._variables:
            self._variables[key] = self._make(weight)
            weakref.finalize(weight, self._variables.pop, key, None)
        return self._variables[key]

    def of_all(self, weights: Sequence[Any]) -> list[tf.Variable]:
        """The variables of several weights, in their order."""
        return [variable for weight in weights for variable in self.of(weight)]


def error_memory(weight: Any) -> tf.Variable:
    """A variable for what a replica has not sent yet of a weight's gradients, one for each replica; zeros."""
    return tf.Variable(
        tf.zeros(weight.shape, tf.float32),
        trainable=False,
        synchronization=tf.VariableSynchronization.ON_READ,
        aggregation=tf.VariableAggregation.SUM,
        name="unsent_gradient",
    )


def own(variable: tf.Variable) -> tf.Variable:
    """In a replica: its own copy of a variable."""
    copies = tf.distribute.get_strategy().experimental_local_results(variable)
    return copies[tf_replicas.local_replica_index() if len(copies) > 1 else 0]
