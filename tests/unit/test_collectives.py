"""What workers do together, without TensorFlow: the choice of a transport, kept memory, sums over sockets."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from dtrain.base.clock import REAL
from dtrain.base.quantization import Quantization
from dtrain.collectives import connect
from dtrain.collectives.calls import ALIGNMENT, Buffers, Calls, Parts
from dtrain.collectives.graph_calls import CallOperations
from dtrain.collectives.sockets import SocketCalls, Sockets
from dtrain.collectives.transport import Facts
from dtrain.collectives.transports import asked_for, choose, overlaps
from dtrain.environments.topology import Topology
from dtrain.errors import ConfigurationError, DataError, MPIError, PeerMismatchError, PeerMissingError
from dtrain.interfaces.replica_layout import ReplicaLayout
from dtrain.process_group.proof import Handshake, ProofError, introduce
from dtrain.process_group.secret import Secret
from given_clock import GivenClock
from in_threads import SECONDS, start_in_threads
from refusals import refused

JOB = Secret(b"of the job", "a test")


def facts(
    asked: str = "auto", *, gpus: bool = False, mpi: int = 0, problem: str = "", replicas: int = 1
) -> Facts:
    return Facts(asked=asked, gpus=gpus, replicas=replicas, own={"mpi": {"size": mpi, "problem": problem}})


@pytest.mark.parametrize(
    ("everyone", "name", "reason"),
    [
        ([facts(), facts()], "ring", "no MPI starter started the workers"),
        ([facts(mpi=2), facts(mpi=2)], "mpi", "an MPI starter started all 2 workers"),
        ([facts(mpi=2), facts()], "ring", "worker 1 reports of MPI starters none"),
        ([facts(mpi=3), facts(mpi=3)], "ring", "one that started 3"),
        ([facts(mpi=2), facts(mpi=2, problem="mpi4py is not installed")], "ring", "mpi4py is not installed"),
        ([facts(mpi=2, replicas=2), facts(mpi=2, replicas=2)], "ring", "has 2 replicas"),
        ([facts(gpus=True, mpi=2), facts(gpus=True, mpi=2)], "nccl", "all replicas are on GPUs"),
        ([facts(gpus=True), facts()], "ring", "no MPI starter"),
        ([facts("ring", mpi=2), facts("ring", mpi=2)], "ring", "it was asked for"),
        ([facts("mpi", mpi=2), facts("mpi", mpi=2)], "mpi", "it was asked for"),
        ([facts("tensorflow"), facts("tensorflow")], "tensorflow", "it was asked for"),
    ],
)
def test_what_is_chosen_and_why(everyone: list[Facts], name: str, reason: str) -> None:
    found = choose(everyone)
    assert found[0] == name
    assert reason in found[1]


def test_mpi_that_cannot_be_had_is_an_error() -> None:
    with refused(MPIError, "dtrain launch --mpi", communication="mpi"):
        choose([facts("mpi"), facts("mpi")])


def test_the_error_of_workers_with_different_values() -> None:
    with refused(PeerMismatchError, "ring (worker 0)", "mpi (worker 1)"):
        choose([facts("ring"), facts("mpi", mpi=2)])
    divided = [
        replace(facts(), given={"strategy": "FullyShardedStrategy", "smallest": 64}),
        replace(facts(), given={"strategy": "FullyShardedStrategy", "smallest": 8192}),
        replace(facts(), given={"strategy": "MultiWorkerMirroredStrategy"}),
    ]
    with refused(PeerMismatchError, "smallest: 64 (worker 0), 8192 (worker 1)"):
        choose(divided[:2])
    with refused(PeerMismatchError, "strategy: FullyShardedStrategy (worker 0), MultiWorkerMirroredStrategy"):
        choose(divided[1:])


def test_only_what_there_is_can_be_asked_for() -> None:
    assert asked_for(None) == "auto"
    assert asked_for("MPI") == "mpi"
    with refused(ConfigurationError, "'gloo'", "auto, nccl, mpi, tensorflow, ring"):
        asked_for("gloo")


def test_memory_is_used_again_when_nobody_refers_to_it() -> None:
    buffers = Buffers()
    first = buffers.take((3, 5), np.float32)
    second = buffers.take((15,), np.float32)
    assert not np.shares_memory(first, second)
    assert first.ctypes.data % ALIGNMENT == second.ctypes.data % ALIGNMENT == 0
    address, part = first.ctypes.data, first[1:]
    del first
    third = buffers.take((15,), np.int32)
    assert third.ctypes.data != address, "a part of it is still held"
    del part
    assert buffers.take((3, 5), np.float32).ctypes.data == address
    assert buffers.take((0, 4), np.float64).shape == (0, 4)


def together(
    connections: list[dict[int, socket.socket]],
    work: Callable[[Any], Any],
    kind: type[SocketCalls] = SocketCalls,
) -> list[Any]:
    """What each worker, in a thread of its own, gets of its work; an exception where it raised one."""

    def run(rank: int) -> Any:
        with contextlib.closing(kind(rank, connections[rank])) as calls:
            return work(calls)

    found = start_in_threads({rank: partial(run, rank) for rank in range(len(connections))})()
    return [*found.values()]


def pairs(workers: int) -> list[dict[int, socket.socket]]:
    """Connected sockets between each two workers."""
    connections: list[dict[int, socket.socket]] = [{} for _ in range(workers)]
    for one, other in combinations(range(workers), 2):
        connections[one][other], connections[other][one] = socket.socketpair()
    return connections


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_sums_in_few_bits_are_close_and_the_same_everywhere(workers: int, bits: int) -> None:
    lengths = [0, 1, 2, 255, 257, 10_001]
    given = {n: np.random.default_rng(n).normal(size=(workers, n)).astype(np.float32) for n in lengths}

    def work(calls: Calls) -> list[np.ndarray]:
        return [calls.quantized_sum(given[n][calls.rank], Quantization(bits, 3), n) for n in lengths]

    by_worker = together(pairs(workers), work)
    for sums in by_worker:
        for n, total, first in zip(lengths, sums, by_worker[0], strict=True):
            assert total.tobytes() == first.tobytes()
            largest = np.abs(given[n]).max(initial=0.0) * workers
            step = largest / (2 ** (bits - 1) - 1)
            assert np.abs(total - given[n].sum(axis=0)).max(initial=0.0) <= (workers + 1) * step


@pytest.mark.parametrize("how", [None, Quantization(8)])
def test_a_sum_that_is_begun_counts_as_communication_while_it_is_waited_for(how: Quantization | None) -> None:
    def work(calls: Calls) -> tuple[np.ndarray, float, float]:
        operations = CallOperations(calls)
        end = operations.begin_sum(np.full(3, 2.0, np.float32), how, 0)
        before = operations.communicated()
        return end(), before, operations.communicated()

    for total, before, after in together(pairs(2), work):
        np.testing.assert_allclose(total, 4.0, rtol=1e-6)
        assert before == 0.0 < after


@pytest.mark.parametrize("bits", [8, 4])
def test_rounding_in_few_bits_is_right_in_the_mean(bits: int) -> None:
    values = np.random.default_rng(1).normal(size=300).astype(np.float32)
    values[:3] = 0.0, 1e-30, -3.0
    arrived = [
        how.decode(how.encode(values, (0,)), 300)
        for how in (Quantization(bits, seed) for seed in range(2000))
    ]
    step = np.abs(values).max() / (2 ** (bits - 1) - 1)
    assert np.abs(np.mean(arrived, axis=0) - values).max() < 5 * 0.5 * step / np.sqrt(2000)
    how = Quantization(bits)
    assert how.encode(values, (1,)).tobytes() == how.encode(values, (1,)).tobytes()
    assert how.encode(values, (1,)).tobytes() != how.encode(values, (2,)).tobytes()
    assert len(how.encode(values, (1,))) == how.bytes_of(300)


def test_numbers_that_are_not_finite_stay_seen_in_few_bits() -> None:
    values = np.ones(600, np.float32)
    values[300] = np.inf
    arrived = Quantization(8).decode(Quantization(8).encode(values, ()), 600)
    assert np.isnan(arrived[256:512]).all()
    np.testing.assert_allclose(np.delete(arrived, np.s_[256:512]), 1.0, rtol=1e-6)


@pytest.mark.parametrize("workers", [2, 3, 5])
def test_sums_are_the_same_bits_everywhere(workers: int) -> None:
    sizes = [0, 1, 7, 8191, 8193, 100_003]
    given = {n: np.random.default_rng(n).normal(size=(workers, n)).astype(np.float32) for n in sizes}

    def work(calls: Calls) -> list[np.ndarray]:
        return [calls.sum(given[n][calls.rank]) for n in sizes]

    for found in together(pairs(workers), work):
        for n, total in zip(sizes, found, strict=True):
            wanted = given[n][0].copy()
            for term in given[n][1:]:
                wanted += term  # in the workers' order
            assert total.tobytes() == wanted.tobytes()


def test_every_call_in_turn() -> None:
    def work(calls: Calls) -> tuple[Any, ...]:
        rows = [np.full((calls.rank * 2, 3), calls.rank, np.int16), np.arange(calls.rank, dtype=np.float64)]
        return (
            calls.broadcast(np.array([calls.rank + 5.0])),
            calls.gather(rows),
            calls.sum(np.array(calls.rank + 1)),
            calls.gather([np.array([[True, False]])]),
        )

    for first, (integers, doubles), total, (flags,) in together(pairs(3), work):
        assert first.tolist() == [5.0]
        assert integers.tolist() == [[1] * 3] * 2 + [[2] * 3] * 4
        assert doubles.tolist() == [0.0, 0.0, 1.0]
        assert (total.shape, int(total)) == ((), 6)
        assert flags.tolist() == [[True, False]] * 3


def test_several_sums_at_once_are_those_one_by_one() -> None:
    sizes = (100_000, 3, 40_001)
    given = [[np.random.default_rng(n + r).normal(size=n) for n in sizes] for r in range(3)]
    for totals in together(pairs(3), lambda calls: calls.sums(given[calls.rank])):
        for i, total in enumerate(totals):
            assert total.tobytes() == (given[0][i] + given[1][i] + given[2][i]).tobytes()


@pytest.mark.parametrize("rows", [(5, 4), (1, 7), (4, 3, 2), (1, 1, 2001)])
@pytest.mark.parametrize("width", [(), (3,), (2, 500)])
def test_scattered_sums_are_the_rows_of_the_sums_to_the_bit(
    rows: tuple[int, ...], width: tuple[int, ...]
) -> None:
    kinds = [np.float32, np.float16, np.float64, ml_dtypes.bfloat16]

    def of(rank: int) -> list[np.ndarray]:
        rng = np.random.default_rng(rank)
        return [rng.normal(size=(sum(rows), *width)).astype(kind) for kind in kinds]

    def work(calls: Calls) -> tuple[list[np.ndarray], list[np.ndarray], list[np.ndarray]]:
        own = of(calls.rank)
        one_by_one = [calls.scattered_sums([value], [rows])[0] for value in own]
        return calls.scattered_sums(own, [rows] * len(own)), one_by_one, calls.sums(own)

    for rank, (at_once, one_by_one, totals) in enumerate(together(pairs(len(rows)), work)):
        begin = sum(rows[:rank])
        for value, alone, total in zip(at_once, one_by_one, totals, strict=True):
            wanted = total[begin : begin + rows[rank]]
            assert value.dtype == wanted.dtype and value.shape == wanted.shape
            assert value.tobytes() == alone.tobytes() == wanted.tobytes()


def test_rows_of_scattered_sums_may_differ_by_array() -> None:
    values, rows = [np.arange(6.0), np.arange(8.0).reshape(4, 2)], [(2, 4), (3, 1)]
    first, second = together(pairs(2), lambda calls: calls.scattered_sums(values, rows))
    assert [each.tolist() for each in first] == [[0, 2], [[0, 2], [4, 6], [8, 10]]]
    assert [each.tolist() for each in second] == [[4, 6, 8, 10], [[12, 14]]]


def test_a_worker_that_scatters_while_others_sum_is_an_error() -> None:
    def work(calls: Calls) -> Any:
        return calls.scattered_sums([np.ones(4)], [(2, 2)]) if calls.rank else calls.sum(np.ones(4))

    for error in together(pairs(2), work):
        assert isinstance(error, PeerMismatchError)
        assert "a reduce-scatter" in str(error) and "an all-reduce" in str(error)


def test_some_workers_make_calls_alone_between_those_of_all() -> None:
    groups = {0: (0, 2), 1: (1, 3), 2: (0, 2), 3: (1, 3)}
    of_rank = [np.random.default_rng(rank).normal(size=(4, 5)).astype("float32") for rank in range(4)]

    def work(calls: Calls) -> list[list[np.ndarray]]:
        mine, (one, other) = of_rank[calls.rank], groups[calls.rank]
        among = calls.among((one, other))
        gathered = among.gather([mine[: calls.rank + 1], mine])
        total = calls.sum(mine)
        waited = calls.waited
        sums = among.sums([mine, mine[:1]])
        assert calls.waited > waited and (among.rank, among.size) == ((one, other).index(calls.rank), 2)
        own = among.scattered_sums([mine], [(3, 1)])
        assert total.tobytes() == calls.sum(mine).tobytes()
        return [gathered, sums, own]

    for rank, (gathered, sums, own) in enumerate(together(pairs(4), work)):
        one, other = groups[rank]
        first, second = of_rank[one], of_rank[other]
        np.testing.assert_array_equal(gathered[0], np.concatenate([first[: one + 1], second[: other + 1]]))
        np.testing.assert_array_equal(gathered[1], np.concatenate([first, second]))
        np.testing.assert_array_equal(sums[0], first + second)
        np.testing.assert_array_equal(sums[1], (first + second)[:1])
        np.testing.assert_array_equal(own[0], (first + second)[slice(3) if rank == one else slice(3, 4)])


def test_one_worker_alone_makes_calls_that_send_nothing() -> None:
    def work(calls: Calls) -> list[np.ndarray]:
        alone = calls.among([calls.rank])
        values = [np.full(3, calls.rank), np.full(10_000, calls.rank)]
        return [*alone.sums(values), *alone.gather(values), *alone.scattered_sums(values[:1], [(3,)])]

    for rank, found in enumerate(together(pairs(2), work)):
        assert all((each == rank).all() for each in found) and [len(each) for each in found][-1] == 3


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_a_scatter_sends_each_worker_its_entries_alone(dim: int, dtype: Any) -> None:
    value = np.random.default_rng(0).normal(size=(7, 7, 7)).astype(dtype)
    bounds = [(0, 3), (3, 5), (5, 7), (0, 3)]

    def work(calls: Any) -> tuple[np.ndarray, int]:
        known = np.broadcast_to(np.empty((), dtype), value.shape)
        return calls.scatter(known if calls.rank else value, dim, bounds), calls.sent

    found = together(pairs(4), work, Counted)
    for (begin, end), (part, _) in zip(bounds, found, strict=True):
        assert part.tobytes() == value.take(range(begin, end), dim).tobytes()
        assert part.dtype == dtype and not np.shares_memory(part, value)
    headers = 3 * 16
    others = 7 * 7 * 7 * value.itemsize
    assert [sent for _, sent in found] == [others + headers, headers, headers, headers]


def test_scatters_of_other_shapes_that_have_as_many_bytes_are_distinguished() -> None:
    def work(calls: Calls) -> Any:
        return calls.scatter(np.ones((2, 6) if calls.rank else (4, 3)), 0, [(0, 1), (1, 2)])

    for error in together(pairs(2), work):
        assert isinstance(error, PeerMismatchError)
        assert "worker 0 at a scatter of 96 bytes, worker 1 at a scatter of 96 bytes" in error.message


def test_a_call_of_some_workers_is_not_taken_for_one_of_all() -> None:
    def work(calls: Calls) -> Any:
        return (calls.among((0, 1)) if calls.rank == 0 else calls).sum(np.ones(3))

    errors = [
        error for error in together(pairs(3), work) if isinstance(error, PeerMismatchError | PeerMissingError)
    ]
    assert any(
        "worker 0 at an all-reduce of 24 bytes with some workers alone" in str(error) for error in errors
    )


class Counted(SocketCalls):
    """Counts its exchanges of messages and the bytes that it sends."""

    exchanges = sent = 0

    def _swap_all(self, out: Sequence[Parts], into: Sequence[Parts]) -> None:
        self.exchanges += 1
        self.sent += sum(part.nbytes for each in out for part in each if part is not None)
        super()._swap_all(out, into)


def test_vectors_up_to_a_mebibyte_take_two_exchanges_together() -> None:
    kinds = [np.float32, np.float16, np.float64, np.int32]
    # 6 MB in all; two values are fewer than the workers.
    vectors = [(kinds[i % 4], 70_001 if i % 5 else 2) for i in range(24)]

    def of(rank: int) -> list[np.ndarray]:
        rng = np.random.default_rng(rank)
        return [rng.integers(-9, 9, n).astype(kind) for kind, n in vectors]

    def work(calls: Any) -> tuple[list[np.ndarray], int]:
        return calls.sums(of(calls.rank)), calls.exchanges

    for totals, exchanges in together(pairs(3), work, Counted):
        for i, total in enumerate(totals):
            np.testing.assert_array_equal(total, sum(of(r)[i] for r in range(3)), strict=True)
        assert exchanges <= 1 + 2 * 6


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_16_bit_floats_are_sent_as_they_are_and_rounded_once(dtype: Any) -> None:
    sizes = (100_000, 100)
    given = {n: np.random.default_rng(n).normal(size=(3, n)).astype(dtype) for n in sizes}

    def work(calls: Calls) -> tuple[list[np.ndarray], list[int]]:
        found, sent = [], []
        for n in sizes:
            before = calls.sent
            found.append(calls.sum(given[n][calls.rank]))
            sent.append(calls.sent - before)
        return found, sent

    for found, sent in together(pairs(3), work, Counted):
        for n, total in zip(sizes, found, strict=True):
            first, second, third = given[n].astype(np.float32)
            assert total.tobytes() == (first + second + third).astype(dtype).tobytes()
        # Two thirds of the vector go out to be summed, and the sum of the own third goes out twice.
        assert sent[0] <= 2 * (4 / 3 * 100_000) + 100
        assert sent[1] <= 2 * (2 * 100 + 16)


def test_sums_of_other_sizes_that_have_as_many_bytes_are_distinguished() -> None:
    def work(calls: Calls) -> Any:
        sizes = (3000, 1000) if calls.rank else (1000, 3000)
        return calls.sums([np.ones(n) for n in sizes])

    for error in together(pairs(2), work):
        assert isinstance(error, PeerMismatchError)
        each = "at an all-reduce of 32000 bytes"
        assert f"worker 0 {each}, worker 1 {each}" in error.message


def test_the_error_of_workers_at_different_calls_names_each_call() -> None:
    def work(calls: Calls) -> Any:
        return calls.sum(np.ones(3)) if calls.rank else calls.gather([np.ones(3)])

    for error in together(pairs(2), work):
        assert isinstance(error, PeerMismatchError)
        assert "worker 0 at an all-gather of 1 arrays, worker 1 at an all-reduce of 24 bytes" in error.message


def test_rows_of_other_sizes_are_an_error_on_every_worker() -> None:
    for error in together(pairs(2), lambda calls: calls.gather([np.ones((2, 3 + calls.rank))])):
        assert isinstance(error, DataError)
        assert "[[24], [32]]" in error.message


def test_a_peer_that_goes_is_noticed_at_once() -> None:
    def work(calls: Calls) -> Any:
        calls.sum(np.ones(3))
        return calls.sum(np.ones(100_000)) if calls.rank else None

    gone, error = together(pairs(2), work)
    assert gone is None
    assert isinstance(error, PeerMissingError)
    assert "Worker 0, with which this one reduces, is gone" in error.message


def test_who_waits_asks_after_its_peers_and_knows_how_long_it_waited() -> None:
    connections = pairs(2)
    asked, clock = threading.Event(), GivenClock()

    def check() -> None:
        clock.pass_by(1.0)
        asked.set()

    waiting = SocketCalls(0, connections[0], check=check, clock=clock)
    other = SocketCalls(1, connections[1], clock=GivenClock())
    thread = threading.Thread(target=waiting.sum, args=(np.ones(3),), daemon=True)
    thread.start()
    assert asked.wait(SECONDS)
    other.sum(np.ones(3))
    thread.join(SECONDS)
    assert waiting.waited == clock.now() - 1000.0 >= 1.0
    assert other.waited == 0.0
    waiting.close()
    other.close()


class ThreadExchange:
    """Exchanges values between threads, in place of the connected peers."""

    def __init__(self, workers: int) -> None:
        self._barrier = threading.Barrier(workers, timeout=SECONDS)
        self._values: dict[int, Any] = {}

    def exchange(self, layout: ReplicaLayout, value: Any) -> list[Any]:
        self._values[layout.worker] = value
        self._barrier.wait()
        found = [self._values[worker] for worker in range(layout.workers)]
        self._barrier.wait()
        return found


def connected(workers: int, **how: Any) -> list[Any]:
    """What each of several workers, in threads of their own, has found of the others, or its error."""
    return start_connecting(workers, **how)()


def start_connecting(workers: int, **how: Any) -> Callable[[], list[Any]]:
    """As `connected`, but returns at once; the returned function waits."""
    usual = {"job_secret": lambda: JOB, "check": lambda: None, "exchange": ThreadExchange(workers).exchange}

    def run(worker: int) -> Any:
        layout = ReplicaLayout(workers=workers, worker=worker)
        return connect.connect_all(layout, "127.0.0.1", **{**usual, **how})

    wait = start_in_threads({worker: partial(run, worker) for worker in range(workers)})
    return lambda: [*wait().values()]


@pytest.mark.parametrize("one_machine", [True, False])
def test_workers_connect_locally_or_over_tcp(one_machine: bool) -> None:
    names = iter("aaa" if one_machine else "abc")
    connections = connected(3, job_secret=lambda: None, machine=lambda: next(names))
    family = socket.AF_UNIX if one_machine else socket.AF_INET
    assert all(sock.family == family for each in connections for sock in each.values())
    for total in together(connections, lambda calls: calls.sum(np.full(50_000, calls.rank + 1.0))):
        assert (total == 6.0).all()


class HostileClients(ThreadExchange):
    """Exchanges values; as soon as worker 0's address is known, hostile clients come before worker 1."""

    def __init__(self, attack: Callable[[tuple[str, int]], None]) -> None:
        super().__init__(2)
        self._attack = attack

    def exchange(self, layout: ReplicaLayout, value: Any) -> list[Any]:
        found = super().exchange(layout, value)
        if isinstance(value, tuple) and layout.worker == 1:
            self._attack((found[0][0]["host"], found[0][0]["port"]))
        return found


def test_unauthenticated_connections_are_not_taken_for_workers() -> None:
    """One who does not know the secret, and many who say nothing, come first; the worker is taken at once."""
    silent: list[socket.socket] = []

    def attack(where: tuple[str, int]) -> None:
        for _ in range(80):
            silent.append(socket.create_connection(where, timeout=SECONDS))
        with socket.create_connection(where, timeout=SECONDS) as intruder, pytest.raises(ProofError):
            introduce(
                intruder,
                Handshake(Secret(b"?" * 32, "a guess"), "reduce", "worker 1", "worker 0"),
                REAL.deadline(SECONDS),
            )

    connections = connected(
        2,
        exchange=HostileClients(attack).exchange,
        clock=GivenClock(),  # it stands still: no silent one's time is ever over
        machine=lambda: str(threading.get_ident()),
    )
    for total in together(connections, lambda calls: calls.sum(np.ones(3))):
        assert (total == 2.0).all()
    for each in silent:
        each.close()


def test_a_recorded_handshake_proves_nothing_when_it_is_sent_again() -> None:
    """An eavesdropper has all that a worker sent at its start, and is not taken for that worker."""
    recorded: list[bytes] = []

    def record(where: tuple[str, int]) -> None:
        """Stands between a genuine worker and worker 0, and closes the connection in the end."""
        with socket.create_server(("127.0.0.1", 0)) as between:
            worker = threading.Thread(target=lambda: genuine(between.getsockname()), daemon=True)
            worker.start()
            inner, _ = between.accept()
            with inner, socket.create_connection(where, timeout=SECONDS) as outer:
                for from_worker, count in ((True, 32), (False, 32), (True, 1 + 8 + 32), (False, 32)):
                    source, sink = (inner, outer) if from_worker else (outer, inner)
                    data = source.recv(count, socket.MSG_WAITALL)
                    sink.sendall(data)
                    recorded.extend([data] if from_worker else [])
            worker.join()

    def genuine(where: tuple[str, int]) -> None:
        with socket.create_connection(where, timeout=SECONDS) as sock:
            secret = derived.get(timeout=SECONDS)  # worker 0 may come to this only now
            introduce(sock, Handshake(secret, "reduce", "worker 1", "worker 0"), REAL.deadline(SECONDS))

    def attack(where: tuple[str, int]) -> None:
        record(where)
        with socket.create_connection(where, timeout=SECONDS) as intruder:
            for each in recorded:
                intruder.sendall(each)
            assert len(intruder.recv(1000, socket.MSG_WAITALL)) == 32  # a new challenge, and no proof

    class Derived(Secret):
        def derive(self, *parts: bytes | str | int) -> Secret:
            found = super().derive(*parts)
            if parts[0] == "transport":
                derived.put(found)
            return found

    derived: queue.Queue[Secret] = queue.Queue()
    hostile = HostileClients(attack)
    machine = lambda: str(threading.get_ident())  # noqa: E731 - over TCP
    connections = connected(
        2, exchange=hostile.exchange, job_secret=lambda: Derived(b"of the job", "a test"), machine=machine
    )
    assert b"".join(recorded)[32:41] == b"\x08worker 1"
    for total in together(connections, lambda calls: calls.sum(np.ones(3))):
        assert (total == 2.0).all()


def test_a_worker_that_lives_is_waited_for_however_long_it_takes_to_connect() -> None:
    """It was frozen for a while at that point: nobody gives up, and nothing else carries the values."""
    clock, late = GivenClock(), threading.Event()
    shared = ThreadExchange(3)

    def exchange(layout: ReplicaLayout, value: Any) -> list[Any]:
        found = shared.exchange(layout, value)
        if layout.worker == 2 and isinstance(value, tuple):
            assert late.wait(SECONDS)
        return found

    wait = start_connecting(3, exchange=exchange, clock=clock)
    for _ in range(12):
        clock.pass_by(60.0)
    late.set()
    for total in together(wait(), lambda calls: calls.sum(np.full(5, calls.rank + 1.0))):
        assert (total == 6.0).all()


class Unreachable(ThreadExchange):
    """Exchanges values, with an address of worker 0 at which nobody listens."""

    def __init__(self, workers: int) -> None:
        super().__init__(workers)
        with socket.create_server(("127.0.0.1", 0)) as closed:
            self.port = closed.getsockname()[1]

    def exchange(self, layout: ReplicaLayout, value: Any) -> list[Any]:
        found = super().exchange(layout, value)
        if isinstance(value, tuple):
            found[0] = ({"host": "127.0.0.1", "port": self.port, "machine": "another"}, found[0][1])
        return found


def test_workers_that_cannot_be_connected_raise_the_same_error_on_all() -> None:
    clock, shared = GivenClock(), Unreachable(3)
    found = connected(3, exchange=shared.exchange, clock=clock)
    for each in found:
        assert isinstance(each, PeerMissingError)
        for worker in (1, 2):
            assert f"worker {worker} could not connect to worker 0 at 127.0.0.1:{shared.port}" in str(each)
        assert 'communication="tensorflow"' in str(each)
    assert clock.now() >= 1060.0


def test_a_ring_that_cannot_be_connected_is_an_error_and_opens_no_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """None for the calls would have TensorFlow start its server, which checks nobody."""

    def fail(*args: Any) -> Any:
        raise PeerMissingError("worker 1 could not connect to worker 0")

    monkeypatch.setattr("dtrain.collectives.sockets.connect_all", fail)
    topology = Topology({"worker": ("127.0.0.1:1", "127.0.0.1:2")}, "worker", 0)
    with refused(PeerMissingError, "worker 1 could not connect to worker 0"):
        Sockets().connect(ReplicaLayout(workers=2, worker=0), topology, [facts(), facts()])


def test_a_worker_that_is_lost_ends_the_tries_of_the_others() -> None:
    def check() -> None:
        raise PeerMissingError("worker 0 was lost")

    shared = Unreachable(2)
    layout = ReplicaLayout(workers=2, worker=1)
    values = iter([[({"host": "127.0.0.1", "port": shared.port, "machine": "another"}, b"n" * 32), None]])
    with refused(PeerMissingError, "worker 0 was lost"):
        connect.connect_all(
            layout,
            "127.0.0.1",
            exchange=lambda layout, value: next(values),
            job_secret=lambda: JOB,
            check=check,
            clock=GivenClock(),
        )


def test_reductions_overlap_where_each_host_has_a_core_more_than_workers() -> None:
    def on(*cores: int, overlap: bool | None = None) -> Facts:
        return Facts(asked="auto", gpus=False, cores=cores, overlap=overlap)

    assert not overlaps([on(0), on(1)], ["a", "a"])  # each is bound to its core
    assert not overlaps([on(0, 1), on(0, 1)], ["a", "a"])
    assert overlaps([on(0, 1, 2), on(0, 1, 2)], ["a", "a"])
    assert overlaps([on(0, 1), on(0, 1)], ["a", "b"])
    assert not overlaps([on(0, 1), on(0)], ["a", "b"])  # one rule for all
    assert overlaps([on(0, overlap=True), on(1)], ["a", "a"])
    assert not overlaps([on(0, 1, overlap=False), on(0, 1)], ["a", "b"])
