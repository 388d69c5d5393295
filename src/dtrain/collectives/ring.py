"""The transports NCCL and TensorFlow, and a launcher that makes TensorFlow's collectives fast and correct.

TensorFlow's collectives, ring or NCCL, are used where dtrain's collective calls are not: on GPUs, with
several replicas in a worker, and where the user asks for them by name.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from dtrain.collectives.calls import Calls
from dtrain.collectives.graph_calls import TensorGroups
from dtrain.collectives.transport import Facts, Transport
from dtrain.environments.topology import Topology
from dtrain.interfaces.replica_layout import ReplicaLayout
from dtrain.upstream import tensorflow_names, tf_variables

_Launcher: Any = tensorflow_names.LAUNCHER.resolve()

# Collective keys that are counted in the graph begin here, far from the keys that TensorFlow assigns.
_FIRST_COUNTED_KEY = 1 << 30


class NCCL(Transport):
    """TensorFlow's collectives over NVIDIA's NCCL."""

    name = "nccl"
    implementation = "NCCL"

    def reason(self, facts: Sequence[Facts]) -> str:
        """Chosen if all replicas are on GPUs."""
        return "all replicas are on GPUs" if all(worker_facts.gpus for worker_facts in facts) else ""

    def connect(
        self, layout: ReplicaLayout, topology: Topology, facts: Sequence[Facts]
    ) -> tuple[Calls | None, str]:
        """TensorFlow has connected the workers already."""
        return None, ""


class TensorFlowRing(Transport):
    """TensorFlow's own ring, over its servers. They check nothing, so only a user who names it gets it."""

    name = "tensorflow"

    def connect(
        self, layout: ReplicaLayout, topology: Topology, facts: Sequence[Facts]
    ) -> tuple[Calls | None, str]:
        """TensorFlow connects the workers when the strategy starts its server."""
        return None, ""


class RingLauncher(_Launcher):  # type: ignore[misc]
    """Launches one device's collectives through TensorFlow.

    Args:
        ordered: whether all collectives of a device must run in the same order.
        rest: the arguments of TensorFlow's launcher.
    """

    def __init__(self, ordered: bool, *rest: Any) -> None:
        self._ordered = ordered
        super().__init__(*rest)
        self._counted = tf_variables.variable_on("CPU:0", _FIRST_COUNTED_KEY, tf.int32, "collective_key")
        self._counting = False

    def all_reduce(self, input_tensor: Any, control_input: Any = None, options: Any = None) -> Any:
        """All-reduces one tensor over all replicas."""
        with contextlib.ExitStack() as stack:
            if not tf.convert_to_tensor(input_tensor).shape.is_fully_defined():
                stack.enter_context(self._counted_keys())
            return super().all_reduce(input_tensor, control_input, options)

    def batch_all_reduce(self, input_tensor_packs: Any, options: Any = None) -> list[Any]:
        """All-reduces many tensors: each large one as soon as it is computed, small ones packed."""
        options = self._options.merge(options)
        tensors = [tf.convert_to_tensor(t) for pack in input_tensor_packs for t in pack]
        groups = TensorGroups(tensors)
        totals = groups.empty | {i: self.all_reduce(tensors[i], None, options) for i in groups.large}
        for numbers in groups.small:
            packed = super().batch_all_reduce([[tensors[i] for i in numbers]], options)
            totals.update(zip(numbers, packed, strict=True))
        return [totals[i] for i in range(len(tensors))]

    def _all_gather(self, input_tensor: Any, options: Any) -> Any:
        """Gathers the values of all replicas, which have the same shape, along the first axis."""
        value = tf.convert_to_tensor(input_tensor)
        count = value.shape.num_elements()
        if count is not None and count > 0:
            return self._gather_some(value, options)
        # TensorFlow ends the process if the value is empty.
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
        """Gives collectives inside the context a new key in each loop iteration; TensorFlow's stay the same.

        A key stands for one shape, but gathered values may have another shape in each iteration.
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
