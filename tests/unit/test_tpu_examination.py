"""What the examination for TPUs finds in steps and in data; whole scripts are in `test_doctor_scripts.py`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from dtrain.diagnosis.check import CheckResult
from dtrain.diagnosis.tpu_input import examine_input, read_batches
from dtrain.diagnosis.tpu_step import StepExaminer

BATCH = np.arange(12, dtype="float32").reshape(4, 3)


def examined(step: Callable[[Any], Any], batch: Any = BATCH) -> list[CheckResult]:
    """The findings on a step of a model that does not matter."""
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    return StepExaminer(model, step, tf.nest.map_structure(tf.convert_to_tensor, batch)).examine()


def reshaped(x: Any) -> Any:
    return tf.reshape(x, tf.stack([tf.cast(x[0, 1], tf.int32), -1]))


def ranged(x: Any) -> Any:
    return tf.range(tf.cast(x[0, 2], tf.int32))


def in_a_condition(x: Any) -> Any:
    return tf.cond(x[0, 0] > 0, lambda: tf.numpy_function(np.sum, [x], tf.float32), lambda: 0.0)


def printed(x: Any) -> Any:
    tf.print("the first:", x[0, 0])
    return x


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (lambda x: tf.where(x > 1), "depends on values"),
        (reshaped, "constant"),
        (ranged, "constant"),
        (in_a_condition, "tf.numpy_function"),
        (printed, "tf.print"),
        (lambda x: tf.strings.length(tf.strings.as_string(x)), "strings"),
        (
            lambda x: tf.nn.fractional_avg_pool(x[None, :, :, None], [1.0, 1.5, 1.5, 1.0]),
            "XLA has no operation",
        ),
        (lambda x: tf.RaggedTensor.from_row_lengths(x[0], [1, 2]).to_tensor(), ""),
    ],
    ids=["where", "reshape", "range", "condition", "print", "strings", "pool", "ragged"],
)
def test_a_step_with_one_fault(step: Callable[[Any], Any], words: str) -> None:
    found = examined(step)
    if words:
        assert [each.status for each in found] == ["fail"], found
        assert words in found[0].found and "test_tpu_examination.py:" in found[0].found, found


@pytest.mark.parametrize(
    "step",
    [
        lambda x: tf.gather(tf.eye(50), tf.cast(x, tf.int64)),
        lambda x: tf.where(x > 1, x, 0.0),
        lambda x: tf.while_loop(lambda i, v: i < 3, lambda i, v: (i + 1, v * 2), (0, x)),
        lambda x: tf.debugging.assert_all_finite(tf.nn.softmax(x), "it is not finite"),
        lambda x: tf.reshape(x, [tf.shape(x)[0], -1]),
        lambda x: (tf.where(x > 1), x)[1],  # it is not used
        lambda x: tf.nn.top_k(x, 2).values,
    ],
    ids=["gather", "where", "loop", "assert", "reshape", "unused", "top_k"],
)
def test_a_step_without_fault(step: Callable[[Any], Any]) -> None:
    assert [each.status for each in examined(step)] == ["ok"]


@pytest.mark.long
def test_a_recurrent_layer_compiles_and_a_sparse_update_does_not() -> None:
    """Keras' RMSprop keeps an Embedding's gradient sparse, by a mask."""
    layers = [keras.layers.Embedding(9, 3, mask_zero=True), keras.layers.LSTM(4), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((5,), dtype="int64"), *layers])
    batch = (tf.ones((4, 5), tf.int64), tf.ones((4, 1)))
    for optimizer, words in (
        ("adam", "this was not tried on a TPU"),
        ("rmsprop", "keras/src/optimizers/rmsprop.py:"),
    ):
        model.compile(optimizer, "mse")
        model.train_on_batch(*batch)
        (found,) = StepExaminer(model, model.train_step, batch).examine()
        assert words in found.found


def data_findings(dataset: tf.data.Dataset) -> list[CheckResult]:
    read = read_batches(iter(dataset), tf.distribute.get_strategy())
    return list(examine_input(read, dataset.element_spec))


def of_lengths(*lengths: int) -> tf.data.Dataset:
    def make() -> Iterator[Any]:
        yield from (np.ones((2, length), "float32") for length in lengths)

    return tf.data.Dataset.from_generator(make, output_signature=tf.TensorSpec((2, None), tf.float32))


def test_data() -> None:
    rows = tf.data.Dataset.from_tensor_slices(np.ones((10, 3), "float32"))
    assert data_findings(rows.batch(4, drop_remainder=True)) == []
    assert data_findings(rows.batch(5)) == []
    (found,) = data_findings(rows.batch(4))
    assert found.status == "fail" and "batch 2 (the last one) has 2" in found.found
    (found,) = data_findings(of_lengths(3, 3, 5))
    assert found.status == "fail" and "axis 1" in found.found and "5 in batch 2" in found.found
    (found,) = data_findings(tf.data.Dataset.from_tensors(tf.ragged.constant([[1], [2, 3]])))
    assert found.status == "fail" and "RaggedTensor" in found.found
    (found,) = data_findings(tf.data.Dataset.from_tensors(["a", "b"]))
    assert found.status == "fail" and "strings" in found.found
    (found,) = data_findings(rows.batch(5).repeat())
    assert found.status == "warn" and "does not promise" in found.found
    endless = itertools.repeat(tf.ones((2, 2)))
    assert not read_batches(endless, tf.distribute.get_strategy()).complete
