"""`find_learning_rate` suggests a rate of the right size, and leaves everything as it was."""

from __future__ import annotations

import math
import random
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import dtrain
from dtrain.errors import ConfigurationError
from refusals import refused

X = np.ones((16, 1), "float32")


def quadratic(rate: Any) -> keras.Model:
    """A loss of (w - 3)^2: a step with a rate of 0.5 minimises it, and one with a rate above 1 raises it."""
    model = keras.Sequential(
        [keras.Input((1,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")]
    )
    model.compile(keras.optimizers.SGD(rate), "mse")
    return model


def test_the_rate_is_that_of_the_steepest_descent_and_the_sweep_ends_where_it_diverges() -> None:
    with dtrain.OneDeviceStrategy("CPU:0").scope():
        found = dtrain.find_learning_rate(quadratic(0.1), X, 3 * X, lowest=1e-4, highest=100.0, steps=60)
    assert found.suggestion is not None and 0.05 < found.suggestion < 0.5
    assert 10 < len(found.rates) < 60 and found.rates[-1] > 1
    assert found.losses[0] == pytest.approx(9) and min(found.smoothed) < 2 < found.losses[-1]


def state(model: keras.Model) -> list[Any]:
    variables = [*model.variables, *model.optimizer.variables, *model.metrics_variables]
    return [variable.numpy() for variable in variables]


def test_nothing_of_the_sweep_stays() -> None:
    def trained(*, finds: bool) -> list[Any]:
        keras.utils.set_random_seed(4)
        layers = keras.layers
        with dtrain.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
            model = keras.Sequential(
                [keras.Input((4,)), layers.Dense(8), layers.BatchNormalization(), layers.Dropout(0.3)]
            )
            model.compile(keras.optimizers.Adam(0.01, use_ema=True), "mse", metrics=["mae"])
        x = np.random.default_rng(0).normal(size=(24, 4)).astype("float32")
        model.fit(x, x[:, :1], batch_size=8, verbose=0)
        history = model.history
        if finds:
            before, numbers = state(model), (random.getstate(), np.random.get_state()[1].copy())
            assert len(dtrain.find_learning_rate(model, x, x[:, :1], batch_size=8, steps=20).rates) > 10
            for now, then in zip(state(model), before, strict=True):
                np.testing.assert_array_equal(now, then)
            assert random.getstate() == numbers[0] and (np.random.get_state()[1] == numbers[1]).all()
            assert model.history is history
        model.fit(x, x[:, :1], batch_size=8, verbose=0)
        return state(model)

    for found, expected in zip(trained(finds=True), trained(finds=False), strict=True):
        np.testing.assert_array_equal(found, expected)


def test_after_an_error_nothing_stays_either() -> None:
    model = quadratic(0.1)
    data = tf.data.Dataset.from_tensor_slices((X, 3 * X)).batch(4)
    bad = data.map(lambda x, y: (tf.debugging.check_numerics(x / (x - 1), "no number"), y))
    with pytest.raises(tf.errors.InvalidArgumentError, match="no number"):
        dtrain.find_learning_rate(model, data.take(2).concatenate(bad))
    assert float(model.optimizer.learning_rate) == pytest.approx(0.1)
    assert int(model.optimizer.iterations) == 0 and model.get_weights()[0] == 0


def test_where_no_rate_lowers_the_loss_none_is_suggested(caplog: pytest.LogCaptureFixture) -> None:
    found = dtrain.find_learning_rate(quadratic(0.1), X, 0 * X, steps=20)
    assert found.suggestion is None and len(found.rates) == 20


@pytest.mark.parametrize(
    "given", [{"steps": 3}, {"lowest": 0.0}, {"highest": math.inf}, {"lowest": "a"}, {"lowest": 20.0}]
)
def test_numbers_that_are_refused(given: dict[str, Any]) -> None:
    with refused(ConfigurationError, **given):
        dtrain.find_learning_rate(quadratic(0.1), X, X, **given)


def test_models_that_are_refused() -> None:
    with refused(ConfigurationError, "PolynomialDecay"):
        dtrain.find_learning_rate(quadratic(keras.optimizers.schedules.PolynomialDecay(0.1, 5)), X, X)
    with refused(ConfigurationError, "compiled"):
        dtrain.find_learning_rate(keras.Sequential([keras.layers.Dense(1)]), X, X)
