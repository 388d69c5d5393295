"""Chooses the function that `fit`, `evaluate` and `predict` call under a model's strategy.

The functions themselves are not here: they are in `step_function.py`, `predict_function.py`,
`asynchronous/functions.py` and Keras.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dtrain import channel
from dtrain.keras_engine.asynchronous.functions import AsynchronousFunction, AsynchronousPredict
from dtrain.keras_engine.input import Split
from dtrain.keras_engine.local_steps import LocalProgram
from dtrain.keras_engine.noted_function import NotedFunction
from dtrain.keras_engine.predict_function import PredictFunction
from dtrain.keras_engine.protocol import ReplicaLayout, is_asynchronous, layout_of, waiting_clock
from dtrain.keras_engine.scope import check_left_out
from dtrain.keras_engine.step_function import StepFunction
from dtrain.keras_engine.steps import StepProgram, step_is_stock
from dtrain.log import logger
from dtrain.upstream import keras_names
from dtrain.upstream.reach import on_objects, replaces


@replaces(keras_names.MAKE_TRAIN_FUNCTION)
def make_train_function(original: Callable[..., Any], self: Any, force: bool = False) -> Any:
    """The replacement of `make_train_function`: it checks the model, also if the function is made already.

    Raises:
        ScopeError: as `check_left_out`.
    """
    check_left_out(self)
    return original(self, force)


@on_objects(keras_names.MAKE_FUNCTION)
def make_function(original: Callable[..., Any], self: Any, step_function: Any) -> Any:
    """The function of `make_train_function` or `make_test_function`."""
    training = step_function == self.train_step
    layout = layout_of(self.distribute_strategy)
    if layout is not None:
        return StepFunction(self, layout, _program(self, layout, training=training), training=training)
    if is_asynchronous(self.distribute_strategy):
        return AsynchronousFunction(self, "train" if training else "test")
    return _noted(original(self, step_function), self, train=training)


@on_objects(keras_names.MAKE_PREDICT_FUNCTION, around_users=True)
def make_predict_function(original: Callable[..., Any], self: Any, force: bool = False) -> Any:
    """The model's `make_predict_function`."""
    if self.predict_function is not None and not force:
        return self.predict_function
    layout = layout_of(self.distribute_strategy)
    if is_asynchronous(self.distribute_strategy):
        self.predict_function = AsynchronousPredict(self)
    elif layout is not None and layout.replicas > 1:
        self.predict_function = _noted(PredictFunction(self, layout), self, train=False)
    else:
        result = original(self, force)
        made = self.predict_function if layout is None else _of_whole_batches(self.predict_function)
        self.predict_function = _noted(made, self, train=False)
        return result
    # Keras' own does nothing now; a user's, which may call it by `super()`, may set another function.
    original(self)
    return self.predict_function


def _of_whole_batches(function: Callable[..., Any]) -> Callable[..., Any]:
    """Keras' own predict function, for the batches of the only replica, which are `Split`s."""

    def predict(batches: list[Any]) -> Any:
        return function([batch.parts[0] if isinstance(batch, Split) else batch for batch in batches])

    return predict


def _noted(function: Any, model: Any, *, train: bool) -> Any:
    """A function that emits events, under a launcher that listens; else the function itself."""
    return NotedFunction(function, model, train=train) if channel.connected() else function


def trained_in_xla(model: Any) -> bool:
    """Whether a model trains in XLA: because of `jit_compile=True`, or by the rule of `xla_rule.py`."""
    if model.jit_compile:
        return True
    return bool((getattr(model.train_function, "findings", None) or {}).get("xla"))


def _program(model: Any, layout: ReplicaLayout, *, training: bool) -> Any:
    """The program that computes a model's train or test step."""
    if layout.replicas == 1:
        return LocalProgram(model, training=training)
    return StepProgram(
        model,
        layout,
        training=training,
        compiled=_can_compile(model, layout, "train_step" if training else "test_step"),
        # Some transports measure the waiting themselves; then the step does not.
        measured=training and layout.workers > 1 and waiting_clock(model.distribute_strategy) is None,
    )


def _can_compile(model: Any, layout: ReplicaLayout, name: str) -> bool:
    if not model.jit_compile or model.run_eagerly:
        return False
    if layout.central:
        logger.warning(
            "jit_compile=True was set, but a program that XLA compiles reads weights on its own device "
            "only, and under central storage they are on another. It runs without XLA."
        )
        return False
    if step_is_stock(model, name):
        return True
    logger.warning(
        "jit_compile=True was set, but the model overrides %s; under several replicas only Keras' own "
        "step is compiled by XLA, since the reduction stands in the middle of it. It runs without XLA.",
        name,
    )
    return False
