"""The devices of this process: lists them, sets GPU memory growth, and splits the CPU into logical CPUs.

Devices can be set up only before TensorFlow starts them; afterwards they can only be listed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from dtrain.base.log import logger
from dtrain.environments import settings
from dtrain.environments.cores import limit_threads
from dtrain.errors import DeviceError

_SPELLING = "write it as 'CPU:0', '/gpu:1' or '/device:GPU:0'"


def prepare(*, memory_growth: bool, logical_cpus: bool) -> None:
    """Sets memory growth, and the logical CPUs that the launcher asked for.

    Raises:
        DeviceError: logical CPUs were asked for after TensorFlow had started with another number.
    """
    limit_threads()
    if memory_growth:
        _grow()
    wanted = settings.devices_per_worker()
    if logical_cpus and wanted is not None and wanted > 1 and not tf.config.list_physical_devices("GPU"):
        split_cpu(wanted)


def split_cpu(count: int) -> None:
    """Splits the CPU into `count` logical CPUs; does nothing if it is split so already.

    Raises:
        DeviceError: TensorFlow has started with another number.
    """
    cpu = tf.config.list_physical_devices("CPU")[0]
    configured = tf.config.get_logical_device_configuration(cpu)
    if configured is not None and len(configured) == count:
        return
    try:
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * count)
    except RuntimeError as error:
        existing = len(tf.config.list_logical_devices("CPU"))
        if existing == count:
            return
        raise DeviceError(
            f"{count} logical CPUs were asked for, but TensorFlow has started with {existing}.",
            hint="make the strategy before any other call that uses TensorFlow's devices",
        ) from error


def known(names: Sequence[str] | None) -> list[str]:
    """Checks that this process has the named devices, and returns the names as a list.

    Args:
        names: device strings such as "GPU:0" or "/cpu:1", or one such string; None stands for all GPUs, or
            for all logical CPUs if there is no GPU.

    Raises:
        DeviceError: a device does not exist or is named twice, or the list is empty.
    """
    if names is None:
        return [device.name for device in logical("GPU") or logical("CPU")]
    try:
        names = [names] if isinstance(names, str) else list(names)
    except TypeError:
        raise DeviceError(f"{names!r} is not a list of device names.", hint=_SPELLING) from None
    if not names:
        raise DeviceError("The list of devices is empty.", hint="leave it out to take all there are")
    seen: set[tuple[Any, ...]] = set()
    for name in names:
        device = _parse(name)
        if device in seen:
            raise DeviceError(f"The device {name!r} is named twice in {names}.", hint="name each device once")
        seen.add(device)
    return names


def _parse(name: str) -> tuple[Any, ...]:
    """The type and index of an existing device; for a device of another job also the job and the task.

    Raises:
        DeviceError: `name` is no device name, or the device does not exist.
    """
    try:
        spec = tf.DeviceSpec.from_string(name if name.startswith("/") else f"/device:{name}")
        kind, index = spec.device_type, spec.device_index or 0
    except (ValueError, AttributeError) as error:
        raise DeviceError(f"{name!r} is not a device name.", hint=_SPELLING) from error
    if kind is None:
        raise DeviceError(f"{name!r} names no device type.", hint=_SPELLING)
    kind = kind.upper()
    elsewhere = spec.job not in (None, "localhost")
    have = local(kind, f"/job:{spec.job}/task:{spec.task or 0}") if elsewhere else logical(kind)
    if not 0 <= index < len(have):
        present = ", ".join(d.name.removeprefix("/device:") for d in tf.config.list_logical_devices())
        hint = f"this process has {present}"
        if kind == "CPU":
            hint += (
                "; more logical CPUs: tf.config.set_logical_device_configuration, "
                "or dtrain launch --devices-per-worker"
            )
        raise DeviceError(f"The device {name!r} does not exist here.", hint=hint)
    return (kind, index, spec.job, spec.task or 0) if elsewhere else (kind, index)


def _grow() -> None:
    for gpu in tf.config.list_physical_devices("GPU"):
        try:
            tf.config.experimental.set_memory_growth(gpu, True)
        except (RuntimeError, ValueError) as error:
            logger.info("GPU memory growth is not set: %s", error)


def logical(kind: str) -> list[Any]:
    """The logical devices of a kind, "CPU" or "GPU"."""
    return list(tf.config.list_logical_devices(kind))


def planned(kind: str) -> int:
    """How many logical devices of a kind TensorFlow has, or will have when it starts; does not start it."""
    configured = map(tf.config.get_logical_device_configuration, tf.config.get_visible_devices(kind))
    return sum(len(configuration) if configuration else 1 for configuration in configured)


def local(kind: str, worker: str) -> list[Any]:
    """The logical devices of a kind that belong to one task, such as "/job:worker/task:0"; "" for all."""
    task = tf.DeviceSpec.from_string(worker)
    with_specs = [(d, tf.DeviceSpec.from_string(d.name)) for d in logical(kind)]
    return [d for d, spec in with_specs if not worker or (spec.job, spec.task) == (task.job, task.task)]
