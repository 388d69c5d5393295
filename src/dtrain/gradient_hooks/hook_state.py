"""The variables that a gradient hook keeps for each weight, and how a replica reads and writes its own."""

from __future__ import annotations

import abc
import weakref
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from dtrain.interfaces.gradient_hook import GradientHook
from dtrain.upstream import tf_replicas
from dtrain.upstream.tf_variables import underlying


class StatefulHook(GradientHook):
    """A hook that keeps variables for the weights whose gradients it changes, as long as these live."""

    def __init__(self) -> None:
        self._variables: dict[int, list[tf.Variable]] = {}

    def state_of(self, variables: Sequence[Any]) -> list[tf.Variable]:
        """As `GradientHook.state_of`: the variables of several weights, in their order."""
        return [variable for weight in variables for variable in self._of(weight)]

    @abc.abstractmethod
    def _make(self, weight: Any) -> list[tf.Variable]:
        """Makes the variables of a weight, TensorFlow's; none for a weight that is sent as it is."""

    def _of(self, weight: Any) -> list[tf.Variable]:
        weight = underlying(weight)
        key = id(weight)
        if key not in self._variables:
            self._variables[key] = self._make(weight)
            weakref.finalize(weight, self._variables.pop, key, None)
        return self._variables[key]

    def _own_states(self, weights: Sequence[Any]) -> tuple[list[list[tf.Variable]], list[int], list[int]]:
        """In a replica: its own copies of the weights' variables.

        Returns:
            The copies by weight; the numbers of the weights that have some; and those of the others.
        """
        states = [list(map(_own, self._of(weight))) for weight in weights]
        changed = [i for i, state in enumerate(states) if state]
        return states, changed, [i for i, state in enumerate(states) if not state]


def is_matrix(weight: Any) -> bool:
    """Whether a weight has floats in two dimensions or more."""
    return weight.shape.rank >= 2 and bool(weight.dtype.is_floating)


def common_variable(value: tf.Tensor, name: str) -> tf.Variable:
    """A variable that has the same value on all replicas."""
    return tf.Variable(
        value,
        trainable=False,
        synchronization=tf.VariableSynchronization.ON_WRITE,
        aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
        name=name,
    )


def error_memory(weight: Any) -> tf.Variable:
    """A variable for what a replica has not sent yet of a weight's gradients, one for each replica; zeros."""
    return tf.Variable(
        tf.zeros(weight.shape, tf.float32),
        trainable=False,
        synchronization=tf.VariableSynchronization.ON_READ,
        aggregation=tf.VariableAggregation.SUM,
        name="unsent_gradient",
    )


def _own(variable: tf.Variable) -> tf.Variable:
    """In a replica: its own copy of a variable."""
    copies = tf.distribute.get_strategy().experimental_local_results(variable)
    return copies[tf_replicas.local_replica_index() if len(copies) > 1 else 0]
