"""Variables that stand in for the servers' while a worker computes a block, and vanish with it.

What a step reads and writes is its own worker's; `exchange.py` carries changes to the servers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from dtrain.upstream import keras as upstream_keras
from dtrain.upstream import tensorflow as upstream_tf

_Base: Any = upstream_tf.RESOURCE_VARIABLE.resolve()


class StandIn(_Base):  # type: ignore[misc]
    """A variable made inside a function, on the device that runs it.

    Args:
        initial: its first value, of a known dtype; the shape may be partly unknown.
        trainable: whether a `tf.GradientTape` watches it.
        real: the variable that it stands for, or None.
        name: for messages.

    Attributes:
        on_write: called after every write that a step makes; not for `refresh`.
    """

    def __init__(
        self, initial: tf.Tensor, *, trainable: bool = False, real: Any = None, name: str = "stand_in"
    ) -> None:
        shape = real.shape if real is not None else initial.shape
        handle = upstream_tf.unnamed_variable_handle(initial.dtype, shape)
        super().__init__(
            trainable=trainable,
            shape=shape,
            dtype=initial.dtype,
            handle=handle,
            handle_name=name,
            # Optimizers know variables by this.
            unique_id=getattr(real, "_unique_id", name),
            in_graph_mode=False,
        )
        self.real = real
        self.on_write: Callable[[], None] | None = None
        self.refresh(initial)

    def refresh(self, value: Any) -> None:
        """Takes the servers' value."""
        tf.raw_ops.AssignVariableOp(resource=self.handle, value=value)

    @property
    def used(self) -> bool:
        """Whether anything but its first assignment has been traced for it."""
        return len(self.handle.consumers()) > 1

    def destroy(self) -> None:
        """Frees it; the last operation on it."""
        tf.raw_ops.DestroyResourceOp(resource=self.handle, ignore_lookup_error=True)

    def _wrote(self, result: Any) -> Any:
        if self.on_write is not None:
            self.on_write()
        return result

    def assign(self, *args: Any, **kwargs: Any) -> Any:
        """As `tf.Variable.assign`."""
        return self._wrote(super().assign(*args, **kwargs))

    def assign_add(self, *args: Any, **kwargs: Any) -> Any:
        """As `tf.Variable.assign_add`."""
        return self._wrote(super().assign_add(*args, **kwargs))

    def assign_sub(self, *args: Any, **kwargs: Any) -> Any:
        """As `tf.Variable.assign_sub`."""
        return self._wrote(super().assign_sub(*args, **kwargs))

    def _lazy_read(self, op: Any) -> Any:
        # Every scatter method of TensorFlow's ends here.
        return self._wrote(super()._lazy_read(op))


@contextlib.contextmanager
def standing_in(variables: Sequence[Any], values: Sequence[Any]) -> Iterator[None]:
    """While it is entered, Keras variables stand for other TensorFlow variables than their own."""
    before = [upstream_keras.value_of(variable) for variable in variables]
    try:
        for variable, value in zip(variables, values, strict=True):
            upstream_keras.set_value_of(variable, value)
        yield
    finally:
        for variable, value in zip(variables, before, strict=True):
            upstream_keras.set_value_of(variable, value)
