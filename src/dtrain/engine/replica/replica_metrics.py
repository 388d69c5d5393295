"""Makes Keras' metrics those of the global batch in a loop of the user's own.

Each replica updates a metric with its own part. The metric's variables are summed over the replicas, and its
result is computed from the sums. A user's own metrics are treated in `own_metrics.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from dtrain.engine.replica import own_metrics
from dtrain.engine.replica.context import in_replica
from dtrain.engine.replica.thread_state import thread_state
from dtrain.engine.variables import host_writes
from dtrain.interfaces.managed_strategy import current_layout, layout_of
from dtrain.upstream import (
    graph_functions,
    keras_models,
    keras_variables,
    tf_tracing,
)
from dtrain.upstream.reach import set_methods

_RESET = "_dtrain_reset"  # an attribute of a model: ids of its metrics' variables, and what resets these


def metric_init(original: Callable[..., Any], self: Any, /, *args: Any, **kwargs: Any) -> None:
    """The replacement of `Metric.__init__`."""
    original(self, *args, **kwargs)
    watch_metric(self)


def add_variable(original: Callable[..., Any], self: Any, /, *args: Any, **kwargs: Any) -> Any:
    """The replacement of `Metric.add_variable`, which a subclass' own, with other arguments, may call.

    A user's own metric starts with equal values on all replicas, until it is known whether it is additive.
    """
    layout = current_layout()
    if layout is None:
        return original(self, *args, **kwargs)
    aggregation = tf.VariableAggregation.ONLY_FIRST_REPLICA if is_own_metric(self) else None
    return keras_variables.made_in_parts(lambda: original(self, *args, **kwargs), aggregation)


def watch_metric(metric: Any) -> None:
    """Wraps the `update_state` of a metric's class if it is not Keras' own, else that of the metric."""
    set_methods(metric)
    for kind in type(metric).__mro__:
        own = vars(kind).get("update_state")
        if own is None or keras_models.is_keras_own(kind) or hasattr(own, "_dtrain_original"):
            continue
        replacement: Any = functools.wraps(own)(own_metrics.make_update(own))
        replacement._dtrain_original = own
        # AutoGraph is to leave this function as it is, but not what it calls.
        graph_functions.mark_converted(replacement)
        setattr(kind, "update_state", replacement)  # noqa: B010


def is_own_metric(metric: Any) -> bool:
    """Whether a metric's update is computed by a user's own code."""
    kind = next((base for base in type(metric).__mro__ if "update_state" in vars(base)), type(metric))
    if not keras_models.is_keras_own(kind):
        return True
    function = keras_models.metric_function(metric)
    return function is not None and not keras_models.is_keras_own(function)


def wrapper_update(
    original: Callable[..., Any], self: Any, y_true: Any, y_pred: Any, sample_weight: Any = None
) -> Any:
    """The `update_state` of a `MeanMetricWrapper`, whose function may be a user's own."""
    prepared = thread_state.inside_metric or keras_variables.in_stateless_scope()
    if in_replica() and not prepared and is_own_metric(self):
        return own_metrics.update(original, self, (y_true, y_pred), {"sample_weight": sample_weight})
    return original(self, y_true, y_pred, sample_weight)


def reset_metrics(original: Callable[..., Any], self: Any) -> Any:
    """The model's `reset_metrics`, which resets Keras' own metrics by one call.

    Keras makes a call for each variable and each replica.
    """
    strategy = self.distribute_strategy
    layout = layout_of(strategy)
    if layout is None or layout.replicas == 1 or self.run_eagerly or not tf.executing_eagerly():
        return original(self)
    metrics = self.metrics
    inside = tf.distribute.has_strategy() and not tf.distribute.in_cross_replica_context()
    if inside or not all(_is_keras_own(metric, "reset_state") for metric in metrics):
        return original(self)
    variables = [id(variable) for metric in metrics for variable in metric.variables]
    known, reset = vars(self).get(_RESET, (None, None))
    if known != variables:
        reset = tf_tracing.made_for_each_model(
            lambda: strategy.run(lambda: [metric.reset_state() for metric in metrics])
        )
        vars(self)[_RESET] = variables, reset
    with strategy.scope():
        reset()
    if layout.workers > 1:
        host_writes.note("the metrics", 0)
    return None


def follow_from_variables(model: Any) -> bool:
    """Whether all metrics' results depend on their variables only, and can be computed at any time."""
    return all(_is_keras_own(metric, "result") for metric in model.metrics)


def _is_keras_own(metric: Any, name: str) -> bool:
    """Whether a metric, and the metrics inside it, have Keras' own method; that uses variables only."""
    own = keras_models.is_keras_own(getattr(type(metric), name)) and name not in vars(metric)
    return own and all(_is_keras_own(inner, name) for inner in getattr(metric, "metrics", None) or [])
