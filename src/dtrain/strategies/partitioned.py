"""A variable that a `variable_partitioner` has split over parameter servers, in a form that Keras accepts.

TensorFlow's `ShardedVariable` cannot be read as one tensor, cannot be converted to a NumPy array, and has no
optimizer slots that are split alike. Optimizer updates of the parts are not made here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from dtrain.upstream import tensorflow_names

_Sharded: Any = tensorflow_names.SHARDED_VARIABLE.resolve()


class PartitionedVariable(_Sharded):  # type: ignore[misc]
    """A variable whose rows are on several servers; reading it returns one tensor."""

    @property
    def trainable(self) -> bool:
        """Whether a `tf.GradientTape` watches the parts."""
        return bool(self.variables[0].trainable)

    @property
    def device(self) -> str:
        """The device of the first part."""
        return str(self.variables[0].device)

    def value(self) -> tf.Tensor:
        """All rows, concatenated."""
        return tf.concat([part.read_value() for part in self.variables], axis=0)

    def read_value(self) -> tf.Tensor:
        """All rows, concatenated."""
        return self.value()

    def numpy(self) -> np.ndarray:
        """All rows as a NumPy array."""
        return np.asarray(self.value())

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.numpy(), dtype=dtype)


def made_partitioned(variable: Any) -> Any:
    """Converts a `ShardedVariable` to a `PartitionedVariable`; returns other variables unchanged."""
    if isinstance(variable, _Sharded):
        return PartitionedVariable(variable.variables, name=variable.name)
    return variable


def partition_like(
    reference: PartitionedVariable, create: Callable[..., Any], arguments: dict[str, Any]
) -> PartitionedVariable:
    """Creates a variable that is split like another one, with each part on the same server.

    Args:
        reference: a split variable of the same shape.
        create: creates a variable from the arguments of `tf.Variable` and `colocate_with`.
        arguments: arguments for `create`; `initial_value` is a tensor of the whole shape.
    """
    value, start, parts = arguments["initial_value"], 0, []
    for number, part in enumerate(reference.variables):
        rows = int(part.shape[0])
        own = arguments | {
            "initial_value": value[start : start + rows],
            "shape": part.shape,
            "name": f"{arguments.get('name') or 'variable'}/part_{number}",
            "colocate_with": part,
        }
        parts.append(create(**own))
        start += rows
    return PartitionedVariable(parts, name=arguments.get("name") or "variable")
