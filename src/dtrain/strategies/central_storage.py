"""`CentralStorageStrategy`: one copy of the weights, computation on several devices of one machine.

The optimizer's state is stored once, too. Layers' own state (moving statistics, seeds) and metrics are on
each compute device. The training step itself is in `engine/`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from dtrain.engine.replica.thread_state import thread_state
from dtrain.gradient_hooks.hooks import hook_of
from dtrain.interfaces.gradient_hook import GradientHook
from dtrain.interfaces.managed_strategy import ManagedStrategy
from dtrain.interfaces.replica_layout import ReplicaLayout
from dtrain.interfaces.scope_checks import strategy_made
from dtrain.strategies import common, devices
from dtrain.upstream import tensorflow_names

_Extended: Any = tensorflow_names.MIRRORED_EXTENDED.resolve()


class CentralVariable(common.ReadAsNumber, common.WithEntries, common.Mirrored):  # type: ignore[misc]
    """A variable with a single copy for all replicas of the process."""

    def _get_replica(self, replica_id: int = 0) -> Any:
        return self._values[0]

    _get = _get_on_device_or_primary = _get_replica

    @property
    def handle(self) -> Any:
        """The handle of the only copy."""
        return self._values[0].handle

    def _update_replica(self, update_fn: Callable[..., Any], value: Any, **kwargs: Any) -> Any:
        if thread_state.updating_locally:
            return update_fn(self._values[0], value, **kwargs)
        if self.aggregation != tf.VariableAggregation.NONE:
            return super()._update_replica(update_fn, value, **kwargs)

        # All replicas computed the same value (a spectral norm, for example): write the first one's, once.
        def once(strategy: Any, merged: Any) -> Any:
            first = strategy.experimental_local_results(merged)[0]
            return self._update_cross_replica(update_fn, first, **kwargs)

        return tf.distribute.get_replica_context().merge_call(once, args=(value,))


class _Place:
    """Stands for a variable in `colocate_with`, which only needs its devices."""

    def __init__(self, device: str) -> None:
        self._devices = (device,)


class CentralStorageExtended(common.LocalUpdates, _Extended):  # type: ignore[misc]
    """The strategy's `extended`: it creates weights on the parameter device."""

    def __init__(self, strategy: Any, compute: list[str], parameter: str) -> None:
        super().__init__(strategy, devices=compute, cross_device_ops=common.sum_on_one_device())
        self._parameter_device = parameter

    @property
    def parameter_devices(self) -> tuple[str, ...]:
        """The device of the weights, as a tuple of one."""
        return (self._parameter_device,)

    def _create_variable(self, next_creator: Callable[..., Any], **kwargs: Any) -> Any:
        colocated = kwargs.get("colocate_with") is not None
        own = kwargs.get("trainable") is False and not colocated
        if own or kwargs.get("synchronization") == tf.VariableSynchronization.ON_READ:
            return common.remade(_Extended._create_variable(self, next_creator, **kwargs))
        kwargs["colocate_with"] = _Place(self._parameter_device)
        made = _Extended._create_variable(self, next_creator, **kwargs)
        return common.remade(made, CentralVariable)


class CentralStorageStrategy(
    common.ReplicaRunner,
    tf.distribute.experimental.CentralStorageStrategy,  # type: ignore[misc]
):
    """Synchronous training with one copy of the weights.

    Args:
        compute_devices: device strings; None uses all GPUs, or all logical CPUs if there is no GPU.
        parameter_device: the device of the weights; None uses the only compute device if that is a GPU, else
            the CPU.
        memory_growth: whether GPUs allocate memory as needed instead of all at once.
        gradient_hook: how gradients are reduced: "float16" or "bfloat16" all-reduces them in 16 bits; a
            `GradientHook` of your own; None all-reduces them as they are.

    Raises:
        DeviceError: a device does not exist, or is named twice.
        ConfigurationError: there is no gradient hook of this name, it averages the replicas' weights, or it
            keeps a state for each replica.

    Example:
        ```python
        strategy = dtrain.CentralStorageStrategy()
        with strategy.scope():
            model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
            model.compile("sgd", "mse")
        model.fit(np.ones((64, 4)), np.ones((64, 1)), verbose=0)
        ```
    """

    def __init__(
        self,
        compute_devices: Sequence[str] | None = None,
        parameter_device: str | None = None,
        *,
        memory_growth: bool = True,
        gradient_hook: str | GradientHook | None = None,
    ) -> None:
        common.prepare(memory_growth=memory_growth)
        self._collective_key_base = common.next_collective_key_base()
        compute = devices.known(compute_devices)
        if parameter_device is None:
            one_gpu = len(compute) == 1 and "gpu" in compute[0].lower()
            parameter_device = compute[0] if one_gpu else "/cpu:0"
        devices.known([parameter_device])
        parameter = tf.DeviceSpec.from_string(
            parameter_device if parameter_device.startswith("/") else f"/device:{parameter_device}"
        )
        host = tf.DeviceSpec.from_string(devices.logical("CPU")[0].name)
        resolved = host.replace(device_type=parameter.device_type, device_index=parameter.device_index or 0)
        tf.distribute.Strategy.__init__(self, CentralStorageExtended(self, compute, resolved.to_string()))
        layout = ReplicaLayout(
            local_replicas=self.num_replicas_in_sync,
            central=True,
            gradient_hook=hook_of(gradient_hook, shared_weights="for all replicas"),
        )
        self.dtrain_managed = ManagedStrategy(layout=layout)
        strategy_made(self)
