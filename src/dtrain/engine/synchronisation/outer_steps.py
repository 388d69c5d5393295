"""DiLoCo: replicas train alone, and an outer optimizer moves their weights by the mean of what they changed.

When an outer step is taken is decided as for the averages of local SGD, in `weight_averages.py`.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from dtrain.collectives.quantization import Quantization
from dtrain.engine.replica.context import all_reduce_sum, local_update
from dtrain.engine.synchronisation.weight_averages import WeightAverages, wide
from dtrain.errors import ConfigurationError
from dtrain.interfaces.managed_strategy import layout_of, managed
from dtrain.interfaces.replica_layout import ReplicaLayout
from dtrain.upstream import keras_models, keras_optimizers
from dtrain.upstream.tf_variables import underlying


class OuterStep:
    """The state of a model's outer steps.

    Args:
        model: a compiled model.
        outer: the outer optimizer, whose settings count.
        bits: in which workers send what their replicas have changed; None for the numbers as they are.

    Attributes:
        optimizer: an outer optimizer for this model alone.
    """

    def __init__(self, model: Any, outer: Any, bits: int | None) -> None:
        self._model = weakref.proxy(model)
        self._bits: Any = bits
        with model.distribute_strategy.scope():
            self.optimizer = type(outer).from_config(outer.get_config())
        self._begun: list[tf.Variable] = []

    @property
    def variables(self) -> list[Any]:
        """The variables that a checkpoint must have. They are equal on all replicas."""
        self.build()
        return list(self.optimizer.variables)

    def own_variables(self) -> Iterator[Any]:
        """TensorFlow's variables of the inner optimizer's state, which each replica has for itself."""
        inner = self._model.optimizer
        if inner is None or not inner.built:
            return
        for weight in self._model.trainable_variables:
            yield from map(underlying, keras_optimizers.slots_of(inner, weight))

    def build(self) -> None:
        """Makes the variables, unless they are there.

        Raises:
            ConfigurationError: the model has no weights yet.
        """
        if self._begun:
            return
        weights = self._model.trainable_variables
        if not self._model.built or not weights:
            raise ConfigurationError(
                "DiLoCo needs the weights before the first step, and the model is not built.",
                hint="begin the model with keras.Input, or call model.build before fit",
            )
        with self._model.distribute_strategy.scope():
            self.optimizer.build(weights)
            self._begun = [tf.Variable(weight.value, trainable=False) for weight in weights]

    def begin(self) -> None:
        """In a replica: remembers the weights, from which the next outer step is taken."""
        for weight, begun in zip(self._model.trainable_variables, self._begun, strict=True):
            with local_update():
                begun.assign(underlying(weight).read_value())

    def take(self, replicas: int) -> None:
        """In a replica: takes the outer step; statistics become their mean."""
        weights = self._model.trainable_variables
        statistics = [
            statistic
            for statistic in map(underlying, self._model.non_trainable_variables)
            if statistic.dtype.is_floating
        ]
        changes = [
            tf.cast(begun.read_value(), wide(begun.dtype))
            - tf.cast(underlying(weight).read_value(), wide(begun.dtype))
            for weight, begun in zip(weights, self._begun, strict=True)
        ]
        values = [tf.cast(statistic.read_value(), wide(statistic.dtype)) for statistic in statistics]
        calls = managed(self._model.distribute_strategy).calls
        if self._bits is None or calls is None:
            sums = all_reduce_sum([*changes, *values])
        else:
            sums = [*self._in_few_bits(changes, calls), *all_reduce_sum(values)]
        means = [total / replicas for total in sums]
        with local_update():
            for weight, begun in zip(weights, self._begun, strict=True):
                underlying(weight).assign(begun.read_value())
            gradients = [
                tf.cast(mean, begun.dtype)
                for mean, begun in zip(means[: len(weights)], self._begun, strict=True)
            ]
            self.optimizer.apply(gradients, weights)
            for statistic, mean in zip(statistics, means[len(weights) :], strict=True):
                statistic.assign(tf.cast(mean, statistic.dtype))
        self.begin()

    def _in_few_bits(self, changes: list[tf.Tensor], calls: Any) -> list[tf.Tensor]:
        """The sums of changes over the workers, each of which has one replica."""
        flat = tf.concat([tf.reshape(tf.cast(change, tf.float32), [-1]) for change in changes], axis=0)
        number = underlying(self.optimizer.iterations).read_value()
        total = calls.quantized_sum(flat, Quantization(self._bits), number)
        parts = tf.split(total, [change.shape.num_elements() for change in changes])
        return [
            tf.cast(tf.reshape(part, change.shape), change.dtype)
            for part, change in zip(parts, changes, strict=True)
        ]


_steps: weakref.WeakKeyDictionary[Any, OuterStep] = weakref.WeakKeyDictionary()


def outer_step_of(model: Any) -> OuterStep | None:
    """The outer step of a model; None if its strategy asks for none."""
    layout = layout_of(keras_models.strategy_of(model))
    hook = None if layout is None else layout.gradient_hook
    if hook is None or hook.outer is None:
        return None
    if model not in _steps:
        _steps[model] = OuterStep(model, hook.outer, hook.bits)
    return _steps[model]


class OuterSteps(WeightAverages):
    """The outer steps of one `fit`: where `WeightAverages` averages, it takes an outer step."""

    def __init__(self, model: Any, layout: ReplicaLayout, callbacks: Sequence[Any]) -> None:
        super().__init__(model, layout, callbacks)
        self._step: Any = outer_step_of(model)

    def open(self) -> None:
        """Begins with the weights as they are, which a callback may have set."""
        self._step.build()
        if self.savable:
            self.traced(self._model.distribute_strategy, self._step.begin)()

    def _in_replica(self) -> None:
        self._step.take(self._layout.replicas)
