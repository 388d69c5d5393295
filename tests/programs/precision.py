"""Mixed precision, and loss scaling where a gradient overflows."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from .common import Values, dataset, history, outcome, regression, sgd, weights
from .registry import Env, program

ROUNDING = "halves of a batch are rounded to 16 bits before they are added up, a whole batch after"


def linear(optimizer: Any, env: Env) -> keras.Model:
    with env.strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, kernel_initializer="ones")])
        model.compile(optimizer(), "mse")
    return model


def network(env: Env, rate: float = 0.05) -> keras.Model:
    with env.strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((4,)),
                keras.layers.Dense(6, activation="tanh"),
                keras.layers.Dense(1, dtype="float32"),
            ]
        )
        model.compile(sgd(rate), "mse", metrics=["mae"])
    return model


def scaling(model: keras.Model) -> Values:
    return {
        "scale": float(np.asarray(model.optimizer.dynamic_scale)),
        "steps": int(model.optimizer.inner_optimizer.iterations.numpy()),
    }


@program("mixed_bfloat16", rtol=3e-2, atol=1e-2, why=ROUNDING)
def _(env: Env) -> Values:
    keras.config.set_dtype_policy("mixed_bfloat16")
    x, y = regression(44)
    model = network(env)
    return outcome(model, model.fit(dataset(x, y), epochs=2, verbose=0))


@program("mixed_float16", rtol=1e-2, atol=2e-3, why=ROUNDING)
def _(env: Env) -> Values:
    keras.config.set_dtype_policy("mixed_float16")
    x, y = regression(44)
    model = network(env)
    values = outcome(model, model.fit(dataset(x, y), epochs=2, verbose=0))
    return values | scaling(model)


@program("float16_scale_grows", rtol=1e-2, atol=2e-3, why=ROUNDING)
def _(env: Env) -> Values:
    keras.config.set_dtype_policy("mixed_float16")
    x, y = regression(64)
    model = linear(
        lambda: keras.optimizers.LossScaleOptimizer(sgd(0.02), initial_scale=64.0, dynamic_growth_steps=3),
        env,
    )
    record = model.fit(dataset(x, y), epochs=2, verbose=0)
    return weights(model) | history(record) | scaling(model)


def overflow(env: Env, row: int) -> Values:
    """One example's gradient is above float16's largest number at first: the step is skipped, by everyone."""
    keras.config.set_dtype_policy("mixed_float16")
    x, y = regression(48)
    # Only this example's product with the scaled loss is too large; its prediction and loss are finite.
    x[row] = [300.0, 0.0, 0.0, 0.0]
    y[row] = 1.0
    model = linear(lambda: keras.optimizers.LossScaleOptimizer(sgd(1e-5), initial_scale=2.0**14), env)
    record = model.fit(dataset(x, y), epochs=2, verbose=0)
    return weights(model) | history(record) | scaling(model)


@program("float16_overflow_in_the_first_half", rtol=1e-2, atol=2e-3, why=ROUNDING)
def _(env: Env) -> Values:
    return overflow(env, 18)


@program("float16_overflow_in_the_second_half", rtol=1e-2, atol=2e-3, why=ROUNDING)
def _(env: Env) -> Values:
    return overflow(env, 29)


@program("float16_not_a_number_in_one_example", rtol=1e-2, atol=2e-3, why=ROUNDING)
def _(env: Env) -> Values:
    keras.config.set_dtype_policy("mixed_float16")
    x, y = regression(48)
    x[45] = np.inf
    model = linear(lambda: keras.optimizers.LossScaleOptimizer(sgd(0.02), initial_scale=256.0), env)
    record = model.fit(x, y, batch_size=16, shuffle=False, epochs=2, verbose=0)
    assert np.isfinite(model.get_weights()[0]).all(), "the example's step was not skipped"
    return weights(model) | scaling(model) | history(record)


@program("float16_accumulation_and_clipping", rtol=1e-2, atol=2e-3, why=ROUNDING)
def _(env: Env) -> Values:
    keras.config.set_dtype_policy("mixed_float16")
    x, y = regression(64)
    inner = {"gradient_accumulation_steps": 2, "global_clipnorm": 0.5}
    model = linear(lambda: keras.optimizers.LossScaleOptimizer(sgd(0.02, **inner), initial_scale=256.0), env)
    record = model.fit(dataset(x, y), epochs=2, verbose=0)
    return weights(model) | history(record) | scaling(model)


@program("float64")
def _(env: Env) -> Values:
    keras.config.set_dtype_policy("float64")
    keras.config.set_floatx("float64")
    x, y = regression(44)
    model = network(env)
    return outcome(model, model.fit(dataset(x.astype("float64"), y), epochs=2, verbose=0))
