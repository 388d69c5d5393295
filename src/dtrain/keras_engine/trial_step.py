"""The step that one replica runs as a trial, before training, to learn what the losses of a step are.

What is concluded from a trial is not decided here, but in `probe.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from dtrain.keras_engine.context import Point, ReplicaStep
from dtrain.keras_engine.protocol import ReplicaLayout


class TrialStep(ReplicaStep):
    """A step that a single replica runs as a trial, to learn what its losses are.

    It does not communicate with other replicas.

    Attributes:
        taken: the values at each point where the replicas would be combined.
        names: the name of each of these points in messages.
        equal_everywhere: operations whose results would be the same on all replicas.
    """

    def __init__(self, layout: ReplicaLayout, **known: Any) -> None:
        super().__init__(layout, **known)
        self.taken: list[list[Any]] = []
        self.names: list[str] = []
        self.equal_everywhere: set[Any] = set()

    def next_point(self) -> Point:
        """A point of weight 1, because the values must be noted without a weight."""
        return Point(tf.ones([], tf.float32))

    def whole_gradients(self, gradients: list[Any], variables: list[Any], target: Any) -> list[Any]:
        """Notes the gradients, and returns them."""
        found: list[Any] = self._noted(gradients, "a loss that train_step differentiates")
        return found

    def gradients_to_apply(self, optimizer: Any, gradients: list[Any], variables: list[Any]) -> None:
        """None, because a trial applies no gradients."""

    def whole_value(
        self,
        value: Any,
        name: str = "a number that train_step reports",
        *,
        rows: bool | None = None,
        gather: Callable[[Any], Any] | None = None,
    ) -> Any:
        """Notes the value and returns it; a value that is marked as whole is not noted."""
        if any(value is known for known in self._whole):
            return value
        return self._noted([value], name)[0]

    def part_of_value(self, value: Any) -> Any:
        """Notes the value, and returns it."""
        self.taken.append([value])
        self.names.append("a number that a metric takes")
        return value

    def note_write(self, variable: Any) -> None:
        """Notes the write, also in an update: a whole trial runs inside `local_update`."""
        self.assigned[id(variable)] = variable

    note_shared_write = note_write

    def sum(self, values: Any) -> Any:
        """The values themselves, because a trial has one replica."""
        return self.common(values)

    def gather(self, value: Any) -> Any:
        """The rows themselves, because a trial has one replica."""
        return self.common(value)

    def common(self, values: Any) -> Any:
        """Marks values that would be the same on all replicas, such as a sum over them, and returns them."""

        def one(value: Any) -> Any:
            if value is None:
                return None
            found = tf.identity(value)
            leaves = tf.nest.flatten(found, expand_composites=True)
            self.equal_everywhere.update(leaf.op for leaf in leaves if not hasattr(leaf, "numpy"))
            return found

        return tf.nest.map_structure(one, values)

    def _noted(self, values: list[Any], name: str) -> Any:
        self.taken.append(values)
        self.names.append(name)
        return self.common(values)
