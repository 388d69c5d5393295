"""The functions that `predict` calls; they return outputs in the order of the examples.

They are not used under parameter servers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from dtrain.errors import DataError
from dtrain.keras_engine.input import Split, local_parts, split_batch, to_tensors, without_optionals
from dtrain.keras_engine.loop import GroupCall
from dtrain.keras_engine.protocol import ReplicaLayout
from dtrain.keras_engine.replica_calls import watch
from dtrain.keras_engine.rows import joined_rows
from dtrain.keras_engine.steps import unwrapped
from dtrain.upstream import tensorflow as upstream_tf


class OneReplicaPredict:
    """Keras' own predict function, for the batches of the only replica.

    Small batches of arrays come in groups (`GroupCall`), which one call of TensorFlow reads and predicts,
    batch by batch.

    Args:
        model: the model.
        function: Keras' function, which takes a list of one batch, or of more with `steps_per_execution`.
    """

    def __init__(self, model: Any, function: Callable[..., Any]) -> None:
        self._model = model
        self._function = function
        self._groups: dict[str, Callable[..., Any] | None] = {}

    def __call__(self, batches: list[Any]) -> Any:
        """The concatenated outputs of all batches, each of shape (examples, ...)."""
        if not isinstance(batches[0], GroupCall):
            return self._function([_whole(batch) for batch in batches])
        (call,) = batches
        call.ran = call.steps
        key = f"{call.iterator.element_spec} {call.iterator.reader}"
        if key not in self._groups:
            self._groups[key] = None if self._model.run_eagerly else self._traced(call.iterator)
        predict = self._groups[key]
        if predict is None:
            outputs = [self._function([_whole(next(call.iterator))]) for _ in range(call.steps)]
            return keras.tree.map_structure(lambda *each: _joined(each), *outputs)
        data, buffer = call.iterator.tensors()
        found, place = predict(data, buffer.place)
        call.iterator.note(call.steps, buffer._replace(place=place))
        return found

    def _traced(self, iterator: Any) -> Callable[..., Any] | None:
        """A function that reads and predicts a group of full batches.

        None if the outputs of a batch are no dense tensors of known shape, which could not be put together.
        """
        reader, step = iterator.reader, unwrapped(self._model.predict_step)
        one = tf.function(step, autograph=False, jit_compile=self._model.jit_compile or None)
        data, buffer = iterator.specs

        def batch_of(leaf: tf.TensorSpec) -> tf.TensorSpec:
            return tf.TensorSpec([reader.order.batch, *leaf.shape[2:]], leaf.dtype)

        specs = tf.nest.map_structure(batch_of, buffer.batches)
        found = one.get_concrete_function(specs).structured_outputs
        leaves = tf.nest.flatten(found)
        if not all(isinstance(leaf, tf.Tensor | tf.TensorSpec) for leaf in leaves):
            return None
        if not all(leaf.shape.rank and leaf.shape.is_fully_defined() for leaf in leaves):
            return None
        outputs = tf.nest.map_structure(lambda leaf: tf.TensorSpec(leaf.shape, leaf.dtype), found)

        def group(data: Any, place: Any) -> Any:
            batches, after = reader.read(data, place)

            def predicted(number: Any) -> Any:
                batch = tf.nest.map_structure(lambda leaf: tf.gather(leaf, number), batches)
                return one(
                    tf.nest.map_structure(lambda leaf, spec: tf.ensure_shape(leaf, spec.shape), batch, specs)
                )

            count = tf.range(tf.shape(tf.nest.flatten(batches)[0])[0])
            found = tf.map_fn(predicted, count, fn_output_signature=outputs, parallel_iterations=1)
            return tf.nest.map_structure(lambda leaf: tf.reshape(leaf, [-1, *leaf.shape[2:]]), found), after

        function: Callable[..., Any] = tf.function(group, autograph=False).get_concrete_function(
            data, buffer.place
        )
        return function


def _whole(batch: Any) -> Any:
    return batch.parts[0] if isinstance(batch, Split) else batch


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
