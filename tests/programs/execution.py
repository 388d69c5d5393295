"""The arguments of fit and compile that change how steps are run, and how many."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from .common import BatchLogs, Values, classes, dataset, history, mlp, outcome, regression, sgd
from .registry import Env, program


def several_steps(env: Env, steps: int, count: int) -> Values:
    x, y = regression(count)
    with env.strategy.scope():
        model = mlp()
        model.compile(sgd(0.05), "mse", metrics=["mae"], steps_per_execution=steps)
    logs = BatchLogs()
    data = dataset(x, y, batch=8)
    record = model.fit(data, validation_data=data, epochs=2, verbose=0, callbacks=[logs])
    return outcome(model, record, x, y, batch=8) | logs.values()


@program("steps_per_execution_2")
def _(env: Env) -> Values:
    return several_steps(env, 2, count=56)


@program("steps_per_execution_3")
def _(env: Env) -> Values:
    return several_steps(env, 3, count=40)


@program("steps_per_execution_numpy_and_accumulation")
def _(env: Env) -> Values:
    x, y = regression(56)
    with env.strategy.scope():
        model = mlp()
        model.compile(sgd(0.05, gradient_accumulation_steps=2), "mse", steps_per_execution=3)
    return outcome(model, model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0))


@program("jit_compile")
def _(env: Env) -> Values:
    x, y = classes(48)
    with env.strategy.scope():
        model = mlp(outputs=3, activation="softmax")
        model.compile(sgd(), "sparse_categorical_crossentropy", metrics=["accuracy"], jit_compile=True)
    return outcome(model, model.fit(dataset(x, y), epochs=2, verbose=0), x, y)


@program("jit_compile_clipped_uneven")
def _(env: Env) -> Values:
    x, y = regression(43)
    with env.strategy.scope():
        model = mlp()
        model.compile(keras.optimizers.Adam(0.02, global_clipnorm=0.2, epsilon=1e-3), "mse", jit_compile=True)
    return outcome(model, model.fit(dataset(x, y), epochs=2, verbose=0))


@program("run_eagerly")
def _(env: Env) -> Values:
    x, y = regression(40)
    with env.strategy.scope():
        model = mlp()
        model.compile(sgd(), "mse", metrics=["mae"], run_eagerly=True)
    return outcome(model, model.fit(dataset(x, y), epochs=2, verbose=0), x, y)


@program("no_jit_explicit")
def _(env: Env) -> Values:
    x, y = regression(40)
    with env.strategy.scope():
        model = mlp()
        model.compile(sgd(), "mse", jit_compile=False, auto_scale_loss=False)
    return outcome(model, model.fit(dataset(x, y), epochs=1, verbose=0))


@program("validation_split_and_frequency")
def _(env: Env) -> Values:
    x, y = regression(50)
    with env.strategy.scope():
        model = mlp()
        model.compile(sgd(), "mse", metrics=["mae"])
    record = model.fit(
        x, y, validation_split=0.3, validation_freq=2, batch_size=10, epochs=4, shuffle=False, verbose=0
    )
    return outcome(model, record)


@program("initial_epoch")
def _(env: Env) -> Values:
    x, y = regression(48)
    epochs: list[int] = []

    class Noted(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            epochs.append(epoch)

    with env.strategy.scope():
        model = mlp()
        model.compile(sgd(), "mse")
    first = model.fit(dataset(x, y), epochs=1, verbose=0)
    record = model.fit(dataset(x, y), initial_epoch=1, epochs=3, verbose=0, callbacks=[Noted()])
    return outcome(model, record) | history(first, "first_") | {"epochs": np.asarray(epochs)}


@program("steps_per_epoch_and_validation_steps")
def _(env: Env) -> Values:
    x, y = regression(48)
    data = dataset(x, y, batch=8)
    with env.strategy.scope():
        model = mlp()
        model.compile(sgd(0.05), "mse", metrics=["mae"])
    record = model.fit(
        data.repeat(),
        steps_per_epoch=4,
        epochs=3,
        validation_data=data.repeat(),
        validation_steps=2,
        verbose=0,
    )
    return outcome(model, record)


@program("validation_batch_size")
def _(env: Env) -> Values:
    x, y = classes(44)
    with env.strategy.scope():
        model = mlp(outputs=3, activation="softmax")
        model.compile(sgd(), "sparse_categorical_crossentropy", metrics=["accuracy"])
    record = model.fit(
        x,
        y,
        batch_size=16,
        shuffle=False,
        epochs=2,
        validation_data=(x[10:], y[10:]),
        validation_batch_size=7,
        verbose=0,
    )
    return outcome(model, record)


@program("fine_tuning")
def _(env: Env) -> Values:
    x, y = regression(48)
    with env.strategy.scope():
        model = mlp()
        model.layers[0].trainable = False
        model.compile(sgd(), "mse")
    values: Values = history(model.fit(dataset(x, y), epochs=2, verbose=0), "frozen_")
    values |= {f"frozen_{i}": w for i, w in enumerate(model.get_weights())}
    model.layers[0].trainable = True
    with env.strategy.scope():
        model.compile(sgd(0.02), "mse", metrics=["mae"])
    return values | outcome(model, model.fit(dataset(x, y), epochs=2, verbose=0), x, y)


@program("compiled_again_with_another_loss")
def _(env: Env) -> Values:
    x, y = regression(44)
    with env.strategy.scope():
        model = mlp()
        model.compile(sgd(), "mse")
    first = model.fit(dataset(x, y), epochs=1, verbose=0)
    with env.strategy.scope():
        model.compile(keras.optimizers.Adam(0.01, epsilon=1e-3), "mae", metrics=["mse"])
    record = model.fit(dataset(x, y), epochs=2, verbose=0)
    return outcome(model, record) | history(first, "first_")


@program("compiled_outside_the_scope")
def _(env: Env) -> Values:
    x, y = regression(44)
    with env.strategy.scope():
        model = mlp()
    # Only variables must be made in the scope; compile and fit may stand anywhere.
    with env.strategy.scope():
        optimizer = sgd()
    model.compile(optimizer, "mse")
    return outcome(model, model.fit(dataset(x, y), epochs=2, verbose=0))


@program("two_models_by_turns")
def _(env: Env) -> Values:
    x, y = regression(44)
    with env.strategy.scope():
        one, two = mlp(), mlp()
        one.compile(sgd(), "mse")
        two.compile(sgd(0.05), "mae")
    one.fit(dataset(x, y), epochs=1, verbose=0)
    first = two.fit(dataset(x, y), epochs=1, verbose=0)
    record = one.fit(dataset(x, two.predict(x, verbose=0)), epochs=1, verbose=0)
    return outcome(one, record) | {f"two_{k}": v for k, v in outcome(two, first).items()}
