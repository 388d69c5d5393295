"""One step as a worker computes it: the user's own `train_step`, on stand-ins, with updates on the servers.

`optimizer.apply` is where the step meets the servers; what else it wrote goes with that message, or with
one of its own at the step's end.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from dtrain.keras_engine.asynchronous.accumulator import Accumulator
from dtrain.keras_engine.asynchronous.exchange import Exchange
from dtrain.keras_engine.asynchronous.stand_in import StandIn, standing_in
from dtrain.keras_engine.asynchronous.updates import updating
from dtrain.keras_engine.context import local_update, underlying
from dtrain.upstream import keras as upstream_keras

_local = threading.local()

Apply = Callable[..., Any]


def current_block() -> Block | Rehearsal | None:
    """The block, or the rehearsal of one, that is being traced in this thread."""
    return getattr(_local, "block", None)


@contextlib.contextmanager
def tracing(block: Block | Rehearsal) -> Iterator[None]:
    """Makes `optimizer.apply` go through a block."""
    outer = current_block()
    _local.block = block
    try:
        yield
    finally:
        _local.block = outer


class Rehearsal:
    """A step traced once for what it does, not for what it computes.

    Attributes:
        optimizers: those whose `apply` it calls.
        written: the variables that it writes to, by id.
        used: the variables that it reads or writes, by id.
    """

    def __init__(self, build: Callable[[Any, Sequence[Any]], None]) -> None:
        self._build = build
        self.optimizers: list[Any] = []
        self.written: set[int] = set()
        self.used: set[int] = set()

    def apply(self, original: Apply, optimizer: Any, grads: Sequence[Any], variables: Any) -> None:
        """Takes note of an optimizer."""
        self._build(optimizer, variables)
        if all(optimizer is not known for known in self.optimizers):
            self.optimizers.append(optimizer)


class Block:
    """The part of a block that its steps share; lives while the block is traced.

    Args:
        exchange: of the variables that stand on servers.
        variables: those variables, in the exchange's order.
        stand_ins: what stands for each on the worker.
        strategy: the parameter-server strategy.
        alone: whether no other worker writes between.
        written: numbers of the variables that steps write to.
        clock: the servers' clock as it was read.
        number: the block's number in its epoch, int32 scalar.
        accumulators: for optimizers that add up micro-batches on the worker.

    Attributes:
        staleness: updates of other workers between this worker's reads and writes: their sum, the most of
            one step, and over how many steps; int64 of shape (3,).
    """

    def __init__(
        self,
        *,
        exchange: Exchange,
        variables: Sequence[Any],
        stand_ins: Sequence[StandIn],
        strategy: Any,
        alone: bool,
        written: set[int],
        clock: tf.Tensor,
        number: tf.Tensor,
        accumulators: Sequence[Accumulator] = (),
    ) -> None:
        self._exchange = exchange
        self._variables = list(variables)
        self._real = [underlying(v) for v in variables]
        self._stand_ins = list(stand_ins)
        self._strategy = strategy
        self._alone = alone
        self._written = sorted(written)
        self._base = {} if alone else {i: StandIn(self._stand_ins[i].read_value()) for i in self._written}
        self._clock = StandIn(clock, name="clock")
        self.staleness = StandIn(tf.zeros([3], tf.int64), name="staleness")
        self._unsent = False
        self._met = False
        self._graph: Any = None
        for i in self._written:
            self._stand_ins[i].on_write = self._note_write
        self._accumulators = list(accumulators)
        # Workers draw from one seed at the same time: the number makes what they draw different.
        self.mixed_into_seeds = None if alone else number

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Around one step: what it wrote and did not send is sent at its end."""
        self._unsent = self._met = False
        self._graph = tf.compat.v1.get_default_graph()
        with tracing(self):
            yield
        if self._unsent or not self._met:
            self.meet()

    def apply(self, original: Apply, optimizer: Any, grads: Sequence[Any], variables: Any) -> None:
        """What `optimizer.apply` does in a step."""
        targets = (
            list(variables) if variables is not None else upstream_keras.trainable_variables_of(optimizer)
        )
        for accumulator in self._accumulators:
            if accumulator.optimizer is optimizer:
                accumulator.add(self, original, list(grads), targets)
                self._met = True
                return

        def update(arrived: list[Any]) -> None:
            with updating(optimizer):
                original(optimizer, arrived, targets)

        self.meet(update, list(grads), targets)

    def end(self) -> None:
        """What is left to do after the last step."""
        for accumulator in self._accumulators:
            accumulator.end(self)

    def destroy(self) -> None:
        """Frees what the block made."""
        held = [self._clock, self.staleness, *self._base.values()]
        for each in held:
            each.destroy()
        for accumulator in self._accumulators:
            accumulator.destroy()

    def meet(
        self,
        update: Callable[[list[Any]], Any] | None = None,
        grads: Sequence[Any] = (),
        targets: Sequence[Any] = (),
    ) -> None:
        """Sends gradients and what was written, has the servers update, and takes their new values.

        Args:
            update: called on the servers with the gradients that arrived; None: nothing but the writes.
            grads: tensors, `tf.IndexedSlices` or None, by variable.
            targets: the variables that the gradients belong to.
        """
        pushed: list[tuple[str, tf.Tensor]] = []
        real = self._real
        for i in self._written:
            value = self._stand_ins[i].read_value()
            if not self._alone:
                value = _change(value, self._base[i].read_value())
            pushed.append((real[i].device, value))
        with self._on_servers():
            devices = [_device(target) for target in targets]
        places = _push_gradients(pushed, grads, devices)

        def on_servers(arrived: list[Any]) -> None:
            for number, i in enumerate(self._written):
                _write(real[i], arrived[number], whole=self._alone)
            if update is not None:
                update(
                    [_arrived(place, arrived, target) for place, target in zip(places, targets, strict=True)]
                )

        def guarded(arrived: list[Any]) -> None:
            with self._on_servers(), self._strategy.scope(), local_update():
                on_servers(arrived)

        values, clock = self._exchange.update(pushed, guarded, counts=update is not None)
        for i, value in enumerate(values):
            self._stand_ins[i].refresh(value)
            if i in self._base:
                self._base[i].refresh(value)
        if update is not None:
            stale = clock - 1 - self._clock.read_value()
            total, most, updates = tf.unstack(self.staleness.read_value())
            self.staleness.refresh(tf.stack([total + stale, tf.maximum(most, stale), updates + 1]))
        self._clock.refresh(clock)
        if tf.compat.v1.get_default_graph() is self._graph:
            self._met, self._unsent = True, False

    def _note_write(self) -> None:
        self._unsent = True

    def _on_servers(self) -> contextlib.AbstractContextManager[None]:
        """Variables are the servers' own again."""
        return standing_in(self._variables, self._real)


def _device(target: Any) -> str:
    found = underlying(target)
    device: str = (found.real if isinstance(found, StandIn) else found).device
    return device


def _change(value: tf.Tensor, base: tf.Tensor) -> tf.Tensor:
    """What a worker's step adds to a variable, so that several workers' steps add up."""
    return value if value.dtype in (tf.bool, tf.string) else value - base


def _write(variable: Any, value: tf.Tensor, *, whole: bool) -> None:
    if whole or value.dtype in (tf.bool, tf.string):
        variable.assign(value)
    else:
        variable.assign_add(value)


def _push_gradients(
    pushed: list[tuple[str, tf.Tensor]], grads: Sequence[Any], devices: Sequence[str]
) -> list[tuple[int, ...]]:
    """Adds gradients to what is pushed; says where each of them is: (), (dense,) or (values, indices)."""
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
