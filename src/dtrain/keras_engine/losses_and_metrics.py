"""Makes Keras' losses and metrics those of the global batch, whichever part of it a replica has.

Under `fit` a replica's loss is the loss that its examples would have as a whole batch, corrected where the
divisor is not the number of examples (masks, weights). In a custom loop it is the replica's part of a sum.
The weighting by shares is not done here, but in `gradients.py` and `context.py`.

Each replica updates a metric with its own part. The metric's variables are summed over the replicas, and its
result is computed from the sums. A scalar is first combined over the replicas. A user's own metrics are
treated in `own_metrics.py`, and own losses are tried in `loss_trial.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from dtrain.errors import CompilationError, DataError
from dtrain.keras_engine import host_writes, own_metrics
from dtrain.keras_engine.context import ReplicaStep, all_reduce_sum, current_step, reporting_replicas
from dtrain.keras_engine.protocol import current_layout, in_replica, layout_of
from dtrain.keras_engine.replica_calls import holds_parts
from dtrain.keras_engine.rows import as_tensor
from dtrain.upstream import functions, keras_names, layer_calls
from dtrain.upstream import keras as upstream_keras
from dtrain.upstream import tensorflow as upstream_tf
from dtrain.upstream.reach import on_objects, replaces, set_methods

_RESET = "_dtrain_reset"  # an attribute of a model: ids of its metrics' variables, and what resets these
_MEANS = ("sum_over_batch_size", "mean", "mean_with_sample_weight")


def _undivided() -> bool:
    """Whether losses are not divided by the number of replicas, although Keras would in any strategy's scope.

    In a step the replicas are weighted by shares. A loss that a program computes in a scope, but not in a
    replica, is that of the whole batch and not a part of a sum.
    """
    return current_step() is not None or (current_layout() is not None and not in_replica())


def _without_division(original: Callable[..., Any]) -> Callable[..., Any]:
    """Keras' own function, which divides by a number of replicas of 1."""

    def undivided(*args: Any) -> Any:
        with reporting_replicas(1):
            return original(*args)

    return undivided


@replaces(keras_names.UNSCALE_LOSS)
def unscale(original: Callable[..., Any], value: Any) -> Any:
    """The replacement of the function by which Keras multiplies a loss by the number of replicas."""
    return value if _undivided() else original(value)


@on_objects(keras_names.ADDITIONAL_LOSS)
def additional_loss(original: Callable[..., Any], self: Any, loss: Any) -> Any:
    """The model's aggregation of a loss that a layer adds."""
    found = (_without_division(original) if _undivided() else original)(self, loss)
    step = current_step()
    return found if step is None else step.additional_loss(found)


@replaces(keras_names.REDUCE_WEIGHTED)
def reduce_weighted(
    original: Callable[..., Any],
    values: Any,
    sample_weight: Any = None,
    mask: Any = None,
    reduction: str | None = "sum_over_batch_size",
    dtype: Any = None,
) -> Any:
    """The replacement of Keras' reduction of per-example losses to one value."""
    step = current_step()
    original = _without_division(original) if _undivided() else original
    whole = not in_replica() if step is None else step.sees_everything
    if whole:
        return original(values, sample_weight, mask, reduction, dtype)
    values = as_tensor(values)
    if step is None:
        return _part_of_sum(original, values, sample_weight, mask, reduction, dtype)
    if values.shape.rank == 0 and sample_weight is None and mask is None:
        return values
    unweighted = reduction != "mean_with_sample_weight" or sample_weight is None
    if reduction in _MEANS and mask is None and unweighted:
        # Keras returns the losses unreduced where it is known while tracing that there are none.
        return tf.reduce_sum(original(values, sample_weight, None, "sum_over_batch_size", dtype))
    if reduction in (None, "none"):
        if isinstance(values, tf.RaggedTensor):
            raise DataError(
                "A loss gives ragged values and has reduction=None, which several replicas cannot combine.",
                hint="let the loss give one value an example, or set reduction='sum'",
            )
        return original(values, sample_weight, mask, reduction, dtype)
    total = _total(original, values, sample_weight, mask, dtype)
    if reduction == "sum":
        return step.per_share(total)
    divisor = _divisor(values, sample_weight, mask, reduction)
    return step.per_share(tf.math.divide_no_nan(total, tf.cast(divisor, total.dtype)))


@replaces(keras_names.LOSS_CALL)
def loss_call(
    original: Callable[..., Any], self: Any, y_true: Any, y_pred: Any, sample_weight: Any = None
) -> Any:
    """The replacement of `Loss.__call__`: a loss of coupled examples sees those of all replicas.

    So does a loss whose `call` returns one value instead of one per example.
    """
    step = current_step()
    if step is None or step.sees_everything:
        return original(self, y_true, y_pred, sample_weight)
    if overrides_call(self) or not (couples_examples(self) or _gives_scalar(self, y_true, y_pred)):
        return original(self, y_true, y_pred, sample_weight)
    return _of_all_examples(step, lambda *all_: original(self, *all_), (y_true, y_pred, sample_weight))


def watch_own_call(loss: Any) -> None:
    """Replaces the `__call__` of a loss's class, if a user's class overrides Keras' own.

    A loss that couples examples, or is called with weights or masks, then gets the examples of all replicas.
    Python looks up `__call__` in the class, so it is replaced there; outside of a step it works as before.
    """
    for kind in type(loss).__mro__:
        own = vars(kind).get("__call__")
        if kind is keras.losses.Loss:
            return
        if own is not None and not hasattr(own, "_dtrain_original"):
            replacement = tf.autograph.experimental.do_not_convert(functools.wraps(own)(_make_own_call(own)))
            replacement._dtrain_original = own
            setattr(kind, "__call__", replacement)  # noqa: B010


def _make_own_call(original: Callable[..., Any]) -> Callable[..., Any]:
    """Makes the replacement of the `__call__` with which a user's loss overrides Keras' own."""

    def __call__(self: Any, y_true: Any, y_pred: Any, *weights: Any, **named: Any) -> Any:  # noqa: N807
        step = current_step()
        if step is None or step.sees_everything:
            return original(self, y_true, y_pred, *weights, **named)
        given = [*weights, *named.values()]
        # A loss that divides by the weights, or by what is not masked, is not a mean over the examples.
        weighted = any(each is not None for each in given) or any(
            layer_calls.mask_of(leaf) is not None for leaf in keras.tree.flatten(y_pred)
        )
        if not (couples_examples(self) or weighted):
            return original(self, y_true, y_pred, *weights, **named)
        count = len(weights)

        def of_all(y_true: Any, y_pred: Any, *given: Any) -> Any:
            by_name = dict(zip(named, given[count:], strict=True))
            return original(self, y_true, y_pred, *given[:count], **by_name)

        return _of_all_examples(step, of_all, (y_true, y_pred, *given))

    return __call__


def _of_all_examples(step: ReplicaStep, function: Callable[..., Any], arguments: Any) -> Any:
    """Computes a loss from the examples of all replicas.

    Each replica computes the whole loss, but gradients flow to its own rows only. A loss that is not reduced
    to a scalar is summed by the tape, and needs no correction.
    """
    whole = tf.convert_to_tensor(step.of_all_examples(function, arguments))
    return whole if whole.shape.rank != 0 else step.loss_of_all(whole)


def overrides_call(loss: Any) -> bool:
    """Whether the class of a loss overrides `Loss.__call__`."""
    return _unwrapped_call(type(loss)) is not _unwrapped_call(keras.losses.Loss)


def _unwrapped_call(kind: Any) -> Any:
    return getattr(kind.__call__, "_dtrain_original", kind.__call__)


def couples_examples(loss: Any) -> bool:
    """Whether an example's loss depends on the other examples of the batch, as in metric learning."""
    step = current_step()
    return isinstance(loss, keras.losses.Circle) or (
        step is not None and id(loss) in step.trial_results.coupled_losses
    )


def is_own_loss(loss: Any) -> bool:
    """Whether a user's own code computes a loss."""
    function = getattr(loss, "fn", None)
    return not all(upstream_keras.is_keras_own(each) for each in (loss, function) if each is not None)


def converted(loss: Any, nest: Any) -> Any:
    """A nest of labels or predictions as tensors of the loss's own dtype."""
    return keras.tree.map_structure(lambda x: keras.ops.convert_to_tensor(x, dtype=loss.dtype), nest)


def _gives_scalar(loss: Any, y_true: Any, y_pred: Any) -> bool:
    """Whether `loss.call` returns a single value instead of one per example, or needs more examples."""
    try:
        return as_tensor(loss.call(converted(loss, y_true), converted(loss, y_pred))).shape.rank == 0
    except Exception:  # a mistake is raised again where the loss sees all examples
        return True


def _part_of_sum(
    original: Callable[..., Any],
    values: Any,
    sample_weight: Any,
    mask: Any,
    reduction: str | None,
    dtype: Any,
) -> Any:
    """This replica's part of a loss in a custom loop: the parts' sum is the loss of the global batch.

    Keras' own value is returned for a reduction that is no mean, and where replicas cannot communicate.
    """
    if reduction not in _MEANS or values.shape.rank == 0 or not upstream_tf.merge_possible():
        return original(values, sample_weight, mask, reduction, dtype)
    total = _total(original, values, sample_weight, mask, dtype)
    try:
        divisor = _divisor(values, sample_weight, mask, reduction)
    except CompilationError:
        return original(values, sample_weight, mask, reduction, dtype)
    return tf.math.divide_no_nan(total, tf.cast(divisor, total.dtype))


def _total(original: Callable[..., Any], values: Any, sample_weight: Any, mask: Any, dtype: Any) -> Any:
    """This replica's weighted sum of losses."""
    return tf.reduce_sum(original(values, sample_weight, mask, "sum", dtype))


def _divisor(values: Any, sample_weight: Any, mask: Any, reduction: str | None) -> Any:
    """The number by which Keras would divide the sum of the losses of the global batch."""
    count = tf.cast(tf.size(values), tf.float32)
    if reduction == "mean_with_sample_weight" and (sample_weight is not None or mask is not None):
        if sample_weight is not None:
            sample_weight = tf.convert_to_tensor(sample_weight)
        if mask is not None:
            mask = tf.convert_to_tensor(mask)
        weights = keras_names.APPLY_MASK.resolve()(
            sample_weight, mask, dtype=keras.backend.floatx(), reduction=reduction
        )
        return all_reduce_sum(tf.reduce_sum(tf.cast(weights, tf.float32)))
    if mask is None:
        return all_reduce_sum(count)
    mask = tf.convert_to_tensor(mask)
    valid = tf.reduce_sum(tf.cast(mask, tf.float32))
    everywhere = tf.cast(tf.size(mask), tf.float32)
    count, valid, everywhere = tf.unstack(all_reduce_sum(tf.stack([count, valid, everywhere])))
    return tf.math.divide_no_nan(count * valid, everywhere)


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
    watch_metric(self)


@replaces(keras_names.ADD_METRIC_VARIABLE)
def add_variable(original: Callable[..., Any], self: Any, /, *args: Any, **kwargs: Any) -> Any:
    """The replacement of `Metric.add_variable`, which a subclass' own, with other arguments, may call.

    A user's own metric starts with equal values on all replicas, until it is known whether it is additive.
    """
    layout = current_layout()
    if layout is None:
        return original(self, *args, **kwargs)
    aggregation = tf.VariableAggregation.ONLY_FIRST_REPLICA if is_own_metric(self) else None
    return upstream_keras.made_in_parts(lambda: original(self, *args, **kwargs), aggregation)


def watch_metric(metric: Any) -> None:
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


def is_own_metric(metric: Any) -> bool:
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
    if in_replica() and not prepared and is_own_metric(self):
        return own_metrics.update(original, self, (y_true, y_pred), {"sample_weight": sample_weight})
    step = current_step()
    if prepared or step is None:
        return original(self, y_true, y_pred, sample_weight)
    value = as_tensor(upstream_keras.metric_value(self, y_true, y_pred))
    if value.shape.rank != 0:
        return original(self, y_true, y_pred, sample_weight)
    return step.of_all_examples(lambda *whole: original(self, *whole), (y_true, y_pred, sample_weight))


@on_objects(keras_names.RESET_METRICS)
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
        reset = upstream_tf.made_for_each_model(
            lambda: strategy.run(lambda: [metric.reset_state() for metric in metrics])
        )
        vars(self)[_RESET] = variables, reset
    with strategy.scope():
        reset()
    if layout.workers > 1:
        host_writes.note("the metrics", 0)
    return None


def follow_from_variables(model: Any) -> bool:
    """Whether all metrics' results depend on their variables only, so `metric_results` works at any time."""
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


def metric_results(model: Any) -> dict[str, Any]:
    """The model's metric results over all replicas, the same on each; must be called in a replica."""
    variables = model.metrics_variables
    with keras.StatelessScope(state_mapping=list(zip(variables, whole_state(variables), strict=True))):
        return dict(model.get_metrics_result())
