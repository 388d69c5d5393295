"""Divides batches that are read outside of the graph, one for each call of a step."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from dtrain.engine.batches.batch_rows import (
    Split,
    any_rows,
    batch_spec,
    local_parts,
    local_specs,
    map_leaves,
    rows_of,
    to_tensors,
    without_optionals,
)
from dtrain.engine.batches.splitting import split_batch
from dtrain.engine.batches.traced_specs import TracedSpecs
from dtrain.engine.feed.split_datasets import SplitIterator
from dtrain.engine.variables import host_writes
from dtrain.interfaces.replica_layout import ReplicaLayout
from dtrain.process_group.running_operations import connected_workers, current_operation, words


class SingleBatches:
    """Divides single batches for a model's step.

    Args:
        model: the model.
        layout: how the replicas of its strategy are distributed.
    """

    def __init__(self, model: Any, layout: ReplicaLayout) -> None:
        self._model = model
        self._layout = layout
        self._specs = TracedSpecs()  # of batches that do not come from an iterator of dtrain's

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
            own = _note_divided(self._layout, local_parts(strategy, batch))
            return own, None, specs, map_leaves(any_rows, specs[0][0])
        if self._layout.replicas == 1:
            return (to_tensors(batch),), None, None, None
        split, spec = self.split(batch)
        return split.parts, split.sizes, None, spec

    def split(self, batch: Any) -> tuple[Split, Any]:
        """The parts of a batch, and the spec of the whole, whose shape is fixed until there is another one.

        Args:
            batch: a batch, as a user gives it or as a loop has divided it.
        """
        if not isinstance(batch, Split) and _has_parts(batch):
            own = local_parts(self._model.distribute_strategy, batch)
            batch = Split(_note_divided(self._layout, own), None)
        if isinstance(batch, Split):
            split, spec = batch, _of_whole(batch)
        else:
            batch = to_tensors(batch)
            split, spec = split_batch(batch, self._layout), batch_spec(batch)
            if self._layout.workers > 1:
                _note_batch(self._layout, without_optionals(batch), int(rows_of(split)))
        return split, self._specs.of(spec)

    def count(self, parts: Any, sizes: Any) -> int | None:
        """The examples in a global batch; None if this process knows only its own part."""
        if sizes is None and self._layout.replicas > 1:
            return None
        rows = int(rows_of(Split(tuple(parts), sizes)))
        return rows if rows >= 0 else None


def _has_parts(batch: Any) -> bool:
    return any(isinstance(leaf, tf.distribute.DistributedValues) for leaf in keras.tree.flatten(batch))


def _of_whole(split: Split) -> Any:
    """The spec of a batch that was divided; of any number of rows if other workers' are not known."""
    rows = None if split.sizes is None else int(tf.reduce_sum(split.sizes))

    def one(leaf: Any) -> Any:
        if rows is not None and isinstance(leaf, tf.TensorSpec) and leaf.shape.rank:
            return tf.TensorSpec([rows, *leaf.shape[1:]], leaf.dtype)
        return any_rows(leaf)

    return map_leaves(one, batch_spec(without_optionals(split.parts[0])))


def _note_batch(layout: ReplicaLayout, batch: Any, rows: int) -> None:
    """Notes a batch that the program has given this worker, as `train_on_batch` is given one.

    Each worker takes its part of it, so all must be given the same.

    Args:
        layout: the layout of the strategy.
        batch: a nest of tensors and None, read outside of graphs.
        rows: the examples in it.

    Raises:
        OperationMismatchError, PeerMissingError: another worker was given something else, or is lost.
    """
    connected = connected_workers(layout)
    if connected is not None and current_operation() is not None:
        connected.begin(words(f"\nits batch of {rows} rows ({host_writes.digest(batch):08x})"))


def _note_divided(layout: ReplicaLayout, parts: tuple[Any, ...]) -> tuple[Any, ...]:
    """Notes a batch of data that is divided already, which the running operation has read; returns it.

    Args:
        layout: the layout of the strategy.
        parts: a part for each replica of this worker.
    """
    running = current_operation() if layout.workers > 1 else None
    if running is not None and running.feed is not None:
        running.feed.note_parts(parts)
    return parts
