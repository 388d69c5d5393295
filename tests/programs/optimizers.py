"""Every optimizer, and everything that stands between a gradient and its update."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from .common import Values, classes, dataset, history, mlp, outcome, regression, sgd, weights
from .registry import Env, program

O = keras.optimizers  # noqa: E741
Maker = Callable[[], keras.optimizers.Optimizer]


def each(env: Env, makers: dict[str, Maker], count: int = 44) -> Values:
    """Train the same model once with each optimizer."""
    x, y = regression(count)
    values: Values = {}
    for name, make in makers.items():
        keras.utils.set_random_seed(7)
        with env.strategy.scope():
            model = mlp()
            model.compile(make(), "mse")
            # ScheduleFreeAdamW copies the weights into its own variables when it is built; built inside the
            # traced step, as Keras does on one device, it never does.
            model.optimizer.build(model.trainable_variables)
        record = model.fit(dataset(x, y), epochs=2, verbose=0)
        values |= weights(model, f"{name}_w") | history(record, f"{name}_")
        values[f"{name}_iterations"] = int(model.optimizer.iterations.numpy())
    return values


@program("optimizers_sgd_rmsprop")
def _(env: Env) -> Values:
    makers: dict[str, Maker] = {
        "sgd": lambda: O.SGD(0.1),
        "nesterov": lambda: O.SGD(0.1, momentum=0.8, nesterov=True),
        "rmsprop": lambda: O.RMSprop(0.01, momentum=0.5, centered=True, epsilon=1e-3),
        "adagrad": lambda: O.Adagrad(0.1),
        "adadelta": lambda: O.Adadelta(1.0, epsilon=1e-3),
        "ftrl": lambda: O.Ftrl(0.1, l1_regularization_strength=0.001, l2_regularization_strength=0.01),
    }
    return each(env, makers)


@program("optimizers_adam_family")
def _(env: Env) -> Values:
    makers: dict[str, Maker] = {
        "adam": lambda: O.Adam(0.02, epsilon=1e-3),
        "amsgrad": lambda: O.Adam(0.02, amsgrad=True, epsilon=1e-3),
        "adamw": lambda: O.AdamW(0.02, weight_decay=0.05, epsilon=1e-3),
        "nadam": lambda: O.Nadam(0.02, epsilon=1e-3),
        "adamax": lambda: O.Adamax(0.02, epsilon=1e-3),
    }
    return each(env, makers)


@program("optimizer_schedule_free", keras="3.14")
def _(env: Env) -> Values:
    return each(env, {"schedule_free": lambda: O.ScheduleFreeAdamW(0.02, epsilon=1e-3)})


@program("optimizers_lion_lamb_adafactor")
def _(env: Env) -> Values:
    makers: dict[str, Maker] = {
        "lion": lambda: O.Lion(0.003),
        "lamb": lambda: O.Lamb(0.02, epsilon=1e-3),
        "adafactor": lambda: O.Adafactor(0.02),
    }
    return each(env, makers)


@program("optimizer_muon", keras="3.13")  # before, Keras looks for its state by a path that variables lack
def _(env: Env) -> Values:
    return each(env, {"muon": lambda: O.Muon(0.02, adam_beta_2=0.95)})


@program("optimizer_per_variable", keras="3.15")  # before, Keras has no MultiOptimizer
def _(env: Env) -> Values:
    x, y = regression(44)
    with env.strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((4,)),
                keras.layers.Dense(5, activation="tanh", name="body"),
                keras.layers.Dense(1, name="head"),
            ]
        )
        chosen = O.MultiOptimizer(O.OptimizerMap(O.SGD(0.1), {"body/.*": O.Adam(0.01, epsilon=1e-3)}))
        model.compile(chosen, "mse")
    record = model.fit(dataset(x, y), epochs=2, verbose=0)
    return weights(model) | history(record)


@program("optimizer_of_own")
def _(env: Env) -> Values:
    class Signed(O.Optimizer):
        """Steps by the gradient over its largest entry: not linear, so the reduction must come first."""

        def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
            largest = keras.ops.max(keras.ops.abs(gradient)) + 1e-3
            rate = keras.ops.cast(learning_rate, variable.dtype)
            self.assign_sub(variable, rate * gradient / largest)

    x, y = regression(48)
    with env.strategy.scope():
        model = mlp()
        model.compile(Signed(0.05), "mse")
    return outcome(model, model.fit(dataset(x, y), epochs=2, verbose=0))


@program("clipnorm")
def _(env: Env) -> Values:
    return each(env, {"sgd": lambda: O.SGD(0.5, clipnorm=0.2), "adam": lambda: O.Adam(0.02, clipnorm=0.1)})


@program("clipvalue")
def _(env: Env) -> Values:
    return each(
        env, {"sgd": lambda: O.SGD(0.5, clipvalue=0.08), "adam": lambda: O.Adam(0.02, clipvalue=0.05)}
    )


@program("global_clipnorm")
def _(env: Env) -> Values:
    return each(
        env,
        {"sgd": lambda: sgd(0.3, global_clipnorm=0.3), "nadam": lambda: O.Nadam(0.02, global_clipnorm=0.1)},
    )


@program("weight_decay")
def _(env: Env) -> Values:
    def excluding() -> keras.optimizers.Optimizer:
        made = O.AdamW(0.02, weight_decay=0.2, epsilon=1e-3)
        made.exclude_from_weight_decay(var_names=["bias"])
        return made

    return each(env, {"sgd": lambda: O.SGD(0.1, weight_decay=0.1), "excluding": excluding})


@program("moving_average_overwritten_at_the_end")
def _(env: Env) -> Values:
    return each(env, {"sgd": lambda: sgd(0.1, use_ema=True, ema_momentum=0.7)})


@program("moving_average_overwritten_often")
def _(env: Env) -> Values:
    return each(
        env, {"sgd": lambda: sgd(0.1, use_ema=True, ema_momentum=0.7, ema_overwrite_frequency=2)}, count=60
    )


@program("learning_rate_schedules")
def _(env: Env) -> Values:
    S = O.schedules
    return each(
        env,
        {
            "exponential": lambda: O.SGD(S.ExponentialDecay(0.2, 2, 0.7)),
            "cosine": lambda: sgd(S.CosineDecay(0.01, 4, warmup_target=0.1, warmup_steps=2)),
            "piecewise": lambda: O.Adam(S.PiecewiseConstantDecay([2, 4], [0.05, 0.02, 0.01]), epsilon=1e-3),
        },
    )


@program("accumulation_sgd")
def _(env: Env) -> Values:
    return each(env, {"sgd": lambda: sgd(0.2, gradient_accumulation_steps=2)}, count=64)


@program("accumulation_adam")
def _(env: Env) -> Values:
    return each(env, {"adam": lambda: O.Adam(0.02, epsilon=1e-3, gradient_accumulation_steps=3)}, count=64)


@program("accumulation_uneven")
def _(env: Env) -> Values:
    # Neither does the number of batches divide into the accumulation, nor the last batch by the replicas.
    return each(env, {"sgd": lambda: sgd(0.2, gradient_accumulation_steps=2)}, count=39)


@program("accumulation_clipped")
def _(env: Env) -> Values:
    return each(
        env,
        {
            "global": lambda: sgd(0.3, gradient_accumulation_steps=2, global_clipnorm=0.3),
            "value": lambda: sgd(0.3, gradient_accumulation_steps=2, clipvalue=0.05),
        },
        count=64,
    )


@program("accumulation_with_moving_average")
def _(env: Env) -> Values:
    return each(
        env,
        {
            "ema": lambda: sgd(
                0.2, gradient_accumulation_steps=2, use_ema=True, ema_momentum=0.6, ema_overwrite_frequency=2
            ),
            "decayed": lambda: O.AdamW(0.02, weight_decay=0.1, gradient_accumulation_steps=2, epsilon=1e-3),
        },
        count=64,
    )


@program("accumulation_with_schedule")
def _(env: Env) -> Values:
    rate = O.schedules.ExponentialDecay(0.2, 2, 0.5)
    return each(env, {"sgd": lambda: sgd(rate, gradient_accumulation_steps=2)}, count=64)


@program("constraints")
def _(env: Env) -> Values:
    x, y = regression(44)
    C = keras.constraints
    with env.strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((4,)),
                keras.layers.Dense(5, "tanh", kernel_constraint=C.MaxNorm(0.8)),
                keras.layers.Dense(4, "tanh", kernel_constraint=C.UnitNorm(), bias_constraint=C.NonNeg()),
                keras.layers.Dense(1, kernel_constraint=C.MinMaxNorm(0.3, 0.9)),
            ]
        )
        model.compile(sgd(), "mse")
    return outcome(model, model.fit(dataset(x, y), epochs=2, verbose=0))


@program("constraints_with_accumulation")
def _(env: Env) -> Values:
    x, y = regression(64)
    with env.strategy.scope():
        model = mlp(kernel_constraint=keras.constraints.MaxNorm(0.8))
        model.compile(sgd(0.2, gradient_accumulation_steps=2), "mse")
    return outcome(model, model.fit(dataset(x, y), epochs=2, verbose=0))


@program("learning_rate_assigned_between_fits")
def _(env: Env) -> Values:
    x, y = classes(48)
    with env.strategy.scope():
        model = mlp(outputs=3, activation="softmax")
        model.compile(sgd(), "sparse_categorical_crossentropy")
    first = model.fit(dataset(x, y), epochs=1, verbose=0)
    model.optimizer.learning_rate = 0.01
    second = model.fit(dataset(x, y), epochs=2, verbose=0)
    rate = float(np.asarray(model.optimizer.learning_rate))
    return outcome(model, second) | history(first, "first_") | {"rate": rate}
