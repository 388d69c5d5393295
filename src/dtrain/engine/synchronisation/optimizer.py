"""Applies gradients by Keras' own optimizers after the all-reduce.

The gradients are all-reduced first; then Keras' own `apply` runs as on a single device. Clipping, loss
scaling, accumulation, EMA, weight decay and constraints come after the all-reduce, so no `cond` contains
communication. How an optimizer computes an update is not changed here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from dtrain.engine.replica.context import local_update
from dtrain.engine.replica.gradients import (
    check_averaged,
    check_first_steps,
    check_scale,
    on_present,
    prepare_hook,
    sum_gradients,
)
from dtrain.engine.replica.single_program import under_strategy
from dtrain.engine.replica.thread_state import thread_state
from dtrain.engine.sharding.divided_gradients import like_weights
from dtrain.engine.sharding.sharding_plan import broadcast_updates, plans
from dtrain.errors import StepError
from dtrain.interfaces.managed_strategy import is_managed, layout_of, managed
from dtrain.interfaces.scope_checks import check_optimizer_left_out, check_same_strategy
from dtrain.upstream import keras_optimizers, tf_replicas
from dtrain.upstream.reach import set_methods

_ACCUMULATOR = "gradient_accumulator"  # Keras' name of accumulated gradients, which are not sharded


def apply(
    original: Callable[..., Any],
    self: Any,
    grads: Sequence[Any],
    trainable_variables: Sequence[Any] | None = None,
) -> Any:
    """The replacement of an optimizer's `apply`.

    A `MultiOptimizer` that no model was compiled with is as Keras made it: each of its optimizers reduces.
    """
    own = keras_optimizers.strategy_of_optimizer(self)
    if is_managed(own):
        set_methods(self)
    variables = None if trainable_variables is None else list(trainable_variables)
    return _way_of(self, len(grads))(original, self, list(grads), variables)


Way = Callable[[Callable[..., Any], Any, list[Any], list[Any] | None], Any]


def _way_of(optimizer: Any, gradients: int) -> Way:
    """Chooses how `apply` handles this many gradients, from where the code runs."""
    block = thread_state.block
    if gradients == 0 or thread_state.updating_locally:
        return _as_keras
    if thread_state.single_program:
        return _in_single_program
    if block is not None:
        return block.apply
    strategy, own = tf.distribute.get_strategy(), keras_optimizers.strategy_of_optimizer(optimizer)
    if managed(own).asynchronous is not None:
        return _on_servers
    layout = layout_of(strategy)
    if own is not strategy and layout_of(own) is not None and not tf.distribute.has_strategy():
        return _in_own_scope
    if layout is None:
        check_optimizer_left_out(optimizer)
        return _as_keras
    if tf.distribute.in_cross_replica_context():
        return _across
    return _alone if layout.replicas == 1 else _in_replica


def _as_keras(original: Callable[..., Any], optimizer: Any, grads: list[Any], variables: Any) -> Any:
    return original(optimizer, grads, variables)


def _in_single_program(original: Callable[..., Any], optimizer: Any, grads: list[Any], variables: Any) -> Any:
    """In a step that is partitioned: Keras' own update, of variables that were made under the strategy."""
    own, averaged = keras_optimizers.strategy_of_optimizer(optimizer), thread_state.averaged_optimizer
    if averaged is not None:
        check_averaged(optimizer, averaged)
    layout = layout_of(own)
    if layout is not None and layout.replicas > 1:
        check_scale(optimizer, layout.gradient_hook)
    if variables is not None and not optimizer.built and layout is not None:
        with under_strategy(own):
            optimizer.build(variables)
    targets = keras_optimizers.trainable_variables_of(optimizer) if variables is None else variables
    marks = thread_state.gradient_marks
    if marks is not None:
        grads = marks.mark(grads, targets)
    return original(optimizer, like_weights(grads, targets), variables)


def _in_own_scope(original: Callable[..., Any], optimizer: Any, grads: list[Any], variables: Any) -> Any:
    """Outside of any scope, with gradients that the caller reduced: enters the optimizer's own strategy."""
    with keras_optimizers.strategy_of_optimizer(optimizer).scope():
        return _way_of(optimizer, len(grads))(original, optimizer, grads, variables)


def _alone(original: Callable[..., Any], optimizer: Any, grads: list[Any], variables: Any) -> Any:
    """With one replica: applies locally.

    Keras would call `merge_call` for one replica too, even inside a `cond`, where TensorFlow forbids it.

    Raises:
        StepError: this process has others, as a member of a quorum, and it is not a step of `fit`.
    """
    layout = layout_of(tf.distribute.get_strategy())
    if layout is not None and layout.members > 1 and not thread_state.reports_one_replica:
        raise StepError(
            "Gradients were applied outside of fit, in a job with a quorum: its workers meet in the rounds "
            "of fit, so each would train alone.",
            hint="train with fit, or leave out --quorum",
        )
    with local_update():
        return original(optimizer, grads, variables)


def tf_apply(original: Callable[..., Any], self: Any, grads: Any, trainable_variables: Any = None) -> Any:
    """The loss-scale optimizer's `merge_call` path; a local update needs none."""
    if thread_state.updating_locally:
        return keras_optimizers.common_apply(self, grads, trainable_variables)
    return original(self, grads, trainable_variables)


def reduced_already(original: Callable[..., Any], self: Any, grads_and_vars: Any) -> Any:
    """The replacement of an optimizer's own all-reduce: after clipping and accumulation, before the update.

    The gradients are reduced already. If the state is sharded, only the pairs whose weight this replica owns
    are returned. Code of the optimizer that runs earlier, such as Nadam's, still gets all pairs: it may write
    variables that all replicas hold.
    """
    if not (thread_state.updating_locally or thread_state.single_program):
        return original(self, grads_and_vars)
    plan = plans.get(self) if thread_state.updating_locally else None
    return list(grads_and_vars) if plan is None or not plan.owners else plan.own(self, grads_and_vars)


def _in_replica(
    original: Callable[..., Any], optimizer: Any, grads: list[Any], variables: list[Any] | None
) -> Any:
    """In a replica: applies the global batch's gradients to its own copy, or once to the central weights."""
    strategy, targets = _checked(optimizer, variables)
    _build(optimizer, strategy, targets)
    hook = strategy.dtrain_managed.layout.gradient_hook
    check_first_steps(hook)
    if hook is not None and hook.keeps_state and tf_replicas.merge_possible():
        check_scale(optimizer, hook)
        tf.distribute.get_replica_context().merge_call(
            lambda distribution: prepare_hook(distribution, targets)
        )
    sums = sum_gradients(grads, targets)
    if not strategy.dtrain_managed.layout.central:
        with local_update():
            original(optimizer, sums, variables)
        if plans:
            broadcast_updates(optimizer, _with_gradients(targets, sums))
        return None

    def once(distribution: Any, *merged: Any) -> None:
        with local_update():
            original(
                optimizer,
                on_present(lambda _: [distribution.experimental_local_results(g)[0] for g in merged], sums),
                variables,
            )

    return _merge_call(once, sums)


def _across(
    original: Callable[..., Any], optimizer: Any, grads: list[Any], variables: list[Any] | None
) -> Any:
    """In the cross-replica context: every replica applies the same gradients, which the caller reduced."""
    strategy, targets = _checked(optimizer, variables)
    _build_now(optimizer, strategy, targets)
    if strategy.dtrain_managed.layout.central:
        with local_update():
            return original(optimizer, grads, variables)

    def alike(*each: Any) -> None:
        with local_update():
            original(optimizer, on_present(lambda _: each, grads), variables)
        broadcast_updates(optimizer, _with_gradients(targets, grads))

    strategy.extended.call_for_each_replica(alike, args=tuple(g for g in grads if g is not None))
    return None


def _on_servers(
    original: Callable[..., Any], optimizer: Any, grads: list[Any], variables: list[Any] | None
) -> Any:
    """In a user's own loop on parameter servers: the servers apply one worker's whole update at a time."""
    strategy: Any = keras_optimizers.strategy_of_optimizer(optimizer)
    targets = keras_optimizers.trainable_variables_of(optimizer) if variables is None else variables
    inside = tf.distribute.get_strategy() is strategy
    if inside and tf.distribute.get_replica_context() is not None:
        _build(optimizer, strategy, targets)
    else:
        _build_now(optimizer, strategy, targets)

    def once(distribution: Any, *merged: Any) -> None:
        def apply() -> None:
            original(optimizer, on_present(lambda _: merged, grads), variables)

        strategy.dtrain_managed.asynchronous.update(optimizer, apply)

    if inside and not tf.distribute.in_cross_replica_context():
        return _merge_call(once, grads)
    with contextlib.nullcontext() if tf.distribute.in_cross_replica_context() else strategy.scope():
        return once(strategy, *(g for g in grads if g is not None))


def add_slot(
    original: Callable[..., Any],
    self: Any,
    reference_variable: Any,
    name: str | None = None,
    initializer: Any = "zeros",
) -> Any:
    """An optimizer's `add_variable_from_reference`; sharded state is made at its owner.

    A step that is partitioned may build its optimizer itself.
    """

    def make() -> Any:
        return original(self, reference_variable, name=name, initializer=initializer)

    plan, own = plans.get(self), keras_optimizers.strategy_of_optimizer(self)
    outside = thread_state.single_program and layout_of(own) is not None
    with under_strategy(own) if outside else contextlib.nullcontext():
        if plan is None or name == _ACCUMULATOR:
            return make()
        return plan.make_slot(make, self, reference_variable)


def _checked(optimizer: Any, variables: list[Any] | None) -> tuple[Any, list[Any]]:
    """The current strategy, and the variables to update.

    Raises:
        ScopeError: the optimizer or a variable belongs to another strategy.
    """
    strategy = tf.distribute.get_strategy()
    check_same_strategy(optimizer, strategy, variables)
    targets = keras_optimizers.trainable_variables_of(optimizer) if variables is None else variables
    return strategy, targets


def _with_gradients(variables: list[Any], grads: list[Any]) -> list[Any]:
    return [v for v, g in zip(variables, grads, strict=True) if g is not None]


def _merge_call(function: Callable[..., None], grads: list[Any]) -> None:
    """Calls a function once for all replicas, with the gradients that are not None."""
    present = tuple(g for g in grads if g is not None)
    tf.distribute.get_replica_context().merge_call(function, args=present)


def _build(optimizer: Any, strategy: Any, variables: list[Any]) -> None:
    """Makes the optimizer's variables once, in the strategy's scope, even while a step is being traced."""
    if optimizer.built:
        return
    if not tf_replicas.merge_possible():
        return
    tf.distribute.get_replica_context().merge_call(
        lambda distribution: _build_now(optimizer, distribution, variables)
    )


def _build_now(optimizer: Any, strategy: Any, variables: list[Any]) -> None:
    if optimizer.built:
        return
    with tf.init_scope(), strategy.scope():
        optimizer.build(variables)
