"""Models with small divided weights, for tests of `FullyShardedStrategy`, and their training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

L = keras.layers
ROWS = 35
MODELS: dict[str, Callable[[], Any]] = {}


def model(function: Callable[[], Any]) -> Callable[[], Any]:
    MODELS[function.__name__] = function
    return function


def compiled(layers: list[Any], optimizer: Any, shape: tuple[int, ...] = (6,), **how: Any) -> Any:
    made = keras.Sequential([keras.Input(shape), *layers])
    made.compile(optimizer, "mse", **how)
    return made


def of_words(layers: list[Any], optimizer: Any, **how: Any) -> Any:
    made = keras.Sequential([keras.Input((5,), dtype="int32"), *layers, L.Flatten(), L.Dense(1)])
    made.compile(optimizer, "mse", **how)
    return made


@model
def dense_of_uneven_parts() -> Any:
    layers = [L.Dense(7, "tanh"), L.Dropout(0.3), L.Dense(5, "relu"), L.Dense(1)]
    return compiled(layers, keras.optimizers.Adam(0.01), metrics=["mae"])


@model
def convolution() -> Any:
    layers = [
        L.Conv2D(4, 3, strides=2, padding="same", activation="relu"),
        L.DepthwiseConv2D(2),
        L.SeparableConv2D(4, 2),
        L.Conv2DTranspose(5, 2),
        L.BatchNormalization(synchronized=True),
        L.GlobalAveragePooling2D(),
        L.Dense(2),
    ]
    return compiled(layers, keras.optimizers.SGD(0.05, momentum=0.9), (8, 8, 3))


@model
def table_divided_by_rows() -> Any:
    return of_words([L.Embedding(9, 7)], keras.optimizers.SGD(0.05))


@model
def table_divided_by_columns() -> Any:
    return of_words([L.Embedding(7, 6)], keras.optimizers.SGD(0.05))


@model
def table_with_moments() -> Any:
    return of_words([L.Embedding(8, 7)], keras.optimizers.Adam(0.05, clipnorm=0.5))


@model
def table_in_a_compiled_step() -> Any:
    return of_words([L.Embedding(9, 7)], keras.optimizers.SGD(0.05), jit_compile=True)


@model
def table_run_eagerly() -> Any:
    return of_words([L.Embedding(9, 7)], keras.optimizers.SGD(0.05), run_eagerly=True)


class Transposed(keras.layers.Layer):  # type: ignore[misc]
    """Multiplies by another layer's kernel, transposed."""

    def __init__(self, other: Any) -> None:
        super().__init__()
        self.other = other

    def call(self, x: Any) -> Any:
        return keras.ops.matmul(x, keras.ops.transpose(self.other.kernel))


@model
def kernel_used_transposed() -> Any:
    inner = L.Dense(4, "tanh")
    return compiled([inner, Transposed(inner)], keras.optimizers.Adam(0.01))


@model
def table_used_as_the_last_layer() -> Any:
    inputs = keras.Input((5,), dtype="int32")
    table = L.ReversibleEmbedding(7, 6)
    made = keras.Model(inputs, table(L.Dense(6, "tanh")(table(inputs)), reverse=True))
    made.compile(keras.optimizers.Adam(0.01), "mse")
    return made


@model
def weight_used_twice() -> Any:
    inner = L.Dense(6, "tanh")
    return compiled([inner, inner, L.Dense(2)], keras.optimizers.Adam(0.01))


@model
def recurrent() -> Any:
    layers = [L.Bidirectional(L.LSTM(4, return_sequences=True)), L.GRU(3), L.Dense(1)]
    return compiled([L.Reshape((3, 2)), *layers], keras.optimizers.Adam(0.01))


@model
def attention() -> Any:
    inputs = keras.Input((6,))
    hidden = L.Dense(4)(L.Reshape((3, 2))(inputs))
    hidden = L.LayerNormalization()(hidden + L.MultiHeadAttention(2, 3)(hidden, hidden))
    hidden = L.GroupQueryAttention(2, 4, 2)(hidden, hidden)
    made = keras.Model(inputs, L.Dense(2)(L.Flatten()(hidden)))
    made.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    return made


@model
def regularizers_and_constraints() -> Any:
    orthogonal = keras.regularizers.OrthogonalRegularizer()
    layers = [
        L.Dense(8, "tanh", kernel_regularizer="L1L2", kernel_constraint="unit_norm"),
        L.Dense(6, kernel_regularizer=orthogonal, kernel_constraint="max_norm"),
        L.SpectralNormalization(L.Dense(4)),
        L.Dense(1, kernel_regularizer="l2", bias_regularizer="l2", kernel_constraint="non_neg"),
    ]
    return compiled(layers, keras.optimizers.SGD(0.05))


@model
def clipping_by_the_global_norm() -> Any:
    optimizer = keras.optimizers.AdamW(0.01, weight_decay=0.1, global_clipnorm=0.3, amsgrad=True)
    return compiled([L.Dense(8, "tanh"), L.Dense(1)], optimizer)


@model
def moving_averages_of_weights() -> Any:
    averaged = {"use_ema": True, "ema_momentum": 0.9, "ema_overwrite_frequency": 2}
    return compiled([L.Dense(8, "tanh"), L.Dense(1)], keras.optimizers.SGD(0.05, **averaged))


@model
def accumulated_gradients() -> Any:
    optimizer = keras.optimizers.Adam(0.05, gradient_accumulation_steps=2)
    return compiled([L.Dense(8, "tanh"), L.Dense(1)], optimizer)


@model
def frozen_weights() -> Any:
    layers = [L.Dense(6, "tanh"), L.Dense(8, "tanh", trainable=False), L.Dense(1)]
    return compiled(layers, keras.optimizers.SGD(0.05))


@model
def factored_moments() -> Any:
    return compiled([L.Dense(8, "tanh"), L.Dense(4), L.Dense(1)], keras.optimizers.Adafactor(0.05))


@model
def orthogonal_updates() -> Any:
    return compiled([L.Dense(8, "tanh"), L.Dense(4), L.Dense(1)], keras.optimizers.Muon(0.05))


@model
def low_rank_updates() -> Any:
    inner, other = L.Dense(8, "tanh"), L.EinsumDense("ab,bc->ac", 4)
    made = compiled([inner, other, L.Dense(1)], keras.optimizers.Adam(0.05))
    inner.enable_lora(2)
    other.enable_lora(2)
    made.compile(keras.optimizers.Adam(0.05), "mse")
    return made


class OwnStep(keras.Model):  # type: ignore[misc]
    """Updates by hand, and writes of all kinds to a weight."""

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data[:2]
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x, training=True) - y) ** 2)
        weights = self.trainable_variables
        for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
            weight.assign_sub(0.05 * gradient)
        kernel = self.layers[1].kernel
        kernel.assign(kernel * 0.99 + 0.001 * keras.ops.sum(kernel))
        kernel.value.assign_add(0.01 * tf.ones_like(kernel.value))
        kernel.value.scatter_nd_add([[0, 1], [5, 2]], [loss, 1.0])
        norm = tf.linalg.global_norm([weight.value for weight in weights])
        return {"loss": loss, "norm": norm, "first": kernel[0, 0], "max": tf.reduce_max(kernel.value)}


@model
def own_step_that_assigns() -> Any:
    inputs = keras.Input((6,))
    made = OwnStep(inputs, L.Dense(2)(L.Dense(8, "tanh")(inputs)))
    made.compile("sgd", "mse")
    return made


class UpdateInBranch(keras.Model):  # type: ignore[misc]
    """Updates in a branch, by gradients that are computed before it."""

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data[:2]
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        weights = self.trainable_variables
        gradients = tape.gradient(loss, weights)
        norm = tf.linalg.global_norm(gradients)
        halves = [0.5 * gradient for gradient in gradients]
        update = self.optimizer.apply
        tf.cond(norm > 1.5, lambda: update(halves, weights), lambda: update(gradients, weights))
        return {"loss": loss, "norm": norm}


@model
def updated_in_a_branch() -> Any:
    inputs = keras.Input((6,))
    made = UpdateInBranch(inputs, L.Dense(2)(L.Dense(8, "tanh")(inputs)))
    made.compile(keras.optimizers.Adam(0.01), "mse")
    return made


class InControlFlow(keras.layers.Layer):  # type: ignore[misc]
    """Reads its weight in a loop and in branches."""

    def build(self, shape: Any) -> None:
        self.weight = self.add_weight(shape=(shape[-1], shape[-1]), initializer="orthogonal")

    def call(self, x: Any) -> Any:
        def body(i: Any, z: Any) -> Any:
            return i + 1, tf.tanh(z @ self.weight)

        looped = tf.while_loop(lambda i, _: i < 2, body, [0, x])[1]
        positive = tf.reduce_sum(self.weight) > -100.0
        return tf.cond(positive, lambda: looped @ tf.transpose(self.weight), lambda: looped @ self.weight)


@model
def loops_and_branches() -> Any:
    return compiled([L.Dense(8, "tanh"), InControlFlow(), L.Dense(3)], keras.optimizers.Adam(0.01))


@model
def compiled_by_xla() -> Any:
    layers = [L.Dense(64, "tanh"), L.Dense(64, "relu"), L.Dense(3)]
    return compiled(layers, keras.optimizers.Adam(0.01), metrics=["mae"], jit_compile=True)


@model
def run_eagerly() -> Any:
    layers = [L.Dense(8, "tanh"), L.Dropout(0.3), L.Dense(5), L.Dense(3)]
    optimizer = keras.optimizers.Adam(0.01, global_clipnorm=0.5)
    return compiled(layers, optimizer, metrics=["mae"], run_eagerly=True)


def numbers(strategy: Any, make: Callable[[], Any]) -> tuple[Any, dict[str, Any]]:
    """The trained model, and all numbers of its training, evaluation and prediction.

    Batches of 17 give uneven parts, and leave one row at the end, so all replicas but one have none.
    """
    keras.utils.set_random_seed(1)
    generator = np.random.default_rng(0)
    with strategy.scope():
        made = make()
    shape = made.input_shape[1:]
    words = "int" in made.inputs[0].dtype
    x = generator.integers(0, 7, (ROWS, *shape)) if words else generator.normal(size=(ROWS, *shape))
    x = x.astype("int32" if words else "float32")
    y = generator.normal(size=(ROWS, *made.output_shape[1:])).astype("float32")
    how = {"batch_size": 17, "verbose": 0}
    history = made.fit(x, y, epochs=2, shuffle=False, validation_data=(x[:18], y[:18]), **how).history
    found: dict[str, Any] = {**history, "scores": made.evaluate(x, y, **how)}
    found["outputs"] = made.predict(x, **how)
    for number, variable in enumerate([*made.variables, *made.optimizer.variables]):
        found[f"{number}: {variable.path}"] = keras.ops.convert_to_numpy(variable)
    return made, found


def differences(found: dict[str, Any], expected: dict[str, Any]) -> str:
    """Numbers that differ from what is expected by more than 2e-4 of it; "" if none."""
    assert len(found) == len(expected)
    wrong = [
        f"{name}: {one} is not {other}"
        for (name, one), other in zip(found.items(), expected.values(), strict=True)
        if not np.allclose(one, other, rtol=2e-4, atol=1e-5)
    ]
    return "\n".join(wrong)
