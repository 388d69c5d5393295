"""Predicts by one program: the `predict_step` of one device, traced once and partitioned."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dtrain.engine.batches.batch_rows import without_optionals
from dtrain.engine.execution.predict_function import joined_outputs
from dtrain.engine.execution.single_batches import SingleBatches
from dtrain.engine.loops.loop import loop_of
from dtrain.engine.step.eager_program import EagerReplicas
from dtrain.engine.step.partitioned_steps import DividedFunction
from dtrain.engine.step.step_plan import warn_of_much
from dtrain.engine.step.steps import unwrapped
from dtrain.interfaces.replica_layout import ReplicaLayout
from dtrain.process_group.running_operations import operation
from dtrain.upstream import tf_tracing


class PartitionedPredict:
    """Predicts for a list of batches; every worker gets all outputs, in the order of the examples.

    The batch's size is fixed while all batches have the same, as in Keras.

    Args:
        model: the model.
        layout: how the replicas of its strategy are distributed.
    """

    def __init__(self, model: Any, layout: ReplicaLayout) -> None:
        self._model = model
        self._layout = layout
        self._batches = SingleBatches(model, layout)
        self._functions: dict[str, Callable[..., Any]] = {}  # by the spec of the whole batch
        self._replicas = EagerReplicas(model.distribute_strategy, layout)

    def __call__(self, batches: list[Any]) -> Any:
        """The concatenated outputs of all batches, each of shape (examples, ...)."""
        with operation(None if loop_of(self._model).kind == "predict" else self._layout, "predict_on_batch"):
            return joined_outputs([self._predicted(batch) for batch in batches])

    def _predicted(self, batch: Any) -> Any:
        split, spec = self._batches.split(batch)
        own = [without_optionals(part) for part in split.parts]
        if self._model.run_eagerly:
            whole = self._replicas.whole(own, split.sizes)
            with self._replicas.as_one_device():
                return self._model.predict_step(whole)
        if str(spec) not in self._functions:
            step = unwrapped(self._model.predict_step)
            divided = DividedFunction(step, spec, self._model.distribute_strategy, self._layout)
            if self._layout.first_replica == 0:
                warn_of_much(divided.plan, self._batches.count(split.parts, split.sizes))
            self._functions[str(spec)] = tf_tracing.made_for_each_model(divided, reduce_retracing=True)
        return self._functions[str(spec)](own, split.sizes)
