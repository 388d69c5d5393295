"""A small or a big model on parameter servers: `fit` under dtrain beside the loop of stock TensorFlow.

    python benchmarks/parameter_server.py [--network small] [--rounds 7] [--steps 400] [--out FILE.json]
    python benchmarks/parameter_server.py --overlap [--delay 2] [--rate 10] ...

Two jobs, each a chief, two workers and one parameter server, measure in turn. The stock one never imports
dtrain. With `--overlap` all are dtrain's, one with `overlap=True`; with `--delay` or `--rate` the servers
are on a network of their own, which needs root.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from typing import Any

import far_network
import jobs
from networks import NETWORKS
from plain_loop import PlainLoop

STEPS_A_CALL = 10
STEPS_OF_DATA = 200

# What is measured, and in which job. `fit` always keeps the mean of the loss.
WAYS = {
    "fit": ("dtrain", "model.fit"),
    "dtrain_loop": ("dtrain", "ClusterCoordinator, Keras SGD"),
    "keras": ("stock", "ClusterCoordinator, Keras SGD"),
    "keras_loss": ("stock", "ClusterCoordinator, Keras SGD, Keras mean of the loss"),
    "by_hand": ("stock", "ClusterCoordinator, assign_sub by hand"),
    "ten_by_hand": ("stock", f"the same, {STEPS_A_CALL} steps a call"),
}
# Each block reads the weights once more. Where steps are long, only overlap makes blocks of several.
OVERLAP_WAYS = {
    "fit": ("long_blocks", "model.fit, blocks as long as with overlap"),
    "fit_overlap": ("overlapped", "model.fit, overlap=True"),
    "fit_usual": ("usual", "model.fit"),
}
LONG_BLOCK = 8  # steps
# How many times more steps are made where a step is short, so that rounds are about as long.
LONGER = {"fit": 5, "fit_overlap": 5, "fit_usual": 5, "ten_by_hand": 2}


class Trained:
    """What is trained: a network and its data.

    Args:
        name: in `networks.py`.
    """

    def __init__(self, name: str) -> None:
        self._network = NETWORKS[name]
        self.batch = self._network.batch

    def model(self) -> Any:
        """A built Keras model."""
        return self._network.keras()

    def loss(self) -> Any:
        """What `compile` takes."""
        return self._network.keras_loss()

    def data(self, steps: int) -> Any:
        """So many batches."""
        import tensorflow as tf

        arrays = self._network.data(steps * self.batch)
        return tf.data.Dataset.from_tensor_slices(arrays).batch(self.batch, drop_remainder=True)

    def endless(self) -> Any:
        """The data of one worker, as often as it asks."""
        return self.data(STEPS_OF_DATA).repeat().prefetch(8)


class Fit:
    """`model.fit` as a user writes it."""

    def __init__(self, strategy: Any, trained: Trained) -> None:
        import keras

        self._trained = trained
        with strategy.scope():
            self._model = trained.model()
            self._model.compile(optimizer=keras.optimizers.SGD(0.01), loss=trained.loss())
        self._data: dict[int, Any] = {}
        self._waited: list[float] = []

    def __call__(self, steps: int) -> float:
        """Seconds a step, from the call of `fit` to its return."""
        if steps not in self._data:
            self._data[steps] = self._trained.data(steps).prefetch(8)
            self._model.fit(self._data[steps], verbose=0)  # traces
        before = int(self._model.optimizer.iterations)
        times = self._model.train_function.times
        start = time.perf_counter()
        self._model.fit(self._data[steps], verbose=0)
        seconds = time.perf_counter() - start
        made = int(self._model.optimizer.iterations) - before
        if made != steps:
            raise RuntimeError(f"{made} of {steps} steps were made")
        now = self._model.train_function.times
        self._waited.append((now.exchange - times.exchange) / (now.seconds - times.seconds))
        return seconds / steps

    def waited(self) -> float:
        """The share of blocks in which a worker only waited for the servers, the median of rounds."""
        return statistics.median(self._waited)


def loop(strategy: Any, trained: Trained, optimizer: str | None, **options: Any) -> PlainLoop:
    """The plain loop on this model."""
    return PlainLoop(strategy, trained.model, trained.endless, optimizer=optimizer, **options)


def serve(side: str, address: str, network: str) -> None:
    """One of the two jobs, in each of its processes."""
    trained = Trained(network)
    ways: dict[str, Any]
    if side in ("long_blocks", "overlapped", "usual"):
        import dtrain

        if side == "long_blocks":
            make_blocks_long()
        fit = Fit(dtrain.ParameterServerStrategy(overlap=side == "overlapped"), trained)
        ways = {way: fit for way, (other, _) in OVERLAP_WAYS.items() if other == side}
        ways["waited"] = lambda _: fit.waited()
    elif side == "dtrain":
        import dtrain

        strategy = dtrain.ParameterServerStrategy()
        ways = {"fit": Fit(strategy, trained), "dtrain_loop": loop(strategy, trained, "sgd")}
    else:
        strategy = jobs.stock_strategy()
        ways = {
            "keras": loop(strategy, trained, "sgd"),
            "keras_loss": loop(strategy, trained, "sgd", keeps_loss=True),
            "by_hand": loop(strategy, trained, None),
            "ten_by_hand": loop(strategy, trained, None, steps_a_call=STEPS_A_CALL),
        }
    jobs.answer(address, lambda what, steps: ways[what](steps))


def make_blocks_long() -> None:
    """Has a session make blocks as long as with overlap; nothing else changes."""
    from dtrain.keras_engine.asynchronous.session import Session

    wished = Session._wished_steps

    def longer(self: Any) -> int:
        steps = LONG_BLOCK
        if self._left is not None and self.workers > 1:
            steps = min(steps, -(-self._left // (2 * self.workers)))
        return max(wished(self), steps) if self.step_seconds is not None else 1

    Session._wished_steps = longer


def main() -> None:
    """Starts both jobs, measures round after round, prints a table and writes JSON."""
    parser = argparse.ArgumentParser(description="fit under dtrain beside stock TensorFlow's own loop")
    parser.add_argument("--network", choices=NETWORKS, default="small")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=400, help="a round of the plain loop; fit makes more")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--servers", type=int, default=1)
    parser.add_argument("--overlap", action="store_true", help="fit with and without overlap")
    parser.add_argument(
        "--delay", type=float, default=0.0, help="milliseconds each way between it and servers"
    )
    parser.add_argument("--rate", type=float, default=0.0, help="Gbit/s each way between it and servers")
    parser.add_argument("--out", help="where the JSON goes instead of the screen")
    parser.add_argument("--side", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.side:
        serve(*arguments.side, arguments.network)
        return
    ways = OVERLAP_WAYS if arguments.overlap else WAYS
    found = {**jobs.circumstances(), "workers": arguments.workers, "servers": arguments.servers}
    found["network"] = NETWORKS[arguments.network].about
    if arguments.delay or arguments.rate:
        found["link"] = {"delay_milliseconds": arguments.delay, "gigabits_a_second": arguments.rate}
    started: dict[str, jobs.Job] = {}
    try:
        for side in dict.fromkeys(side for side, _ in ways.values()):
            started[side] = start(side, arguments)
        seconds = measure(ways, started, arguments.rounds, arguments.steps)
        if arguments.overlap:
            found["share_waited"] = {side: job.measure("waited", 1).wall for side, job in started.items()}
    finally:
        for job in started.values():
            job.close()

    found["milliseconds_a_step"] = {way: jobs.summary(taken) for way, taken in seconds.items()}
    found["times_faster_is_fit"] = {
        way: jobs.ratio(taken, seconds["fit"]) for way, taken in seconds.items() if way != "fit"
    }
    print_table(found, ways)
    jobs.write(found, arguments.out)


def start(side: str, arguments: argparse.Namespace) -> jobs.Job:
    """One of the jobs, where it is asked for with its servers far away."""
    size = {"workers": arguments.workers, "servers": arguments.servers}
    more = ["--network", arguments.network]
    if not arguments.delay and not arguments.rate:
        return jobs.Job(__file__, side, **size, more=more)

    def command(address: str) -> list[str]:
        program = [sys.executable, __file__, *more, "--side", side, address]
        return far_network.command(program, **size, delay=arguments.delay, rate=arguments.rate)

    return jobs.Job(__file__, side, **size, command=command)


def measure(
    ways: dict[str, tuple[str, str]], started: dict[str, jobs.Job], rounds: int, steps: int
) -> dict[str, list[jobs.Taken]]:
    """What a step takes, by way and round."""
    seconds: dict[str, list[jobs.Taken]] = {way: [] for way in ways}
    for number in range(rounds + 1):
        order = list(ways) if number % 2 else list(ways)[::-1]
        for way in order:
            taken = started[ways[way][0]].measure(way, steps * LONGER.get(way, 1))
            if number:  # the first round warms up
                seconds[way].append(taken)
    return seconds


def print_table(found: dict[str, Any], ways: dict[str, tuple[str, str]]) -> None:
    """A row a way."""
    print(
        "| | | ms a step | min to max | steps/s | processor ms a step | fit is faster by "
        "| in processor time |\n"
        "|---|---|---|---|---|---|---|---|"
    )
    for way, (side, name) in ways.items():
        taken = found["milliseconds_a_step"][way]
        times = found["times_faster_is_fit"].get(way)
        faster = f"{times['median']:.1f} ({times['min']:.1f} to {times['max']:.1f})" if times else ""
        print(
            f"| {side} | {name} | {taken['median']:.2f} | {taken['min']:.2f} to {taken['max']:.2f} "
            f"| {1e3 / taken['median']:.0f} | {taken['processor']:.2f} | {faster} "
            f"| {format(times['processor'], '.1f') if times else ''} |"
        )


if __name__ == "__main__":
    main()
