"""What `jit_compile="auto"` means on a machine with a GPU, which these tests only pretend that there is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import dtrain
from dtrain.engine.step import xla_rule

X = np.random.default_rng(0).normal(size=(240, 6)).astype("float32")
Y = (X.sum(axis=1, keepdims=True) > 0).astype("float32")

TWO = ["CPU:0", "CPU:1"]
STRATEGIES: dict[str, tuple[Callable[[], Any], bool]] = {
    "none": (tf.distribute.get_strategy, True),
    "default": (lambda: dtrain.strategy("default"), True),
    "one_device": (lambda: dtrain.OneDeviceStrategy("/cpu:0"), True),
    "mirrored, one replica": (lambda: dtrain.MirroredStrategy(["CPU:0"]), True),
    "mirrored, two replicas": (lambda: dtrain.MirroredStrategy(TWO), False),
    "central storage": (lambda: dtrain.experimental.CentralStorageStrategy(["CPU:1"]), False),
    "TensorFlow's": (lambda: tf.distribute.OneDeviceStrategy("/cpu:0"), False),
}


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    real = tf.config.list_physical_devices
    gpu = tf.config.PhysicalDevice("/physical_device:GPU:0", "GPU")

    def listed(kind: str | None = None) -> list[Any]:
        return [*real(kind), *([gpu] if kind in (None, "GPU") else [])]

    monkeypatch.setattr(tf.config, "list_physical_devices", listed)


def model_in(strategy: Any, **options: Any) -> Any:
    keras.utils.set_random_seed(3)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((6,)),
                keras.layers.Dense(16, activation="relu"),
                keras.layers.Dropout(0.3, seed=5),
                keras.layers.Dense(1, activation="sigmoid"),
            ]
        )
        model.compile(keras.optimizers.Adam(0.01), "binary_crossentropy", **options)
    return model


@pytest.mark.parametrize("name", STRATEGIES)
def test_one_replica_compiles_as_without_a_strategy(name: str, one_gpu: None) -> None:
    make, compiles = STRATEGIES[name]
    strategy = make()
    model = model_in(strategy)
    assert model.jit_compile is compiles
    assert model.distribute_strategy is strategy
    assert model_in(strategy, jit_compile=False).jit_compile is False
    model.layers[1].supports_jit = False
    model.compile("sgd", "mse")
    assert model.jit_compile is False


def test_without_a_gpu_nothing_is_compiled() -> None:
    assert model_in(dtrain.OneDeviceStrategy("/cpu:0")).jit_compile is False


def test_blocks_of_compiled_steps_compute_what_each_step_does(
    one_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The masks of dropout are those of a compiled step too, or the losses would be far apart."""
    strategy = dtrain.OneDeviceStrategy(TWO[1])
    found = []
    for options, in_blocks in (({"jit_compile": True}, False), ({}, False), ({}, True)):
        monkeypatch.setattr(xla_rule, "LEAST_STEPS", 10 if in_blocks else 1000)
        model = model_in(strategy, **options)
        losses = model.fit(X, Y, batch_size=20, epochs=2, verbose=0).history["loss"]
        assert bool((model.train_function.findings or {}).get("xla")) is in_blocks
        found.append([*losses, model.evaluate(X, Y, verbose=0), *model.predict(X[:3], verbose=0)[:, 0]])
    np.testing.assert_allclose(found[1], found[0], rtol=1e-6)
    np.testing.assert_allclose(found[2], found[0], rtol=1e-5)
