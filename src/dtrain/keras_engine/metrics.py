"""Makes Keras' metrics count the global batch, while each replica updates them with its own part.

The variables of a metric are summed over the replicas, and its result is computed from the sums. A value that
exists once per step (a scalar) is first combined over the replicas. A user's own metrics are treated in
`own_metrics.py`, not here.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from dtrain.keras_engine import own_metrics
from dtrain.keras_engine.context import all_reduce_sum, current_step, gather_examples
from dtrain.keras_engine.protocol import current_layout, in_replica, layout_of
from dtrain.keras_engine.replica_calls import holds_parts
from dtrain.keras_engine.rows import as_tensor, map_leaves
from dtrain.upstream import functions, keras_names
from dtrain.upstream import keras as upstream_keras
from dtrain.upstream.reach import on_objects, replaces, set_methods

_RESET = "_dtrain_reset"  # an attribute of a model: ids of its metrics' variables, and what resets these


@replaces(keras_names.METRIC_VALUES)
def values_of_update(
    original: Callable[..., Any], values: Any, sample_weight: Any, reduce_fn: Any, dtype: Any
) -> Any:
    """The replacement of the function that `Mean.update_state` and `Sum.update_state` call first.

    A scalar is combined over the replicas, so that it counts once and not for each replica.
    """
    step = current_step()
    summed = reduce_fn is keras.ops.sum  # by `Sum`; `Mean` gives `ops.mean`
    if step is None or step.sees_everything or (summed and sample_weight is not None):
        return original(values, sample_weight, reduce_fn, dtype)
    found = as_tensor(values)
    if found.shape.rank == 0:
        found = tf.cast(found, dtype)
        if sample_weight is not None:
            values = step.part_of_value(found)
        else:
            values = step.whole_value(found)
            values = values / step.layout.replicas if summed else values
    return original(values, sample_weight, reduce_fn, dtype)


@replaces(keras_names.METRIC_INIT)
def metric_init(original: Callable[..., Any], self: Any, /, *args: Any, **kwargs: Any) -> None:
    """The replacement of `Metric.__init__`."""
    original(self, *args, **kwargs)
    watch(self)


@replaces(keras_names.ADD_METRIC_VARIABLE)
def add_variable(original: Callable[..., Any], self: Any, /, *args: Any, **kwargs: Any) -> Any:
    """The replacement of `Metric.add_variable`, which a subclass' own, with other arguments, may call.

    A user's own metric starts with equal values on all replicas, until it is known whether it is additive.
    """
    if current_layout() is None:
        return original(self, *args, **kwargs)
    aggregation = tf.VariableAggregation.ONLY_FIRST_REPLICA if is_own(self) else None
    return upstream_keras.made_in_parts(lambda: original(self, *args, **kwargs), aggregation)


def watch(metric: Any) -> None:
    """Wraps the `update_state` of a metric's class if it is not Keras' own, else that of the metric."""
    set_methods(metric)
    for kind in type(metric).__mro__:
        own = vars(kind).get("update_state")
        if own is None or upstream_keras.is_keras_own(kind) or hasattr(own, "_dtrain_original"):
            continue
        replacement: Any = functools.wraps(own)(own_metrics.make_update(own))
        replacement._dtrain_original = own
        # AutoGraph is to leave this function as it is, but not what it calls.
        functions.mark_converted(replacement)
        setattr(kind, "update_state", replacement)  # noqa: B010


def is_own(metric: Any) -> bool:
    """Whether a metric's update is computed by a user's own code."""
    kind = next((each for each in type(metric).__mro__ if "update_state" in vars(each)), type(metric))
    if not upstream_keras.is_keras_own(kind):
        return True
    function = upstream_keras.metric_function(metric)
    return function is not None and not upstream_keras.is_keras_own(function)


@on_objects(keras_names.WRAPPER_UPDATE)
def wrapper_update(
    original: Callable[..., Any], self: Any, y_true: Any, y_pred: Any, sample_weight: Any = None
) -> Any:
    """The `update_state` of a `MeanMetricWrapper`.

    A function that returns a scalar is given the examples of all replicas.
    """
    prepared = own_metrics.inside_update() or upstream_keras.in_stateless_scope()
    if in_replica() and not prepared and is_own(self):
        return own_metrics.update(original, self, (y_true, y_pred), {"sample_weight": sample_weight})
    step = current_step()
    if prepared or step is None:
        return original(self, y_true, y_pred, sample_weight)
    value = as_tensor(upstream_keras.metric_value(self, y_true, y_pred))
    if value.shape.rank != 0:
        return original(self, y_true, y_pred, sample_weight)
    with step.seeing_everything():
        return original(self, *map_leaves(gather_examples, (y_true, y_pred, sample_weight)))


@on_objects(keras_names.RESET_METRICS)
def reset(original: Callable[..., Any], self: Any) -> Any:
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
        reset = tf.function(
            lambda: strategy.run(lambda: [metric.reset_state() for metric in metrics]), autograph=False
        )
        vars(self)[_RESET] = variables, reset
    with strategy.scope():
        reset()
    return None


def follow_from_variables(model: Any) -> bool:
    """Whether all metrics' results depend on their variables only, so that `results` gives them any time."""
    return all(_is_keras_own(metric, "result") for metric in model.metrics)


def _is_keras_own(metric: Any, name: str) -> bool:
    """Whether a metric, and the metrics inside it, have Keras' own method; that uses variables only."""
    own = upstream_keras.is_keras_own(getattr(type(metric), name)) and name not in vars(metric)
    return own and all(_is_keras_own(inner, name) for inner in getattr(metric, "metrics", None) or [])


def whole_state(variables: list[Any]) -> list[Any]:
    """The value of each metric variable over all replicas; must be called in a replica.

    Args:
        variables: Keras variables; those that are summed on reading are all-reduced, the others are read.
    """
    values = [tf.convert_to_tensor(v.value) for v in variables]
    summed = [i for i, v in enumerate(variables) if holds_parts(v)]
    for i, total in zip(summed, all_reduce_sum([values[i] for i in summed]), strict=True):
        values[i] = total
    return values


def results(model: Any) -> dict[str, Any]:
    """The model's metric results over all replicas, the same on each; must be called in a replica."""
    variables = model.metrics_variables
    with keras.StatelessScope(state_mapping=list(zip(variables, whole_state(variables), strict=True))):
        return dict(model.get_metrics_result())


@contextlib.contextmanager
def whole_results(model: Any) -> Iterator[None]:
    """Within it, `metric.result()` gives the value over all replicas; for tracing a user's own step."""
    wrapped = []
    for metric in _all_metrics(model):
        object.__setattr__(metric, "result", _whole_result(metric, metric.result))
        wrapped.append(metric)
    try:
        yield
    finally:
        for metric in wrapped:
            object.__delattr__(metric, "result")


def _whole_result(metric: Any, result: Callable[[], Any]) -> Callable[[], Any]:
    def whole() -> Any:
        variables = list(metric.variables)
        with keras.StatelessScope(state_mapping=list(zip(variables, whole_state(variables), strict=True))):
            found = result()
        step = current_step()
        if step is not None:
            step.mark_whole(found)
        return found

    return whole


def _all_metrics(model: Any) -> list[Any]:
    return list({id(m): m for m in model.metrics if "result" not in vars(m)}.values())
