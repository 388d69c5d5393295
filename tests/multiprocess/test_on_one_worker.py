"""What a callback of one worker alone does is an error on both; what both do alike is none."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

import dtrain


def fitted(what: str, workers: tuple[int, ...]) -> Any:
    """The error of a `fit` whose callback does something on these workers; the weights if there is none."""
    os.environ["DTRAIN_PEER_TIMEOUT"] = "1e6"  # a worker that waits for the other one does so for ever
    import keras

    strategy = dtrain.MultiWorkerMirroredStrategy()
    x = np.random.default_rng(0).normal(size=(24, 3)).astype("float32")
    y = x.sum(axis=1, keepdims=True)
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.05), "mse", metrics=["mae"])

    def learning_rate() -> None:
        model.optimizer.learning_rate = 0.01

    def weights() -> None:
        model.set_weights([np.ones_like(weight) for weight in model.get_weights()])

    def own_weights() -> None:
        model.set_weights([np.full_like(weight, dtrain.rank()) for weight in model.get_weights()])

    does = {
        "learning rate": learning_rate,
        "weights": weights,
        "own weights": own_weights,
        "train_on_batch": lambda: model.train_on_batch(x[:4], y[:4]),
        "own batch": lambda: model.train_on_batch(x[dtrain.rank() :: 2], y[dtrain.rank() :: 2]),
        "predict_on_batch": lambda: model.predict_on_batch(x[:4]),
        "reset of metrics": lambda: model.reset_metrics(),
        "metrics": lambda: model.get_metrics_result(),
    }

    class Does(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            if epoch == 1 and dtrain.rank() in workers:
                does[what]()

    try:
        model.fit(x, y, batch_size=8, epochs=3, verbose=0, callbacks=[Does()])
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return [weight.tolist() for weight in model.get_weights()], model.history.history


@pytest.mark.parametrize(
    ("what", "workers", "said"),
    [
        ("learning rate", (0,), "the last that of sgd/learning_rate"),
        ("weights", (1,), "the last that of sequential/dense/bias"),
        ("own weights", (0, 1), "values set outside of steps"),
        ("reset of metrics", (1,), "the last that of the metrics"),
        ("train_on_batch", (0,), "worker 0 is in train_on_batch within fit (epoch 2), worker 1 in fit"),
        ("own batch", (0, 1), "in train_on_batch within fit (epoch 2), at its batch of 12 rows ("),
        ("predict_on_batch", (1,), "worker 1 in predict_on_batch within fit (epoch 2)"),
        ("metrics", (0,), "read metrics and set weights or a learning rate on every worker"),
    ],
)
def test_what_workers_do_not_do_alike_is_an_error(what: str, workers: tuple[int, ...], said: str) -> None:
    first, second = dtrain.spawn(fitted, workers=2, args=[what, workers])
    assert first == second and isinstance(first, str), (first, second)
    assert first.startswith("OperationMismatchError: The workers are not at the same point") and said in first


def fitted_in_turn(whats: list[str]) -> list[Any]:
    return [fitted(what, (0, 1)) for what in whats]


def test_what_workers_do_alike_is_none() -> None:
    whats = ["learning rate", "weights", "train_on_batch", "metrics", "reset of metrics"]
    for what, first, second in zip(
        whats, *dtrain.spawn(fitted_in_turn, workers=2, args=[whats]), strict=True
    ):
        assert first == second and not isinstance(first, str), (what, first)
