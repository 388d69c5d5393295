"""Shards an optimizer's state: one replica, the owner, holds the state of a weight and computes its update.

Gradients are all-reduced as usual, so clipping and loss scaling see all of them. Then each weight's owner
updates it and broadcasts the result. Which optimizers may be sharded is not decided here, but by the caller.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from dtrain.engine.replica.context import all_reduce_sum, local_update
from dtrain.engine.replica.thread_state import thread_state
from dtrain.errors import OperationMismatchError, PeerMissingError
from dtrain.interfaces.managed_strategy import layout_of
from dtrain.interfaces.replica_layout import ReplicaLayout
from dtrain.partition.marks import of_owner
from dtrain.process_group.value_exchange import exchange
from dtrain.upstream import keras_optimizers, keras_variables, tf_replicas, tf_tracing, tf_variables
from dtrain.upstream.reach import set_methods
from dtrain.upstream.tf_variables import underlying

SAVE_SECONDS = 60.0
_AT_ONCE = 64 * 2**20  # bytes of variables that one gather fetches when saving


@dataclass
class ShardingPlan:
    """Which replica holds the state of which weight.

    Attributes:
        strategy: the optimizer's strategy.
        layout: the strategy's layout.
        owners: the owner's global replica number for each weight, in the optimizer's order; [] until the
            optimizer is built.
        slots: the owner of each sharded variable of the optimizer, by the variable's id.
    """

    strategy: Any
    layout: ReplicaLayout
    owners: list[int]
    slots: dict[int, int]

    def is_here(self, owner: int) -> bool:
        """Whether a replica, given by its global number, belongs to this process."""
        return 0 <= owner - self.layout.first_replica < self.layout.local_replicas

    def is_this_replica(self, owner: int) -> bool:
        """Whether a replica is the one whose code runs now."""
        return owner == self.layout.first_replica + tf_replicas.local_replica_index()

    def device(self, owner: int) -> str:
        """The device of a replica of this process."""
        return str(self.strategy.extended.worker_devices[owner - self.layout.first_replica])

    def make_slot(self, make: Callable[[], Any], optimizer: Any, weight: Any) -> Any:
        """The variable that `make` makes for a weight, at its owner; the first call chooses all owners."""
        if not self.owners:
            sizes = [_bytes(variable) for variable in keras_optimizers.trainable_variables_of(optimizer)]
            self.owners = owners_of(sizes, self.layout.replicas)
        owner = self.owner(optimizer, weight)
        with _made_by(self, owner):
            made = make()
        self.slots[id(made)] = owner
        return made

    def owner(self, optimizer: Any, weight: Any) -> int:
        """The global number of the replica that holds the state of a weight of the optimizer."""
        return self.owners[keras_optimizers.number_of_variable(optimizer, weight)]

    def own(self, optimizer: Any, pairs: Iterable[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
        """Those pairs of gradient and weight whose weight is owned by the current replica."""
        return [
            (gradient, weight)
            for gradient, weight in pairs
            if self.is_this_replica(self.owner(optimizer, weight))
        ]


plans: weakref.WeakKeyDictionary[Any, ShardingPlan] = weakref.WeakKeyDictionary()
"""The plan of each optimizer whose state is, or will be, sharded."""


def shard(optimizer: Any) -> bool:
    """Plans to shard the state of an optimizer that is not built yet.

    Returns:
        Whether the state will be sharded: only with several replicas that each have their own weights. A
        strategy that divides the weights divides the state too.
    """
    strategy = keras_optimizers.strategy_of_optimizer(optimizer)
    layout = layout_of(strategy)
    if layout is None or layout.replicas == 1 or layout.central or layout.divided:
        return False
    plans[optimizer] = ShardingPlan(strategy=strategy, layout=layout, owners=[], slots={})
    set_methods(optimizer)
    return True


def is_sharded(optimizer: Any) -> bool:
    """Whether an optimizer's state is, or will be, divided over the replicas."""
    return optimizer in plans or getattr(optimizer, "inner_optimizer", None) in plans


def owners_of(sizes: Sequence[int], replicas: int) -> list[int]:
    """Assigns each weight, largest first, to the replica with the fewest bytes so far.

    Args:
        sizes: the bytes of each weight.
        replicas: the number of replicas.

    Returns:
        The owner's number for each weight.
    """
    load = [0] * replicas
    owners = [0] * len(sizes)
    for number in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        owners[number] = min(range(replicas), key=lambda r: (load[r], r))
        load[owners[number]] += sizes[number]
    return owners


def owner_of(optimizer: Any, variable: Any) -> int | None:
    """The global number of the replica that alone holds a sharded variable; None for other variables."""
    plan_and_optimizer = None if optimizer is None else _plan_of(optimizer)
    return None if plan_and_optimizer is None else plan_and_optimizer[0].slots.get(id(variable))


def broadcast_updates(optimizer: Any, variables: Sequence[Any]) -> None:
    """Copies each updated weight from its owner to all replicas, if the optimizer's state is sharded.

    Must be called in a replica, outside of `tf.cond`.

    Args:
        optimizer: the optimizer that updated the weights, or one that wraps it.
        variables: the variables for which the optimizer got gradients.
    """
    plan_and_optimizer = _plan_of(optimizer)
    if plan_and_optimizer is None:
        return
    plan, inner = plan_and_optimizer
    owners = [plan.owner(inner, v) for v in variables]
    weights = [underlying(variable) for variable in variables]
    if plan.layout.workers > 1:
        _broadcast_between_workers(plan, weights, owners)
        return

    def copy(strategy: Any) -> None:
        for weight, owner in zip(weights, owners, strict=True):
            components = strategy.experimental_local_results(weight)
            value = components[owner].read_value()
            for replica, component in enumerate(components):
                if replica != owner:
                    with tf.device(component.device):
                        component.assign(value)

    tf.distribute.get_replica_context().merge_call(copy)


def _broadcast_between_workers(plan: ShardingPlan, weights: list[Any], owners: list[int]) -> None:
    # A replica contributes zeros for weights that it does not own, so the sum is the owner's value. The owner
    # takes the sum too: its -0.0 becomes +0.0 in the sum, and all replicas must hold the same bits.
    mine = [plan.is_this_replica(owner) for owner in owners]
    values = [
        weight.read_value() if own else tf.zeros(weight.shape, weight.dtype)
        for weight, own in zip(weights, mine, strict=True)
    ]
    with local_update():
        for weight, value in zip(weights, all_reduce_sum(values), strict=True):
            weight.assign(value)


def update_at_owners(
    original: Callable[..., Any], self: Any, distribution: Any, grads_and_vars: Any, learning_rate: Any
) -> None:
    """An optimizer's `_distributed_tf_update_step`: in a step that is partitioned, each weight at its owner.

    Only the owner's process has the state, so each process traces another update. All of them get the new
    weights, in one round.
    """
    plan = plans.get(self)
    if plan is None or plan.layout.workers == 1 or not thread_state.single_program:
        original(self, distribution, grads_and_vars, learning_rate)
        return
    pairs = [(gradient, weight, plan.owner(self, weight)) for gradient, weight in grads_and_vars]
    own = [(gradient, weight) for gradient, weight, owner in pairs if plan.is_here(owner)]
    original(self, distribution, own, learning_rate)
    for gradient, weight, owner in pairs:
        place = owner - plan.layout.first_replica if plan.is_here(owner) else None
        needed = tf.nest.flatten(gradient, expand_composites=True)
        weight.assign(of_owner(weight.read_value(), place, needed))


def save_own(original: Callable[..., Any], self: Any, store: Any) -> Any:
    """An optimizer's `save_own_variables`: saves the whole state, from all workers.

    Raises:
        PeerMissingError, OperationMismatchError: not all workers are saving.
    """
    plan_and_optimizer = _plan_of(self)
    if plan_and_optimizer is None or plan_and_optimizer[0].layout.workers == 1:
        return original(self, store)
    plan = plan_and_optimizer[0]
    _meet_to_save(plan.layout)
    variables = list(self.variables)
    whole = _gathered(plan, [v for v in variables if id(v) in plan.slots])
    for i, variable in enumerate(variables):
        store[str(i)] = next(whole) if id(variable) in plan.slots else variable.numpy()
    return None


def load_own(original: Callable[..., Any], self: Any, store: Any) -> Any:
    """An optimizer's `load_own_variables`: loads the state that this process holds."""
    plan_and_optimizer = _plan_of(self)
    if plan_and_optimizer is None or len(store.keys()) != len(self.variables):
        return original(self, store)
    plan = plan_and_optimizer[0]
    for i, variable in enumerate(self.variables):
        owner = plan.slots.get(id(variable))
        if owner is None or plan.is_here(owner):
            variable.assign(store[str(i)])
    return None


def _meet_to_save(layout: ReplicaLayout) -> None:
    """Waits until all workers save, because gathering would hang if a worker did not take part.

    Raises:
        PeerMissingError: a worker is lost, or does not save within `SAVE_SECONDS`.
        OperationMismatchError: a worker does something else.
    """
    try:
        exchange(layout, None, timeout=SAVE_SECONDS, call="save")
    except (PeerMissingError, OperationMismatchError) as error:
        raise type(error)(
            "A model whose optimizer state is divided over the workers must be saved by all of them. "
            f"{error.message}",
            hint="call save in every worker (each writes the whole model, to the same path if you like); "
            "ModelCheckpoint and dtrain.BackupAndRestore do, Keras' BackupAndRestore does not",
        ) from None


def _gathered(plan: ShardingPlan, slots: list[Any]) -> Iterator[Any]:
    """The whole values of sharded variables, as NumPy arrays, gathered about `_AT_ONCE` bytes at a time."""
    group: list[Any] = []
    for i, slot in enumerate(slots):
        group.append(slot)
        if sum(map(_bytes, group)) >= _AT_ONCE or i == len(slots) - 1:
            yield from _gather(plan, group)
            group = []


def _gather(plan: ShardingPlan, slots: list[Any]) -> list[Any]:
    strategy = plan.strategy

    def in_replica() -> Any:
        return all_reduce_sum(
            [
                tf.convert_to_tensor(keras_variables.value_of(slot))
                if plan.is_this_replica(plan.slots[id(slot)])
                else tf.zeros(slot.shape, slot.dtype)
                for slot in slots
            ]
        )

    gather = tf_tracing.made_for_each_model(lambda: strategy.run(in_replica))
    return [strategy.experimental_local_results(value)[0].numpy() for value in gather()]


def _plan_of(optimizer: Any) -> tuple[ShardingPlan, Any] | None:
    """The plan of an optimizer, or of its inner optimizer, with the optimizer that the plan belongs to."""
    for candidate in (optimizer, getattr(optimizer, "inner_optimizer", None)):
        plan = plans.get(candidate) if candidate is not None else None
        if plan is not None and plan.owners:
            return plan, candidate
    return None


@contextlib.contextmanager
def _made_by(plan: ShardingPlan, owner: int) -> Iterator[None]:
    """A context: a variable made in it exists once, on the owner's device; other processes make it empty."""

    def create(_: Any, **kwargs: Any) -> Any:
        value = kwargs["initial_value"]
        if not plan.is_here(owner):
            value = np.zeros([0], tf.as_dtype(kwargs["dtype"]).as_numpy_dtype)
            return tf_variables.variable_on("CPU:0", value, kwargs["dtype"], kwargs.get("name"))
        return tf_variables.variable_on(plan.device(owner), value, kwargs["dtype"], kwargs.get("name"))

    with tf.variable_creator_scope(create):
        yield


def _bytes(variable: Any) -> int:
    return int(np.prod(variable.shape, dtype=np.int64)) * int(tf.as_dtype(variable.dtype).size)
