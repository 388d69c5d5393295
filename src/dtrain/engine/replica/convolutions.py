"""Keeps convolutions away from a CPU kernel that writes beyond its memory.

With 512-bit vectors, oneDNN's gradient for the weights of a 1x1 convolution with strides, fewer than 16 input
channels and an odd number of examples ends the process ("double free"). An even global batch, split over
replicas, may have odd parts. Every layer and function that convolves uses the replaced operation in its
backward pass; the forward pass is not changed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from dtrain.engine.replica.thread_state import thread_state
from dtrain.interfaces.managed_strategy import layout_of

_CHANNELS = 16  # of one 512-bit vector: with so many the kernel stays within its memory


def filter_gradient(
    original: Callable[..., Any],
    input: Any,
    filter_sizes: Any,
    out_backprop: Any,
    strides: Sequence[int],
    padding: str,
    use_cudnn_on_gpu: bool = True,
    explicit_paddings: Sequence[int] = (),
    data_format: str = "NHWC",
    dilations: Sequence[int] = (1, 1, 1, 1),
    name: str | None = None,
) -> Any:
    """The replacement of the operation that computes the gradient for a convolution's weights.

    It removes the pixels that the strides skip before it calls the kernel. The results have the same bits,
    because the kernel itself begins with a copy of the remaining pixels.
    """
    if (
        tf.compat.as_str(padding) != "EXPLICIT"
        and _in_replica_on_cpu()
        and _kernel_size(filter_sizes) == [1, 1]
    ):
        input, strides = _left_out(input, list(strides), tf.compat.as_str(data_format))
    more = (padding, use_cudnn_on_gpu, list(explicit_paddings), data_format, list(dilations), name)
    return original(input, filter_sizes, out_backprop, strides, *more)


def _in_replica_on_cpu() -> bool:
    strategy = tf.distribute.get_strategy()
    if not thread_state.single_program and (
        layout_of(strategy) is None or tf.distribute.get_replica_context() is None
    ):
        return False
    if tf.distribute.has_strategy():
        devices = strategy.extended.worker_devices
    else:  # TensorFlow's default strategy does not know its device, nor does a program that is divided
        devices = [device.name for device in tf.config.list_logical_devices()]
    return not any("GPU" in device or "TPU" in device for device in devices)


def _kernel_size(sizes: Any) -> Any:
    """Height and width of a kernel, from the tensor of its shape; None where they are not known."""
    shape = tf.get_static_value(sizes)
    if shape is None and sizes.op.type in ("Shape", "ShapeN"):
        shape = sizes.op.inputs[sizes.value_index].shape
    return None if shape is None else [None if n is None else int(n) for n in shape[:2]]


def _left_out(images: Any, strides: list[int], data_format: str) -> tuple[Any, list[int]]:
    """The pixels that a kernel of one pixel sees, and the strides over these; only where it is needed."""
    channels = images.shape[data_format.index("C")]
    if max(strides) == 1 or channels is None or channels >= _CHANNELS:
        return images, strides
    return images[tuple(slice(None, None, step) for step in strides)], [1] * len(strides)
