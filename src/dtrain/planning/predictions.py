"""Predicts a job under each strategy and transport, and orders the predictions; what is not known stays None.

A prediction joins a profile, a cluster and the costs of a transport: it makes the work of a step, has it
simulated, and computes memory, goodput and cost from it. It measures nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from dtrain.collectives.reduction_rules import spare_cores
from dtrain.planning.calibration import TransportCosts
from dtrain.planning.cluster import Cluster, WorkerPlacement
from dtrain.planning.collective_costs import (
    all_gather_seconds,
    all_reduce_seconds,
    hosts_apart,
    one_host,
)
from dtrain.planning.compared_strategies import (
    DATA_PARALLEL,
    DILOCO,
    FULLY_SHARDED,
    IN_HOSTS,
    SAME_NUMBERS,
    SERVERS,
    STRATEGIES,
)
from dtrain.planning.device_memory import DeviceMemory, device_memory
from dtrain.planning.job_failures import Failures, job_failures
from dtrain.planning.model_profile import ModelProfile
from dtrain.planning.simulator import (
    StepWork,
    Stragglers,
    layer_sums,
    reduction_groups,
    simulate_rounds,
    simulate_servers,
    simulate_steps,
    slowest_of,
)

_JITTER_STEPS = 200  # simulated steps, where they differ
_SERVER_EXCHANGES = 200_000  # simulated steps of all workers together, at most, under parameter servers
_FEWEST_SERVER_STEPS = 20  # of each worker


@dataclass(frozen=True, kw_only=True)
class PlanSettings:
    """What a plan varies, beside model and cluster.

    Attributes:
        workers: the number of workers, each with a device.
        batches: the examples of a worker's micro-batch, each of which is tried.
        accumulations: micro-batches of an update, likewise.
        servers: the parameter servers, each on a host of its own; None for one for each host of workers.
        every: the steps of a round of DiLoCo.
        checkpoint_seconds: in which a checkpoint stops the work; None to compute it from the cluster's rate.
        seed: of all random numbers.
    """

    workers: int
    batches: Sequence[int]
    accumulations: Sequence[int] = (1,)
    servers: int | None = None
    every: int = 50
    checkpoint_seconds: float | None = None
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """A job under one strategy.

    Attributes:
        strategy, transport: their names.
        workers, batch, accumulation: as in the settings.
        step_seconds: of an update of a worker; of DiLoCo the mean over a round.
        computation, waiting, communication: its parts, in seconds: of a worker of mean speed, waiting for
            slower workers or busy servers, and communication that no computation hides.
        hidden: seconds of communication beside computation.
        throughput: examples per second of all workers.
        efficiency: the throughput as a part of as many workers' that do not communicate.
        memory: of a device.
        staleness: updates that a gradient misses, the mean and the most; None under synchronous strategies.
        failures: None if something is not known for it.
        epoch_seconds, epoch_cost: with failures if they are known; None if not known.
        hosts: the hosts, with those of parameter servers.
        unknown: what was not known, in words.
    """

    strategy: str
    transport: str
    workers: int
    batch: int
    accumulation: int
    step_seconds: float
    computation: float
    waiting: float
    communication: float
    hidden: float
    throughput: float
    efficiency: float
    memory: DeviceMemory
    staleness: tuple[float, int] | None
    failures: Failures | None
    epoch_seconds: float | None
    epoch_cost: float | None
    hosts: int
    unknown: Sequence[str] = field(default=())

    @property
    def effective_throughput(self) -> float:
        """The throughput that failures leave, as far as they are known."""
        return self.throughput * (self.failures.goodput if self.failures else 1.0)


def predictions(
    profile: ModelProfile,
    cluster: Cluster,
    settings: PlanSettings,
    transports: Mapping[str, TransportCosts],
) -> list[Prediction]:
    """All predictions, the best first.

    First come those that fit into memory, or may; of these the strategies with the numbers of one device; of
    these the one with the most examples per second after failures.

    Args:
        profile, cluster, settings: what to predict.
        transports: the costs of the transports, by name.

    Raises:
        ConfigurationError: the profile has no rate of the device, or workers need hosts without a network.
    """
    made = [
        predicted(profile, cluster, settings, strategy, costs, batch=batch, accumulation=accumulation)
        for strategy in sensible(cluster, settings.workers)
        for costs in usable(cluster, transports, strategy)
        for batch in settings.batches
        for accumulation in settings.accumulations
    ]
    return sorted(
        made,
        key=lambda one: (
            one.memory.fits is False,
            one.strategy not in SAME_NUMBERS,
            -one.effective_throughput,
        ),
    )


def efficiencies(
    profile: ModelProfile,
    cluster: Cluster,
    settings: PlanSettings,
    costs: TransportCosts,
    strategy: str,
    counts: Sequence[int],
) -> list[float]:
    """The scaling efficiency of a strategy with so many workers each, at the first batch and accumulation."""
    return [
        predicted(
            profile,
            cluster,
            replace(settings, workers=workers),
            strategy,
            costs,
            batch=settings.batches[0],
            accumulation=settings.accumulations[0],
        ).efficiency
        for workers in counts
    ]


def sensible(cluster: Cluster, workers: int) -> list[str]:
    """The strategies to try: what is divided in hosts is divided at all, and servers need a network."""
    place = cluster.placed(workers)
    left_out = {
        IN_HOSTS: place.hosts == 1 or place.per_host == 1,
        SERVERS: cluster.network is None,
    }
    return [strategy for strategy in STRATEGIES if not left_out.get(strategy)]


def usable(cluster: Cluster, transports: Mapping[str, TransportCosts], strategy: str) -> list[TransportCosts]:
    """The transports to try: NCCL between accelerators, dtrain's own between processors."""
    names = ("nccl",) if cluster.cores_per_host is None else ("ring", "mpi")
    fitting = [transports[name] for name in names]
    return fitting[:1] if strategy == SERVERS else fitting  # TensorFlow's servers have their own


def predicted(
    profile: ModelProfile,
    cluster: Cluster,
    settings: PlanSettings,
    strategy: str,
    costs: TransportCosts,
    *,
    batch: int,
    accumulation: int,
) -> Prediction:
    """The prediction of one strategy.

    Args:
        profile, cluster, settings: as for `predictions`.
        strategy: one of `STRATEGIES`.
        costs: the transport.
        batch: the examples of a micro-batch.
        accumulation: the micro-batches of an update.

    Raises:
        ConfigurationError: as `predictions`.
    """
    place = cluster.placed(settings.workers)
    by_strategy = {SERVERS: _under_servers, DILOCO: _in_rounds}
    times = by_strategy.get(strategy, _synchronous)(
        profile, cluster, settings, strategy, costs, place, batch, accumulation
    )
    servers = _servers(settings, place) if strategy == SERVERS else 0
    memory = device_memory(profile, cluster, strategy, place, batch)
    throughput = times.steps_per_second * batch * accumulation
    # One device alone computes the whole update, also where many divide it.
    alone = batch / profile.step_seconds(cluster.device, batch)
    unknown = [*_unknown(profile, cluster)]
    failing_hosts = servers if strategy == SERVERS else place.hosts  # a worker's failure stops no other one
    failures, missing = job_failures(
        profile, cluster, strategy, place, failing_hosts, settings.checkpoint_seconds
    )
    unknown += missing
    hosts = place.hosts + servers
    kept = throughput * (failures.goodput if failures else 1.0)
    epoch = profile.examples_per_epoch / kept if profile.examples_per_epoch and kept else None
    price = cluster.price_per_host_hour
    return Prediction(
        strategy=strategy,
        transport="gRPC" if strategy == SERVERS else costs.name,
        workers=settings.workers,
        batch=batch,
        accumulation=accumulation,
        step_seconds=times.seconds,
        computation=times.computation,
        waiting=times.waiting,
        communication=max(times.seconds - times.computation - times.waiting, 0.0),
        hidden=times.hidden,
        throughput=throughput,
        efficiency=throughput / (settings.workers * alone),
        memory=memory,
        staleness=times.staleness,
        failures=failures,
        epoch_seconds=epoch,
        epoch_cost=None if epoch is None or price is None else epoch / 3600 * hosts * price,
        hosts=hosts,
        unknown=unknown,
    )


@dataclass(frozen=True, kw_only=True)
class _Times:
    """The times of a mean step, in seconds, and the updates of all workers' batches per second."""

    seconds: float
    computation: float
    waiting: float
    steps_per_second: float
    hidden: float = 0.0
    staleness: tuple[float, int] | None = None


def overlaps(cluster: Cluster, place: WorkerPlacement, costs: TransportCosts) -> bool:
    """Whether workers communicate during the backward pass: as the transport says, or by their cores."""
    if costs.overlap is not None:
        return costs.overlap
    if cluster.cores_per_host is None:
        return True
    cores = range(cluster.cores_per_host)
    return spare_cores([cores] * place.per_host, ["host"] * place.per_host)


def synchronous_step(
    profile: ModelProfile,
    cluster: Cluster,
    place: WorkerPlacement,
    costs: TransportCosts,
    *,
    batch: int,
    strategy: str = DATA_PARALLEL,
    accumulation: int = 1,
) -> StepWork:
    """The work of a step of a worker under a synchronous strategy.

    Args:
        profile, cluster: the model and the machines.
        place: where the workers are.
        costs: the transport.
        batch: the examples of a micro-batch.
        strategy: one of `SAME_NUMBERS`.
        accumulation: the micro-batches of an update.
    """
    update = profile.update_seconds(cluster.memory_bytes_per_second)
    forward, backward = profile.layer_seconds(cluster.device, batch, update)
    gradients = [layer.gradients for layer in profile.layers]
    sizes = [size for of_layer in gradients for size in of_layer]
    overlap = overlaps(cluster, place, costs)
    gathers: list[float] = []
    if strategy == DATA_PARALLEL or place.workers == 1:
        groups = reduction_groups(sizes, grouping=costs.grouping, bucket=costs.bucket_bytes, overlap=overlap)
        sums = layer_sums(gradients, groups, lambda some: all_reduce_seconds(some, place, costs))
    else:  # each layer's weights are gathered, and its gradients reduce-scattered
        inside = place if strategy == FULLY_SHARDED else one_host(place)
        of_layers = [all_gather_seconds(sum(of_layer), inside, costs) for of_layer in gradients]
        gathers = of_layers
        across = hosts_apart(place)
        sums = [
            (
                layer,
                of_layers[layer]
                + (
                    all_reduce_seconds([sum(gradients[layer]) / place.per_host], across, costs)
                    if strategy == IN_HOSTS
                    else 0.0
                ),
            )
            for layer in reversed(range(len(gradients)))
        ]
        update /= inside.workers
    taken = 0.0
    if costs.shares_cores and place.workers > 1:  # computation, which uses all cores of a worker, loses some
        cores = max((cluster.cores_per_host or 1) / place.per_host, 1.0)
        taken = costs.cpu_seconds_per_byte * sum(sizes) / cores
    return StepWork(
        forward=forward,
        backward=backward,
        sums=sums,
        gathers=gathers,
        overlap=overlap,
        update=update,
        taken=taken,
        slowdown=costs.slowdown,
        micro_batches=accumulation,
    )


def _stragglers(cluster: Cluster) -> Stragglers:
    return Stragglers(spread=cluster.speed_spread or 0.0, jitter=cluster.step_jitter or 0.0)


def _synchronous(
    profile: ModelProfile,
    cluster: Cluster,
    settings: PlanSettings,
    strategy: str,
    costs: TransportCosts,
    place: WorkerPlacement,
    batch: int,
    accumulation: int,
) -> _Times:
    work = synchronous_step(
        profile, cluster, place, costs, batch=batch, strategy=strategy, accumulation=accumulation
    )
    stragglers = _stragglers(cluster)
    steps = _JITTER_STEPS if stragglers.jitter else 1
    slowest = slowest_of(stragglers, place.workers, steps, np.random.default_rng(settings.seed))
    times = simulate_steps(work, slowest)
    seconds = float(times.seconds.mean())
    exposed = float(times.exposed.mean())
    return _Times(
        seconds=seconds,
        computation=work.computation,
        waiting=float(times.waiting.mean()),
        steps_per_second=place.workers / seconds,
        hidden=max(times.communication - exposed, 0.0),
    )


def _in_rounds(
    profile: ModelProfile,
    cluster: Cluster,
    settings: PlanSettings,
    strategy: str,
    costs: TransportCosts,
    place: WorkerPlacement,
    batch: int,
    accumulation: int,
) -> _Times:
    del strategy
    computation = profile.step_seconds(cluster.device, batch) * accumulation
    reduced = all_reduce_seconds([profile.gradient_bytes], place, costs)
    stragglers = _stragglers(cluster)
    rounds = simulate_rounds(
        computation,
        settings.every,
        reduced,
        stragglers,
        place.workers,
        4 if stragglers.jitter else 1,
        np.random.default_rng(settings.seed),
    )
    seconds = float(rounds.mean()) / settings.every
    return _Times(
        seconds=seconds,
        computation=computation,
        waiting=max(seconds - computation - reduced / settings.every, 0.0),
        steps_per_second=place.workers / seconds,
    )


def _servers(settings: PlanSettings, place: WorkerPlacement) -> int:
    return settings.servers or place.hosts


def _under_servers(
    profile: ModelProfile,
    cluster: Cluster,
    settings: PlanSettings,
    strategy: str,
    costs: TransportCosts,
    place: WorkerPlacement,
    batch: int,
    accumulation: int,
) -> _Times:
    """Workers send gradients to servers, and get weights, by a link that those of a host share."""
    del strategy, costs
    computation = profile.step_seconds(cluster.device, batch) * accumulation
    if cluster.network is None:
        raise AssertionError("`sensible` leaves servers out")
    rate, size = cluster.network.data_rate, profile.gradient_bytes
    served = size / _servers(settings, place) / rate
    steps = max(_FEWEST_SERVER_STEPS, min(_JITTER_STEPS, _SERVER_EXCHANGES // place.workers))
    times = simulate_servers(
        computation,
        2 * max(size * place.per_host / rate, served),
        served,
        _stragglers(cluster),
        place.workers,
        steps,
        np.random.default_rng(settings.seed),
    )
    return _Times(
        seconds=times.seconds,
        computation=computation,
        waiting=times.waiting,
        steps_per_second=times.steps_per_second,
        staleness=times.staleness,
    )


def _unknown(profile: ModelProfile, cluster: Cluster) -> list[str]:
    """What the numbers of all strategies leave out."""
    missing: list[tuple[bool, str]] = [
        (cluster.speed_spread is None, "how devices differ in speed (speed_spread): assumed to be equal"),
        (cluster.step_jitter is None, "how a worker's steps differ (step_jitter): assumed to be equal"),
        (profile.optimizer_slots is None, "the optimizer's state (optimizer_slots): memory without it"),
        (profile.activation_bytes is None, "the activations (activation_bytes): memory without them"),
        (cluster.device_memory is None, "the memory of a device (device_memory)"),
        (cluster.price_per_host_hour is None, "the price (price_per_host_hour)"),
        (profile.examples_per_epoch is None, "the size of an epoch (examples_per_epoch)"),
    ]
    return [words for absent, words in missing if absent]


def worker_counts(most: int) -> list[int]:
    """The numbers of workers that a plot has: powers of two, and the most."""
    return [*(2**power for power in range(math.ceil(math.log2(most)))), most] if most > 1 else [1]
