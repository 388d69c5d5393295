"""A variable that a `variable_partitioner` has split over the servers, as Keras needs it.

TensorFlow's `ShardedVariable` lacks what Keras asks of a variable: to be a number, to be read and written as
one, to have slots that are split alike.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from dtrain.upstream import tensorflow as upstream_tf

_Sharded: Any = upstream_tf.SHARDED_VARIABLE.resolve()


class PartitionedVariable(_Sharded):  # type: ignore[misc]
    """Rows on several servers; read, it is one tensor."""

    @property
    def trainable(self) -> bool:
        """Whether tapes watch its parts."""
        return bool(self.variables[0].trainable)

    @property
    def device(self) -> str:
        """Where its first part is."""
        return str(self.variables[0].device)

    def value(self) -> tf.Tensor:
        """All rows."""
        return tf.concat([part.read_value() for part in self.variables], axis=0)

    def read_value(self) -> tf.Tensor:
        """All rows."""
        return self.value()

    def numpy(self) -> np.ndarray:
        """All rows."""
        return np.asarray(self.value())

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.numpy(), dtype=dtype)


def made_partitioned(variable: Any) -> Any:
    """Makes a `ShardedVariable` one of dtrain's; other variables are returned as they are."""
    if isinstance(variable, _Sharded):
        return PartitionedVariable(variable.variables, name=variable.name)
    return variable


def partition_like(
    reference: PartitionedVariable, create: Callable[..., Any], arguments: dict[str, Any]
) -> PartitionedVariable:
    """A variable of the reference's shape, split as it is, each part beside the reference's.

    Args:
        reference: the split variable.
        create: makes a variable from arguments of `tf.Variable`, `colocate_with` among them.
        arguments: with `initial_value` as a tensor of the whole shape.
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
