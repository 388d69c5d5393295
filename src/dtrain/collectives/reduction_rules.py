"""Which gradients workers all-reduce together, in which order, how, and whether beside the backward pass.

The rules know sizes, workers and cores, and no tensors. Training follows them; `dtrain plan` simulates them.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass

LARGE = 64 * 1024  # bytes: a tensor of at least this size is all-reduced without being packed
BUCKET = 4 * 2**20  # bytes: the most of several such tensors that are all-reduced with one barrier

# Up to this many bytes and workers, every worker sends its values to all others with the barrier's messages:
# the cost of a small all-reduce is its number of messages, not of bytes.
WHOLE_BYTES = 32 * 1024
WHOLE_WORKERS = 8

# From this many bytes on, and up to `WHOLE_WORKERS` workers, an all-reduce over MPI exchanges parts, directly
# from the gradient's memory. MPI's own all-reduce first copies the whole, which takes as long as sending it.
MPI_PARTS_BYTES = 256 * 1024

# Vectors are exchanged together until they have so many bytes; more would leave the processor's cache.
TOGETHER_BYTES = 2**20


@dataclass(frozen=True)
class TensorSizes:
    """Which of several tensors are all-reduced as they are, and which are packed, by their numbers.

    Attributes:
        large: the large tensors, and those whose size is not known.
        small: the small tensors, a list for each dtype.
        empty: the tensors without elements.
    """

    large: list[int]
    small: list[list[int]]
    empty: list[int]


def by_size(sizes: Sequence[int | None], dtypes: Sequence[Hashable]) -> TensorSizes:
    """Sorts tensors by their sizes.

    Args:
        sizes: the bytes of each tensor; None if they are not known.
        dtypes: the dtype of each tensor.
    """
    large, empty = list[int](), list[int]()
    small: dict[Hashable, list[int]] = {}
    for number, (size, dtype) in enumerate(zip(sizes, dtypes, strict=True)):
        if size == 0:
            empty.append(number)
        elif size is None or size >= LARGE:
            large.append(number)
        else:
            small.setdefault(dtype, []).append(number)
    return TensorSizes(large, [*small.values()], empty)


def in_buckets(sizes: Sequence[int | None], *, bucket: int = BUCKET) -> list[list[int]]:
    """Which gradients are all-reduced together, so that some are sent while others are still computed.

    Large tensors go in buckets of at most `bucket` bytes, or alone. The last tensors come first, because the
    backward pass computes them first. All small tensors follow, in one group; they join the last bucket if
    that waits for the first tensor of all anyway, and so save a barrier when nothing is left to overlap with.

    Args:
        sizes: the bytes of the gradients, in the order of the forward pass; None if they are not known.
        bucket: the most bytes of a bucket of several tensors.

    Returns:
        The groups in the order of their all-reduces, each a list of numbers of tensors in ascending order.
    """
    large = by_size(sizes, [None] * len(sizes)).large
    bucketed: list[list[int]] = []
    free = 0
    for number in reversed(large):
        size = sizes[number]
        size = bucket if size is None else size
        if size > free:
            bucketed.append([])
            free = bucket
        bucketed[-1].insert(0, number)
        free -= size
    rest = sorted({*range(len(sizes))}.difference(large))
    if bucketed and rest and bucketed[-1][0] < rest[0]:
        rest = sorted([*bucketed.pop(), *rest])
    return [*bucketed, rest] if rest else bucketed


def exchanged_together(sizes: Sequence[int]) -> Iterator[slice]:
    """Splits vectors, in their order, into groups of at least `TOGETHER_BYTES`; the last may be smaller.

    Args:
        sizes: their bytes.
    """
    begin = together = 0
    for end, size in enumerate(sizes, 1):
        together += size
        if together >= TOGETHER_BYTES or end == len(sizes):
            yield slice(begin, end)
            begin, together = end, 0


def sent_with_barrier(sizes: Sequence[int], workers: int) -> bool:
    """Whether an all-reduce of arrays of so many bytes is one exchange of whole values, with the barrier."""
    return len(sizes) == 1 and 0 < sizes[0] <= WHOLE_BYTES and workers <= WHOLE_WORKERS


def mpi_goes_by_parts(size: int, workers: int, *, narrow: bool = False) -> bool:
    """Whether workers sum parts of a vector over MPI themselves; else MPI's own all-reduce does.

    MPI has no sum of 16-bit floats. A small vector is summed in the workers' order, as where it is the only
    one of a call: with or without overlap, its sum has the same bits.

    Args:
        size: the bytes of the vector.
        workers: the number of workers.
        narrow: whether it holds 16-bit floats.
    """
    return narrow or ((size >= MPI_PARTS_BYTES or size <= WHOLE_BYTES) and workers <= WHOLE_WORKERS)


def spare_cores(cores: Sequence[Collection[int]], hosts: Sequence[str]) -> bool:
    """Whether all workers have a core to communicate on while they compute.

    On one core, a worker that waits for its peers takes the time from its own backward pass, so there all
    gradients are reduced together, after it. The choice changes no bit: the same arrays are summed, in the
    same order.

    Args:
        cores: the numbers of the cores on which each worker may run.
        hosts: the host of each worker.
    """
    there: dict[str, list[Collection[int]]] = {}
    for own, host in zip(cores, hosts, strict=True):
        there.setdefault(host, []).append(own)
    return all(len({core for own in of_host for core in own}) > len(of_host) for of_host in there.values())
