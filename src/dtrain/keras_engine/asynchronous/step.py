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
from dtrain.keras_engine.asynchronous.clocks import between, time_of
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
        applies: how many times it calls them.
        nested: whether it does so inside a condition, a loop or a function of its own.
        written: the variables that it writes to, by id.
        used: the variables that it reads or writes, by id.
    """

    def __init__(self, build: Callable[[Any, Sequence[Any]], None]) -> None:
        self._build = build
        self._graph: Any = None
        self.optimizers: list[Any] = []
        self.applies = 0
        self.nested = False
        self.written: set[int] = set()
        self.used: set[int] = set()

    def traced(self) -> contextlib.AbstractContextManager[None]:
        """Around the step, in the graph that it is traced into."""
        self._graph = tf.compat.v1.get_default_graph()
        return tracing(self)

    def apply(self, original: Apply, optimizer: Any, grads: Sequence[Any], variables: Any) -> None:
        """Takes note of an optimizer."""
        self._build(optimizer, variables)
        self.applies += 1
        self.nested = self.nested or tf.compat.v1.get_default_graph() is not self._graph
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
        waited: seconds that reading took, a float64 scalar.
        number: the block's number in its epoch, int32 scalar.
        accumulators: for optimizers that add up micro-batches on the worker.

    Attributes:
        staleness: updates between this worker's reads and writes: their sum, the most of one step, and over
            how many steps; int64 of shape (3,).
        waited: seconds in which the worker did nothing but wait for the servers, a float64 scalar.
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
        waited: tf.Tensor,
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
        self.waited = StandIn(waited, name="waited")
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
        with self.traced():
            yield
        if self._unsent or not self._met:
            self.meet()

    def traced(self) -> contextlib.AbstractContextManager[None]:
        """Around what a step computes: its optimizer comes here."""
        return tracing(self)

    @staticmethod
    def targets_of(optimizer: Any, variables: Any) -> list[Any]:
        """The variables that `optimizer.apply` is for."""
        return list(variables) if variables is not None else upstream_keras.trainable_variables_of(optimizer)

    def apply(self, original: Apply, optimizer: Any, grads: Sequence[Any], variables: Any) -> None:
        """What `optimizer.apply` does in a step."""
        targets = self.targets_of(optimizer, variables)
        for accumulator in self._accumulators:
            if accumulator.optimizer is optimizer:
                accumulator.add(self, original, list(grads), targets)
                self._met = True
                return
        self.meet(update_by(original, optimizer, targets), list(grads), targets)

    def end(self) -> None:
        """What is left to do after the last step."""
        for accumulator in self._accumulators:
            accumulator.end(self)

    def destroy(self) -> None:
        """Frees what the block made."""
        held = [self._clock, self.staleness, self.waited, *self._base.values()]
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
        values, clock = self._sent(self._changes(), update, grads, targets, wait=True)
        for i, value in enumerate(values):
            self._stand_ins[i].refresh(value)
            if i in self._base:
                self._base[i].refresh(value)
        if update is not None:
            self._note_staleness(self._clock.read_value(), clock)
        self._clock.refresh(clock)
        if tf.compat.v1.get_default_graph() is self._graph:
            self._met, self._unsent = True, False

    def note_waiting(self, seconds: tf.Tensor) -> None:
        """The worker has stood still for so long, a float64 scalar."""
        self.waited.refresh(self.waited.read_value() + seconds)

    def _changes(self) -> list[tf.Tensor]:
        """What steps wrote and did not send, by variable: alone, the values."""
        values = [self._stand_ins[i].read_value() for i in self._written]
        if self._alone:
            return values
        bases = [self._base[i].read_value() for i in self._written]
        return [_change(value, base) for value, base in zip(values, bases, strict=True)]

    def _sent(
        self,
        changes: Sequence[tf.Tensor],
        update: Callable[[list[Any]], Any] | None = None,
        grads: Sequence[Any] = (),
        targets: Sequence[Any] = (),
        *,
        wait: bool = False,
    ) -> tuple[list[tf.Tensor], tf.Tensor]:
        """Sends changes and gradients; the variables' values and the clock after the servers' work.

        Args:
            changes: of the variables that steps write to.
            update: as `meet`'s.
            grads: as `meet`'s.
            targets: as `meet`'s.
            wait: whether nothing else is done meanwhile, so that the time counts.
        """
        real = self._real
        pushed = [(real[i].device, change) for i, change in zip(self._written, changes, strict=True)]
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
        if wait:
            begun = time_of([tensor for _, tensor in pushed])
            self.note_waiting(between(begun, time_of([*values, clock])))
        return values, clock

    def _note_staleness(self, read_at: tf.Tensor, clock: tf.Tensor) -> None:
        """Counts an update: the clock when its weights were read, and after it."""
        stale = clock - 1 - read_at
        total, most, updates = tf.unstack(self.staleness.read_value())
        self.staleness.refresh(tf.stack([total + stale, tf.maximum(most, stale), updates + 1]))

    def _note_write(self) -> None:
        self._unsent = True

    def _on_servers(self) -> contextlib.AbstractContextManager[None]:
        """Variables are the servers' own again."""
        return standing_in(self._variables, self._real)


def update_by(original: Apply, optimizer: Any, targets: list[Any]) -> Callable[[list[Any]], None]:
    """An optimizer's own `apply`, for gradients that have arrived on the servers."""

    def update(arrived: list[Any]) -> None:
        with updating(optimizer):
            original(optimizer, arrived, targets)

    return update


def adds_up(value: tf.Tensor) -> bool:
    """Whether changes of several workers to such a value add up; else the last one holds."""
    return value.dtype not in (tf.bool, tf.string)


def _device(target: Any) -> str:
    found = underlying(target)
    device: str = (found.real if isinstance(found, StandIn) else found).device
    return device


def _change(value: tf.Tensor, base: tf.Tensor) -> tf.Tensor:
    """What a worker's step adds to a variable, so that several workers' steps add up."""
    return value - base if adds_up(value) else value


def _write(variable: Any, value: tf.Tensor, *, whole: bool) -> None:
    if whole or not adds_up(value):
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
