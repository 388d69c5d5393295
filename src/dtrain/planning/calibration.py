"""What a plan knows of transports and of shared cores: latencies, overheads, and which rules they follow.

The defaults are in `transports.json`, each with its source. A file of the same form, with what was measured
on the machines at hand, takes their place; `dtrain bench --save-calibration` writes one.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from dtrain.collectives.reduction_rules import BUCKET
from dtrain.errors import ConfigurationError, known_are
from dtrain.planning.cluster import LINKS, WorkerPlacement
from dtrain.planning.json_fields import JsonFields, read_fields

IN_CACHES = 4 * 2**20
"""The bytes that a sum is measured with while they are in the caches of a processor."""

SHAPES = ("ring", "tree", "parts")
GROUPINGS = ("buckets", "tensors")

_TRANSPORTS = Path(__file__).parent / "transports.json"
_KNOWN = ("nccl", "ring", "mpi", "tensorflow")
_MOST_SECONDS, _MOST_WORKERS = 1e6, 100_000


@dataclass(frozen=True, kw_only=True)
class CollectiveAlgorithm:
    """One way in which a transport makes a collective.

    Attributes:
        shape: "ring": each worker sends to the next one. "tree": chains in hosts, and a binary tree between
            them. "parts": each worker sends each other one its part of the vector, as dtrain itself does.
        launch_seconds: of each call, before the first byte.
        latency: seconds of one message, by the kind of link.
        efficiency: the part of the links' data rate that the algorithm reaches.
        message_seconds: processor time of each message; of "parts" only.
        largest: the most bytes that go in this way; None without a limit.
    """

    shape: str
    launch_seconds: float
    latency: dict[str, float]
    efficiency: float = 1.0
    message_seconds: float = 0.0
    largest: float | None = None


@dataclass(frozen=True, kw_only=True)
class MeasuredCosts:
    """What collectives between so many workers take, measured; contention for their cores is in it.

    Attributes:
        workers: the workers.
        hosts: the hosts that they are on; with several, the cost of the link between them is in the figures.
        exchange_seconds: of the smallest sum: each worker sends a message to each other one.
        sum_seconds_per_byte: of a sum, for each of the first `IN_CACHES` bytes of its vectors.
        further_seconds_per_byte: of a sum, for each byte above.
        gather_seconds_per_byte: of a large gather, for each byte of the gathered vector.
        step_seconds: what a step takes beside its computation and its sums.
    """

    workers: int
    hosts: int = 1
    exchange_seconds: float
    sum_seconds_per_byte: float
    further_seconds_per_byte: float
    gather_seconds_per_byte: float
    step_seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class TransportCosts:
    """A transport.

    Attributes:
        name, source: the name, and where the figures come from.
        algorithms: the algorithms; the fastest for the size is taken.
        grouping: "buckets" for several large gradients in a call, as dtrain's own transports have them;
            "tensors" for each large gradient alone.
        bucket_bytes: the most bytes of a bucket.
        overlap: whether it sends during the backward pass; None leaves it to the rule of spare cores.
        cpu_seconds_per_byte: processor time of a worker for each byte of an all-reduce of two workers, which
            sends as many bytes as the vector has; with more workers it sends more.
        shares_cores: whether that time is taken from the worker's computation where it overlaps.
        slowdown: how much longer computation takes while something is sent beside it, as a part of its time:
            a GPU's communication takes processors and memory bandwidth from it.
        measured: what was measured; it is used where it holds, and the algorithms elsewhere.
    """

    name: str
    source: str
    algorithms: tuple[CollectiveAlgorithm, ...]
    grouping: str = "buckets"
    bucket_bytes: int = BUCKET
    overlap: bool | None = None
    cpu_seconds_per_byte: float = 0.0
    shares_cores: bool = False
    slowdown: float = 0.0
    measured: tuple[MeasuredCosts, ...] = ()

    def measured_at(self, place: WorkerPlacement) -> MeasuredCosts | None:
        """What was measured of as many workers, or lies between two measurements; None if nothing does.

        Measurements on one host say nothing of several hosts, and the other way round.
        """
        rows = sorted(
            (row for row in self.measured if (row.hosts > 1) == (place.hosts > 1)),
            key=lambda row: row.workers,
        )
        for below, above in itertools.pairwise([*rows[:1], *rows]):
            if below.workers <= place.workers <= above.workers:
                width = above.workers - below.workers
                part = (place.workers - below.workers) / width if width else 0.0
                between = {
                    name: (1 - part) * getattr(below, name) + part * getattr(above, name)
                    for name in _MEASURED
                }
                return MeasuredCosts(workers=place.workers, hosts=place.hosts, **between)
        return None


_MEASURED = [f.name for f in fields(MeasuredCosts) if f.name not in ("workers", "hosts")]


@dataclass(frozen=True, kw_only=True)
class Contention:
    """How workers of a host slow each other.

    Attributes:
        demand: the cores that they would all keep busy, as a part of those that the host has.
        times_longer: how many times as long as alone they compute in their cores' caches.
        memory_times_longer: how many times as long they read and write memory beyond the caches.
    """

    demand: float
    times_longer: float
    memory_times_longer: float


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """All that a plan knows of transports, and of workers that share the cores of a host.

    Attributes:
        transports: the costs of the transports, by name.
        contention: what was measured of workers of a host. Empty: they lose nothing up to a demand of 1, and
            in proportion above it.
        memory_bytes_per_second: what a worker alone reads and writes beyond the caches; None if not known.
    """

    transports: Mapping[str, TransportCosts] = field(default_factory=dict)
    contention: Sequence[Contention] = ()
    memory_bytes_per_second: float | None = None

    def times_longer(self, demand: float, memory_share: float = 0.0) -> float:
        """How many times as long as alone workers compute; on a line between two measurements.

        Args:
            demand: as in `Contention`.
            memory_share: the part of the time that a worker alone waits for memory beyond the caches.
        """
        points = sorted(
            (
                point.demand,
                (1 - memory_share) * point.times_longer + memory_share * point.memory_times_longer,
            )
            for point in self.contention
        )
        if not points:
            return max(1.0, demand)
        if demand <= points[0][0]:
            return points[0][1]
        for (below, first), (above, second) in itertools.pairwise(points):
            if demand <= above:
                return first + (second - first) * (demand - below) / (above - below)
        return points[-1][1] * demand / points[-1][0]

    def as_data(self) -> dict[str, Any]:
        """What a file of a calibration has."""
        return {
            "transports": [asdict(costs) for costs in self.transports.values()],
            "contention": [asdict(point) for point in self.contention],
            "memory_bytes_per_second": self.memory_bytes_per_second,
        }


def read_calibration(path: Path | None = None) -> Calibration:
    """The defaults, or what a file has in their place.

    Args:
        path: a file whose transports take the place of those of the same name; None for the defaults.

    Raises:
        ConfigurationError: the file cannot be read, is no calibration, or has a transport that is not known.
    """
    defaults = _read(_TRANSPORTS)
    if path is None:
        return defaults
    given = _read(path)
    if unknown := [name for name in given.transports if name not in _KNOWN]:
        raise ConfigurationError(
            f"{path} has a transport {unknown[0]!r}, which no plan uses.", hint=known_are(_KNOWN, unknown[0])
        )
    return replace(given, transports={**defaults.transports, **given.transports})


def _read(path: Path) -> Calibration:
    file = read_fields(path)
    by_name = {costs.name: costs for costs in map(_costs, file.objects("transports"))}
    contention = [_contention(entry) for entry in file.objects("contention", optional=True)]
    memory = file.number_or_none("memory_bytes_per_second", least=1)
    file.check_all_taken()
    if len({point.demand for point in contention}) < len(contention):
        raise ConfigurationError(
            f"{file.place}: contention has a demand twice.", hint="Keep one of the two entries."
        )
    return Calibration(transports=by_name, contention=contention, memory_bytes_per_second=memory)


def _contention(entry: JsonFields) -> Contention:
    times = entry.number("times_longer", least=0.1, most=_MOST_WORKERS)
    point = Contention(
        demand=entry.number("demand", least=1e-6, most=_MOST_WORKERS),
        times_longer=times,
        memory_times_longer=entry.number("memory_times_longer", times, least=0.1, most=_MOST_WORKERS),
    )
    entry.check_all_taken()
    return point


def _row(entry: JsonFields) -> MeasuredCosts:
    row = MeasuredCosts(
        workers=entry.whole("workers", least=2, most=_MOST_WORKERS),
        hosts=entry.whole("hosts", 1, least=1, most=_MOST_WORKERS),
        exchange_seconds=entry.number("exchange_seconds", most=_MOST_SECONDS),
        sum_seconds_per_byte=entry.number("sum_seconds_per_byte", most=1),
        further_seconds_per_byte=entry.number("further_seconds_per_byte", most=1),
        gather_seconds_per_byte=entry.number("gather_seconds_per_byte", most=1),
        step_seconds=entry.number("step_seconds", 0.0, most=_MOST_SECONDS),
    )
    entry.check_all_taken()
    return row


def _costs(entry: JsonFields) -> TransportCosts:
    costs = TransportCosts(
        name=entry.text("name"),
        source=entry.text("source", ""),
        algorithms=tuple(_algorithm(each) for each in entry.objects("algorithms")),
        grouping=entry.word("grouping", GROUPINGS, "buckets"),
        bucket_bytes=entry.whole("bucket_bytes", BUCKET, least=1),
        overlap=entry.flag_or_none("overlap"),
        cpu_seconds_per_byte=entry.number("cpu_seconds_per_byte", 0.0, most=1),
        shares_cores=bool(entry.flag_or_none("shares_cores")),
        slowdown=entry.number("slowdown", 0.0, most=10),
        measured=tuple(_row(each) for each in entry.objects("measured", optional=True)),
    )
    entry.check_all_taken()
    if all(algorithm.largest is not None for algorithm in costs.algorithms):
        raise ConfigurationError(
            f"{entry.place}: no algorithm sends vectors of any size.",
            hint="Leave largest out of one of the algorithms.",
        )
    return costs


def _algorithm(entry: JsonFields) -> CollectiveAlgorithm:
    latency = entry.object("latency")
    algorithm = CollectiveAlgorithm(
        shape=entry.word("shape", SHAPES),
        launch_seconds=entry.number("launch_seconds", 0.0, most=1e6),
        latency={kind: latency.number(kind) for kind in LINKS},
        efficiency=entry.number("efficiency", 1.0, least=0.01, most=1),
        message_seconds=entry.number("message_seconds", 0.0, most=1e6),
        largest=entry.number_or_none("largest", least=1),
    )
    latency.check_all_taken()
    entry.check_all_taken()
    return algorithm
