"""Mistakes in several processes: every worker gets the error or the warning, none waits for the others."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import dtrain


def mistakes() -> dict[str, Any]:
    """All cases in one pair of processes: what each worker saw."""
    os.environ["DTRAIN_PEER_TIMEOUT"] = "1e6"  # a worker that waits for the other one does so for ever
    import keras
    import tensorflow as tf

    # Made before dtrain has replaced anything; TensorFlow must not have started yet, so it has no weights.
    earlier = [keras.Sequential([keras.layers.Dense(1)]) for _ in range(2)]
    strategy = dtrain.MultiWorkerMirroredStrategy()
    x = np.random.default_rng(0).normal(size=(22, 3)).astype("float32")
    y = x.sum(axis=1, keepdims=True)

    def model(optimizer: Any = None, metrics: tuple[Any, ...] = ("mae",), strategy: Any = strategy) -> Any:
        keras.utils.set_random_seed(1)
        with strategy.scope():
            made = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
            made.compile(optimizer=optimizer or keras.optimizers.SGD(0.05), loss="mse", metrics=list(metrics))
        return made

    def fit(made: Any, *data: Any, **options: Any) -> dict[str, Any]:
        return made.fit(
            *(data or (x, y)), **{"batch_size": 9, "shuffle": False, "verbose": 0} | options
        ).history

    def metric_outside() -> Any:
        made = model(metrics=(keras.metrics.MeanAbsoluteError(name="mine"), "mae"))
        history = fit(made)
        evaluated = made.evaluate(x, y, batch_size=9, verbose=0, return_dict=True)
        return history["mine"][0], history["mae"][0], evaluated["mine"], evaluated["mae"]

    def metric_of_own_rows() -> Any:
        local = dtrain.MultiWorkerMirroredStrategy(gradient_hook="local_sgd")
        return fit(model(metrics=(keras.metrics.MeanAbsoluteError(),), strategy=local))

    def outside(made: Any = None) -> Any:
        made = made or keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        made.compile(optimizer="sgd", loss="mse")
        return made

    def alone() -> Any:
        with dtrain.OneDeviceStrategy("/cpu:0").scope():
            made = outside()
        made.set_weights([np.full((3, 1), 0.5), np.zeros(1)])
        return fit(made, x[:5], y[:5]), float(outside().evaluate(x, y, verbose=0)) > 0

    def nan() -> Any:
        broken = y.copy()
        broken[3] = np.nan
        return fit(model(), x, broken, epochs=2)

    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(9)
    cases: dict[str, Callable[[], Any]] = {
        "optimizer outside": lambda: fit(model(keras.optimizers.Adam())),
        "metric outside": metric_outside,
        "metric outside, local SGD": metric_of_own_rows,
        "model outside": lambda: fit(outside()),
        "model outside, batch by batch": lambda: outside().train_on_batch(x, y),
        "model made earlier": lambda: fit(outside(earlier[0])),
        "model made earlier, batch by batch": lambda: outside(earlier[1]).train_on_batch(x, y),
        "alone": alone,
        "nan": nan,
        "small batch": lambda: fit(model(), x[:3], y[:3], batch_size=1, epochs=2),
        "one example": lambda: fit(model(), x[:1], y[:1], epochs=2),
        "ends early": lambda: fit(model(), data, batch_size=None, steps_per_epoch=2, epochs=3),
        "scalars": lambda: fit(model(), tf.data.Dataset.range(4).map(lambda i: (i, i)), batch_size=None),
        "afterwards": lambda: fit(model(), epochs=2),
    }
    seen: dict[str, Any] = {}
    for name, case in cases.items():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                result = case()
            except Exception as error:
                result = f"{type(error).__name__}: {error}"
        seen[name] = (result, [str(w.message) for w in caught])
        dtrain.barrier()
    return seen


@pytest.fixture(scope="module")
def seen() -> list[dict[str, Any]]:
    return dtrain.spawn(mistakes, workers=2)


def test_an_optimizer_made_outside_the_scope(seen: list[dict[str, Any]]) -> None:
    for worker in seen:
        error, _ = worker["optimizer outside"]
        assert error.startswith("ScopeError: The optimizer 'adam' was made outside of any strategy's scope")
        assert "MultiWorkerMirroredStrategy with 2 replicas" in error


def test_a_metric_made_outside_the_scope_is_not_silently_wrong(seen: list[dict[str, Any]]) -> None:
    for worker in seen:
        result, _ = worker["metric outside"]
        np.testing.assert_allclose(result[0::2], result[1::2], rtol=2e-4)
        error, _ = worker["metric outside, local SGD"]
        assert error.startswith("ScopeError") and "made outside of any strategy's scope" in error


@pytest.mark.parametrize("way", ["", ", batch by batch"])
@pytest.mark.parametrize("case", ["model outside", "model made earlier"])
def test_a_model_made_outside_the_scope(seen: list[dict[str, Any]], case: str, way: str) -> None:
    for worker in seen:
        error, _ = worker[case + way]
        assert isinstance(error, str), "it was trained"
        assert error.startswith("ScopeError: The model 'sequential"), error
        assert "MultiWorkerMirroredStrategy of 2 workers" in error and "OneDeviceStrategy" in error


def test_a_model_that_each_worker_trains_alone(seen: list[dict[str, Any]]) -> None:
    (first, evaluated), (second, _) = (worker["alone"][0] for worker in seen)
    assert evaluated and first == second and np.isfinite(first["loss"]).all()


def test_a_loss_that_is_not_a_number(seen: list[dict[str, Any]]) -> None:
    for worker in seen:
        history, said = worker["nan"]
        assert np.isnan(history["loss"]).all()
        assert [text[:24] for text in said] == ["The loss of epoch 1 is n"]


@pytest.mark.parametrize("case", ["small batch", "one example", "ends early", "afterwards"])
def test_workers_agree_and_go_on(seen: list[dict[str, Any]], case: str) -> None:
    first, second = (worker[case] for worker in seen)
    assert first[0] == second[0]
    assert np.isfinite(first[0]["loss"]).all()
    words = {"small batch": "batch_size=1 is the global batch", "ends early": "ran out of data"}.get(case)
    if words:
        for _, said in (first, second):
            assert any(words in text for text in said), said


def test_data_that_is_not_batched(seen: list[dict[str, Any]]) -> None:
    for worker in seen:
        assert worker["scalars"][0].startswith("DataError: The data yields scalars")
