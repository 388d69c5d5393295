"""A block of steps as a worker computes it: the model's step on local variables, with updates on servers.

A step exchanges data with the servers where it calls `optimizer.apply`. The step's other writes travel in the
same message, or in a message at the end of the step. How messages are packed is not decided here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from dtrain.engine.parameter_server.accumulator import Accumulator, Update
from dtrain.engine.parameter_server.block_loops import between, in_turns, time_of
from dtrain.engine.parameter_server.exchange import Exchange
from dtrain.engine.parameter_server.packing import Packing
from dtrain.engine.parameter_server.server_updates import updating
from dtrain.engine.parameter_server.step_planner import StepPlan, local_copy_of
from dtrain.engine.replica.context import local_update
from dtrain.engine.replica.thread_state import Apply, thread_state
from dtrain.engine.variables.local_variable import LocalVariable, variables_replaced
from dtrain.upstream import keras_optimizers
from dtrain.upstream.tf_variables import underlying

Tensors = list[tf.Tensor]

COUNTED = (tf.TensorSpec([3], tf.int64), tf.TensorSpec([2], tf.float64))
"""The counters that every block returns: (sum, maximum, updates) of staleness; seconds of (all, waiting)."""


@dataclass(frozen=True, kw_only=True)
class BlockSetting:
    """What the blocks of one step have in common.

    Attributes:
        plan: what the step reads, writes and returns.
        exchange: reads and updates the variables on servers, in the order of `plan.pulled`.
        strategy: the parameter-server strategy.
        alone: whether this is the only worker, so that no other worker's updates fall between its own.
        sends: whether steps send anything to the servers.
        overlaps: whether a step computes while the update of the step before it is sent. A block of a batch
            that cannot be concatenated has one step only, and never overlaps.
        accumulating: optimizers whose micro-batches the worker accumulates.
        held: the packing of the values of the variables that the chief holds.
    """

    plan: StepPlan
    exchange: Exchange
    strategy: Any
    alone: bool
    sends: bool
    overlaps: bool
    accumulating: list[Any]
    held: Packing

    @property
    def accumulation(self) -> int:
        """Micro-batches in one update if the workers accumulate them; else 1."""
        return max((optimizer.gradient_accumulation_steps for optimizer in self.accumulating), default=1)


class Block:
    """One block; the object exists only while the block is traced.

    Args:
        setting: what the block has in common with other blocks.
        numbers: the number of the block in the session, and how many micro-batches the servers have
            accumulated before it; int64 of shape (2,).
        held: the packed values of the variables that the chief holds.

    Attributes:
        mixed_into_seeds: as in `TracedBlock`. All workers use the same seed; the block's number makes
            their random numbers differ. None with one worker.
    """

    def __init__(self, setting: BlockSetting, numbers: tf.Tensor, held: Sequence[tf.Tensor]) -> None:
        plan = setting.plan
        self._setting = setting
        self._begun = time_of([numbers])
        values, clock = setting.exchange.read()
        self._real = [underlying(v) for v in plan.pulled]
        self._copies = [local_copy_of(v, value) for v, value in zip(plan.pulled, values, strict=True)]
        given = setting.held.unpack(held)
        self._held = [local_copy_of(v, value) for v, value in zip(plan.held, given, strict=True)]
        self._written = plan.written
        # The servers' values from which the worker's changes are computed.
        based = [] if setting.alone else self._written
        self._base = {i: LocalVariable(self._copies[i].read_value()) for i in based}
        self._clock = LocalVariable(clock, name="clock")
        # Staleness of this block's updates: the sum, the maximum, and the number of updates.
        self._staleness = LocalVariable(tf.zeros([3], tf.int64), name="staleness")
        # Seconds in which the worker only waited for the servers.
        self._waited = LocalVariable(between(self._begun, time_of([*values, clock])), name="waited")
        self._accumulators = {id(o): Accumulator(o, numbers[1]) for o in setting.accumulating}
        self._unsent = False
        self._exchanged = False
        self._graph: Any = None
        for i in self._written:
            self._copies[i].on_write = self._note_write
        self.mixed_into_seeds = None if setting.alone else numbers[0]

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Replaces the servers' variables by local copies inside the context, and then frees the copies."""
        plan, copies = self._setting.plan, [*self._copies, *self._held]
        workers = self._setting.strategy.dtrain_managed.layout.workers
        with (
            variables_replaced([*plan.pulled, *plan.held], copies),
            thread_state.having(block_workers=workers),
        ):
            yield
        for variable in (*copies, self._clock, self._staleness, self._waited, *self._base.values()):
            variable.destroy()
        for accumulator in self._accumulators.values():
            accumulator.destroy()

    def loop(self, step: Callable[[tf.Tensor], Any], count: tf.Tensor, unrolled: int) -> Tensors:
        """Runs the steps 0 to `count - 1`.

        Args:
            step: takes the number of the step, an int32 scalar.
            count: how many steps to run, an int32 scalar.
            unrolled: steps in one iteration of the loop.

        Returns:
            What the last step returned, as tensors.
        """
        outputs = self._setting.plan.outputs

        def turn(i: tf.Tensor, _: Tensors) -> Tensors:
            return self.step(lambda: step(i))

        return in_turns(turn, outputs.blanks(), outputs.shapes(), first=0, count=count, unrolled=unrolled)

    def step(self, function: Callable[[], Any]) -> Tensors:
        """Runs one step, and sends the writes that `optimizer.apply` has not sent at its end.

        Returns:
            What the step returned, as tensors.
        """
        if not self._setting.sends:
            return self._setting.plan.outputs.flatten(function())
        self._unsent = self._exchanged = False
        self._graph = tf.compat.v1.get_default_graph()
        with thread_state.having(block=self):
            outputs = function()
        if self._unsent or not self._exchanged:
            self.push_pull()
        return self._setting.plan.outputs.flatten(outputs)

    def results(self, outputs: Tensors) -> Tensors:
        """The block's results: the values that the chief holds, the block's counters, and the outputs."""
        if self._setting.sends:
            for accumulator in self._accumulators.values():
                accumulator.end(self.push_pull)
        held = [variable.read_value() for variable in self._held]
        staleness = self._staleness.read_value()
        taken = between(self._begun, time_of([*held, staleness, *outputs]))
        return [*held, staleness, tf.stack([taken, self._waited.read_value()]), *outputs]

    def apply(self, original: Apply, optimizer: Any, grads: Sequence[Any], variables: Any) -> None:
        """Replaces `optimizer.apply` in a step: sends the gradients to the servers, or accumulates them."""
        targets = self.targets_of(optimizer, variables)
        accumulator = self._accumulators.get(id(optimizer))
        if accumulator is None:
            self.push_pull(update_by(original, optimizer, targets), list(grads), targets)
        else:
            accumulator.add(self.push_pull, original, list(grads), targets)
            self._exchanged = True

    @staticmethod
    def targets_of(optimizer: Any, variables: Any) -> list[Any]:
        """The variables that `optimizer.apply` updates; its `variables` argument may be None."""
        return (
            list(variables) if variables is not None else keras_optimizers.trainable_variables_of(optimizer)
        )

    def push_pull(
        self, update: Update | None = None, grads: Sequence[Any] = (), targets: Sequence[Any] = ()
    ) -> None:
        """Sends gradients and unsent writes, lets the servers update, and reads the new values.

        Args:
            update: called on the servers with the gradients that arrived; None to send the writes only.
            grads: a tensor, `tf.IndexedSlices` or None for each variable.
            targets: the variables that the gradients belong to.
        """
        values, clock = self._sent(self._changes(), update, grads, targets, wait=True)
        for i, value in enumerate(values):
            self._copies[i].refresh(value)
            if i in self._base:
                self._base[i].refresh(value)
        if update is not None:
            self._note_staleness(self._clock.read_value(), clock)
        self._clock.refresh(clock)
        if tf.compat.v1.get_default_graph() is self._graph:
            self._exchanged, self._unsent = True, False

    def note_waiting(self, seconds: tf.Tensor) -> None:
        """Adds to the time in which the worker only waited: `seconds`, a float64 scalar."""
        self._waited.refresh(self._waited.read_value() + seconds)

    def _changes(self) -> Tensors:
        """The unsent writes: the change of each written variable, or with one worker its value."""
        values = [self._copies[i].read_value() for i in self._written]
        if self._setting.alone:
            return values
        bases = [self._base[i].read_value() for i in self._written]
        return [_change(value, base) for value, base in zip(values, bases, strict=True)]

    def _sent(
        self,
        changes: Sequence[tf.Tensor],
        update: Update | None = None,
        grads: Sequence[Any] = (),
        targets: Sequence[Any] = (),
        *,
        wait: bool = False,
    ) -> tuple[Tensors, tf.Tensor]:
        """Sends changes and gradients to the servers.

        Args:
            changes: the changes of the written variables, as `_changes` returns them.
            update: as in `push_pull`.
            grads: as in `push_pull`.
            targets: as in `push_pull`.
            wait: whether the worker does nothing else meanwhile, so that the time counts as waiting.

        Returns:
            The variables' values, and the clock, after the servers' update.
        """
        real, setting = self._real, self._setting
        pushed = [(real[i].device, change) for i, change in zip(self._written, changes, strict=True)]
        with self._on_servers():
            devices = [_device(target) for target in targets]
        hook = setting.strategy.dtrain_managed.layout.gradient_hook
        hooked = [hook is not None and _is_dense_gradient(*pair) for pair in zip(grads, targets, strict=True)]
        sent = [
            hook.compress(tf.convert_to_tensor(grad), target) if through else grad
            for through, grad, target in zip(hooked, grads, targets, strict=True)
        ]
        places = _push_gradients(pushed, sent, devices)
        arrived = setting.exchange.send(pushed)
        for i, (place,) in ((i, at) for i, at in enumerate(places) if hooked[i]):
            with tf.device(devices[i]):
                arrived[place] = tf.cast(hook.decompress(arrived[place], targets[i]), grads[i].dtype)

        def on_servers() -> None:
            with self._on_servers(), setting.strategy.scope(), local_update():
                for number, i in enumerate(self._written):
                    _write(real[i], arrived[number], whole=setting.alone)
                if update is not None:
                    update(
                        [_arrived(at, arrived, target) for at, target in zip(places, targets, strict=True)]
                    )

        values, clock = setting.exchange.update(arrived, on_servers, counts=update is not None)
        if wait:
            begun = time_of([tensor for _, tensor in pushed])
            self.note_waiting(between(begun, time_of([*values, clock])))
        return values, clock

    def _note_staleness(self, read_at: tf.Tensor, clock: tf.Tensor) -> None:
        """Counts the staleness of one update.

        Args:
            read_at: the clock when the update's weights were read, an int64 scalar.
            clock: the clock after the update, an int64 scalar.
        """
        stale = clock - 1 - read_at
        total, most, updates = tf.unstack(self._staleness.read_value())
        self._staleness.refresh(tf.stack([total + stale, tf.maximum(most, stale), updates + 1]))

    def _note_write(self) -> None:
        self._unsent = True

    def _on_servers(self) -> contextlib.AbstractContextManager[None]:
        """A context in which Keras variables are the servers' variables instead of the local copies."""
        return variables_replaced(self._setting.plan.pulled, self._real)


def update_by(original: Apply, optimizer: Any, targets: list[Any]) -> Update:
    """Wraps an optimizer's own `apply` as a function of the gradients that have arrived on the servers."""

    def update(arrived: list[Any]) -> None:
        with updating(optimizer):
            original(optimizer, arrived, targets)

    return update


def adds_up(value: tf.Tensor) -> bool:
    """Whether the servers sum several workers' changes to a value of this dtype; else the last write wins."""
    return value.dtype not in (tf.bool, tf.string)


def _device(target: Any) -> str:
    tf_variable = underlying(target)
    device: str = (tf_variable.real if isinstance(tf_variable, LocalVariable) else tf_variable).device
    return device


def _change(value: tf.Tensor, base: tf.Tensor) -> tf.Tensor:
    """The change of a variable since `base`, which servers add; the value if it cannot be added."""
    return value - base if adds_up(value) else value


def _write(variable: Any, value: tf.Tensor, *, whole: bool) -> None:
    if whole or not adds_up(value):
        variable.assign(value)
    else:
        variable.assign_add(value)


def _is_dense_gradient(grad: Any, target: Any) -> bool:
    """Whether a value is a dense gradient; counters and loss scales, sent with the gradients, are not."""
    return grad is not None and not isinstance(grad, tf.IndexedSlices) and bool(target.trainable)


def _push_gradients(
    pushed: list[tuple[str, tf.Tensor]], grads: Sequence[Any], devices: Sequence[str]
) -> list[tuple[int, ...]]:
    """Appends the gradients' tensors to `pushed`.

    Returns:
        The positions in `pushed` of each gradient's tensors: (), (dense,) or (values, indices).
    """
    places: list[tuple[int, ...]] = []
    for grad, device in zip(grads, devices, strict=True):
        parts: list[Any] = [] if grad is None else [grad]
        if isinstance(grad, tf.IndexedSlices):
            parts = [grad.values, grad.indices]
        places.append(tuple(range(len(pushed), len(pushed) + len(parts))))
        pushed.extend((device, tf.convert_to_tensor(part)) for part in parts)
    return places


def _arrived(place: tuple[int, ...], arrived: list[Any], target: Any) -> Any:
    if not place:
        return None
    if len(place) == 1:
        return arrived[place[0]]
    indices = arrived[place[1]]
    return tf.IndexedSlices(arrived[place[0]], indices, tf.constant(list(target.shape), indices.dtype))
