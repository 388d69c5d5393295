"""Metrics of a user's own under two replicas: what adds up stays with each replica, what does not is right.

That all kinds of them have one device's numbers is the contract's (`contract/programs/own_metrics.py`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import dtrain
from dtrain.errors import CompilationError, StepError
from refusals import refused

OPS = keras.ops
_RANDOM = np.random.default_rng(0)
X = _RANDOM.normal(size=(21, 4)).astype("float32")
Y = (X[:, :1] - 0.5 * X[:, 1:2]).astype("float32")
WEIGHTS = np.linspace(0.1, 1, 21).astype("float32")


class Added(keras.metrics.Metric):
    """Adds up over examples."""

    def __init__(self, name: str = "added", **kwargs: Any) -> None:
        super().__init__(name=name, **kwargs)
        self.total = self.add_weight(name="total", initializer="zeros")
        self.count = self.add_weight(name="count", initializer="zeros", dtype="int32")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        error = OPS.cast(OPS.abs(OPS.cast(y_pred, "float32") - y_true), "float32")
        if sample_weight is not None:
            error = self.weighted(error, OPS.reshape(sample_weight, (-1, 1)))
        self.total.assign_add(OPS.sum(error))
        self.count.assign_add(OPS.shape(error)[0])

    def weighted(self, error: Any, weights: Any) -> Any:
        return error * weights

    def result(self) -> Any:
        return self.total / OPS.cast(self.count, "float32")


class Normed(Added):
    """Adds up until there are weights, which it divides by their mean."""

    def weighted(self, error: Any, weights: Any) -> Any:
        return error * weights / OPS.mean(weights)


class Largest(keras.metrics.Metric):
    def __init__(self, name: str = "largest", **kwargs: Any) -> None:
        super().__init__(name=name, **kwargs)
        self.value = self.add_variable((), keras.initializers.Constant(-1e9), name="value")
        self.calls = self.add_variable((), "zeros", dtype="int32", name="calls")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        error = OPS.abs(y_true - OPS.cast(y_pred, "float32"))
        self.value.assign(OPS.maximum(self.value, OPS.max(error)))
        self.calls.assign_add(1)

    def result(self) -> Any:
        return self.value + OPS.cast(self.calls, "float32")


class Noting(Largest):
    """Has an `add_variable` with an argument of its own."""

    def add_variable(self, *args: Any, note: str = "", **kwargs: Any) -> Any:
        return super().add_variable(*args, **kwargs)

    def __init__(self, name: str = "noting", **kwargs: Any) -> None:
        super().__init__(name=name, **kwargs)
        self.more = self.add_variable((), keras.initializers.Constant(4), name="more", note="mine")


class Doubled(keras.metrics.Metric):
    """Makes its variable by `super()`."""

    def __init__(self, name: str = "doubled", **kwargs: Any) -> None:
        super().__init__(name=name, **kwargs)
        self.times = super().add_variable((), "ones", name="times")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.times.assign(self.times * 2)

    def result(self) -> Any:
        return self.times


def network(metrics: Any, **options: Any) -> keras.Model:
    inputs = keras.Input((4,))
    model = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Dense(3, "tanh")(inputs)))
    model.compile(keras.optimizers.SGD(0.1), "mse", metrics=metrics, **options)
    return model


def fitted(model: keras.Model, weights: Any = None, **options: Any) -> list[Any]:
    # The last batch has one example, so that a replica has none.
    fit = model.fit(X, Y, 10, sample_weight=weights, epochs=2, shuffle=False, verbose=0, **options)
    found = model.evaluate(X, Y, 20, sample_weight=WEIGHTS, verbose=0, return_dict=True)
    return [*(values for _, values in sorted(fit.history.items())), [found[name] for name in sorted(found)]]


def compare(run: Callable[[], list[Any]]) -> None:
    """Runs it on one device and on two."""
    found = []
    for strategy in (None, dtrain.MirroredStrategy()):
        keras.utils.clear_session()
        keras.utils.set_random_seed(1)
        with contextlib.nullcontext() if strategy is None else strategy.scope():
            found.append(run())
    for alone, mirrored in zip(*found, strict=True):
        np.testing.assert_allclose(mirrored, alone, rtol=2e-4, atol=1e-6)


def held(variable: Any) -> list[float]:
    """What each replica holds of a variable."""
    return [float(part.numpy()) for part in variable.value.values]


def test_an_add_variable_with_arguments_of_its_own() -> None:
    with dtrain.MirroredStrategy().scope():
        noting = Noting()
        model = network([noting])
    assert held(noting.more) == [4, 4]
    model.fit(X, Y, 10, verbose=0)
    assert held(noting.calls) == [3, 3]


def test_a_variable_that_is_added_by_super() -> None:
    strategy = dtrain.MirroredStrategy()
    with strategy.scope():
        doubled = Doubled()
    assert (held(doubled.times), float(doubled.result())) == ([1, 1], 1)
    strategy.run(lambda: doubled.update_state(tf.ones([4, 1]), tf.ones([4, 1])))
    assert (held(doubled.times), float(doubled.result())) == ([2, 2], 2)


def test_fit_and_loops_may_update_one_metric() -> None:
    """In a loop, each replica updates what adds up with its own examples; `fit` updates it as a whole."""
    strategy = dtrain.MirroredStrategy()
    data = strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices((X, Y)).batch(10))

    def loop(metrics: list[Any]) -> None:
        for batch in data:
            strategy.run(lambda x, y: [each.update_state(y, x[:, :1]) for each in metrics] and None, batch)

    with strategy.scope():
        first, second = [Added(), Largest()], [Added(), Largest()]
        models = [network(first), network(second)]
    models[0].fit(X, Y, 10, verbose=0)
    assert [held(v) for v in (first[0].count, first[1].calls)] == [[21, 21], [3, 3]]
    loop(first)
    assert [(int(each[0].count), int(each[1].calls)) for each in (first,)] == [(42, 6)]
    loop(second)
    assert [held(v) for v in (second[0].count, second[1].calls)] == [[11, 10], [3, 3]]
    models[1].fit(X, Y, 10, verbose=0)  # which resets them first
    assert (int(second[0].count), int(second[1].calls)) == (21, 3)
    loop(second)
    assert (int(second[0].count), int(second[1].calls)) == (42, 6)


def test_weights_that_only_validation_has() -> None:
    compare(lambda: fitted(network([Added()], weighted_metrics=[Normed(name="normed"), Added(name="w")])))


def test_mixed_precision() -> None:
    keras.mixed_precision.set_global_policy("mixed_bfloat16")
    try:
        with dtrain.MirroredStrategy().scope():
            largest, added = Largest(), Added()
            model = network([largest, added])
        model.fit(X, Y, 10, verbose=0)
    finally:
        keras.mixed_precision.set_global_policy("float32")
    assert held(added.count) == [21, 21]
    assert held(largest.calls) == [3, 3]


def test_a_metric_whose_variables_the_replicas_share() -> None:
    metrics = [Largest(), Added()]

    def run() -> list[Any]:
        for metric in metrics:
            metric.reset_state()
        return fitted(network(metrics))

    compare(run)


class Stop(keras.callbacks.Callback):
    def __init__(self, batch: int) -> None:
        super().__init__()
        self.batch = batch

    def get_state(self) -> None:
        """It counts the steps of this life alone."""

    def set_state(self, state: None) -> None:
        """Nothing."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.batch -= 1
        if self.batch == 0:
            raise KeyboardInterrupt


@pytest.mark.parametrize("stop", [2, 4])
def test_a_fit_goes_on_in_the_middle_of_an_epoch(tmp_path: Path, stop: int) -> None:
    with dtrain.MirroredStrategy().scope():
        models = []
        for _ in range(3):
            keras.utils.set_random_seed(1)
            models.append(network([Added(), Largest()]))
    alone, stopped, restored = models
    backup = [dtrain.BackupAndRestore(tmp_path, save_freq=1)]
    wanted = fitted(alone, callbacks=[Stop(1000)])
    with pytest.raises(KeyboardInterrupt):
        fitted(stopped, callbacks=[*backup, Stop(stop)])
    found = fitted(restored, callbacks=[dtrain.BackupAndRestore(tmp_path, save_freq=1), Stop(1000)])
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(one, other)


def test_where_replicas_cannot_meet_the_metric_is_named() -> None:
    strategy = dtrain.MirroredStrategy()
    with strategy.scope():
        largest = Largest()

    def replica(x: tf.Tensor) -> None:
        tf.cond(x[0, 0] > 0, lambda: largest.update_state(x, x) or 0, lambda: 0)

    with refused(StepError, "update_state", "'largest'"):
        tf.function(lambda: strategy.run(replica, args=(tf.ones([4, 1]),)), autograph=False)()
    compiled = tf.function(lambda x: largest.update_state(x, x), jit_compile=True)
    with refused(CompilationError, "update_state", "'largest'"):
        strategy.run(compiled, args=(tf.ones([4, 1]),))


def test_a_number_of_each_replica_is_asked_for_as_the_whole_batchs() -> None:
    strategy = dtrain.MirroredStrategy()
    with strategy.scope():
        largest = Largest()
    with pytest.warns(UserWarning, match="'largest' is given a number by each replica"):
        strategy.run(lambda: largest.update_state(tf.random.normal([]), 0.0))
    assert int(largest.calls) == 1
