"""These tests share one process with two logical CPUs, which must be asked for before TensorFlow starts."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import tensorflow as tf

from dtrain.telemetry.training_clock import clock
from given_clock import GivenClock

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


class TrainingTime(GivenClock):
    """A given clock that each look moves by `tick` seconds."""

    tick = 0.0

    def now(self) -> float:
        self.at += self.tick
        return self.at


@pytest.fixture
def training_time(monkeypatch: pytest.MonkeyPatch) -> Iterator[TrainingTime]:
    """The clock by which training is measured: its time passes where a test says so, and only there."""
    given = TrainingTime(clock.now())
    with monkeypatch.context() as patch:
        patch.setattr(clock, "now", given.now)
        yield given
    clock.enter("other")  # count what lies between both clocks now, not in the next test


@pytest.fixture(autouse=True)
def cycles_end_with_their_test() -> Iterator[None]:
    """Deletes iterators that the test has left in cycles.

    TensorFlow may take as long to delete one as it has lived, up to a minute.
    """
    yield
    gc.collect(1)  # what was made since the last call


@pytest.fixture(autouse=True)
def the_default_strategy_as_it_was() -> Iterator[None]:
    """`dtrain.strategy("default")` marks TensorFlow's own for the rest of the process: here, of the test."""
    default = tf.distribute.get_strategy()
    before = {*vars(default)}
    yield
    for name in {*vars(default)} - before:
        delattr(default, name)
