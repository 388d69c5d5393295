"""Makes Keras' losses means over the global batch, whichever part of it a replica has.

Under `fit` a replica's loss is the loss that its examples would have as a whole batch, corrected where the
divisor is not the number of examples (masks, weights). In a custom loop it is the replica's part of a sum.
The weighting by shares is not done here, but in `gradients.py` and `context.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from dtrain.errors import CompilationError, DataError
from dtrain.keras_engine.context import (
    ReplicaStep,
    all_reduce_sum,
    current_step,
    gather_examples,
    reporting_replicas,
)
from dtrain.keras_engine.protocol import current_layout, in_replica
from dtrain.keras_engine.rows import as_tensor, map_leaves
from dtrain.keras_engine.trial import TrialStep
from dtrain.upstream import keras as upstream_keras
from dtrain.upstream import keras_names
from dtrain.upstream import tensorflow as upstream_tf
from dtrain.upstream.reach import on_objects, replaces

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
                "A loss gives ragged values and its reduction is None, which several replicas cannot "
                "combine.",
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
            upstream_keras.mask_of(leaf) is not None for leaf in keras.tree.flatten(y_pred)
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
    to a scalar is summed by the tape, and needs no correction. A trial that has each example twice uses it
    once here: the loss of all replicas is one value, which does not grow with a replica's part.
    """
    if isinstance(step, TrialStep):
        once = tf.cast(tf.round(step.per_share(tf.cast(step.size, tf.float32))), tf.int32)
        arguments = map_leaves(lambda leaf: _first(leaf, once), arguments)
    with step.seeing_everything():
        whole = tf.convert_to_tensor(function(*map_leaves(gathered, arguments)))
    return _with_gradient_per_share(step, whole) if whole.shape.rank == 0 else whole


def _first(leaf: Any, rows: Any) -> Any:
    if not isinstance(leaf, tf.Tensor) or leaf.shape.rank == 0:
        return leaf
    found = leaf[:rows]
    if (mask := upstream_keras.mask_of(leaf)) is not None:
        upstream_keras.set_mask(found, mask[:rows])
    return found


def gathered(leaf: Any) -> Any:
    """The rows of a tensor on all replicas, concatenated, and its Keras mask likewise."""
    found = gather_examples(leaf)
    mask = None if leaf is None else upstream_keras.mask_of(leaf)
    if mask is not None and found is not leaf:
        upstream_keras.set_mask(found, tf.cast(gather_examples(tf.cast(mask, tf.int32)), tf.bool))
    return found


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
    return not upstream_keras.is_keras_own(loss) or _wraps_own_function(loss)


def find_coupling(loss: Any, y_true: Any, y_pred: Any) -> bool:
    """Whether a loss couples examples; found out by computing it without some of them.

    Args:
        loss: a `keras.losses.Loss`.
        y_true: the labels of some examples, a nest of eager tensors.
        y_pred: the model's predictions for these examples.
    """
    if overrides_call(loss):
        return not _is_mean(loss, y_true, y_pred)
    y_true, y_pred = _converted(loss, y_true), _converted(loss, y_pred)
    every = as_tensor(loss.call(y_true, y_pred))
    if every.shape.rank == 0 or every.shape[0] is None or every.shape[0] < 2:
        return False
    half = every.shape[0] // 2
    some = as_tensor(loss.call(*map_leaves(lambda leaf: leaf[:half], (y_true, y_pred))))
    if some.shape[1:] != every.shape[1:]:
        return True
    some, same = (_dense(values) for values in (some, every[:half]))
    return not bool(tf.reduce_all(tf.abs(some - same) <= 1e-4 * (tf.abs(some) + 1e-3)))


def _dense(values: Any) -> Any:
    return values.flat_values if isinstance(values, tf.RaggedTensor) else values


def _is_mean(loss: Any, y_true: Any, y_pred: Any) -> bool:
    """Whether the loss of some examples is the mean of the losses of their two halves."""
    half = keras.tree.flatten(y_pred)[0].shape[0] // 2
    parts = [slice(0, 2 * half), slice(0, half), slice(half, 2 * half)]
    values = [
        tf.convert_to_tensor(loss(*map_leaves(lambda leaf, rows=rows: leaf[rows], (y_true, y_pred))))
        for rows in parts
    ]
    if values[0].shape.rank != 0:
        return False
    whole, mean = values[0], (values[1] + values[2]) / 2
    return half > 0 and bool(tf.abs(whole - mean) <= 1e-4 * (tf.abs(whole) + 1e-3))


def _wraps_own_function(loss: Any) -> bool:
    function = getattr(loss, "fn", None)
    return function is not None and not upstream_keras.is_keras_own(function)


def _converted(loss: Any, nest: Any) -> Any:
    return keras.tree.map_structure(lambda x: keras.ops.convert_to_tensor(x, dtype=loss.dtype), nest)


def _gives_scalar(loss: Any, y_true: Any, y_pred: Any) -> bool:
    """Whether `loss.call` returns a single value instead of one per example."""
    found = loss.call(_converted(loss, y_true), _converted(loss, y_pred))
    return bool(as_tensor(found).shape.rank == 0)


def _with_gradient_per_share(step: ReplicaStep, value: Any) -> Any:
    """The same value, with its gradient divided by the share."""
    fixed = tf.stop_gradient(value)
    return fixed + step.per_share(value - fixed)


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
