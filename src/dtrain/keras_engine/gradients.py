"""All-reduces the gradients of a train step as soon as the tape gives them.

`tape.gradient` of a model's variables weights the gradients by the replica's share and all-reduces them. So
what a step does next (clip, log, apply) sees the gradients that one device would see. How an optimizer
applies them is not decided here, but in `optimizer.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from dtrain.keras_engine.context import ReplicaStep, current_step, underlying, variable_ids
from dtrain.keras_engine.input import as_tensor
from dtrain.keras_engine.row_gradients import Lookups, on_present, sum_gradients
from dtrain.keras_engine.split_variables import is_split, joined_gradient, parts_of
from dtrain.upstream import tensorflow_names
from dtrain.upstream.reach import replaces


@replaces(tensorflow_names.TAPE_GRADIENT)
def gradient(
    original: Callable[..., Any],
    self: Any,
    target: Any,
    sources: Any,
    output_gradients: Any = None,
    unconnected_gradients: Any = tf.UnconnectedGradients.NONE,
) -> Any:
    """The replacement of `tf.GradientTape.gradient`."""
    step = current_step()
    if step is None or not step.training or not _has_variables(sources):
        return _by_parts(original, self, target, sources, output_gradients, unconnected_gradients)
    point = step.next_point()
    weight = point.weight if point.known or not _sums_examples(target) else tf.ones_like(step.share)
    seeds = _seeds(weight, target, output_gradients)
    found = original(self, target, sources, seeds, unconnected_gradients)
    flat, each = tf.nest.flatten(found), tf.nest.flatten(sources)
    # Gradients of inputs belong to this replica's examples; gradients of variables belong to all examples.
    mine = [i for i, source in enumerate(each) if _is_variable(source)]
    variables = [each[i] for i in mine]
    whole = step.whole_gradients([flat[i] for i in mine], variables, target)
    for i, gradient in zip(mine, whole, strict=True):
        flat[i] = gradient
    step.reduced |= variable_ids(variables)
    return tf.nest.pack_sequence_as(found, flat) if tf.nest.is_nested(found) else flat[0]


class AtOnce(ReplicaStep):
    """A step whose gradients are all-reduced as soon as its tape gives them."""

    def whole_gradients(self, gradients: list[Any], variables: list[Any], target: Any) -> list[Any]:
        """The all-reduced gradients."""
        self.waits.meet(target)
        return sum_gradients(zero_if_empty(self, gradients), variables)

    def gradients_to_apply(self, optimizer: Any, gradients: list[Any], variables: list[Any]) -> list[Any]:
        """The all-reduced gradients: those of `tape.gradient` already are, the others are reduced here."""
        missing = [
            i
            for i, (gradient, variable) in enumerate(zip(gradients, variables, strict=True))
            if gradient is not None and not variable_ids([variable]) <= self.reduced
        ]
        by_share = zero_if_empty(self, [_scale(gradients[i], self.share) for i in missing])
        whole = dict(zip(missing, sum_gradients(by_share, [variables[i] for i in missing]), strict=True))
        return [whole.get(i, gradient) for i, gradient in enumerate(gradients)]

    def gradients_of_program(
        self, gradients: list[Any], variables: list[Any], lookups: list[Lookups]
    ) -> list[Any]:
        """As `whole_gradients`, for gradients that an XLA program has computed.

        Args:
            gradients: the gradients, without None.
            variables: the variable of each gradient.
            lookups: one for each gradient. They are found inside the program, because only its graph shows
                what the gradients are computed from.
        """
        return sum_gradients(gradients, variables, lookups)


def _by_parts(original: Callable[..., Any], tape: Any, target: Any, sources: Any, *rest: Any) -> Any:
    """The original `gradient`, for sources that may be split variables: a tape knows only their parts."""
    flat = tf.nest.flatten(sources)
    if not any(is_split(source) for source in flat):
        return original(tape, target, sources, *rest)
    parts = [parts_of(source) if is_split(source) else [source] for source in flat]
    found = iter(original(tape, target, [part for each in parts for part in each], *rest))
    gradients = [[next(found) for _ in each] for each in parts]
    joined = [
        joined_gradient(each, source) if is_split(source) else each[0]
        for source, each in zip(flat, gradients, strict=True)
    ]
    return tf.nest.pack_sequence_as(sources, joined) if tf.nest.is_nested(sources) else joined[0]


def zero_if_empty(step: ReplicaStep, gradients: list[Any]) -> list[Any]:
    """The gradients; zeros if the replica has no examples, because those computed from none may be NaN."""
    if step.never_empty():
        return gradients

    def kept(present: list[Any]) -> list[Any]:
        values = [g.values if isinstance(g, tf.IndexedSlices) else g for g in present]
        values = tf.cond(step.size > 0, lambda: values, lambda: [tf.zeros_like(g) for g in values])
        return [
            tf.IndexedSlices(value, g.indices, g.dense_shape) if isinstance(g, tf.IndexedSlices) else value
            for value, g in zip(values, present, strict=True)
        ]

    return on_present(kept, gradients)


def _sums_examples(target: Any) -> bool:
    """Whether the target is a loss that was not reduced to a scalar, which the tape sums over examples."""
    return any(as_tensor(t).shape.rank != 0 for t in tf.nest.flatten(target))


def _scale(gradient: Any, share: Any) -> Any:
    if gradient is None:
        return None
    if isinstance(gradient, tf.IndexedSlices):
        values = gradient.values * tf.cast(share, gradient.values.dtype)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return gradient * tf.cast(share, gradient.dtype)


def _seeds(weight: Any, target: Any, output_gradients: Any) -> Any:
    """The gradients that backpropagation starts from, times this replica's weight.

    So the sum of the results over the replicas is the gradient of the whole batch.
    """

    def one(value: Any, given: Any = None) -> Any:
        seed = tf.ones_like(as_tensor(value)) if given is None else as_tensor(given)
        return seed * tf.cast(weight, seed.dtype)

    if output_gradients is None:
        return tf.nest.map_structure(one, target)
    return tf.nest.map_structure(one, target, output_gradients)


def _is_variable(source: Any) -> bool:
    return isinstance(underlying(source), tf.Variable)


def _has_variables(sources: Any) -> bool:
    return any(map(_is_variable, tf.nest.flatten(sources)))
