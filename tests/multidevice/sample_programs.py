"""Training programs as tutorials write them, run one after another in one process; each says what came of it.

    python tests/multidevice/sample_programs.py OUT.jsonl NAME:STRATEGY ...
    dtrain launch --workers 2 tests/multidevice/sample_programs.py OUT.jsonl NAME:STRATEGY ...

OUT.jsonl gets a line a task; under several workers every worker writes OUT.jsonl.RANK. A NAME that begins
with "examples/" is a file of that folder.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import dtrain

ROOT = Path(__file__).resolve().parents[2]
Report = dict[str, Any]
Program = Callable[[Any, Path], Report]
PROGRAMS: dict[str, Program] = {}


def program(function: Program) -> Program:
    PROGRAMS[function.__name__] = function
    return function


def regression(examples: int = 250) -> tuple[np.ndarray, np.ndarray]:
    """250 examples in batches of 32: the last batch has 26, 13 a replica."""
    random = np.random.default_rng(0)
    x = random.random((examples, 10))
    return x, x.sum(axis=1, keepdims=True)


def pairs(examples: int = 250) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices(regression(examples))


def small_network() -> keras.Model:
    # input_shape= on the first layer is how Keras 2 was written; Keras 3 warns and takes it.
    return tf.keras.Sequential(
        [tf.keras.layers.Dense(16, activation="relu", input_shape=(10,)), tf.keras.layers.Dense(1)]
    )


def small_cnn() -> keras.Model:
    return tf.keras.Sequential(
        [
            tf.keras.layers.Conv2D(8, 3, activation="relu", input_shape=(16, 16, 3)),
            tf.keras.layers.MaxPooling2D(),
            tf.keras.layers.Conv2D(8, 3, activation="relu"),
            tf.keras.layers.GlobalAveragePooling2D(),
            tf.keras.layers.Dense(4, activation="softmax"),
        ]
    )


def pictures(examples: int, seed: int = 0) -> tf.data.Dataset:
    random = np.random.default_rng(seed)
    labels = random.integers(0, 4, examples).astype("int32")
    images = random.normal(size=(examples, 16, 16, 3)).astype("float32") + labels[:, None, None, None]
    return tf.data.Dataset.from_tensor_slices((images, labels))


def outcome(model: keras.Model, losses: list[float], **more: Any) -> Report:
    weights = np.concatenate([np.ravel(w) for w in model.get_weights()])
    return {"losses": [float(loss) for loss in losses], "weights": weights.tolist(), **more}


@program
def fit_arrays(strategy: Any, out: Path) -> Report:
    with strategy.scope():
        model = small_network()
        model.compile(optimizer="adam", loss="mse")
    x, y = regression()
    history = model.fit(x, y, epochs=3, batch_size=32, shuffle=False, verbose=0)
    return outcome(model, history.history["loss"])


class TwoParts(keras.Model):
    """Its step calls its parts, which nothing has built, and normalizes over the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.features = tf.keras.Sequential(
            [
                # A bias before a normalization has no gradient but rounding.
                tf.keras.layers.Dense(8, use_bias=False),
                tf.keras.layers.BatchNormalization(synchronized=True),
            ]
        )
        self.head = tf.keras.layers.Dense(1)
        self.late: Any = None

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        if self.late is None:
            self.late = tf.keras.metrics.Mean(name="late")
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self.head(self.features(x, training=True)) - y) ** 2)
        variables = self.features.trainable_variables + self.head.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        self.late.update_state(loss)
        return {"loss": loss, "late": self.late.result(), "first": x[:, 0]}


@program
def parts_that_a_step_builds(strategy: Any, out: Path) -> Report:
    with strategy.scope():
        model = TwoParts()
        model.compile(optimizer="adam")
    x, y = regression()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        history = model.fit(x, y, epochs=3, batch_size=32, shuffle=False, verbose=0).history
    return outcome(model, history["loss"], late=history["late"], first=history["first"][-1].tolist())


@program
def fit_lists_with_regularizer(strategy: Any, out: Path) -> Report:
    with strategy.scope():
        model = tf.keras.Sequential(
            [tf.keras.layers.Dense(1, input_shape=(1,), kernel_regularizer=tf.keras.regularizers.L2(1e-2))]
        )
        model.compile(loss="mse", optimizer="sgd")
    dataset = tf.data.Dataset.from_tensors(([1.0], [1.0])).repeat(100).batch(10)
    losses = model.fit(dataset, epochs=2, verbose=0).history["loss"]
    return outcome(model, [*losses, model.evaluate(dataset, verbose=0)])


@program
def fit_what_is_distributed(strategy: Any, out: Path) -> Report:
    """The dataset is made and distributed inside the scope, before the model."""
    with strategy.scope():
        dataset = pairs().shuffle(250, seed=3, reshuffle_each_iteration=False).batch(32)
        train = strategy.experimental_distribute_dataset(dataset.prefetch(tf.data.AUTOTUNE))
        validation = strategy.experimental_distribute_dataset(pairs(64).batch(32))
        model = small_network()
        model.compile(optimizer="adam", loss="mse", metrics=["mae"])
    history = model.fit(train, validation_data=validation, epochs=2, verbose=0).history
    return outcome(model, history["loss"], val_loss=history["val_loss"], mae=history["mae"])


@program
def loop_with_average_loss(strategy: Any, out: Path) -> Report:
    with strategy.scope():
        model = small_network()
        optimizer = tf.keras.optimizers.Adam()

    def compute_loss(labels: Any, predictions: Any) -> Any:
        return tf.nn.compute_average_loss(tf.keras.losses.mse(labels, predictions))

    @tf.function
    def train_step(inputs: Any) -> Any:
        features, labels = inputs
        with tf.GradientTape() as tape:
            loss = compute_loss(labels, model(features, training=True))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    @tf.function
    def distributed_train_step(inputs: Any) -> Any:
        per_replica = strategy.run(train_step, args=(inputs,))
        return strategy.reduce(tf.distribute.ReduceOp.SUM, per_replica, axis=None)

    dataset = strategy.experimental_distribute_dataset(pairs().batch(32))
    losses = []
    for _ in range(3):
        total, batches = 0.0, 0
        for inputs in dataset:
            total += distributed_train_step(inputs)
            batches += 1
        losses.append(float((total / batches).numpy()))
    return outcome(model, losses)


@program
def loop_before_the_model(strategy: Any, out: Path) -> Report:
    """The steps are written first; model and optimizer are found when they are first called."""
    dataset = strategy.experimental_distribute_dataset(pairs().batch(32))
    replicas = strategy.num_replicas_in_sync

    @tf.function
    def train_step(inputs: Any) -> Any:
        features, labels = inputs
        with tf.GradientTape() as tape:
            each = tf.keras.losses.mse(labels, model(features, training=True))
            loss = tf.reduce_mean(each) / replicas
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    @tf.function
    def distributed_train_step(inputs: Any) -> Any:
        per_replica = strategy.run(train_step, args=(inputs,))
        return strategy.reduce(tf.distribute.ReduceOp.SUM, per_replica, axis=None)

    with strategy.scope():
        model = small_network()
        optimizer = tf.keras.optimizers.Adam()
    losses = [float(np.mean([distributed_train_step(x).numpy() for x in dataset])) for _ in range(3)]
    return outcome(model, losses)


@program
def accumulation_across_replicas(strategy: Any, out: Path) -> Report:
    """The step is made inside the scope and called outside it; the optimizer is built by the first call."""
    accumulation_steps = 2
    with strategy.scope():
        model = small_cnn()
        optimizer = tf.keras.optimizers.Adam(0.01)

        @tf.function
        def train_step(iterator: Any) -> Any:
            def step_fn(inputs: Any) -> Any:
                images, labels = inputs
                with tf.GradientTape() as tape:
                    predictions = model(images, training=True)
                    loss = tf.keras.losses.sparse_categorical_crossentropy(labels, predictions)
                    loss = tf.reduce_mean(loss) / accumulation_steps
                return loss, tape.gradient(loss, model.trainable_variables)

            total_loss = 0.0
            accumulated = [tf.zeros_like(v) for v in model.trainable_variables]
            for _ in range(accumulation_steps):
                losses, gradients = strategy.run(step_fn, args=(next(iterator),))
                total_loss += strategy.reduce(tf.distribute.ReduceOp.MEAN, losses, axis=None)
                for i, gradient in enumerate(gradients):
                    accumulated[i] += strategy.reduce(tf.distribute.ReduceOp.MEAN, gradient, axis=None)
            optimizer.apply_gradients(zip(accumulated, model.trainable_variables, strict=True))
            return total_loss

    iterator = iter(strategy.experimental_distribute_dataset(pictures(160).batch(16)))
    return outcome(model, [float(train_step(iterator)) for _ in range(5)])


@program
def transformer_with_range_positions(strategy: Any, out: Path) -> Report:
    words, length, width = 30, 8, 16
    layers = tf.keras.layers
    with strategy.scope():
        inputs = layers.Input(shape=(length,))
        # Called on a tensor, not on a Keras one: the positions become constants of the model.
        x = layers.Embedding(words, width)(inputs) + layers.Embedding(length, width)(tf.range(length))
        attention = layers.MultiHeadAttention(num_heads=2, key_dim=width // 2)(x, x)
        x = layers.LayerNormalization()(x + attention)
        forward = layers.Dense(width)(layers.Dense(2 * width, activation="relu")(x))
        x = layers.LayerNormalization()(x + forward)
        outputs = layers.Dense(1, activation="sigmoid")(layers.GlobalAveragePooling1D()(x))
        model = tf.keras.Model(inputs, outputs)
        model.compile(optimizer="adam", loss="binary_crossentropy", metrics=["accuracy"])
    random = np.random.default_rng(0)
    x = random.integers(0, words, (72, length))
    history = model.fit(x, (x[:, 0] > 15).astype("int32"), batch_size=16, epochs=3, shuffle=False, verbose=0)
    # Without the weights: what is zero in theory (a key's bias) differs by rounding that Adam makes large.
    return outcome(model, history.history["loss"], weights=[])


@program
def text_by_python_function(strategy: Any, out: Path) -> Report:
    vocabulary = {"good": 1, "bad": 2, "film": 3, "plot": 4}
    random = np.random.default_rng(0)
    texts = [" ".join(random.choice(list(vocabulary), random.integers(3, 12))) for _ in range(80)]
    labels = np.array([int(text.count("good") >= text.count("bad")) for text in texts])

    def encode(text: Any, label: Any) -> Any:
        return [vocabulary[word] for word in text.numpy().decode().split()], label

    def encode_map(text: Any, label: Any) -> Any:
        numbers, label = tf.py_function(encode, inp=[text, label], Tout=(tf.int64, tf.int64))
        numbers.set_shape([None])
        label.set_shape([])
        return numbers, label

    data = tf.data.Dataset.from_tensor_slices((texts, labels))
    data = data.map(encode_map).shuffle(80, seed=1).padded_batch(32, padded_shapes=([12], []))
    with strategy.scope():
        model = tf.keras.Sequential(
            [
                tf.keras.layers.Embedding(10, 8),
                tf.keras.layers.GlobalAveragePooling1D(),
                tf.keras.layers.Dense(8, activation="relu"),
                tf.keras.layers.Dense(1),
            ]
        )
        loss = tf.keras.losses.BinaryCrossentropy(from_logits=True)
        model.compile(optimizer="adam", loss=loss, metrics=["accuracy"])
    return outcome(model, model.fit(data, epochs=3, verbose=0).history["loss"])


@program
def label_smoothing_function(strategy: Any, out: Path) -> Report:
    """A loss function with the shape of the predictions taken while it runs, and integers for labels."""

    def smoothing_loss(y_true: Any, y_pred: Any, smoothing: float = 0.1) -> Any:
        classes = tf.shape(y_pred)[-1]
        y_true = tf.one_hot(tf.cast(y_true, tf.int32), classes)
        y_true = y_true * (1 - smoothing) + smoothing / tf.cast(classes, tf.float32)
        return tf.keras.losses.categorical_crossentropy(y_true, y_pred)

    with strategy.scope():
        model = small_cnn()
        schedule = tf.keras.optimizers.schedules.CosineDecayRestarts(0.002, first_decay_steps=5, alpha=0.1)
        optimizer = tf.keras.optimizers.AdamW(learning_rate=schedule, weight_decay=0.01, epsilon=1e-5)
        model.compile(optimizer=optimizer, loss=smoothing_loss, metrics=["accuracy"])
    history = model.fit(pictures(72).batch(16), epochs=3, verbose=0).history
    return outcome(model, history["loss"], accuracy=history["accuracy"])


@program
def float16_on_distributed_data(strategy: Any, out: Path) -> Report:
    before = keras.config.dtype_policy()
    tf.keras.mixed_precision.set_global_policy(tf.keras.mixed_precision.Policy("mixed_float16"))
    try:
        with strategy.scope():
            model = small_cnn()
            inner = tf.keras.optimizers.Adam(learning_rate=0.01)
            optimizer = tf.keras.mixed_precision.LossScaleOptimizer(inner)
            model.compile(optimizer=optimizer, loss="sparse_categorical_crossentropy", metrics=["accuracy"])
        data = strategy.experimental_distribute_dataset(pictures(96).batch(32).take(3))
        losses = model.fit(data, epochs=2, verbose=0).history["loss"]
    finally:
        keras.config.set_dtype_policy(before)
    return outcome(model, losses)


@program
def layers_that_differ_in_training(strategy: Any, out: Path) -> Report:
    with strategy.scope():
        model = tf.keras.Sequential(
            [
                tf.keras.layers.Conv2D(8, 3, activation="relu", input_shape=(16, 16, 3)),
                tf.keras.layers.BatchNormalization(),
                tf.keras.layers.GlobalAveragePooling2D(),
                tf.keras.layers.Dense(16, activation="relu"),
                tf.keras.layers.Dropout(0.5),
                tf.keras.layers.Dense(4, activation="softmax"),
            ]
        )
        rate = 0.01 * strategy.num_replicas_in_sync
        model.compile(optimizer=tf.keras.optimizers.Adam(rate), loss="sparse_categorical_crossentropy")
    batch = 8 * strategy.num_replicas_in_sync
    train = strategy.experimental_distribute_dataset(pictures(128).batch(batch))
    return outcome(model, model.fit(train, epochs=2, verbose=0).history["loss"])


@program
def callbacks_and_placement_log(strategy: Any, out: Path) -> Report:
    callbacks = [
        tf.keras.callbacks.TensorBoard(log_dir=str(out / "logs"), histogram_freq=1, profile_batch="2,10"),
        tf.keras.callbacks.CSVLogger(str(out / "training.csv")),
        tf.keras.callbacks.ReduceLROnPlateau(monitor="loss", factor=0.5, patience=3, verbose=0),
        tf.keras.callbacks.ModelCheckpoint(str(out / "ckpt_{epoch}.weights.h5"), save_weights_only=True),
        tf.keras.callbacks.BackupAndRestore(str(out / "backup")),
    ]
    with strategy.scope():
        model = small_network()
        model.compile(optimizer="adam", loss="mse")
    rates: list[float] = []
    callbacks.append(
        tf.keras.callbacks.LambdaCallback(
            on_epoch_end=lambda epoch, logs: rates.append(float(model.optimizer.learning_rate))
        )
    )
    tf.debugging.set_log_device_placement(True)
    try:
        history = model.fit(pairs().batch(32), epochs=3, callbacks=callbacks, verbose=0)
    finally:
        tf.debugging.set_log_device_placement(False)
    model.save(out / "saved_model.keras")
    loaded = tf.keras.models.load_model(out / "saved_model.keras")
    x, _ = regression(20)
    rows = (out / "training.csv").read_text(encoding="utf-8").splitlines()
    files = {
        "csv_rows": len(rows),
        "epochs_saved": len(list(out.glob("ckpt_*"))),
        "profiles": len(list(out.rglob("*.xplane.pb"))),
        "loaded_alike": bool(
            np.allclose(loaded.predict(x, verbose=0), model.predict(x, verbose=0), atol=1e-6)
        ),
    }
    return outcome(model, history.history["loss"], files=files, rates=rates)


def make_strategy(name: str) -> Any:
    if name == "mirrored_on_one":
        return dtrain.MirroredStrategy(["CPU:0"])
    if name == "multi_worker":
        # An implementation named by hand, as for slow networks.
        ring = tf.distribute.experimental.CommunicationImplementation.RING
        options = tf.distribute.experimental.CommunicationOptions(implementation=ring)
        return dtrain.MultiWorkerMirroredStrategy(communication_options=options)
    return dtrain.strategy(name)


def run_example(name: str, strategy: str, out: Path) -> Report:
    path = ROOT / f"{name}.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    arguments = {
        "multi_worker": [str(out)],
        "checkpoints": [strategy, str(out)],
        "fault_tolerant": [strategy, str(out)],
        "tpu": [],
        "multi_worker_by_hand": [],
    }
    found = module.main(*arguments.get(path.stem, [strategy]))
    weights = found.pop("weights", None)
    if weights is not None:
        found["weights"] = np.concatenate([np.ravel(w) for w in weights]).tolist()
    return found


def run(name: str, strategy: str, out: Path) -> Report:
    """What a program gives under a strategy; an error is a result too."""
    start = time.monotonic()
    keras.utils.clear_session()
    keras.utils.set_random_seed(1)
    try:
        if name.startswith("examples/"):
            found = run_example(name, strategy, out)
        else:
            found = PROGRAMS[name](make_strategy(strategy), out)
    except Exception:
        found = {"error": traceback.format_exc()}
    return {**found, "program": name, "strategy": strategy, "seconds": time.monotonic() - start}


def main(report: str, *tasks: str) -> None:
    rank, size = dtrain.rank(), dtrain.world_size()
    if size == 1:
        cpu = tf.config.list_physical_devices("CPU")[0]
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    with Path(f"{report}.{rank}" if size > 1 else report).open("w", encoding="utf-8") as file:
        for task in tasks:
            name, strategy = task.split(":")
            # Workers that train together name one directory; they see the same disk.
            alone = f"-{rank}" if strategy == "default" else ""
            out = Path(f"{report}.files") / f"{name.replace('/', '_')}-{strategy}{alone}"
            out.mkdir(parents=True, exist_ok=True)
            found = run(name, strategy, out)
            file.write(json.dumps(found, default=float) + "\n")
            file.flush()
            if "error" in found and size > 1:
                os._exit(1)  # the others wait for this worker in the same program


if __name__ == "__main__":
    main(*sys.argv[1:])
