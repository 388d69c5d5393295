"""`MirroredStrategy`: synchronous training on several devices of one machine, each with a copy of the model.

Gradients are all-reduced over the devices before the update, so all copies have the same weights, bit for
bit. The training step itself is in `engine/`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from dtrain.gradient_hooks.hooks import hook_of
from dtrain.interfaces.gradient_hook import GradientHook
from dtrain.interfaces.managed_strategy import ManagedStrategy
from dtrain.interfaces.replica_layout import ReplicaLayout
from dtrain.interfaces.scope_checks import strategy_made
from dtrain.strategies import common
from dtrain.strategies.devices import known
from dtrain.upstream import tensorflow_names

_Extended: Any = tensorflow_names.MIRRORED_EXTENDED.resolve()


class MirroredExtended(common.LocalUpdates, _Extended):  # type: ignore[misc]
    """The strategy's `extended`, with dtrain's variables and local updates."""


class MirroredStrategy(common.ReplicaRunner, tf.distribute.MirroredStrategy):  # type: ignore[misc]
    """Synchronous training on several devices of one machine.

    Args:
        devices: device strings such as `["GPU:0", "GPU:1"]`; None uses all GPUs, or all logical CPUs if there
            is no GPU.
        cross_device_ops: a `tf.distribute.CrossDeviceOps`; None uses TensorFlow's choice (NCCL for GPUs), or
            for CPUs a sum on one device.
        memory_growth: whether GPUs allocate memory as needed instead of all at once.
        gradient_hook: what replicas send: the name of a hook, such as "bfloat16", "power_sgd" or "local_sgd",
            also with arguments, as in "diloco:every=20"; a `GradientHook`; None all-reduces each step's
            gradients as they are.

    Raises:
        DeviceError: a device does not exist, or is named twice.
        ConfigurationError: there is no gradient hook of this name, or its arguments are wrong.

    Example:
        ```python
        strategy = dtrain.MirroredStrategy()  # all devices of this machine
        with strategy.scope():
            model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
            model.compile("sgd", "mse")
        model.fit(np.ones((64, 4)), np.ones((64, 1)), verbose=0)
        ```
    """

    def __init__(
        self,
        devices: Sequence[str] | None = None,
        cross_device_ops: tf.distribute.CrossDeviceOps | None = None,
        *,
        memory_growth: bool = True,
        gradient_hook: str | GradientHook | None = None,
    ) -> None:
        common.prepare(memory_growth=memory_growth)
        self._collective_key_base = common.next_collective_key_base()
        names = known(devices)
        in_order = cross_device_ops is None and all("cpu" in name.lower() for name in names)
        if in_order:
            cross_device_ops = common.sum_on_one_device()
        # TensorFlow's own constructor creates its own extended class, so call the base class's with ours.
        tf.distribute.Strategy.__init__(
            self, MirroredExtended(self, devices=names, cross_device_ops=cross_device_ops)
        )
        layout = ReplicaLayout(
            local_replicas=self.num_replicas_in_sync,
            gradient_hook=hook_of(gradient_hook),
            cross_device_sums=not in_order,
        )
        self.dtrain_managed = ManagedStrategy(layout=layout)
        strategy_made(self)
