"""The state of one replica during a step, and the ways in which replicas combine their values.

The rule of a step under `fit`: a replica computes as if its examples were the whole batch. Every value that
leaves it is weighted by its share, which is its number of examples over that of all replicas. No model code
belongs here.
"""

from __future__ import annotations

import abc
import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import tensorflow as tf

from dtrain.errors import CompilationError
from dtrain.keras_engine.protocol import ReplicaLayout
from dtrain.keras_engine.thread_value import ThreadValue
from dtrain.keras_engine.waits import NoWaits, Waits
from dtrain.upstream import keras as upstream_keras
from dtrain.upstream import tensorflow as upstream_tf

_NO_WAITS = NoWaits()


class Point(NamedTuple):
    """A point of a step where the replicas combine something: the gradients of a tape, or a value.

    Attributes:
        weight: the weight of this replica, with which the sum over the replicas is that of the whole batch.
        rows: whether the rows of the replicas are concatenated; else numbers are summed.
        known: whether a trial (`probe.py`) has found out what is combined there.
    """

    weight: Any
    rows: bool = False
    known: bool = False


class Kind(Protocol):
    """What a trial has found out about one point (`probe.LossKind`)."""

    @property
    def rows(self) -> bool:
        """Whether the value has a row for each example."""

    def weight(self, share: Any) -> Any:
        """The weight of a replica with this share of the examples."""


@dataclass(frozen=True)
class Learnt:
    """What trials have found out about a user's own step and losses.

    Attributes:
        kinds: what is combined at each point, in order; points without one are weighted by the share.
        summed_losses: positions, among the losses that layers add, of those that are sums over the batch.
        coupled_losses: ids of the losses in which an example's loss depends on other examples.
    """

    kinds: Sequence[Kind] = ()
    summed_losses: frozenset[int] = frozenset()
    coupled_losses: frozenset[int] = frozenset()


class ReplicaStep(abc.ABC):
    """One replica's part of one step.

    Each subclass treats the gradients in one way. The subclass is chosen before the step is traced.

    Args:
        layout: how the replicas are spread.
        size: examples in this replica's part, int32 scalar; may be 0.
        total: examples of all replicas, integer scalar.
        training: whether gradients are computed.
        learnt: what is known about a user's own step.
        waits: measures the time spent waiting for other replicas.

    Attributes:
        share: `size` over `total`, float32 scalar; 0 if there are no examples.
        sees_everything: whether values are now computed from the examples of all replicas.
        reduced: `variable_ids` of the variables whose gradients were treated when the tape gave them.
        assigned: variables that this step has written, by id.
    """

    def __init__(
        self,
        layout: ReplicaLayout,
        *,
        size: Any,
        total: Any,
        training: bool,
        learnt: Learnt = Learnt(),
        waits: Waits | NoWaits = _NO_WAITS,
    ) -> None:
        self.layout = layout
        self.training = training
        self.size = size
        self.share = tf.math.divide_no_nan(tf.cast(size, tf.float32), tf.cast(total, tf.float32))
        self.learnt = learnt
        self.waits = waits
        self.sees_everything = False
        self.reduced: set[int] = set()
        self.assigned: dict[int, Any] = {}
        self._points = itertools.count()
        self._additional = itertools.count()
        self._whole: list[Any] = []

    @abc.abstractmethod
    def whole_gradients(self, gradients: list[Any], variables: list[Any], target: Any) -> list[Any]:
        """The gradients that the step sees in place of those that its tape computes.

        Args:
            gradients: with this replica's weight applied; tensors, `tf.IndexedSlices` or None.
            variables: the variable of each gradient.
            target: the value that was differentiated.
        """

    @abc.abstractmethod
    def gradients_to_apply(self, optimizer: Any, gradients: list[Any], variables: list[Any]) -> Any:
        """The gradients that an optimizer applies in place of the given ones; None if it applies nothing.

        Args:
            optimizer: a built optimizer.
            gradients: tensors, `tf.IndexedSlices` or None.
            variables: the variable of each gradient.
        """

    updates_weights = True
    """Whether the optimizer updates the weights in this step; if not, it only accumulates gradients."""

    def next_point(self) -> Point:
        """Moves on to the next point where the replicas are combined, and returns it."""
        number = next(self._points)
        if number >= len(self.learnt.kinds):
            return Point(self.share)
        kind = self.learnt.kinds[number]
        return Point(kind.weight(self.share), kind.rows, known=True)

    def whole_value(
        self,
        value: Any,
        name: str = "a number that train_step reports",
        *,
        rows: bool | None = None,
        gather: Callable[[Any], Any] | None = None,
    ) -> Any:
        """Combines one value per step, such as a loss, over the replicas: as a mean, a sum or joined rows.

        Args:
            value: this replica's value, a tensor of numbers; mostly a scalar.
            name: the value's name in messages.
            rows: whether it has a row for each example, where no trial has found out. None decides by its
                shape: it has rows if the size of its first dimension is unknown.
            gather: concatenates the rows of all replicas; None is `gather_examples`.
        """
        if any(value is known for known in self._whole):
            return value
        point = self.next_point()
        if rows is None:
            rows = bool(value.shape.rank) and value.shape[0] is None
        if point.rows or (rows and not point.known):
            return (gather or gather_examples)(value)
        return as_floats(
            lambda number: self.sum(tf.math.multiply_no_nan(number, tf.cast(point.weight, number.dtype))),
            value,
        )

    def part_of_value(self, value: Any) -> Any:
        """One number per step as this replica's part: the parts, weighted by shares, sum to the whole value.

        Args:
            value: this replica's number, a float scalar.
        """
        point = self.next_point()
        if point.known:
            return self.per_share(tf.math.multiply_no_nan(value, tf.cast(point.weight, value.dtype)))
        return value if self.never_empty() else tf.where(self.size > 0, value, tf.zeros_like(value))

    def mark_whole(self, values: Any) -> None:
        """Notes that a nest's tensors are the same on every replica, so that they are not combined again."""
        self._whole.extend(tf.nest.flatten(values))

    @contextlib.contextmanager
    def seeing_everything(self) -> Iterator[None]:
        """Within it, this replica computes from the examples of all replicas; nothing needs combining."""
        outer, self.sees_everything = self.sees_everything, True
        try:
            yield
        finally:
            self.sees_everything = outer

    def additional_loss(self, value: Any) -> Any:
        """Corrects a loss that a layer added for the later weighting by the share.

        A mean over the examples needs no correction. A sum is divided by the share, to count in full.
        """
        return self.per_share(value) if next(self._additional) in self.learnt.summed_losses else value

    def never_empty(self) -> bool:
        """Whether it is known while tracing that the replica has examples."""
        known = tf.get_static_value(self.size)
        return known is not None and int(known) > 0

    def note_write(self, variable: Any) -> None:
        """Notes that this replica writes a variable of which each replica has a copy; not in an update."""
        if not updating_locally():
            self.assigned[id(variable)] = variable

    def note_shared_write(self, variable: Any) -> None:
        """As `note_write`, for a variable that exists once. Nothing is noted: there is nothing to combine."""
        del variable

    def weighted(self, value: Any) -> Any:
        """`value` times the share; 0, not NaN, if the replica has no examples."""
        value = tf.convert_to_tensor(value)
        return tf.math.multiply_no_nan(value, tf.cast(self.share, value.dtype))

    def per_share(self, value: Any) -> Any:
        """`value` over the share, so that weighting by the share gives `value` again; 0 without examples."""
        value = tf.convert_to_tensor(value)
        return tf.math.divide_no_nan(value, tf.cast(self.share, value.dtype))

    def mean(self, values: Any) -> Any:
        """The mean of a nest of float tensors over all replicas, by shares; the same on each."""
        return self.sum(tf.nest.map_structure(self.weighted, values))

    def sum(self, values: Any) -> Any:
        """The sum over all replicas of a nest of tensors, the same on every replica."""
        return _all_reduced(values, self.waits)

    def gather(self, value: Any) -> Any:
        """Concatenates the rows of all replicas, in the replicas' order; dense, ragged or sparse."""
        return _gathered(value, self.waits)


_written: ThreadValue[set[int] | None] = ThreadValue(None)


def writing() -> contextlib.AbstractContextManager[set[int] | None]:
    """A context that collects the ids of the variables that `note_write` notes outside of a step of `fit`."""
    return _written.set(set())


def note_write(variable: Any) -> None:
    """Notes that this replica writes a variable of which each replica has a copy; not in an update."""
    step, written = current_step(), _written()
    if step is not None:
        step.note_write(variable)
    elif written is not None and not updating_locally():
        written.add(id(variable))


def check_not_compiled() -> None:
    """Must be called before replicas communicate, which they cannot do in a function that XLA compiles.

    Raises:
        CompilationError: this code is in such a function; the hint says what to compile instead.
    """
    if upstream_tf.in_xla_graph():
        raise CompilationError(
            "A function with jit_compile=True needs what the other replicas have: gradients that "
            "optimizer.apply reduces, a loss over the whole batch or synchronized moments. XLA cannot "
            "compile what replicas exchange.",
            hint=(
                "let the function with jit_compile=True only compute the loss and its gradients, and call "
                "optimizer.apply_gradients outside of it, still inside strategy.run; in a train_step "
                "under fit, leave jit_compile out"
            ),
        )


def as_floats(function: Callable[[Any], Any], value: Any) -> Any:
    """Applies a function of floats to a tensor of numbers; integers are rounded back to their own dtype."""
    if value.dtype.is_floating:
        return function(value)
    return tf.cast(tf.round(function(tf.cast(value, tf.float64))), value.dtype)


def all_reduce_sum(values: Any) -> Any:
    """All-reduces a nest of tensors and `tf.IndexedSlices` to their sums over all replicas.

    All tensors of one dtype go into one all-reduce. Must be called in a replica.

    Raises:
        CompilationError: inside a function that XLA compiles.
        RuntimeError: inside a nested tf.function, `cond` or loop, where TensorFlow cannot combine replicas.
    """
    step = current_step()
    return _all_reduced(values, _NO_WAITS) if step is None else step.sum(values)


def _all_reduced(values: Any, waits: Waits | NoWaits) -> Any:
    check_not_compiled()
    # TensorFlow reduces on the device of the values, and a plain read of a variable names no device.
    flat = [tf.identity(value) for value in tf.nest.flatten(values)]
    if not flat:
        return values
    context = tf.distribute.get_replica_context()
    begun = waits.begin(flat)
    reduced: dict[int, Any] = {}
    kinds = [(type(value), value.dtype) for value in flat]
    for kind in dict.fromkeys(kinds):
        alike = [i for i, other in enumerate(kinds) if other == kind]
        # MirroredStrategy would reduce tensors of int32 one at a time.
        narrow = kind[1] == tf.int32 and not issubclass(kind[0], tf.IndexedSlices)
        given = [tf.cast(flat[i], tf.int64) if narrow else flat[i] for i in alike]
        totals = context.all_reduce(tf.distribute.ReduceOp.SUM, given)
        totals = [tf.cast(total, tf.int32) for total in totals] if narrow else totals
        reduced.update(zip(alike, totals, strict=True))
    waits.end(begun, [*reduced.values()])
    return tf.nest.pack_sequence_as(values, [reduced[i] for i in range(len(flat))])


def gather_examples(value: Any) -> Any:
    """Concatenates the rows of all replicas, in the replicas' order.

    Gradients flow to this replica's own rows only. Must be called in a replica.

    Args:
        value: a tensor, ragged or sparse tensor of shape (own examples, ...), or None.

    Returns:
        The same kind of tensor, of shape (all examples, ...); None for None.

    Raises:
        CompilationError: inside a function that XLA compiles.
    """
    if value is None:
        return None
    step = current_step()
    return _gathered(value, _NO_WAITS) if step is None else step.gather(value)


def _gathered(value: Any, waits: Waits | NoWaits) -> Any:
    if isinstance(value, tf.RaggedTensor):
        lengths = gather_examples(value.row_lengths())
        return tf.RaggedTensor.from_row_lengths(gather_examples(value.values), lengths, validate=False)
    if isinstance(value, tf.SparseTensor):
        return _gather_sparse(value)
    check_not_compiled()
    context = tf.distribute.get_replica_context()
    value = tf.convert_to_tensor(value)
    rows = tf.shape(value)[0]
    begun = waits.begin(value)
    counts = context.all_gather(tf.reshape(rows, [1]), axis=0)
    everyone = tf.stop_gradient(context.all_gather(tf.stop_gradient(value), axis=0))
    waits.end(begun, [counts, everyone])
    start = tf.reduce_sum(counts[: context.replica_id_in_sync_group])
    joined = tf.concat([everyone[:start], value, everyone[start + rows :]], axis=0)
    joined.set_shape([None, *value.shape[1:]])
    return joined


def _gather_sparse(value: tf.SparseTensor) -> tf.SparseTensor:
    """As `gather_examples`, for a sparse tensor."""
    counts = gather_examples(tf.reshape(value.dense_shape[0], [1]))
    before = tf.reduce_sum(counts[: tf.distribute.get_replica_context().replica_id_in_sync_group])
    indices = value.indices + tf.pad(tf.reshape(before, [1, 1]), [[0, 0], [0, value.shape.rank - 1]])
    shape = tf.concat([[tf.reduce_sum(counts)], value.dense_shape[1:]], axis=0)
    whole = tf.SparseTensor(gather_examples(indices), gather_examples(value.values), shape)
    whole.set_shape([None, *value.shape[1:]])
    return whole


current_step: ThreadValue[ReplicaStep | None] = ThreadValue(None)
"""The step that this thread's replica computes now; None outside of a train or test step."""

updating_locally = ThreadValue(False)
"""Whether the code runs after the all-reduce, where each replica acts like a single device."""


def local_update() -> contextlib.AbstractContextManager[bool]:
    """Marks code that must not communicate with other replicas, because each of them does the same."""
    return updating_locally.set(True)


class _ReplicaCount:
    """The number of replicas that `num_replicas_in_sync` gives to the code in this thread.

    Attributes:
        number: the number that it gives; None for the true number.
        asked: whether the code has read it.
    """

    def __init__(self, number: int | None) -> None:
        self.number = number
        self.asked = False


_reported: ThreadValue[_ReplicaCount | None] = ThreadValue(None)


def reporting_replicas(number: int | None) -> contextlib.AbstractContextManager[_ReplicaCount | None]:
    """Within it, `num_replicas_in_sync` gives a chosen number, and `asked` tells whether it was read.

    Args:
        number: the number that it gives; None for the true number.
    """
    return _reported.set(_ReplicaCount(number))


def reported_replicas(number: int) -> int:
    """What `num_replicas_in_sync` gives; `number` is the true number of replicas."""
    reported = _reported()
    if reported is None:
        return number
    reported.asked = True
    return number if reported.number is None else reported.number


def variable_ids(variables: Sequence[Any]) -> set[int]:
    """The ids of variables; a Keras variable and the TensorFlow variable behind it have the same id."""
    return {id(underlying(v)) for v in variables}


def underlying(variable: Any) -> Any:
    """The TensorFlow variable behind a Keras variable, or behind one replica's component of it."""
    if isinstance(variable, tf.distribute.DistributedValues):
        return variable
    value = upstream_keras.value_of(variable)
    # Ask it for no attribute: a variable that is summed on reading looks up what it lacks in its value, and
    # reading that value is an all-reduce over all workers.
    if isinstance(value, tf.distribute.DistributedValues):
        return value
    if getattr(value, "is_sharded_variable", False) is True:
        return value
    found = value if isinstance(value, tf.Variable) else variable
    if isinstance(found, tf.distribute.DistributedValues) or not isinstance(found, tf.Variable):
        return found
    return upstream_tf.container_of(found)
