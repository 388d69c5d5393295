"""Stock Keras training steps, partitioned: the numbers of one device, equal copies, few rounds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from partitioned import StepOnReplicas

layers = keras.layers
RANDOM = np.random.default_rng(0)
Made = tuple[Any, np.ndarray, np.ndarray]
PROGRAMS: dict[str, tuple[Callable[[], Made], int]] = {}


def program(rounds: int) -> Callable[[Callable[[], Made]], Callable[[], Made]]:
    """A program, and the rounds of communication that its step needs."""

    def register(function: Callable[[], Made]) -> Callable[[], Made]:
        PROGRAMS[function.__name__] = function, rounds
        return function

    return register


def model_of(*parts: Any, shape: tuple[int, ...], dtype: str = "float32", cls: Any = keras.Model) -> Any:
    inputs = keras.Input(shape, dtype=dtype)
    value = inputs
    for each in parts:
        value = each(value)
    return cls(inputs, value)


def normal(*shape: int) -> np.ndarray:
    return RANDOM.normal(size=shape).astype("float32")


@program(rounds=1)
def dropout_and_adam() -> Made:
    model = model_of(layers.Dense(8, "tanh"), layers.Dropout(0.3), layers.Dense(1), shape=(6,))
    model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    return model, normal(11, 6), normal(11, 1)


@program(rounds=1)
def global_norm_and_weight_average() -> Made:
    model = model_of(layers.Dense(4, kernel_regularizer="l2"), layers.Dense(1), shape=(6,))
    optimizer = keras.optimizers.SGD(0.1, global_clipnorm=0.1, use_ema=True, ema_overwrite_frequency=2)
    model.compile(optimizer, "mse")
    return model, normal(11, 6), normal(11, 1)


@program(rounds=2)
def accumulation_in_float16() -> Made:
    model = model_of(layers.Dense(4, dtype="mixed_float16"), layers.Dense(1), shape=(6,))
    inner = keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)
    model.compile(keras.optimizers.LossScaleOptimizer(inner, initial_scale=8.0), "mse")
    return model, normal(11, 6), normal(11, 1)


@program(rounds=4)
def images_and_batch_normalization() -> Made:
    body = [
        layers.Conv2D(4, 3),
        layers.BatchNormalization(),
        layers.ReLU(),
        layers.MaxPooling2D(),
        layers.Flatten(),
    ]
    model = model_of(*body, layers.Dense(3, "softmax"), shape=(8, 8, 2))
    model.compile(keras.optimizers.SGD(0.1), "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model, normal(11, 8, 8, 2), RANDOM.integers(0, 3, 11)


@program(rounds=1)
def attention_of_tokens() -> Made:
    inputs = keras.Input((None,), dtype="int32")
    value = layers.Embedding(9, 8, mask_zero=True)(inputs)
    value = layers.LayerNormalization()(value + layers.MultiHeadAttention(2, 4, dropout=0.1)(value, value))
    model = keras.Model(inputs, layers.Dense(3)(layers.GlobalAveragePooling1D()(value)))
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    return model, RANDOM.integers(0, 9, (11, 5)).astype("int32"), RANDOM.integers(0, 3, 11)


@program(rounds=1)
def recurrent() -> Made:
    body = [layers.Bidirectional(layers.LSTM(3, return_sequences=True)), layers.GRU(3), layers.Dense(1)]
    model = model_of(layers.Masking(), *body, shape=(5, 4))
    model.compile(keras.optimizers.RMSprop(0.01), "mse")
    return model, normal(11, 5, 4), normal(11, 1)


class OwnStep(keras.Model):  # type: ignore[misc]
    """A step whose update depends on the loss, with noise in the gradients and a counter of its own."""

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data[:2]
        with tf.GradientTape() as tape:
            errors = tf.square(self(x, training=True) - y)
            loss = tf.reduce_sum(tf.where(y > 0.0, errors, 0.0)) / tf.maximum(
                tf.reduce_sum(tf.cast(y > 0.0, "float32")), 1.0
            )
        gradients = tape.gradient(loss, self.trainable_variables)
        noise = [tf.random.stateless_normal(each.shape, [1, 2]) * 0.01 for each in gradients]
        gradients = [a + b for a, b in zip(gradients, noise, strict=True)]

        def update() -> tf.Tensor:
            for variable, gradient in zip(self.trainable_variables, gradients, strict=True):
                variable.assign_sub(0.1 * gradient / (1.0 + loss))
            return tf.constant(1)

        tf.cond(tf.math.is_finite(loss) & (loss > 0.01), update, lambda: tf.constant(0))
        return {"loss": loss}


@program(rounds=2)
def own_step_that_depends_on_the_loss() -> Made:
    model = model_of(layers.Dense(4, "tanh"), layers.Dense(1), shape=(6,), cls=OwnStep)
    model.compile("sgd", "mse")
    return model, normal(11, 6), normal(11, 1)


def built(name: str) -> tuple[Made, int]:
    keras.utils.set_random_seed(1)
    make, rounds = PROGRAMS[name]
    model, x, y = make()
    model.train_on_batch(x[:3], y[:3])  # makes the variables of optimizer and metrics
    return (model, x, y), rounds


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_step_has_the_numbers_of_one_device(name: str) -> None:
    (model, x, y), rounds = built(name)
    step = StepOnReplicas(model, 3, (x, y))
    for sizes in ([4, 5, 2], [1, 2, 3], [5, 1, 4]):
        rows = sum(sizes)
        step.on_one_device(x[:rows], y[:rows])
        step(x[:rows], y[:rows], sizes)
    exact = 5e-3 if "float16" in name else 2e-4  # of a sum in another order
    for place, variable in enumerate(step.variables):
        first = step.copies[0][place].numpy()
        np.testing.assert_allclose(
            first, variable.numpy(), rtol=exact, atol=exact / 100, err_msg=variable.name
        )
        for other in step.copies[1:]:
            np.testing.assert_array_equal(other[place].numpy(), first, err_msg=variable.name)
    assert step.plan.rounds <= rounds


@pytest.mark.parametrize("name", ["dropout_and_adam", pytest.param("recurrent", marks=pytest.mark.long)])
def test_replicas_of_several_processes_end_with_the_bits_of_those_of_one(name: str) -> None:
    (model, x, y), _ = built(name)
    together, apart = (StepOnReplicas(model, 2, (x, y), processes=each) for each in (False, True))
    for sizes in ([4, 5], [1, 2]):
        for step in (together, apart):
            step(x[: sum(sizes)], y[: sum(sizes)], sizes)
    for copies in apart.copies:
        for own, other in zip(copies, together.copies[0], strict=True):
            np.testing.assert_array_equal(own.numpy(), other.numpy(), err_msg=other.name)
