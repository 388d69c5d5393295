"""Finds data that a TPU cannot train on: strings, ragged and sparse batches, and batches of several shapes.

It reads batches until the data ends, or for 10 seconds; it changes no data and traces nothing.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import tensorflow as tf

from dtrain.diagnosis.check import CheckResult
from dtrain.engine.batches.batch_rows import is_dense

_SECONDS = 10.0  # for reading batches
_MOST = 1000  # the most batches that are read


class ReadBatches(NamedTuple):
    """The batches that were read from a dataset.

    Attributes:
        first: the first batch; None if there is none.
        shapes: the shapes of the dense leaves of each batch.
        complete: whether the data was read to its end.
    """

    first: Any
    shapes: list[tuple[tuple[int, ...], ...]]
    complete: bool


def read_batches(iterator: Any, strategy: Any) -> ReadBatches:
    """Reads the batches of one replica from an iterator of `fit` or `evaluate`."""
    first: Any = None
    shapes: list[tuple[tuple[int, ...], ...]] = []
    deadline = time.monotonic() + _SECONDS
    while len(shapes) < _MOST and (not shapes or time.monotonic() < deadline):
        try:
            batch = next(iterator)
        except (StopIteration, tf.errors.OutOfRangeError):
            return ReadBatches(first, shapes, True)
        batch = tf.nest.map_structure(lambda leaf: strategy.experimental_local_results(leaf)[0], batch)
        first = batch if first is None else first
        shapes.append(tuple(tuple(leaf.shape) for leaf in tf.nest.flatten(batch) if _has_shape(leaf)))
    return ReadBatches(first, shapes, False)


def examine_input(read: ReadBatches, spec: Any) -> Iterator[CheckResult]:
    """The problems of the data.

    Args:
        read: the batches that were read.
        spec: the spec of the iterator's elements, or None.
    """
    leaves = tf.nest.flatten(read.first)
    for leaf in leaves:
        if leaf is not None and not is_dense(leaf):
            yield CheckResult(
                status="fail",
                found=f"a batch has a {type(leaf).__name__} of shape {tuple(leaf.shape)}",
                remedy="make it dense in the dataset: to_tensor(shape=[None, LENGTH]), or tf.sparse.to_dense",
            )
        if getattr(leaf, "dtype", None) == tf.string:
            yield CheckResult(
                status="fail",
                found=f"a batch has strings, of shape {tuple(leaf.shape)}",
                remedy="turn them into numbers in the dataset (dataset.map), which runs on the host",
            )
    yield from _shapes_that_differ(read)
    if not read.complete and _batch_is_unknown(spec):
        yield CheckResult(
            status="warn",
            found=f"the first {len(read.shapes)} batches have one size, but the dataset does not promise it",
            remedy="dataset.batch(size, drop_remainder=True)",
        )


def _shapes_that_differ(read: ReadBatches) -> Iterator[CheckResult]:
    usual = read.shapes[0] if read.shapes else ()
    for leaf, shape in enumerate(usual):
        for axis, size in enumerate(shape):
            others = [
                (number, shapes[leaf][axis])
                for number, shapes in enumerate(read.shapes)
                if len(shapes) == len(usual)
                and len(shapes[leaf]) == len(shape)
                and shapes[leaf][axis] != size
            ]
            if not others:
                continue
            number, other = others[0]
            if axis:
                yield CheckResult(
                    status="fail",
                    found=f"axis {axis} of a tensor has the size {size}, and {other} in batch {number}",
                    remedy="pad all to one length: padded_batch(size, padded_shapes=...)",
                )
            elif leaf == 0:  # the other leaves have the same problem
                last = " (the last one)" if read.complete and number == len(read.shapes) - 1 else ""
                yield CheckResult(
                    status="fail",
                    found=f"a batch has {size} examples, but batch {number}{last} has {other}; the step is "
                    "compiled for one size",
                    remedy="dataset.batch(size, drop_remainder=True); for arrays, a number of examples that "
                    "the batch size divides",
                )


def _batch_is_unknown(spec: Any) -> bool:
    shapes = [getattr(component, "shape", None) for component in tf.nest.flatten(spec)]
    return any(shape is not None and shape.rank and shape[0] is None for shape in shapes)


def _has_shape(leaf: Any) -> bool:
    return isinstance(leaf, tf.Tensor)
