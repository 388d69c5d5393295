"""The simulator of `dtrain plan` against closed forms: collectives, overlap, stragglers, failures."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from dtrain.collectives.reduction_rules import BUCKET, in_buckets, spare_cores
from dtrain.planning.calibration import CollectiveAlgorithm, TransportCosts, read_calibration
from dtrain.planning.cluster import LINKS, ClusterLink, WorkerPlacement
from dtrain.planning.collective_costs import (
    all_gather_seconds,
    all_reduce_seconds,
    hosts_apart,
    one_host,
)
from dtrain.planning.failures import daly_interval, goodput, young_interval
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

MIB = 2**20


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def costs_of(shape: str, latency: float = 0.0, **given: float) -> TransportCosts:
    algorithm = CollectiveAlgorithm(
        shape=shape, launch_seconds=0.0, latency=dict.fromkeys(LINKS, latency), **given
    )
    return TransportCosts(name=shape, source="", algorithms=(algorithm,))


def placed(workers: int, per_host: int, within: float = 8e9, network: float = 1e9) -> WorkerPlacement:
    hosts = math.ceil(workers / per_host)
    return WorkerPlacement(
        workers=workers,
        per_host=per_host,
        hosts=hosts,
        within=ClusterLink(kind="pcie", bytes_per_second=within, efficiency=1.0),
        network=ClusterLink(kind="network", bytes_per_second=network, efficiency=1.0) if hosts > 1 else None,
    )


@pytest.mark.parametrize("workers", [2, 8, 1000])
def test_an_all_reduce_without_latency_takes_the_bytes_that_a_link_must_carry(workers: int) -> None:
    least = 2 * (workers - 1) / workers * 100 * MIB / 1e9
    alone = placed(workers, 1)
    assert all_reduce_seconds([100 * MIB], alone, costs_of("ring")) == pytest.approx(least)
    assert all_reduce_seconds([60 * MIB, 40 * MIB], alone, costs_of("parts")) == pytest.approx(least)
    assert all_gather_seconds(100 * MIB, alone, costs_of("ring")) == pytest.approx(least / 2)
    assert all_reduce_seconds([100 * MIB], alone, costs_of("tree")) == pytest.approx(2 * 100 * MIB / 1e9)


def test_one_worker_and_no_bytes_take_no_time() -> None:
    for shape in ("ring", "tree", "parts"):
        assert all_reduce_seconds([5.0], placed(1, 1), costs_of(shape, 1.0)) == 0
        assert all_reduce_seconds([], placed(4, 1), costs_of(shape, 1.0)) == 0


def test_latencies_count_the_messages_that_follow_each_other() -> None:
    assert all_reduce_seconds([MIB], placed(512, 4, 1e30, 1e30), costs_of("ring", 1.0)) == pytest.approx(1022)
    by_tree = costs_of("tree", 1.0)
    assert all_reduce_seconds([MIB], placed(512, 4, 1e30, 1e30), by_tree) == pytest.approx(2 * (3 + 7))
    # A barrier, the parts, and their sums.
    assert all_reduce_seconds([MIB], placed(8, 4, 1e30, 1e30), costs_of("parts", 1.0)) == pytest.approx(3)
    # A small value goes with the barrier.
    assert all_reduce_seconds([100], placed(8, 4, 1e30, 1e30), costs_of("parts", 1.0)) == pytest.approx(1)


def test_workers_of_a_host_share_its_link() -> None:
    """A ring crosses it once in each direction; by parts every worker sends to those of the other host."""
    ring, parts = (
        all_reduce_seconds([100 * MIB], placed(8, 4, 1e30), costs_of(shape)) for shape in ("ring", "parts")
    )
    assert ring == pytest.approx(2 * 7 / 8 * 100 * MIB / 1e9)
    assert parts == pytest.approx(2 * 4 * 4 / 8 * 100 * MIB / 1e9)


def test_counterparts_share_the_links_between_hosts() -> None:
    place = placed(8, 4)
    counterparts = hosts_apart(place)
    assert (counterparts.workers, one_host(place).workers) == (2, 4)
    # Four groups of two, each with a quarter of the vector and of the link.
    assert all_reduce_seconds([25 * MIB], counterparts, costs_of("ring")) == pytest.approx(100 * MIB / 1e9)


def test_mpi_goes_by_parts_or_by_its_own_ring_as_training_does() -> None:
    mpi = read_calibration().transports["mpi"]
    by_shape = {way.shape: replace(mpi, name=way.shape, algorithms=(way,)) for way in mpi.algorithms}
    for workers, size, shape in ((4, MIB, "parts"), (4, 100 << 10, "ring"), (16, MIB, "ring")):
        place = placed(workers, 1)
        assert all_reduce_seconds([size], place, mpi) == all_reduce_seconds([size], place, by_shape[shape])
    # A calibration may know one of the two only.
    (parts,) = (way for way in mpi.algorithms if way.shape == "parts")
    alone = replace(mpi, algorithms=(parts,))
    assert all_reduce_seconds([100 << 10], placed(4, 1), alone) > 1e-4


def test_processor_time_counts_where_it_is_longer_than_the_sending() -> None:
    slow = replace(costs_of("ring"), cpu_seconds_per_byte=1e-6)
    assert all_reduce_seconds([MIB], placed(2, 1), slow) == pytest.approx(MIB * 1e-6)


def one_step(work: StepWork, factor: float = 1.0) -> float:
    return float(simulate_steps(work, np.full(1, factor)).seconds[0])


def test_without_overlap_a_step_is_computation_and_communication() -> None:
    work = StepWork(forward=[1, 1, 1], backward=[2, 2, 2], sums=[(2, 3), (0, 4)], overlap=False, update=0.5)
    assert one_step(work) == pytest.approx(9 + 7 + 0.5)
    assert one_step(replace(work, micro_batches=3)) == pytest.approx(27 + 7 + 0.5)


def test_with_overlap_the_last_bucket_waits_for_the_first_layer() -> None:
    work = StepWork(forward=[1, 1, 1], backward=[2, 2, 2], sums=[(2, 3), (0, 4)])
    assert one_step(work) == pytest.approx(9 + 4)  # the first bucket is sent beside layers 1 and 0
    assert one_step(replace(work, sums=[(2, 30), (0, 4)])) == pytest.approx(3 + 2 + 30 + 4)
    assert one_step(replace(work, sums=[(2, 3), (0, 4)]), 2.0) == pytest.approx(18 + 4)


def test_what_is_sent_beside_computation_slows_it() -> None:
    work = StepWork(forward=[1, 1], backward=[2, 2], sums=[(1, 1), (0, 1)], slowdown=0.5)
    assert one_step(work) == pytest.approx(6 + 1 + 0.5 * 1)
    assert one_step(replace(work, overlap=False)) == pytest.approx(6 + 2)


def test_weights_are_gathered_before_each_layer_and_one_ahead() -> None:
    work = StepWork(forward=[1, 1, 1], backward=[2, 2, 2], gathers=[1, 1, 1], overlap=False)
    assert one_step(work) == pytest.approx(9 + 6)
    # With overlap only the first gather of each pass is waited for.
    assert one_step(replace(work, overlap=True)) == pytest.approx(9 + 2)
    assert one_step(replace(work, overlap=True, gathers=[3, 3, 3])) == pytest.approx(3 * 6 + 1 + 2)


def test_buckets_are_those_of_training() -> None:
    sizes = [3 * MIB, 10_000, MIB, 2 * MIB, 0, MIB]
    assert reduction_groups(sizes, grouping="buckets", bucket=BUCKET, overlap=True) == in_buckets(sizes)
    assert reduction_groups(sizes, grouping="buckets", bucket=BUCKET, overlap=False) == [[0, 1, 2, 3, 4, 5]]
    tensors = reduction_groups(sizes, grouping="tensors", bucket=BUCKET, overlap=True)
    assert tensors == [[5], [3], [2], [0], [1]]
    groups = [[2, 3], [0, 1]]
    assert layer_sums([[1, 2], [4], [8]], groups, lambda some: float(sum(some))) == [(1, 12.0), (0, 3.0)]
    big = [[70_000, 5], [80_000, 7]]  # the small ones go as one vector
    assert layer_sums(big, [[0, 1, 2, 3]], lambda some: some) == [(0, [12, 70_000, 80_000])]


def test_overlap_needs_a_core_more_than_workers() -> None:
    assert not spare_cores([[0], [1]], ["a", "a"])
    assert spare_cores([[0, 1, 2], [0, 1, 2]], ["a", "a"])
    assert not spare_cores([[0, 1], [0]], ["a", "b"])


def test_the_slowest_of_workers_with_exponential_delays_is_the_harmonic_number() -> None:
    slowest = slowest_of(Stragglers(jitter=0.1), 100, 20_000, rng())
    harmonic = sum(1 / i for i in range(1, 101))
    assert slowest.mean() == pytest.approx(1 + 0.1 * (harmonic - 1), rel=0.005)
    assert slowest_of(Stragglers(jitter=0.1), 1, 20_000, rng()).mean() == pytest.approx(1, rel=0.005)


def test_the_slowest_of_normally_distributed_devices() -> None:
    drawn = rng().standard_normal((20_000, 512)).max(axis=1).mean()
    assert Stragglers(spread=0.01).durations(512)[-1] == pytest.approx(1 + 0.01 * drawn, rel=1e-3)
    assert Stragglers(spread=0.01).durations(512).mean() == pytest.approx(1)
    assert Stragglers().durations(3).tolist() == [1, 1, 1]


def test_runs_of_one_seed_are_equal_and_of_others_are_not() -> None:
    stragglers = Stragglers(spread=0.02, jitter=0.05)
    first, again, other = (slowest_of(stragglers, 10, 50, rng(seed)) for seed in (1, 1, 2))
    assert first.tolist() == again.tolist() != other.tolist()


def test_ten_thousand_workers_take_a_thousand_steps() -> None:
    work = StepWork(
        forward=[0.01] * 50, backward=[0.02] * 50, sums=[(layer, 0.001) for layer in range(49, -1, -1)]
    )
    slowest = slowest_of(Stragglers(spread=0.01, jitter=0.01), 10_000, 1000, rng())
    times = simulate_steps(work, slowest)
    expected = 1 + 0.01 * (sum(1 / i for i in range(1, 10_001)) - 1)  # and somewhat more by the spread
    assert times.seconds.shape == (1000,)
    assert 1.5 * expected < times.seconds.mean() < 1.5 * (expected + 0.04) + 0.001


def test_a_round_waits_for_the_sum_of_a_workers_steps() -> None:
    alone = simulate_rounds(2.0, 10, 5.0, Stragglers(), 4, 3, rng())
    assert alone.tolist() == [25.0, 25.0, 25.0]
    # Delays of single steps nearly cancel in a round: 100 steps wait less than 100 times.
    rounds = simulate_rounds(1.0, 100, 0.0, Stragglers(jitter=0.1), 50, 20, rng())
    each = slowest_of(Stragglers(jitter=0.1), 50, 2000, rng()).mean()
    assert 100 < rounds.mean() < 100 + (100 * each - 100) / 5


def test_a_round_may_have_any_number_of_steps() -> None:
    rounds = simulate_rounds(1.0, 10**12, 0.0, Stragglers(jitter=0.1), 50, 4, rng())
    assert rounds.mean() == pytest.approx(1e12, rel=1e-4)


def test_servers_that_are_not_busy_serve_without_waiting() -> None:
    steps = simulate_servers(1.0, 0.0, 0.0, Stragglers(), 8, 50, rng())
    assert steps.seconds == pytest.approx(1.0, rel=0.01)
    assert steps.waiting == pytest.approx(0, abs=1e-9)
    assert steps.staleness[0] == pytest.approx(7, abs=0.2)  # each other worker updates once meanwhile


def test_busy_servers_bound_the_rate() -> None:
    steps = simulate_servers(1.0, 0.2, 0.1, Stragglers(spread=0.02), 100, 50, rng())
    assert steps.steps_per_second == pytest.approx(1 / 0.1, rel=0.01)
    assert steps.staleness[0] == pytest.approx(99, rel=0.05)
    assert steps.seconds == pytest.approx(10, rel=0.01)


def test_one_worker_misses_no_update() -> None:
    steps = simulate_servers(1.0, 0.5, 0.1, Stragglers(jitter=0.1), 1, 200, rng())
    assert steps.staleness == (0.0, 0)
    assert steps.seconds == pytest.approx(1.5, rel=0.05)


def test_fast_workers_do_not_wait_for_slow_ones() -> None:
    """Ten thousand workers whose speeds differ: their rate is the sum of their rates."""
    stragglers = Stragglers(spread=0.05)
    steps = simulate_servers(1.0, 0.0, 1e-9, stragglers, 10_000, 50, rng())
    assert steps.steps_per_second == pytest.approx(float((1 / stragglers.durations(10_000)).sum()), rel=0.01)


def test_intervals_of_young_and_daly() -> None:
    assert young_interval(50, 3600) == pytest.approx(600)
    # The higher order lessens it by about the time of a checkpoint, and is the better one by the model.
    assert daly_interval(50, 3600) == pytest.approx(600 * (1 + (1 / 144) ** 0.5 / 3 + 1 / 144 / 9) - 50)
    assert daly_interval(100, 40) == 40
    exact = [goodput(interval, 200, 60, 3600) for interval in range(50, 3600, 10)]
    assert goodput(daly_interval(200, 3600), 200, 60, 3600) == pytest.approx(max(exact), rel=1e-4)
    assert goodput(100, 25, 60, math.inf) == pytest.approx(0.8)
    assert goodput(100, 25, 1e9, 1.0) == 0


def simulate_failures(
    work: float,
    interval: float,
    checkpoint: float,
    recovery: float,
    mean_time: float,
    rng: np.random.Generator,
) -> float:
    """The seconds that a job takes which fails at random times, and resumes from its last checkpoint.

    Args:
        work: the seconds that it would take without checkpoints and failures.
        interval: seconds of work between two checkpoints.
        checkpoint: the seconds that a checkpoint stops the work.
        recovery: the seconds from a failure until the work goes on.
        mean_time: the mean time between failures of the job; `math.inf` for none.
        rng: the random numbers.
    """
    now, done = 0.0, 0.0
    next_failure = _next_failure(0.0, mean_time, rng)
    while done < work:
        segment = min(interval, work - done)
        end = now + segment + (checkpoint if done + segment < work else 0.0)
        if end <= next_failure:
            now, done = end, done + segment
            continue
        now = next_failure + recovery  # failures during a recovery begin it again
        next_failure = _next_failure(next_failure, mean_time, rng)
        while next_failure < now:
            now = next_failure + recovery
            next_failure = _next_failure(next_failure, mean_time, rng)
    return now


def _next_failure(now: float, mean_time: float, rng: np.random.Generator) -> float:
    return math.inf if math.isinf(mean_time) else now + float(rng.exponential(mean_time))


def test_simulated_failures_agree_with_the_closed_form() -> None:
    interval, checkpoint, recovery, mean_time = 600.0, 30.0, 60.0, 3600.0
    taken = simulate_failures(3e7, interval, checkpoint, recovery, mean_time, rng())
    assert 3e7 / taken == pytest.approx(goodput(interval, checkpoint, recovery, mean_time), rel=0.01)
    assert simulate_failures(100, 10, 1, 5, math.inf, rng()) == pytest.approx(109)
