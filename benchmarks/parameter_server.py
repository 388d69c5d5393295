"""A small or a big model on parameter servers: `fit` under dtrain beside the loop of stock TensorFlow.

    python benchmarks/parameter_server.py [--network small] [--rounds 7] [--steps 400] [--out FILE.json]
    python benchmarks/parameter_server.py --overlap [--delay 2] [--rate 10] ...
    python benchmarks/parameter_server.py --job-sizes 1 4 ...
    python benchmarks/parameter_server.py --embeddings 10000 100000 [--optimizers sgd lazy_adam] ...

Two jobs, each a chief, two workers and one parameter server, measure in turn. The stock one never imports
dtrain. With `--overlap` all are dtrain's, one with `overlap=True`; with `--delay` or `--rate` the servers
are on a network of their own, which needs root. With `--job-sizes` there are jobs of so many workers, and
what counts is the processor time of all their processes together. With `--embeddings` a model with a table
of so many rows is trained, each size with each optimizer; `lazy_adam` is dtrain's alone.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
import time
from collections.abc import Callable
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
# `fit` in one epoch and in short ones, whose beginnings and ends count more.
SIZE_WAYS = {name: WAYS[name] for name in ("fit", "keras", "ten_by_hand")} | {
    "fit_short": ("dtrain", "model.fit, epochs of 240 steps")
}
SHORT_EPOCH = 240  # steps
# What the ways but `fit` are.
LOOPS: dict[str, dict[str, Any]] = {
    "dtrain_loop": {"optimizer": "sgd"},
    "keras": {"optimizer": "sgd"},
    "keras_loss": {"optimizer": "sgd", "keeps_loss": True},
    "by_hand": {"optimizer": None},
    "ten_by_hand": {"optimizer": None, "steps_a_call": STEPS_A_CALL},
}
LONG_BLOCK = 8  # steps
# How many times more steps are made where a step is short, so that rounds are about as long.
LONGER = {"fit": 5, "fit_overlap": 5, "fit_usual": 5, "fit_short": 6, "ten_by_hand": 2}


class Trained:
    """What is trained: a network and its data.

    Args:
        name: in `networks.py`.
    """

    optimizer: Any = "sgd"

    def __init__(self, name: str) -> None:
        self._network = NETWORKS[name]
        self.batch = self._network.batch

    def model(self) -> Any:
        """A built Keras model."""
        return self._network.keras()

    def loss(self) -> Any:
        """What `compile` takes."""
        return self._network.keras_loss()

    def arrays(self, examples: int) -> tuple[Any, Any]:
        """Inputs and targets, the same every time."""
        return self._network.data(examples)

    def data(self, steps: int) -> Any:
        """So many batches."""
        import tensorflow as tf

        arrays = self.arrays(steps * self.batch)
        return tf.data.Dataset.from_tensor_slices(arrays).batch(self.batch, drop_remainder=True)

    def endless(self) -> Any:
        """The data of one worker, as often as it asks."""
        return self.data(STEPS_OF_DATA).repeat().prefetch(8)


class Embedding(Trained):
    """A table of 64 columns, the mean over the 20 words of a text, and one output.

    Args:
        rows: of the table.
        optimizer: as Keras calls it, or "lazy_adam".
    """

    words, width, batch = 20, 64, 32

    def __init__(self, rows: int, optimizer: str) -> None:
        self._rows, self.optimizer = rows, optimizer

    def model(self) -> Any:
        """A built Keras model."""
        import keras

        keras.utils.set_random_seed(1)
        layers = [keras.Input((self.words,), dtype="int32"), keras.layers.Embedding(self._rows, self.width)]
        return keras.Sequential([*layers, keras.layers.GlobalAveragePooling1D(), keras.layers.Dense(1)])

    def loss(self) -> Any:
        """What `compile` takes."""
        return "mse"

    def arrays(self, examples: int) -> tuple[Any, Any]:
        """Texts, and a number for each."""
        import numpy as np

        random = np.random.default_rng(0)
        words = random.integers(0, self._rows, (examples, self.words)).astype("int32")
        return words, random.normal(size=(examples, 1)).astype("float32")


class Fit:
    """`model.fit` as a user writes it.

    Args:
        strategy: the strategy to train under.
        trained: the model and its data.
        epoch: steps of an epoch; None makes all steps in one epoch.
    """

    def __init__(self, strategy: Any, trained: Trained, epoch: int | None = None) -> None:
        import keras

        from dtrain.optim import LazyAdam

        self._trained = trained
        self._epoch = epoch
        name = trained.optimizer
        with strategy.scope():
            optimizer = LazyAdam() if name == "lazy_adam" else keras.optimizers.get(name)
            self._model = trained.model()
            self._model.compile(optimizer=optimizer, loss=trained.loss())
        self._data: dict[int, Any] = {}
        self._waited: list[float] = []

    def __call__(self, steps: int) -> float:
        """Seconds a step, from the call of `fit` to its return."""
        epoch = self._epoch or steps
        epochs = max(1, steps // epoch)
        if epoch not in self._data:
            self._data[epoch] = self._trained.data(epoch).prefetch(8)
            self._model.fit(self._data[epoch], verbose=0)  # traces
        before = int(self._model.optimizer.iterations)
        before_fit = self._model.train_function.totals
        start = time.perf_counter()
        self._model.fit(self._data[epoch], epochs=epochs, verbose=0)
        seconds = time.perf_counter() - start
        made = int(self._model.optimizer.iterations) - before
        if made != epochs * epoch:
            raise RuntimeError(f"{made} of {epochs * epoch} steps were made")
        now = self._model.train_function.totals
        self._waited.append((now.exchange - before_fit.exchange) / (now.seconds - before_fit.seconds))
        return seconds / made

    def waited(self) -> float:
        """The share of blocks in which a worker only waited for the servers, the median of rounds."""
        return statistics.median(self._waited)


def loop(strategy: Any, trained: Trained, optimizer: str | None, **options: Any) -> PlainLoop:
    """The plain loop on this model."""
    return PlainLoop(strategy, trained.model, trained.endless, optimizer=optimizer, **options)


def serve(side: str, address: str, network: str) -> None:
    """One of the jobs, in each of its processes."""
    measures: dict[str, Any] = {}
    side = side.partition("@")[0]
    if side == "stock":
        strategy = jobs.stock_strategy()
    else:
        import dtrain

        if side == "long_blocks":
            make_blocks_long()
        strategy = dtrain.ParameterServerStrategy(overlap=side == "overlapped")

    def make(what: str) -> Any:
        if what in LOOPS:
            return loop(strategy, Trained(network), **LOOPS[what])
        if what == "fit_short":
            return Fit(strategy, Trained(network), SHORT_EPOCH)
        if what in (*WAYS, *OVERLAP_WAYS):
            return Fit(strategy, Trained(network))
        optimizer, rows = what.split("/")
        trained = Embedding(int(rows), optimizer)
        return loop(strategy, trained, optimizer) if side == "stock" else Fit(strategy, trained)

    def measure(what: str, steps: int) -> float:
        if what == "waited":
            return next(iter(measures.values())).waited()
        if what not in measures:
            measures[what] = make(what)
        return measures[what](steps)

    jobs.answer(address, measure)


def make_blocks_long() -> None:
    """Makes blocks as long as with overlap; nothing else changes."""
    from dtrain.engine.parameter_server.block_sizes import BlockSizes

    BlockSizes._fewest = lambda self: LONG_BLOCK


def main() -> None:
    """Starts the jobs, measures round after round, prints a table and writes JSON."""
    parser = jobs.parser("fit under dtrain beside stock TensorFlow's own loop", rounds=7)
    parser.add_argument("--network", choices=NETWORKS, default="small")
    parser.add_argument("--steps", type=int, default=400, help="a round of the plain loop; fit makes more")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--servers", type=int, default=1)
    parser.add_argument("--overlap", action="store_true", help="fit with and without overlap")
    parser.add_argument("--job-sizes", type=int, nargs="+", metavar="WORKERS", help="jobs to compare")
    parser.add_argument("--embeddings", type=int, nargs="+", metavar="ROWS", help="tables to train")
    parser.add_argument("--optimizers", nargs="+", default=["sgd", "adagrad", "lazy_adam"], help="of tables")
    parser.add_argument(
        "--delay", type=float, default=0.0, help="milliseconds each way between it and servers"
    )
    parser.add_argument("--rate", type=float, default=0.0, help="Gbit/s each way between it and servers")
    arguments = parser.parse_args()
    if arguments.side:
        serve(*arguments.side, arguments.network)
        return
    ways = OVERLAP_WAYS if arguments.overlap else WAYS
    bases = dict.fromkeys(ways, "fit")
    if arguments.embeddings:
        ways = embedding_ways(arguments.embeddings, arguments.optimizers)
        bases = {way: f"{way.rpartition('/')[0]}/{arguments.embeddings[0]}" for way in ways}
    elif arguments.job_sizes:
        ways = size_ways(arguments.job_sizes)
        bases = {way: f"{way.partition('@')[0]}@{arguments.job_sizes[0]}" for way in ways}
    results = {
        **jobs.circumstances(),
        "workers": arguments.job_sizes or arguments.workers,
        "servers": arguments.servers,
    }
    if not arguments.embeddings:
        results["network"] = NETWORKS[arguments.network].about
    if arguments.delay or arguments.rate:
        results["link"] = {"delay_milliseconds": arguments.delay, "gigabits_a_second": arguments.rate}
    sides = dict.fromkeys(side for side, _ in ways.values())
    with jobs.opened({side: starting(side, arguments) for side in sides}) as started:
        taken = jobs.turns(
            {
                way: functools.partial(
                    started[side].measure,
                    way.removeprefix("stock/").partition("@")[0],
                    steps_of(way, arguments.steps),
                )
                for way, (side, _) in ways.items()
            },
            arguments.rounds,
        )
        if arguments.overlap:
            results["share_waited"] = {side: job.measure("waited", 1).wall for side, job in started.items()}
    results["milliseconds_a_step"] = {way: jobs.summary(measurements) for way, measurements in taken.items()}
    of_first = arguments.embeddings or arguments.job_sizes
    results["times_the_first" if of_first else "times_faster_is_fit"] = ratios = {
        way: jobs.ratio(measurements, taken[bases[way]])
        for way, measurements in taken.items()
        if way != bases[way]
    }
    print_table(results["milliseconds_a_step"], ratios, ways)
    jobs.write(results, arguments.out)


def embedding_ways(rows: list[int], optimizers: list[str]) -> dict[str, tuple[str, str]]:
    """Each table with each optimizer, by both sides."""
    return {
        f"{'stock/' if side == 'stock' else ''}{optimizer}/{number}": (side, f"{optimizer}, {number:,} rows")
        for optimizer in optimizers
        for side in ("dtrain", "stock")
        for number in rows
        if (side, optimizer) != ("stock", "lazy_adam")
    }


def size_ways(sizes: list[int]) -> dict[str, tuple[str, str]]:
    """Each way in a job of each size."""
    return {
        f"{way}@{workers}": (f"{side}@{workers}", f"{name}, {workers} workers")
        for way, (side, name) in SIZE_WAYS.items()
        for workers in sizes
    }


def steps_of(way: str, steps: int) -> int:
    """How many steps a round of a way has: stock TensorFlow's are slow where a table is large."""
    return max(1, steps // 10) if way.startswith("stock/") else steps * LONGER.get(way.partition("@")[0], 1)


def starting(side: str, arguments: argparse.Namespace) -> Callable[[], jobs.Job]:
    """What starts one of the jobs, where it is asked for with its servers far away."""
    size = {"workers": int(side.partition("@")[2] or arguments.workers), "servers": arguments.servers}
    more = ["--network", arguments.network]
    if not arguments.delay and not arguments.rate:
        return lambda: jobs.Job(__file__, side, **size, more=more)

    def command(address: str) -> list[str]:
        program = [sys.executable, __file__, *more, "--side", side, address]
        return far_network.command(program, **size, delay=arguments.delay, rate=arguments.rate)

    return lambda: jobs.Job(__file__, side, **size, command=command)


def print_table(times: dict[str, Any], ratios: dict[str, Any], ways: dict[str, tuple[str, str]]) -> None:
    """A row a way; ratios are those to `fit`, to the smallest table or to the first job."""
    rows = []
    for way, (side, name) in ways.items():
        taken, ratio = times[way], ratios.get(way)
        row = [side, name, f"{taken['median']:.2f}", f"{taken['min']:.2f} to {taken['max']:.2f}"]
        row += [f"{1e3 / taken['median']:.0f}", f"{taken['processor']:.2f}"]
        if ratio:
            row += [jobs.spread(ratio, 2), f"{ratio['processor']:.2f}" if "processor" in ratio else ""]
        rows.append(row)
    heads = ["", "", "ms a step", "min to max", "steps/s", "processor ms a step", "ratio"]
    jobs.print_table([*heads, "in processor time"], rows)


if __name__ == "__main__":
    main()
