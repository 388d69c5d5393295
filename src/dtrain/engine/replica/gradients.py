"""Sums gradients over replicas in a loop of the user's own, and marks those of a step that is partitioned.

How an optimizer applies them is not decided here, but in `optimizer.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from dtrain.engine.replica.context import all_reduce_sum
from dtrain.engine.replica.row_gradients import Lookups
from dtrain.engine.replica.thread_state import thread_state
from dtrain.engine.variables.split_variables import is_split, joined_gradient, parts_of
from dtrain.errors import ConfigurationError, StepError
from dtrain.interfaces.gradient_hook import GradientHook
from dtrain.interfaces.managed_strategy import current_layout, layout_of
from dtrain.upstream.tf_variables import underlying


def gradient(
    original: Callable[..., Any],
    self: Any,
    target: Any,
    sources: Any,
    output_gradients: Any = None,
    unconnected_gradients: Any = tf.UnconnectedGradients.NONE,
) -> Any:
    """The replacement of `tf.GradientTape.gradient`."""
    marks = thread_state.gradient_marks
    if marks is None or not _has_variables(sources):
        return _by_parts(original, self, target, sources, output_gradients, unconnected_gradients)
    gradients = original(self, target, sources, output_gradients, unconnected_gradients)
    return _of_variables(gradients, sources, marks.mark)


def _of_variables(found: Any, sources: Any, change: Callable[[list[Any], list[Any]], list[Any]]) -> Any:
    """The gradients that a tape has given, of which those of variables are changed, all together."""
    flat, flat_sources = tf.nest.flatten(found), tf.nest.flatten(sources)
    mine = [i for i, source in enumerate(flat_sources) if _is_variable(source)]
    for i, gradient in zip(
        mine, change([flat[i] for i in mine], [flat_sources[i] for i in mine]), strict=True
    ):
        flat[i] = gradient
    return tf.nest.pack_sequence_as(found, flat) if tf.nest.is_nested(found) else flat[0]


def check_averaged(optimizer: Any, averaged: Any) -> None:
    """Checks that a step of local SGD applies only the optimizer whose state is averaged.

    Raises:
        ConfigurationError: it is another optimizer, whose state would stay different on each replica.
    """
    if optimizer is not averaged:
        raise ConfigurationError(
            f"Local SGD averages the state of the optimizer that the model was compiled with, and "
            f"train_step applies another one, {optimizer.name!r}.",
            hint="apply model.optimizer alone, or leave out gradient_hook",
        )


def prepare_hook(strategy: Any, variables: Sequence[Any]) -> list[tf.Variable]:
    """The state that a strategy's gradient hook keeps for weights, which is made at first.

    Must be called outside of replicas; a graph may be under construction.
    """
    layout = layout_of(strategy)
    hook = None if layout is None else layout.gradient_hook
    if hook is None or not hook.keeps_state:
        return []
    with tf.init_scope(), strategy.scope():
        return hook.state_of(variables)


def check_first_steps(hook: GradientHook | None) -> None:
    """Checks, where no `fit` runs, that no steps are to be made without the hook.

    Raises:
        ConfigurationError: there are.
    """
    if hook is not None and hook.start:
        raise ConfigurationError(
            f"{type(hook).__name__} has start={hook.start}, which counts the steps of fit, and another loop "
            "trains the model.",
            hint="train with fit, or leave out start",
        )


def check_scale(optimizer: Any, hook: GradientHook | None) -> None:
    """Checks that a hook that remembers gradients gets them without a loss scale, which may change.

    Raises:
        ConfigurationError: the optimizer scales the loss.
    """
    if hook is not None and hook.keeps_state and isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise ConfigurationError(
            f"gradient_hook={type(hook).__name__} adds what it has not sent to the next step's gradient, but "
            "the optimizer scales the loss, by another number in each step.",
            hint='use mixed_bfloat16 or float32, or gradient_hook="float16"',
        )


def sum_gradients(gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
    """The sums of gradients over all replicas, or what the strategy's gradient hook makes of them.

    Must be called in a replica.

    Args:
        gradients: tensors, `tf.IndexedSlices` or None; None stays None.
        variables: the variable of each gradient.

    Raises:
        ConfigurationError: the hook averages weights (local SGD), which it does in `fit` only.
    """
    layout = current_layout()
    if layout is not None and layout.average_every:
        raise ConfigurationError(
            "Local SGD and DiLoCo move the weights in fit, and this optimizer is called in another loop.",
            hint="train with fit, or leave out gradient_hook",
        )
    present = [i for i, gradient in enumerate(gradients) if gradient is not None]
    if not present:
        return list(gradients)
    all_lookups = [_lookups_of(gradients[i]) for i in present]
    parts = [
        [gradients[i]] if lookups is None else lookups.split(gradients[i])
        for i, lookups in zip(present, all_lookups, strict=True)
    ]
    owners = [variables[i] for i, split in zip(present, parts, strict=True) for _ in split]
    reduced = iter(_reduced([part for split in parts for part in split], owners))
    whole = list(gradients)
    for i, lookups, split in zip(present, all_lookups, parts, strict=True):
        sums = [next(reduced) for _ in split]
        whole[i] = sums[0] if lookups is None else lookups.joined(sums, gradients[i])
    return whole


def _lookups_of(gradient: Any) -> Lookups | None:
    """The lookups that a sparse gradient comes from; None for a dense one."""
    return Lookups.of(gradient) if isinstance(gradient, tf.IndexedSlices) else None


def _reduced(gradients: list[Any], variables: list[Any]) -> list[Any]:
    """The reduced gradients: the dense ones by the strategy's hook, if it has one; the others all-reduced.

    Raises:
        StepError: the hook does not return one tensor for each gradient.
    """
    layout = current_layout()
    hook = None if layout is None else layout.gradient_hook
    dense = [i for i, grad in enumerate(gradients) if not isinstance(grad, tf.IndexedSlices)]
    if hook is None or not dense:
        return list(all_reduce_sum(gradients))
    reduced = hook.reduce([gradients[i] for i in dense], [variables[i] for i in dense], all_reduce_sum)
    if len(reduced) != len(dense):
        raise StepError(
            f"The gradient hook {type(hook).__name__} was given {len(dense)} gradients, and its reduce "
            f"returned {len(reduced)}.",
            hint="return one tensor for each gradient, in their order",
        )
    whole = dict(zip(dense, reduced, strict=True))
    sparse = [i for i in range(len(gradients)) if i not in whole]
    whole.update(zip(sparse, all_reduce_sum([gradients[i] for i in sparse]), strict=True))
    return [whole[i] for i in range(len(gradients))]


def scaled(gradient: Any, factor: Any) -> Any:
    """A dense or sparse gradient times a factor; None stays None."""
    if gradient is None:
        return None
    if isinstance(gradient, tf.IndexedSlices):
        values = gradient.values * tf.cast(factor, gradient.values.dtype)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return gradient * tf.cast(factor, gradient.dtype)


def on_present(function: Callable[[list[Any]], Sequence[Any]], values: Sequence[Any]) -> list[Any]:
    """Calls a function with the values that are not None; returns its results, with None for the others."""
    present = [value for value in values if value is not None]
    made = iter(function(present) if present else ())
    return [None if value is None else next(made) for value in values]


def _by_parts(original: Callable[..., Any], tape: Any, target: Any, sources: Any, *rest: Any) -> Any:
    """The original `gradient`, for sources that may be split variables: a tape knows only their parts."""
    flat = tf.nest.flatten(sources)
    if not any(is_split(source) for source in flat):
        return original(tape, target, sources, *rest)
    parts = [parts_of(source) if is_split(source) else [source] for source in flat]
    part_gradients = iter(original(tape, target, [part for group in parts for part in group], *rest))
    gradients = [[next(part_gradients) for _ in group] for group in parts]
    joined = [
        joined_gradient(source_gradients, source) if is_split(source) else source_gradients[0]
        for source, source_gradients in zip(flat, gradients, strict=True)
    ]
    return tf.nest.pack_sequence_as(sources, joined) if tf.nest.is_nested(sources) else joined[0]


def _is_variable(source: Any) -> bool:
    return isinstance(underlying(source), tf.Variable)


def _has_variables(sources: Any) -> bool:
    return any(map(_is_variable, tf.nest.flatten(sources)))
