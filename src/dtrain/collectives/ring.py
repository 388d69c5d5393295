"""TensorFlow's own collectives, ring or NCCL, launched so that they are fast, and right in loops.

They serve where calls of our own do not: on GPUs, and where a worker has several replicas.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from dtrain.collectives.launcher import all_reduce_in_groups
from dtrain.upstream import tensorflow as upstream_tf
from dtrain.upstream.collectives import LAUNCHER

_Launcher: Any = LAUNCHER.resolve()

# Keys that are counted in the graph begin here, far from those that TensorFlow gives out.
_FIRST_COUNTED_KEY = 1 << 30


class RingLauncher(_Launcher):  # type: ignore[misc]
    """Launches one device's collectives by TensorFlow.

    Args:
        ordered: whether all collectives of a device run in one order.
        rest: the arguments of TensorFlow's launcher.
    """

    def __init__(self, ordered: bool, *rest: Any) -> None:
        self._ordered = ordered
        super().__init__(*rest)
        self._counted = upstream_tf.variable_on("CPU:0", _FIRST_COUNTED_KEY, tf.int32, "collective_key")
        self._counting = False

    def all_reduce(self, input_tensor: Any, control_input: Any = None, options: Any = None) -> Any:
        """The sum over all replicas of one tensor."""
        with contextlib.ExitStack() as stack:
            if not tf.convert_to_tensor(input_tensor).shape.is_fully_defined():
                stack.enter_context(self._counted_keys())
            return super().all_reduce(input_tensor, control_input, options)

    def batch_all_reduce(self, input_tensor_packs: Any, options: Any = None) -> list[Any]:
        """The sums of many tensors: large ones one by one, as soon as each is there, small ones packed."""
        options = self._options.merge(options)
        tensors = [tf.convert_to_tensor(t) for pack in input_tensor_packs for t in pack]
        return all_reduce_in_groups(
            tensors,
            lambda large: [self.all_reduce(tensor, None, options) for tensor in large],
            lambda several: super(RingLauncher, self).batch_all_reduce([several], options),
        )

    def _all_gather(self, input_tensor: Any, options: Any) -> Any:
        """The values of all replicas, one after another; all of one shape."""
        value = tf.convert_to_tensor(input_tensor)
        count = value.shape.num_elements()
        if count is not None and count > 0:
            return self._gather_some(value, options)
        # TensorFlow ends the process over nothing at all.
        rows = tf.concat([[tf.shape(value)[0] * self._group_size], tf.shape(value)[1:]], axis=0)
        return tf.cond(
            tf.size(value) > 0,
            lambda: self._gather_some(value, options),
            lambda: tf.zeros(rows, value.dtype),
        )

    def _gather_some(self, value: Any, options: Any) -> Any:
        with self._counted_keys():
            return super()._all_gather(value, options)

    @contextlib.contextmanager
    def _counted_keys(self) -> Iterator[None]:
        """Keys that differ from round to round of a loop, where TensorFlow's stay the same.

        What is gathered has another shape in each round, and one key stands for one shape.
        """
        outer, self._counting = self._counting, True
        try:
            yield
        finally:
            self._counting = outer

    def _next_instance_key(self) -> Any:
        if not self._counting:
            return super()._next_instance_key()
        with tf.device("CPU:0"):
            return self._counted.assign_add(1, read_value=True) + 0

    def _use_ordering_token(self) -> bool:
        return self._ordered and bool(super()._use_ordering_token())
