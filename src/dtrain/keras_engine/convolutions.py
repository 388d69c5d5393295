"""Keeps convolutions away from a kernel for CPUs that writes beyond its memory.

With 512-bit vectors, oneDNN's gradient for the weights of a 1x1 convolution with strides, fewer than 16 input
channels and an odd number of examples ends the process ("double free"). Replicas make odd parts of even
batches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from dtrain.keras_engine.protocol import layout_of

_CHANNELS = 16  # those of one vector: with so many nothing is written too far


def make_conv(original: Callable[..., Any]) -> Callable[..., Any]:
    """The replacement of Keras' convolution: the pixels that strides leave out are left out before it.

    The results have the same bits: the kernel itself copies those pixels first.
    """

    def conv(
        inputs: Any,
        kernel: Any,
        strides: Any = 1,
        padding: Any = "valid",
        data_format: Any = None,
        dilation_rate: Any = 1,
    ) -> Any:
        if _in_replica_on_cpu():
            inputs, strides = _left_out(inputs, kernel, strides, data_format, dilation_rate)
        return original(inputs, kernel, strides, padding, data_format, dilation_rate)

    return conv


def _in_replica_on_cpu() -> bool:
    strategy = tf.distribute.get_strategy()
    if layout_of(strategy) is None or tf.distribute.get_replica_context() is None:
        return False
    if tf.distribute.has_strategy():
        devices = strategy.extended.worker_devices
    else:  # TensorFlow's default strategy does not tell its device
        devices = [device.name for device in tf.config.list_logical_devices()]
    return not any("GPU" in device or "TPU" in device for device in devices)


def _left_out(
    inputs: Any, kernel: Any, strides: Any, data_format: Any, dilation_rate: Any
) -> tuple[Any, Any]:
    """What to convolve, and with which strides."""
    dimensions = len(inputs.shape) - 2
    steps = _each(strides, dimensions)
    first = data_format == "channels_first"
    channels = inputs.shape[1 if first else -1]
    dense = max(_each(dilation_rate, dimensions)) == 1
    pointwise = dense and all(size == 1 for size in kernel.shape[:-2])
    if max(steps) == 1 or not pointwise or dimensions > 2 or channels is None or channels >= _CHANNELS:
        return inputs, strides
    sizes = inputs.shape[2:] if first else inputs.shape[1:-1]
    if any(size is not None and size % step for size, step in zip(sizes, steps, strict=True)):
        return inputs, strides
    cuts = [slice(None, None, step) for step in steps]
    whole = [slice(None), slice(None)] if first else [slice(None)]
    return inputs[(*whole, *cuts)], 1


def _each(value: int | Sequence[int], dimensions: int) -> list[int]:
    return [value] * dimensions if isinstance(value, int) else [int(each) for each in value]
