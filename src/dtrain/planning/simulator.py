"""Simulates steps of many workers by events: passes, buckets, gathers, stragglers and rounds.

Workers that wait for each other in each collective follow the slowest of them. So one timeline of a step
serves all of them, and NumPy computes it for many steps at once, from how slow the slowest worker is in each.
Workers that do not wait, under parameter servers, are simulated each. Which gradients go in one call, and
whether during the backward pass, is decided by the functions that decide it in training (`reduction_rules`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Any

import numpy as np

from dtrain.collectives import reduction_rules

_AT_ONCE = 1 << 22  # random numbers that are drawn at once
_SHORTEST = 0.5  # no device is simulated with less than this part of the mean time

Floats = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True, kw_only=True)
class Stragglers:
    """How workers differ in speed.

    Attributes:
        spread: standard deviation of the devices' speeds, which stay the same; a part of the mean speed.
        jitter: standard deviation of a worker's steps, by a delay that is exponentially distributed; a part
            of the mean step, which has the mean delay.
    """

    spread: float = 0.0
    jitter: float = 0.0

    def durations(self, workers: int) -> Floats:
        """How long each worker computes, as a part of the mean: expected values of a sorted normal sample."""
        if not self.spread:
            return np.ones(workers)
        normal = NormalDist()
        # Blom's approximation of the mean of order statistics.
        places = [normal.inv_cdf((i + 1 - 0.375) / (workers + 0.25)) for i in range(workers)]
        return np.maximum(1.0 + self.spread * np.array(places), _SHORTEST)

    def factors(self, workers: int, steps: int, rng: np.random.Generator) -> Iterator[Floats]:
        """How long each worker computes in each step, as a part of the mean; some steps at once.

        Yields:
            Arrays of shape (some steps, workers).
        """
        durations = self.durations(workers)
        rows = max(1, _AT_ONCE // workers)
        for begin in range(0, steps, rows):
            shape = (min(rows, steps - begin), workers)
            delays = self.jitter * (rng.standard_exponential(shape) - 1) if self.jitter else np.zeros(shape)
            yield durations + delays


@dataclass(frozen=True, kw_only=True)
class StepWork:
    """The work of a step of a worker, in seconds; layers in the order of the forward pass.

    Attributes:
        forward, backward: of each layer, of one micro-batch.
        sums: the reductions of gradients in their order: the first layer that must be done, and seconds.
        gathers: the gathering of each layer's weights before each of its passes; empty if workers hold them.
        overlap: whether communication is beside computation.
        update: of the optimizer.
        beside: what a step takes that is neither computation nor a collective.
        taken: processor time that communication takes from the backward pass where it overlaps.
        slowdown: how much longer computation takes while something is sent beside it, as a part of its time.
        micro_batches: passes before the gradients are reduced.
    """

    forward: Sequence[float]
    backward: Sequence[float]
    sums: Sequence[tuple[int, float]] = ()
    gathers: Sequence[float] = ()
    overlap: bool = True
    update: float = 0.0
    beside: float = 0.0
    taken: float = 0.0
    slowdown: float = 0.0
    micro_batches: int = 1

    @property
    def computation(self) -> float:
        """The seconds that a worker of mean speed computes."""
        return (sum(self.forward) + sum(self.backward)) * self.micro_batches + self.update

    @property
    def communication(self) -> float:
        """The seconds of all collectives of a step."""
        return sum(seconds for _, seconds in self.sums) + 2 * sum(self.gathers) * self.micro_batches


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """Simulated steps.

    Attributes:
        seconds: of each step.
        computation: of a worker of mean speed, of each step.
        waiting: for the slowest worker, of each step.
        exposed: communication that no computation hides, of each step.
        communication: all of it, hidden or not.
    """

    seconds: Floats
    computation: float
    waiting: Floats
    exposed: Floats
    communication: float


def reduction_groups(sizes: Sequence[int], *, grouping: str, bucket: int, overlap: bool) -> list[list[int]]:
    """Which gradients one call all-reduces, as training decides it.

    Args:
        sizes: the bytes of the gradients, in the order of the forward pass.
        grouping: "buckets", or "tensors" for each large one alone, as TensorFlow's collectives do.
        bucket: the most bytes of a bucket.
        overlap: whether gradients are reduced during the backward pass.

    Returns:
        The numbers of the gradients of each call, in the order of the calls.
    """
    if grouping == "tensors":
        by_size = reduction_rules.by_size(sizes, [None] * len(sizes))
        return [*([number] for number in reversed(by_size.large)), *by_size.small]
    if not overlap:
        return [[*range(len(sizes))]] if sizes else []
    return reduction_rules.in_buckets(sizes, bucket=bucket)


def layer_sums(
    gradients: Sequence[Sequence[int]], groups: Sequence[Sequence[int]], seconds: Callable[[list[int]], float]
) -> list[tuple[int, float]]:
    """The sums of a `StepWork`: of each group the first layer that it has gradients of, and its seconds.

    Args:
        gradients: the bytes of the gradients of each layer.
        groups: as `reduction_groups` returns them.
        seconds: the time of one call, from the bytes of what it sends: small gradients go as one vector.
    """
    layers = [layer for layer, sizes in enumerate(gradients) for _ in sizes]
    sizes = [size for of_layer in gradients for size in of_layer]
    return [
        (min(layers[number] for number in group), seconds(_packed([sizes[number] for number in group])))
        for group in groups
    ]


def _packed(sizes: Sequence[int]) -> list[int]:
    """The bytes of the vectors of one call: the small tensors packed, then each large one."""
    by_size = reduction_rules.by_size(sizes, [None] * len(sizes))
    small = [sum(sizes[number] for number in numbers) for numbers in by_size.small]
    return [*small, *(sizes[number] for number in by_size.large)]


def simulate_steps(work: StepWork, slowest: Floats) -> StepTimes:
    """Steps in which all workers wait for each other.

    Args:
        work: the work of a step.
        slowest: how long the slowest worker computes in each step, as a part of the mean.
    """
    times = _simulated(work, slowest)
    if work.overlap and work.slowdown and work.communication:
        # What is sent beside computation is known once a step is simulated; that much of it is slower.
        hidden = max(work.communication - float(times.exposed.mean()), 0.0)
        times = _simulated(replace(work, taken=work.taken + work.slowdown * hidden), slowest)
    return times


def _simulated(work: StepWork, slowest: Floats) -> StepTimes:
    line = _Timeline(work, slowest)
    for _ in range(work.micro_batches - 1):
        line.forward()
        line.backward()
    line.forward()
    line.backward(reduced=True)
    seconds = np.maximum(line.computed, line.sent) + work.update * slowest + work.beside
    waiting = work.computation * (slowest - 1)
    return StepTimes(
        seconds=seconds,
        computation=work.computation,
        waiting=waiting,
        exposed=np.maximum(seconds - work.computation - waiting, 0.0),
        communication=work.communication,
    )


class _Timeline:
    """When the slowest worker's computation and the network have done what was begun; arrays over steps."""

    def __init__(self, work: StepWork, slowest: Floats) -> None:
        self._work = work
        self._slowest = slowest
        self.computed = np.zeros_like(slowest)
        self.sent = np.zeros_like(slowest)

    def forward(self) -> None:
        self._passes([*enumerate(self._work.forward)])

    def backward(self, *, reduced: bool = False) -> None:
        """One backward pass; with its sums if `reduced`, or if weights are divided, else only later."""
        work = self._work
        layers = [*enumerate(work.backward)][::-1]
        computed = float(sum(work.backward))
        taken = work.taken / computed if reduced and work.overlap and computed else 0.0
        layers = [(layer, seconds * (1 + taken)) for layer, seconds in layers]
        waiting = deque(work.sums if reduced else ())
        if not work.overlap:
            self._passes(layers)
            for _, seconds in waiting:
                self._send(seconds)
                self.computed = self.sent
            return
        self._passes(layers, waiting)

    def _passes(
        self, layers: Sequence[tuple[int, float]], sums: deque[tuple[int, float]] | None = None
    ) -> None:
        """Passes layers in this order; begins each sum once the layer that it waits for is done."""
        gathers, sums = self._work.gathers, sums or deque()
        if gathers:
            self._send(gathers[layers[0][0]])
        for place, (layer, seconds) in enumerate(layers):
            begun = self.computed
            if gathers:
                begun = np.maximum(begun, self.sent)
                following = layers[place + 1][0] if place + 1 < len(layers) else None
                if following is not None and self._work.overlap:  # it is received while this one computes
                    self._send(gathers[following], begun)
            self.computed = begun + seconds * self._slowest
            while sums and sums[0][0] >= layer:
                self._send(sums.popleft()[1])
            if gathers and not self._work.overlap and place + 1 < len(layers):
                self._send(gathers[layers[place + 1][0]])

    def _send(self, seconds: float, after: Floats | None = None) -> None:
        """Sends something once the network is free, not before `after`, or what is computed so far."""
        self.sent = np.maximum(self.sent, self.computed if after is None else after) + seconds


def slowest_of(stragglers: Stragglers, workers: int, steps: int, rng: np.random.Generator) -> Floats:
    """How long the slowest of the workers computes in each step, as a part of the mean."""
    if not stragglers.jitter:
        return np.full(steps, stragglers.durations(workers)[-1])
    return np.concatenate([some.max(axis=1) for some in stragglers.factors(workers, steps, rng)])


def simulate_rounds(
    step_seconds: float,
    every: int,
    sum_seconds: float,
    stragglers: Stragglers,
    workers: int,
    rounds: int,
    rng: np.random.Generator,
) -> Floats:
    """Rounds of local steps, after which all workers wait for each other (DiLoCo, local SGD).

    Args:
        step_seconds: the computation of a step of mean speed.
        every: the steps of a round.
        sum_seconds: the all-reduce at the end of a round.
        stragglers, workers, rounds: as for `Stragglers.factors`.
        rng: the random numbers.

    Returns:
        The seconds of each round.
    """
    # The sum of so many exponential delays has a gamma distribution.
    delays = rng.standard_gamma(every, (rounds, workers)) - every if stragglers.jitter else 0.0
    computed = every * stragglers.durations(workers) + stragglers.jitter * delays
    return np.broadcast_to(computed, (rounds, workers)).max(axis=1) * step_seconds + sum_seconds


@dataclass(frozen=True, kw_only=True)
class ServerSteps:
    """Simulated steps under parameter servers.

    Attributes:
        steps_per_second: of all workers together.
        seconds: the mean time of a worker's step.
        waiting: the mean time of a step that a worker waits for servers that serve others.
        staleness: updates of other workers that a gradient misses: the mean, and the most.
    """

    steps_per_second: float
    seconds: float
    waiting: float
    staleness: tuple[float, int]


def simulate_servers(
    computation: float,
    exchange: float,
    served: float,
    stragglers: Stragglers,
    workers: int,
    steps: int,
    rng: np.random.Generator,
) -> ServerSteps:
    """Workers that send their updates to servers, and get the weights, without waiting for each other.

    All servers hold a part of each weight, so they serve a worker together, one after another in the order of
    arrival. A worker computes, sends its gradients, and gets the weights. In a window of time as long as no
    worker needs for its next arrival, all arrivals are known: these are served together, by NumPy.

    Args:
        computation: the computation of a step of mean speed, in seconds.
        exchange: the seconds of an exchange that no other one delays.
        served: the seconds of it in which the servers' links are occupied in each direction.
        stragglers, workers, steps: as for `Stragglers.factors`.
        rng: the random numbers.
    """
    durations = stragglers.durations(workers)
    rng.shuffle(durations)

    def drawn(count: int) -> Floats:
        if not stragglers.jitter:
            return np.zeros(count)
        return computation * stragglers.jitter * rng.standard_exponential(count)

    passes = computation * (durations - stragglers.jitter)  # without the delay, which is drawn
    fixed = max(exchange - 2 * served, 0.0)  # what delays a worker, and no other one
    shortest = 2 * served + fixed + float(passes.min())  # from the start of an exchange to the next arrival
    # Workers do not begin at the same time: after a few steps they would be spread anyway.
    arrival = passes + drawn(workers) + rng.uniform(0, computation + exchange, workers)
    pulled = np.zeros(workers)
    pulls, pushes = list[Floats](), list[Floats]()
    left, free, waited = workers * steps, 0.0, 0.0
    while left > 0:
        horizon = max(free, float(arrival.min())) + shortest
        known = np.flatnonzero(arrival <= horizon)
        known = known[np.argsort(arrival[known], kind="stable")]
        came = arrival[known]
        # Each exchange ends `served` after the one before it, or after its own arrival: a running maximum.
        places = served * np.arange(len(came))
        ended = np.maximum(np.maximum.accumulate(came - places), free) + places + served
        free = float(ended[-1])
        waited += float((ended - served - came).sum())
        pulls.append(pulled[known])
        pushes.append(ended)
        pulled[known] = ended + served
        arrival[known] = pulled[known] + fixed + passes[known] + drawn(len(known))
        left -= len(known)
    begun, pushed = np.concatenate(pulls), np.concatenate(pushes)
    order = np.sort(pushed)
    missed = np.searchsorted(order, pushed) - np.searchsorted(order, begun, side="right")
    settled = missed[len(missed) // 2 :]  # the first steps still depend on how workers began
    span = order[-1] - order[len(order) // 2]
    rate = (len(order) - 1 - len(order) // 2) / span if span > 0 else len(order) / order[-1]
    return ServerSteps(
        steps_per_second=float(rate),
        seconds=float(workers / rate),
        waiting=waited / len(pushed),
        staleness=(float(settled.mean()), int(settled.max())),
    )
