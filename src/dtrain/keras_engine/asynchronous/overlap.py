"""A block whose steps compute while what the step before them has left to send is on its way.

What a step leaves goes with the loop; the next step computes on weights that do not have it yet. In the
graph the two depend on nothing of each other's, so that TensorFlow runs them at the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from dtrain.keras_engine.asynchronous.clocks import between, time_of
from dtrain.keras_engine.asynchronous.step import Apply, Block, Rehearsal, adds_up, update_by
from dtrain.upstream import keras as upstream_keras

Tensors = list[tf.Tensor]


def obstacle(rehearsal: Rehearsal, written: Sequence[Any]) -> str | None:
    """Why the exchange of a step cannot overlap with the next step; None if it can.

    Args:
        rehearsal: of the step.
        written: the variables on servers that it writes to.
    """
    if rehearsal.applies != 1:
        return f"it calls optimizers {rehearsal.applies} times, not once"
    if rehearsal.nested:
        return "it calls its optimizer inside a condition, a loop or a function of its own"
    updated = {
        id(v)
        for optimizer in rehearsal.optimizers
        for v in (*optimizer.variables, *upstream_keras.trainable_variables_of(optimizer))
    }
    both = [v for v in written if id(v) in updated]
    if both:
        name = getattr(both[0], "path", None) or both[0].name
        return f"it writes itself to {name!r}, which its optimizer has or updates"
    return None


class Left(NamedTuple):
    """What a step has left to send, beside what it wrote.

    Attributes:
        update: called on the servers with the gradients that arrived.
        grads: tensors, `tf.IndexedSlices` or None.
        targets: the variables that they belong to.
        whole: whether the gradients are to be sent now, a bool scalar; None for always.
    """

    update: Callable[[list[Any]], Any]
    grads: list[Any]
    targets: list[Any]
    whole: tf.Tensor | None = None


class _Layout:
    """How what a step leaves lies in a list of tensors; every step leaves the same.

    Args:
        left: of one step.
        changes: how many tensors tell what the step wrote.
    """

    def __init__(self, left: Left, changes: int) -> None:
        self.update = left.update
        self.targets = left.targets
        self.partial = left.whole is not None
        self._kinds = [None if grad is None else isinstance(grad, tf.IndexedSlices) for grad in left.grads]
        self._changes = changes

    def flatten(self, left: Left, changes: Tensors, clock: tf.Tensor) -> Tensors:
        """What a step wrote, has left, and the clock when its weights were read, as tensors."""
        found = [clock, *changes]
        if left.whole is not None:
            found.append(left.whole)
        for grad in left.grads:
            if isinstance(grad, tf.IndexedSlices):
                found += [grad.values, grad.indices]
            elif grad is not None:
                found.append(tf.convert_to_tensor(grad))
        return found

    def shapes(self, pending: Tensors) -> list[tf.TensorShape]:
        """Of the tensors of any step; rows of a sparse gradient may be more or fewer."""
        found = [tensor.shape for tensor in pending]
        place = len(found) - sum(0 if sparse is None else 1 + sparse for sparse in self._kinds)
        for sparse in self._kinds:
            if sparse:
                found[place] = tf.TensorShape([None, *found[place][1:]])
                found[place + 1] = tf.TensorShape([None])
            place += 0 if sparse is None else 1 + sparse
        return found

    def restore(self, pending: Tensors) -> tuple[tf.Tensor, Tensors, tf.Tensor | None, list[Any]]:
        """The clock, what was written, whether the gradients are whole, and the gradients."""
        rest = iter(pending)
        clock = next(rest)
        changes = [next(rest) for _ in range(self._changes)]
        whole = next(rest) if self.partial else None
        return clock, changes, whole, [_gradient(sparse, rest) for sparse in self._kinds]


class Overlapped(Block):
    """A block each of whose steps calls one optimizer once; arguments as `Block`'s.

    The first step, those after it and the end each have a method: `first`, `next`, `last`. A step's weights
    have all updates of the worker's own but the last.
    """

    _left: Left | None = None
    _layout: _Layout | None = None

    def apply(self, original: Apply, optimizer: Any, grads: Sequence[Any], variables: Any) -> None:
        """What `optimizer.apply` does in a step: it keeps the gradients for later."""
        targets = self.targets_of(optimizer, variables)
        for accumulator in self._accumulators:
            if accumulator.optimizer is optimizer:
                self._left = Left(*accumulator.collect(original, list(grads), targets))
                return
        if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
            self._left = _left_of_scaled(original, optimizer, list(grads), targets)
            return
        self._left = Left(update_by(original, optimizer, targets), list(grads), targets)

    def first(self, step: Callable[[], Tensors]) -> tuple[Tensors, Tensors]:
        """Computes a step; gives what it returns and what it has left to send."""
        outputs, pending, _ = self._computed(step)
        for i, base in self._base.items():
            base.refresh(self._stand_ins[i].read_value())
        return outputs, pending

    def next(self, step: Callable[[], Tensors], pending: Tensors) -> tuple[Tensors, Tensors]:
        """Computes a step, and meanwhile sends what the one before it has left."""
        outputs, fresh, changes = self._computed(step)
        # After the step in the program, so that the rows of tables that it fetches need not wait for this.
        values, clock = self._delivered(pending)
        computed = time_of([*outputs, *fresh])
        self.note_waiting(between(computed, time_of([*values, clock])))
        self._take(values, clock, changes)
        return outputs, fresh

    def last(self, pending: Tensors) -> None:
        """Sends what the last step has left; its weights need not come back."""
        begun = time_of(pending)
        _, clock = self._delivered(pending)
        self.note_waiting(between(begun, time_of([clock])))
        for i, base in self._base.items():
            base.refresh(self._stand_ins[i].read_value())

    def shapes(self, pending: Tensors) -> list[tf.TensorShape]:
        """Of what any step has left to send."""
        return self._known_layout().shapes(pending)

    def _computed(self, step: Callable[[], Tensors]) -> tuple[Tensors, Tensors, Tensors]:
        """Outputs, what is left to send, and the part of it that the step wrote."""
        self._left = None
        with self.traced():
            outputs = step()
        left = self._left
        if left is None:
            raise RuntimeError("a step that has not called its optimizer cannot overlap")
        changes = self._changes()
        if self._layout is None:
            self._layout = _Layout(left, len(changes))
        return outputs, self._layout.flatten(left, changes, self._clock.read_value()), changes

    def _delivered(self, pending: Tensors) -> tuple[Tensors, tf.Tensor]:
        """Sends what a step has left; the weights and the clock after it."""
        layout = self._known_layout()
        read_at, changes, whole, grads = layout.restore(pending)

        def send() -> Tensors:
            values, clock = self._sent(changes, layout.update, grads, layout.targets)
            self._note_staleness(read_at, clock)
            return [*values, clock]

        if whole is None:
            found = send()
        else:
            kept = [*(each.read_value() for each in self._stand_ins), self._clock.read_value()]

            def send_changes() -> Tensors:
                if not changes:
                    return [tf.identity(each) for each in kept]
                values, clock = self._sent(changes)
                return [*values, clock]

            found = list(tf.cond(whole, send, send_changes))
        return found[:-1], found[-1]

    def _take(self, values: Tensors, clock: tf.Tensor, changes: Tensors) -> None:
        """Puts weights in; what this step wrote is not in them, and stays."""
        written = dict(zip(self._written, changes, strict=True))
        for i, value in enumerate(values):
            if i not in written:
                self._stand_ins[i].refresh(value)
            elif not self._alone and adds_up(value):
                now = value + written[i]
                self._stand_ins[i].refresh(now)
                self._base[i].refresh(now)
        self._clock.refresh(clock)

    def _known_layout(self) -> _Layout:
        if self._layout is None:
            raise RuntimeError("a block that overlaps begins with `first`")
        return self._layout


def _left_of_scaled(original: Apply, optimizer: Any, grads: list[Any], targets: list[Any]) -> Left:
    """Gradients of a scaled loss: the scale may be another one when they arrive, so theirs goes with them."""
    scale = optimizer.dynamic_scale
    apply = update_by(original, optimizer, targets)

    def update(arrived: list[Any]) -> None:
        factor = tf.convert_to_tensor(scale) / arrived.pop()  # a power of two, so no bit is lost
        apply([_times(grad, factor) for grad in arrived])

    return Left(update, [*grads, tf.convert_to_tensor(scale)], [*targets, scale])


def _times(grad: Any, factor: tf.Tensor) -> Any:
    if grad is None:
        return None
    factor = tf.cast(factor, grad.dtype)
    if isinstance(grad, tf.IndexedSlices):
        return tf.IndexedSlices(grad.values * factor, grad.indices, grad.dense_shape)
    return grad * factor


def _gradient(sparse: bool | None, tensors: Iterator[tf.Tensor]) -> Any:
    if sparse is None:
        return None
    values = next(tensors)
    return tf.IndexedSlices(values, next(tensors)) if sparse else values
