"""Makes a calibration of what the workers of some jobs have measured; it measures nothing itself.

What a step takes beside its computation and its sums is that of a small dense model. So predictions of other
models rest on nothing that was measured of them but the profile of one worker.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace

from dtrain.bench.calibration_worker import HIDDEN, LARGE, LARGEST, OUTPUTS, STREAMED, WIDTH, WorkerCosts
from dtrain.collectives.reduction_rules import by_size
from dtrain.planning.calibration import (
    IN_CACHES,
    Calibration,
    CollectiveAlgorithm,
    Contention,
    MeasuredCosts,
    TransportCosts,
)
from dtrain.planning.cluster import LINKS
from dtrain.planning.collective_costs import measured_seconds

_SOURCE = "measured by `dtrain bench --save-calibration`"
TENSORFLOW = "tensorflow"
_NETWORK = 50e-6  # seconds of a message between hosts, at least: assumed, as in `transports.json`
_SMALL_MODEL = [size for _ in range(HIDDEN) for size in (4 * WIDTH * WIDTH, 4 * WIDTH)]
_SMALL_MODEL += [4 * WIDTH * OUTPUTS, 4 * OUTPUTS]

Job = Sequence[WorkerCosts]


def calibration_of(jobs: Mapping[str, Mapping[int, Job]], alone: WorkerCosts, *, cores: int) -> Calibration:
    """The calibration of a host.

    Args:
        jobs: what the workers of jobs have measured, by transport and number of workers, from 2 on.
        alone: what a single worker has measured.
        cores: the cores of the host.
    """
    first = next(iter(jobs.values()))
    return Calibration(
        transports={name: costs_of_transport(name, of_one, alone) for name, of_one in jobs.items()},
        contention=[
            Contention(
                demand=workers * alone.cores / cores,
                times_longer=_times(job, alone, "computation"),
                memory_times_longer=_times(job, alone, "streaming"),
            )
            for workers, job in sorted({1: [alone], **first}.items())
        ],
        memory_bytes_per_second=3 * STREAMED / alone.streaming,
    )


def _times(job: Job, alone: WorkerCosts, what: str) -> float:
    """How many times as long as alone the workers of a job take, at least 1."""
    return max(statistics.fmean(getattr(worker, what) for worker in job) / getattr(alone, what), 1.0)


def costs_of_transport(
    name: str, jobs: Mapping[int, Job], alone: WorkerCosts, *, hosts: int = 1
) -> TransportCosts:
    """The costs of a transport.

    Args:
        name: the transport.
        jobs: what the workers of jobs over it have measured, by their number, from 2 on.
        alone: what a single worker has measured.
        hosts: the hosts that they were on.
    """
    grouping = "tensors" if name == TENSORFLOW else "buckets"
    rows = tuple(_row(job, alone, workers, hosts, grouping) for workers, job in sorted(jobs.items()))
    first, last = rows[0], rows[-1]
    more = last.workers - first.workers
    slope = (last.exchange_seconds - first.exchange_seconds) / more if more else 0.0
    return TransportCosts(
        name=name,
        source=f"{_SOURCE}; for other numbers of workers and other links as of {first.workers} workers",
        grouping=grouping,
        overlap=True if name == TENSORFLOW else None,  # its collectives begin when their gradient is there
        cpu_seconds_per_byte=max(first.sum_seconds_per_byte, first.further_seconds_per_byte),
        shares_cores=True,
        algorithms=(
            CollectiveAlgorithm(
                shape="parts",
                launch_seconds=0.0,
                latency=dict.fromkeys(LINKS, first.exchange_seconds)
                | {"network": max(first.exchange_seconds, _NETWORK)},
                message_seconds=max(slope, 0.0),
            ),
        ),
        measured=rows,
    )


def _row(job: Job, alone: WorkerCosts, workers: int, hosts: int, grouping: str) -> MeasuredCosts:
    mean = WorkerCosts(
        **{
            name: statistics.fmean(getattr(worker, name) for worker in job)
            for name in WorkerCosts.__dataclass_fields__
        }
    )
    free = MeasuredCosts(
        workers=workers,
        hosts=hosts,
        exchange_seconds=mean.exchange,
        sum_seconds_per_byte=0.0,
        further_seconds_per_byte=0.0,
        gather_seconds_per_byte=max(mean.gather - 2 * mean.exchange, 0.0) / sum(LARGE),
    )
    large = mean.sum - measured_seconds(LARGE, free, grouping=grouping)
    row = replace(free, sum_seconds_per_byte=max(large, 0.0) / sum(LARGE))
    further = mean.largest_sum - measured_seconds(LARGEST, row, grouping=grouping)
    row = replace(row, further_seconds_per_byte=max(further, 0.0) / (sum(LARGEST) - IN_CACHES))
    sizes = by_size(_SMALL_MODEL, [None] * len(_SMALL_MODEL))
    packed = [sum(_SMALL_MODEL[number] for number in group) for group in sizes.small]
    sent = [*packed, *(_SMALL_MODEL[number] for number in sizes.large)]
    computed = alone.step * mean.computation / alone.computation
    return replace(
        row, step_seconds=max(mean.step - computed - measured_seconds(sent, row, grouping=grouping), 0.0)
    )
