"""A block in which each step computes while the update of the step before it is sent to the servers.

The loop carries a step's pending update into the next iteration. There the next step computes on weights
that lack this update. Neither depends on the other, so TensorFlow runs both at the same time. Whether a step
can be overlapped is decided in `step_planner`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from dtrain.engine.parameter_server.accumulator import Update
from dtrain.engine.parameter_server.block import Block, Tensors, adds_up, update_by
from dtrain.engine.parameter_server.block_loops import between, in_turns, time_of
from dtrain.engine.replica.gradients import scaled
from dtrain.engine.replica.thread_state import Apply, thread_state


class PendingUpdate(NamedTuple):
    """The update of one step that has not been sent yet.

    Attributes:
        read_at: the servers' clock when the step's weights were read.
        changes: the changes of the variables that the step itself writes to.
        whole: whether the gradients complete an update and must be sent, a bool scalar; None means always.
        grads: tensors, `tf.IndexedSlices` or None.
    """

    read_at: tf.Tensor
    changes: Tensors
    whole: tf.Tensor | None
    grads: list[Any]

    def flatten(self) -> Tensors:
        """The update as a flat list of tensors."""
        return [tensor for tensor in tf.nest.flatten(self, expand_composites=True) if tensor is not None]

    def restore(self, tensors: Sequence[tf.Tensor]) -> PendingUpdate:
        """Builds another step's pending update, of the same structure, from a flat list of tensors."""
        rest = iter(tensors)
        parts = tf.nest.flatten(self, expand_composites=True)
        flat = [None if part is None else next(rest) for part in parts]
        update: PendingUpdate = tf.nest.pack_sequence_as(self, flat, expand_composites=True)
        return update

    def shapes(self) -> list[tf.TensorShape]:
        """The static shapes of `flatten`, valid for any step: sparse gradients have any number of rows."""
        shapes = []
        for leaf in tf.nest.flatten(self):
            if isinstance(leaf, tf.IndexedSlices):
                shapes += [tf.TensorShape([None, *leaf.values.shape[1:]]), tf.TensorShape([None])]
            elif leaf is not None:
                shapes.append(leaf.shape)
        return shapes


class Overlapped(Block):
    """A block with overlapped steps, each of which must call one optimizer once; arguments as `Block`'s.

    The first step runs before the loop and the last update is sent after it, so no update is pending at the
    end of a block. A step's weights include all of the worker's own updates except the last.
    """

    _update: Update
    _targets: list[Any]
    _gradients: tuple[list[Any], tf.Tensor | None] | None = None

    def loop(self, step: Callable[[tf.Tensor], Any], count: tf.Tensor, unrolled: int) -> Tensors:
        """As `Block.loop`; each step's update is sent while the next step computes."""
        outputs = self._setting.plan.outputs

        def computed(i: tf.Tensor) -> tuple[Tensors, PendingUpdate]:
            self._gradients = None
            with thread_state.having(block=self):
                returned = outputs.flatten(step(i))
            if self._gradients is None:
                raise RuntimeError("a step that has not called its optimizer cannot overlap")
            grads, whole = self._gradients
            return returned, PendingUpdate(self._clock.read_value(), self._changes(), whole, _plain(grads))

        def turn(i: tf.Tensor, state: Tensors) -> Tensors:
            returned, fresh = computed(i)
            # This comes after the step in program order: the step's lookups of table rows must not wait.
            values, clock = self._delivered(first.restore(state[known:]))
            ready = time_of([*returned, *fresh.flatten()])
            self.note_waiting(between(ready, time_of([*values, clock])))
            self._take(values, clock, fresh.changes)
            return [*returned, *fresh.flatten()]

        returned, first = computed(tf.constant(0))
        known = len(returned)
        self._renew_base()
        state = [*returned, *first.flatten()]
        shapes = [*outputs.shapes(), *first.shapes()]
        state = in_turns(turn, state, shapes, first=1, count=count, unrolled=unrolled)
        begun = time_of(state[known:])
        _, clock = self._delivered(first.restore(state[known:]))  # the new weights need not come back
        self.note_waiting(between(begun, time_of([clock])))
        self._renew_base()
        return state[:known]

    def apply(self, original: Apply, optimizer: Any, grads: Sequence[Any], variables: Any) -> None:
        """Replaces `optimizer.apply` in a step: keeps the gradients, to be sent during the next step."""
        targets = self.targets_of(optimizer, variables)
        given, whole = list(grads), None
        accumulator = self._accumulators.get(id(optimizer))
        if accumulator is not None:
            self._update, given, targets, whole = accumulator.collect(original, given, targets)
        elif isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
            # The loss scale may have changed when the gradients arrive, so their own scale is sent with them.
            self._update = _update_of_scaled(original, optimizer, targets)
            given.append(tf.convert_to_tensor(optimizer.dynamic_scale))
            targets = [*targets, optimizer.dynamic_scale]
        else:
            self._update = update_by(original, optimizer, targets)
        self._targets, self._gradients = targets, (given, whole)

    def _renew_base(self) -> None:
        """Marks all writes so far as sent."""
        for i, base in self._base.items():
            base.refresh(self._copies[i].read_value())

    def _delivered(self, pending: PendingUpdate) -> tuple[Tensors, tf.Tensor]:
        """Sends a pending update; returns the weights and the clock after it."""

        def send() -> Tensors:
            values, clock = self._sent(pending.changes, self._update, pending.grads, self._targets)
            self._note_staleness(pending.read_at, clock)
            return [*values, clock]

        def send_changes() -> Tensors:
            if not pending.changes:
                return [tf.identity(value) for value in kept]
            values, clock = self._sent(pending.changes)
            return [*values, clock]

        if pending.whole is None:
            results = send()
        else:
            kept = [*(variable.read_value() for variable in self._copies), self._clock.read_value()]
            results = list(tf.cond(pending.whole, send, send_changes))
        return results[:-1], results[-1]

    def _take(self, values: Tensors, clock: tf.Tensor, changes: Tensors) -> None:
        """Refreshes the local copies with new weights, and keeps the writes of the current step.

        Args:
            values: the servers' values, which lack the current step's writes.
            clock: the clock of these values.
            changes: the current step's changes of the written variables.
        """
        written = dict(zip(self._written, changes, strict=True))
        for i, value in enumerate(values):
            if i not in written:
                self._copies[i].refresh(value)
            elif not self._setting.alone and adds_up(value):
                now = value + written[i]
                self._copies[i].refresh(now)
                self._base[i].refresh(now)
        self._clock.refresh(clock)


def _plain(grads: Sequence[Any]) -> list[Any]:
    """Gradients as plain tensors, or `tf.IndexedSlices` without their `dense_shape`."""
    return [
        None
        if grad is None
        else tf.IndexedSlices(grad.values, grad.indices)
        if isinstance(grad, tf.IndexedSlices)
        else tf.convert_to_tensor(grad)
        for grad in grads
    ]


def _update_of_scaled(original: Apply, optimizer: Any, targets: list[Any]) -> Update:
    """An update function for gradients of a scaled loss; the last tensor that arrives is their loss scale."""
    scale = optimizer.dynamic_scale
    apply = update_by(original, optimizer, targets)

    def update(arrived: list[Any]) -> None:
        factor = tf.convert_to_tensor(scale) / arrived.pop()  # a power of two, so no bit is lost
        apply([scaled(grad, factor) for grad in arrived])

    return update
