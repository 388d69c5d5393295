"""A variable that is summed over the replicas of all workers is whole when made and when written."""

from __future__ import annotations

from typing import Any

import pytest

import dtrain

LIMIT = 120.0


def values(communication: str) -> list[Any]:
    """What a variable of each type is, made as [1, 2] and then written as [7, -7]; a loss and a metric."""
    import keras
    import numpy as np
    import tensorflow as tf

    with dtrain.MultiWorkerMirroredStrategy(communication=communication).scope():
        found: list[Any] = []
        for dtype in ("int32", "int64", "float32"):
            variable = tf.Variable(
                np.array([1, 2], dtype),
                synchronization=tf.VariableSynchronization.ON_READ,
                aggregation=tf.VariableAggregation.SUM,
            )
            made = variable.numpy().tolist()
            variable.assign(np.array([7, -7], dtype))
            found.append((made, variable.numpy().tolist()))
        metric = keras.metrics.MeanIoU(num_classes=3)
        metric.update_state([0, 1, 2, 1], [0, 1, 1, 1])
        loss = keras.losses.MeanSquaredError()(np.ones((3, 2)), np.zeros((3, 2)))
        return [*found, float(metric.result()), float(loss)]


@pytest.mark.parametrize("communication", ["auto", "ring"])
def test_a_sum_over_workers_is_whole(communication: str) -> None:
    for found in dtrain.spawn(values, args=(communication,), workers=2, devices_per_worker=2, timeout=LIMIT):
        *variables, metric, loss = found
        assert variables == [([1, 2], [7, -7])] * 3
        assert metric == pytest.approx((1 + 2 / 3 + 0) / 3)
        assert loss == pytest.approx(1.0)
