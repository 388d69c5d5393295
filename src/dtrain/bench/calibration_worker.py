"""A process of a job that measures what a plan needs to know: sums, gathers, computation, and a small model.

`python -m dtrain.bench.calibration_worker FOLDER TRANSPORT` writes `worker-N.json` into the folder.
`calibration_job.py` starts these processes, and makes a calibration of what they write. Each computes with
one thread, so that as many cores are asked for as there are workers.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dtrain.base import safe_files

LARGE, LARGEST = (1 << 20,) * 4, (3 << 20,) * 8
"""The bytes of the tensors of a large sum, and of one that is larger than the caches of a processor."""

WIDTH, HIDDEN, OUTPUTS, BATCH = 256, 3, 10, 32
"""The small dense model: the width of its layers, those but the last one, outputs, a worker's batch."""

STREAMED = 32 << 20
"""The bytes of a vector that no cache of one core holds; an addition reads two of them and writes one."""

_STEPS, _EPOCHS, _ROUNDS = 150, 6, 5
_COUNTS = {"exchange": 200, "sum": 8, "largest_sum": 3, "gather": 8, "computation": 30, "streaming": 8}
_PRODUCTS = 10


@dataclass(frozen=True, kw_only=True)
class WorkerCosts:
    """What one worker of a job has measured, in seconds.

    Attributes:
        exchange, sum, largest_sum: sums of 40 bytes, of the tensors `LARGE`, and `LARGEST`; 0 for one worker.
        gather: a gather of as many bytes as those of `LARGE`; 0 for one worker.
        computation: products of matrices that are in the caches, while all workers compute some.
        cores: the cores that they have kept busy.
        streaming: additions to a vector of `STREAMED` bytes, while all workers make some.
        step: a step of the small dense model.
    """

    exchange: float = 0.0
    sum: float = 0.0
    largest_sum: float = 0.0
    gather: float = 0.0
    computation: float
    cores: float
    streaming: float
    step: float


def main(arguments: list[str]) -> None:
    """Measures all, and writes it."""
    os.environ |= {"TF_NUM_INTRAOP_THREADS": "1", "OMP_NUM_THREADS": "1"}
    import dtrain

    folder, transport = arguments
    workers = dtrain.world_size()
    strategy: Any = (
        dtrain.MultiWorkerMirroredStrategy(communication=transport)
        if workers > 1
        else dtrain.OneDeviceStrategy("/cpu:0")
    )
    found = WorkerCosts(
        **(_communication(strategy, workers) if workers > 1 else {}),
        **_computation(),
        step=_small_fit(strategy, workers),
    )
    safe_files.write_text(Path(folder, f"worker-{dtrain.rank()}.json"), json.dumps(asdict(found)))


def _communication(strategy: Any, workers: int) -> dict[str, float]:
    import tensorflow as tf

    replica_context = tf.distribute.get_replica_context
    large, largest = ([tf.random.normal([size // 4]) for size in sizes] for sizes in (LARGE, LARGEST))
    mine = tf.random.normal([sum(LARGE) // 4 // workers])

    def summed(tensors: list[Any]) -> Callable[[], Any]:
        def inside() -> Any:
            totals = replica_context().all_reduce(tf.distribute.ReduceOp.SUM, tensors)
            return tf.add_n([total[0] for total in totals])

        return lambda: strategy.run(inside)

    def gathered() -> Any:
        return strategy.run(lambda: replica_context().all_gather(mine, axis=0)[0])

    return {
        "exchange": _timed("exchange", summed([tf.zeros([10])])),
        "sum": _timed("sum", summed(large)),
        "largest_sum": _timed("largest_sum", summed(largest)),
        "gather": _timed("gather", gathered),
    }


def _computation() -> dict[str, float]:
    """What all workers compute at the same time, and nothing is sent."""
    import tensorflow as tf

    x, weights = tf.random.normal([64, 512]), tf.random.normal([512, 512]) / 512**0.5
    total, added = tf.Variable(tf.zeros([STREAMED // 4])), tf.ones([STREAMED // 4])

    def products() -> Any:
        value = x
        for _ in range(_PRODUCTS):
            value = tf.matmul(value, weights)
        return tf.reduce_sum(value)

    def additions() -> Any:
        return total.assign_add(added)[0]

    computation, cores = _together("computation", products)
    streaming, _ = _together("streaming", additions)
    return {"computation": computation, "cores": cores, "streaming": streaming}


def _together(what: str, once: Callable[[], Any]) -> tuple[float, float]:
    """The seconds of one, of many in a graph while all workers do the same, and the cores in use."""
    import dtrain

    function, count = in_graph(once), _COUNTS[what]
    function(count)
    times, processor = [], []
    for _ in range(_ROUNDS):
        dtrain.barrier()
        begun = time.perf_counter(), time.process_time()
        function(count)
        times.append(time.perf_counter() - begun[0])
        processor.append(time.process_time() - begun[1])
    return statistics.median(times) / count, sum(processor) / sum(times)


def _small_fit(strategy: Any, workers: int) -> float:
    """The seconds of a step of the small model."""
    import keras
    import numpy as np

    with strategy.scope():
        layers = [keras.layers.Dense(WIDTH, activation="relu") for _ in range(HIDDEN)]
        model = keras.Sequential([keras.Input((WIDTH,)), *layers, keras.layers.Dense(OUTPUTS)])
        model.compile("sgd", "mse")
    x = np.random.default_rng(0).standard_normal((BATCH * workers * _STEPS, WIDTH), dtype="float32")
    y = np.zeros((len(x), OUTPUTS), "float32")
    ends: list[float] = []

    class EpochEndTimes(keras.callbacks.Callback):  # type: ignore[misc]  # Keras has no types
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            ends.append(time.perf_counter())

    model.fit(x, y, batch_size=BATCH * workers, epochs=_EPOCHS, verbose=0, callbacks=[EpochEndTimes()])
    epochs = [end - before for before, end in itertools.pairwise(ends)]
    return statistics.median(epochs[1:]) / _STEPS


def _timed(what: str, once: Callable[[], Any]) -> float:
    """The seconds of one, of many in a graph one after another: the median of some rounds."""
    function, count = in_graph(once), _COUNTS[what]
    function(3)
    times = []
    for _ in range(_ROUNDS):
        begun = time.perf_counter()
        function(count)
        times.append((time.perf_counter() - begun) / count)
    return statistics.median(times)


def in_graph(once: Callable[[], Any]) -> Callable[[int], Any]:
    """So many calls of what gives a float, one after another, in one graph."""
    import tensorflow as tf

    def body(i: Any, seen: Any) -> Any:
        return i + 1, seen + once()

    function = tf.function(
        lambda count: tf.while_loop(lambda i, _: i < count, body, (0, 0.0), parallel_iterations=1),
        autograph=False,
    )
    return lambda count: function(tf.constant(count))[1].numpy()


if __name__ == "__main__":
    main(sys.argv[1:])
