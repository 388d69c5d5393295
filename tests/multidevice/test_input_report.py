"""Training that waits for its data says so, and what would help; data that keep up are left in peace."""

from __future__ import annotations

import logging
import time
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import dtrain
from dtrain import monitor
from dtrain.keras_engine.input_advice import advice_for, tuned

X, Y = np.ones((320, 4), np.float32), np.ones((320, 1), np.float32)
Dataset = tf.data.Dataset


@tf.autograph.experimental.do_not_convert
def slowly(x: Any, y: Any) -> Any:
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


def fit(model: Any, caplog: pytest.LogCaptureFixture, data: Any, **more: Any) -> tuple[Any, list[str]]:
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="dtrain"):
        history = model.fit(data, epochs=2, verbose=0, **more)
    return history, [record.getMessage() for record in caplog.records if "waited for data" in record.message]


def test_slow_data_are_named_with_their_share_and_what_would_help(
    model: Any, caplog: pytest.LogCaptureFixture
) -> None:
    history, said = fit(model, caplog, Dataset.from_tensor_slices((X, Y)).map(slowly).batch(8))
    first, second = history.input_report
    assert [first["epoch"], second["epoch"]] == [0, 1]
    assert second["steps"] == 40
    assert 0.5 < second["share"] <= 1.0
    assert second["waiting"] <= second["seconds"]
    assert any("num_parallel_calls" in line for line in first["advice"])
    assert len(said) == 2, "once an epoch"
    assert "of epoch 1" in said[0] and "Hint: examples are made in Python" in said[0]
    assert "of epoch 2" in said[1] and "Hint" not in said[1], "what would help is said once"


def test_data_that_keep_up_are_not_named(model: Any, caplog: pytest.LogCaptureFixture) -> None:
    history, said = fit(model, caplog, X, y=Y, batch_size=32)
    assert not said
    assert [set(each) for each in history.input_report] == [
        {"epoch", "steps", "seconds", "waiting", "share"}
    ] * 2
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
        Dataset.from_tensor_slices((X, Y)).map(slowly),
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
