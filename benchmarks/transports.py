"""What two processes of this machine exchange: copies and a raw socket, sums in a step, and MPI's own sums.

    python benchmarks/transports.py [--rounds 5] [--out FILE.json]

*The machine* copies 30 MB in memory and sends as many through a socket, both ways at once: no training gets
past that. *Sums* of the 7.6 million gradients of a dense model, and of 40 bytes, are made in a loop inside a
graph: over MPI, over the ring and by stock TensorFlow, beside MPI's own all-reduce of as many bytes. Each
process has a core and a thread.
"""

from __future__ import annotations

import functools
import os
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import jobs
import workers
from cases import Case, Side, Starter
from networks import NETWORKS
from speed import starting

from dtrain.bench.calibration_worker import in_graph

BYTES = 30_000_000


def _side(title: str, kind: str, starter: Starter) -> Side:
    return Side(title=title, starter=starter, program=("transports.py", kind, "{address}"), processes=2)


SIDES = {
    "machine": _side("the machine", "machine", "workers"),
    "mpi": _side("MPI", "mpi", "launch --mpi"),
    "ring": _side("the ring", "ring", "launch"),
    "stock": _side("stock TensorFlow", "stock", "workers"),
}
# Of each side: what is measured, and how often in a round.
WAYS = {
    ("machine", "30 MB copied"): 5,
    ("machine", "30 MB through a socket"): 5,
    ("machine", "40 B through a socket"): 1000,
    **{
        (side, f"{size} in a step"): count
        for side in ("mpi", "ring", "stock")
        for size, count in (("30 MB", 10), ("40 B", 500))
    },
    ("mpi", "30 MB by MPI itself"): 10,
    ("mpi", "40 B by MPI itself"): 500,
}


class Machine:
    """Copies and a raw socket between two processes."""

    def __init__(self) -> None:
        import numpy as np

        self._source, self._target = np.ones(BYTES, np.uint8), np.zeros(BYTES, np.uint8)
        self._first = workers.rank() == 0
        address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        self._connection = met(address, first=self._first)

    def __call__(self, what: str, count: int) -> float:
        """Seconds of one."""
        self._exchange(1)  # both begin together
        begun = time.perf_counter()
        for _ in range(count):
            if what == "30 MB copied":
                self._target[:] = self._source
            elif what == "30 MB through a socket":
                self._exchange(BYTES)
            else:
                self._connection.sendall(bytes(40))
                self._connection.recv(40, socket.MSG_WAITALL)
        return (time.perf_counter() - begun) / count

    def _exchange(self, size: int) -> None:
        """Sends so many bytes while as many come."""
        arrived, got = memoryview(self._target), 0
        sender = threading.Thread(target=self._connection.sendall, args=(memoryview(self._source)[:size],))
        sender.start()
        while got < size:
            got += self._connection.recv_into(arrived[got:size])
        sender.join()


def met(address: tuple[str, int], *, first: bool) -> socket.socket:
    """A connection between two processes, of which the first listens and the other tries until it does."""
    if first:
        with socket.create_server(address) as listener:
            connection, _ = listener.accept()
    else:
        connection = _connected(address)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def _connected(address: tuple[str, int]) -> socket.socket:
    while True:
        try:
            return socket.create_connection(address)
        except ConnectionRefusedError:  # the other is not as far yet
            time.sleep(0.05)


class Sums:
    """Sums over the workers of a strategy, in a graph."""

    def __init__(self, kind: str) -> None:
        import tensorflow as tf

        if kind == "stock":
            strategy = tf.distribute.MultiWorkerMirroredStrategy()
        else:
            import dtrain

            strategy = dtrain.MultiWorkerMirroredStrategy(communication=kind)
        shapes = [tuple(weight.shape) for weight in NETWORKS["big"].keras().trainable_weights]
        self._functions = {
            "30 MB in a step": looped(strategy, [tf.random.normal(shape) for shape in shapes]),
            "40 B in a step": looped(strategy, [tf.random.normal([10])]),
        }
        if kind == "mpi":
            self._functions |= {"30 MB by MPI itself": by_mpi(BYTES // 4), "40 B by MPI itself": by_mpi(10)}

    def __call__(self, what: str, count: int) -> float:
        """Seconds of one sum."""
        begun = time.perf_counter()
        self._functions[what](count)
        return (time.perf_counter() - begun) / count


def looped(strategy: Any, tensors: list[Any]) -> Callable[[int], Any]:
    """So many sums of tensors, one after another."""
    import tensorflow as tf

    def inside() -> Any:
        totals = tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, tensors)
        return tf.add_n([tf.reshape(total, [-1])[0] for total in totals])

    return in_graph(lambda: strategy.run(inside))


def by_mpi(numbers: int) -> Callable[[int], Any]:
    """So many sums by MPI alone."""
    import numpy as np
    from mpi4py import MPI

    world = MPI.COMM_WORLD.Dup()
    mine, total = np.ones(numbers, np.float32), np.ones(numbers, np.float32)
    return lambda count: [world.Allreduce(mine, total) for _ in range(count)]


def serve(kind: str, address: str) -> None:
    """One process of a side, until the benchmark hangs up."""
    workers.pin()
    if kind == "machine":
        jobs.answer(address, Machine())
        return
    workers.one_thread_each()
    jobs.answer(address, Sums(kind))


def main() -> None:
    """Measures all sides that there are, prints a table and writes JSON."""
    if len(sys.argv) == 3 and sys.argv[1] in SIDES:
        serve(*sys.argv[1:])
        return
    arguments = jobs.parser("what two processes can exchange", rounds=5).parse_args()
    results = jobs.circumstances()
    absent: dict[Any, str] = {}
    sides = Case(title="", network="", sides=SIDES)
    with jobs.opened({name: starting(sides, name, (None, "")) for name in SIDES}, absent=absent) as started:
        ways = {
            (side, what): functools.partial(started[side].measure, what, count)
            for (side, what), count in WAYS.items()
            if side in started
        }
        taken = jobs.turns(ways, arguments.rounds, absent=absent)
    results["milliseconds"] = {
        f"{side}: {what}": jobs.summary(measurements) for (side, what), measurements in taken.items()
    }
    results["absent"] = {str(way): why for way, why in absent.items()}
    rows = []
    for (side, what), measurements in taken.items():
        own = taken.get(("mpi", f"{what.partition(' in ')[0]} by MPI itself"))
        times = f"{jobs.ratio(measurements, own)['median']:.2f}" if own and what.endswith("in a step") else ""
        milliseconds = 1e3 * statistics.median(one.wall for one in measurements)
        rows.append([f"{SIDES[side].title}: {what}", f"{milliseconds:.3f}", times])
    jobs.print_table(["", "ms", "times MPI's own"], rows)
    jobs.write(results, arguments.out)


if __name__ == "__main__":
    main()
