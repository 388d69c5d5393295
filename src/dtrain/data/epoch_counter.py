"""Which epoch is it? A counter inside a dataset: every new iteration over the dataset is the next epoch.

It is a variable that the dataset's operations read, so `repeat`, `fit` and TensorFlow's own strategies count
in the same way. The order of an epoch is decided in `example_order.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from dtrain.keras_engine.input import packed, unconverted
from dtrain.upstream import tensorflow as upstream_tf

_NOT_BEGUN = -1


class EpochCounter:
    """Counts the iterations over the datasets that it is attached to.

    Args:
        first: the number of the first epoch.
        only: whether it is the only epoch, so that reading another one is an error.
    """

    def __init__(self, first: int, *, only: bool = False) -> None:
        self._first = first
        self._only = only
        # Not a tf.Variable: under a strategy's scope that would be the strategy's.
        with tf.init_scope(), tf.device("CPU:0"):
            self._handle = upstream_tf.unnamed_variable_handle(tf.int64, [])
            tf.raw_ops.AssignVariableOp(resource=self._handle, value=tf.constant(first, tf.int64))

    @property
    def next(self) -> int:
        """The epoch of the next iteration."""
        return int(tf.raw_ops.ReadVariableOp(resource=self._handle, dtype=tf.int64))

    def seek(self, epoch: int) -> None:
        """Has the next iteration be this epoch."""
        with tf.init_scope(), tf.device("CPU:0"):
            tf.raw_ops.AssignVariableOp(resource=self._handle, value=tf.constant(epoch, tf.int64))

    def attach(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        """A dataset of (epoch, element); an epoch begins when its first element is taken.

        So an iterator that is never read does not count; Keras makes such iterators.
        """

        def scan(epoch: Any, element: Any) -> Any:
            epoch = self._now(epoch)
            return epoch, (epoch, element)

        return dataset.scan(tf.constant(_NOT_BEGUN, tf.int64), unconverted(scan))

    def _now(self, epoch: Any) -> Any:
        """The epoch; a new one if it has not begun."""
        # Without cond or loop: for those TensorFlow prepares a graph for each iterator, which takes longer
        # than the first step of a small model.
        begins = epoch == _NOT_BEGUN
        counted = tf.raw_ops.ReadVariableOp(resource=self._handle, dtype=tf.int64)
        epoch = tf.where(begins, counted, epoch)
        checks = [epoch]
        if self._only:
            text = (
                f"this dataset is the rest of one epoch; the next is dataset(first_epoch={self._first + 1})"
            )
            checks.append(tf.raw_ops.Assert(condition=epoch == self._first, data=[text]))
        with tf.control_dependencies(checks):
            raised = tf.raw_ops.AssignAddVariableOp(resource=self._handle, value=tf.cast(begins, tf.int64))
        with tf.control_dependencies([raised]):
            return tf.identity(epoch)


class EpochPositions:
    """How a dataset that counts its epochs begins elsewhere; see `keras_engine.protocol.Positions`.

    Args:
        counter: the dataset's.
        dataset: makes one from `first_epoch` and `first_step` on.
        fingerprint: what decides the order.
    """

    def __init__(
        self, counter: EpochCounter, dataset: Callable[..., tf.data.Dataset], fingerprint: dict[str, Any]
    ) -> None:
        self._counter = counter
        self._dataset = dataset
        self.fingerprint = fingerprint

    @property
    def epoch(self) -> int:
        """The epoch of the next iteration."""
        return self._counter.next

    def seek(self, epoch: int) -> None:
        """Has the next iteration be this epoch."""
        self._counter.seek(epoch)

    def rest(self, epoch: int, step: int) -> tf.data.Dataset:
        """The epoch's batches from a step on."""
        return self._dataset(first_epoch=epoch, first_step=step)


class NoEpochs:
    """Replaces a counter if all examples are read once, in the order of the source."""

    def attach(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        """A dataset of (0, element)."""
        return dataset.map(
            unconverted(lambda *element: (tf.zeros([], tf.int64), packed(element, dataset.element_spec)))
        )
