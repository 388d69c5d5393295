"""`fit`, `evaluate` and `predict` of several workers, by a step that is traced once and partitioned."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from tests.partitioned_models import MODELS, ROWS, trained

import dtrain
from dtrain.errors import ReplicaMismatchError, StepError

# Models whose replicas communicate in a condition.
IN_CONDITIONS = ("optimizers_in_a_condition",)


def numbers(strategy: Any, refused: tuple[str, ...] = ()) -> dict[str, list[Any]]:
    """For each model, its weights, history, scores and predictions; some are refused."""
    x = np.random.default_rng(1).normal(size=(ROWS, 6)).astype("float32")
    results: dict[str, list[Any]] = {}
    for number, (name, make) in enumerate(MODELS.items()):
        if name in refused:
            with pytest.raises(StepError, match="inside a condition or a loop"):
                trained(strategy, make, batch=17, as_dataset=False)
            continue
        made, history, scores = trained(strategy, make, batch=17, as_dataset=bool(number % 2))
        callable_alone = type(made).call is not keras.Model.call
        outputs = made.predict(x, batch_size=17, verbose=0) if callable_alone else ()
        results[name] = [*made.get_weights(), *history.values(), scores, *outputs]
    return results


def of_worker(devices: int) -> dict[str, list[Any]]:
    strategy = dtrain.MultiWorkerMirroredStrategy()
    assert strategy.num_replicas_in_sync > devices
    if devices == 1:
        check_local_steps(dtrain.MultiWorkerMirroredStrategy(gradient_hook="local_sgd"))
        check_steps_by_rank(strategy)
    return numbers(strategy, IN_CONDITIONS if devices > 1 else ())


def check_steps_by_rank(strategy: Any) -> None:
    """A step that computes something else on each worker is found at the end of the epoch, on all of them."""

    class ByRank(keras.Model):  # type: ignore[misc]
        def train_step(self, data: Any) -> Any:
            logs = super().train_step(data)
            self.layers[-1].bias.assign_add([0.01 * dtrain.rank()])
            return logs

    with strategy.scope():
        inputs = keras.Input((6,))
        made = ByRank(inputs, keras.layers.Dense(1, name="last")(inputs))
        made.compile("sgd", "mse")
    dtrain.compare_copies(made)
    x = np.ones((6, 6), "float32")
    with pytest.raises(ReplicaMismatchError, match=r"After epoch 1, .* 3 replicas .*differ: '.*last/bias'"):
        made.fit(x, x[:, :1], verbose=0)
    with pytest.raises(ReplicaMismatchError, match="Now, the copies"):
        dtrain.compare_copies(made)


def check_local_steps(strategy: Any) -> None:
    """Local SGD has the same numbers where steps run eagerly, and says where they cannot."""
    x = np.random.default_rng(1).normal(size=(35, 6)).astype("float32")
    results = []
    for eager in (False, True):
        keras.utils.set_random_seed(1)
        with strategy.scope():
            body = [keras.layers.Dense(8, "relu"), keras.layers.BatchNormalization(), keras.layers.Dense(1)]
            made = keras.Sequential([keras.Input((6,)), *body])
            made.compile(keras.optimizers.SGD(0.1), "mse", metrics=["mae"], run_eagerly=eager)
        history = made.fit(x[:34], x[:34, :1], batch_size=17, epochs=2, shuffle=False, verbose=0).history
        results.append([*history.values(), *made.get_weights()])
    for traced, run in zip(*results, strict=True):
        np.testing.assert_allclose(run, traced, rtol=2e-4, atol=1e-6)
    with pytest.raises(StepError, match="a batch of 1 rows leaves some of the 3 workers without any"):
        made.fit(x, x[:, :1], batch_size=17, shuffle=False, verbose=0)


@pytest.mark.parametrize(
    ("workers", "devices"),
    [
        pytest.param(3, 1, id="transport"),
        pytest.param(2, 2, id="TensorFlow's ring", marks=pytest.mark.long),
    ],
)
def test_workers_have_the_numbers_of_one_device(workers: int, devices: int) -> None:
    """Batches of 17 give uneven parts; the last batch has one row, so all replicas but one have none."""
    first, *others = dtrain.spawn(of_worker, workers, args=(devices,), devices_per_worker=devices)
    one = numbers(tf.distribute.get_strategy())
    assert len(first) > 5
    for name in first:
        for place, expected in enumerate(one[name]):
            value = first[name][place]
            np.testing.assert_allclose(value, expected, rtol=2e-4, atol=1e-5, err_msg=name)
            for other in others:
                np.testing.assert_array_equal(value, other[name][place], name)
