"""Predicts by one program: the `predict_step` of one device, traced once and partitioned."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from dtrain.keras_engine.eager_program import EagerReplicas
from dtrain.keras_engine.loop import loop_of
from dtrain.keras_engine.operation import note_divided, operation
from dtrain.keras_engine.partitioned_steps import DividedFunction
from dtrain.keras_engine.predict_function import joined_outputs
from dtrain.keras_engine.protocol import ReplicaLayout
from dtrain.keras_engine.rows import (
    Split,
    any_rows,
    batch_spec,
    local_parts,
    map_leaves,
    to_tensors,
    without_optionals,
)
from dtrain.keras_engine.splitting import split_batch
from dtrain.keras_engine.steps import unwrapped
from dtrain.upstream import tensorflow as upstream_tf


class PartitionedPredict:
    """Predicts for a list of batches; every worker gets all outputs, in the order of the examples.

    The batch's size is fixed while all batches have the same, as in Keras.

    Args:
        model: the model.
        layout: how the replicas of its strategy are distributed.
    """

    def __init__(self, model: Any, layout: ReplicaLayout) -> None:
        self._model = model
        self._layout = layout
        self._spec: Any = None  # of the whole batch
        self._function: Callable[..., Any] | None = None
        self._replicas = EagerReplicas(model.distribute_strategy, layout)

    def __call__(self, batches: list[Any]) -> Any:
        """The concatenated outputs of all batches, each of shape (examples, ...)."""
        with operation(None if loop_of(self._model).kind == "predict" else self._layout, "predict_on_batch"):
            return joined_outputs([self._predicted(self._split(batch)) for batch in batches])

    def _split(self, batch: Any) -> Split:
        if isinstance(batch, Split):
            return batch
        if any(isinstance(leaf, tf.distribute.DistributedValues) for leaf in keras.tree.flatten(batch)):
            own = local_parts(self._model.distribute_strategy, batch)
            return Split(note_divided(self._layout, own), None)
        return split_batch(to_tensors(batch), self._layout)

    def _predicted(self, split: Split) -> Any:
        own = [without_optionals(part) for part in split.parts]
        if self._model.run_eagerly:
            batch = self._replicas.whole(own, split.sizes)
            with self._replicas.as_one_device():
                return self._model.predict_step(batch)
        spec = _of_whole(own, split.sizes)
        if self._function is None or not self._accepts(spec):
            self._spec = spec if self._function is None else map_leaves(any_rows, spec)
            step = unwrapped(self._model.predict_step)
            divided = DividedFunction(step, self._spec, self._model.distribute_strategy, self._layout)
            self._function = upstream_tf.made_for_each_model(divided, reduce_retracing=True)
        return self._function(own, split.sizes)

    def _accepts(self, spec: Any) -> bool:
        return str(spec) == str(self._spec) or str(map_leaves(any_rows, spec)) == str(self._spec)


def _of_whole(parts: Sequence[Any], sizes: tf.Tensor | None) -> Any:
    """The spec of the batch whose parts these are; of any number of rows if other workers' are not known."""
    rows = None if sizes is None else int(tf.reduce_sum(sizes))

    def one(leaf: Any) -> Any:
        if rows is not None and isinstance(leaf, tf.TensorSpec) and leaf.shape.rank:
            return tf.TensorSpec([rows, *leaf.shape[1:]], leaf.dtype)
        return any_rows(leaf)

    return map_leaves(one, batch_spec(parts[0]))
