"""Training that waits for its data says so, and what would help; data that keep up are left in peace."""

from __future__ import annotations

import logging
import time
from typing import Any
from unittest.mock import ANY

import keras
import numpy as np
import pytest
import tensorflow as tf

import dtrain
from dtrain import monitor
from dtrain.engine.callbacks.time_report import TimeReport
from dtrain.engine.feed.input_advice import advice_for, tuned
from dtrain.interfaces.replica_layout import ReplicaLayout
from dtrain.telemetry import events
from given_clock import GivenClock

X, Y = np.ones((320, 4), np.float32), np.ones((320, 1), np.float32)
Dataset = tf.data.Dataset


@tf.autograph.experimental.do_not_convert
def in_python(x: Any, y: Any) -> Any:
    def sleep(z: Any) -> Any:
        time.sleep(0.002)
        return z

    return tf.ensure_shape(tf.numpy_function(sleep, [x], tf.float32), [4]), y


@tf.autograph.experimental.do_not_convert
def twice(*each: Any) -> Any:
    return tuple(2 * one for one in each)


@pytest.fixture(scope="module")
def model() -> Any:
    with dtrain.MirroredStrategy().scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    return model


def two_epochs(
    clock: GivenClock, caplog: pytest.LogCaptureFixture, data: Any, *, reading: float
) -> tuple[TimeReport, list[str]]:
    """What is reported of two epochs of 40 steps that take 10 ms each, after `reading` seconds."""
    caplog.clear()
    report = TimeReport(ReplicaLayout(), data)
    with caplog.at_level(logging.WARNING, logger="dtrain"), events.loop("fit"):
        for epoch in range(2):
            report.on_epoch_begin(epoch)
            for _ in range(40):
                events.emit(events.InputBegins(data))
                clock.pass_by(reading)
                events.emit(events.StepBegins())
                clock.pass_by(0.01)
                events.emit(events.StepsEnd())
                events.emit(events.CallEnds(train=True))
            report.on_epoch_end(epoch)
    return report, [record.getMessage() for record in caplog.records if "waited for data" in record.message]


def test_slow_data_are_named_with_their_share_and_what_would_help(
    training_time: GivenClock, caplog: pytest.LogCaptureFixture
) -> None:
    data = Dataset.from_tensor_slices((X, Y)).map(in_python).batch(8)
    report, said = two_epochs(training_time, caplog, data, reading=0.04)
    first, second = report._inputs
    assert second == {"epoch": 1, "steps": 40, "seconds": 2.0, "waiting": 1.6, "share": 0.8, "advice": ANY}
    assert any("num_parallel_calls" in line for line in first["advice"])
    assert len(said) == 2, "once an epoch"
    assert "80% of the time of epoch 1 (1.60 of 2.00 s). Hint: examples are made in Python" in said[0]
    assert "of epoch 2" in said[1] and "Hint" not in said[1], "what would help is said once"
    for each in report._epochs:
        assert [(cause["cause"], cause["share"]) for cause in each["causes"]] == [("input", 0.8)]


@pytest.mark.parametrize("reading", [0.002, 0.006])
def test_data_that_keep_up_are_not_named(
    reading: float, training_time: GivenClock, caplog: pytest.LogCaptureFixture
) -> None:
    """A sixth of the time is little; a third of it is much, but not a quarter of a second."""
    report, said = two_epochs(training_time, caplog, X, reading=reading)
    assert not said
    assert [set(each) for each in report._inputs] == [{"epoch", "steps", "seconds", "waiting", "share"}] * 2
    assert [each["causes"] for each in report._epochs] == [[], []]


def test_a_fit_measures_how_long_it_waits(model: Any) -> None:
    history = model.fit(Dataset.from_tensor_slices((X, Y)).map(in_python).batch(8), epochs=2, verbose=0)
    first, second = history.input_report
    assert [first["epoch"], second["epoch"], second["steps"]] == [0, 1, 40]
    assert 0.9 * len(X) * 0.002 < second["waiting"] <= second["seconds"]
    assert "input_report" not in history.history


def records() -> Any:
    return tf.data.TFRecordDataset(["nowhere"]).map(
        lambda record: tf.io.decode_raw(record, tf.uint8), num_parallel_calls=2
    )


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (lambda: Dataset.range(8).map(lambda x: x + 1).batch(2), ["num_parallel_calls", "batch() first"]),
        (lambda: Dataset.range(8).batch(2).map(lambda x: -x, num_parallel_calls=2), ["in parallel already"]),
        (lambda: records().batch(2), ["cache() after decoding"]),
        (lambda: records().cache().batch(2), ["in parallel already"]),
        (
            lambda: Dataset.from_generator(lambda: iter([1.0]), output_signature=tf.TensorSpec([])).batch(2),
            ["in Python", "prefetch"],
        ),
        (lambda: Dataset.range(8).interleave(lambda x: Dataset.range(x)), ["reads one file at a time"]),
        (lambda: iter([1]), ["the generator"]),
        (lambda: keras.utils.PyDataset(workers=1), ["one thread"]),
        (lambda: keras.utils.PyDataset(workers=2, use_multiprocessing=False), ["Python's lock"]),
        (lambda: X, []),
    ],
)  # fmt: skip
def test_what_would_help_is_found_in_the_data(made: Any, words: list[str]) -> None:
    found = advice_for(made())
    assert len(found) == len(words), found
    for line, word in zip(found, words, strict=True):
        assert word in line


def test_more_threads_are_not_advised_where_no_core_is_free() -> None:
    assert "all cores are busy" in advice_for(X, busy=0.97)[-1]
    assert advice_for(X, busy=0.5) == []


def test_batches_are_read_ahead_where_that_changes_nothing() -> None:
    plain, same = (Dataset.range(64).shuffle(16, seed=1).map(twice).batch(8) for _ in range(2))
    ahead = tuned(plain)
    assert ahead is not plain
    for _ in range(2):
        assert [x[0].numpy().tolist() for x in ahead] == [x[0].numpy().tolist() for x in same]
    assert ahead.cardinality() == plain.cardinality()
    assert tuned(ahead) is ahead
    variable = tf.Variable(1, dtype=tf.int64)
    for left in (
        Dataset.from_tensor_slices((X, Y)).map(in_python),
        Dataset.range(8).map(lambda x: x * variable),
        Dataset.range(8).map(lambda x: tf.random.uniform([])),
        Dataset.range(8).shuffle(8).repeat(),
        X,
    ):
        assert tuned(left) is left


def test_a_record_says_how_long_was_waited() -> None:
    epochs = [
        {"waiting": 1.0, "seconds": 2.0, "advice": ["a", "b"]},
        {"waiting": 0.0, "seconds": 2.0},
        {"waiting": 1.0, "seconds": 4.0, "advice": ["a"]},
    ]
    found = monitor.finish_record(
        {}, examples_per_second=1.0, wall_time_seconds=1.0, xla=False, final_metrics={}, input_report=epochs
    )
    assert found["input"] == {"waiting_seconds": 2.0, "share": 0.25, "advice": ["a", "b"]}
