"""`OneDeviceStrategy`: everything on one named device, to try a program before it runs on several.

It distributes nothing.
"""

from __future__ import annotations

import tensorflow as tf

from dtrain.interfaces.managed_strategy import ManagedStrategy
from dtrain.interfaces.replica_layout import ReplicaLayout
from dtrain.strategies import common, devices


class OneDeviceStrategy(tf.distribute.OneDeviceStrategy):  # type: ignore[misc]
    """All variables and all computation on one device.

    Args:
        device: a device string, such as "/gpu:0" or "/cpu:0".
        memory_growth: whether GPUs allocate memory as needed instead of all at once.

    Raises:
        DeviceError: the device does not exist.

    Example:
        ```python
        strategy = dtrain.OneDeviceStrategy("/cpu:0")
        with strategy.scope():
            model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
            model.compile("sgd", "mse")
        model.fit(np.ones((64, 4)), np.ones((64, 1)), verbose=0)
        ```
    """

    def __init__(self, device: str, *, memory_growth: bool = True) -> None:
        common.prepare(memory_growth=memory_growth)
        devices.known([device])
        super().__init__(device)
        self.dtrain_managed = ManagedStrategy(layout=ReplicaLayout())


def one_device_strategy(device: str | None = None, *, memory_growth: bool = True) -> OneDeviceStrategy:
    """A `OneDeviceStrategy` on the given device; by default on the first GPU, or on the CPU without a GPU."""
    if device is None:
        device = "/gpu:0" if tf.config.list_physical_devices("GPU") else "/cpu:0"
    return OneDeviceStrategy(device, memory_growth=memory_growth)
