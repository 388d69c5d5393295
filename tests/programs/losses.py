"""Every loss and reduction, and everything that weighs or adds to a loss."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from .common import Values, classes, dataset, mlp, outcome, regression, sgd, tokens
from .registry import Env, program

ops = keras.ops
LOSSES = keras.losses


def heads(
    env: Env, losses: dict[str, Any], outputs: int, activation: str | None, labels: np.ndarray, rate: float
) -> Values:
    """One model with a head for each loss: a family is trained in one program, each apart."""
    x, _ = regression(len(labels))
    with env.strategy.scope():
        inputs = keras.Input((4,))
        parts = {
            name: keras.layers.Dense(outputs, activation=activation, name=name)(
                keras.layers.Dense(3, activation="tanh", name=f"{name}_in")(inputs)
            )
            for name in losses
        }
        model = keras.Model(inputs, parts)
        model.compile(sgd(rate), dict(losses))
    data = dataset((x, dict.fromkeys(losses, labels)), batch=12)
    record = model.fit(data, epochs=2, verbose=0)
    values = outcome(model, record)
    found = model.evaluate(data, verbose=0, return_dict=True)
    return values | {f"evaluate_{name}": float(value) for name, value in found.items()}


@program("losses_of_regression")
def _(env: Env) -> Values:
    _, y = regression(42)
    losses = {
        "mse": LOSSES.MeanSquaredError(),
        "mae": LOSSES.MeanAbsoluteError(),
        "mape": LOSSES.MeanAbsolutePercentageError(),
        "msle": LOSSES.MeanSquaredLogarithmicError(),
        "huber": LOSSES.Huber(delta=0.7),
        "logcosh": LOSSES.LogCosh(),
    }
    return heads(env, losses, 1, "softplus", y, 0.003)


@program("losses_of_probabilities")
def _(env: Env) -> Values:
    _, kinds = classes(42)
    losses = {
        "categorical": LOSSES.CategoricalCrossentropy(label_smoothing=0.1),
        "focal": LOSSES.CategoricalFocalCrossentropy(),
        "kld": LOSSES.KLDivergence(),
        "poisson": LOSSES.Poisson(),
        "cosine": LOSSES.CosineSimilarity(axis=-1),
        "hinge3": LOSSES.CategoricalHinge(),
        "binary": LOSSES.BinaryCrossentropy(),
        "binary_focal": LOSSES.BinaryFocalCrossentropy(),
    }
    if hasattr(LOSSES, "CategoricalGeneralizedCrossEntropy"):  # since Keras 3.9
        losses["generalized"] = LOSSES.CategoricalGeneralizedCrossEntropy()
    x, _ = regression(42)
    one_hot = np.eye(3, dtype="float32")[kinds] * 0.9 + 0.03
    with env.strategy.scope():
        inputs = keras.Input((4,))
        parts = {
            name: keras.layers.Dense(3, activation="softmax", name=name)(
                keras.layers.Dense(3, activation="tanh")(inputs)
            )
            for name in [*losses, "sparse"]
        }
        model = keras.Model(inputs, parts)
        model.compile(sgd(0.05), losses | {"sparse": LOSSES.SparseCategoricalCrossentropy()})
    labels: dict[str, np.ndarray] = dict.fromkeys(losses, one_hot)
    # The generalized loss takes class indices, and its own rank of them.
    labels |= {name: kinds for name in ("sparse", "generalized") if name in parts}
    return outcome(model, model.fit(dataset((x, labels), batch=12), epochs=2, verbose=0))


@program("losses_of_margins")
def _(env: Env) -> Values:
    x, _ = regression(42)
    y = np.where(x[:, :1] + x[:, 1:2] > 0, 1.0, -1.0).astype("float32")
    losses = {"hinge": LOSSES.Hinge(), "squared": LOSSES.SquaredHinge()}
    return heads(env, losses, 1, None, y, 0.05)


@program("losses_dice_tversky_per_example")
def _(env: Env) -> Values:
    # With an axis each example has a loss of its own. Without one they are a scalar of the whole batch,
    # which is a program by itself.
    x, _ = regression(42)
    y = (x[:, :3] > 0.2).astype("float32")
    y[:10] = 1.0
    losses = {"dice": LOSSES.Dice(axis=(1,)), "tversky": LOSSES.Tversky(axis=(1,))}
    return heads(env, losses, 3, "sigmoid", y, 0.2)


@program("losses_dice_tversky_of_batch")
def _(env: Env) -> Values:
    x, _ = regression(48)
    y = (x[:, :3] > 0.2).astype("float32")
    y[:10] = 1.0
    losses = {"dice": LOSSES.Dice(), "tversky": LOSSES.Tversky(alpha=0.3, beta=0.7)}
    return heads(env, losses, 3, "sigmoid", y, 0.5)


@program("loss_circle")
def _(env: Env) -> Values:
    # Circle loss compares the examples of a batch with each other: its batch is the global one.
    x, y = classes(48)
    with env.strategy.scope():
        inputs = keras.Input((4,))
        hidden = keras.layers.Dense(4)(inputs)
        model = keras.Model(inputs, keras.layers.UnitNormalization()(hidden))
        model.compile(sgd(0.001), LOSSES.Circle(gamma=4.0))
    return outcome(model, model.fit(dataset(x, y), epochs=2, verbose=0))


@program("loss_ctc")
def _(env: Env) -> Values:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(24, 6, 3)).astype("float32")
    y = rng.integers(1, 4, size=(24, 2)).astype("int32")
    with env.strategy.scope():
        model = keras.Sequential([keras.Input((6, 3)), keras.layers.Dense(4)])
        model.compile(sgd(0.02), LOSSES.CTC())
    return outcome(model, model.fit(dataset(x, y, batch=8), epochs=2, verbose=0), x, y, batch=8)


@program("loss_reductions")
def _(env: Env) -> Values:
    x, y = regression(42)
    weight = np.linspace(0.2, 2.0, 42).astype("float32")
    with env.strategy.scope():
        inputs = keras.Input((4,))
        kinds = ["sum", "sum_over_batch_size", "mean", "mean_with_sample_weight"]
        parts = {k: keras.layers.Dense(1, name=k)(keras.layers.Dense(3, "tanh")(inputs)) for k in kinds}
        model = keras.Model(inputs, parts)
        model.compile(sgd(0.01), {k: LOSSES.MeanSquaredError(reduction=k) for k in kinds})
    data = dataset((x, dict.fromkeys(kinds, y), dict.fromkeys(kinds, weight)), batch=12)
    record = model.fit(data, epochs=2, verbose=0)
    values = outcome(model, record)
    found = model.evaluate(data, verbose=0, return_dict=True)
    return values | {f"evaluate_{name}": float(value) for name, value in found.items()}


@program("loss_reduction_none_in_train_step")
def _(env: Env) -> Values:
    class Net(keras.Model):
        def train_step(self, data: Any) -> dict[str, Any]:
            x, y = data
            with tf.GradientTape() as tape:
                each = self.each_loss(y, self(x, training=True))
                loss = ops.mean(each)
            variables = self.trainable_variables
            self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
            return {"loss": loss}

    x, y = regression(48)
    with env.strategy.scope():
        inputs = keras.Input((4,))
        model = Net(inputs, keras.layers.Dense(1)(keras.layers.Dense(4, "tanh")(inputs)))
        model.each_loss = LOSSES.MeanSquaredError(reduction=None)
        model.compile(sgd())
    return outcome(model, model.fit(dataset(x, y), epochs=2, verbose=0))


@program("loss_mean_with_sample_weight")
def _(env: Env) -> Values:
    x, y = regression(42)
    weight = np.where(np.arange(42) % 16 < 8, 0.1, 3.0).astype("float32")
    with env.strategy.scope():
        model = mlp()
        model.compile(sgd(), LOSSES.MeanSquaredError(reduction="mean_with_sample_weight"), metrics=["mae"])
    record = model.fit(x, y, sample_weight=weight, batch_size=16, shuffle=False, epochs=3, verbose=0)
    values = outcome(model, record)
    found = model.evaluate(x, y, sample_weight=weight, batch_size=16, verbose=0, return_dict=True)
    return values | {f"evaluate_{name}": float(value) for name, value in found.items()}


@program("loss_function_per_example")
def _(env: Env) -> Values:
    def pinball(y_true: Any, y_pred: Any) -> Any:
        error = y_true - y_pred
        return ops.mean(ops.maximum(0.3 * error, -0.7 * error) + 0.1 * ops.square(error), axis=-1)

    x, y = regression(44)
    with env.strategy.scope():
        model = mlp()
        model.compile(sgd(), pinball, metrics=[pinball])
    return outcome(model, model.fit(dataset(x, y), epochs=2, verbose=0))


@program("loss_function_scalar_mean")
def _(env: Env) -> Values:
    def scalar(y_true: Any, y_pred: Any) -> Any:
        return ops.mean(ops.square(y_true - y_pred))

    x, y = regression(48)
    with env.strategy.scope():
        model = mlp()
        model.compile(sgd(), scalar)
    return outcome(model, model.fit(dataset(x, y), epochs=3, verbose=0))


@program("loss_function_scalar_mean_uneven")
def _(env: Env) -> Values:
    def scalar(y_true: Any, y_pred: Any) -> Any:
        return tf.reduce_mean(tf.square(y_true - y_pred))

    x, y = regression(43)
    with env.strategy.scope():
        model = mlp()
        model.compile(sgd(), scalar)
    return outcome(model, model.fit(dataset(x, y), epochs=2, verbose=0))


@program("loss_function_scalar_root_mean_square")
def _(env: Env) -> Values:
    def rmse(y_true: Any, y_pred: Any) -> Any:
        return ops.sqrt(ops.mean(ops.square(y_true - y_pred)))

    x, y = regression(48)
    with env.strategy.scope():
        model = mlp()
        model.compile(sgd(), rmse)
    return outcome(model, model.fit(dataset(x, y), epochs=2, verbose=0), x, y)


@program("loss_function_scalar_dice")
def _(env: Env) -> Values:
    def dice(y_true: Any, y_pred: Any) -> Any:
        both = ops.sum(y_true * y_pred)
        return 1.0 - 2.0 * both / (ops.sum(y_true) + ops.sum(y_pred) + 1e-3)

    x, _ = regression(48)
    y = (x[:, :3] > 0.2).astype("float32")
    y[:12] = 1.0
    with env.strategy.scope():
        model = mlp(outputs=3, activation="sigmoid")
        model.compile(sgd(0.5), dice)
    return outcome(model, model.fit(dataset(x, y), epochs=2, verbose=0))


@program("loss_class_of_own")
def _(env: Env) -> Values:
    class Weighted(keras.losses.Loss):
        def call(self, y_true: Any, y_pred: Any) -> Any:
            return ops.mean(ops.square(y_true - y_pred) * (1.0 + ops.abs(y_true)), axis=-1)

    x, y = regression(44)
    with env.strategy.scope():
        model = mlp()
        model.compile(sgd(0.05), Weighted(name="own"))
    return outcome(model, model.fit(dataset(x, y), epochs=2, verbose=0))


@program("regularizers")
def _(env: Env) -> Values:
    x, y = regression(44)
    with env.strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((4,)),
                keras.layers.Dense(
                    5,
                    activation="tanh",
                    kernel_regularizer=keras.regularizers.L1L2(0.01, 0.02),
                    bias_regularizer=keras.regularizers.L2(0.1),
                ),
                keras.layers.Dense(
                    3, "tanh", kernel_regularizer=keras.regularizers.OrthogonalRegularizer(0.1)
                ),
                keras.layers.Dense(1),
            ]
        )
        model.compile(sgd(), "mse", metrics=["mse"])
    return outcome(model, model.fit(dataset(x, y), epochs=3, verbose=0), x, y)


@program("activity_regularizer")
def _(env: Env) -> Values:
    x, y = regression(48)
    with env.strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((4,)),
                keras.layers.Dense(5, activation="tanh", activity_regularizer="l2"),
                keras.layers.ActivityRegularization(l1=0.02),
                keras.layers.Dense(1),
            ]
        )
        model.compile(sgd(), "mse")
    return outcome(model, model.fit(dataset(x, y), epochs=2, verbose=0))


@program("add_loss_in_layer")
def _(env: Env) -> Values:
    class Spread(keras.layers.Layer):
        def call(self, inputs: Any) -> Any:
            self.add_loss(0.1 * ops.mean(ops.square(inputs)))
            return inputs

    x, y = regression(48)
    with env.strategy.scope():
        model = keras.Sequential(
            [keras.Input((4,)), keras.layers.Dense(5, "tanh"), Spread(), keras.layers.Dense(1)]
        )
        model.compile(sgd(), "mse")
    return outcome(model, model.fit(dataset(x, y), epochs=2, verbose=0))


@program("add_loss_uneven")
def _(env: Env) -> Values:
    class Spread(keras.layers.Layer):
        def call(self, inputs: Any) -> Any:
            self.add_loss(0.2 * ops.mean(ops.square(inputs)))
            return inputs

    x, y = regression(43)
    with env.strategy.scope():
        model = keras.Sequential(
            [keras.Input((4,)), keras.layers.Dense(5, "tanh"), Spread(), keras.layers.Dense(1)]
        )
        model.compile(sgd(), "mse")
    return outcome(model, model.fit(dataset(x, y), epochs=2, verbose=0))


@program("sample_weight")
def _(env: Env) -> Values:
    x, y = regression(44)
    weight = np.linspace(0.1, 3.0, 44).astype("float32")
    with env.strategy.scope():
        model = mlp()
        model.compile(sgd(0.05), "mse", metrics=["mae"], weighted_metrics=["mae", "mse"])
    record = model.fit(
        x,
        y,
        sample_weight=weight,
        batch_size=16,
        shuffle=False,
        epochs=2,
        verbose=0,
        validation_data=(x[:20], y[:20], weight[:20]),
    )
    return outcome(model, record)


@program("class_weight")
def _(env: Env) -> Values:
    x, y = classes(44)
    with env.strategy.scope():
        model = mlp(outputs=3, activation="softmax")
        model.compile(sgd(), "sparse_categorical_crossentropy", weighted_metrics=["accuracy"])
    balance = {0: 0.3, 1: 1.0, 2: 2.5}
    record = model.fit(x, y, class_weight=balance, batch_size=16, shuffle=False, epochs=2, verbose=0)
    return outcome(model, record, x, y)


@program("sample_weight_per_time_step")
def _(env: Env) -> Values:
    x, _ = tokens(36)
    y = (x % 3).astype("int32")
    weight = np.linspace(0.1, 2.0, 36 * 6).reshape(36, 6).astype("float32")
    with env.strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((6,), dtype="int32"),
                keras.layers.Embedding(12, 4),
                keras.layers.Dense(3, activation="softmax"),
            ]
        )
        model.compile(sgd(0.5), "sparse_categorical_crossentropy", weighted_metrics=["accuracy"])
    return outcome(model, model.fit(dataset(x, y, weight, batch=10), epochs=2, verbose=0))


@program("loss_weights_list")
def _(env: Env) -> Values:
    x, y = regression(44)
    with env.strategy.scope():
        inputs = keras.Input((4,))
        hidden = keras.layers.Dense(5, activation="tanh")(inputs)
        model = keras.Model(inputs, [keras.layers.Dense(1)(hidden), keras.layers.Dense(1)(hidden)])
        model.compile(sgd(), ["mse", "mae"], loss_weights=[0.2, 1.5], metrics=[["mae"], ["mse"]])
    return outcome(model, model.fit(dataset((x, (y, y * 2))), epochs=2, verbose=0))
