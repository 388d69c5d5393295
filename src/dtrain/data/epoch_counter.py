"""Counts epochs inside a dataset: every new iteration over the dataset is the next epoch.

The counter is a variable that the dataset's operations read, so `repeat`, `fit` and TensorFlow's own
strategies count in the same way. It does not decide the order of an epoch; `example_order.py` does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from dtrain.engine.batches.batch_rows import packed, unconverted
from dtrain.upstream import tf_variables

_NOT_BEGUN = -1


class EpochCounter:
    """Counts the iterations over the datasets that it is attached to.

    Args:
        first: the number of the first epoch.
        only: whether the dataset holds this epoch only; reading another epoch is then an error.
    """

    def __init__(self, first: int, *, only: bool = False) -> None:
        self._first = first
        self._only = only
        # Not a tf.Variable: in a strategy's scope the strategy would create and replicate it.
        with tf.init_scope(), tf.device("CPU:0"):
            self._handle = tf_variables.unnamed_variable_handle(tf.int64, [])
            tf.raw_ops.AssignVariableOp(resource=self._handle, value=tf.constant(first, tf.int64))

    @property
    def next(self) -> int:
        """The epoch of the next iteration."""
        return int(tf.raw_ops.ReadVariableOp(resource=self._handle, dtype=tf.int64))

    def seek(self, epoch: int) -> None:
        """Makes `epoch` the epoch of the next iteration."""
        with tf.init_scope(), tf.device("CPU:0"):
            tf.raw_ops.AssignVariableOp(resource=self._handle, value=tf.constant(epoch, tf.int64))

    def attach(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        """A dataset of (epoch, element); an epoch begins when its first element is read.

        An iterator that is never read therefore does not count; Keras makes such iterators.
        """

        def scan(epoch: Any, element: Any) -> Any:
            epoch = self._now(epoch)
            return epoch, (epoch, element)

        return dataset.scan(tf.constant(_NOT_BEGUN, tf.int64), unconverted(scan))

    def _now(self, epoch: Any) -> Any:
        """The epoch of this iteration; its first element reads the counter and raises it by one."""
        # No `cond` and no loop: TensorFlow would prepare their graphs for each iterator, which takes longer
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
    """Lets a dataset with an epoch counter resume at a position; see `dataset_parts.Positions`.

    Args:
        counter: the dataset's epoch counter.
        dataset: a function that makes the dataset from `first_epoch` and `first_step` on.
        fingerprint: the settings that decide the order of the examples.
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
        """Makes `epoch` the epoch of the next iteration."""
        self._counter.seek(epoch)

    def rest(self, epoch: int, step: int) -> tf.data.Dataset:
        """The batches of `epoch` from `step` on."""
        return self._dataset(first_epoch=epoch, first_step=step)


class NoEpochs:
    """Takes the place of an `EpochCounter` where epochs do not matter: the epoch is always 0."""

    def attach(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        """A dataset of (0, element)."""
        return dataset.map(
            unconverted(lambda *element: (tf.zeros([], tf.int64), packed(element, dataset.element_spec)))
        )
