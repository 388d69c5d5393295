"""A small model on parameter servers: `fit` under dtrain beside the loop of stock TensorFlow.

    python benchmarks/parameter_server.py [--rounds 7] [--steps 400] [--out FILE.json]

Two jobs, each a chief, two workers and one parameter server, measure in turn. The stock one never imports
dtrain.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import jobs
from plain_loop import PlainLoop

BATCH = 32
STEPS_A_CALL = 10
EXAMPLES_A_WORKER = 200 * BATCH

# What is measured, and in which job. `fit` always keeps the mean of the loss.
WAYS = {
    "fit": ("dtrain", "model.fit"),
    "dtrain_loop": ("dtrain", "ClusterCoordinator, Keras SGD"),
    "keras": ("stock", "ClusterCoordinator, Keras SGD"),
    "keras_loss": ("stock", "ClusterCoordinator, Keras SGD, Keras mean of the loss"),
    "by_hand": ("stock", "ClusterCoordinator, assign_sub by hand"),
    "ten_by_hand": ("stock", f"the same, {STEPS_A_CALL} steps a call"),
}
# How many times more steps are made where a step is short, so that rounds are about as long.
LONGER = {"fit": 5, "ten_by_hand": 2}


def make_model() -> Any:
    """10-64-64-1."""
    import keras

    keras.utils.set_random_seed(1)
    return keras.Sequential(
        [
            keras.Input((10,)),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(1),
        ]
    )


def make_data(examples: int) -> Any:
    """Batches of points and a linear function of them."""
    import numpy as np
    import tensorflow as tf

    random = np.random.default_rng(0)
    x = random.normal(size=(examples, 10)).astype("float32")
    y = x @ random.normal(size=(10, 1)).astype("float32")
    return tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH, drop_remainder=True)


def make_endless_data() -> Any:
    """The data of one worker, as often as it asks."""
    return make_data(EXAMPLES_A_WORKER).repeat().prefetch(8)


class Fit:
    """`model.fit` as a user writes it."""

    def __init__(self, strategy: Any) -> None:
        import keras

        with strategy.scope():
            self._model = make_model()
            self._model.compile(optimizer=keras.optimizers.SGD(0.01), loss="mse")
        self._data: dict[int, Any] = {}

    def __call__(self, steps: int) -> float:
        """Seconds a step, from the call of `fit` to its return."""
        if steps not in self._data:
            self._data[steps] = make_data(steps * BATCH).prefetch(8)
            self._model.fit(self._data[steps], verbose=0)  # traces
        before = int(self._model.optimizer.iterations)
        start = time.perf_counter()
        self._model.fit(self._data[steps], verbose=0)
        seconds = time.perf_counter() - start
        made = int(self._model.optimizer.iterations) - before
        if made != steps:
            raise RuntimeError(f"{made} of {steps} steps were made")
        return seconds / steps


def loop(strategy: Any, optimizer: str | None, **options: Any) -> PlainLoop:
    """The plain loop on this model."""
    return PlainLoop(strategy, make_model, make_endless_data, optimizer=optimizer, **options)


def serve(side: str, address: str) -> None:
    """One of the two jobs, in each of its processes."""
    if side == "dtrain":
        import dtrain

        strategy = dtrain.ParameterServerStrategy()
        ways = {"fit": Fit(strategy), "dtrain_loop": loop(strategy, "sgd")}
    else:
        strategy = jobs.stock_strategy()
        ways = {
            "keras": loop(strategy, "sgd"),
            "keras_loss": loop(strategy, "sgd", keeps_loss=True),
            "by_hand": loop(strategy, None),
            "ten_by_hand": loop(strategy, None, steps_a_call=STEPS_A_CALL),
        }
    jobs.answer(address, lambda what, steps: ways[what](steps))


def main() -> None:
    """Starts both jobs, measures round after round, prints a table and writes JSON."""
    parser = argparse.ArgumentParser(description="fit under dtrain beside stock TensorFlow's own loop")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=400, help="a round of the plain loop; fit makes more")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--servers", type=int, default=1)
    parser.add_argument("--out", help="where the JSON goes instead of the screen")
    parser.add_argument("--side", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.side:
        serve(*arguments.side)
        return
    found = {**jobs.circumstances(), "workers": arguments.workers, "servers": arguments.servers}
    started: dict[str, jobs.Job] = {}
    seconds: dict[str, list[jobs.Taken]] = {way: [] for way in WAYS}
    try:
        for side in ("dtrain", "stock"):
            size = {"workers": arguments.workers, "servers": arguments.servers}
            started[side] = jobs.Job(__file__, side, **size)
        for number in range(arguments.rounds + 1):
            order = list(WAYS) if number % 2 else list(WAYS)[::-1]
            for way in order:
                steps = arguments.steps * LONGER.get(way, 1)
                taken = started[WAYS[way][0]].measure(way, steps)
                if number:  # the first round warms up
                    seconds[way].append(taken)
    finally:
        for job in started.values():
            job.close()

    found["milliseconds_a_step"] = {way: jobs.summary(taken) for way, taken in seconds.items()}
    found["times_faster_is_fit"] = {
        way: jobs.ratio(taken, seconds["fit"]) for way, taken in seconds.items() if way != "fit"
    }
    print_table(found)
    jobs.write(found, arguments.out)


def print_table(found: dict[str, Any]) -> None:
    """A row a way."""
    print(
        "| | | ms a step | min to max | steps/s | processor ms a step | fit is faster by "
        "| in processor time |\n"
        "|---|---|---|---|---|---|---|---|"
    )
    for way, (side, name) in WAYS.items():
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
