"""Builds what Keras' loops need before the first step: the variables, and the functions that they call.

A model, its metrics and its optimizer are built in the strategy's scope, from the spec of the data only:
reading a batch would consume it. The functions that `fit`, `evaluate` and `predict` call are chosen here by
the model's strategy; they are in `step_function.py`, `predict_function.py`, `block_functions.py` and
Keras.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from dtrain.base.log import logger
from dtrain.engine.batches.batch_rows import (
    batch_spec,
    blank,
    is_dense,
    map_leaves,
    present_leaves,
    without_optional_specs,
    without_optionals,
)
from dtrain.engine.execution.local_steps import LocalProgram
from dtrain.engine.execution.partitioned_predict import PartitionedPredict
from dtrain.engine.execution.predict_function import OneReplicaPredict
from dtrain.engine.execution.step_function import StepFunction
from dtrain.engine.loops.loop import loop_of
from dtrain.engine.loops.noted_function import NotedFunction
from dtrain.engine.step.eager_program import EagerProgram
from dtrain.engine.step.own_steps import OwnSteps
from dtrain.engine.step.partitioned_steps import PartitionedProgram, traced_as_one_device
from dtrain.engine.step.steps import step_is_stock
from dtrain.interfaces.managed_strategy import is_managed, layout_of, managed
from dtrain.interfaces.replica_layout import ReplicaLayout
from dtrain.interfaces.scope_checks import check_left_out, check_model
from dtrain.process_group.running_operations import operation
from dtrain.task import channel
from dtrain.upstream import keras_models, keras_names, keras_variables, layer_calls, tf_replicas, tf_tracing


def symbolic_build(
    original: Callable[..., Any], self: Any, iterator: Any = None, data_batch: Any = None
) -> Any:
    """The model's `_maybe_symbolic_build`."""
    strategy = self.distribute_strategy
    if not is_managed(strategy):
        return original(self, iterator, data_batch)
    if iterator is not None:
        build(self, _global_spec(iterator.element_spec))
    else:  # a call for one batch, in which a spec of the batch would cost as much as a small step
        if layer_calls.is_built(self):
            build(self, None)
            return None
        with operation(layout_of(strategy), "a call on one batch"):
            build(self, batch_spec(data_batch))
    return None


def build(model: Any, spec: Any) -> None:
    """Creates all variables that training on data of this spec needs: the model's and the optimizer's.

    Args:
        model: a compiled model.
        spec: a nest of `tf.TypeSpec`s, with the batch dimension; None if all variables are there already.
    """
    if keras_models.strategy_of(model) is not None:
        check_model(model)
    layout = layout_of(model.distribute_strategy)
    if spec is not None and layout is not None and (layout.replicas > 1 or not _is_made(model)):
        _build_as_one_device(model, spec)
        return
    with model.distribute_strategy.scope():
        # Created outside of a replica: random layers without a seed look this generator up inside one.
        keras_variables.seed_generator_global()
        if spec is None:
            return
        own = not step_is_stock(model, "train_step")
        try:
            with layer_calls.built_or_untouched(model) if own else contextlib.nullcontext():
                _build_from(model, spec)
        except Exception as error:
            _build_otherwise(model, spec, error)
        if model.optimizer is not None and not model.optimizer.built and model.built:
            model.optimizer.build(model.trainable_variables)


def _is_made(model: Any) -> bool:
    """Whether all layers of a model have their variables."""
    return all(layer.built for layer in keras_models.layers_of(model))


def _build_as_one_device(model: Any, spec: Any) -> None:
    """As `build`, for a step that is traced as one device's program.

    A step that makes layers or an optimizer's state is traced, as one device traces it, and the function is
    discarded: so all is there that a checkpoint is restored into, and nothing else is made. An error is left
    to the step itself. What runs eagerly is built by its first step.
    """
    strategy, optimizer = model.distribute_strategy, model.optimizer
    made = _is_made(model)
    stock = step_is_stock(model, "train_step")
    with strategy.scope():
        keras_variables.seed_generator_global()
        if made and stock and optimizer is not None and not optimizer.built:
            optimizer.build(model.trainable_variables)
    if model.run_eagerly:
        return
    whole = made and (stock or optimizer is None or optimizer.built)
    try:
        if not whole:
            name = "test_step" if loop_of(model).kind == "evaluate" else "train_step"
            traced_as_one_device(getattr(model, name), without_optional_specs(spec), strategy)
        if made or not stock:  # what a step of the user's own does not use, such as compiled metrics
            with (
                strategy.scope(),
                contextlib.nullcontext() if stock else layer_calls.built_or_untouched(model),
            ):
                _build_from(model, spec)
    except Exception:
        logger.debug("%s is built by its first step", type(model).__name__, exc_info=True)


def _build_from(model: Any, spec: Any) -> None:
    """Builds a model, its metrics and its losses on placeholders of the data's spec."""
    if all(map(is_dense, present_leaves(spec))):
        keras_models.symbolic_build(model, map_leaves(_symbolic, spec))
    else:
        _trace(model, spec)


def _trace(model: Any, spec: Any) -> None:
    """As `_build_from`, for ragged and sparse data.

    Keras' own symbolic build treats these as dense data of the same shape, so the step is traced instead.
    """

    def whole_step(batch: Any) -> None:
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(without_optionals(batch))
        y_pred = model(x, training=False) if keras_models.takes_training(model) else model(x)
        if not model.compiled or y is None:
            return
        model.compute_metrics(x, y, y_pred, sample_weight=sample_weight)
        keras_models.compute_loss(model, x, y, y_pred, sample_weight)

    # Keras initializes variables that are created in such a scope when it ends, outside of the function.
    with keras.StatelessScope():
        tf_tracing.made_for_each_model(whole_step).get_concrete_function(spec)


def _build_otherwise(model: Any, spec: Any, error: Exception) -> None:
    """Builds a model that cannot be built from the spec: calls it on blank data, then builds the metrics.

    A model with a custom `train_step` is left alone, because that step builds it.

    Args:
        model: the model.
        spec: of one replica's batch.
        error: the error of building from the spec; it is raised if all layers are built already.
    """
    if not step_is_stock(model, "train_step"):
        logger.debug("%s builds itself in its own step: %s", type(model).__name__, error)
        return
    if _is_made(model):
        raise error
    x, _, _ = keras.utils.unpack_x_y_sample_weight(map_leaves(blank, spec))
    model(x)
    try:
        _build_from(model, spec)
    except Exception:
        logger.debug("metrics are built in the first step", exc_info=True)


def _global_spec(spec: Any) -> Any:
    """The spec of one replica's batch, from a dataset's spec: the first local replica's if they differ."""
    return map_leaves(lambda leaf: tf_replicas.replica_spec(leaf, 0), spec)


def _symbolic(spec: Any) -> Any:
    if spec is None or isinstance(spec, tf.OptionalSpec):
        return None
    return keras.KerasTensor(spec.shape, spec.dtype.name)


def make_train_function(original: Callable[..., Any], self: Any, force: bool = False) -> Any:
    """The replacement of `make_train_function`: it checks the model, also if the function is made already.

    Raises:
        ScopeError: as `check_left_out`.
    """
    check_left_out(self)
    return original(self, force)


def make_function(original: Callable[..., Any], self: Any, step_function: Any) -> Any:
    """The function of `make_train_function` or `make_test_function`."""
    training = step_function == self.train_step
    layout = layout_of(self.distribute_strategy)
    if layout is not None:
        return StepFunction(self, layout, _program(self, layout, training=training), training=training)
    if (asynchronous := managed(self.distribute_strategy).asynchronous) is not None:
        return asynchronous.step_function(self, training=training)
    return _noted(original(self, step_function), self, train=training)


def make_predict_function(original: Callable[..., Any], self: Any, force: bool = False) -> Any:
    """The model's `make_predict_function`."""
    if self.predict_function is not None and not force:
        return self.predict_function
    layout = layout_of(self.distribute_strategy)
    if (asynchronous := managed(self.distribute_strategy).asynchronous) is not None:
        self.predict_function = asynchronous.predict_function(self)
    elif layout is not None and layout.replicas > 1:
        self.predict_function = _noted(PartitionedPredict(self, layout), self, train=False)
    else:
        result = original(self, force)
        made = self.predict_function
        if layout is not None:
            stock = type(self).make_predict_function is keras_names.MAKE_PREDICT_FUNCTION.original()
            made = OneReplicaPredict(self, made, stock=stock)
        self.predict_function = _noted(made, self, train=False)
        return result
    # Keras' own does nothing now; a user's, which may call it by `super()`, may set another function.
    original(self)
    return self.predict_function


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
    if training and layout.average_every:
        return OwnSteps(model, layout, training=True)
    return (EagerProgram if model.run_eagerly else PartitionedProgram)(model, layout, training=training)
