"""One step on the only replica: Keras' own, with nothing between its parts.

It has the face of `steps.StepProgram`, so that the same functions run it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from dtrain.keras_engine.groups import Part
from dtrain.keras_engine.steps import Program, first_replica, silent_results, step_is_stock, without_optionals
from dtrain.keras_engine.xla_rule import runs_in_xla
from dtrain.keras_engine.xla_steps import XlaSteps
from dtrain.log import logger


class LocalProgram(Program):
    """A model's train or test step, on one device.

    Args:
        model: a compiled Keras model under a strategy of dtrain's with one replica.
        training: the train step, or the test step.

    Attributes:
        stock: whether the step is Keras' own, so that `results` tells what a call returns.
    """

    def __init__(self, model: Any, *, training: bool) -> None:
        self._model = model
        self._name = "train_step" if training else "test_step"
        self.stock = step_is_stock(model, self._name)
        self.compiled = bool(model.jit_compile) and not model.run_eagerly
        self._step: Any = self._whole_step
        self._in_xla: bool | None = None
        self._restored = False
        self._xla = XlaSteps(self._whole_step)
        if self.compiled:
            self._step = tf.function(self._whole_step, jit_compile=True, reduce_retracing=True)

    def in_xla(self, steps: int | None, batch: int | None) -> bool:
        """Whether the runs of steps of a `fit` are made in XLA: as was restored, or as `xla_rule` says.

        Args:
            steps: how many are planned.
            batch: examples in one.
        """
        if not self._restored and self._name == "train_step":
            self._in_xla = runs_in_xla(self._model, steps, batch)
            logger.debug('jit_compile="auto": steps run %s XLA.', "in" if self._in_xla else "without")
        self._restored = False  # the next fit is another
        return bool(self._in_xla)

    def forget_restored(self) -> None:
        """The `fit` that findings were restored for is over."""
        self._restored = False

    @property
    def findings(self) -> dict[str, Any] | None:
        """What was decided, as plain data: who goes on later must compute in the same way. None before."""
        return None if self._in_xla is None else {"xla": self._in_xla}

    @findings.setter
    def findings(self, found: dict[str, Any]) -> None:
        self._in_xla = found.get("xla")
        self._restored = self._in_xla is not None

    @property
    def traced(self) -> int:
        """The programs of XLA."""
        return self._xla.traced

    def run_group(self, part: Part) -> None:
        """Makes the steps of a part in one XLA program."""
        self._xla.run(part)

    def run(self, parts: Sequence[Any], total: Any, phase: str | None = None) -> tuple[Any, Any]:
        """One step on one batch: what Keras' step returns, or {} where `results` will tell; and None."""
        del total, phase
        return self._step(without_optionals(parts[0])), None

    def results(self) -> Any:
        """The metrics over all steps since they were reset."""
        strategy = self._model.distribute_strategy
        return first_replica(strategy, strategy.run(self._model.get_metrics_result))

    def _whole_step(self, data: Any) -> Any:
        model = self._model
        strategy, step = model.distribute_strategy, getattr(model, self._name)
        if not self.stock:
            return first_replica(strategy, strategy.run(step, args=(data,)))
        with silent_results(model):
            return first_replica(strategy, strategy.run(step, args=(data,)))
