"""The time of one collective between workers, from bytes, links and a transport's costs; without simulation.

Workers of a host share its link to the network: a ring crosses it once in each direction, but of an exchange
by parts all messages to other hosts go over it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from dtrain.collectives.reduction_rules import exchanged_together, mpi_goes_by_parts, sent_with_barrier
from dtrain.planning.calibration import IN_CACHES, CollectiveAlgorithm, MeasuredCosts, TransportCosts
from dtrain.planning.cluster import WorkerPlacement

_PHASES = 2  # of an all-reduce: reduce-scatter, then all-gather


def all_reduce_seconds(sizes: Sequence[float], place: WorkerPlacement, costs: TransportCosts) -> float:
    """The seconds of an all-reduce of several tensors in one call.

    Args:
        sizes: the bytes of the tensors.
        place: the workers, of which there is at least one.
        costs: the transport.
    """
    if (row := costs.measured_at(place)) is not None:
        return measured_seconds(sizes, row, grouping=costs.grouping)
    if costs.name != "mpi":
        return _fastest(sizes, place, costs, _PHASES)
    by_parts = [size for size in sizes if mpi_goes_by_parts(int(size), place.workers)]
    whole = [size for size in sizes if not mpi_goes_by_parts(int(size), place.workers)]
    return sum(
        _fastest(some, place, replace(costs, algorithms=chosen or costs.algorithms), _PHASES)
        for some, chosen in (
            (by_parts, tuple(way for way in costs.algorithms if way.shape == "parts")),
            (whole, tuple(way for way in costs.algorithms if way.shape != "parts")),
        )
    )


def all_gather_seconds(size: float, place: WorkerPlacement, costs: TransportCosts) -> float:
    """The seconds in which all workers get a tensor of so many bytes, of which each holds its part.

    A reduce-scatter takes as long.
    """
    if (row := costs.measured_at(place)) is not None:
        return 2 * row.exchange_seconds + size * row.gather_seconds_per_byte if size else 0.0
    return _fastest([size], place, costs, 1)


def measured_seconds(sizes: Sequence[float], row: MeasuredCosts, *, grouping: str) -> float:
    """The seconds of an all-reduce in one call, by what was measured.

    Args:
        sizes: the bytes of the tensors.
        row: the measured costs.
        grouping: of the transport, as in `TransportCosts`.
    """
    if not (size := sum(sizes)):
        return 0.0
    exchanges = len(sizes) if grouping == "tensors" else _exchanges(sizes, row.workers)
    few = min(size, IN_CACHES)
    seconds = few * row.sum_seconds_per_byte + (size - few) * row.further_seconds_per_byte
    return exchanges * row.exchange_seconds + seconds


def _exchanges(sizes: Sequence[float], workers: int) -> int:
    """How often each worker waits for a message of each other one, in an all-reduce by parts."""
    whole_sizes = [int(size) for size in sizes]
    if sent_with_barrier(whole_sizes, workers):
        return 1  # a small value goes whole, to all, with the barrier's message
    return 1 + _PHASES * len([*exchanged_together(whole_sizes)])


def hosts_apart(place: WorkerPlacement) -> WorkerPlacement:
    """The counterparts of one worker on all hosts; each host's link is shared by as many such groups.

    Each group has the same part of the link; `per_host` is 1, and the link's rate is divided.
    """
    network = place.network
    if network is None:
        return WorkerPlacement(workers=1, per_host=1, hosts=1, within=place.within, network=None)
    share = replace(network, bytes_per_second=network.bytes_per_second / place.per_host)
    return WorkerPlacement(
        workers=place.hosts, per_host=1, hosts=place.hosts, within=place.within, network=share
    )


def one_host(place: WorkerPlacement) -> WorkerPlacement:
    """The workers of one host alone."""
    return WorkerPlacement(
        workers=place.per_host, per_host=place.per_host, hosts=1, within=place.within, network=None
    )


def _fastest(sizes: Sequence[float], place: WorkerPlacement, costs: TransportCosts, phases: int) -> float:
    size = sum(sizes)
    if place.workers <= 1 or size <= 0:
        return 0.0
    usable = [
        algorithm for algorithm in costs.algorithms if algorithm.largest is None or size <= algorithm.largest
    ]
    # No transport gathers, or scatters sums, by a tree.
    usable = [algorithm for algorithm in usable if phases == _PHASES or algorithm.shape != "tree"]
    # Of two workers, each sends half of the vector in each of the two phases.
    own = costs.cpu_seconds_per_byte * size * phases * (place.workers - 1) / place.workers
    return min(_seconds(algorithm, sizes, place, phases, own) for algorithm in usable or costs.algorithms)


def _seconds(
    algorithm: CollectiveAlgorithm, sizes: Sequence[float], place: WorkerPlacement, phases: int, own: float
) -> float:
    """The seconds by one algorithm; `own` is the processor time of a worker, beside which bytes are sent."""
    by_shape = {"ring": _ring, "tree": _tree, "parts": _parts}
    latency, sending = by_shape[algorithm.shape](algorithm, sizes, place, phases)
    return algorithm.launch_seconds + latency + max(sending / algorithm.efficiency, own)


def _slowest_rate(place: WorkerPlacement) -> float:
    """The data rate of the slowest link that a ring through all workers has."""
    rates = [place.within.data_rate] if place.per_host > 1 else []
    return min([*rates, place.network.data_rate] if place.network else rates)


def _ring(
    algorithm: CollectiveAlgorithm, sizes: Sequence[float], place: WorkerPlacement, phases: int
) -> tuple[float, float]:
    """Each worker sends a part to the next one, n - 1 times in each phase."""
    steps = phases * (place.workers - 1)
    between = phases * (place.hosts - 1)
    latency = (steps - between) * algorithm.latency[place.within.kind] + between * algorithm.latency[
        "network"
    ]
    sending = phases * (place.workers - 1) / place.workers * sum(sizes) / _slowest_rate(place)
    return latency, sending


def _tree(
    algorithm: CollectiveAlgorithm, sizes: Sequence[float], place: WorkerPlacement, phases: int
) -> tuple[float, float]:
    """Chains inside hosts and a binary tree over them, up and down; the vector flows through in pieces."""
    latency = phases * (
        (place.per_host - 1) * algorithm.latency[place.within.kind]
        + math.ceil(math.log2(place.hosts)) * algorithm.latency["network"]
    )
    return latency, phases * sum(sizes) / _slowest_rate(place)


def _parts(
    algorithm: CollectiveAlgorithm, sizes: Sequence[float], place: WorkerPlacement, phases: int
) -> tuple[float, float]:
    """A barrier, and in each phase a message of each worker to each other one, for each group of vectors."""
    others, outside = place.workers - 1, place.workers - place.per_host
    exchanges = _exchanges(sizes, place.workers) if phases == _PHASES else 2
    carried = sum(sizes) if exchanges == 1 else phases * sum(sizes) / place.workers
    farthest = place.network.kind if place.network else place.within.kind
    latency = exchanges * (algorithm.latency[farthest] + others * algorithm.message_seconds)
    inside = carried * (place.per_host - 1) / place.within.data_rate
    to_network = carried * outside * place.per_host / place.network.data_rate if place.network else 0.0
    return latency, max(inside, to_network)
