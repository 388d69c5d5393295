"""All-reduces the gradients of a train step.

`tape.gradient` of a model's variables weights the gradients by the replica's share and all-reduces them. So
what a step does next (clip, log, apply) sees the gradients that one device would see. Each class of steps
here is one way to treat gradients, chosen before the step is traced. How an optimizer applies them is not
decided here, but in `optimizer.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from dtrain.errors import ConfigurationError, StepError
from dtrain.keras_engine.context import (
    ReplicaStep,
    ThreadValue,
    all_reduce_sum,
    current_step,
    local_update,
    variable_ids,
)
from dtrain.keras_engine.gradient_marks import gradient_marks
from dtrain.keras_engine.protocol import ReplicaLayout, current_layout
from dtrain.keras_engine.row_gradients import Lookups
from dtrain.keras_engine.rows import as_tensor
from dtrain.keras_engine.split_variables import is_split, joined_gradient, parts_of
from dtrain.upstream import keras as upstream_keras
from dtrain.upstream import tensorflow_names
from dtrain.upstream.reach import replaces
from dtrain.upstream.tensorflow import underlying


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
    step, marks = current_step(), gradient_marks()
    if marks is not None and _has_variables(sources):
        found = original(self, target, sources, output_gradients, unconnected_gradients)
        return _of_variables(found, sources, marks.mark)
    if step is None or not step.training or not _has_variables(sources):
        return _by_parts(original, self, target, sources, output_gradients, unconnected_gradients)
    point = step.next_point()
    weight = point.weight if point.known or not _sums_examples(target) else tf.ones_like(step.share)
    seeds = _seeds(weight, target, output_gradients)
    found = original(self, target, sources, seeds, unconnected_gradients)

    # Gradients of inputs belong to this replica's examples; gradients of variables belong to all examples.
    def whole(gradients: list[Any], variables: list[Any]) -> list[Any]:
        reduced = step.whole_gradients(gradients, variables, target)
        step.reduced |= variable_ids(variables)
        return reduced

    return _of_variables(found, sources, whole)


def _of_variables(found: Any, sources: Any, change: Callable[[list[Any], list[Any]], list[Any]]) -> Any:
    """The gradients that a tape has given, of which those of variables are changed, all together."""
    flat, each = tf.nest.flatten(found), tf.nest.flatten(sources)
    mine = [i for i, source in enumerate(each) if _is_variable(source)]
    for i, gradient in zip(mine, change([flat[i] for i in mine], [each[i] for i in mine]), strict=True):
        flat[i] = gradient
    return tf.nest.pack_sequence_as(found, flat) if tf.nest.is_nested(found) else flat[0]


class AllReduceStep(ReplicaStep):
    """A step whose gradients are all-reduced as soon as its tape gives them."""

    def whole_gradients(self, gradients: list[Any], variables: list[Any], target: Any) -> list[Any]:
        """The all-reduced gradients."""
        self.waits.arrived(target)
        return sum_gradients(zero_if_empty(self, gradients), variables)

    def gradients_to_apply(self, optimizer: Any, gradients: list[Any], variables: list[Any]) -> list[Any]:
        """The all-reduced gradients: those of `tape.gradient` already are, the others are reduced here."""
        missing = [
            i
            for i, (gradient, variable) in enumerate(zip(gradients, variables, strict=True))
            if gradient is not None and not variable_ids([variable]) <= self.reduced
        ]
        by_share = zero_if_empty(self, [scaled(gradients[i], self.share) for i in missing])
        whole = dict(zip(missing, sum_gradients(by_share, [variables[i] for i in missing]), strict=True))
        return [whole.get(i, gradient) for i, gradient in enumerate(gradients)]

    def gradients_of_program(
        self, gradients: list[Any], variables: list[Any], lookups: list[Lookups | None]
    ) -> list[Any]:
        """As `whole_gradients`, for gradients that an XLA program has computed.

        Args:
            gradients: the gradients, without None.
            variables: the variable of each gradient.
            lookups: `lookups_of` each gradient. They are found inside the program, because only its graph
                shows what the gradients are computed from.
        """
        return sum_gradients(gradients, variables, lookups)


class LocalStep(AllReduceStep):
    """A step of local SGD: `sum_gradients` leaves gradients local, and the optimizer's state is averaged.

    Args:
        layout: how the replicas are spread.
        optimizer: the only optimizer whose state is averaged, the model's.
        known: the other arguments of `ReplicaStep`.
    """

    def __init__(self, layout: ReplicaLayout, *, optimizer: Any, **known: Any) -> None:
        super().__init__(layout, **known)
        self._optimizer = optimizer

    def gradients_to_apply(self, optimizer: Any, gradients: list[Any], variables: list[Any]) -> list[Any]:
        """As `AllReduceStep`.

        Raises:
            ConfigurationError: as `check_averaged`.
        """
        check_averaged(optimizer, self._optimizer)
        return super().gradients_to_apply(optimizer, gradients, variables)


averaged_optimizer: ThreadValue[Any] = ThreadValue(None)
"""The only optimizer that a step of local SGD may apply, since only its state is averaged; None elsewhere."""


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


class SparseGradients(Exception):  # noqa: N818
    """A gradient is sparse: all-reducing its rows is cheaper than accumulating the whole table."""


class MicroBatchStep(ReplicaStep):
    """A step on one micro-batch, whose gradients each replica accumulates by itself until the update.

    Args:
        layout: how the replicas are spread.
        last: whether it is the last micro-batch of an update.
        known: the other arguments of `ReplicaStep`.
    """

    def __init__(self, layout: ReplicaLayout, *, last: bool, **known: Any) -> None:
        super().__init__(layout, **known)
        self.updates_weights = last

    def whole_gradients(self, gradients: list[Any], variables: list[Any], target: Any) -> list[Any]:
        """This replica's own gradients, weighted but not all-reduced; zeros if it has no examples.

        Raises:
            SparseGradients: a gradient is a `tf.IndexedSlices`.
        """
        _check_dense(gradients)
        self.waits.arrived(target)
        return zero_if_empty(self, gradients)

    def gradients_of_program(self, gradients: list[Any], variables: list[Any], lookups: Any) -> list[Any]:
        """As `whole_gradients`, for gradients that an XLA program has computed."""
        _check_dense(gradients)
        return gradients

    def gradients_to_apply(self, optimizer: Any, gradients: list[Any], variables: list[Any]) -> list[Any]:
        """The gradients that the optimizer is given.

        Before the last micro-batch they are this replica's own, and the optimizer accumulates them. At the
        last one they are all-reduced sums over all micro-batches, so the accumulators are set to zero.
        """
        if not self.updates_weights:
            return gradients
        accumulators = upstream_keras.accumulators_of(optimizer)
        mine = [accumulators[upstream_keras.number_of_variable(optimizer, each)] for each in variables]
        sums = [None if g is None else g + own.value for g, own in zip(gradients, mine, strict=True)]
        totals = sum_gradients(sums, variables)
        with local_update():
            for own, gradient in zip(mine, gradients, strict=True):
                if gradient is not None:
                    own.assign(tf.zeros(own.shape, own.dtype))
        return totals


class CompiledStep(ReplicaStep):
    """A step inside a program that XLA compiles; its local gradients are all-reduced and applied outside.

    Attributes:
        captured: the optimizers, each with the gradients and variables of its `apply`.
    """

    def __init__(self, layout: ReplicaLayout, **known: Any) -> None:
        super().__init__(layout, **known)
        self.captured: list[tuple[Any, list[Any], list[Any]]] = []

    def whole_gradients(self, gradients: list[Any], variables: list[Any], target: Any) -> list[Any]:
        """This replica's own gradients, weighted by its share, not all-reduced."""
        return zero_if_empty(self, gradients)

    def gradients_to_apply(self, optimizer: Any, gradients: list[Any], variables: list[Any]) -> None:
        """Captures the gradients; nothing is applied inside the XLA program."""
        self.captured.append((optimizer, gradients, variables))


def sum_gradients(
    gradients: Sequence[Any], variables: Sequence[Any], lookups: Sequence[Lookups | None] | None = None
) -> list[Any]:
    """The sums of gradients over all replicas, or what the strategy's gradient hook makes of them.

    Must be called in a replica. If the hook averages weights (local SGD), nothing is all-reduced: the result
    is this replica's own gradient times the number of replicas, an estimate of the global batch's gradient.

    Args:
        gradients: tensors, `tf.IndexedSlices` or None; None stays None.
        variables: the variable of each gradient.
        lookups: `lookups_of` each gradient, if none is None; None finds them by the graph.

    Raises:
        ConfigurationError: the hook averages weights, and this is a loop of the user's own.
    """
    layout = current_layout()
    if layout is not None and layout.average_every:
        if current_step() is None:
            raise ConfigurationError(
                "Local SGD averages the weights in fit, and this optimizer is called in another loop.",
                hint="train with fit, or leave out gradient_hook",
            )
        return [scaled(each, float(layout.replicas)) for each in gradients]
    present = [i for i, gradient in enumerate(gradients) if gradient is not None]
    if not present:
        return list(gradients)
    found = [lookups_of(gradients[i]) for i in present] if lookups is None else lookups
    parts = [
        [gradients[i]] if each is None else each.split(gradients[i])
        for i, each in zip(present, found, strict=True)
    ]
    owners = [variables[i] for i, split in zip(present, parts, strict=True) for _ in split]
    reduced = iter(_reduced([part for split in parts for part in split], owners))
    whole = list(gradients)
    for i, each, split in zip(present, found, parts, strict=True):
        sums = [next(reduced) for _ in split]
        whole[i] = sums[0] if each is None else each.joined(sums, gradients[i])
    return whole


def lookups_of(gradient: Any) -> Lookups | None:
    """The lookups that a sparse gradient comes from; None for a dense one."""
    return Lookups.of(gradient) if isinstance(gradient, tf.IndexedSlices) else None


def _reduced(gradients: list[Any], variables: list[Any]) -> list[Any]:
    """The reduced gradients: the dense ones by the strategy's hook, if it has one; the others all-reduced.

    Raises:
        StepError: the hook does not return one tensor for each gradient.
    """
    layout = current_layout()
    hook = None if layout is None else layout.gradient_hook
    dense = [i for i, each in enumerate(gradients) if not isinstance(each, tf.IndexedSlices)]
    if hook is None or not dense:
        return list(all_reduce_sum(gradients))
    found = hook.reduce([gradients[i] for i in dense], [variables[i] for i in dense], all_reduce_sum)
    if len(found) != len(dense):
        raise StepError(
            f"The gradient hook {type(hook).__name__} was given {len(dense)} gradients, and its reduce "
            f"returned {len(found)}.",
            hint="return one tensor for each gradient, in their order",
        )
    whole = dict(zip(dense, found, strict=True))
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


def _check_dense(gradients: Sequence[Any]) -> None:
    """Raises `SparseGradients` if one of the gradients is a `tf.IndexedSlices`."""
    if any(isinstance(gradient, tf.IndexedSlices) for gradient in gradients):
        raise SparseGradients
