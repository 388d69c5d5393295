"""Optimizers, and what stands between a gradient and its update."""

from __future__ import annotations

import keras
import numpy as np

from dtrain.conformance.corpus import ProgramRun, Values, program
from dtrain.conformance.parts import dataset, history, network, regression, sgd, trained, weights


def _fit(run: ProgramRun, make: type | None = None, count: int = 44, **options: object) -> Values:
    """Two epochs of a small network under one optimizer."""
    x, y = regression(count)
    with run.strategy.scope():
        model = network()
        model.compile((make or keras.optimizers.SGD)(**options), "mse")
    return trained(model, model.fit(dataset(x, y), epochs=2, verbose=0))


@program()
def adam(run: ProgramRun) -> Values:
    """Adam."""
    return _fit(run, keras.optimizers.Adam, learning_rate=0.02, epsilon=1e-3)


@program()
def weight_decay(run: ProgramRun) -> Values:
    """AdamW, whose decay is independent of the gradient."""
    return _fit(run, keras.optimizers.AdamW, learning_rate=0.02, weight_decay=0.2, epsilon=1e-3)


@program()
def rate_by_schedule(run: ProgramRun) -> Values:
    """A learning rate that falls with each update."""
    rate = keras.optimizers.schedules.ExponentialDecay(0.2, 2, 0.7)
    return _fit(run, learning_rate=rate, momentum=0.9)


@program()
def clipped_by_norm(run: ProgramRun) -> Values:
    """`clipnorm`: each gradient of the whole batch is clipped by its norm."""
    return _fit(run, learning_rate=0.5, clipnorm=0.2)


@program()
def clipped_by_value(run: ProgramRun) -> Values:
    """`clipvalue`: each number of a gradient of the whole batch is clipped."""
    return _fit(run, learning_rate=0.5, clipvalue=0.08)


@program()
def clipped_by_global_norm(run: ProgramRun) -> Values:
    """`global_clipnorm`: all gradients of the whole batch are clipped by their common norm."""
    return _fit(run, learning_rate=0.3, momentum=0.9, global_clipnorm=0.3)


@program()
def accumulation(run: ProgramRun) -> Values:
    """`gradient_accumulation_steps`: one update in two steps."""
    return _fit(run, count=64, learning_rate=0.2, gradient_accumulation_steps=2)


@program()
def accumulation_uneven(run: ProgramRun) -> Values:
    """Accumulation where neither steps nor examples divide evenly, with clipping."""
    return _fit(run, count=39, learning_rate=0.2, gradient_accumulation_steps=2, global_clipnorm=0.3)


@program()
def moving_average(run: ProgramRun) -> Values:
    """`use_ema`, with the weights overwritten at the end."""
    return _fit(run, learning_rate=0.1, use_ema=True, ema_momentum=0.7)


@program()
def moving_average_overwritten(run: ProgramRun) -> Values:
    """`use_ema`, with the weights overwritten every second update."""
    return _fit(run, count=60, learning_rate=0.1, use_ema=True, ema_momentum=0.7, ema_overwrite_frequency=2)


@program()
def constraints(run: ProgramRun) -> Values:
    """Constraints of weights, applied after each update."""
    x, y = regression(44)
    with run.strategy.scope():
        model = network(kernel_constraint=keras.constraints.MaxNorm(0.8), bias_constraint="non_neg")
        model.compile(sgd(), "mse")
    return trained(model, model.fit(dataset(x, y), epochs=2, verbose=0))


@program(rtol=3e-2, atol=1e-2)
def mixed_bfloat16(run: ProgramRun) -> Values:
    """The policy `mixed_bfloat16`."""
    keras.config.set_dtype_policy("mixed_bfloat16")
    x, y = regression(44)
    with run.strategy.scope():
        layers = [keras.layers.Dense(6, "tanh"), keras.layers.Dense(1, dtype="float32")]
        model = keras.Sequential([keras.Input((4,)), *layers])
        model.compile(sgd(0.05), "mse")
    return trained(model, model.fit(dataset(x, y), epochs=2, verbose=0))


@program(rtol=1e-2, atol=2e-3)
def float16_overflow(run: ProgramRun) -> Values:
    """The policy `mixed_float16`: one example's gradient overflows, so the whole step is skipped."""
    keras.config.set_dtype_policy("mixed_float16")
    x, y = regression(48)
    x[29], y[29] = [300.0, 0.0, 0.0, 0.0], 1.0
    with run.strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, kernel_initializer="ones")])
        inner = keras.optimizers.SGD(1e-5, momentum=0.9)
        model.compile(keras.optimizers.LossScaleOptimizer(inner, initial_scale=2.0**14), "mse")
    record = model.fit(dataset(x, y), epochs=2, verbose=0)
    scale = float(np.asarray(model.optimizer.dynamic_scale))
    return weights(model) | history(record) | {"scale": scale}
