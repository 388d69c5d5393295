"""Predicts a job under each strategy and transport, and orders the predictions; what is not known stays None.

A prediction joins a profile, a cluster and the costs of a transport: it makes the work of a step, has it
simulated, and computes memory, goodput and cost from it. It measures nothing.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from dtrain.collectives.reduction_rules import spare_cores
from dtrain.planning.calibration import Calibration, TransportCosts
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
            slower workers, busy servers or data, and communication that no computation hides.
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


@dataclass(frozen=True, kw_only=True)
class PlannedJob:
    """One job to predict.

    Attributes:
        profile, cluster, calibration: what is known of the model, the machines, and of communication.
        settings: what is the same for all jobs of a plan.
        costs: the transport.
        strategy: one of `STRATEGIES`.
        batch: the examples of a micro-batch of a worker.
        accumulation: the micro-batches of an update.

    Raises:
        ConfigurationError: the profile has no rate of the device, or workers need hosts without a network.
    """

    profile: ModelProfile
    cluster: Cluster
    calibration: Calibration = field(default_factory=Calibration)
    settings: PlanSettings
    costs: TransportCosts
    strategy: str = DATA_PARALLEL
    batch: int
    accumulation: int = 1

    @functools.cached_property
    def place(self) -> WorkerPlacement:
        """Where the workers are."""
        return self.cluster.placed(self.settings.workers)

    @functools.cached_property
    def servers(self) -> int:
        """The parameter servers; 0 under other strategies."""
        return (self.settings.servers or self.place.hosts) if self.strategy == SERVERS else 0

    @functools.cached_property
    def times_longer(self) -> float:
        """How many times as long as alone a worker computes, because workers of a host share its cores."""
        cores, per_host = self.cluster.cores_per_host, self.place.per_host
        if cores is None or self.settings.workers == 1:
            return 1.0
        demand = per_host * (self.profile.cores(self.cluster.device) or 1) / cores
        rate = self.calibration.memory_bytes_per_second
        share = 0.0 if rate is None else self.profile.memory_traffic(self.batch) / rate / self.alone_seconds
        return self.calibration.times_longer(demand, min(share, 1.0))

    @property
    def alone_seconds(self) -> float:
        """The seconds in which a worker without others computes a micro-batch and its update."""
        return self.profile.step_seconds(self.cluster.device, self.batch)

    @property
    def computation(self) -> float:
        """The seconds in which a worker among the others computes all micro-batches of an update."""
        return self.alone_seconds * self.times_longer * self.accumulation

    @property
    def stragglers(self) -> Stragglers:
        """How workers differ in speed."""
        return Stragglers(spread=self.cluster.speed_spread or 0.0, jitter=self.cluster.step_jitter or 0.0)

    def rng(self) -> np.random.Generator:
        """Random numbers, the same each time."""
        return np.random.default_rng(self.settings.seed)


def predictions(
    profile: ModelProfile, cluster: Cluster, settings: PlanSettings, calibration: Calibration
) -> list[Prediction]:
    """All predictions, the best first.

    First come those that fit into memory, or may; of these the strategies with the numbers of one device; of
    these the one with the most examples per second after failures.

    Args:
        profile, cluster, settings, calibration: what to predict.

    Raises:
        ConfigurationError: the profile has no rate of the device, or workers need hosts without a network.
    """
    made = [
        predicted(
            PlannedJob(
                profile=profile,
                cluster=cluster,
                calibration=calibration,
                settings=settings,
                costs=costs,
                strategy=strategy,
                batch=batch,
                accumulation=accumulation,
            )
        )
        for strategy in sensible(cluster, settings.workers)
        for costs in usable(cluster, calibration, strategy)
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


def efficiencies(job: PlannedJob, counts: Sequence[int]) -> list[float]:
    """The scaling efficiency of a job with so many workers each."""
    return [
        predicted(replace(job, settings=replace(job.settings, workers=workers))).efficiency
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


def usable(cluster: Cluster, calibration: Calibration, strategy: str) -> list[TransportCosts]:
    """The transports to try: NCCL between accelerators, dtrain's own between processors.

    TensorFlow's collectives are slower than dtrain's own: they are among them only if they were measured.
    """
    names = ("nccl",) if cluster.cores_per_host is None else ("ring", "mpi", "tensorflow")
    fitting = [calibration.transports[name] for name in names if name in calibration.transports]
    return fitting[:1] if strategy == SERVERS else fitting  # TensorFlow's servers have their own


def predicted(job: PlannedJob) -> Prediction:
    """The prediction of one job.

    Raises:
        ConfigurationError: as `PlannedJob`.
    """
    profile, cluster, settings, strategy = job.profile, job.cluster, job.settings, job.strategy
    by_strategy = {SERVERS: _under_servers, DILOCO: _in_rounds}
    times = _with_input(job, by_strategy.get(strategy, _synchronous)(job))
    place = job.place
    memory = device_memory(profile, strategy, place, job.batch, cluster.device_memory)
    throughput = times.steps_per_second * job.batch * job.accumulation
    failing_hosts = job.servers or place.hosts  # under parameter servers, a worker's failure stops no other
    failures, missing = job_failures(
        profile, cluster, strategy, place, failing_hosts, settings.checkpoint_seconds
    )
    hosts = place.hosts + job.servers
    kept = throughput * (failures.goodput if failures else 1.0)
    epoch = profile.examples_per_epoch / kept if profile.examples_per_epoch and kept else None
    price = cluster.price_per_host_hour
    return Prediction(
        strategy=strategy,
        transport="gRPC" if strategy == SERVERS else job.costs.name,
        workers=settings.workers,
        batch=job.batch,
        accumulation=job.accumulation,
        step_seconds=times.seconds,
        computation=times.computation,
        waiting=times.waiting,
        communication=max(times.seconds - times.computation - times.waiting, 0.0),
        hidden=times.hidden,
        throughput=throughput,
        # One device alone computes the whole update, also where many divide it.
        efficiency=throughput * job.alone_seconds / (settings.workers * job.batch),
        memory=memory,
        staleness=times.staleness,
        failures=failures,
        epoch_seconds=epoch,
        epoch_cost=None if epoch is None or price is None else epoch / 3600 * hosts * price,
        hosts=hosts,
        unknown=[*_unknown(profile, cluster), *missing],
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


def _with_input(job: PlannedJob, times: _Times) -> _Times:
    """The times, where the data pipeline of each worker gives examples no faster than the profile says."""
    rate = job.profile.input_examples_per_second
    least = 0.0 if rate is None else job.batch * job.accumulation / rate
    if least <= times.seconds:
        return times
    return replace(
        times,
        seconds=least,
        waiting=times.waiting + least - times.seconds,
        steps_per_second=times.steps_per_second * times.seconds / least,
    )


def overlaps(cluster: Cluster, place: WorkerPlacement, costs: TransportCosts) -> bool:
    """Whether workers communicate during the backward pass: as the transport says, or by their cores."""
    if costs.overlap is not None:
        return costs.overlap
    if cluster.cores_per_host is None:
        return True
    cores = range(cluster.cores_per_host)
    return spare_cores([cores] * place.per_host, ["host"] * place.per_host)


def synchronous_step(job: PlannedJob) -> StepWork:
    """The work of a step of a worker, under one of `SAME_NUMBERS`."""
    profile, cluster, place, costs = job.profile, job.cluster, job.place, job.costs
    update = profile.update_seconds(cluster.device, job.batch, cluster.memory_bytes_per_second)
    passes = profile.layer_seconds(cluster.device, job.batch, update)
    forward, backward = ([seconds * job.times_longer for seconds in of_pass] for of_pass in passes)
    update *= job.times_longer
    gradients = [layer.gradients for layer in profile.layers]
    sizes = [size for of_layer in gradients for size in of_layer]
    overlap = overlaps(cluster, place, costs)
    gathers: list[float] = []
    if job.strategy == DATA_PARALLEL or place.workers == 1:
        groups = reduction_groups(sizes, grouping=costs.grouping, bucket=costs.bucket_bytes, overlap=overlap)
        sums = layer_sums(gradients, groups, lambda some: all_reduce_seconds(some, place, costs))
    else:  # each layer's weights are gathered, and its gradients reduce-scattered
        inside = place if job.strategy == FULLY_SHARDED else one_host(place)
        of_layers = [all_gather_seconds(sum(of_layer), inside, costs) for of_layer in gradients]
        gathers = of_layers
        across = hosts_apart(place)
        sums = [
            (
                layer,
                of_layers[layer]
                + (
                    all_reduce_seconds([sum(gradients[layer]) / place.per_host], across, costs)
                    if job.strategy == IN_HOSTS
                    else 0.0
                ),
            )
            for layer in reversed(range(len(gradients)))
        ]
        update /= inside.workers
    taken = 0.0
    if costs.shares_cores and place.workers > 1:  # computation, which uses all cores of a worker, loses some
        cores = max((cluster.cores_per_host or 1) / place.per_host, 1.0)
        sent = 2 * (place.workers - 1) / place.workers * sum(sizes)
        taken = costs.cpu_seconds_per_byte * sent / cores
    measured = costs.measured_at(place)
    return StepWork(
        forward=forward,
        backward=backward,
        sums=sums,
        gathers=gathers,
        overlap=overlap,
        update=update,
        beside=0.0 if measured is None else measured.step_seconds,
        taken=taken,
        slowdown=costs.slowdown,
        micro_batches=job.accumulation,
    )


def _synchronous(job: PlannedJob) -> _Times:
    work, stragglers, workers = synchronous_step(job), job.stragglers, job.settings.workers
    steps = _JITTER_STEPS if stragglers.jitter else 1
    times = simulate_steps(work, slowest_of(stragglers, workers, steps, job.rng()))
    seconds = float(times.seconds.mean())
    exposed = float(times.exposed.mean()) - work.beside
    return _Times(
        seconds=seconds,
        computation=work.computation,
        waiting=float(times.waiting.mean()),
        steps_per_second=workers / seconds,
        hidden=max(times.communication - exposed, 0.0),
    )


def _in_rounds(job: PlannedJob) -> _Times:
    computation, every, workers = job.computation, job.settings.every, job.settings.workers
    reduced = all_reduce_seconds([job.profile.gradient_bytes], job.place, job.costs)
    stragglers = job.stragglers
    rounds = simulate_rounds(
        computation, every, reduced, stragglers, workers, 4 if stragglers.jitter else 1, job.rng()
    )
    seconds = float(rounds.mean()) / every
    return _Times(
        seconds=seconds,
        computation=computation,
        waiting=max(seconds - computation - reduced / every, 0.0),
        steps_per_second=workers / seconds,
    )


def _under_servers(job: PlannedJob) -> _Times:
    """Workers send gradients to servers, and get weights, by a link that those of a host share."""
    if job.cluster.network is None:
        raise AssertionError("`sensible` leaves servers out")
    rate, size, place = job.cluster.network.data_rate, job.profile.gradient_bytes, job.place
    served = size / job.servers / rate
    steps = max(_FEWEST_SERVER_STEPS, min(_JITTER_STEPS, _SERVER_EXCHANGES // place.workers))
    times = simulate_servers(
        job.computation,
        2 * max(size * place.per_host / rate, served),
        served,
        job.stragglers,
        place.workers,
        steps,
        job.rng(),
    )
    return _Times(
        seconds=times.seconds,
        computation=job.computation,
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
