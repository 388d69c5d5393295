"""A strategy of several workers that has only one, as an elastic job may: it trains as one device does."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np

import dtrain


def train() -> list[tuple[Any, Any]]:
    """Losses and weights, under the strategy and without one, for each policy."""
    import keras

    strategy = dtrain.MultiWorkerMirroredStrategy()
    x = np.random.default_rng(0).normal(size=(40, 4)).astype("float32")

    def fit(policy: str, strategy: Any) -> tuple[list[float], list[Any]]:
        keras.utils.set_random_seed(1)
        with strategy.scope() if strategy is not None else contextlib.nullcontext():
            layers = [keras.layers.Dense(3, "relu", dtype=policy), keras.layers.Dense(1)]
            model = keras.Sequential([keras.Input((4,)), *layers])
            adam = keras.optimizers.Adam(
                0.01, gradient_accumulation_steps=3, use_ema=True, ema_overwrite_frequency=4
            )
            scaled = keras.optimizers.LossScaleOptimizer(adam) if policy == "mixed_float16" else adam
            model.compile(scaled, "mse")
        history = model.fit(x, x[:, :1], batch_size=8, epochs=3, verbose=0)
        return history.history["loss"], model.get_weights()

    return [(fit(policy, None), fit(policy, strategy)) for policy in ("float32", "mixed_float16")]


def test_accumulation_and_averages_with_one_worker() -> None:
    (fits,) = dtrain.spawn(train, workers=1)
    assert len(fits) == 2
    for (losses, weights), (alone, others) in fits:
        assert losses == alone
        assert all(np.array_equal(one, other) for one, other in zip(weights, others, strict=True))
