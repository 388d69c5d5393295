"""Batches of examples that differ in length: padded to the longest of a batch, or to the bound of a bucket.

For tables, the lengths of all examples are known before training, so every worker pads its part to the
longest of the global batch. It does not tokenize texts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from dtrain.base.log import logger
from dtrain.data.columns import ColumnTable, named_columns
from dtrain.data.readers import in_order, ragged_first
from dtrain.engine.batches.batch_rows import unconverted
from dtrain.engine.batches.example_order import BatchSpan
from dtrain.errors import ConfigurationError


def check_pad(pad: Any, buckets: Any) -> tuple[Any, tuple[int, ...] | None]:
    """Checks `pad` and `buckets`; returns the value to pad with or None, and the buckets' bounds or None.

    Raises:
        ConfigurationError: `pad` is no number or text, or `buckets` are no ascending positive integers.
    """
    if buckets is None:
        return (0 if pad is True else None if pad is False else _check_value(pad)), None
    bounds = tuple(buckets) if isinstance(buckets, Sequence) and not isinstance(buckets, str) else ()
    whole = all(isinstance(bound, int) and not isinstance(bound, bool) and bound > 0 for bound in bounds)
    if not bounds or not whole or list(bounds) != sorted(set(bounds)):
        raise ConfigurationError(
            f"buckets={buckets!r} are not ascending lengths.", hint="such as buckets=[16, 32, 64]"
        )
    return (0 if pad is None or isinstance(pad, bool) else _check_value(pad)), bounds


def _check_value(pad: Any) -> Any:
    if pad is None or (isinstance(pad, int | float | str | bytes) and not isinstance(pad, bool)):
        return pad
    raise ConfigurationError(
        f"pad={pad!r} is not a value to pad with.", hint="such as pad=0, or pad='' for texts; pad=True is 0"
    )


class Padding:
    """Pads examples of a table to the widths of their global batch.

    An open leaf is a tensor of an example whose first dimension differs between examples.

    Args:
        value: the value to pad with.
        spec: the spec of an example, before `augment`.
        lengths: the lengths of the open leaves of all examples, int64 of shape (examples, leaves).
    """

    def __init__(self, value: Any, spec: Any, lengths: np.ndarray) -> None:
        self._value = value
        self.open = [ragged_first(leaf, "pad") for leaf in tf.nest.flatten(spec)]
        self.leaves = lengths.shape[1]
        self.longest = lengths.max(axis=1) if self.leaves else np.zeros(len(lengths), np.int64)
        with tf.init_scope(), tf.device("CPU:0"):
            self._lengths = tf.constant(lengths, tf.int64)

    def widths(self, at: BatchSpan, indices: Any) -> Any:
        """The widths to which the open leaves of a batch are padded, int64 of shape (leaves,).

        Args:
            at: the global batch.
            indices: the indices of its examples, int64 of shape (rows,).
        """
        longest = tf.reduce_max(tf.gather(self._lengths, indices), axis=0)
        return tf.where(at.bound >= 0, tf.maximum(at.bound, 0), tf.maximum(longest, 0))

    def pad_example(self, example: Any, widths: Any) -> Any:
        """Pad the open leaves of an example; a run-time error if `augment` made it longer than its width."""
        widths_left = iter(range(self.leaves))

        def one(leaf: Any, is_open: bool) -> Any:
            if not is_open:
                return leaf
            width = widths[next(widths_left)]
            length = tf.shape(leaf, out_type=tf.int64)[0]
            fits = tf.debugging.Assert(
                length <= width, ["augment made an example longer than its batch:", length, "over", width]
            )
            with tf.control_dependencies([fits] if fits is not None else []):
                more = [[0, width - length], *([0, 0] for _ in leaf.shape[1:])]
            return tf.pad(leaf, more, constant_values=self._of(leaf.dtype))

        return self._mapped(one, example)

    def pad_batch(self, batch: Any, widths: Any) -> Any:
        """Pad the ragged leaves of a batch to dense tensors."""
        widths_left = iter(range(self.leaves))

        def one(leaf: Any, is_open: bool) -> Any:
            if not is_open:
                return leaf
            shape = tf.stack([tf.constant(-1, tf.int64), widths[next(widths_left)], *leaf.shape[2:]])
            return leaf.to_tensor(self._of(leaf.dtype), shape=shape)

        return self._mapped(one, batch)

    def _mapped(self, function: Callable[[Any, bool], Any], nest: Any) -> Any:
        leaves = tf.nest.flatten(nest)
        if len(leaves) != len(self.open):
            raise ConfigurationError(
                f"augment makes {len(leaves)} tensors of an example that has {len(self.open)}.",
                hint="with pad or buckets, augment keeps the example's structure; change it in transform",
            )
        done = [function(leaf, is_open) for leaf, is_open in zip(leaves, self.open, strict=True)]
        return tf.nest.pack_sequence_as(nest, done)

    def _of(self, dtype: tf.DType) -> Any:
        return padding_value(self._value, dtype)


def padding_value(value: Any, dtype: tf.DType) -> Any:
    """The padding value as a tensor of type `dtype`; for texts, 0 becomes the empty text.

    Raises:
        ConfigurationError: the value cannot be converted to `dtype`.
    """
    if dtype == tf.string:
        value = "" if value == 0 else value
    try:
        return tf.constant(value, dtype)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(
            f"pad={value!r} cannot pad {dtype.name}.", hint="a value of the examples' type"
        ) from error


def padding_of(value: Any, table: Any, prepare: Callable[[Any], Any] | None) -> Padding:
    """The padding for a table's examples, whose lengths it measures.

    Args:
        value: the value to pad with.
        table: any `Table`.
        prepare: applied to each example; None leaves examples as they are.

    Raises:
        DataError: examples differ in more than their first dimension.
    """
    elements = in_order(table)
    if prepare is not None:
        elements = elements.map(unconverted(lambda example, number: (prepare(example), number)))
    spec = elements.element_spec[0]
    return Padding(value, spec, _lengths_of(table, prepare, spec))


def _lengths_of(table: Any, prepare: Callable[[Any], Any] | None, spec: Any) -> np.ndarray:
    """The lengths of the open leaves of each example, int64 of shape (examples, open leaves).

    Ragged arrays without `prepare` know their lengths. Otherwise all examples are prepared once to measure
    them.
    """
    is_open = [ragged_first(leaf, "pad or buckets") for leaf in tf.nest.flatten(spec)]
    if prepare is None and isinstance(table, ColumnTable):
        splits = [column.splits for _, column in named_columns(table.columns) if column.splits is not None]
        lengths = [np.diff(split) for split in splits]
        return np.stack(lengths, axis=1) if lengths else np.zeros((table.examples, 0), np.int64)
    logger.info("All examples are prepared once, to measure their lengths; cache=True keeps them as well.")

    def measured(example: Any, _: Any) -> Any:
        leaves = tf.nest.flatten(example if prepare is None else prepare(example))
        lengths = [tf.shape(leaf, out_type=tf.int64)[0] for leaf, o in zip(leaves, is_open, strict=True) if o]
        return tf.stack(lengths) if lengths else tf.zeros([0], tf.int64)

    rows = in_order(table).map(unconverted(measured), num_parallel_calls=tf.data.AUTOTUNE).batch(1024)
    return np.concatenate(list(rows.as_numpy_iterator()))


def padded(examples: tf.data.Dataset, value: Any, batch: int, *, drop_remainder: bool) -> tf.data.Dataset:
    """Batches of a stream, each padded to its longest example."""
    for leaf in tf.nest.flatten(examples.element_spec):
        ragged_first(leaf, "pad")
    return examples.padded_batch(
        batch, padding_values=_values(examples.element_spec, value), drop_remainder=drop_remainder
    )


def bucketed(
    examples: tf.data.Dataset, bounds: tuple[int, ...], value: Any, batch: int, *, drop_remainder: bool
) -> tf.data.Dataset:
    """Batches of a stream in buckets: a batch is emitted as soon as its bucket has enough examples.

    Batches that are not full come at the end of the epoch, those of the shortest examples first. All
    processes that read the same stream get the same batches.
    """
    spec = examples.element_spec
    is_open = [ragged_first(leaf, "buckets") for leaf in tf.nest.flatten(spec)]

    def bucket_of(*example: Any) -> Any:
        leaves = zip(tf.nest.flatten(example), is_open, strict=True)
        lengths = [tf.shape(leaf, out_type=tf.int64)[0] for leaf, o in leaves if o]
        longest = tf.reduce_max(tf.stack(lengths)) if lengths else tf.zeros([], tf.int64)
        return tf.searchsorted(tf.constant(bounds, tf.int64), longest[None], out_type=tf.int64)[0]

    def batch_of(bucket: Any, members: tf.data.Dataset) -> tf.data.Dataset:
        bound = tf.gather(tf.constant([*bounds, -1], tf.int64), bucket)

        def shape(leaf: Any, o: bool) -> Any:
            inner = tf.constant(list(leaf.shape[1 if o else 0 :]), tf.int64)
            return tf.concat([bound[None], inner], axis=0) if o else inner

        shapes = [shape(leaf, o) for leaf, o in zip(tf.nest.flatten(spec), is_open, strict=True)]
        return members.padded_batch(
            batch,
            padded_shapes=tf.nest.pack_sequence_as(spec, shapes),
            padding_values=_values(spec, value),
            drop_remainder=drop_remainder,
        )

    return examples.group_by_window(
        key_func=unconverted(bucket_of), reduce_func=unconverted(batch_of), window_size=batch
    )


def _values(spec: Any, value: Any) -> Any:
    def one(leaf: Any) -> Any:
        # TensorFlow wants a value of the right type for leaves that need no padding, too.
        is_open = bool(leaf.shape.rank and leaf.shape[0] is None)
        return padding_value(value if is_open else 0, leaf.dtype)

    return tf.nest.map_structure(one, spec)
