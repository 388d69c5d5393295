"""The datasets of arrays: whole batches, or this process' part of each.

Tracing the functions of a dataset takes as long as hundreds of steps of a small model. So they are traced
once (`traced`) for all arrays of the same shapes, and a `fit` calls them with its own arrays.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from dtrain.engine.batches.batch_rows import BatchParts, part_sizes, unconverted
from dtrain.engine.batches.example_order import ArrayOrder
from dtrain.upstream import keras_adapters


class ArrayDataset:
    """The batches of arrays as a dataset, which is made when it is first needed.

    Small batches are read without it.

    Args:
        make: makes the dataset.
        spec: the spec of a batch; None if only the dataset shows it.
    """

    def __init__(self, make: Callable[[], tf.data.Dataset], spec: Any) -> None:
        self._make = make
        self._spec = spec

    @functools.cached_property
    def made(self) -> tf.data.Dataset:
        """The dataset."""
        return self._make()

    @property
    def element_spec(self) -> Any:
        """The spec of a batch."""
        return self.made.element_spec if self._spec is None else self._spec

    def cardinality(self) -> int:
        """As of a dataset: it does not say how many batches it has."""
        return int(tf.data.UNKNOWN_CARDINALITY)

    def options(self) -> tf.data.Options:
        """As of the dataset."""
        return _options()

    def __iter__(self) -> Iterator[Any]:
        return iter(self.made)


def tf_dataset(dataset: Any) -> Any:
    """The dataset of TensorFlow's that an `ArrayDataset` makes; another dataset as it is."""
    return dataset.made if isinstance(dataset, ArrayDataset) else dataset


@dataclass(frozen=True)
class ArrayBatches:
    """Makes the datasets of an `ArraySource`. Equal ones make equal datasets of equal arrays.

    A method that makes a dataset takes the nest of arrays, and a variable that holds where an iterator
    begins: the numbers of the pass and of the batch in it, and the two numbers of the order's seed.

    Attributes:
        order: the order of the rows.
        ahead: the number of elements to read ahead.
        parts: which parts of each batch are read, by `by_one`.
    """

    order: ArrayOrder
    ahead: int
    parts: BatchParts = field(default_factory=BatchParts)

    def whole(self, values: Any, handle: Any) -> tf.data.Dataset:
        """The global batches as Keras makes them, from the beginning to the end of that pass."""
        started = tf.data.Dataset.range(1).map(unconverted(lambda _: self._started(handle))).prefetch(1)
        rows = started.flat_map(
            unconverted(lambda position, begun: self.order.batches(position[0], position[1], begun))
        )
        arrays = tf.data.Dataset.from_tensors(values).repeat()
        batches = tf.data.Dataset.zip((rows, arrays)).map(
            unconverted(lambda rows, arrays: keras_adapters.some_rows(arrays, rows)),
            num_parallel_calls=2,
            deterministic=True,
        )
        return batches.with_options(_options()).prefetch(self.ahead)

    def by_one(self, values: Any, handle: Any) -> tf.data.Dataset:
        """This process' parts of the batches, one batch per element, without end."""
        rows, batch, steps = self.order.rows, self.order.batch, self.order.steps

        def parts_from(position: Any, begun: Any) -> tf.data.Dataset:
            def one(later: Any) -> Any:
                later += position[1]
                step, number = later % steps, position[0] + later // steps
                start = step * batch
                size = batch if rows % batch == 0 else tf.minimum(tf.constant(batch, tf.int64), rows - start)
                parts = []
                for low, high in self.parts.bounds(size):
                    # Computes one extra place and drops it, because `permute` needs at least one place.
                    places = tf.minimum(start + tf.range(low, high + 1, dtype=tf.int64), start + size - 1)
                    chosen = self.order.rows_at(places, step, number, begun)[:-1]
                    parts.append(keras_adapters.some_rows(values, chosen))
                if self.parts.replicas == 1:
                    return parts[0]
                return tuple(parts), part_sizes(size, self.parts.replicas)

            return _endless().map(unconverted(one))

        return self._endless_from(handle, parts_from)

    def _endless_from(self, handle: Any, made: Callable[[Any, Any], tf.data.Dataset]) -> tf.data.Dataset:
        """The dataset that `made` returns for where an iterator begins, and `ArrayOrder.begun` there."""
        # One function only: making an iterator takes milliseconds for each function of its dataset.
        begun = tf.data.Dataset.range(1).flat_map(unconverted(lambda _: made(*self._started(handle))))
        return begun.with_options(_options()).prefetch(self.ahead)

    def _started(self, handle: Any) -> Any:
        """Where an iterator begins, and what `ArrayOrder.begun` returns there."""
        start = tf.ensure_shape(tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.int64), [4])
        return start[:2], self.order.begun(start[2:])


@functools.lru_cache(maxsize=1)
def drawn(order: ArrayOrder) -> Any:
    """The rows of a pass in the order that Keras draws; the last one is kept, for the next `fit`."""
    # A dataset makes the operation that draws anew, so that it draws the same order each time.
    begun = tf.data.Dataset.range(1).map(unconverted(order.begun))
    (rows,) = begun.with_options(_options())
    return rows


@functools.lru_cache(maxsize=64)
def traced(batches: ArrayBatches, kind: str, specs: str) -> Any:
    """The method of `ArrayBatches` as a function to be traced once, for arrays of these specs.

    It keeps neither arrays nor a variable.
    """
    return tf.function(getattr(batches, kind), autograph=False)


def _options() -> tf.data.Options:
    options = tf.data.Options()
    # Optimizing the graph, which contains the arrays, takes longer than it saves.
    options.experimental_optimization.apply_default_optimizations = False
    # The pipeline needs no tuning, and deleting an iterator that tunes one is slow
    # (`background_deletion.py`).
    options.autotune.enabled = False
    options.experimental_external_state_policy = tf.data.experimental.ExternalStatePolicy.IGNORE
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    return options


def _endless() -> tf.data.Dataset:
    return tf.data.Dataset.range(tf.int64.max)
