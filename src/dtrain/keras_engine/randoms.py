"""Makes uniform random numbers in a program that XLA compiles equal to those outside of XLA.

The random bits are equal already: both use the Philox generator. XLA converts bits to floats in another way,
so the conversion is done here as TensorFlow's own kernels do it. Only float32 numbers in [0, 1) are handled.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from dtrain.keras_engine.context import ThreadValue
from dtrain.upstream import tensorflow_names
from dtrain.upstream.reach import replaces

_same = ThreadValue(False)

# Bits of a float32: the mask of its fraction, and the sign and exponent of the numbers in [1, 2).
_FRACTION = 0x7FFFFF
_FROM_ONE = 0x3F800000


def same_random_numbers() -> contextlib.AbstractContextManager[bool]:
    """A context: code traced in it draws the same random numbers in XLA as outside of XLA."""
    return _same.set(True)


@replaces(tensorflow_names.STATELESS_UNIFORM)
def uniform(
    original: Callable[..., Any],
    shape: Any,
    seed: Any,
    minval: Any = 0,
    maxval: Any = None,
    dtype: Any = tf.float32,
    name: Any = None,
    alg: Any = "auto_select",
) -> Any:
    """The replacement of `tf.random.stateless_uniform`."""
    plain = isinstance(minval, int) and minval == 0 and maxval is None and alg in ("auto_select", None)
    if not (_same() and plain and tf.as_dtype(dtype) == tf.float32):
        return original(shape, seed, minval, maxval, dtype, name, alg)
    bits = original(shape, seed, minval=None, maxval=None, dtype=tf.uint32, alg="philox")
    fraction = tf.bitwise.bitwise_and(bits, tf.constant(_FRACTION, tf.uint32))
    whole = tf.bitwise.bitwise_or(fraction, tf.constant(_FROM_ONE, tf.uint32))
    return tf.bitcast(whole, tf.float32) - 1.0
