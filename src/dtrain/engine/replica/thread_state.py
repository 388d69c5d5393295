"""What the code that a thread runs is part of: one object, whose fields each thread has for itself.

TensorFlow runs each replica of a custom loop in a thread, and traces functions in threads. The functions that
Keras and TensorFlow call there get no argument that says where they are called.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import tensorflow as tf

from dtrain.engine.replica.replica_attributes import PerReplicaAttributes

Apply = Callable[..., Any]
"""Keras' own `optimizer.apply`."""


class TracedBlock(Protocol):
    """What a thread traces for parameter servers: a block of steps, or a step to plan one.

    Attributes:
        mixed_into_seeds: an int64 scalar that is mixed into the seeds of random layers; None to leave them.
    """

    @property
    def mixed_into_seeds(self) -> tf.Tensor | None:  # noqa: D102
        ...

    def apply(self, original: Apply, optimizer: Any, grads: Sequence[Any], variables: Any) -> None:
        """Replaces `optimizer.apply` in a step; `original` is Keras' own `apply`."""


class ThreadState(threading.local):
    """What a thread's code is part of; outside of `having`, each field has its default.

    Attributes:
        single_program: whether the code is traced as the program of one device, which is partitioned
            afterwards.
        gradient_marks: the `GradientMarks` of the step that is traced so; None if no hook reduces its
            gradients.
        averaged_optimizer: the only optimizer that a step of local SGD may apply, since only its state is
            averaged; None elsewhere.
        updating_locally: whether the code runs after the all-reduce, where each replica acts like a single
            device.
        reports_one_replica: whether `num_replicas_in_sync` gives 1.
        own_attributes: the attributes of the replica that the thread runs; None if a process has one replica.
        inside_layer: whether the code runs inside the outermost layer that a replica calls.
        layer_is_empty: a bool tensor, whether this layer was given a row of zeros; None if it has rows.
        written: collects the ids of the variables that a replica writes; None if nothing collects them.
        without_results: the model whose own step of Keras' runs here, and returns no results; None elsewhere.
        inside_metric: whether the code runs inside an update of a metric whose arguments are prepared
            already.
        recorded_seeds: the seeds of a computation that is rematerialized, a `RecordedSeeds`; None outside of
            one.
        same_random_numbers: whether code that is traced draws the same random numbers in XLA as outside.
        block: the block whose train step the thread traces, or the planner of its step; None outside of one.
        block_workers: the workers that run the block which the thread traces; 0 outside of one.
        server_optimizer: the optimizer whose update is applied on parameter servers; None outside of one.
    """

    single_program: bool = False
    gradient_marks: Any = None
    averaged_optimizer: Any = None
    updating_locally: bool = False
    reports_one_replica: bool = False
    own_attributes: PerReplicaAttributes | None = None
    inside_layer: bool = False
    layer_is_empty: Any = None
    written: set[int] | None = None
    without_results: Any = None
    inside_metric: bool = False
    recorded_seeds: Any = None
    same_random_numbers: bool = False
    block: TracedBlock | None = None
    block_workers: int = 0
    server_optimizer: Any = None

    @contextlib.contextmanager
    def having(self, **values: Any) -> Iterator[None]:
        """A context in which fields of this thread have other values; then they have the previous ones again.

        Raises:
            AttributeError: there is no such field.
        """
        previous = {name: getattr(self, name) for name in values}
        vars(self).update(values)
        try:
            yield
        finally:
            vars(self).update(previous)


thread_state = ThreadState()
