"""These tests share one process with two logical CPUs, which must be asked for before TensorFlow starts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import tensorflow as tf

_CPU = tf.config.list_physical_devices("CPU")[0]
# When the folder is collected, so before any test of the run starts TensorFlow's devices.
if tf.config.get_logical_device_configuration(_CPU) is None:
    tf.config.set_logical_device_configuration(_CPU, [tf.config.LogicalDeviceConfiguration()] * 2)


@pytest.fixture(scope="session", autouse=True)
def two_logical_cpus() -> None:
    found = len(tf.config.list_logical_devices("CPU"))
    assert found == 2, f"these tests need two logical CPUs; TensorFlow has started with {found}"


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """An environment that names no cluster and no TPU."""
    for name in ("TF_CONFIG", "DTRAIN_DEVICES_PER_WORKER", "TPU_NAME", "COLAB_TPU_ADDR"):
        monkeypatch.delenv(name, raising=False)
    for name in ("TPU_ACCELERATOR_TYPE", "TPU_WORKER_HOSTNAMES"):
        monkeypatch.delenv(name, raising=False)
    with monkeypatch.context() as patch:
        yield patch


@pytest.fixture(autouse=True)
def the_default_strategy_as_it_was() -> Iterator[None]:
    """`dtrain.strategy("default")` marks TensorFlow's own for the rest of the process: here, of the test."""
    default = tf.distribute.get_strategy()
    before = {*vars(default)}
    yield
    for name in {*vars(default)} - before:
        delattr(default, name)
