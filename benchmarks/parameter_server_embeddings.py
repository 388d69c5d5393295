"""What a step of `fit` costs as an embedding grows on parameter servers: it should not depend on its rows.

    python benchmarks/parameter_server_embeddings.py [--rows 10000,100000,1000000] [--optimizers sgd,adagrad]

One job, of a chief, a worker and a parameter server, measures all tables in turn, round after round.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import jobs

WIDTH = 64
BATCH = 32
WORDS = 20


class Fit:
    """`model.fit` of a table, a mean over the words, and one output.

    Args:
        strategy: dtrain's.
        rows: of the table; 64 wide.
        optimizer: as Keras calls it.
        steps: of one call of `fit`.
    """

    def __init__(self, strategy: Any, *, rows: int, optimizer: str, steps: int) -> None:
        import keras
        import numpy as np
        import tensorflow as tf

        keras.utils.set_random_seed(1)
        with strategy.scope():
            self._model = keras.Sequential(
                [
                    keras.Input((WORDS,), dtype="int32"),
                    keras.layers.Embedding(rows, WIDTH),
                    keras.layers.GlobalAveragePooling1D(),
                    keras.layers.Dense(1),
                ]
            )
            self._model.compile(optimizer=optimizer, loss="mse")
        random = np.random.default_rng(0)
        words = random.integers(0, rows, (steps * BATCH, WORDS)).astype("int32")
        values = random.normal(size=(steps * BATCH, 1)).astype("float32")
        self._steps = steps
        self._data = tf.data.Dataset.from_tensor_slices((words, values)).batch(BATCH).prefetch(8)
        self._model.fit(self._data, verbose=0)  # traces

    def __call__(self) -> float:
        """Seconds a step, from the call of `fit` to its return."""
        start = time.perf_counter()
        self._model.fit(self._data, verbose=0)
        return (time.perf_counter() - start) / self._steps


def serve(address: str) -> None:
    """The job, in each of its processes."""
    import dtrain

    strategy = dtrain.ParameterServerStrategy()
    models: dict[str, Fit] = {}

    def measure(what: str, steps: int) -> float:
        if what not in models:
            optimizer, rows = what.split("/")
            models[what] = Fit(strategy, rows=int(rows), optimizer=optimizer, steps=steps)
        return models[what]()

    jobs.answer(address, measure)


def main() -> None:
    """Starts the job, measures round after round, prints a table and writes JSON."""
    parser = argparse.ArgumentParser(description="a step of fit as an embedding grows")
    parser.add_argument("--rows", default="10000,100000,1000000", help="separated by commas")
    parser.add_argument("--optimizers", default="sgd,adagrad", help="separated by commas")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=200, help="of a round")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--servers", type=int, default=1)
    parser.add_argument("--out", help="where the JSON goes instead of the screen")
    parser.add_argument("--side", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.side:
        serve(arguments.side[1])
        return
    found = {**jobs.circumstances(), "workers": arguments.workers, "servers": arguments.servers}
    rows = [int(text) for text in arguments.rows.split(",")]
    optimizers = arguments.optimizers.split(",")
    ways = [f"{optimizer}/{size}" for optimizer in optimizers for size in rows]
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    job = jobs.Job(__file__, "dtrain", workers=arguments.workers, servers=arguments.servers)
    try:
        for number in range(arguments.rounds + 1):
            for way in ways if number % 2 else ways[::-1]:
                taken = job.measure(way, arguments.steps)
                if number:  # the first round warms up
                    seconds[way].append(taken)
    finally:
        job.close()

    found["milliseconds_a_step"] = {way: jobs.summary(taken) for way, taken in seconds.items()}
    found["times_slower_than_the_smallest"] = {
        f"{optimizer}/{size}": jobs.ratio(seconds[f"{optimizer}/{size}"], seconds[f"{optimizer}/{rows[0]}"])
        for optimizer in optimizers
        for size in rows[1:]
    }
    print_table(found)
    jobs.write(found, arguments.out)


def print_table(found: dict[str, Any]) -> None:
    """A row a table of the model."""
    print("| optimizer | rows | ms a step | min to max | times the smallest |\n|---|---|---|---|---|")
    for way, taken in found["milliseconds_a_step"].items():
        optimizer, rows = way.split("/")
        times = found["times_slower_than_the_smallest"].get(way)
        slower = f"{times['median']:.2f} ({times['min']:.2f} to {times['max']:.2f})" if times else ""
        print(
            f"| {optimizer} | {int(rows):,} | {taken['median']:.3f} | {taken['min']:.3f} to "
            f"{taken['max']:.3f} | {slower} |"
        )


if __name__ == "__main__":
    main()
