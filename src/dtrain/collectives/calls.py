"""Collective calls on NumPy arrays between workers: all-reduce, gather, broadcast, scatter; no TensorFlow.

Subclasses move the bytes: they need `_swap` alone, and may do the rest faster. Every call starts with a
barrier that compares which call each worker is at, so that data is sent only to peers that are ready to
receive it. A worker that waits in the barrier leaves its core to other processes, notices a lost or
mismatched peer, and measures how long it waits. Small all-reduces send their values together with the
barrier's messages. The memory of all-reduced arrays is reused from step to step (`Buffers`).
"""

from __future__ import annotations

import abc
import contextlib
import itertools
import math
import sys
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from dtrain.base.quantization import Quantization
from dtrain.collectives import reduction_rules
from dtrain.errors import DataError, PeerMismatchError

_SUM, _GATHER, _BROADCAST, _REDUCE_SCATTER, _SCATTER, _QUANTIZED = 1, 2, 3, 4, 5, 6
_KINDS = 0x7F  # the bits of a kind that name the call
_OF_SOME = 0x80  # set in a call of some workers alone; the next bits hold `_mark`
_OPERATION = 40  # the first bit of a kind that holds the number of the program's operation, up to the last
_NAMES = {
    _SUM: "an all-reduce",
    _GATHER: "an all-gather",
    _BROADCAST: "a broadcast",
    _REDUCE_SCATTER: "a reduce-scatter",
    _SCATTER: "a scatter",
    _QUANTIZED: "an all-reduce in few bits",
}
_NARROW = ("float16", "bfloat16")  # sent as they are, summed in float32

ALIGNMENT = 64  # bytes: TensorFlow requires it to use an array without a copy
_SIZES = 1000  # the number of different array sizes that a pool keeps

Parts = list[np.ndarray | None]


class Vector(NamedTuple):
    """One vector of an all-reduce.

    Attributes:
        value: this worker's values.
        total: where the sum over all workers goes.
    """

    value: np.ndarray
    total: np.ndarray


class Calls(abc.ABC):
    """Collective calls; all workers must make the same calls in the same order.

    Args:
        rank: this worker's number.
        size: the number of workers.

    Attributes:
        rank, size: as given.
        waited: how many seconds this worker has waited for others, in all calls so far.
        operation: the number of the program's operation in which a call is made, of up to 23 bits. A call in
            an `evaluate` is then not taken for one in a `fit`.
        explain: called if the numbers differ; raises an error that names the operations.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self.waited = 0.0
        self.operation: Callable[[], int] = lambda: 0
        self.explain: Callable[[], None] = lambda: None
        self._numbers_in_job: Sequence[int] = range(size)  # the workers' numbers in the job
        self._lock = threading.RLock()
        self._buffers = Buffers()
        self._scratch = np.empty(0, np.uint8)

    def sum(self, value: np.ndarray) -> np.ndarray:
        """All-reduces one array: returns the sum over all workers, bit for bit the same on each.

        Args:
            value: numbers, of the same shape and dtype on every worker. 16-bit floats are summed in float32,
                and rounded once. The array is not changed.

        Returns:
            A new array of the same shape. Its memory is not reused while a reference to it exists.

        Raises:
            PeerMismatchError: another worker is at another call.
            PeerMissingError: another worker is lost.
        """
        (total,) = self.sums([value])
        return total

    def sums(self, values: Sequence[np.ndarray]) -> list[np.ndarray]:
        """All-reduces several arrays as `sum` does, with one barrier for all of them."""
        with self._lock:
            values = [np.asarray(value, order="C") for value in values]
            totals = [self._buffers.take(value.shape, value.dtype) for value in values]
            size = sum(value.nbytes for value in values)
            if reduction_rules.sent_with_barrier([value.nbytes for value in values], self.size):
                self._sum_of(
                    self._barrier_with(self._in_operation(_SUM), values[0].reshape(-1)), totals[0].reshape(-1)
                )
                return totals
            self._barrier(self._in_operation(_SUM | _mark([value.nbytes for value in values])), size)
            vectors = [
                Vector(value.reshape(-1), total.reshape(-1))
                for value, total in zip(values, totals, strict=True)
                if value.size
            ]
            for group in reduction_rules.exchanged_together([vector.value.nbytes for vector in vectors]):
                self._all_reduce(vectors[group])
            return totals

    def quantized_sum(self, value: np.ndarray, how: Quantization, number: int) -> np.ndarray:
        """All-reduces a vector in few bits: returns the same bits on each worker.

        Each worker sums one part of all workers' vectors, in their order, and sends the sum to all. What is
        sent is rounded, both ways.

        Args:
            value: a vector, sent as float32.
            how: the bits, and the seed, the same on all workers.
            number: the number of the call, on which the rounding depends.

        Raises:
            PeerMismatchError, PeerMissingError: as `sum`.
        """
        value = value.astype(np.float32, copy=False)
        with self._lock:
            self._barrier(self._in_operation(_QUANTIZED | _mark([how.bits, how.seed, number])), value.nbytes)
            parts = _parts_of(len(value), self.size)
            out = [
                None if r == self.rank else how.encode(value[part], (number, self.rank, r))
                for r, part in enumerate(parts)
            ]
            mine = parts[self.rank]
            received = [np.empty(how.bytes_of(mine.stop - mine.start), np.uint8) for _ in range(self.size)]
            self._swap(out, self._for_others(received))
            terms = [
                value[mine] if r == self.rank else how.decode(sent, mine.stop - mine.start)
                for r, sent in enumerate(received)
            ]
            own = np.empty(mine.stop - mine.start, np.float32)
            self._sum_of(terms, own)
            sums = [np.empty(how.bytes_of(part.stop - part.start), np.uint8) for part in parts]
            sums[self.rank] = how.encode(own, (number, self.rank, self.size))
            self._swap(self._for_others([sums[self.rank]] * self.size), self._for_others(sums))
            decoded = [
                how.decode(sent, part.stop - part.start) for sent, part in zip(sums, parts, strict=True)
            ]
            return np.concatenate(decoded)

    def scattered_sums(self, values: Sequence[np.ndarray], rows: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """Sums several arrays as `sums` does, bit for bit, and returns this worker's rows of each sum.

        Args:
            values: arrays of shape (rows of all workers, ...), as in `sum`.
            rows: for each, the numbers of rows of all workers, one after another.

        Raises:
            PeerMismatchError, PeerMissingError: as `sum`.
        """
        with self._lock:
            values = [np.asarray(value, order="C") for value in values]
            sizes = [value.nbytes for value in values]
            self._barrier(self._in_operation(_REDUCE_SCATTER | _mark(sizes)), sum(sizes))
            totals = [
                self._buffers.take((of_all[self.rank], *value.shape[1:]), value.dtype)
                for value, of_all in zip(values, rows, strict=True)
            ]
            for group in reduction_rules.exchanged_together([value.nbytes for value in values]):
                self._reduce_scatter(values[group], rows[group], totals[group])
            return totals

    def gather(self, values: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Gathers the rows of all workers, in the workers' order; the number of rows may differ by worker.

        Args:
            values: arrays of shape (own rows, ...); the other dimensions and the dtype must be the same on
                all workers.

        Returns:
            One array of shape (rows of all workers, ...) for each of `values`.

        Raises:
            DataError: on every worker, if the size of a row differs between workers.
            PeerMismatchError, PeerMissingError: as `sum`.
        """
        values = [np.asarray(value, order="C") for value in values]
        with self._lock:
            self._barrier(self._in_operation(_GATHER), len(values))
            mine = np.array([(v.shape[0], _row_bytes(v)) for v in values], np.int64)
            everyone = np.stack(self._from_all(mine))
            if (everyone[:, :, 1] != mine[:, 1]).any():
                raise DataError(
                    f"Workers gather rows that differ in size: {everyone[:, :, 1].tolist()} bytes a row, by "
                    "worker.",
                    hint="all but the first dimension, and the dtype, must be the same on every worker",
                )
            return [self._rows(value, everyone[:, i, 0]) for i, value in enumerate(values)]

    def broadcast(self, value: np.ndarray) -> np.ndarray:
        """Returns the first worker's value; the others pass a value of the same shape and dtype.

        Raises:
            PeerMismatchError, PeerMissingError: as `sum`.
        """
        with self._lock:
            result = fresh(value.shape, value.dtype)
            np.copyto(result, value)
            self._barrier(self._in_operation(_BROADCAST), result.nbytes)
            self._send_first(raw(result))
            return result

    def scatter(self, value: np.ndarray, dim: int, bounds: Sequence[tuple[int, int]]) -> np.ndarray:
        """Returns this worker's entries of the first worker's value, in memory of their own.

        The first worker copies one part at a time, so that it needs little memory beside the value.

        Args:
            value: of at least two dimensions. On other workers its shape and dtype alone count.
            dim: the dimension that is divided.
            bounds: by worker, the first entry of its part, and the one behind its last.

        Raises:
            PeerMismatchError, PeerMissingError: as `sum`.
        """
        parts = [value[(slice(None),) * dim + (slice(*ends),)] for ends in bounds]
        with self._lock:
            self._barrier(self._in_operation(_SCATTER | _mark([*value.shape, dim])), value.nbytes)
            own = fresh(parts[self.rank].shape, value.dtype)
            if self.rank == 0:
                np.copyto(own, parts[0])
                for worker in range(1, self.size):
                    out: Parts = [None] * self.size
                    out[worker] = raw(np.ascontiguousarray(parts[worker]))
                    self._swap(out, [None] * self.size)
            else:
                self._swap([None] * self.size, [raw(own), *[None] * (self.size - 1)])
            return own

    def alone(self) -> contextlib.AbstractContextManager[Any]:
        """A context in which only this thread makes calls; others wait."""
        return self._lock

    def among(self, workers: Sequence[int]) -> Calls:
        """The calls that some workers make alone; they and these must be made in one order.

        Args:
            workers: their numbers, of which this worker's is one; they get new numbers, in this order.
        """
        return self if len(workers) == self.size else CallsAmong(self, workers)

    def _in_operation(self, kind: int) -> int:
        """A kind of call, with the number of the operation in which it is made."""
        return kind | self.operation() << _OPERATION

    @abc.abstractmethod
    def _swap(self, out: Parts, into: Parts) -> None:
        """Sends the bytes `out[r]` to each worker r while it receives `into[r]` from it; None means nothing.

        Messages of two workers must arrive in the order in which they were sent.

        Raises:
            PeerMissingError: another worker is lost.
        """

    def _swap_all(self, out: Sequence[Parts], into: Sequence[Parts]) -> None:
        """Does several `_swap`s, in their order; a subclass may begin one before the one before it ends."""
        for sent, received in zip(out, into, strict=True):
            self._swap(sent, received)

    def _barrier(self, kind: int, size: int) -> None:
        """The barrier: returns when all workers are at the same call; adds to `waited`."""
        begun = time.perf_counter()
        headers = self._headers(kind, size, range(self.size))
        self.waited += time.perf_counter() - begun
        self._compare(headers)

    def _headers(self, kind: int, size: int, workers: Sequence[int]) -> list[list[int]]:
        """Exchanges the kind and size of a call with some workers; returns those of all of these."""
        mine = np.array([kind, size], np.int64)
        headers = [np.empty_like(mine) if r in workers else None for r in range(self.size)]
        others = self._for_others([None if header is None else raw(header) for header in headers])
        self._swap([None if place is None else raw(mine) for place in others], others)
        headers[self.rank] = mine
        return [header.tolist() for header in headers if header is not None]

    def _barrier_with(self, kind: int, value: np.ndarray) -> list[np.ndarray]:
        """As `_barrier`, and exchanges vectors of up to `WHOLE_BYTES` bytes.

        Returns:
            The vectors of all workers, valid until the next call.
        """
        self._barrier(kind, value.nbytes)
        return self._from_all(value)

    def _all_reduce(self, vectors: Sequence[Vector]) -> None:
        """Fills the totals of vectors, which are not empty."""
        self._reduce_by_parts(vectors)

    def _send_first(self, found: np.ndarray) -> None:
        """Sends the first worker's bytes to all workers, into `found`."""
        if self.rank == 0:
            self._swap(self._for_others([found] * self.size), [None] * self.size)
        else:
            self._swap([None] * self.size, [found if r == 0 else None for r in range(self.size)])

    def _from_all(self, mine: np.ndarray) -> list[np.ndarray]:
        """Exchanges arrays of one shape and dtype; returns those of all workers, by worker."""
        values = [mine if r == self.rank else np.empty_like(mine) for r in range(self.size)]
        self._swap(
            self._for_others([raw(mine)] * self.size), self._for_others([raw(value) for value in values])
        )
        return values

    def _for_others(self, each: Sequence[np.ndarray | None]) -> Parts:
        """Replaces this worker's entry in a list by worker with None."""
        return [None if r == self.rank else value for r, value in enumerate(each)]

    def _rows(self, value: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Gathers the rows of all workers; `rows` is the number of rows of each worker."""
        gathered = fresh((int(rows.sum()), *value.shape[1:]), value.dtype)
        ends = np.cumsum(rows)
        places = [raw(gathered[end - count : end]) for end, count in zip(ends, rows, strict=True)]
        places[self.rank][:] = raw(value)
        self._swap(self._for_others([raw(value)] * self.size), self._for_others(places))
        return gathered

    def _reduce_by_parts(self, vectors: Sequence[Vector]) -> None:
        """All-reduces by parts: each worker sums one part of all workers' vectors, and sends the sum to all.

        The terms are added in the workers' order. No vector is copied as a whole. The messages of all vectors
        follow each other: to wait for a reply takes longer than to send a short vector.
        """
        pairs = [(vector, _parts_of(len(vector.value), self.size)) for vector in vectors]
        terms = self._terms([vector.value[parts[self.rank]] for vector, parts in pairs])
        sums = [vector.total[parts[self.rank]] for vector, parts in pairs]
        self._swap_all(
            [self._for_others([raw(vector.value[part]) for part in parts]) for vector, parts in pairs],
            [self._for_others([raw(term) for term in by_worker]) for by_worker in terms],
        )
        for by_worker, total in zip(terms, sums, strict=True):
            self._sum_of(by_worker, total)
        self._swap_all(
            [self._for_others([raw(total)] * self.size) for total in sums],
            [self._for_others([raw(vector.total[part]) for part in parts]) for vector, parts in pairs],
        )

    def _reduce_scatter(
        self, values: Sequence[np.ndarray], rows: Sequence[Sequence[int]], totals: Sequence[np.ndarray]
    ) -> None:
        """Fills the totals with this worker's rows of the sums; adds as `_reduce_by_parts` does."""
        divided = [
            (value.reshape(-1), _parts_of_rows(value, of_all))
            for value, of_all in zip(values, rows, strict=True)
        ]
        terms = self._terms([vector[parts[self.rank]] for vector, parts in divided])
        self._swap_all(
            [self._for_others([raw(vector[part]) for part in parts]) for vector, parts in divided],
            [self._for_others([raw(term) for term in by_worker]) for by_worker in terms],
        )
        for by_worker, total in zip(terms, totals, strict=True):
            self._sum_of(by_worker, total.reshape(-1))

    def _terms(self, mine: list[np.ndarray]) -> list[list[np.ndarray]]:
        """The terms of sums by worker: this worker's are given, the others' are memory to receive them."""
        needed = (self.size - 1) * sum(_aligned(own.nbytes) for own in mine)
        if self._scratch.nbytes < needed:
            self._scratch = np.empty(needed, np.uint8)
        terms: list[list[np.ndarray]] = []
        begin = 0
        for own in mine:
            terms.append([])
            for r in range(self.size):
                if r == self.rank:
                    terms[-1].append(own)
                    continue
                terms[-1].append(self._scratch[begin : begin + own.nbytes].view(own.dtype))
                begin += _aligned(own.nbytes)
        return terms

    @staticmethod
    def _sum_of(terms: list[np.ndarray], total: np.ndarray) -> None:
        if len(terms) == 1:
            np.copyto(total, terms[0])
            return
        wide = np.empty(total.shape, np.float32) if is_narrow(total) else total
        np.add(terms[0], terms[1], out=wide, dtype=wide.dtype)
        for term in terms[2:]:
            np.add(wide, term, out=wide)
        if wide is not total:
            np.copyto(total, wide, casting="unsafe")

    def _compare(self, everyone: list[list[int]]) -> None:
        """Checks that all workers are at the same call, given the kind and size of each worker's call.

        Raises:
            PeerMismatchError: the calls differ; an `OperationMismatchError` if the operations do.
        """
        first = everyone[0]
        if all(header == first for header in everyone):
            return
        if any(kind >> _OPERATION != first[0] >> _OPERATION for kind, _ in everyone):
            self.explain()
        units = {_GATHER: "arrays"}
        at = ", ".join(
            f"worker {r} at {_NAMES.get(kind & _KINDS, 'something else')} of {size} "
            f"{units.get(kind & _KINDS, 'bytes')}{' with some workers alone' if kind & _OF_SOME else ''}"
            for r, (kind, size) in zip(self._numbers_in_job, everyone, strict=True)
        )
        raise PeerMismatchError(
            f"The workers are not at the same point of the program: {at}.",
            hint="every worker must run the same steps, on values of the same shapes, and its data must have "
            "the same number of batches",
        )


class CallsAmong(Calls):
    """Collective calls of some workers, over the connections of all.

    Args:
        calls: the calls of all workers.
        workers: the numbers of the workers.
    """

    def __init__(self, calls: Calls, workers: Sequence[int]) -> None:
        super().__init__([*workers].index(calls.rank), len(workers))
        self.operation, self.explain = calls.operation, calls.explain
        self._numbers_in_job = workers
        self._calls = calls
        self._lock = calls._lock  # the messages of two calls must not mix

    def _in_operation(self, kind: int) -> int:
        return super()._in_operation(kind | _OF_SOME)

    def _headers(self, kind: int, size: int, workers: Sequence[int]) -> list[list[int]]:
        return self._calls._headers(kind, size, [self._numbers_in_job[worker] for worker in workers])

    def _barrier(self, kind: int, size: int) -> None:
        before = self.waited
        super()._barrier(kind, size)
        self._calls.waited += self.waited - before

    def _swap(self, out: Parts, into: Parts) -> None:
        self._swap_all([out], [into])

    def _swap_all(self, out: Sequence[Parts], into: Sequence[Parts]) -> None:
        self._calls._swap_all([*map(self._of_all, out)], [*map(self._of_all, into)])

    def _of_all(self, parts: Parts) -> Parts:
        """Parts by worker of the job."""
        of_all: Parts = [None] * self._calls.size
        for worker, part in zip(self._numbers_in_job, parts, strict=True):
            of_all[worker] = part
        return of_all


def is_narrow(value: np.ndarray) -> bool:
    """Whether an array holds 16-bit floats."""
    return value.itemsize == 2 and value.dtype.name in _NARROW


def raw(value: np.ndarray) -> np.ndarray:
    """A view of the bytes of a contiguous array."""
    return value.reshape(-1).view(np.uint8)


def _parts_of(length: int, size: int) -> list[slice]:
    """The part of a vector that each worker sums, by worker."""
    bounds = [length * r // size for r in range(size + 1)]
    return [slice(*ends) for ends in itertools.pairwise(bounds)]


def _parts_of_rows(value: np.ndarray, rows: Sequence[int]) -> list[slice]:
    """The part of an array's elements that belongs to each worker, by worker."""
    width = math.prod(value.shape[1:])
    ends = [*itertools.accumulate(rows, initial=0)]
    return [slice(begin * width, end * width) for begin, end in itertools.pairwise(ends)]


def _aligned(size: int) -> int:
    """The bytes that an array of so many bytes takes in aligned memory."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def _mark(sizes: Sequence[int]) -> int:
    """A checksum of the sizes of several arrays, above the bits of `_KINDS`; 0 for one array."""
    return 0 if len(sizes) == 1 else zlib.crc32(repr(sizes).encode()) << 8


def _row_bytes(value: np.ndarray) -> int:
    return int(np.prod(value.shape[1:], dtype=np.int64)) * value.itemsize


class Buffers:
    """A pool of aligned arrays, so that no step has to map new pages of memory. It is not thread-safe.

    Memory is reused only when neither Python nor TensorFlow refers to the array in it. TensorFlow uses
    aligned arrays without a copy, and keeps a reference as long as a tensor uses one.
    """

    def __init__(self) -> None:
        self._kept: dict[int, list[_ArrayMemory]] = {}
        # The reference count of unused memory, measured as in `take`: the block's reference, and the call's.
        idle = _ArrayMemory(1)
        self._idle = sys.getrefcount(idle.memory)

    def take(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        """Returns an array with arbitrary content; its memory is reused when no reference to it is left.

        For each size, the pool keeps as many arrays as were ever in use at the same time. The number of sizes
        is limited, so that values whose size changes from step to step do not fill the memory.

        Args:
            shape: the shape of the array.
            dtype: a NumPy dtype, or one of `ml_dtypes`.
        """
        size = math.prod(shape) * np.dtype(dtype).itemsize
        kept = self._kept.get(size)
        if kept is None:
            if len(self._kept) >= _SIZES:
                return fresh(shape, dtype)
            kept = self._kept[size] = []
        for block in kept:
            if sys.getrefcount(block.memory) == self._idle:
                return block.array(shape, dtype)
        kept.append(_ArrayMemory(size))
        return kept[-1].array(shape, dtype)


def fresh(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Returns an aligned array outside of the pool, for results whose size varies from step to step."""
    return _ArrayMemory(math.prod(shape) * np.dtype(dtype).itemsize).array(shape, dtype)


class _ArrayMemory:
    """Memory for one aligned array of `size` bytes.

    Attributes:
        memory: the bytes; each array that uses them holds a reference to this object.
    """

    def __init__(self, size: int) -> None:
        self.memory = np.empty(size + ALIGNMENT, np.uint8)
        self._start = -self.memory.ctypes.data % ALIGNMENT

    def array(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        return np.ndarray(shape, dtype, self.memory, self._start)
