"""The calls of workers over MPI, with any MPI that mpi4py was built for or finds."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from dtrain.collectives.calls import WHOLE_BYTES, WHOLE_WORKERS, Calls, Parts
from dtrain.errors import PeerMissingError

# From this many bytes on, and up to this many workers, sums are made by exchanging parts, straight from where
# a gradient lies. MPI's own would copy the whole gradient first, which takes as long as sending it.
_PARTS_BYTES = 256 * 1024
_PARTS_WORKERS = 8

# What is on its way is there within this. After it a worker sleeps instead of yielding: on a busy machine who
# yields loses the core for a whole turn of the others, and who wakes up gets it at once.
_EAGER_SECONDS = 2e-4
_NAP = 5e-5  # seconds between two looks after that
_MEETING = 1  # the tag of messages with which workers meet
_CHECK_SECONDS = 1.0  # how often a worker that waits asks whether its peers are alive


class MPICalls(Calls):
    """Calls over one communicator.

    Args:
        world: an mpi4py communicator of the job's workers, used by nobody else; threads must be allowed.
        check: called about once a second while this worker waits for others; raises if there is no use.
    """

    def __init__(self, world: Any, *, check: Callable[[], None] = lambda: None) -> None:
        super().__init__(int(world.Get_rank()), int(world.Get_size()))
        self._world = world
        self._request = importlib.import_module("mpi4py.MPI").Request
        self._check = check
        self._here = np.zeros(2, np.int64)
        self._all_here = np.zeros((self.size, 2), np.int64)
        # As `_here`, with a value behind it: by worker, this one's for sending.
        self._messages = [np.zeros(self._here.nbytes + WHOLE_BYTES, np.uint8) for _ in range(self.size)]
        self._headers = [message[: self._here.nbytes].view(np.int64) for message in self._messages]
        self._values = [message[self._here.nbytes :] for message in self._messages]
        self._others = [r for r in range(self.size) if r != self.rank]
        self._nothing = np.empty(0, np.uint8)

    def _meet(self, kind: int, size: int) -> None:
        begun = time.perf_counter()
        if self.size <= WHOLE_WORKERS:
            self._messages_of_all(kind, size, self._nothing)
            self.waited += time.perf_counter() - begun
            self._compare([header.tolist() for header in self._headers])
        else:
            self._here[:] = kind, size
            request = self._world.Iallgather(self._here, self._all_here)
            self._wait_for(request.Test)
            self.waited += time.perf_counter() - begun
            self._compare(self._all_here.tolist())

    def _meet_with(self, kind: int, value: np.ndarray) -> list[np.ndarray]:
        begun = time.perf_counter()
        self._messages_of_all(kind, value.nbytes, value.view(np.uint8))
        self.waited += time.perf_counter() - begun
        self._compare([header.tolist() for header in self._headers])
        return [found[: value.nbytes].view(value.dtype) for found in self._values]

    def _messages_of_all(self, kind: int, size: int, value: np.ndarray) -> None:
        """Exchanges, with every worker, which call it is at, followed by the bytes of a value."""
        world, messages = self._world, self._messages
        mine, header = messages[self.rank], self._headers[self.rank]
        header[0], header[1] = kind, size
        self._values[self.rank][: value.nbytes] = value
        out = mine[: header.nbytes + value.nbytes]
        # Room for the longest, should a peer be at another call.
        requests = [world.Irecv(messages[r], r, _MEETING) for r in self._others]
        requests += [world.Isend(out, r, _MEETING) for r in self._others]
        self._wait_for(lambda: self._request.Testall(requests))

    def _wait_for(self, done: Callable[[], bool]) -> None:
        """Returns when MPI is done with something; MPI's own waiting would keep the core from its peers."""
        if done():
            return
        begun = time.perf_counter()
        next_look = begun + _CHECK_SECONDS
        while not done():
            now = time.perf_counter()
            if now - begun < _EAGER_SECONDS:
                continue
            time.sleep(_NAP)
            if now >= next_look:
                next_look = now + _CHECK_SECONDS
                try:
                    self._check()
                except PeerMissingError:
                    if done():  # what was waited for came before the peer went
                        return
                    raise

    def _all_reduce(self, value: np.ndarray, total: np.ndarray) -> None:
        if value.nbytes >= _PARTS_BYTES and self.size <= _PARTS_WORKERS:
            self._reduce_by_parts(value, total)
        else:
            self._wait_for(self._world.Iallreduce(value, total).Test)

    def _swap(self, out: Parts, into: Parts) -> None:
        world = self._world
        requests = [world.Irecv(place, r, 0) for r, place in enumerate(into) if place is not None]
        requests += [world.Isend(part, r, 0) for r, part in enumerate(out) if part is not None]
        self._wait_for(lambda: self._request.Testall(requests))

    def _send_first(self, found: np.ndarray) -> None:
        self._wait_for(self._world.Ibcast(found, 0).Test)
