"""Lets Keras' optimizers work on gradients that are reduced already.

First the reduction, then Keras' own `apply` as on a single device: clipping, loss scaling, accumulation,
EMA, weight decay and constraints come after it, with no talk between replicas inside a `cond`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from dtrain.keras_engine.asynchronous.step import current_block
from dtrain.keras_engine.asynchronous.updates import updating
from dtrain.keras_engine.context import (
    TrialStep,
    current_step,
    local_update,
    updating_locally,
)
from dtrain.keras_engine.protocol import ReplicaLayout, layout_of, servers_of
from dtrain.keras_engine.row_gradients import sum_gradients
from dtrain.keras_engine.scope import check_optimizer_left_out, check_same_strategy
from dtrain.keras_engine.sharded_state import hand_out
from dtrain.upstream import keras as upstream_keras
from dtrain.upstream import tensorflow as upstream_tf
from dtrain.upstream.reach import replaces


@replaces(
    upstream_keras.OPTIMIZER_APPLY, upstream_keras.LOSS_SCALE_APPLY, upstream_keras.MULTI_OPTIMIZER_APPLY
)
def apply(
    original: Callable[..., Any],
    self: Any,
    grads: Sequence[Any],
    trainable_variables: Sequence[Any] | None = None,
) -> Any:
    """The replacement of an optimizer's `apply`."""
    block = current_block()
    if block is not None and not updating_locally() and len(grads) > 0:
        return block.apply(original, self, grads, trainable_variables)
    step = current_step()
    if isinstance(step, TrialStep):
        if trainable_variables is not None:
            _build(self, tf.distribute.get_strategy(), list(trainable_variables))
        return None
    if updating_locally() or len(grads) == 0:
        return original(self, grads, trainable_variables)
    strategy = tf.distribute.get_strategy()
    own: Any = upstream_keras.strategy_of_optimizer(self)
    if servers_of(own) is not None:
        return _apply_on_servers(original, self, own, list(grads), trainable_variables)
    if own is not strategy and layout_of(own) is not None and not tf.distribute.has_strategy():
        # Outside of any scope, with gradients that the caller reduced: the optimizer's own strategy.
        with own.scope():
            return apply(original, self, grads, trainable_variables)
    layout = layout_of(strategy)
    if layout is None:
        check_optimizer_left_out(self)
        return original(self, grads, trainable_variables)
    across = tf.distribute.in_cross_replica_context()
    if layout.replicas == 1 and not across:
        # Alone there is nobody to talk to; Keras would, in a `cond` too, where TensorFlow forbids it.
        with local_update():
            return original(self, grads, trainable_variables)
    variables = list(trainable_variables) if trainable_variables is not None else None
    check_same_strategy(self, strategy, variables)
    grads = list(grads)
    if across:
        return _apply_across(original, self, strategy, layout, grads, variables)
    return _apply_in_replica(original, self, strategy, layout, grads, variables)


@replaces(upstream_keras.LOSS_SCALE_TF_APPLY)
def tf_apply(original: Callable[..., Any], self: Any, grads: Any, trainable_variables: Any = None) -> Any:
    """The replacement of loss scaling's own way through the replicas, which is done by then."""
    if updating_locally():
        return upstream_keras.common_apply(self, grads, trainable_variables)
    return original(self, grads, trainable_variables)


@replaces(upstream_keras.OPTIMIZER_REDUCE)
def reduced_already(original: Callable[..., Any], self: Any, grads_and_vars: Any) -> Any:
    """The replacement of Keras' own reduction, which must not run a second time."""
    return list(grads_and_vars) if updating_locally() else original(self, grads_and_vars)


def _apply_in_replica(
    original: Callable[..., Any],
    optimizer: Any,
    strategy: Any,
    layout: ReplicaLayout,
    grads: list[Any],
    variables: list[Any] | None,
) -> Any:
    step = current_step()
    targets = variables if variables is not None else upstream_keras.trainable_variables_of(optimizer)
    _build(optimizer, strategy, targets)
    found = _reduced(grads) if step is None else step.gradients_to_apply(optimizer, grads, targets)
    if found is None:
        return None
    grads = found
    if not layout.central:
        with local_update():
            original(optimizer, grads, variables)
        if step is None or step.updates_weights:
            hand_out(optimizer, [v for v, g in zip(targets, grads, strict=True) if g is not None])
        return None

    # One copy of the weights: the update runs once, for all replicas.
    present = [g for g in grads if g is not None]

    def once(distribution: Any, *merged: Any) -> None:
        first = iter([distribution.experimental_local_results(g)[0] for g in merged])
        with local_update():
            original(optimizer, [None if g is None else next(first) for g in grads], variables)

    tf.distribute.get_replica_context().merge_call(once, args=tuple(present))
    return None


def _apply_on_servers(
    original: Callable[..., Any], optimizer: Any, strategy: Any, grads: list[Any], variables: Any
) -> Any:
    """In a loop of the user's own: the servers apply one worker's update whole before another's."""
    targets = list(variables) if variables is not None else upstream_keras.trainable_variables_of(optimizer)
    if tf.distribute.get_replica_context() is not None and tf.distribute.get_strategy() is strategy:
        _build(optimizer, strategy, targets)
    else:
        _build_now(optimizer, strategy, targets)
    present = [g for g in grads if g is not None]

    def once(distribution: Any, *merged: Any) -> None:
        found = iter(merged)
        given = [None if g is None else next(found) for g in grads]

        def update() -> None:
            with local_update(), updating(optimizer):
                original(optimizer, given, variables)

        if tf.executing_eagerly():
            update()
        else:
            strategy.dtrain_servers.servers.locked(update)

    if tf.distribute.in_cross_replica_context():
        return once(strategy, *present)
    if tf.distribute.get_strategy() is strategy:
        return tf.distribute.get_replica_context().merge_call(once, args=tuple(present))
    with strategy.scope():
        return once(strategy, *present)


def _apply_across(
    original: Callable[..., Any],
    optimizer: Any,
    strategy: Any,
    layout: ReplicaLayout,
    grads: list[Any],
    variables: list[Any] | None,
) -> Any:
    """Gradients that the caller has reduced: every replica applies the same."""
    targets = variables if variables is not None else upstream_keras.trainable_variables_of(optimizer)
    _build_now(optimizer, strategy, targets)
    if layout.central:
        with local_update():
            return original(optimizer, grads, variables)

    def alike(*each: Any) -> None:
        found = iter(each)
        with local_update():
            original(optimizer, [None if g is None else next(found) for g in grads], variables)
        hand_out(optimizer, [v for v, g in zip(targets, grads, strict=True) if g is not None])

    strategy.extended.call_for_each_replica(alike, args=tuple(g for g in grads if g is not None))
    return None


def _reduced(grads: list[Any]) -> list[Any]:
    """The sums over all replicas, in a loop of the user's own."""
    summed = iter(sum_gradients([g for g in grads if g is not None]))
    return [None if g is None else next(summed) for g in grads]


def _build(optimizer: Any, strategy: Any, variables: list[Any]) -> None:
    """Makes the optimizer's variables in the strategy's scope, once, also in the middle of a trace."""
    if optimizer.built:
        return
    if not upstream_tf.merge_possible():
        return
    tf.distribute.get_replica_context().merge_call(
        lambda distribution: _build_now(optimizer, distribution, variables)
    )


def _build_now(optimizer: Any, strategy: Any, variables: list[Any]) -> None:
    if optimizer.built:
        return
    with tf.init_scope(), strategy.scope():
        optimizer.build(variables)
