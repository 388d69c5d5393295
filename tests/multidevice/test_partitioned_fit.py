"""`fit` and `evaluate` by a step that is traced once and partitioned: one device's numbers, equal copies."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from tests.partitioned_models import MODELS, ROWS, dense, trained

import dtrain
from dtrain.engine.step import eager_program
from dtrain.engine.step.partitioned_steps import DividedFunction
from dtrain.errors import StepError
from dtrain.interfaces.managed_strategy import layout_of


def copies_of(made: Any) -> list[Any]:
    optimizers = [each for each in vars(made).values() if isinstance(each, keras.optimizers.Optimizer)]
    optimizers += [made.optimizer] if made.optimizer is not None else []
    variables = made.variables + [each for one in optimizers for each in one.variables]
    return [each.value for each in variables if hasattr(each.value, "values")]


@pytest.mark.parametrize("name", MODELS)
def test_a_fit_has_the_numbers_of_one_device(name: str) -> None:
    """Batches of 17 give uneven parts, and leave one row at the end, so a replica has none."""
    one = trained(tf.distribute.get_strategy(), MODELS[name], batch=17, as_dataset=False)
    for as_dataset in (False, True):
        made, history, scores = trained(
            dtrain.MirroredStrategy(), MODELS[name], batch=17, as_dataset=as_dataset
        )
        for key, values in one[1].items():
            np.testing.assert_allclose(history[key], values, rtol=2e-4, atol=1e-5, err_msg=key)
        np.testing.assert_allclose(scores, one[2], rtol=2e-4, atol=1e-5)
        for found, expected in zip(made.get_weights(), one[0].get_weights(), strict=True):
            np.testing.assert_allclose(found, expected, rtol=2e-4, atol=1e-5)
        for variable in copies_of(made):
            if variable.synchronization == tf.VariableSynchronization.ON_READ:
                continue
            for copy in variable.values[1:]:
                np.testing.assert_array_equal(copy.numpy(), variable.values[0].numpy(), variable.name)


def check_replicas_have_the_numbers_of_one_device(make: Any) -> None:
    one = trained(tf.distribute.get_strategy(), make, batch=17, as_dataset=False)
    made, history, scores = trained(dtrain.MirroredStrategy(), make, batch=17, as_dataset=False)
    for key, values in one[1].items():
        np.testing.assert_allclose(history[key], values, rtol=2e-4, atol=1e-5, err_msg=key)
    np.testing.assert_allclose(np.hstack(scores), np.hstack(one[2]), rtol=2e-4, atol=1e-5)
    for found, expected in zip(made.get_weights(), one[0].get_weights(), strict=True):
        np.testing.assert_allclose(found, expected, rtol=2e-4, atol=1e-5)


def recurrent() -> Any:
    body = [keras.layers.Reshape((3, 2)), keras.layers.LSTM(5), keras.layers.Dense(1)]
    made = keras.Sequential([keras.Input((6,)), *body])
    made.compile(keras.optimizers.Adam(0.01, global_clipnorm=0.1), "mse", metrics=["mae"])
    return made


@pytest.mark.parametrize(
    "make", [MODELS["dropout_and_metrics"], pytest.param(recurrent, marks=pytest.mark.long)]
)
def test_xla_has_the_numbers_of_one_device_with_xla(make: Any) -> None:
    """Dropout in XLA draws other numbers than without, and the same on any number of devices."""

    def compiled() -> Any:
        made = make()
        made.jit_compile = True
        return made

    check_replicas_have_the_numbers_of_one_device(compiled)


def test_results_that_are_variables_are_read_once() -> None:
    """With several thresholds these metrics return the variable itself."""

    def make() -> Any:
        made = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1, "sigmoid")])
        metrics = [
            keras.metrics.FalsePositives([0.3, 0.6], name="wrong"),
            keras.metrics.TruePositives([0.4], name="right"),
        ]
        made.compile("sgd", "mse", metrics=metrics)
        return made

    check_replicas_have_the_numbers_of_one_device(make)


def test_xla_compiles_a_step_of_ones_own() -> None:
    class Own(keras.Model):  # type: ignore[misc]
        def train_step(self, data: Any) -> Any:
            return super().train_step(data)

        def test_step(self, data: Any) -> Any:
            return super().test_step(data)

    def make() -> Any:
        inputs = keras.Input((6,))
        made = Own(inputs, keras.layers.Dense(1)(keras.layers.Dense(5, "tanh")(inputs)))
        made.compile("sgd", "mse", metrics=["mae"], jit_compile=True)
        return made

    check_replicas_have_the_numbers_of_one_device(make)


class Noisy(keras.Model):  # type: ignore[misc]
    """Adds noise to the examples and to the gradients, from operations that have a state and a seed."""

    def train_step(self, data: Any) -> Any:
        x, y = data
        x += tf.random.normal(tf.shape(x), seed=4)
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=y, y_pred=self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        noisy = [each + 0.1 * tf.random.normal(each.shape, seed=3) for each in gradients]
        self.optimizer.apply(noisy, self.trainable_variables)
        return {"loss": loss}


def test_numbers_of_the_programs_seed_are_drawn_outside_of_xla() -> None:
    """XLA would draw by a number of the process, other ones in each function."""

    def noisy(strategy: Any, **how: Any) -> Any:
        def make() -> Any:
            inputs = keras.Input((6,))
            made = Noisy(inputs, keras.layers.Dense(1)(inputs))
            made.compile("sgd", "mse", **how)
            return made

        return trained(strategy, make, batch=17, as_dataset=False)[0].get_weights()

    plain = noisy(tf.distribute.get_strategy(), jit_compile=False)
    for found, expected in zip(noisy(dtrain.MirroredStrategy(), jit_compile=True), plain, strict=True):
        np.testing.assert_allclose(found, expected, rtol=2e-4, atol=1e-5)


class Counting(tf.distribute.ReductionToOneDevice):  # type: ignore[misc]
    """Counts the tensors that it sums, as they are traced."""

    def __init__(self) -> None:
        super().__init__()
        self.sums = 0

    def reduce_implementation(self, *args: Any, **options: Any) -> Any:
        self.sums += 1
        return super().reduce_implementation(*args, **options)


def test_given_cross_device_operations_make_the_sums() -> None:
    given = Counting()
    one = trained(tf.distribute.get_strategy(), MODELS["dropout_and_metrics"], batch=17, as_dataset=False)
    strategy = dtrain.MirroredStrategy(cross_device_ops=given)
    made, history, _ = trained(strategy, MODELS["dropout_and_metrics"], batch=17, as_dataset=False)
    assert given.sums
    np.testing.assert_allclose(history["loss"], one[1]["loss"], rtol=2e-4)
    for found, expected in zip(made.get_weights(), one[0].get_weights(), strict=True):
        np.testing.assert_allclose(found, expected, rtol=2e-4, atol=1e-5)


class NormalizedByParts(keras.layers.BatchNormalization):  # type: ignore[misc]
    """On one device, what two replicas compute that each use the moments of their own rows."""

    def call(self, inputs: Any, training: bool = False, mask: Any = None) -> Any:
        if not training:
            return super().call(inputs, training=False)
        rows = tf.shape(inputs)[0]
        first = (rows + 1) // 2
        outputs, moments = [], []
        for part, size in ((inputs[:first], first), (inputs[first:], rows - first)):
            mean, variance = tf.nn.moments(part, [0])
            outputs.append((part - mean) * tf.math.rsqrt(variance + self.epsilon) * self.gamma + self.beta)
            share = tf.cast(size / rows, tf.float32)
            moments.append([tf.math.multiply_no_nan(each, share) for each in (mean, variance)])
        for moving, *parts in zip((self.moving_mean, self.moving_variance), *moments, strict=True):
            moving.assign(self.momentum * moving + (1 - self.momentum) * tf.add_n(parts))
        return tf.concat(outputs, axis=0)


@pytest.mark.parametrize("size", [17, 20], ids=["uneven parts", "a fixed size"])
def test_normalization_that_is_not_synchronized_uses_each_replicas_rows(size: int) -> None:
    """In the last batch of 17 only one replica has a row."""
    x = np.random.default_rng(0).normal(size=(ROWS, 6)).astype("float32")
    data = tf.data.Dataset.from_tensor_slices((x, x[:, :1])).batch(size, drop_remainder=size == 20)

    def fitted(strategy: Any, normalization: Any) -> tuple[Any, Any]:
        keras.utils.set_random_seed(1)
        with strategy.scope():
            body = [keras.layers.Dense(8, "relu"), normalization(momentum=0.5), keras.layers.Dense(1)]
            made = keras.Sequential([keras.Input((6,)), *body])
            made.compile(keras.optimizers.SGD(0.05), "mse")
        return made.fit(data, epochs=2, verbose=0).history["loss"], made.get_weights()

    expected = fitted(tf.distribute.get_strategy(), NormalizedByParts)
    for strategy in (dtrain.MirroredStrategy(), dtrain.CentralStorageStrategy(["CPU:0", "CPU:1"])):
        losses, weights = fitted(strategy, keras.layers.BatchNormalization)
        np.testing.assert_allclose(losses, expected[0], rtol=2e-4)
        for found, weight in zip(weights, expected[1], strict=True):
            np.testing.assert_allclose(found, weight, rtol=2e-4, atol=1e-6)


def test_what_ran_eagerly_goes_on_traced(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Metrics, weights and the optimizer's state of an eager fit are those that a traced one finds.

    That it is no faster than one device is said once.
    """
    monkeypatch.setattr(eager_program, "_warned", False)

    def trained_in_turns(strategy: Any) -> tuple[Any, Any]:
        keras.utils.set_random_seed(5)
        x = np.random.default_rng(0).normal(size=(ROWS, 6)).astype("float32")
        with strategy.scope():
            made = dense(6, 8, 1)
            made.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
        scores = [made.train_on_batch(x, x[:, :1])]
        for eager in (True, False, True):
            made.run_eagerly = eager
            made.train_function = made.test_function = None
            scores.append(made.train_on_batch(x[:17], x[:17, :1]))
            scores.append(made.test_on_batch(x[:3], x[:3, 1:2]))
        return made, scores

    one, expected = trained_in_turns(tf.distribute.get_strategy())
    made, scores = trained_in_turns(dtrain.MirroredStrategy())
    np.testing.assert_allclose(scores, expected, rtol=2e-4)
    for found, weight in zip(made.get_weights(), one.get_weights(), strict=True):
        np.testing.assert_allclose(found, weight, rtol=2e-4, atol=1e-6)
    assert caplog.text.count("With run_eagerly=True each process computes the whole batch") == 1


def test_strategy_run_inside_a_step_says_what_to_do_instead() -> None:
    strategy = dtrain.MirroredStrategy()

    class Nested(keras.Model):  # type: ignore[misc]
        def train_step(self, data: Any) -> dict[str, Any]:
            return {"loss": strategy.run(lambda x: tf.reduce_mean(self(x)), args=(data[0],))}

    with strategy.scope():
        inputs = keras.Input((6,))
        made = Nested(inputs, dense(6, 1)(inputs))
        made.compile("sgd")
    with pytest.raises(StepError, match="as on one device"):
        made.fit(np.zeros((8, 6), "float32"), np.zeros((8, 1), "float32"), verbose=0)


class Drawing(keras.Model):  # type: ignore[misc]
    """Logs the first number that a step draws."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(1)

    def call(self, x: Any) -> Any:
        return self.dense(x)

    def train_step(self, data: Any) -> Any:
        x = data[0] if isinstance(data, tuple) else data
        return {"drawn": tf.random.normal(tf.shape(x)[:1])[0]}


@pytest.mark.parametrize(
    "calls",
    [
        ["batch 8", "batch 8", "batch 5", "batch 5", "batch 8", "batch 7"],
        ["arrays 8", "arrays 8", "arrays 5", "arrays 7"],
        ["dataset 8", "dataset 8", "fixed 8", "fixed 8", "dataset 8"],
        ["fixed 8", "fixed 6", "dataset 8", "arrays 8"],
        ["threes 8", "threes 7", "threes 8", "dataset 8"],
    ],
)
def test_draws_go_on_as_on_one_device_where_the_shape_of_batches_changes(calls: list[str]) -> None:
    """A trace of another shape begins its draws anew, so both must trace at the same calls."""
    x = np.ones((8, 6), np.float32)

    def drawn(strategy: Any) -> list[float]:
        keras.utils.set_random_seed(1)
        with strategy.scope():
            made = Drawing()
            made.compile("sgd")
            made(x[:2])
        found = []
        for call in calls:
            kind, rows = call.split()
            size = int(rows)
            data = tf.data.Dataset.from_tensor_slices(x[:size]).batch(size, drop_remainder=kind == "fixed")
            if kind == "batch":
                found.append(made.train_on_batch(x[:size], return_dict=True)["drawn"])
            elif kind in ("arrays", "threes"):
                # Of 7 rows in threes the last batch has one, so one of the replicas has none.
                batch = size if kind == "arrays" else 3
                record = made.fit(x[:size], batch_size=batch, verbose=0, shuffle=False)
                found.append(record.history["drawn"][0])
            else:
                found.append(made.fit(data, verbose=0).history["drawn"][0])
        return [float(each) for each in found]

    assert drawn(dtrain.MirroredStrategy()) == drawn(tf.distribute.get_strategy())


@pytest.mark.parametrize("first", [True, False])
def test_whole_rows_beside_divided_ones_have_a_gradient(first: bool) -> None:
    """Of the concatenated values one is computed from all rows, so each replica has all of it."""

    def loss(y: Any, p: Any) -> Any:
        parts = [tf.reshape(tf.cumsum(p, 0), [-1, 1]), y]
        return tf.reduce_mean(tf.concat(parts if first else parts[::-1], 1) ** 2)

    def make() -> Any:
        made = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])
        made.compile("sgd", loss, metrics=["mae"])
        return made

    check_replicas_have_the_numbers_of_one_device(make)


def test_fits_go_on_whether_each_replica_surely_has_rows_or_not() -> None:
    """The last batch of 8 rows in threes has two, and that of 7 rows has one, so that a replica has none."""
    x, y = np.random.default_rng(3).normal(size=(2, 8, 4)).astype("float32")

    def trained(strategy: Any) -> list[Any]:
        keras.utils.set_random_seed(1)
        with strategy.scope():
            made = keras.Sequential([keras.Input((4,)), keras.layers.Dropout(0.5), keras.layers.Dense(4)])
            made.compile("adam", "mse", metrics=["mae"])
        found = []
        for rows in (8, 7, 8):
            history = made.fit(x[:rows], y[:rows], batch_size=3, epochs=2, verbose=0).history
            found += [*history.values(), *made.evaluate(x[:rows], y[:rows], batch_size=3, verbose=0)]
        return [*found, *made.get_weights()]

    found, expected = trained(dtrain.MirroredStrategy()), trained(tf.distribute.get_strategy())
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-4, atol=1e-6)


def test_a_step_asks_for_rows_only_where_a_replica_may_have_none() -> None:
    strategy = dtrain.MirroredStrategy()
    layout = layout_of(strategy)
    assert layout is not None
    with strategy.scope():
        weights = tf.Variable(tf.ones([3, 1]))
    spec = tf.TensorSpec([None, 3], tf.float32)
    parts = [spec, spec]

    def asks(function: Any, *, filled: bool) -> bool:
        divided = DividedFunction(function, spec, strategy, layout)
        made = tf.function(lambda sizes, *parts: divided(parts, sizes, filled=filled), autograph=False)
        graph = made.get_concrete_function(tf.TensorSpec([2], tf.int32), *parts).graph
        assert divided.differs_if_filled != ("draws" in function.__name__)
        return bool({"If", "StatelessIf"} & {op.type for op in graph.get_operations()})

    def of_rows(x: Any) -> Any:
        return tf.reduce_sum(x @ weights)

    def of_rows_and_draws(x: Any) -> Any:
        return tf.reduce_sum(x @ weights) + tf.random.normal([])

    assert asks(of_rows, filled=False)
    assert not asks(of_rows, filled=True)
    # What it draws goes on from one kind of batches to the other, so there is one function for both.
    assert asks(of_rows_and_draws, filled=True)


def test_the_rows_of_a_batch_of_known_rows_are_constants() -> None:
    strategy = dtrain.MirroredStrategy()
    layout = layout_of(strategy)
    assert layout is not None

    def reads_sizes(rows: int | None) -> bool:
        spec = tf.TensorSpec([rows, 3], tf.float32)
        divided = DividedFunction(tf.reduce_mean, spec, strategy, layout)
        made = tf.function(lambda sizes, *parts: divided(parts, sizes), autograph=False)
        part = tf.TensorSpec([None, 3], tf.float32)
        graph = made.get_concrete_function(tf.TensorSpec([2], tf.int32), part, part).graph
        return bool(graph.inputs[0].consumers())

    assert reads_sizes(None)
    assert not reads_sizes(5)
    assert not reads_sizes(1)


def largest_error(y: Any, found: Any) -> Any:
    return tf.reduce_max((y - found) ** 2)


def error_by_place(y: Any, found: Any) -> Any:
    places = tf.range(tf.shape(found)[0])
    return tf.reduce_mean((y - found) ** 2 * tf.cast(places, tf.float32)[:, None])


def pairs_in_a_loop(y: Any, found: Any) -> Any:
    """The gradient of the sum in the loop depends on which dimension is broadcast."""
    rows, pairs = tf.shape(found)[0], (found - y) @ tf.transpose(found)

    def body(i: Any, u: Any, v: Any) -> Any:
        return i + 1, u + 1.0, tf.reduce_logsumexp(pairs + u[:, None] + v[None], 0)

    _, u, v = tf.while_loop(lambda i, *_: i < 2, body, [0, tf.zeros([rows]), tf.zeros([rows])])
    return tf.reduce_sum(u) + tf.reduce_sum(v)


def loop_in_a_branch(y: Any, found: Any) -> Any:
    """Lists of several types go from a branch to its gradient, where their elements get another layout."""

    def body(i: Any, z: Any) -> Any:
        return i + 1, z - 0.1 * tf.reduce_max(z, 0) + 0.2 * tf.sort(z, axis=0)

    def looped() -> Any:
        return tf.reduce_mean((tf.while_loop(lambda i, _: i < 3, body, [0, found])[1] - y) ** 2)

    return tf.cond(tf.reduce_sum(found) > -100, looped, lambda: tf.reduce_mean(found))


def rounds_in_a_loop(y: Any, found: Any) -> Any:
    """The body of the loop communicates, and reads the number of all rows."""

    def body(i: Any, z: Any) -> Any:
        return i + 1, z - 0.1 * tf.reduce_mean((found - y) ** 2) * z

    first = [0, tf.reduce_mean(found**2)]
    return tf.while_loop(lambda i, _: i < 3, body, first, maximum_iterations=3)[1]


@pytest.mark.parametrize(
    ("loss", "rows", "compiled"),
    [
        (rounds_in_a_loop, 18, True),
        (largest_error, 32, True),
        (error_by_place, 18, True),
        (pairs_in_a_loop, 2, False),
        (pairs_in_a_loop, 19, False),
        (loop_in_a_branch, 32, False),
    ],
)
def test_losses_of_the_batch_have_the_numbers_of_one_device(loss: Any, rows: int, compiled: bool) -> None:
    """Batches of 16, of which the last may be smaller."""
    x = np.random.default_rng(0).normal(size=(rows, 6)).astype("float32")
    found = []
    for strategy in (tf.distribute.get_strategy(), dtrain.MirroredStrategy()):
        keras.utils.set_random_seed(1)
        with strategy.scope():
            made = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])
            made.compile("sgd", loss=loss, jit_compile=compiled)
        history = made.fit(x, x[:, :1], batch_size=16, epochs=2, shuffle=False, verbose=0).history
        found.append([*history.values(), *made.get_weights()])
    for one, several in zip(*found, strict=True):
        np.testing.assert_allclose(several, one, rtol=2e-4, atol=1e-6)


class BuildsItsOptimizer(keras.Model):
    """Its step builds the optimizer, and updates in a condition."""

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x, training=True) - y) ** 2)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.build(self.trainable_variables)

        def update() -> int:
            self.optimizer.apply(gradients, self.trainable_variables)
            return 0

        tf.cond(loss > 0.1, update, lambda: 0)
        return {"loss": loss}


@pytest.mark.parametrize("sharded", [False, True])
def test_a_step_may_build_its_optimizer(sharded: bool) -> None:
    x = np.random.default_rng(0).normal(size=(18, 6)).astype("float32")
    found = []
    for strategy in (tf.distribute.get_strategy(), dtrain.MirroredStrategy()):
        keras.utils.set_random_seed(1)
        with strategy.scope():
            inputs = keras.Input((6,))
            made = BuildsItsOptimizer(inputs, keras.layers.Dense(1)(inputs))
            optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
            made.compile(dtrain.optim.shard_state(optimizer) if sharded else optimizer)
        made.fit(x, x[:, :1], batch_size=8, epochs=2, shuffle=False, verbose=0)
        found.append(
            [keras.ops.convert_to_numpy(each) for each in (*made.weights, *made.optimizer.variables)]
        )
    for one, several in zip(*found, strict=True):
        np.testing.assert_allclose(several, one, rtol=2e-4, atol=1e-6)
