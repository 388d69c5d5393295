"""Steps that compute while the one before them is sent: nothing is lost, and the delay is exactly one update.

The numbers are compared with a loop on one device that delays gradients itself. With several workers blocks
follow one another there (`max_staleness=1`), so that there is one result to reach.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import dtrain
from dtrain.engine.variables.tables import ELEMENTS
from dtrain.errors import ConfigurationError
from dtrain.strategies.parameter_server import ParameterServerStrategy

from .common import BATCH, ROWS, STEPS, assert_close, classifier, data, iterations, sizes_by_counts
from .numbers import slope
from .registry import Job, case

BLOCK = 6
Optimizer = Callable[[], Any]


def in_order() -> Any:
    """A strategy that overlaps, with one block after another."""
    return dtrain.ParameterServerStrategy(max_staleness=1, overlap=True)


def mixed_model() -> Any:
    """Dense layers, one that keeps statistics, and one that counts; built."""
    keras.utils.set_random_seed(8)
    layers = [
        keras.layers.Input((10,)),
        keras.layers.Dense(8, use_bias=False),
        keras.layers.BatchNormalization(),
    ]
    return keras.Sequential([*layers, keras.layers.Activation("relu"), keras.layers.Dense(2)])


def word_model() -> Any:
    """A table that stays on the servers, and a dense layer."""
    keras.utils.set_random_seed(9)
    inputs = keras.Input((4,), dtype="int32")
    rows = keras.layers.Embedding(ELEMENTS // 8 + 50, 8)(inputs)
    return keras.Model(inputs, keras.layers.Dense(2)(keras.layers.Flatten()(rows)))


def numbers(words: bool) -> tuple[np.ndarray, np.ndarray]:
    """Features of shape (rows, 10), or words of shape (rows, 4), and targets of shape (rows, 2)."""
    rng = np.random.default_rng(2)
    x = rng.integers(0, 40, (ROWS, 4)).astype("int32") if words else rng.normal(size=(ROWS, 10))
    return x.astype("int32" if words else "float32"), rng.normal(size=(ROWS, 2)).astype("float32")


def delayed(model: Any, optimizer: Any, x: np.ndarray, y: np.ndarray, epochs: int) -> list[float]:
    """Trains on one device where w[k + 1] = w[k] - update(gradient(w[k - 1])) in a block.

    Gives the mean losses, by epoch.
    """
    weights = model.trainable_variables
    optimizer.build(weights)

    @tf.function
    def gradients(inputs: tf.Tensor, targets: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(inputs, training=True) - targets))
        return loss, tape.gradient(loss, weights)

    losses = []
    for _ in range(epochs):
        total = 0.0
        for step, start in enumerate(range(0, ROWS, BATCH)):
            now = [w.numpy() for w in weights]
            if step % BLOCK == 0:
                before = now
            put(weights, before)
            rows = slice(start, start + BATCH)
            loss, grads = gradients(tf.constant(x[rows]), tf.constant(y[rows]))
            put(weights, now)
            optimizer.apply(grads, weights)
            before = now
            total += float(loss) * len(x[rows])
        losses.append(total / ROWS)
    return losses


def put(variables: Sequence[Any], values: Sequence[np.ndarray]) -> None:
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)


def fit(model: Any, x: np.ndarray, y: np.ndarray, epochs: int = 2) -> dict[str, list[float]]:
    """Trains in blocks of `BLOCK` steps, for somebody watches each call."""
    watcher = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: None)
    history = model.fit(
        x, y, batch_size=BATCH, epochs=epochs, shuffle=False, callbacks=[watcher], verbose=0
    ).history
    assert iterations(model) == epochs * STEPS, iterations(model)
    return history


def compared(strategy: Any, build: Callable[[], Any], optimizer: Optimizer) -> Any:
    """Trains under the strategy and with the delay on one device, and compares; gives the history."""
    x, y = numbers(build is word_model)
    alone = build()
    expected = delayed(alone, optimizer(), x, y, 2)
    with strategy.scope():
        model = build()
        model.compile(optimizer(), "mse", steps_per_execution=BLOCK)
    history = fit(model, x, y)
    assert_close(history["loss"], expected)
    assert_close([v.numpy() for v in model.variables], [v.numpy() for v in alone.variables], atol=1e-5)
    return history


@case
def a_step_misses_its_workers_last_update_only(job: Job) -> None:
    strategy = in_order()
    kinds: list[Optimizer] = [
        lambda: keras.optimizers.SGD(0.1),
        lambda: keras.optimizers.Adam(0.01, clipnorm=0.5),
    ]
    for optimizer in kinds:
        history = compared(strategy, mixed_model, optimizer)
        # The first two steps of a block miss nothing.
        missed = STEPS - sum(min(2, STEPS - first) for first in range(0, STEPS, BLOCK))
        missed += sum(STEPS - first > 1 for first in range(0, STEPS, BLOCK))
        assert history["staleness"] == pytest.approx([missed / STEPS] * 2), history
        assert history["staleness_max"] == [1, 1], history


@case
def exchange_and_step_wait_for_neither_in_the_graph(job: Job) -> None:
    x, y = numbers(words=False)
    for strategy, apart in ((job.strategy, False), (in_order(), True)):
        with strategy.scope():
            model = mixed_model()
            model.compile(keras.optimizers.Adam(0.01), "mse")
        model.fit(x, y, batch_size=BATCH, verbose=0)
        bodies = list(bodies_of_loops(model))
        assert bodies
        for nodes in bodies:
            computing = {name for name, node in nodes.items() if node.op == "MatMul"}
            locking = {name for name, node in nodes.items() if node.op == "MutexLock"}
            assert len(locking) == 1 and len(computing) > 3
            assert needed_by(nodes, computing).isdisjoint(locking)
            assert needed_by(nodes, locking).isdisjoint(computing) == apart


def bodies_of_loops(model: Any) -> Iterator[dict[str, Any]]:
    """The nodes of the loops in the blocks that a model trains with, by name."""
    for traced in model.train_function._program._functions.values():
        for function in traced._function.graph.as_graph_def().library.function:
            nodes = {node.name: node for node in function.node_def}
            if {"MatMul", "MutexLock"} <= {node.op for node in nodes.values()}:
                yield nodes


def needed_by(nodes: dict[str, Any], some: set[str]) -> set[str]:
    """The names of all nodes that some must wait for."""
    found, left = set(some), list(some)
    while left:
        for given in nodes[left.pop()].input:
            name = given.removeprefix("^").partition(":")[0]
            if name in nodes and name not in found:
                found.add(name)
                left.append(name)
    return found


@case
def rows_of_tables_and_split_weights_are_as_late(job: Job) -> None:
    compared(in_order(), word_model, lambda: keras.optimizers.Adagrad(0.1))
    split = dtrain.ParameterServerStrategy(
        variable_partitioner=tf.distribute.experimental.partitioners.FixedShardsPartitioner(2),
        max_staleness=1,
        overlap=True,
    )
    compared(split, mixed_model, lambda: keras.optimizers.SGD(0.1, momentum=0.9))


@case
def every_overlapped_step_is_applied_once(job: Job) -> None:
    """Equal gradients make equal weights, however late they come: blocks of one step and of many."""
    strategy = dtrain.ParameterServerStrategy(overlap=True)
    x = np.ones((400, 2), "float32")
    watcher = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: None)
    model = slope(strategy, lambda: keras.optimizers.SGD(1.0))
    done = 0
    for rows, callbacks in ((4, []), (44, []), (44, [watcher]), (400, [])):
        model.fit(x[:rows], x[:rows], batch_size=4, callbacks=callbacks, verbose=0)
        done += rows // 4
        assert iterations(model) == done, (done, iterations(model))
        for part in model.parts:
            np.testing.assert_array_equal(part.numpy(), np.full(part.shape, -float(done), "float32"))
    times = model.train_function.totals
    assert times.blocks > 10 and 0.0 < times.exchange < times.seconds, times
    before = model.train_function.totals
    model.evaluate(x[:44], x[:44], verbose=0)
    assert model.train_function.totals == before


@case
def several_overlapped_steps_in_a_turn_are_applied_once(job: Job) -> None:
    x = np.ones((4 * 1500, 1), "float32")
    with dtrain.ParameterServerStrategy(overlap=True).scope():
        layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
        model = keras.Sequential([keras.layers.Input((1,)), layer])
        model.compile(keras.optimizers.SGD(1.0), lambda _, outputs: tf.reduce_mean(outputs))
    for done in (1500, 3000):
        with sizes_by_counts():
            model.fit(x, x, batch_size=4, verbose=0)
        assert iterations(model) == done
        assert float(layer.kernel.numpy()[0, 0]) == -done
    assert model.train_function.turns == {1, 4}, "the loop never changed"


@case
def overlapped_accumulation_goes_on_from_what_was_left(job: Job) -> None:
    strategy = dtrain.ParameterServerStrategy(overlap=True)
    model = slope(strategy, lambda: keras.optimizers.SGD(1.0, gradient_accumulation_steps=3))
    x = np.ones((11 * 4, 2), "float32")
    done = 0
    for rows in (44, 44, 4, 4, 44, 44):
        model.fit(x[:rows], x[:rows], batch_size=4, epochs=2, verbose=0)
        done += 2 * rows // 4
        assert iterations(model) == done // 3, (done, iterations(model))
        for part in model.parts:
            np.testing.assert_array_equal(part.numpy(), np.full(part.shape, -(done // 3), "float32"))


@case
def scaled_losses_and_moving_statistics_overlap(job: Job) -> None:
    """The scale grows while gradients are on their way: they must be divided by their own."""
    strategy = dtrain.ParameterServerStrategy(overlap=True)
    x = np.ones((4 * 60, 2), "float32")
    with strategy.scope():
        inner = keras.optimizers.SGD(1.0)
        optimizer = keras.optimizers.LossScaleOptimizer(inner, initial_scale=4.0, dynamic_growth_steps=3)
    model = slope(strategy, lambda: optimizer)
    model.fit(x, x, batch_size=4, verbose=0)
    assert int(inner.iterations.numpy()) == 60
    assert float(optimizer.dynamic_scale) == 4.0 * 2**20
    for part in model.parts:
        np.testing.assert_array_equal(part.numpy(), np.full(part.shape, -60.0, "float32"))
    with strategy.scope():
        counting = keras.Sequential([keras.layers.Input((10,)), Counts(), keras.layers.Dense(2)])
        counting.compile(keras.optimizers.SGD(0.1, gradient_accumulation_steps=2), "mse")
    features, targets = numbers(words=False)
    counting.fit(features, targets, batch_size=BATCH, epochs=4, verbose=0)
    assert int(counting.layers[0].seen.numpy()) == 4 * STEPS


class Sums(keras.Model):
    """A dense layer on rows that may be ragged or sparse; `(rows, factor)` multiplies its outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(2)

    def call(self, inputs: Any) -> Any:
        rows, factor = inputs if isinstance(inputs, tuple) else (inputs, 1.0)
        if isinstance(rows, tf.RaggedTensor):
            rows = rows.to_tensor(shape=[None, 10])
        if isinstance(rows, tf.SparseTensor):
            rows = tf.sparse.to_dense(rows)
        return factor * self.dense(tf.ensure_shape(rows, [None, 10]))


@case
def batches_that_cannot_be_concatenated_train_as_on_one_device(job: Job) -> None:
    """Each is a block of one step, which misses nothing."""
    x, y = numbers(words=False)
    lengths = np.arange(ROWS) % 10 + 1
    plain = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH)
    ragged = tf.RaggedTensor.from_tensor(x, lengths)
    sparse = tf.sparse.from_dense(np.where(x > 0.0, x, 0.0))
    strategy = in_order()
    for dataset in (
        tf.data.Dataset.from_tensor_slices((ragged, y)).batch(BATCH),
        tf.data.Dataset.from_tensor_slices((sparse, y)).batch(BATCH),
        plain.map(lambda rows, targets: ((rows, tf.constant(2.0)), targets)),
    ):
        found = []
        for each in (tf.distribute.get_strategy(), strategy):
            keras.utils.set_random_seed(6)
            with each.scope():
                model = Sums()
                model(x[:1])
                model.compile(keras.optimizers.Adam(0.01), "mse")
            begun = model.get_weights()
            losses = model.fit(dataset, epochs=2, verbose=0).history["loss"]
            assert iterations(model) == 2 * STEPS
            assert not np.allclose(model.get_weights()[0], begun[0], atol=1e-3), "nothing was trained"
            found.append([*model.get_weights(), losses])
        assert_close(found[1], found[0])


class Counts(keras.layers.Layer):
    """Counts how often it is called in training."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = self.add_weight(shape=(), dtype="int64", initializer="zeros", trainable=False)

    def call(self, inputs: Any, training: bool = False) -> Any:
        if training:
            self.seen.assign_add(1)
        return inputs


@case
def overlapped_training_reaches_what_it_reaches_without(job: Job) -> None:
    x, _ = data(660)
    y = (x[:, 0] > 0.0).astype("int64") + (x[:, 1] > 0.5)
    found = []
    for strategy in (job.strategy, dtrain.ParameterServerStrategy(overlap=True)):
        keras.utils.set_random_seed(5)
        model = classifier(strategy, lambda: keras.optimizers.Adam(0.02))
        history = model.fit(x, y, batch_size=BATCH, epochs=12, verbose=0).history
        assert history["examples"] == [660] * 12
        found.append(history["loss"])
    (first, *_, without), (*_, overlapped) = found
    assert without < 0.4 * first and overlapped < 0.4 * first, found


class Own(keras.Model):
    """A model with a step of its own, of one of several kinds."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.first = keras.layers.Dense(4, "tanh")
        self.second = keras.layers.Dense(2)

    def call(self, inputs: Any) -> Any:
        return self.second(self.first(inputs))

    def train_step(self, batch: Any) -> Any:
        x, y = batch
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self(x, training=True) - y))
        weights = self.trainable_variables
        grads = tape.gradient(loss, weights)
        if self.kind == "twice":
            self.optimizer.apply(grads[:2], weights[:2])
            self.optimizer.apply(grads[2:], weights[2:])
        elif self.kind == "in a condition":
            tf.cond(loss > -1.0, lambda: (self.optimizer.apply(grads, weights), 0)[1], lambda: 0)
        else:
            self.optimizer.apply(grads, weights)
        if self.kind == "writes to weights":
            weights[0].assign(tf.clip_by_value(weights[0], -0.3, 0.3))
        return {"loss": loss}


class RecordedLogs(logging.Handler):
    """Keeps the messages that are logged."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


@case
def own_steps_overlap_or_say_why_not(job: Job) -> None:
    x, y = numbers(words=False)
    strategy = in_order()
    reasons = {
        "once": None,
        "twice": "it calls optimizers 2 times, not once",
        "in a condition": "it calls its optimizer inside a condition, a loop or a function of its own",
        "writes to weights": "the step itself writes to '.*kernel', which its optimizer holds or updates",
    }
    for kind, reason in reasons.items():
        records = RecordedLogs()
        logging.getLogger("dtrain").addHandler(records)
        found = []
        for each in (tf.distribute.get_strategy(), strategy):
            keras.utils.set_random_seed(6)
            with each.scope():
                model = Own(kind)
                model(x[:1])
                model.compile(keras.optimizers.SGD(0.1), steps_per_execution=BLOCK)
                model.optimizer.build(model.trainable_variables)
            model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
            found.append(model.get_weights())
            assert iterations(model) >= STEPS
        logging.getLogger("dtrain").removeHandler(records)
        said = [line for line in records.messages if "overlap=True was set" in line]
        if reason is None:
            assert not said
            assert not np.allclose(found[0][0], found[1][0], rtol=2e-4, atol=1e-6), "nothing was late"
            continue
        assert_close(found[1], found[0])
        assert len(said) == 1, said
        with pytest.raises(AssertionError, match=reason):
            raise AssertionError(said[0])


@case
def what_cannot_overlap_is_refused(job: Job) -> None:
    with pytest.raises(ConfigurationError, match="max_staleness=0 and overlap=True were set"):
        ParameterServerStrategy(max_staleness=0, overlap=True)
    with pytest.raises(ConfigurationError, match="overlap is 'yes', not True or False"):
        ParameterServerStrategy(overlap="yes")  # type: ignore[arg-type]
