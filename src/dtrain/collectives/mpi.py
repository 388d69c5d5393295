"""The transport MPI: collective calls over any MPI library that mpi4py was built for or finds.

Starting processes and initialising MPI are not done here.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from dtrain.collectives.calls import Calls, Parts, Vector, is_narrow
from dtrain.collectives.reduction_rules import WHOLE_BYTES, WHOLE_WORKERS, mpi_goes_by_parts
from dtrain.collectives.transport import Facts, Transport
from dtrain.environments import mpi_start
from dtrain.environments.topology import Topology
from dtrain.errors import DtrainError, MPIError, PeerMissingError
from dtrain.interfaces.replica_layout import ReplicaLayout
from dtrain.process_group import peers
from dtrain.process_group.value_exchange import exchange

NOT_STARTED = "no MPI starter started the workers"

# A message in transit arrives within this time, so a worker polls. After it, the worker sleeps instead of
# yielding: on a busy machine, a process that yields loses its core for a whole time slice of other processes,
# but one that wakes up gets a core at once.
_EAGER_SECONDS = 2e-4
# After the barrier, every worker is in the call and sends. MPI may transfer a message in many pieces, each of
# which needs a poll by both workers: with naps between the polls, a sum of 80 KB took 7 ms instead of 0.5 ms.
_SENDING_SECONDS = 4e-3
_NAP = 5e-5  # seconds between two polls after that
_BARRIER = 1  # the tag of the barrier's messages
_CHECK_SECONDS = 1.0  # seconds between two checks whether the peers are alive


class MPI(Transport):
    """The MPI library whose starter started the workers."""

    name = "mpi"

    def own_facts(self) -> dict[str, Any]:
        """How many processes an MPI starter started (`size`), and why MPI cannot be used here (`problem`)."""
        if not mpi_start.started_by_mpi():
            return {"size": 0, "problem": ""}
        return {
            "size": mpi_start.size(),
            "problem": "" if mpi_start.installed() else "mpi4py is not installed",
        }

    def error(self, problem: str) -> DtrainError:
        """An `MPIError`."""
        return MPIError(
            f"communication={self.name!r} was set, but {problem}.",
            hint="start the program by `dtrain launch --mpi --workers N`, or by mpirun or srun "
            "(pip install 'dtrain[mpi]')",
        )

    def reason(self, facts: Sequence[Facts]) -> str:
        """Chosen if an MPI starter started all workers."""
        return "" if self.problem(facts) else f"an MPI starter started all {len(facts)} workers"

    def problem(self, facts: Sequence[Facts]) -> str:
        """Why the job cannot use MPI."""
        starts = [worker_facts.own[self.name] for worker_facts in facts]
        if not any(start["size"] for start in starts):
            return NOT_STARTED
        for worker, (worker_facts, start) in enumerate(zip(facts, starts, strict=True)):
            if start["size"] != len(facts):
                report = f"one that started {start['size']}" if start["size"] else "none"
                return (
                    f"the job has {len(facts)} workers, and worker {worker} reports of MPI starters {report}"
                )
            if worker_facts.replicas > 1:
                return f"worker {worker} has {worker_facts.replicas} replicas, and over MPI a worker has one"
            if start["problem"]:
                return f"worker {worker} cannot use MPI: {start['problem']}"
        return ""

    def started(self, layout: ReplicaLayout, facts: Sequence[Facts]) -> Sequence[Facts]:
        """Initialises MPI, which is done only after the facts have led to this transport.

        Returns:
            The facts with each worker's problem, so that all workers use MPI or none does.
        """
        problems = exchange(layout, mpi_start.problem())
        return [
            replace(
                worker_facts,
                own={**worker_facts.own, self.name: {**worker_facts.own[self.name], "problem": problem}},
            )
            for worker_facts, problem in zip(facts, problems, strict=True)
        ]

    def connect(
        self, layout: ReplicaLayout, topology: Topology, facts: Sequence[Facts]
    ) -> tuple[Calls | None, str]:
        """Duplicates MPI's world communicator, so that dtrain's messages cannot mix with a program's own.

        Raises:
            MPIError: the ranks in MPI differ from the workers' numbers.
        """
        import mpi4py.MPI

        world = mpi_start.world().Dup()
        if (world.Get_rank(), world.Get_size()) != (layout.worker, layout.workers):
            raise MPIError(
                f"Worker {layout.worker} of {layout.workers} is rank {world.Get_rank()} of "
                f"{world.Get_size()} in MPI's world.",
                hint="leave TF_CONFIG to dtrain, or number its workers as the ranks are",
            )

        def check() -> None:
            peers.check()
            mpi_start.check_ended()

        vendor, version = mpi4py.MPI.get_vendor()
        name = f"{vendor} {'.'.join(map(str, version))} (mpi4py {mpi4py.__version__})"
        return MPICalls(world, check=check), name


class MPICalls(Calls):
    """Collective calls over one communicator.

    Args:
        world: an mpi4py communicator of the job's workers, for these calls alone; MPI must allow threads.
        check: called about once a second while this worker waits; raises if a peer is lost.
    """

    def __init__(self, world: Any, *, check: Callable[[], None] = lambda: None) -> None:
        super().__init__(int(world.Get_rank()), int(world.Get_size()))
        self._world = world
        self._request = importlib.import_module("mpi4py.MPI").Request
        self._check = check
        self._here = np.zeros(2, np.int64)
        self._all_here = np.zeros((self.size, 2), np.int64)
        # One buffer for each worker: a header as `_here`, then a value. This worker's buffer is for sending.
        self._messages = [np.zeros(self._here.nbytes + WHOLE_BYTES, np.uint8) for _ in range(self.size)]
        self._header_of = [message[: self._here.nbytes].view(np.int64) for message in self._messages]
        self._values = [message[self._here.nbytes :] for message in self._messages]
        self._nothing = np.empty(0, np.uint8)

    def _headers(self, kind: int, size: int, workers: Sequence[int]) -> list[list[int]]:
        if len(workers) < self.size or self.size <= WHOLE_WORKERS:
            return self._exchange(kind, size, self._nothing, workers)
        self._here[:] = kind, size
        request = self._world.Iallgather(self._here, self._all_here)
        self._wait_for(request.Test)
        headers: list[list[int]] = self._all_here.tolist()
        return headers

    def _barrier_with(self, kind: int, value: np.ndarray) -> list[np.ndarray]:
        begun = time.perf_counter()
        headers = self._exchange(kind, value.nbytes, value.view(np.uint8), range(self.size))
        self.waited += time.perf_counter() - begun
        self._compare(headers)
        return [received[: value.nbytes].view(value.dtype) for received in self._values]

    def _exchange(self, kind: int, size: int, value: np.ndarray, workers: Sequence[int]) -> list[list[int]]:
        """Exchanges headers (kind and size of the call) and a value's bytes with workers; their headers."""
        world, messages = self._world, self._messages
        mine, header = messages[self.rank], self._header_of[self.rank]
        header[0], header[1] = kind, size
        self._values[self.rank][: value.nbytes] = value
        out = mine[: header.nbytes + value.nbytes]
        # Receive into the whole buffer: a peer at another call may send a longer message.
        others = [r for r in workers if r != self.rank]
        requests = [world.Irecv(messages[r], r, _BARRIER) for r in others]
        requests += [world.Isend(out, r, _BARRIER) for r in others]
        self._wait_for(lambda: self._request.Testall(requests))
        return [self._header_of[r].tolist() for r in workers]

    def _wait_for(self, done: Callable[[], bool], eager: float = _EAGER_SECONDS) -> None:
        """Waits until `done` returns True; MPI's own waiting would keep the core busy.

        Args:
            done: lets MPI make progress, and returns whether all messages are sent and received.
            eager: seconds in which this worker polls without a nap.
        """
        if done():
            return
        begun = time.perf_counter()
        next_check = begun + _CHECK_SECONDS
        while not done():
            now = time.perf_counter()
            if now - begun < eager:
                continue
            time.sleep(_NAP)
            if now >= next_check:
                next_check = now + _CHECK_SECONDS
                try:
                    self._check()
                except PeerMissingError:
                    if done():  # the message arrived before the peer was lost
                        return
                    raise

    def _all_reduce(self, vectors: Sequence[Vector]) -> None:
        by_parts = [vector for vector in vectors if self._goes_by_parts(vector.value)]
        whole = [vector for vector in vectors if not self._goes_by_parts(vector.value)]
        if whole:
            requests = [self._world.Iallreduce(vector.value, vector.total) for vector in whole]
            self._wait_for(lambda: self._request.Testall(requests), _SENDING_SECONDS)
        if by_parts:
            self._reduce_by_parts(by_parts)

    def _goes_by_parts(self, value: np.ndarray) -> bool:
        return mpi_goes_by_parts(value.nbytes, self.size, narrow=is_narrow(value))

    def _swap(self, out: Parts, into: Parts) -> None:
        self._swap_all([out], [into])

    def _swap_all(self, out: Sequence[Parts], into: Sequence[Parts]) -> None:
        world = self._world
        places = [(r, place) for by_worker in into for r, place in enumerate(by_worker) if place is not None]
        parts = [(r, part) for by_worker in out for r, part in enumerate(by_worker) if part is not None]
        requests = [world.Irecv(place, r, 0) for r, place in places]
        requests += [world.Isend(part, r, 0) for r, part in parts]
        self._wait_for(lambda: self._request.Testall(requests), _SENDING_SECONDS)

    def _send_first(self, found: np.ndarray) -> None:
        self._wait_for(self._world.Ibcast(found, 0).Test, _SENDING_SECONDS)
