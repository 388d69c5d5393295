"""Gradient accumulation on a worker: K micro-batches of one worker make one update on the servers.

Used with several workers; with one worker, the optimizer accumulates on the servers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from dtrain.engine.parameter_server.server_updates import updating
from dtrain.engine.replica.thread_state import Apply
from dtrain.engine.variables.local_variable import LocalVariable
from dtrain.upstream import keras_optimizers

Update = Callable[[list[Any]], Any]
PushPull = Callable[[Update, Sequence[Any], Sequence[Any]], None]
"""`Block.push_pull`: sends gradients of variables to the servers, and calls the update there."""


class Accumulator:
    """Sums the gradients of one worker's micro-batches; every K micro-batches make one update.

    Args:
        optimizer: an optimizer with `gradient_accumulation_steps`, which is K.
        left: how many micro-batches the servers have accumulated before this block, an int64 scalar; they
            count towards the block's first update.
    """

    def __init__(self, optimizer: Any, left: tf.Tensor) -> None:
        self.optimizer = optimizer
        self._sums: list[LocalVariable] = [
            LocalVariable(tf.zeros(v.shape, v.dtype))
            for v in keras_optimizers.trainable_variables_of(optimizer)
        ]
        self._left = LocalVariable(left)
        self._pending = LocalVariable(tf.constant(0, tf.int64))
        self._given: list[tuple[int, Any]] = []

    def add(self, push_pull: PushPull, original: Apply, grads: list[Any], targets: list[Any]) -> None:
        """Adds a micro-batch's gradients; after the K-th, sends the sums and lets the servers update."""
        self._sum_up(grads, targets)

        def update() -> tf.Tensor:
            self._push_pull(push_pull, self._update_by(original), self._pending.read_value())
            self._left.refresh(tf.constant(0, tf.int64))
            return tf.constant(True)

        tf.cond(self._full(), update, lambda: tf.constant(False))

    def collect(
        self, original: Apply, grads: list[Any], targets: list[Any]
    ) -> tuple[Update, list[Any], list[Any], tf.Tensor]:
        """Adds a micro-batch's gradients; after the K-th, resets the sums. The caller sends the update.

        Returns:
            The update function for the servers, the sums before the reset, the variables that they belong to,
            and whether the update is due, a bool scalar.
        """
        self._sum_up(grads, targets)
        due = self._full()
        sums, variables = self._collected(self._pending.read_value())

        def renew() -> tf.Tensor:
            self._renew()
            self._left.refresh(tf.constant(0, tf.int64))
            return tf.constant(True)

        tf.cond(due, renew, lambda: tf.constant(False))
        return self._update_by(original), sums, variables, due

    def end(self, push_pull: PushPull) -> None:
        """Adds the sums of fewer than K micro-batches, if any, to the accumulators on the servers."""
        if not self._given:
            return  # no step has called this optimizer

        def leave() -> tf.Tensor:
            def add(arrived: list[Any]) -> None:
                optimizer = self.optimizer
                keras_optimizers.iterations_of(optimizer).assign_add(tf.cast(arrived.pop(), tf.int64))
                for (number, _), grad in zip(self._given, arrived, strict=True):
                    keras_optimizers.accumulators_of(optimizer)[number].assign_add(grad)

            self._push_pull(push_pull, add, self._pending.read_value())
            return tf.constant(True)

        tf.cond(self._pending.read_value() > 0, leave, lambda: tf.constant(False))

    def destroy(self) -> None:
        """Frees the sums."""
        for variable in (*self._sums, self._left, self._pending):
            variable.destroy()

    def _sum_up(self, grads: list[Any], targets: list[Any]) -> None:
        numbers = [keras_optimizers.number_of_variable(self.optimizer, v) for v in targets]
        self._given = [
            (n, target) for n, target, g in zip(numbers, targets, grads, strict=True) if g is not None
        ]
        for number, grad in zip(numbers, grads, strict=True):
            if grad is not None:
                self._sums[number].assign_add(tf.convert_to_tensor(grad))
        self._pending.assign_add(1)

    def _full(self) -> tf.Tensor:
        """Whether an update is due."""
        steps = self.optimizer.gradient_accumulation_steps
        return tf.equal((self._left.read_value() + self._pending.read_value()) % steps, 0)

    def _update_by(self, original: Apply) -> Update:
        """The update function for the servers; takes the tensors that `_collected` returns."""
        chosen = [target for _, target in self._given]

        def apply(arrived: list[Any]) -> None:
            keras_optimizers.iterations_of(self.optimizer).assign_add(tf.cast(arrived.pop(), tf.int64) - 1)
            with updating(self.optimizer):
                original(self.optimizer, arrived, chosen)

        return apply

    def _collected(self, pending: tf.Tensor) -> tuple[list[Any], list[Any]]:
        """The sums and their number of micro-batches, and the variable that belongs to each of these."""
        grads = [self._sums[number].read_value() for number, _ in self._given]
        counter = keras_optimizers.iterations_of(self.optimizer)
        return [*grads, pending], [*(target for _, target in self._given), counter]

    def _renew(self) -> None:
        for number, _ in self._given:
            self._sums[number].refresh(tf.zeros_like(self._sums[number]))
        self._pending.refresh(tf.constant(0, tf.int64))

    def _push_pull(self, push_pull: PushPull, update: Update, pending: tf.Tensor) -> None:
        grads, targets = self._collected(pending)
        push_pull(update, grads, targets)
        self._renew()
