"""Predicts by one program: the `predict_step` of one device, traced once and partitioned."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from dtrain.keras_engine.eager_program import joined_parts, on_first_copies
from dtrain.keras_engine.partitioned_steps import DividedFunction
from dtrain.keras_engine.predict_function import PredictFunction
from dtrain.keras_engine.rows import any_rows, batch_rows, batch_spec, map_leaves, without_optionals
from dtrain.keras_engine.steps import unwrapped
from dtrain.upstream import tensorflow as upstream_tf


class PartitionedPredict(PredictFunction):
    """Predicts for a list of batches, in the order of the examples.

    The batch's size is fixed while all batches have the same, as in Keras.
    """

    _spec: Any = None  # of the whole batch
    _function: Callable[..., Any] | None = None

    def _check(self, parts: tuple[Any, ...]) -> None:
        """Nothing is checked: what a replica computes does not depend on where the batch is cut."""

    def _predicted(self, parts: tuple[Any, ...]) -> Any:
        own = [without_optionals(part) for part in parts]
        if self._model.run_eagerly:
            with on_first_copies(self._model.distribute_strategy):
                return self._model.predict_step(joined_parts(own))
        spec = _of_whole(own) if self._layout.workers == 1 else map_leaves(any_rows, batch_spec(own[0]))
        if self._function is None or not self._accepts(spec):
            self._spec = spec if self._function is None else map_leaves(any_rows, spec)
            step = unwrapped(self._model.predict_step)
            divided = DividedFunction(step, self._spec, self._model.distribute_strategy, self._layout)
            self._function = upstream_tf.made_for_each_model(divided, reduce_retracing=True)
        return self._function(own)

    def _accepts(self, spec: Any) -> bool:
        return str(spec) == str(self._spec) or str(map_leaves(any_rows, spec)) == str(self._spec)


def _of_whole(parts: list[Any]) -> Any:
    """The spec of the batch whose parts these are."""
    total = sum(int(batch_rows(part)) for part in parts)

    def one(leaf: Any) -> Any:
        if isinstance(leaf, tf.TensorSpec) and leaf.shape.rank:
            return tf.TensorSpec([total, *leaf.shape[1:]], leaf.dtype)
        return any_rows(leaf)

    return map_leaves(one, batch_spec(parts[0]))
