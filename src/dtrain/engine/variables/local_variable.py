"""Local variables of a worker that replace the servers' variables while a worker computes a block.

A step reads and writes the local variables only. Sending changes to the servers is the task of `exchange`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from dtrain.upstream import keras_variables, tensorflow_names, tf_variables

_Base: Any = tensorflow_names.RESOURCE_VARIABLE.resolve()


class LocalVariable(_Base):  # type: ignore[misc]
    """A temporary variable created inside a function, on the device that runs the function.

    Args:
        initial: the first value, of a known dtype; the shape may be partly unknown.
        trainable: whether a `tf.GradientTape` watches the variable.
        real: the variable that this one replaces, or None.
        name: the name in messages.

    Attributes:
        real: as given.
        on_write: called when a write is traced; not for `refresh`. None for no call.
    """

    def __init__(
        self, initial: tf.Tensor, *, trainable: bool = False, real: Any = None, name: str = "local_variable"
    ) -> None:
        shape = real.shape if real is not None else initial.shape
        handle = tf_variables.unnamed_variable_handle(initial.dtype, shape)
        super().__init__(
            trainable=trainable,
            shape=shape,
            dtype=initial.dtype,
            handle=handle,
            handle_name=name,
            # Optimizers find a variable's slots by this id.
            unique_id=getattr(real, "_unique_id", name),
            in_graph_mode=False,
        )
        self.real = real
        self.on_write: Callable[[], None] | None = None
        self.refresh(initial)

    def refresh(self, value: Any) -> None:
        """Assigns a value without calling `on_write`, such as the value that the servers hold."""
        tf.raw_ops.AssignVariableOp(resource=self.handle, value=value)

    @property
    def used(self) -> bool:
        """Whether the traced function uses the variable beyond the first assignment."""
        return len(self.handle.consumers()) > 1

    def destroy(self) -> None:
        """Frees the variable; this must be its last operation."""
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
        # All of TensorFlow's scatter methods call this.
        return self._wrote(super()._lazy_read(op))


@contextlib.contextmanager
def variables_replaced(variables: Sequence[Any], values: Sequence[Any]) -> Iterator[None]:
    """Replaces, inside the context, the TensorFlow variables that Keras variables wrap.

    Args:
        variables: Keras variables.
        values: the TensorFlow variable that replaces each one's own.
    """
    before = [keras_variables.value_of(variable) for variable in variables]
    try:
        for variable, value in zip(variables, values, strict=True):
            keras_variables.set_value_of(variable, value)
        yield
    finally:
        for variable, value in zip(variables, before, strict=True):
            keras_variables.set_value_of(variable, value)
