"""What a divided step communicates: what is said of it, and the warning about what is gathered."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import dtrain
from dtrain.engine.step import step_plan
from dtrain.telemetry import events

ROWS = 40


class Plans(keras.callbacks.Callback):  # type: ignore[misc]
    """Keeps the plans of the steps that a `fit` divides: the train step's, and the test step's."""

    def __init__(self) -> None:
        super().__init__()
        self.train: list[dict[str, Any]] = []
        self.test: list[dict[str, Any]] = []

    def on_train_begin(self, logs: Any = None) -> None:
        events.listen(self)

    def _handle_step_divided(self, event: events.StepDivided) -> None:
        (self.train if event.train else self.test).append(event.describe())


class AllRows(keras.layers.Layer):  # type: ignore[misc]
    """Adds the number of different values among all rows, which no rule divides."""

    def call(self, inputs: Any) -> Any:
        whole = tf.cast(tf.round(inputs), tf.int32)
        different, _ = tf.unique(tf.reshape(whole, [-1]))  # THE LINE
        return inputs + tf.cast(tf.size(different), inputs.dtype)


def line_of(mark: str) -> str:
    lines, first = inspect.getsourcelines(AllRows)
    return f"test_step_plan.py:{first + next(i for i, text in enumerate(lines) if mark in text)}"


def plans_of(make: Callable[[], Any], width: int, *, batch: int = 20) -> Plans:
    """The plans of the steps of a model with one output on two replicas."""
    keras.utils.set_random_seed(1)
    with dtrain.MirroredStrategy().scope():
        made = make()
    x = np.random.default_rng(0).normal(size=(ROWS, width)).astype("float32")
    seen = Plans()
    data = (x, x[:, :1])
    made.fit(*data, validation_data=data, batch_size=batch, verbose=0, callbacks=[seen])
    return seen


def dense() -> Any:
    made = keras.Sequential([keras.Input((6,)), keras.layers.Dense(4, "relu"), keras.layers.Dense(1)])
    made.compile("sgd", "mse", metrics=["mae", keras.metrics.BinaryAccuracy()])
    return made


def test_a_step_of_dense_layers_sums_its_gradients_in_one_round() -> None:
    (plan,) = plans_of(dense, 6).train
    assert (plan["rows"], plan["rounds"], plan["gathers"], plan["gathered"]) == (20, 1, 0, [])
    kinds = [(each["kind"], each["bytes"]) for each in plan["communications"]]
    assert sorted(kinds) == sorted(("sum", 4 * size) for size in (6 * 4, 4, 4 * 1, 1))
    assert plan["sum_bytes"] == 4 * 33 and plan["sums"] == 4
    assert all("optimizers/sgd.py" in each["line"] for each in plan["communications"])
    assert all("test_step_plan.py" in each["line"] for each in plan["communications"])


def recurrent() -> Any:
    inputs = keras.Input((6,))
    both = keras.layers.Bidirectional(keras.layers.LSTM(3))(keras.layers.Reshape((3, 2))(inputs))
    made = keras.Model(inputs, keras.layers.Dense(1)(both))
    made.compile("sgd", "mse")
    return made


def test_recurrent_layers_gather_nothing_whether_the_rows_of_a_batch_are_known_or_not() -> None:
    (known,) = plans_of(recurrent, 6).train
    seen = plans_of(recurrent, 6, batch=18).train  # 4 rows are left
    for plan in (known, *seen):
        assert (plan["rounds"], plan["gathers"], plan["gathered"]) == (1, 0, [])


def test_an_evaluation_communicates_in_no_step() -> None:
    (plan,) = plans_of(dense, 6).test
    assert (plan["rounds"], plan["communications"]) == (0, [])


def with_all_rows(width: int) -> Any:
    made = keras.Sequential([keras.Input((width,)), AllRows(), keras.layers.Dense(1)])
    made.compile("sgd", "mse")
    return made


def test_what_no_rule_divides_is_named_with_its_line_and_bytes() -> None:
    (plan,) = plans_of(lambda: with_all_rows(8), 8).train
    (found,) = plan["gathered"]
    assert found["operation"] == "Unique" and line_of("THE LINE") in found["line"]
    assert found["bytes"] == 20 * 8 * 4
    (gather,) = (each for each in plan["communications"] if each["kind"] == "gather")
    assert gather["needed_by"] == found["name"] and gather["bytes"] == found["bytes"]


@pytest.mark.parametrize(("width", "warned"), [(8, False), (20_000, True)])
def test_what_gathers_much_is_named_once_on_the_screen(
    width: int, warned: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_plan, "_warned", set())
    with caplog.at_level(logging.WARNING, "dtrain"):
        for _ in range(2):
            plans_of(lambda: with_all_rows(width), width)
    lines = [each.getMessage() for each in caplog.records if "no rule divides" in each.getMessage()]
    assert len(lines) == int(warned)
    if warned:
        assert lines[0].startswith("Unique") and line_of("THE LINE") in lines[0] and "1.6 MB" in lines[0]


def test_a_loop_s_communication_is_marked() -> None:
    class Centered(keras.layers.Layer):  # type: ignore[misc]
        def call(self, inputs: Any) -> Any:
            def body(step: Any, rows: Any) -> Any:
                return step + 1, rows - tf.tanh(tf.reduce_mean(rows))

            return tf.while_loop(lambda step, _: step < 2, body, [0, inputs])[1]

    def make() -> Any:
        made = keras.Sequential([keras.Input((6,)), Centered(), keras.layers.Dense(1)])
        made.compile("sgd", "mse")
        return made

    (plan,) = plans_of(make, 6).train
    assert {each["nested"] for each in plan["communications"]} == {True, False}
