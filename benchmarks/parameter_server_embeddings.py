"""What a step costs as an embedding grows on parameter servers, under dtrain and under stock TensorFlow.

    python benchmarks/parameter_server_embeddings.py [--rows 10000,100000,1000000]
        [--optimizers sgd,adagrad,lazy_adam,adam] [--rounds 5] [--out FILE.json]

Two jobs, each of a chief, a worker and a parameter server, measure all tables in turn: `fit` under dtrain,
and the plain `ClusterCoordinator` loop, which never imports dtrain. `lazy_adam` is dtrain's alone.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import jobs
from plain_loop import PlainLoop

WIDTH = 64
BATCH = 32
WORDS = 20


def make_model(rows: int) -> Any:
    """A table, the mean over a text's words, and one output."""
    import keras

    keras.utils.set_random_seed(1)
    return keras.Sequential(
        [
            keras.Input((WORDS,), dtype="int32"),
            keras.layers.Embedding(rows, WIDTH),
            keras.layers.GlobalAveragePooling1D(),
            keras.layers.Dense(1),
        ]
    )


def make_data(rows: int, steps: int) -> Any:
    """Batches of texts and a number for each."""
    import numpy as np
    import tensorflow as tf

    random = np.random.default_rng(0)
    words = random.integers(0, rows, (steps * BATCH, WORDS)).astype("int32")
    values = random.normal(size=(steps * BATCH, 1)).astype("float32")
    return tf.data.Dataset.from_tensor_slices((words, values)).batch(BATCH)


class Fit:
    """`model.fit` as a user writes it."""

    def __init__(self, strategy: Any, *, rows: int, optimizer: str, steps: int) -> None:
        from dtrain.optim import LazyAdam

        with strategy.scope():
            self._model = make_model(rows)
            self._model.compile(optimizer=LazyAdam() if optimizer == "lazy_adam" else optimizer, loss="mse")
        self._data = make_data(rows, steps).prefetch(8)
        self._model.fit(self._data, verbose=0)  # traces

    def __call__(self, steps: int) -> float:
        """Seconds a step, from the call of `fit` to its return."""
        start = time.perf_counter()
        self._model.fit(self._data, verbose=0)
        return (time.perf_counter() - start) / steps


def serve(side: str, address: str) -> None:
    """One of the two jobs, in each of its processes."""
    measures: dict[str, Any] = {}
    if side == "dtrain":
        import dtrain

        strategy = dtrain.ParameterServerStrategy()
    else:
        strategy = jobs.stock_strategy()

    def make(optimizer: str, rows: int, steps: int) -> Any:
        if side == "dtrain":
            return Fit(strategy, rows=rows, optimizer=optimizer, steps=steps)
        return PlainLoop(
            strategy,
            lambda: make_model(rows),
            lambda: make_data(rows, 100).repeat().prefetch(8),
            optimizer=optimizer,
        )

    def measure(what: str, steps: int) -> float:
        if what not in measures:
            optimizer, rows = what.split("/")
            measures[what] = make(optimizer, int(rows), steps)
        return measures[what](steps)

    jobs.answer(address, measure)


def main() -> None:
    """Starts both jobs, measures round after round, prints a table and writes JSON."""
    parser = argparse.ArgumentParser(description="a step as an embedding grows")
    parser.add_argument("--rows", default="10000,100000,1000000", help="separated by commas")
    parser.add_argument("--optimizers", default="sgd,adagrad,lazy_adam", help="separated by commas")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=500, help="of a round of fit; stock makes a tenth")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--servers", type=int, default=1)
    parser.add_argument("--out", help="where the JSON goes instead of the screen")
    parser.add_argument("--side", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.side:
        serve(*arguments.side)
        return
    size = {"workers": arguments.workers, "servers": arguments.servers}
    found = {**jobs.circumstances(), **size}
    rows = [int(text) for text in arguments.rows.split(",")]
    ways = [
        (side, f"{optimizer}/{number}")
        for optimizer in arguments.optimizers.split(",")
        for side in ("dtrain", "stock")
        for number in rows
        if (side, optimizer) != ("stock", "lazy_adam")
    ]
    seconds: dict[tuple[str, str], list[jobs.Taken]] = {way: [] for way in ways}
    started: dict[str, jobs.Job] = {}
    try:
        for side in ("dtrain", "stock"):
            started[side] = jobs.Job(__file__, side, **size)
        for number in range(arguments.rounds + 1):
            for side, what in ways if number % 2 else ways[::-1]:
                steps = arguments.steps if side == "dtrain" else max(1, arguments.steps // 10)
                taken = started[side].measure(what, steps)
                if number:  # the first round warms up
                    seconds[side, what].append(taken)
    finally:
        for job in started.values():
            job.close()

    found["milliseconds_a_step"] = {
        f"{side}/{what}": jobs.summary(seconds[side, what]) for side, what in ways
    }
    found["times_the_smallest_table"] = {
        f"{side}/{what}": jobs.ratio(seconds[side, what], seconds[side, f"{what.split('/')[0]}/{rows[0]}"])
        for side, what in ways
        if not what.endswith(f"/{rows[0]}")
    }
    print_table(found)
    jobs.write(found, arguments.out)


def print_table(found: dict[str, Any]) -> None:
    """A row a table of the model."""
    print(
        "| optimizer | | rows | ms a step | min to max | processor ms a step | times the smallest "
        "| in processor time |\n|---|---|---|---|---|---|---|---|"
    )
    for way, taken in found["milliseconds_a_step"].items():
        side, optimizer, rows = way.split("/")
        times = found["times_the_smallest_table"].get(way)
        slower = f"{times['median']:.2f} ({times['min']:.2f} to {times['max']:.2f})" if times else ""
        print(
            f"| {optimizer} | {side} | {int(rows):,} | {taken['median']:.2f} | {taken['min']:.2f} to "
            f"{taken['max']:.2f} | {taken['processor']:.2f} | {slower} "
            f"| {format(times['processor'], '.2f') if times else ''} |"
        )


if __name__ == "__main__":
    main()
