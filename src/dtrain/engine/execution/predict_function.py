"""The function that `predict` calls with one replica; it returns outputs in the order of the examples."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from dtrain.engine.batches.batch_rows import Split, joined_rows
from dtrain.engine.execution.xla_steps import XlaSteps
from dtrain.engine.feed.groups import GroupIterator
from dtrain.engine.feed.row_reader import traced_read
from dtrain.engine.feed.split_datasets import SplitIterator
from dtrain.engine.loops.call_size import TARGET_SECONDS
from dtrain.engine.loops.step_calls import GroupCall
from dtrain.engine.step.steps import unwrapped
from dtrain.engine.step.xla_rule import runs_in_xla
from dtrain.upstream import tf_tracing


class OneReplicaPredict:
    """Keras' own predict function, for the batches of the only replica.

    Small batches of arrays come in groups (`GroupCall`), which one call of TensorFlow reads and predicts,
    batch by batch. With `in_xla` all batches come in groups, which XLA programs predict.

    Args:
        model: the model.
        function: the function that Keras made, which takes a list of one batch, or of more with
            `steps_per_execution`.
        stock: whether Keras' own method made it, so that it is known what it computes.

    Attributes:
        longest: the most seconds that a group may take, since the progress bar and an interrupt wait for it.
    """

    def __init__(self, model: Any, function: Callable[..., Any], *, stock: bool) -> None:
        self._model = model
        self._function = function
        self._stock = stock
        self.longest = TARGET_SECONDS
        self._groups: dict[str, Callable[..., Any] | None] = {}
        self._seconds: dict[str, float] = {}  # of the last call with a single batch
        self._xla = XlaSteps(self._one_batch, model, returns=True)
        self._kind = ""  # the kind of batch that was asked for last: the key of both

    def in_xla(self, steps: int | None, batch: int | None) -> bool:
        """Whether all batches are predicted in XLA, by the rule of `xla_rule.py`; they come in groups then.

        Args:
            steps: the number of batches; None if not known.
            batch: examples in a batch; None if not known.
        """
        return self._stock and runs_in_xla(self._model, "predict_step", steps, batch)

    @property
    def output_bytes(self) -> int:
        """The bytes of the outputs for one example, of a model that `in_xla` accepts."""
        return sum(4 * math.prod(size or 1 for size in output.shape[1:]) for output in self._model.outputs)

    def at_once(self, iterator: SplitIterator) -> int:
        """How many of the next batches can be a `GroupCall`; 0 if the next one must come by itself."""
        count = iterator.at_once
        if not self._stock or count < 2 or self._model.run_eagerly or tf.config.functions_run_eagerly():
            return 0
        self._kind = f"{iterator.element_spec} {iterator.reader}"
        if count * self._seconds.get(self._kind, self.longest) > self.longest:
            return 0
        if self._kind not in self._groups:
            self._groups[self._kind] = self._traced(iterator)
        return 0 if self._groups[self._kind] is None else count

    def __call__(self, batches: list[Any]) -> Any:
        """The concatenated outputs of all batches, each of shape (examples, ...)."""
        if isinstance(batches[0], GroupCall):
            grouped = isinstance(batches[0].iterator, GroupIterator)
            return (self._predicted_in_xla if grouped else self._predicted)(batches[0])
        begun = time.perf_counter()
        outputs = self._function([batch.parts[0] if isinstance(batch, Split) else batch for batch in batches])
        self._seconds[self._kind] = time.perf_counter() - begun
        return outputs

    def _predicted_in_xla(self, call: GroupCall) -> Any:
        traced, begun = self._xla.traced, time.perf_counter()
        outputs, call.ran = [], 0
        while call.ran < call.steps and (part := call.iterator.take(call.steps - call.ran)) is not None:
            outputs += self._xla.run(part)
            call.ran += part.steps
        if not outputs:
            raise StopIteration
        call.seconds = time.perf_counter() - begun if self._xla.traced == traced else None
        return joined_outputs(outputs)

    def _predicted(self, call: GroupCall) -> Any:
        predict = self._groups[self._kind]
        data, buffer = call.iterator.tensors()
        outputs, place = predict(data, buffer.place)  # type: ignore[misc]
        call.iterator.note(call.steps, buffer._replace(place=place))
        call.ran = call.steps
        return outputs

    def _traced(self, iterator: SplitIterator) -> Callable[..., Any] | None:
        """A function that reads and predicts a group of full batches.

        None if the outputs of a batch are no dense tensors of known shape, which could not be put together.
        """
        reader: Any = iterator.reader
        data, buffer = iterator.specs

        def batch_of(leaf: tf.TensorSpec) -> tf.TensorSpec:
            return tf.TensorSpec([reader.order.batch, *leaf.shape[2:]], leaf.dtype)

        specs = tf.nest.map_structure(batch_of, buffer.batches)  # type: ignore[union-attr]
        one = tf_tracing.made_for_each_model(self._one_batch).get_concrete_function(specs)
        leaves = tf.nest.flatten(one.structured_outputs)
        if not all(isinstance(leaf, tf.Tensor | tf.TensorSpec) for leaf in leaves):
            return None
        if not all(leaf.shape.rank and leaf.shape.is_fully_defined() for leaf in leaves):
            return None
        outputs = tf.nest.map_structure(
            lambda leaf: tf.TensorSpec(leaf.shape, leaf.dtype), one.structured_outputs
        )

        def group(data: Any, place: Any) -> Any:
            batches, after = traced_read(reader)(data, place)

            def predicted(number: Any) -> Any:
                def of_batch(leaf: Any, spec: tf.TensorSpec) -> Any:
                    return tf.ensure_shape(tf.gather(leaf, number), spec.shape)

                return one(tf.nest.map_structure(of_batch, batches, specs))

            count = tf.range(tf.shape(tf.nest.flatten(batches)[0])[0])
            stacked = tf.map_fn(predicted, count, fn_output_signature=outputs, parallel_iterations=1)
            return tf.nest.map_structure(lambda leaf: tf.reshape(leaf, [-1, *leaf.shape[2:]]), stacked), after

        place = tf.TensorSpec([2], tf.int64)
        made: Callable[..., Any] = tf_tracing.made_for_each_model(group).get_concrete_function(data, place)
        return made

    def _one_batch(self, batch: Any) -> Any:
        """The outputs of one batch, as Keras' own function computes them."""
        strategy, step = self._model.distribute_strategy, unwrapped(self._model.predict_step)
        if self._model.jit_compile:
            step = tf_tracing.made_for_each_model(step, jit_compile=True)
        outputs = strategy.run(step, args=(batch,))
        return keras.tree.map_structure(
            lambda output: strategy.experimental_local_results(output)[0], outputs
        )


def joined_outputs(outputs: Sequence[Any]) -> Any:
    """The outputs of several batches, concatenated in their order."""
    if len(outputs) == 1:
        return outputs[0]
    return keras.tree.map_structure(lambda *each: joined_rows(each), *outputs)
