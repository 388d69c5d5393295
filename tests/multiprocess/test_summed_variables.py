"""Variables that workers of one or two replicas combine: sums over all replicas, a layer's moving mean."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import dtrain


def values(communication: str) -> list[Any]:
    """What a variable of each type is, made as [1, 2] and then written as [7, -7]; a loss and a metric."""
    import keras
    import numpy as np
    import tensorflow as tf

    with dtrain.MultiWorkerMirroredStrategy(communication=communication).scope():
        pairs: list[Any] = []
        for dtype in ("int32", "int64", "float32"):
            variable = tf.Variable(
                np.array([1, 2], dtype),
                synchronization=tf.VariableSynchronization.ON_READ,
                aggregation=tf.VariableAggregation.SUM,
            )
            made = variable.numpy().tolist()
            variable.assign(np.array([7, -7], dtype))
            pairs.append((made, variable.numpy().tolist()))
        metric = keras.metrics.MeanIoU(num_classes=3)
        metric.update_state([0, 1, 2, 1], [0, 1, 1, 1])
        loss = keras.losses.MeanSquaredError()(np.ones((3, 2)), np.zeros((3, 2)))
        return [*pairs, float(metric.result()), float(loss)]


@pytest.mark.parametrize("communication", ["auto", "ring"])
def test_a_sum_over_workers_is_whole(communication: str) -> None:
    for results in dtrain.spawn(values, args=(communication,), workers=2, devices_per_worker=2):
        *variables, metric, loss = results
        assert variables == [([1, 2], [7, -7])] * 3
        assert metric == pytest.approx((1 + 2 / 3 + 0) / 3)
        assert loss == pytest.approx(1.0)


def moving_means(distributed: bool) -> list[Any]:
    """The weights of a model with a layer that moves a mean of its examples, and the losses."""
    import contextlib

    import keras
    import numpy as np

    class Centre(keras.layers.Layer):  # type: ignore[misc]
        def build(self, shape: Any) -> None:
            self.mean = self.add_weight(shape=shape[1:], initializer="zeros", trainable=False)

        def call(self, x: Any, training: bool = False) -> Any:
            centred = x - self.mean
            if training:
                self.mean.assign(0.5 * self.mean + 0.5 * keras.ops.mean(x, axis=0))
            return centred

    keras.utils.set_random_seed(1)
    x = np.random.default_rng(1).normal(size=(26, 3)).astype("float32")
    scope = dtrain.MultiWorkerMirroredStrategy().scope() if distributed else contextlib.nullcontext()
    with scope:
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4), Centre(), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    history = model.fit(x, x[:, :1], batch_size=8, epochs=2, shuffle=False, verbose=0)
    return [*model.get_weights(), np.array(history.history["loss"])]


@pytest.mark.parametrize("devices", [1, 2])
def test_a_moving_mean_is_one_devices(devices: int) -> None:
    expected = moving_means(False)
    for arrays in dtrain.spawn(moving_means, args=(True,), workers=2, devices_per_worker=devices):
        for one, two in zip(arrays, expected, strict=True):
            np.testing.assert_allclose(one, two, rtol=2e-4, atol=1e-6)
