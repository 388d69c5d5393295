"""A variable of which each replica holds some entries of one dimension, in a form that Keras accepts."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from dtrain.engine.replica.gradient_marks import GradientMarks
from dtrain.engine.step.replica_communication import StrategyCollectives
from dtrain.errors import PeerMismatchError, StepError
from dtrain.interfaces.managed_strategy import layout_of
from dtrain.partition.communication import first_dim, first_dim_back
from dtrain.partition.layouts import WeightRows
from dtrain.strategies.common import Mirrored, ReadAsNumber, WithEntries, note_host_write
from dtrain.upstream import tf_tracing, tf_variables

SMALLEST = 2**13
"""Weights of fewer numbers are not divided by default: gathering takes longer than their memory is worth."""


def dim_to_divide(shape: Sequence[int], replicas: int, smallest: int) -> int | None:
    """The dimension along which a weight is divided: the first that divides it evenly, or nearly so.

    Args:
        shape: the shape of the weight.
        replicas: the number of replicas.
        smallest: the fewest numbers of a weight that is divided.

    Returns:
        The dimension; None if each replica has the whole weight, because it is small. Vectors always are.
    """
    if len(shape) < 2 or np.prod(shape, dtype=np.int64) < smallest or max(shape) < replicas:
        return None
    most = [-(-size // replicas) * replicas / size for size in shape]  # the largest part, over an even one
    dim = int(
        np.argmin([np.inf if size < replicas else excess for size, excess in zip(shape, most, strict=True)])
    )
    return dim


class DividedVariable(ReadAsNumber, WithEntries, Mirrored):  # type: ignore[misc]
    """A variable that is divided over the replicas. Outside of steps, each read gathers it.

    So all workers must read it together, and write to it together.

    Args:
        strategy: its strategy.
        value: the whole initial value. Where dtrain's transports connect the workers, the first worker's
            counts, and others may give a `tf.TensorSpec`.
        dim: the dimension along which it is divided.
        arguments: those of its creator.

    Attributes:
        dtrain_divided_dim: as `dim`.
        values: what the replicas of this process hold.
    """

    def __init__(self, strategy: Any, value: Any, dim: int, arguments: dict[str, Any]) -> None:
        layout = layout_of(strategy)
        if layout is None or layout.shard_groups is None:
            raise ValueError("a variable is divided under a strategy that does not divide weights")
        rows = WeightRows(int(value.shape[dim]))
        self._bounds = layout.shard_groups.bounds(rows)
        self._in_group = layout.shard_groups.several
        self.dtrain_divided_dim = dim
        devices = strategy.extended.worker_devices
        calls = strategy.dtrain_managed.calls
        if calls is None:
            parts = self._own(value)
        else:
            parts = [calls.scatter(value, dim, layout.shard_groups.bounds_of_processes(rows))]
        name = arguments.get("name") or "Variable"
        held = [
            tf_variables.variable_on(device, part, value.dtype, name)
            for device, part in zip(devices, parts, strict=True)
        ]
        self._without_memory = tf_variables.variable_without_memory(
            devices[0], value.shape, value.dtype, name, arguments
        )
        self._traced = self._without_memory
        super().__init__(strategy, held, arguments.get("aggregation") or tf.VariableAggregation.NONE)
        self._traced.handle._distributed_container = weakref.ref(self)

    @property
    def _primary(self) -> Any:
        """What is traced as on one device uses this variable. It has the whole shape, and no memory."""
        return self._traced

    def _own(self, whole: Any) -> list[Any]:
        """What the replicas of this process hold of a value."""
        axis = self.dtrain_divided_dim
        whole = tf.convert_to_tensor(whole)
        return [tf.gather(whole, tf.range(*bounds), axis=axis) for bounds in self._bounds]

    def _whole(self) -> Any:
        """The whole value; all workers must ask for it."""
        if self.trainable and tf_tracing.tape_records():
            raise StepError(
                f"The weight {self.name!r} is divided over the replicas, and was read under a GradientTape "
                "outside of a step of fit: the tape would find no gradient of it.",
                hint="train by fit, or by a train_step of your own",
            )
        if not tf.distribute.in_cross_replica_context() and tf.distribute.has_strategy():
            raise StepError(
                f"The weight {self.name!r} is divided over the replicas, and was read in strategy.run.",
                hint="train by fit, or by a train_step of your own",
            )
        if tf_tracing.in_xla_graph():
            raise StepError(
                f"The weight {self.name!r} is divided over the replicas, and was read in a function that XLA "
                "compiles outside of a step of fit: XLA cannot gather it.",
                hint="call predict, or leave jit_compile=True out of your tf.function",
            )
        dim, rank = self.dtrain_divided_dim, len(self.shape)
        rows = [first_dim(part.read_value(), dim, rank) for part in self.values]
        strategy = self.distribute_strategy
        together = StrategyCollectives(strategy, strategy.dtrain_managed.layout, GradientMarks())
        try:
            ((whole, *_),) = together.gathers([rows], in_group=self._in_group)
        except PeerMismatchError as error:
            raise type(error)(
                f"The weight {self.name!r} is divided over the workers, so all of them must read it "
                f"together. {error.message}",
                hint="read weights and save in every worker, and not in one of them alone (each writes the "
                "whole model, to the same path if you like)",
            ) from None
        whole = first_dim_back(whole, dim, rank)
        whole.set_shape(self.shape)  # no graph knows what workers gather, and layers are built by shapes
        return whole

    def read_value(self) -> Any:
        """The whole value."""
        return self._on_one_device().read_value() if tf_variables.in_one_device_trace() else self._whole()

    def value(self) -> Any:
        """The whole value."""
        return self._on_one_device().value() if tf_variables.in_one_device_trace() else self._whole()

    def _on_one_device(self) -> Any:
        """The variable that code uses which is traced, or runs eagerly, as on one device."""
        if tf.executing_eagerly() and self._traced is self._without_memory:
            raise StepError(
                f"The weight {self.name!r} is divided over the replicas, and was made in an eager step.",
                hint="make it before training, or leave run_eagerly out",
            )
        return self._traced

    def _dense_var_to_tensor(self, dtype: Any = None, name: Any = None, as_ref: bool = False) -> Any:
        if tf_variables.in_one_device_trace():
            return self._on_one_device()._dense_var_to_tensor(dtype, name, as_ref)
        return tf.cast(self._whole(), dtype or self.dtype)

    def sparse_read(self, indices: Any, name: Any = None) -> Any:
        """The rows at some places."""
        if tf_variables.in_one_device_trace():
            return self._on_one_device().sparse_read(indices, name=name)
        return tf.gather(self._whole(), indices, name=name)

    def _get(self) -> Any:
        """The variable that a trace as on one device uses; elsewhere no single one has the value."""
        if tf_variables.in_one_device_trace():
            return self._primary
        raise AttributeError(f"the variable {self.name!r} is divided over the replicas")

    def _get_as_operand(self) -> Any:
        return self.value()

    def _update_cross_replica(self, update_fn: Callable[..., Any], value: Any, **kwargs: Any) -> Any:
        whole = tf_variables.variable_in_place_of(self._traced, self._whole())
        update_fn(whole, value, **kwargs)
        return self.assign(whole)

    @contextlib.contextmanager
    def whole_on_one_device(self) -> Iterator[None]:
        """A context in which what runs eagerly as on one device uses a variable with the whole value.

        All workers must enter and leave it together. It ends with what that variable holds then.
        """
        self._traced = tf_variables.variable_in_place_of(self._without_memory, self._whole())
        try:
            yield
        finally:
            whole, self._traced = self._traced, self._without_memory
            self._hold(whole)

    def _hold(self, whole: Any, method: str = "assign") -> None:
        for held, part in zip(self.values, self._own(whole), strict=True):
            getattr(held, method)(part, read_value=False)

    def assign(self, value: Any, use_locking: bool = False, name: Any = None, read_value: bool = True) -> Any:
        """Gives it a value, of the whole shape."""
        return self._write("assign", value, use_locking, name, read_value)

    def assign_add(
        self, delta: Any, use_locking: bool = False, name: Any = None, read_value: bool = True
    ) -> Any:
        """Adds a value of the whole shape."""
        return self._write("assign_add", delta, use_locking, name, read_value)

    def assign_sub(
        self, delta: Any, use_locking: bool = False, name: Any = None, read_value: bool = True
    ) -> Any:
        """Subtracts a value of the whole shape."""
        return self._write("assign_sub", delta, use_locking, name, read_value)

    def _write(self, method: str, value: Any, use_locking: bool, name: Any, read_value: bool) -> Any:
        if tf_variables.in_one_device_trace():
            return getattr(self._primary, method)(value, use_locking, name, read_value)
        whole = tf.convert_to_tensor(value, self.dtype)
        if not self.shape.is_compatible_with(whole.shape):
            raise ValueError(f"the variable {self.name!r} has the shape {self.shape}, and not {whole.shape}")
        note_host_write(self, value)
        self._hold(whole, method)
        return self
