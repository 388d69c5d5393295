"""Programs as tutorials write them, for `tf.keras` and older versions of Keras, that no other file has."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from .common import Values, history, weights
from .registry import Env, program, property_check


def numbers() -> tuple[np.ndarray, np.ndarray]:
    """250 examples, for batches of 32: the last batch has 26, 13 a replica."""
    x = np.random.default_rng(0).random((250, 10))
    return x, x.sum(axis=1, keepdims=True)


def sums() -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices(numbers()).batch(32)


def small_network() -> keras.Model:
    # input_shape= on the first layer is how Keras 2 was written; Keras 3 warns and takes it.
    return tf.keras.Sequential(
        [tf.keras.layers.Dense(16, activation="relu", input_shape=(10,)), tf.keras.layers.Dense(1)]
    )


def small_cnn(*more: Any) -> keras.Model:
    """A model of pictures; `more` stands before its last layer."""
    first = tf.keras.layers.Conv2D(8, 3, activation="relu", input_shape=(16, 16, 3))
    pooling = tf.keras.layers.GlobalAveragePooling2D()
    return tf.keras.Sequential([first, pooling, *more, tf.keras.layers.Dense(4, activation="softmax")])


def pictures(examples: int) -> tf.data.Dataset:
    random = np.random.default_rng(0)
    labels = random.integers(0, 4, examples).astype("int32")
    images = random.normal(size=(examples, 16, 16, 3)).astype("float32") + labels[:, None, None, None]
    return tf.data.Dataset.from_tensor_slices((images, labels))


def assert_learns(record: Any) -> None:
    losses = record.history["loss"]
    assert np.isfinite(losses).all() and losses[-1] < losses[0], losses


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


@program("tutorial_parts_that_a_step_builds", under=("multi_worker",))
def _(env: Env) -> Values:
    with env.strategy.scope():
        model = TwoParts()
        model.compile(optimizer="adam")
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        record = model.fit(*numbers(), batch_size=32, epochs=3, shuffle=False, verbose=0)
    first = record.history.pop("first")[-1]
    return weights(model) | history(record) | {"first": np.asarray(first)}


@program("tutorial_loop_with_average_loss", under=("mirrored", "central_storage", "multi_worker"))
def _(env: Env) -> Values:
    strategy = env.strategy
    with strategy.scope():
        model = small_network()
        optimizer = tf.keras.optimizers.Adam()

    @tf.function
    def train_step(inputs: Any) -> Any:
        features, labels = inputs
        with tf.GradientTape() as tape:
            each = tf.keras.losses.mse(labels, model(features, training=True))
            loss = tf.nn.compute_average_loss(each)  # the size of the batch is not said
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    @tf.function
    def distributed_train_step(inputs: Any) -> Any:
        per_replica = strategy.run(train_step, args=(inputs,))
        return strategy.reduce(tf.distribute.ReduceOp.SUM, per_replica, axis=None)

    dataset = strategy.experimental_distribute_dataset(sums())
    losses = [float(distributed_train_step(inputs)) for _ in range(3) for inputs in dataset]
    return weights(model) | {"losses": np.asarray(losses)}


@program("tutorial_loop_before_the_model", under=("mirrored",))
def _(env: Env) -> Values:
    """The steps are written first; model and optimizer are found when they are first called."""
    strategy = env.strategy
    dataset = strategy.experimental_distribute_dataset(sums())
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
    losses = [float(distributed_train_step(inputs)) for _ in range(3) for inputs in dataset]
    return weights(model) | {"losses": np.asarray(losses)}


@program(
    "tutorial_accumulation_across_replicas",
    under=("one_device", "mirrored", "central_storage", "multi_worker"),
)
def _(env: Env) -> Values:
    """The step is made inside the scope and called outside it; the optimizer is built by the first call."""
    strategy = env.strategy
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
    losses = [float(train_step(iterator)) for _ in range(5)]
    return weights(model) | {"losses": np.asarray(losses)}


@program("tutorial_transformer_with_range_positions", under=("mirrored",))
def _(env: Env) -> Values:
    words, length, width = 30, 8, 16
    layers = tf.keras.layers
    with env.strategy.scope():
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
    x = np.random.default_rng(0).integers(0, words, (72, length))
    y = (x[:, 0] > 15).astype("int32")
    # Without the weights: what is zero in theory (a key's bias) differs by rounding that Adam makes large.
    return history(model.fit(x, y, batch_size=16, epochs=3, shuffle=False, verbose=0))


@program("tutorial_text_by_python_function", under=("mirrored",))
def _(env: Env) -> Values:
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
    layers = tf.keras.layers
    with env.strategy.scope():
        model = tf.keras.Sequential(
            [
                layers.Embedding(10, 8),
                layers.GlobalAveragePooling1D(),
                layers.Dense(8, activation="relu"),
                layers.Dense(1),
            ]
        )
        loss = tf.keras.losses.BinaryCrossentropy(from_logits=True)
        model.compile(optimizer="adam", loss=loss, metrics=["accuracy"])
    record = model.fit(data, epochs=3, verbose=0)
    return weights(model) | history(record)


@program("tutorial_label_smoothing_function", under=("mirrored", "multi_worker"))
def _(env: Env) -> Values:
    """A loss function with the shape of the predictions taken while it runs, and integers for labels."""

    def smoothing_loss(y_true: Any, y_pred: Any, smoothing: float = 0.1) -> Any:
        classes = tf.shape(y_pred)[-1]
        y_true = tf.one_hot(tf.cast(y_true, tf.int32), classes)
        y_true = y_true * (1 - smoothing) + smoothing / tf.cast(classes, tf.float32)
        return tf.keras.losses.categorical_crossentropy(y_true, y_pred)

    with env.strategy.scope():
        model = small_cnn()
        schedule = tf.keras.optimizers.schedules.CosineDecayRestarts(0.002, first_decay_steps=5, alpha=0.1)
        optimizer = tf.keras.optimizers.AdamW(learning_rate=schedule, weight_decay=0.01, epsilon=1e-5)
        model.compile(optimizer=optimizer, loss=smoothing_loss, metrics=["accuracy"])
    record = model.fit(pictures(72).batch(16), epochs=3, verbose=0)
    return weights(model) | history(record)


@property_check("tutorial_float16_on_distributed_data", under=("mirrored",))
def _(env: Env) -> None:
    """Float16 rounds by the size of the part, so this only learns."""
    tf.keras.mixed_precision.set_global_policy(tf.keras.mixed_precision.Policy("mixed_float16"))
    with env.strategy.scope():
        model = small_cnn()
        inner = tf.keras.optimizers.Adam(learning_rate=0.01)
        optimizer = tf.keras.mixed_precision.LossScaleOptimizer(inner)
        model.compile(optimizer=optimizer, loss="sparse_categorical_crossentropy", metrics=["accuracy"])
    data = env.strategy.experimental_distribute_dataset(pictures(96).batch(32).take(3))
    assert_learns(model.fit(data, epochs=2, verbose=0))


@property_check("tutorial_layers_that_differ_in_training", under=("mirrored", "multi_worker"))
def _(env: Env) -> Values:
    """Dropout differs by replica, so this only learns, and ends alike in all workers."""
    layers = tf.keras.layers
    with env.strategy.scope():
        more = [layers.BatchNormalization(), layers.Dense(16, activation="relu"), layers.Dropout(0.5)]
        model = small_cnn(*more)
        rate = 0.01 * env.replicas
        model.compile(optimizer=tf.keras.optimizers.Adam(rate), loss="sparse_categorical_crossentropy")
    train = env.strategy.experimental_distribute_dataset(pictures(128).batch(8 * env.replicas))
    record = model.fit(train, epochs=2, verbose=0)
    assert_learns(record)
    return weights(model) | history(record)


def files_of_callbacks(out: Path, model: keras.Model) -> Values:
    loaded = tf.keras.models.load_model(out / "saved_model.keras")
    x = sums().map(lambda x, y: x)
    same = np.allclose(loaded.predict(x, verbose=0), model.predict(x, verbose=0), atol=1e-6)
    return {
        "csv_rows": len((out / "training.csv").read_text(encoding="utf-8").splitlines()),
        "epochs_saved": len(list(out.glob("ckpt_*"))),
        "profiles": len(list(out.rglob("*.xplane.pb"))),
        "loaded_alike": int(same),
    }


@program("tutorial_callbacks_and_placement_log", under=("mirrored", "multi_worker"))
def _(env: Env) -> Values:
    out = env.tmp
    rates: list[float] = []
    with env.strategy.scope():
        model = small_network()
        model.compile(optimizer="adam", loss="mse")
    callbacks = [
        tf.keras.callbacks.TensorBoard(log_dir=str(out / "logs"), histogram_freq=1, profile_batch="2,10"),
        tf.keras.callbacks.CSVLogger(str(out / "training.csv")),
        tf.keras.callbacks.ReduceLROnPlateau(monitor="loss", factor=0.5, patience=3, verbose=0),
        tf.keras.callbacks.ModelCheckpoint(str(out / "ckpt_{epoch}.weights.h5"), save_weights_only=True),
        tf.keras.callbacks.BackupAndRestore(str(out / "backup")),
        tf.keras.callbacks.LambdaCallback(
            on_epoch_end=lambda epoch, logs: rates.append(float(model.optimizer.learning_rate))
        ),
    ]
    tf.debugging.set_log_device_placement(True)
    try:
        record = model.fit(sums(), epochs=3, callbacks=callbacks, verbose=0)
    finally:
        tf.debugging.set_log_device_placement(False)
    model.save(out / "saved_model.keras")
    found = files_of_callbacks(out, model) | {"rates": np.asarray(rates)}
    assert (found["csv_rows"], found["epochs_saved"], found["profiles"], found["loaded_alike"]) == (
        4,
        3,
        1,
        1,
    )
    return found | weights(model) | history(record)
