"""Sums, gatherings and broadcasts of NumPy arrays between workers, whatever moves the bytes; no TensorFlow.

Every call first waits, politely, until all workers are in it: what is sent then meets a peer that receives.
Only small sums go along with that question. So a worker that waits leaves its core to others, notices a peer
that is lost or somewhere else in the program, and knows how long it waited.
"""

from __future__ import annotations

import abc
import threading
import zlib
from collections.abc import Sequence

import numpy as np

from dtrain.collectives.buffers import Buffers, fresh
from dtrain.errors import DataError, PeerMismatchError

_SUM, _GATHER, _BROADCAST = 1, 2, 3
_KINDS = 0xFF  # the part of a kind's number that says what it is
_NAMES = {_SUM: "a sum", _GATHER: "a gathering", _BROADCAST: "a broadcast"}

# Up to this many bytes and workers, all send their values to all along with the question whether they are at
# the same call: small sums are a matter of messages, not of bytes.
WHOLE_BYTES = 32 * 1024
WHOLE_WORKERS = 8

Parts = list[np.ndarray | None]


class Calls(abc.ABC):
    """Collective calls: all workers make the same ones in the same order.

    Args:
        rank: this worker's number.
        size: how many there are.

    Attributes:
        waited: seconds that this worker has waited for others, since the beginning.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self.waited = 0.0
        self._lock = threading.Lock()
        self._buffers = Buffers()
        self._scratch = np.empty(0, np.uint8)

    def sum(self, value: np.ndarray) -> np.ndarray:
        """The sum over all workers, in the same bits on each.

        Args:
            value: numbers, equally many on every worker; no 16-bit floats, whose sums would be rounded over
                and over. It is only read.

        Returns:
            An array that nobody else writes to until the last reference to it is gone.

        Raises:
            PeerMismatchError: another worker is at another call.
            PeerMissingError: another worker is gone.
        """
        (total,) = self.sums([value])
        return total

    def sums(self, values: Sequence[np.ndarray]) -> list[np.ndarray]:
        """As `sum`, of several arrays: the workers wait for each other once."""
        with self._lock:
            values = [np.asarray(value, order="C") for value in values]
            totals = [self._buffers.take(value.shape, value.dtype) for value in values]
            size = sum(value.nbytes for value in values)
            if len(values) == 1 and 0 < size <= WHOLE_BYTES and self.size <= WHOLE_WORKERS:
                self._sum_of(self._meet_with(_SUM, values[0].reshape(-1)), totals[0].reshape(-1))
                return totals
            self._meet(_SUM | _mark([value.nbytes for value in values]), size)
            for value, total in zip(values, totals, strict=True):
                if value.size:
                    self._all_reduce(value.reshape(-1), total.reshape(-1))
            return totals

    def gather(self, values: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The rows of all workers, in the workers' order; each may have another number of them.

        Args:
            values: arrays of shape (own rows, ...), the rest of the shape alike on all workers.

        Raises:
            DataError: on every worker, if rows differ in size from worker to worker.
            PeerMismatchError, PeerMissingError: as `sum`.
        """
        values = [np.asarray(value, order="C") for value in values]
        with self._lock:
            self._meet(_GATHER, len(values))
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
        """The first worker's value; the others give one of the same shape and kind.

        Raises:
            PeerMismatchError, PeerMissingError: as `sum`.
        """
        with self._lock:
            found = fresh(value.shape, value.dtype)
            np.copyto(found, value)
            self._meet(_BROADCAST, found.nbytes)
            self._send_first(raw(found))
            return found

    @abc.abstractmethod
    def _meet(self, kind: int, size: int) -> None:
        """Returns when all workers are at the same call; adds to `waited`."""

    @abc.abstractmethod
    def _meet_with(self, kind: int, value: np.ndarray) -> list[np.ndarray]:
        """As `_meet`, with vectors of up to `WHOLE_BYTES`; gives those of all, valid until the next call."""

    @abc.abstractmethod
    def _swap(self, out: Parts, into: Parts) -> None:
        """Sends bytes to each other worker while receiving from each; None for nothing."""

    @abc.abstractmethod
    def _all_reduce(self, value: np.ndarray, total: np.ndarray) -> None:
        """Fills `total` with the sum of all workers' vectors, which are not empty."""

    def _send_first(self, found: np.ndarray) -> None:
        """The first worker's bytes, to all."""
        if self.rank == 0:
            self._swap(self._for_others([found] * self.size), [None] * self.size)
        else:
            self._swap([None] * self.size, [found if r == 0 else None for r in range(self.size)])

    def _from_all(self, mine: np.ndarray) -> list[np.ndarray]:
        """Everybody's array, by worker; all of one shape and kind."""
        found = [mine if r == self.rank else np.empty_like(mine) for r in range(self.size)]
        self._swap(self._for_others([raw(mine)] * self.size), self._for_others([raw(each) for each in found]))
        return found

    def _for_others(self, each: list[np.ndarray]) -> Parts:
        """What is there for each worker, and nothing for this one."""
        return [None if r == self.rank else value for r, value in enumerate(each)]

    def _rows(self, value: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """All workers' rows, of which each has as many as `rows` says."""
        found = fresh((int(rows.sum()), *value.shape[1:]), value.dtype)
        ends = np.cumsum(rows)
        places = [raw(found[end - count : end]) for end, count in zip(ends, rows, strict=True)]
        places[self.rank][:] = raw(value)
        self._swap(self._for_others([raw(value)] * self.size), self._for_others(places))
        return found

    def _reduce_by_parts(self, value: np.ndarray, total: np.ndarray) -> None:
        """Each worker sums up one part of all workers' vectors, in their order, and sends it to all.

        Its own vector is read where it lies, and none is copied as a whole.
        """
        bounds = [len(value) * r // self.size for r in range(self.size + 1)]
        parts = [slice(bounds[r], bounds[r + 1]) for r in range(self.size)]
        own = bounds[self.rank + 1] - bounds[self.rank]
        needed = (self.size - 1) * own * value.itemsize
        if self._scratch.nbytes < needed:
            self._scratch = np.empty(needed, np.uint8)
        places = iter(self._scratch[:needed].view(value.dtype).reshape(self.size - 1, own))
        mine = value[parts[self.rank]]
        terms = [mine if r == self.rank else next(places) for r in range(self.size)]
        self._swap(
            self._for_others([raw(value[part]) for part in parts]),
            self._for_others([raw(term) for term in terms]),
        )
        whole = total[parts[self.rank]]
        self._sum_of(terms, whole)
        self._swap(
            self._for_others([raw(whole)] * self.size),
            self._for_others([raw(total[part]) for part in parts]),
        )

    @staticmethod
    def _sum_of(terms: list[np.ndarray], total: np.ndarray) -> None:
        np.add(terms[0], terms[1], out=total)
        for term in terms[2:]:
            np.add(total, term, out=total)

    def _compare(self, everyone: list[list[int]]) -> None:
        """Raises PeerMismatchError if the workers are not all at the same call: each one's kind and size."""
        first = everyone[0]
        if all(each == first for each in everyone):
            return
        units = {_GATHER: "arrays"}
        at = ", ".join(
            f"worker {r} at {_NAMES.get(kind & _KINDS, 'something else')} of {size} "
            f"{units.get(kind & _KINDS, 'bytes')}"
            for r, (kind, size) in enumerate(everyone)
        )
        raise PeerMismatchError(
            f"The workers are not at the same point of the program: {at}.",
            hint="every worker must run the same steps, on values of the same shapes",
        )


def raw(value: np.ndarray) -> np.ndarray:
    """The bytes of a contiguous array."""
    return value.reshape(-1).view(np.uint8)


def _mark(sizes: Sequence[int]) -> int:
    """A number beside the kind that tells sums of several arrays by their sizes; 0 for one array."""
    return 0 if len(sizes) == 1 else zlib.crc32(repr(sizes).encode()) << 8


def _row_bytes(value: np.ndarray) -> int:
    return int(np.prod(value.shape[1:], dtype=np.int64)) * value.itemsize
