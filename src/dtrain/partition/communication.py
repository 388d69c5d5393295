"""What replicas do together in a partitioned function: sums, and rows one after another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import tensorflow as tf

from dtrain.upstream.tf_tracing import sum_in_order

Parts = Sequence[Sequence[tf.Tensor]]
"""For each value, a tensor of each replica of this process, on its device."""


class ProcessCommunication(Protocol):
    """What the processes of a job do together; the tensors are in the same order on all of them."""

    def all_reduce(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """The sums of the processes' tensors."""

    def all_gather(self, tensors: Sequence[tf.Tensor], *, in_group: bool = False) -> list[tf.Tensor]:
        """The processes' tensors, one after another along the first dimension; their lengths may differ.

        Args:
            tensors: the tensors.
            in_group: whether those of this process' shard group are gathered, and not those of all.
        """

    def reduce_scatter(self, tensors: Sequence[tf.Tensor], rows: Sequence[Sequence[int]]) -> list[tf.Tensor]:
        """The sums of all processes' tensors, of which each process of a shard group gets its rows.

        Args:
            tensors: the tensors.
            rows: for each, the numbers of rows of the processes of a shard group, one after another.
        """


class OneProcess:
    """Null object: all replicas are in this process."""

    def all_reduce(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """The tensors as they are."""
        return list(tensors)

    def all_gather(self, tensors: Sequence[tf.Tensor], *, in_group: bool = False) -> list[tf.Tensor]:
        """The tensors as they are."""
        del in_group
        return list(tensors)

    def reduce_scatter(self, tensors: Sequence[tf.Tensor], rows: Sequence[Sequence[int]]) -> list[tf.Tensor]:
        """The tensors as they are."""
        return list(tensors)


class Collectives:
    """What replicas do together. Those of a process do it on the first one's device, in their order.

    So sums have the same bits in every run. A subclass may make them in another way.

    Args:
        processes: what processes do together.
        devices: the device of each replica of this process; none if TensorFlow places them.
        overlap: whether to communicate while replicas compute: a divided weight is then gathered one round
            earlier than it is needed.
    """

    def __init__(
        self,
        processes: ProcessCommunication | None = None,
        devices: Sequence[str] = (),
        *,
        overlap: bool = False,
    ) -> None:
        self._processes = processes or OneProcess()
        self._devices = tuple(devices)
        self.overlap = overlap

    def sums(self, parts: Parts, *, nested: bool) -> Parts:
        """The sum of each value's parts over all replicas.

        Args:
            parts: the parts.
            nested: whether this is in a loop or branch.
        """
        del nested
        return self._on_each(self._processes.all_reduce([sum_in_order(tensors) for tensors in parts]), parts)

    def marked_sums(self, marks: Sequence[int], parts: Parts, *, nested: bool) -> Parts:
        """As `sums`, of values that were marked (`marks.py`)."""
        del marks
        return self.sums(parts, nested=nested)

    def gathers(self, parts: Parts, *, in_group: bool = False, nested: bool = False) -> Parts:
        """The rows of each value's parts, of all replicas or those of a shard group, in their order."""
        del nested
        own = [tensors[0] if len(tensors) == 1 else tf.concat(tensors, axis=0) for tensors in parts]
        return self._on_each(self._processes.all_gather(own, in_group=in_group), parts)

    def scattered_sums(
        self,
        rows: Sequence[Sequence[int]],
        bounds: Sequence[Sequence[tuple[int, int]]],
        parts: Parts,
        *,
        nested: bool,
    ) -> Parts:
        """Of the sum of each value's parts over all replicas, each replica's own rows.

        Args:
            rows: for each value, the numbers of rows of the processes of a shard group, one after another.
            bounds: for each value, the first row of each replica of this process and the one behind its last.
            parts: the parts.
            nested: whether this is in a loop or branch.
        """
        del nested
        sums = self._processes.reduce_scatter([sum_in_order(tensors) for tensors in parts], rows)
        scattered = []
        for total, own in zip(sums, bounds, strict=True):
            sizes = [end - begin for begin, end in own]
            first, *others = tf.split(total, sizes) if len(own) > 1 else [total]
            scattered.append([first])
            for place, value in enumerate(others, 1):
                with tf.device(self._devices[place] if self._devices else None):
                    scattered[-1].append(tf.identity(value))
        return scattered

    def _on_each(self, values: Sequence[tf.Tensor], parts: Parts) -> Parts:
        """Values that are on the first device, sent to each device once: what follows is computed there."""
        copies = []
        for value, tensors in zip(values, parts, strict=True):
            copies.append([value])
            for place in range(1, len(tensors)):
                with tf.device(self._devices[place] if self._devices else None):
                    copies[-1].append(tf.identity(value))
        return copies


def first_dim(tensor: tf.Tensor, dim: int, rank: int) -> tf.Tensor:
    """The tensor with a dimension moved to the first place; its static shape may have no rank."""
    return tf.transpose(tensor, [dim, *range(dim), *range(dim + 1, rank)]) if dim else tensor


def first_dim_back(tensor: tf.Tensor, dim: int, rank: int) -> tf.Tensor:
    """The inverse of `first_dim`, on the tensor's device."""
    if not dim:
        return tensor
    with tf.device(tensor.device):
        return tf.transpose(tensor, [*range(1, dim + 1), 0, *range(dim + 1, rank)])
