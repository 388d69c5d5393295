"""Gradients that are sent in 16 bits."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from dtrain.interfaces.gradient_hook import GradientHook


class Compressed(GradientHook):
    """Sends gradients in a narrower type of floats.

    Args:
        dtype: such as `tf.float16`; gradients that are not wider are sent as they are.
    """

    def __init__(self, dtype: tf.DType) -> None:
        self._dtype = dtype

    def compress(self, gradient: tf.Tensor, variable: Any) -> tf.Tensor:
        """The narrowed gradient."""
        narrows = gradient.dtype.is_floating and gradient.dtype.size > self._dtype.size
        return tf.cast(gradient, self._dtype) if narrows else gradient
