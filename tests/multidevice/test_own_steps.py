"""Models with a step of their own: how often it is traced, what it builds, writes and returns, by replica."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import dtrain

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(44, 6)).astype("float32")  # batches of 16, 16 and 12
Y = X.sum(axis=1, keepdims=True).astype("float32")
TRACES: list[str] = []  # the models whose steps were traced


class OwnStep(keras.Model):
    """A linear model; what else its step does is `more`, and what that returns is reported."""

    more: Callable[[Any, Any, Any], dict[str, Any]] | None = None

    def train_step(self, data: Any) -> dict[str, Any]:
        TRACES.append(self.name)
        x, y = data
        with tf.GradientTape() as tape:
            predicted = self(x, training=True)
            loss = tf.reduce_mean((predicted - y) ** 2)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"loss": loss, **(self.more(self, x, predicted) if self.more else {})}


def own_step(strategy: Any, *layers: Any, more: Any = None) -> OwnStep:
    with strategy.scope():
        inputs = outputs = keras.Input((6,))
        for layer in (*layers, keras.layers.Dense(1)):
            outputs = layer(outputs)
        model = OwnStep(inputs, outputs)
        model.more = more
        model.compile("sgd")
    return model


def variable(strategy: Any, value: Any, **options: Any) -> keras.Variable:
    with strategy.scope():
        return keras.Variable(value, trainable=False, **options)


def trained(strategy: Any, make: Callable[[Any], Any]) -> tuple[Any, dict[str, Any]]:
    keras.utils.set_random_seed(3)
    model = make(strategy)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        history = model.fit(X, Y, batch_size=16, epochs=2, shuffle=False, verbose=0)
    return model, history.history


def alike(make: Callable[[Any], Any], kind: Any = dtrain.MirroredStrategy) -> tuple[Any, Any]:
    """Trains on one device and on two replicas, and compares all variables and what is reported."""
    one, expected = trained(dtrain.OneDeviceStrategy("CPU:0"), make)
    two, found = trained(kind(), make)
    assert {*found} == {*expected}
    for name in expected:
        # One device reports the last step of its own.
        np.testing.assert_allclose(found[name][-1], expected[name][-1], rtol=2e-4, atol=1e-6, err_msg=name)
    assert [v.shape for v in two.variables] == [v.shape for v in one.variables]
    for a, b in zip(two.variables, one.variables, strict=True):
        if "seed" not in a.path:
            np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=2e-4, atol=1e-6, err_msg=a.path)
    return one, two


@pytest.mark.parametrize(
    ("strategy", "traces"),
    [
        (lambda: dtrain.OneDeviceStrategy("CPU:0"), 1),
        (dtrain.MirroredStrategy, 2),  # once to build the optimizer, and once for any number of replicas
    ],
)
def test_how_often_a_step_is_traced(strategy: Any, traces: int) -> None:
    model, _ = trained(strategy(), own_step)
    assert TRACES.count(model.name) == traces


def test_a_step_that_scales_by_the_replicas_has_one() -> None:
    def scaled(strategy: Any) -> Any:
        def more(model: Any, x: Any, predicted: Any) -> dict[str, Any]:
            return {"scaled": tf.nn.compute_average_loss(tf.reduce_sum(x, 1))}

        return own_step(strategy, more=more)

    alike(scaled)


def test_a_step_need_not_use_the_loss_and_metrics_that_it_is_compiled_with() -> None:
    def make(strategy: Any) -> Any:
        model = own_step(strategy)
        with strategy.scope():
            model.compile("sgd", "mse", metrics=["mae"])
        return model

    alike(make)


class Block(keras.layers.Layer):
    """Builds what is in it when it is called."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.out = keras.layers.Dense(8, activation="relu"), keras.layers.Dense(1)

    def call(self, x: Any) -> Any:
        return self.out(self.hidden(x))


class Captioner(keras.Model):
    """Parts that only its step calls, an optimizer for each, and a metric that the step makes."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = keras.Sequential([keras.layers.Dense(8, activation="tanh")])
        self.decoder = Block()
        self.own_optimizer = keras.optimizers.Adam(0.01)
        self.late: Any = None
        self.steps = keras.Variable(0, dtype="int32", trainable=False)

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        if self.late is None:
            self.late = keras.metrics.Mean(name="late")
        for optimizer, part in ((self.optimizer, self.encoder), (self.own_optimizer, self.decoder)):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((self.decoder(self.encoder(x, training=True), training=True) - y) ** 2)
            gradients = tape.gradient(loss, part.trainable_variables)
            optimizer.apply_gradients(zip(gradients, part.trainable_variables, strict=True))
        self.late.update_state(loss)
        self.steps.assign_add(1)
        return {"late": self.late.result()}


CENTRAL = pytest.param(dtrain.CentralStorageStrategy, marks=pytest.mark.long)


@pytest.mark.parametrize("kind", [dtrain.MirroredStrategy, CENTRAL])
def test_a_model_that_its_step_builds_is_one_devices(kind: Any) -> None:
    def make(strategy: Any) -> Any:
        with strategy.scope():
            model = Captioner()
            model.compile("adam")
        return model

    alike(make, kind)


def test_state_that_is_a_statistic_or_the_same_everywhere_is_one_devices() -> None:
    """A mean of the batch, a moving copy of weights, a counter of steps, a queue of all replicas' rows."""

    def make(strategy: Any) -> Any:
        center = variable(strategy, np.zeros(6, "float32"), name="center")
        teacher = variable(strategy, np.zeros((6, 1), "float32"), name="teacher")
        steps = variable(strategy, np.int32(0), dtype="int32", name="steps")
        queue = variable(strategy, np.zeros((24, 6), "float32"), name="queue")

        def more(model: Any, x: Any, predicted: Any) -> dict[str, Any]:
            center.assign(0.9 * center + 0.1 * tf.reduce_mean(x, axis=0))
            teacher.assign(0.9 * teacher + 0.1 * model.layers[-1].kernel)
            steps.assign_add(1)
            rows = tf.distribute.get_replica_context().all_gather(x, axis=0)
            queue.assign(tf.concat([rows, queue.value], axis=0)[:24])
            return {
                "rows": x[:, 0] * 2.0,
                "signs": x[:, 1] > 0,
                "sums": tf.reduce_sum(x, 0),
                "first": x[:, :2],
            }

        model = own_step(strategy, more=more)
        model.state = [center, teacher, steps, queue]
        return model

    one, two = alike(make)
    for a, b in zip(two.state, one.state, strict=True):
        np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=2e-4, atol=1e-6, err_msg=a.name)


def test_ragged_and_sparse_values_of_a_step_have_the_rows_of_all_examples() -> None:
    def make(strategy: Any) -> Any:
        def more(model: Any, x: Any, predicted: Any) -> dict[str, Any]:
            lengths = tf.cast(x[:, 0] > 0, tf.int32) + 1
            return {"ragged": tf.RaggedTensor.from_tensor(x, lengths), "sparse": tf.sparse.from_dense(x)}

        return own_step(strategy, more=more)

    alike(make)


def queue_by_concat(queue: Any, x: Any, predicted: Any) -> None:
    queue.assign(tf.concat([x, queue[: -tf.shape(x)[0]]], axis=0))


def queue_by_place(queue: Any, x: Any, predicted: Any) -> None:
    queue.value[: tf.shape(x)[0]].assign(x)


def sums(queue: Any, x: Any, predicted: Any) -> None:
    queue.assign(0.9 * queue + 0.1 * tf.reduce_sum(x, axis=0))


def examples_seen(queue: Any, x: Any, predicted: Any) -> None:
    queue.assign_add(tf.ones_like(queue) * tf.cast(tf.shape(x)[0], "float32"))


@pytest.mark.parametrize("write", [queue_by_concat, queue_by_place, sums, examples_seen])
def test_state_of_the_whole_batch_is_one_devices(write: Any) -> None:
    queues: list[Any] = []

    def make(strategy: Any) -> Any:
        queues.append(variable(strategy, np.zeros((32, 6), "float32"), name="feature_queue"))
        queue = queues[-1]

        def more(model: Any, x: Any, predicted: Any) -> dict[str, Any]:
            write(queue, x, predicted)
            return {"queue": tf.reduce_sum(tf.abs(queue))}

        return own_step(strategy, more=more)

    alike(make)
    one, two = (each.numpy() for each in queues)
    np.testing.assert_allclose(one, two, rtol=2e-4, atol=1e-6)
    assert np.any(one)


def test_a_statistic_that_is_no_mean_is_of_the_whole_batch() -> None:
    largest: list[Any] = []

    def make(strategy: Any) -> Any:
        largest.append(variable(strategy, np.zeros(6, "float32"), name="largest"))
        mine = largest[-1]

        def more(model: Any, x: Any, predicted: Any) -> dict[str, Any]:
            mine.assign(tf.reduce_max(x, axis=0))
            return {}

        return own_step(strategy, more=more)

    alike(make)
    np.testing.assert_array_equal(*(each.numpy() for each in largest))
    assert np.any(largest[0])


def test_what_a_step_reduces_by_itself_is_one_replicas() -> None:

    def make(strategy: Any) -> Any:
        def more(model: Any, x: Any, predicted: Any) -> dict[str, Any]:
            context = tf.distribute.get_replica_context()
            reduced = context.all_reduce("sum", tf.reduce_sum(x))
            merged = context.merge_call(lambda s, v: s.reduce("sum", v, axis=None), args=(tf.reduce_sum(x),))
            return {"same": reduced - merged, "loss2": tf.reduce_mean(predicted**2)}

        return own_step(strategy, keras.layers.BatchNormalization(synchronized=True), more=more)

    alike(make)
