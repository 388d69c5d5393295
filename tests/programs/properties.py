"""What rightly differs by replica, or holds of a job rather than of its numbers: each asserts by itself."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from .common import Values, dataset, images, mlp, regression, sgd, weights
from .registry import Env, property_check

layers = keras.layers
FEATURES = 64


def unlike_rows(env: Env, layer: Any, seed: int = 3) -> np.ndarray:
    """The mean, over a batch of one equal example a replica, of what a random layer makes of ones.

    Read from the gradient of a fitted model, so it is what training sees.
    """
    keras.utils.set_random_seed(seed)
    with env.strategy.scope():
        scale = layers.Dense(1, use_bias=False, kernel_initializer="zeros")
        model = keras.Sequential([keras.Input((FEATURES,)), layer(), scale])
        model.compile(keras.optimizers.SGD(1.0), lambda y, p: keras.ops.mean(p - y, axis=-1))
    x, y = np.ones((2, FEATURES), "float32"), np.zeros((2, 1), "float32")
    model.fit(x, y, batch_size=2, epochs=1, shuffle=False, verbose=0)
    return -model.get_weights()[0][:, 0]


@property_check("dropout_differs_by_replica_and_repeats")
def _(env: Env) -> Values:
    first = unlike_rows(env, lambda: layers.Dropout(0.5))
    again = unlike_rows(env, lambda: layers.Dropout(0.5))
    other = unlike_rows(env, lambda: layers.Dropout(0.5), seed=4)
    # A kept unit counts 2: the mean of two is 0, 1 or 2, and 1 only where the two masks are not alike.
    assert set(np.round(first, 4)) == {0.0, 1.0, 2.0}, f"masks are the same on every replica: {first[:8]}"
    np.testing.assert_array_equal(first, again, "the same seed gives other masks")
    assert (first != other).any(), "another seed gives the same masks"
    return {"first": first}


@property_check("noise_differs_by_replica_and_repeats")
def _(env: Env) -> Values:
    first = unlike_rows(env, lambda: layers.GaussianNoise(1.0))
    again = unlike_rows(env, lambda: layers.GaussianNoise(1.0))
    # The mean of two independent draws has variance 1/2, that of one draw taken twice has 1.
    assert np.var(first) < 0.8, f"noise is the same on every replica: variance {np.var(first)}"
    np.testing.assert_array_equal(first, again, "the same seed gives other noise")
    return {"first": first}


@property_check("dropout_differs_in_a_loop")
def _(env: Env) -> Values:
    def masks() -> np.ndarray:
        keras.utils.set_random_seed(5)
        with env.strategy.scope():
            layer = layers.Dropout(0.5, seed=11)
        run = tf.function(
            lambda: env.strategy.run(lambda: tf.stop_gradient(layer(tf.ones((1, FEATURES)), training=True)))
        )
        return np.stack([env.strategy.gather(run(), axis=0).numpy() for _ in range(2)])

    found = masks()
    assert (found[0] != found[1]).any(), "the second step has the first one's mask"
    for replica in range(1, env.replicas):
        assert (found[0, 0] != found[0, replica]).any(), "masks are the same on every replica"
    np.testing.assert_array_equal(found, masks(), "the same seed gives other masks")
    return {"masks": found}


@property_check("batch_normalization_statistics_are_the_replicas_mean")
def _(env: Env) -> Values:
    x, y = regression(16)
    with env.strategy.scope():
        model = keras.Sequential(
            [keras.Input((4,)), layers.BatchNormalization(momentum=0.5), layers.Dense(1)]
        )
        model.compile(keras.optimizers.SGD(0.0), "mse")
    model.fit(dataset(x, y), epochs=1, verbose=0)
    mean, variance = (v.numpy() for v in model.layers[0].non_trainable_variables)
    count = env.replicas
    # Replicas may take the batch's examples in blocks or by turns.
    blocks, turns = np.split(x, count), [x[i::count] for i in range(count)]
    np.testing.assert_allclose(mean, 0.5 * x.mean(axis=0), rtol=1e-4, atol=1e-6)
    expected = [0.5 + 0.5 * np.mean([p.var(axis=0) for p in parts], axis=0) for parts in (blocks, turns)]
    assert any(np.allclose(variance, e, rtol=1e-4) for e in expected), f"{variance}, not one of {expected}"
    return {"mean": mean, "variance": variance}


@property_check("batch_normalization_statistics_in_a_loop_of_ones_own")
def _(env: Env) -> Values:
    x, y = regression(21)  # parts of unequal size
    with env.strategy.scope():
        layer = layers.BatchNormalization(momentum=0.5)
        layer.build((None, 4))
    data = env.strategy.experimental_distribute_dataset(dataset(x, y, batch=21))
    step = tf.function(lambda part: env.strategy.run(lambda x, y: layer(x, training=True), args=part))
    for part in data:
        step(part)
    np.testing.assert_allclose(layer.moving_mean.numpy(), 0.5 * x.mean(axis=0), rtol=1e-4, atol=1e-6)
    assert_replicas_agree(env, [layer.moving_mean, layer.moving_variance])
    return {"mean": layer.moving_mean.numpy()}


def assert_replicas_agree(env: Env, variables: list[Any]) -> None:
    for variable in variables:
        copies = env.strategy.experimental_local_results(variable.value)
        for copy in copies[1:]:
            same = np.array_equal(copies[0].numpy(), copy.numpy(), equal_nan=True)
            assert same, f"{variable.path} differs between replicas"


@property_check("replicas_end_with_the_same_bits")
def _(env: Env) -> Values:
    x, y = images(27)
    with env.strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((6, 6, 2)),
                layers.Conv2D(4, 3),
                layers.BatchNormalization(),
                layers.Activation("relu"),
                layers.Dropout(0.3),
                layers.Flatten(),
                layers.Dense(3, activation="softmax"),
            ]
        )
        model.compile(
            keras.optimizers.Adam(0.02, global_clipnorm=1.0, use_ema=True),
            "sparse_categorical_crossentropy",
            metrics=["accuracy"],
        )
    record = model.fit(dataset(x, y, batch=8), epochs=2, verbose=0)
    # A dropout layer's seed state belongs to its replica.
    states = [v for v in model.non_trainable_variables if "seed" not in v.path]
    assert_replicas_agree(env, model.trainable_variables + states + model.optimizer.variables)
    return weights(model) | {"loss": np.asarray(record.history["loss"])}


@property_check("training_repeats_bit_for_bit")
def _(env: Env) -> Values:
    def once() -> list[np.ndarray]:
        keras.utils.clear_session()
        keras.utils.set_random_seed(9)
        x, y = regression(40)
        with env.strategy.scope():
            model = keras.Sequential(
                [
                    keras.Input((4,)),
                    layers.Dense(8, activation="tanh"),
                    layers.Dropout(0.2),
                    layers.Dense(1),
                ]
            )
            model.compile(sgd(), "mse")
        model.fit(x, y, batch_size=12, epochs=2, verbose=0)
        return model.get_weights()

    first, again = once(), once()
    for one, two in zip(first, again, strict=True):
        np.testing.assert_array_equal(one, two)
    return {f"w{i}": w for i, w in enumerate(first)}


@property_check("random_layers_are_still_outside_training")
def _(env: Env) -> Values:
    x, y = regression(40)
    with env.strategy.scope():
        model = keras.Sequential(
            [keras.Input((4,)), layers.Dropout(0.5), layers.GaussianNoise(0.9), layers.Dense(1)]
        )
        model.compile(sgd(), "mse")
    weight, bias = model.get_weights()
    np.testing.assert_allclose(model.predict(x, verbose=0), x @ weight + bias, rtol=1e-4, atol=1e-5)
    loss = model.evaluate(x, y, verbose=0)
    np.testing.assert_allclose(loss, np.mean((x @ weight + bias - y) ** 2), rtol=1e-4)
    return {"loss": loss}


@property_check("strategy_is_what_it_says")
def _(env: Env) -> None:
    assert isinstance(env.strategy, tf.distribute.Strategy)
    with env.strategy.scope():
        assert tf.distribute.get_strategy() is env.strategy
        model = mlp()
    assert model.distribute_strategy.num_replicas_in_sync == env.replicas
    ids = env.strategy.run(lambda: tf.distribute.get_replica_context().replica_id_in_sync_group)
    local = [int(i) for i in env.strategy.experimental_local_results(ids)]
    each = env.replicas // env.workers
    assert local == list(range(env.rank * each, env.rank * each + each))
