"""Divides batches that are read outside of the graph, one for each call of a step."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from dtrain.keras_engine.feed.sources import SplitIterator
from dtrain.keras_engine.operation import note_divided
from dtrain.keras_engine.protocol import ReplicaLayout
from dtrain.keras_engine.rows import (
    Split,
    any_rows,
    batch_spec,
    local_parts,
    local_specs,
    map_leaves,
    rows_of,
    to_tensors,
)
from dtrain.keras_engine.splitting import split_batch


class SingleBatches:
    """Divides single batches for a model's step.

    Args:
        model: the model.
        layout: how the replicas of its strategy are distributed.
    """

    def __init__(self, model: Any, layout: ReplicaLayout) -> None:
        self._model = model
        self._layout = layout
        self._single: Any = None  # the spec of batches that do not come from an iterator of dtrain's

    def divided(self, iterator: Any, batch: Any) -> tuple[Any, Any, Any, Any]:
        """The parts of a batch, the examples of each, the specs of both, and the spec of the whole batch.

        The numbers of examples are None with one replica, or if only the step can find them. The specs of
        parts and numbers are None if a batch may have any shape.
        """
        strategy = self._model.distribute_strategy
        if isinstance(iterator, SplitIterator):
            return batch.parts, batch.sizes, iterator.element_spec, iterator.batch_spec
        if isinstance(iterator, tf.distribute.DistributedIterator):
            # TensorFlow made the split, so the step finds the sizes of other workers' parts.
            specs = (local_specs(strategy, iterator.element_spec), None)
            own = note_divided(self._layout, local_parts(strategy, batch))
            return own, None, specs, map_leaves(any_rows, specs[0][0])
        batch = to_tensors(batch)
        if self._layout.replicas == 1:
            return (batch,), None, None, None
        spec: Any = batch_spec(batch)
        self._single = self._single or spec
        if str(spec) != str(self._single):  # as in Keras, the size is not fixed once there was another one
            spec = self._single = map_leaves(any_rows, spec)
        return (*split_batch(batch, self._layout), None, spec)

    def count(self, parts: Any, sizes: Any) -> int | None:
        """The examples in a global batch; None if this process knows only its own part."""
        if sizes is None and self._layout.replicas > 1:
            return None
        rows = int(rows_of(Split(tuple(parts), sizes)))
        return rows if rows >= 0 else None
