"""Data that other processes read: each element once, in one order where a function makes them, and an end."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import pytest
import tensorflow as tf

import dtrain.data
from dtrain.errors import ConfigurationError, DataError
from refusals import refused

COUNT = 41


def made_in_python(context: Any) -> Any:
    """Numbers, with the process that made each of them: by Python, which no graph can carry elsewhere."""
    import os

    import numpy as np
    import tensorflow as tf

    def numbers() -> Any:
        for number in range(context.input_pipeline_id, 41, context.num_input_pipelines):
            yield np.int64(number), np.int64(os.getpid())

    spec = tf.TensorSpec([], tf.int64)
    dataset = tf.data.Dataset.from_generator(numbers, output_signature=(spec, spec))
    return dataset.apply(tf.data.experimental.assert_cardinality(len(list(numbers()))))


@pytest.fixture(scope="module")
def dealt() -> Iterator[Any]:
    before = os.environ.get("TF_CONFIG")
    dataset = dtrain.data.distribute(made_in_python, workers=2)
    yield dataset
    dataset.dtrain_service.close()
    assert os.environ.get("TF_CONFIG") == before


def test_a_functions_parts_are_dealt_out_in_one_order_by_processes_of_their_own(dealt: Any) -> None:
    for _ in range(2):
        pairs = [(int(number), int(process)) for number, process in dealt]
        assert [number for number, _ in pairs] == list(range(COUNT)), "also across the end of a part"
        assert {process for _, process in pairs} == set(dealt.dtrain_service.processes)
        assert os.getpid() not in dealt.dtrain_service.processes


def test_fit_reads_from_them(dealt: Any) -> None:
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    data = dealt.map(lambda n, _: (tf.cast(n, tf.float32)[None], 0.0)).batch(4)
    history = model.fit(data, epochs=2, verbose=0)
    assert len(history.history["loss"]) == 2
    assert int(model.optimizer.iterations) == 2 * 11


def test_a_process_that_dies_is_an_error_and_nothing_is_left_out(
    dealt: Any, caplog: pytest.LogCaptureFixture
) -> None:
    data = iter(dealt.repeat())
    next(data)
    with caplog.at_level(logging.ERROR, logger="dtrain"):
        os.kill(dealt.dtrain_service.processes[1], signal.SIGKILL)
        with pytest.raises(tf.errors.OpError):
            for _ in data:  # they would go on for ever
                pass
    assert "was killed by signal 9 (SIGKILL)" in caplog.text


def test_a_dataset_is_shared_and_its_processes_end(tmp_path: Path) -> None:
    file = tmp_path / "records"
    with tf.io.TFRecordWriter(str(file)) as writer:
        for number in range(COUNT):
            writer.write(str(number))
    source = tf.data.TFRecordDataset([str(file)]).map(lambda text: tf.strings.to_number(text, tf.int64))
    dataset = dtrain.data.distribute(source.batch(3), workers=2)
    for _ in range(2):
        assert sorted(int(n) for batch in dataset for n in batch) == list(range(COUNT))
    service = dataset.dtrain_service
    assert len(service.processes) == 2
    service.close()
    service.close()
    for process in service.processes:
        with pytest.raises(ProcessLookupError):
            os.kill(process, 0)


def test_what_cannot_be_read_elsewhere_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with refused(DataError, "ValueError: no such data", "Hint"):
        dtrain.data.distribute(raises, workers=1)
    with refused(ConfigurationError, "list"):
        dtrain.data.distribute([1, 2])  # type: ignore[arg-type]
    with refused(ConfigurationError, "workers", 0):
        dtrain.data.distribute(raises, workers=0)
    cluster = '{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 0}}'
    with monkeypatch.context() as patch:
        patch.setenv("TF_CONFIG", cluster)
        with refused(ConfigurationError, "2 training processes"):
            dtrain.data.distribute(tf.data.Dataset.range(3))


def raises(context: Any) -> Any:
    raise ValueError("no such data")
