"""Programs on parameter servers as tutorials write them, each with a strategy of its own, in one chief.

    dtrain launch --workers 2 --ps 1 tests/multiprocess/sample_programs_servers.py OUT.jsonl [NAME ...]

OUT.jsonl gets a line a program. Only the chief comes back from the first strategy that is made.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import dtrain

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
Report = dict[str, Any]
PROGRAMS: dict[str, Callable[[], Report]] = {}


def program(function: Callable[[], Report]) -> Callable[[], Report]:
    PROGRAMS[function.__name__] = function
    return function


def create_model() -> Any:
    # input_shape= on the first layer is how Keras 2 was written; Keras 3 warns and takes it.
    model = tf.keras.models.Sequential(
        [
            tf.keras.layers.Dense(128, activation="relu", input_shape=(784,)),
            tf.keras.layers.Dense(10, activation="softmax"),
        ]
    )
    model.compile(optimizer="adam", loss="sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def images(examples: int = 320) -> tf.data.Dataset:
    random = np.random.default_rng(0)
    labels = random.integers(0, 10, examples)
    pixels = random.normal(size=(examples, 784)) + np.eye(10).repeat(80, axis=1)[:, :784][labels]
    return tf.data.Dataset.from_tensor_slices((pixels.astype("float32"), labels)).batch(32)


@program
def synchronous_beside_asynchronous() -> Report:
    """Two strategies in one program; the mirrored one is made in every process, before it serves.

    Nothing that stood before the cluster can be used after it, so that only one of the two can train.
    """
    sync_strategy = dtrain.MirroredStrategy()

    with sync_strategy.scope():
        sync_model = tf.keras.Sequential(
            [
                tf.keras.layers.Dense(64, activation="relu", input_shape=(10,)),
                tf.keras.layers.Dense(1),
            ]
        )
        sync_model.compile(optimizer="adam", loss="mse")

    cluster_resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    variable_partitioner = dtrain.experimental.partitioners.MinSizePartitioner(
        min_shard_bytes=(256 << 10), max_shards=2
    )
    async_strategy = dtrain.experimental.ParameterServerStrategy(
        cluster_resolver, variable_partitioner=variable_partitioner
    )

    with async_strategy.scope():
        model = tf.keras.Sequential(
            [
                tf.keras.layers.Dense(64, activation="relu", input_shape=(10,)),
                tf.keras.layers.Dense(1),
            ]
        )
        model.compile(optimizer="adam", loss="mse")

    x = np.random.default_rng(0).random((320, 10))
    y = x.sum(axis=1, keepdims=True)
    losses = model.fit(x, y, batch_size=32, epochs=3, verbose=0).history["loss"]
    return {"losses": losses, "updates": int(model.optimizer.iterations)}


@program
def coordinator_loop() -> Report:
    """The coordinator's own loop, all of it inside the scope; the optimizer is the compiled model's."""
    cluster_resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    strategy = dtrain.experimental.ParameterServerStrategy(cluster_resolver)

    with strategy.scope():
        model = tf.keras.Sequential(
            [
                tf.keras.layers.Dense(64, activation="relu", input_shape=(10,)),
                tf.keras.layers.Dense(64, activation="relu"),
                tf.keras.layers.Dense(1),
            ]
        )
        model.compile(optimizer="adam", loss="mse")

    def dataset_fn() -> tf.data.Dataset:
        x = np.random.random((1000, 10))
        y = np.random.random((1000, 1))
        return tf.data.Dataset.from_tensor_slices((x, y)).batch(32)

    @tf.function
    def step_fn(iterator: Any) -> Any:
        def train_step(inputs: Any) -> Any:
            features, labels = inputs
            with tf.GradientTape() as tape:
                predictions = model(features, training=True)
                loss = tf.keras.losses.mse(labels, predictions)
            gradients = tape.gradient(loss, model.trainable_variables)
            model.optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
            return loss

        inputs = next(iterator)
        return strategy.run(train_step, args=(inputs,))

    before = [np.array(w) for w in model.get_weights()]
    with strategy.scope():
        coordinator = dtrain.experimental.coordinator.ClusterCoordinator(strategy)
        per_worker_dataset = coordinator.create_per_worker_dataset(dataset_fn)
        iterator = iter(per_worker_dataset)

        remote = []
        for _ in range(10):  # 10 steps
            remote.append(coordinator.schedule(step_fn, args=(iterator,)))

        coordinator.join()

    moved = max(float(np.abs(a - b).max()) for a, b in zip(model.get_weights(), before, strict=True))
    losses = [float(np.mean(value.fetch())) for value in remote]
    return {"losses": losses, "updates": int(model.optimizer.iterations), "moved": moved}


@program
def fit_inside_the_scope() -> Report:
    cluster_resolver = dtrain.cluster_resolver.TFConfigClusterResolver()
    strategy = dtrain.ParameterServerStrategy(cluster_resolver)
    train_dataset = images()
    with strategy.scope():
        model = create_model()
        history = model.fit(train_dataset, epochs=10, verbose=0)
    return {"losses": history.history["loss"], "updates": int(model.optimizer.iterations)}


@program
def without_arguments() -> Report:
    strategy = dtrain.ParameterServerStrategy()
    with strategy.scope():
        model = create_model()
    history = model.fit(images(), validation_data=images(64), epochs=2, verbose=0)
    return {
        "losses": history.history["loss"],
        "updates": int(model.optimizer.iterations),
        "replicas": strategy.num_replicas_in_sync,
    }


def run(name: str) -> Report:
    """What a program gives; an error is a result too."""
    start = time.monotonic()
    keras.utils.clear_session()
    keras.utils.set_random_seed(1)
    try:
        found = run_example(name) if name.startswith("examples/") else PROGRAMS[name]()
    except Exception:
        found = {"error": traceback.format_exc()}
    return {**found, "program": name, "seconds": time.monotonic() - start}


def run_example(name: str) -> Report:
    path = EXAMPLES / f"{name.removeprefix('examples/')}.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    found: Report = module.main()
    found.pop("weights", None)
    return found


def main(report: str, *names: str) -> None:
    for name in names or PROGRAMS:
        found = run(name)
        with Path(report).open("a", encoding="utf-8") as file:
            file.write(json.dumps(found, default=float) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
