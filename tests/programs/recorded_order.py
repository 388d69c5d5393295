"""Which examples each replica is given in each step, for each kind of data."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import dtrain
from dtrain.data import Pipeline, tfrecords

from .common import Values
from .recorded_common import BATCH, ROWS, everything, rows
from .registry import Env, recording

EPOCHS = 2


class Recorder(keras.layers.Layer):
    """Notes the row numbers that each replica sees, and hands its input on."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[int, list[np.ndarray]] = {}
        self.lock = threading.Lock()

    def call(self, inputs: Any) -> Any:
        context = tf.distribute.get_replica_context()
        replica = context.replica_id_in_sync_group if context is not None else 0

        def note(replica: np.ndarray, numbers: np.ndarray) -> np.ndarray:
            with self.lock:
                self.seen.setdefault(int(replica), []).append(np.round(numbers * ROWS).astype("int32"))
            return numbers

        numbers = tf.numpy_function(note, [replica, inputs[:, 0]], tf.float32)
        numbers.set_shape(inputs.shape[:1])
        return tf.concat([numbers[:, None], inputs[:, 1:]], axis=1)


class InOrder(keras.utils.PyDataset):
    """Batches of rows; their order changes by the global generators, as Keras shuffles them."""

    def __len__(self) -> int:
        return -(-ROWS // BATCH)

    def __getitem__(self, number: int) -> Any:
        x, y = rows()
        chosen = slice(number * BATCH, (number + 1) * BATCH)
        return x[chosen], y[chosen]


def batches() -> Iterator[Any]:
    data = InOrder()
    for number in range(EPOCHS * len(data)):
        yield data[number % len(data)]


def dataset(**shuffle: Any) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices(rows()).shuffle(ROWS, **shuffle).batch(BATCH)


def record_files(env: Env) -> Any:
    """Record files of the rows; each worker writes its own copy, so that none waits for another."""
    folder = env.tmp / f"records-{env.rank}"
    folder.mkdir(parents=True, exist_ok=True)
    x, y = rows()
    for part in range(3):
        with tf.io.TFRecordWriter(str(folder / f"{part}.tfrecord")) as writer:
            for row in range(part, ROWS, 3):
                features = {"x": _floats(x[row]), "y": _floats(y[row])}
                example = tf.train.Example(features=tf.train.Features(feature=features))
                writer.write(example.SerializeToString())
    return tfrecords(
        folder / "*.tfrecord",
        {"x": tf.io.FixedLenFeature([4], tf.float32), "y": tf.io.FixedLenFeature([1], tf.float32)},
    )


def _floats(values: np.ndarray) -> tf.train.Feature:
    return tf.train.Feature(float_list=tf.train.FloatList(value=values.tolist()))


def pair(example: Any) -> Any:
    return example["x"], example["y"]


def noisy(example: Any, seed: Any) -> Any:
    x, y = example
    return x, y + tf.random.stateless_normal([1], seed, stddev=0.1)


def own_rows(context: Any) -> tf.data.Dataset:
    data = tf.data.Dataset.from_tensor_slices(rows())
    return data.shard(context.num_input_pipelines, context.input_pipeline_id)


def arrays(env: Env, **how: Any) -> dict[str, Any]:
    x, y = rows()
    return {"x": x, "y": y, "batch_size": BATCH} | how


Kinds = dict[str, Callable[[Env], dict[str, Any]]]

ARRAYS: Kinds = {
    "shuffled": lambda env: arrays(env),
    "in_order": lambda env: arrays(env, shuffle=False),
    "by_batch": lambda env: arrays(env, shuffle="batch"),
    "fewer_steps": lambda env: arrays(env, steps_per_epoch=4),
}
DATASETS: Kinds = {
    "py_dataset": lambda env: {"x": InOrder(), "shuffle": True},
    "seeded": lambda env: {"x": dataset(seed=3)},
    "globally_seeded": lambda env: {"x": dataset()},
    "generator": lambda env: {"x": batches(), "steps_per_epoch": len(InOrder())},
}
PIPELINES: Kinds = {
    "plain": lambda env: {"x": Pipeline(rows(), batch=BATCH, seed=5).dataset()},
    "augmented": lambda env: {"x": Pipeline(rows(), batch=BATCH, augment=noisy).dataset()},
    "everywhere": lambda env: {"x": Pipeline(rows(), batch=BATCH, sharding="off").dataset()},
    "function": lambda env: {"x": Pipeline(own_rows, batch=BATCH).dataset()},
}
FILES: Kinds = {
    "by_file": lambda env: {"x": of_files(env, sharding="file").dataset()},
    "divided": lambda env: {"x": of_files(env, sharding="data").dataset()},
    "cached": lambda env: {"x": of_files(env, sharding="data", cache=True).dataset()},
}


def of_files(env: Env, **how: Any) -> Pipeline:
    return Pipeline(record_files(env), transform=pair, batch=BATCH, **how)


def orders(kinds: Kinds, env: Env) -> Values:
    """For each kind of data: the rows of each replica and step, and what training on them gives."""
    found: Values = {}
    for name, make in kinds.items():
        keras.utils.set_random_seed(1234)
        recorder = Recorder()
        with env.strategy.scope():
            model = keras.Sequential([keras.Input((4,)), recorder, keras.layers.Dense(3, "tanh")])
            model.add(keras.layers.Dense(1))
            model.compile(keras.optimizers.Adam(0.02), "mse", metrics=["mae"])
        record = model.fit(**make(env), epochs=EPOCHS, verbose=0)
        values = everything(model, record) | seen_by_all(recorder, env)
        found |= {f"{name}_{key}": value for key, value in values.items()}
    return found


def seen_by_all(recorder: Recorder, env: Env) -> Values:
    """What the replicas of all workers saw: every worker writes its own, and reads those of all."""
    seen = {f"replica_{r}": np.concatenate(each) for r, each in recorder.seen.items()}
    seen |= {f"parts_{r}": np.asarray([len(part) for part in each]) for r, each in recorder.seen.items()}
    if env.workers == 1:
        return seen
    dtrain.barrier()  # all have read what the kind of data before this one left
    np.savez(env.tmp / f"seen-{env.rank}.npz", **seen)
    dtrain.barrier()
    every: Values = {}
    for rank in range(env.workers):
        with np.load(env.tmp / f"seen-{rank}.npz") as file:
            every |= {f"{name}_of_{rank}": file[name] for name in file.files}
    return every


@recording("order_of_arrays")
def _(env: Env) -> Values:
    return orders(ARRAYS, env)


@recording("order_of_datasets")
def _(env: Env) -> Values:
    return orders(DATASETS, env)


@recording("order_of_pipelines")
def _(env: Env) -> Values:
    return orders(PIPELINES, env)


@recording("order_of_files")
def _(env: Env) -> Values:
    return orders(FILES, env)
