"""Goes through pipelines in one of several workers, and reports what it got; run by `dtrain launch`.

Arguments: where to write (the rank is added), the directory of record files, and the names of the cases.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import dtrain
from dtrain.data import Pipeline, array_records, tfrecords
from dtrain.engine.feed.split_datasets import SplitDataset
from dtrain.errors import DtrainError

ROWS = 37
X = np.random.default_rng(0).normal(size=(ROWS, 4)).astype("float32")
Y = np.arange(ROWS)
TEXTS = [list(range(1, 2 + (7 * row) % 19)) for row in range(ROWS)]
FEATURES = {"0": tf.io.FixedLenFeature([4], tf.float32), "1": tf.io.FixedLenFeature([], tf.int64)}


def pair(example: Any) -> Any:
    return example["0"], example["1"]


def noisy(example: Any, seed: Any) -> Any:
    return example[0] + tf.random.stateless_normal([4], seed, stddev=0.1), example[1]


def own_rows(context: Any) -> tf.data.Dataset:
    data = tf.data.Dataset.from_tensor_slices((X, Y))
    return data.shard(context.num_input_pipelines, context.input_pipeline_id)


def own_rows_uncounted(context: Any) -> tf.data.Dataset:
    # The first worker has two thirds of the examples.
    workers, worker = context.num_input_pipelines, context.input_pipeline_id
    mine = (
        (lambda row: row % 3 > 0) if worker == 0 else (lambda row: (row % 3 == 0) & (row % workers == worker))
    )
    last = workers - 1
    if worker == last and worker:
        mine = lambda row: (row % 3 == 0) & ((row % workers == last) | (row % workers == 0))  # noqa: E731
    if workers == 1:
        mine = lambda row: row >= 0  # noqa: E731
    return tf.data.Dataset.from_tensor_slices((X, Y)).filter(lambda x, y: mine(y))


def tf_files(files: Path, **arguments: Any) -> Pipeline:
    return Pipeline(tfrecords(files / "*.tfrecord", FEATURES), transform=pair, **arguments)


def array_files(files: Path, **arguments: Any) -> Pipeline:
    return Pipeline(array_records(files / "*.array_record", FEATURES), transform=pair, **arguments)


# What is read: (pipeline, are the batches one device's).
READ: dict[str, tuple[Callable[[Path], Pipeline], bool]] = {
    "arrays": (lambda files: Pipeline((X, Y), batch=8), True),
    "arrays augmented": (lambda files: Pipeline((X, Y), batch=8, augment=noisy), True),
    "batch smaller than the replicas": (lambda files: Pipeline((X, Y), batch=1), True),
    "batch larger than the data": (lambda files: Pipeline((X, Y), batch=64), True),
    "remainder dropped": (lambda files: Pipeline((X, Y), batch=8, drop_remainder=True), True),
    "everything everywhere": (lambda files: Pipeline((X, Y), batch=8, sharding="off"), True),
    "array records": (lambda files: array_files(files, batch=8), True),
    "array records by file": (lambda files: array_files(files, batch=8, sharding="file"), False),
    "tfrecords": (lambda files: tf_files(files, batch=8), False),
    "tfrecords by file, cached": (lambda files: tf_files(files, batch=8, sharding="file", cache=True), False),
    "tfrecords cached": (lambda files: tf_files(files, batch=8, sharding="data", cache=True), True),
    "fewer files than workers": (
        lambda files: Pipeline(
            tfrecords([files / "few" / "one.tfrecord"], FEATURES), transform=pair, batch=8, sharding="file"
        ),
        False,
    ),
    "a function": (lambda files: Pipeline(own_rows, batch=8), False),
    "a function that does not count": (lambda files: Pipeline(own_rows_uncounted, batch=8), False),
    "padded": (lambda files: Pipeline((TEXTS, Y), batch=8, pad=0), True),
    "buckets": (lambda files: Pipeline((TEXTS, Y), batch=4, buckets=[6, 12]), True),
    "buckets of a stream": (
        lambda files: tf_files(files, batch=4, buckets=[2, 4]),
        True,
    ),
}


def read(strategy: Any, pipeline: Pipeline, ones_batches: bool) -> dict[str, Any]:
    """Two epochs of a worker's parts; where they are one device's batches, beside those."""
    split = SplitDataset(pipeline.dataset(), strategy.dtrain_managed.layout)
    epochs = [
        [
            ([part[1].numpy().tolist() for part in parts], sizes.numpy().tolist(), _widths(parts))
            for parts, sizes in split
        ]
        for _ in range(2)
    ]
    whole = pipeline.dataset() if ones_batches else ()
    batches = [[(y.numpy().tolist(), int(x.shape[-1])) for x, y in whole] for _ in range(2)]
    return {"epochs": epochs, "batches": batches, "explained": pipeline.explain()}


def _widths(parts: Any) -> list[int]:
    return [int(part[0].shape[-1]) for part in parts]


def train(strategy: Any, pipeline: Pipeline) -> dict[str, Any]:
    """Weights and losses of a small model after two epochs, and what it evaluates and predicts."""
    keras.utils.set_random_seed(3)
    with strategy.scope():
        model = keras.Sequential(
            [keras.layers.Input((4,)), keras.layers.Dense(3, "tanh"), keras.layers.Dense(1)]
        )
        model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    record = model.fit(pipeline.dataset(), epochs=2, validation_data=pipeline.dataset(), verbose=0)
    results = {key: [float(value) for value in values] for key, values in record.history.items()}
    results["weights"] = [float(v) for w in model.get_weights() for v in w.reshape(-1)]
    results["iterations"] = [int(model.optimizer.iterations)]
    ordered = Pipeline((X, Y), batch=8, shuffle=False)
    results["predicted"] = model.predict(ordered.dataset(), verbose=0).reshape(-1).tolist()
    return results


def trained_on() -> Pipeline:
    return Pipeline((X, Y / ROWS), batch=8, augment=noisy)


def error_of(make: Callable[[], Any]) -> dict[str, Any]:
    try:
        make()
    except DtrainError as error:
        return {"error": type(error).__name__, "message": str(error)}
    return {"error": "none"}


def run(name: str, strategy: Any, files: Path) -> dict[str, Any]:
    if name in READ:
        make, ones_batches = READ[name]
        return read(strategy, make(files), ones_batches)
    if name == "pipelines that differ":
        differing = Pipeline((X, Y), batch=8, seed=dtrain.rank())
        return error_of(lambda: SplitDataset(differing.dataset(), strategy.dtrain_managed.layout))
    if name == "a function that gives all to each":
        same = Pipeline(lambda context: tf.data.Dataset.from_tensor_slices((X, Y)), batch=8)
        return error_of(lambda: SplitDataset(same.dataset(), strategy.dtrain_managed.layout))
    if name == "a worker that is an epoch ahead":
        ahead = Pipeline((X, Y), batch=8).dataset(first_epoch=dtrain.rank())
        return error_of(lambda: SplitDataset(ahead, strategy.dtrain_managed.layout))
    results = train(strategy, trained_on())
    expected = train(dtrain.OneDeviceStrategy("/cpu:0"), trained_on())
    return {"found": results, "expected": expected}


def main() -> None:
    out, files, names = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]
    strategy = dtrain.MultiWorkerMirroredStrategy()
    with Path(f"{out}.{dtrain.rank()}").open("w", encoding="utf-8") as report:
        for name in names:
            try:
                result = run(name, strategy, files)
            except Exception:
                result = {"traceback": traceback.format_exc()}
            report.write(json.dumps({"case": name, **result}) + "\n")
            report.flush()


if __name__ == "__main__":
    main()
