"""The function that `predict` calls under several replicas; it returns outputs in the order of the examples.

It is not used with one replica or under parameter servers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from dtrain.errors import DataError
from dtrain.keras_engine.input import Split, local_parts, split_batch, to_tensors, without_optionals
from dtrain.keras_engine.protocol import ReplicaLayout
from dtrain.keras_engine.replica_calls import watch
from dtrain.keras_engine.rows import joined_rows
from dtrain.keras_engine.steps import unwrapped
from dtrain.upstream import tensorflow as upstream_tf


class PredictFunction:
    """Predicts for a list of batches; every worker gets all outputs, in the order of the examples."""

    def __init__(self, model: Any, layout: ReplicaLayout) -> None:
        self._model = model
        self._layout = layout
        self._one: Callable[..., Any] = self._one_batch
        if not model.run_eagerly:
            self._one = tf.function(self._one_batch, reduce_retracing=True, autograph=False)

    def __call__(self, batches: list[Any]) -> Any:
        """The concatenated outputs of all batches, each of shape (examples, ...).

        Raises:
            DataError: with several workers, an output is sparse or text.
        """
        outputs = [self._one(self._parts(batch)) for batch in batches]
        return keras.tree.map_structure(lambda *each: _joined(each), *outputs)

    def _parts(self, batch: Any) -> tuple[Any, ...]:
        if isinstance(batch, Split):
            return tuple(batch.parts)
        if any(isinstance(leaf, tf.distribute.DistributedValues) for leaf in keras.tree.flatten(batch)):
            return local_parts(self._model.distribute_strategy, batch)
        return split_batch(to_tensors(batch), self._layout)[0]

    def _one_batch(self, parts: tuple[Any, ...]) -> Any:
        model, strategy = self._model, self._model.distribute_strategy
        step = unwrapped(model.predict_step)

        def in_replica(part: Any) -> Any:
            watch(model)
            return step(without_optionals(part))

        outputs = strategy.run(in_replica, args=(upstream_tf.per_replica(list(parts)),))
        return keras.tree.map_structure(lambda value: self._joined(strategy, value), outputs)

    def _joined(self, strategy: Any, value: Any) -> Any:
        if self._layout.workers > 1:
            return _gather(strategy, value)
        return _joined(strategy.experimental_local_results(value))


def _gather(strategy: Any, value: Any) -> Any:
    """Gathers the rows of all workers' replicas, in the replicas' order."""
    each = strategy.experimental_local_results(value)
    if isinstance(each[0], tf.RaggedTensor):
        lengths = _gather(strategy, _each(each, lambda v: v.row_lengths()))
        return tf.RaggedTensor.from_row_lengths(_gather(strategy, _each(each, lambda v: v.values)), lengths)
    if isinstance(each[0], tf.SparseTensor) or each[0].dtype == tf.string:
        raise DataError(
            f"predict returned {type(each[0]).__name__} of {each[0].dtype.name}, which cannot be gathered "
            "from several workers.",
            hint="return dense numbers from the model, or predict on one worker",
        )
    if each[0].dtype == tf.bool:
        return tf.cast(_gather(strategy, _each(each, lambda v: tf.cast(v, tf.int32))), tf.bool)
    if each[0].shape.rank == 0:
        return _gather(strategy, _each(each, lambda v: tf.reshape(v, [1])))
    return strategy.gather(value, axis=0)


def _each(values: Any, function: Callable[[Any], Any]) -> Any:
    return upstream_tf.per_replica([function(v) for v in values])


def _joined(values: Sequence[Any]) -> Any:
    return values[0] if len(values) == 1 else joined_rows(values)
