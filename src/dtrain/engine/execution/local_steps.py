"""Runs one step on the only replica: Keras' own step, with nothing between its parts and no all-reduce.

It implements `steps.Program`, so that the same functions run it. It does not choose what XLA compiles;
`xla_rule.py` does.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from dtrain.base.log import logger
from dtrain.engine.batches.batch_rows import without_optionals
from dtrain.engine.execution.xla_steps import XlaSteps, replica_device
from dtrain.engine.feed.groups import Part
from dtrain.engine.replica.context import reporting_one_replica
from dtrain.engine.step.steps import Program, first_replica, run_step, step_is_stock
from dtrain.engine.step.xla_rule import runs_in_xla
from dtrain.upstream import tf_tracing


class LocalProgram(Program):
    """A model's train or test step, on one device.

    Args:
        model: a compiled Keras model under a strategy of dtrain's with one replica.
        training: the train step; else the test step.

    Attributes:
        stock: whether the step is Keras' own, so that a call returns what `results` computes.
    """

    def __init__(self, model: Any, *, training: bool) -> None:
        self._model = model
        self._name = "train_step" if training else "test_step"
        self.stock = step_is_stock(model, self._name)
        self.compiled = bool(model.jit_compile) and not model.run_eagerly
        self._step: Any = self._whole_step
        self._in_xla: bool | None = None
        self._restored = False
        self._xla = XlaSteps(self._whole_step, model)
        if self.compiled:
            self._compiled_step = tf_tracing.made_for_each_model(
                self._whole_step, jit_compile=True, reduce_retracing=True
            )
            self._step = self._on_its_device

    def in_xla(self, steps: int | None, batch: int | None) -> bool:
        """Whether the planned steps run in XLA: as a checkpoint has restored, or as `xla_rule` decides.

        Args:
            steps: how many steps are planned; None if not known.
            batch: examples in a batch; None if not known.
        """
        if not self._restored:
            self._in_xla = runs_in_xla(self._model, self._name, steps, batch)
            ran = "in" if self._in_xla else "without"
            logger.debug('jit_compile="auto": %ss run %s XLA.', self._name, ran)
        self._restored = False  # a restored decision holds for one fit
        return bool(self._in_xla)

    def forget_restored(self) -> None:
        """Called when the `fit` for which findings were restored has ended: the next one decides anew."""
        self._restored = False

    @property
    def findings(self) -> dict[str, Any] | None:
        """What was decided, as plain data; None before.

        A resumed training needs it, because it must compute in the same way.
        """
        return None if self._in_xla is None else {"xla": self._in_xla}

    @findings.setter
    def findings(self, found: dict[str, Any]) -> None:
        self._in_xla = found.get("xla")
        self._restored = self._in_xla is not None

    @property
    def traced(self) -> int:
        """How many XLA programs were traced."""
        return self._xla.traced

    def run_group(self, part: Part) -> None:
        """Runs the steps of a part in one XLA program."""
        self._xla.run(part)

    def run(self, parts: Sequence[Any], sizes: Any, phase: str | None = None) -> tuple[Any, Any]:
        """Runs one step on one batch.

        Returns:
            What the step returns, or {} where `results` computes it; and None, as there is no waiting.
        """
        del sizes, phase
        return self._step(without_optionals(parts[0])), None

    def results(self) -> Any:
        """The results of the metrics over all steps since they were reset."""
        strategy = self._model.distribute_strategy
        return first_replica(strategy, strategy.run(self._model.get_metrics_result))

    def _on_its_device(self, data: Any) -> Any:
        with tf.device(replica_device(self._model.distribute_strategy)):
            return self._compiled_step(data)

    def _whole_step(self, data: Any) -> Any:
        strategy, step = self._model.distribute_strategy, getattr(self._model, self._name)
        if self.stock:
            step = functools.partial(run_step, self._model, self._name, stock=True)

        def alone(data: Any) -> Any:
            with reporting_one_replica():  # a member of a quorum has others, and steps without them
                return step(data)

        return first_replica(strategy, strategy.run(alone, args=(data,)))
