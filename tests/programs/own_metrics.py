"""Metrics of a user's own, most of whose updates do not add up over examples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from .common import BatchLogs, Values, dataset, mlp, named, outcome, regression, sgd
from .registry import Env, program

METRICS, OPS = keras.metrics, keras.ops


class Own(METRICS.Metric):
    """A value and the number of calls; `update` gives the new value."""

    start = 0.0

    def __init__(self, name: str | None = None, **kwargs: Any) -> None:
        super().__init__(name=name or type(self).__name__.lower(), **kwargs)
        self.value = self.add_weight(name="value", initializer=keras.initializers.Constant(self.start))
        self.calls = self.add_weight(name="calls", initializer="zeros", dtype="int32")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        error = OPS.abs(OPS.cast(y_true, "float32") - OPS.cast(y_pred, "float32"))
        if sample_weight is not None:
            error = error * OPS.reshape(sample_weight, (-1, 1))
        self.value.assign(self.update(self.value, error))
        self.calls.assign_add(1)

    def update(self, value: Any, error: Any) -> Any:
        raise NotImplementedError

    def result(self) -> Any:
        return self.value + 0

    def reset_state(self) -> None:
        self.value.assign(self.start)
        self.calls.assign(0)


class Largest(Own):
    start = -np.inf

    def update(self, value: Any, error: Any) -> Any:
        return OPS.maximum(value, OPS.max(error))


class Last(Own):
    def update(self, value: Any, error: Any) -> Any:
        return error[-1, 0]


class Calls(Own):
    def update(self, value: Any, error: Any) -> Any:
        return value + 1


class MeanOfMeans(Own):
    def update(self, value: Any, error: Any) -> Any:
        return value + OPS.mean(error)

    def result(self) -> Any:
        return self.value / OPS.cast(self.calls, "float32")


class Smoothed(Own):
    start = 1.0

    def update(self, value: Any, error: Any) -> Any:
        return 0.9 * value + 0.1 * OPS.mean(error)


class Ratio(Own):
    """0 / 0 where a replica has no examples."""

    def update(self, value: Any, error: Any) -> Any:
        return value + OPS.sum(error) / OPS.cast(OPS.shape(error)[0], "float32")


class Median(Own):
    def update(self, value: Any, error: Any) -> Any:
        return value + OPS.median(error)


class Replaced(Own):
    """What is kept is the last batch's."""

    def update(self, value: Any, error: Any) -> Any:
        return OPS.sum(error)


class Prior(Own):
    """Adds up, but does not begin from zero."""

    start = 3.0

    def update(self, value: Any, error: Any) -> Any:
        return value + OPS.sum(error)


class Several(METRICS.Metric):
    """A metric of metrics, one of Keras' among them."""

    def __init__(self, name: str = "several", **kwargs: Any) -> None:
        super().__init__(name=name, **kwargs)
        self.mean = METRICS.Mean()
        self.largest = Largest()

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.mean.update_state(OPS.abs(y_true - OPS.cast(y_pred, "float32")), sample_weight)
        self.largest.update_state(y_true, y_pred)

    def result(self) -> Any:
        return self.mean.result() + self.largest.result()

    def reset_state(self) -> None:
        self.mean.reset_state()
        self.largest.reset_state()


class MeanOfBest(METRICS.Mean):
    """An update of its own on top of Keras'."""

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        super().update_state(OPS.min(OPS.abs(y_true - OPS.cast(y_pred, "float32"))))


class Confusion(METRICS.Metric):
    """That of the newest batch, in integers."""

    def __init__(self, name: str = "confusion", **kwargs: Any) -> None:
        super().__init__(name=name, **kwargs)
        self.matrix = self.add_variable((2, 2), "zeros", dtype="int32", name="matrix")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        pair = [tf.cast(y[:, 0] > 1, "int32") for y in (y_true, y_pred)]
        self.matrix.assign(tf.math.confusion_matrix(*pair, num_classes=2, dtype="int32"))

    def result(self) -> dict[str, Any]:
        return {"hits": OPS.trace(self.matrix), "misses": self.matrix[0, 1] + self.matrix[1, 0]}


def rank(y_true: Any, y_pred: Any) -> Any:
    """A value for each example, which depends on the others."""
    place = OPS.argsort(OPS.argsort(OPS.cast(y_pred[:, 0], "float32")))
    return OPS.cast(place, "float32") * OPS.abs(y_true[:, 0])


def worst(y_true: Any, y_pred: Any) -> Any:
    return OPS.max(OPS.abs(y_true - OPS.cast(y_pred, "float32")))


KINDS = [Largest, Last, Calls, MeanOfMeans, Smoothed, Ratio, Median, Replaced, Prior, Several, MeanOfBest]


def few_metrics() -> list[Any]:
    return [Largest(), MeanOfMeans(), Ratio(), Several(), rank]


def all_metrics() -> list[Any]:
    return [*(kind() for kind in KINDS), Confusion(), rank, worst]


def fit(
    env: Env,
    kind: Any = keras.Model,
    *,
    metrics: Callable[[], list[Any]] = few_metrics,
    weighted: bool = False,
    accumulated: int | None = None,
    **how: Any,
) -> Values:
    """The last batch has one example, so that a replica has none."""
    x, y = regression(41)
    weights = np.linspace(0.1, 2, 41).astype("float32")
    arrays = (x, y, weights) if weighted else (x, y)
    with env.strategy.scope():
        inputs = keras.Input((4,))
        model = kind(inputs, mlp()(inputs))
        optimizer = sgd(0.05, gradient_accumulation_steps=accumulated)
        heavy = [Largest(name="heaviest"), MeanOfMeans(name="weighted")] if weighted else None
        model.compile(optimizer, "mse", metrics=metrics(), weighted_metrics=heavy, **how)
    logs = BatchLogs()
    record = model.fit(
        dataset(*arrays, batch=10),
        validation_data=dataset(*arrays, batch=20),
        epochs=2,
        verbose=0,
        callbacks=[logs] if kind is keras.Model else [],
    )
    return outcome(model, record, x, y) | (logs.values() if kind is keras.Model else {})


@program("own_metrics_in_fit")
def _(env: Env) -> Values:
    return fit(env, metrics=all_metrics)


@program("own_metrics_of_weighted_examples")
def _(env: Env) -> Values:
    return fit(env, weighted=True)


@program("own_metrics_with_accumulation")
def _(env: Env) -> Values:
    return fit(env, accumulated=2)


@program("own_metrics_in_many_steps")
def _(env: Env) -> Values:
    return fit(env, steps_per_execution=3)


@program("own_metrics_in_eager_steps")
def _(env: Env) -> Values:
    return fit(env, run_eagerly=True)


@program("own_metrics_with_xla")
def _(env: Env) -> Values:
    return fit(env, jit_compile=True)


class OwnSteps(keras.Model):
    """Keeps metrics of its own, and gives them losses and rows."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.of_loss = [Largest(name="largest_loss"), Smoothed(name="smoothed_loss")]
        self.of_rows = [kind(name=f"own_{kind.__name__}") for kind in (Last, MeanOfMeans, Several)]

    def update(self, x: Any, y: Any, y_pred: Any, loss: Any) -> Any:
        for metric in self.of_loss:
            metric.update_state(loss, 0.0)
        for metric in self.of_rows:
            metric.update_state(y, y_pred)
        return {**self.compute_metrics(x, y, y_pred), "loss": loss}

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(x, y, y_pred)
        variables = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return self.update(x, y, y_pred, loss)

    def test_step(self, data: Any) -> Any:
        x, y = data
        y_pred = self(x, training=False)
        return self.update(x, y, y_pred, self.compute_loss(x, y, y_pred))


@program("own_metrics_in_own_steps")
def _(env: Env) -> Values:
    return fit(env, OwnSteps)


class Watched(keras.layers.Layer):
    """Follows what passes through it."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = Largest(name="largest_inside")
        self.calls = Calls(name="calls_inside")

    def call(self, x: Any) -> Any:
        for metric in (self.largest, self.calls):
            metric.update_state(x, 0 * x)
        return 2 * x


@program("own_metrics_in_layers")
def _(env: Env) -> Values:
    x, y = regression(41)
    with env.strategy.scope():
        inputs = keras.Input((4,))
        # Less than zero everywhere, so that a row of zeros would show.
        outputs = keras.layers.Dense(1)(Watched()(-keras.ops.exp(inputs)))
        model = keras.Model(inputs, outputs)
        model.compile(sgd(0.01), "mse")
    record = model.fit(dataset(x, y, batch=10), epochs=2, verbose=0)
    return outcome(model, record)


@program("own_metrics_in_loops")
def _(env: Env) -> Values:
    x, y = regression(41)
    with env.strategy.scope():
        model = mlp()
        metrics = [*(kind() for kind in KINDS), Confusion(), Added()]

    def step(batch: Any) -> None:
        features, labels = batch
        for metric in metrics:
            metric.update_state(labels, model(features))

    @tf.function
    def run(batch: Any) -> None:
        env.strategy.run(step, args=(batch,))

    values: Values = {}
    for epoch in range(2):
        for metric in metrics:
            if epoch:
                metric.reset_state()
        for batch in env.strategy.experimental_distribute_dataset(dataset(x, y, batch=12)):
            run(batch)
        for metric in metrics:
            found = metric.result()
            values |= named(found if isinstance(found, dict) else {metric.name: found}, f"{epoch}_")
    return values


class Added(Own):
    """Adds up, from zero; and has a condition that AutoGraph must see."""

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        error = tf.reduce_sum(tf.abs(y_true - y_pred))
        if error > 0:
            self.value.assign_add(error)
