"""Batches that do not divide by the replicas, down to fewer examples than replicas."""

from __future__ import annotations

from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf

from .common import BatchLogs, Values, classes, dataset, images, mlp, named, outcome, regression, sgd, tokens
from .registry import Env, program


def trained(env: Env, count: int, batch: int, epochs: int = 2) -> Values:
    x, y = regression(count)
    with env.strategy.scope():
        model = mlp()
        model.compile(sgd(), "mse", metrics=["mae"])
    logs = BatchLogs()
    record = model.fit(dataset(x, y, batch=batch), epochs=epochs, verbose=0, callbacks=[logs])
    return outcome(model, record, x, y, batch=batch) | logs.values()


@program("last_batch_uneven")
def _(env: Env) -> Values:
    return trained(env, count=45, batch=16)


@program("last_batch_of_one")
def _(env: Env) -> Values:
    return trained(env, count=33, batch=16)


@program("all_batches_odd")
def _(env: Env) -> Values:
    return trained(env, count=42, batch=7)


@program("batch_of_one")
def _(env: Env) -> Values:
    return trained(env, count=6, batch=1)


@program("dataset_of_one_example")
def _(env: Env) -> Values:
    return trained(env, count=1, batch=16, epochs=3)


@program("numpy_uneven")
def _(env: Env) -> Values:
    x, y = regression(37)
    with env.strategy.scope():
        model = mlp()
        model.compile(keras.optimizers.Adam(0.02, epsilon=1e-3), "mse", metrics=["mae"])
    record = model.fit(
        x, y, batch_size=12, epochs=2, shuffle=False, verbose=0, validation_data=(x[:13], y[:13])
    )
    return outcome(model, record, x[:9], y[:9], batch=4)


@program("uneven_sample_weight")
def _(env: Env) -> Values:
    x, y = regression(37)
    weight = np.linspace(0.1, 3.0, 37).astype("float32")
    with env.strategy.scope():
        model = mlp()
        model.compile(sgd(0.05), "mse", weighted_metrics=["mae"])
    return outcome(model, model.fit(dataset(x, y, weight, batch=12), epochs=2, verbose=0))


@program("uneven_regularized")
def _(env: Env) -> Values:
    x, y = regression(33)
    with env.strategy.scope():
        model = mlp(kernel_regularizer="l2", activity_regularizer="l2")
        model.compile(sgd(), "mse")
    return outcome(model, model.fit(dataset(x, y), epochs=2, verbose=0))


@program("uneven_synchronized_batch_normalization")
def _(env: Env) -> Values:
    x, y = images(21)
    with env.strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((6, 6, 2)),
                keras.layers.Conv2D(3, 3),
                keras.layers.BatchNormalization(synchronized=True, momentum=0.8),
                keras.layers.Flatten(),
                keras.layers.Dense(3, activation="softmax"),
            ]
        )
        model.compile(sgd(0.03), "sparse_categorical_crossentropy")
    return outcome(model, model.fit(dataset(x, y, batch=8), epochs=2, verbose=0))


@program("uneven_masks")
def _(env: Env) -> Values:
    x, y = tokens(31)
    with env.strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((6,), dtype="int32"),
                keras.layers.Embedding(12, 4, mask_zero=True),
                keras.layers.LSTM(4),
                keras.layers.Dense(3, activation="softmax"),
            ]
        )
        model.compile(sgd(0.3), "sparse_categorical_crossentropy", metrics=["accuracy"])
    return outcome(model, model.fit(dataset(x, y, batch=10), epochs=2, verbose=0))


@program("uneven_steps_per_execution")
def _(env: Env) -> Values:
    x, y = classes(45)
    with env.strategy.scope():
        model = mlp(outputs=3, activation="softmax")
        model.compile(sgd(), "sparse_categorical_crossentropy", metrics=["accuracy"], steps_per_execution=2)
    return outcome(model, model.fit(dataset(x, y, batch=9), epochs=2, verbose=0), x, y, batch=10)


@program("batches_of_changing_size")
def _(env: Env) -> Values:
    x, y = regression(40)
    data = tf.data.Dataset.from_tensor_slices((x, y))
    sizes = [11, 8, 3, 18]
    parts = [data.skip(sum(sizes[:i])).take(size).batch(size) for i, size in enumerate(sizes)]
    joined = parts[0]
    for part in parts[1:]:
        joined = joined.concatenate(part)
    with env.strategy.scope():
        model = mlp()
        model.compile(sgd(0.05), "mse", metrics=["mae"])
    record = model.fit(joined, epochs=2, verbose=0)
    found = model.evaluate(joined, verbose=0, return_dict=True)
    return outcome(model, record) | named(found, "evaluate_") | {"p": model.predict(joined, verbose=0)}


@program("validation_smaller_than_replicas")
def _(env: Env) -> Values:
    x, y = regression(32)
    with env.strategy.scope():
        model = mlp()
        model.compile(sgd(), "mse", metrics=["mae"])
    record = model.fit(dataset(x, y), validation_data=(x[:1], y[:1]), epochs=2, verbose=0)
    return outcome(model, record)


class PooledStep(keras.Model):
    """Convolution and pooling, whose kernels fail without rows, in a step of the program's own."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = keras.layers.Conv2D(3, 3, activation="tanh")
        self.pooling = keras.layers.MaxPooling2D(2)
        self.flatten = keras.layers.Flatten()
        self.dense = keras.layers.Dense(3)

    def call(self, x: tf.Tensor) -> tf.Tensor:
        return self.dense(self.flatten(self.pooling(self.convolution(x))))

    def train_step(self, data: tuple[tf.Tensor, tf.Tensor]) -> dict[str, tf.Tensor]:
        x, y = data
        with tf.GradientTape() as tape:
            predicted = self(x, training=True)
            loss = self.compute_loss(y=y, y_pred=predicted)
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return self.compute_metrics(x, y, predicted)


def of_one(env: Env, make: Callable[[], keras.Model], x: np.ndarray, y: np.ndarray) -> Values:
    """Trains, validates, evaluates and predicts with last batches of one example."""
    with env.strategy.scope():
        model = make()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(sgd(0.03), loss, metrics=["accuracy"])
    record = model.fit(dataset(x, y, batch=8), validation_data=(x[:1], y[:1]), epochs=2, verbose=0)
    return outcome(model, record, x, y, batch=16)


@program("last_batch_of_one_convolved")
def _(env: Env) -> Values:
    layers = keras.layers
    x, y = images(17)

    def make() -> keras.Model:
        return keras.Sequential(
            [
                keras.Input((6, 6, 2)),
                layers.Conv2D(3, 3),
                layers.BatchNormalization(synchronized=True, momentum=0.8),
                layers.Conv2DTranspose(3, 3),
                layers.DepthwiseConv2D(3),
                layers.GlobalMaxPooling2D(),
                layers.Dense(3),
            ]
        )

    return of_one(env, make, x, y)


@program("last_batch_of_one_recurrent")
def _(env: Env) -> Values:
    layers = keras.layers
    x, y = tokens(17)

    def make() -> keras.Model:
        inputs = keras.Input((6,), dtype="int32")
        words = layers.Embedding(12, 4, mask_zero=True)(inputs)
        states = layers.LSTM(4, return_sequences=True)(words)
        return keras.Model(inputs, layers.Dense(3)(layers.GlobalAveragePooling1D()(states)))

    return of_one(env, make, x, y)


@program("last_batch_of_one_pooled_in_an_own_step")
def _(env: Env) -> Values:
    return of_one(env, PooledStep, *images(17))
