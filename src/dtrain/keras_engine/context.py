"""What a replica knows while it computes a step: its share of the batch, and what it has done so far.

The rule of a step under `fit`: a replica computes as if its examples were the whole batch, and whatever
leaves it is combined by shares (its examples over all examples). It is not a place for model code.
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
    """A point of a step where the replicas are combined: a call of `tape.gradient`, or a value.

    Attributes:
        weight: what this replica is weighted by, so that the sum over replicas is the whole batch's.
        rows: whether the replicas' rows are put together rather than numbers combined.
        known: whether a trial (`probe.py`) has found out what stands there.
    """

    weight: Any
    rows: bool = False
    known: bool = False


class Kind(Protocol):
    """What a trial has found at one point (`probe.LossKind`)."""

    @property
    def rows(self) -> bool:
        """Whether it has a row for each example."""

    def weight(self, share: Any) -> Any:
        """What a replica is weighted by."""


@dataclass(frozen=True)
class Learnt:
    """What trials have found out of a user's own step and losses.

    Attributes:
        kinds: what stands at each point where the replicas are combined; () where each goes by its share.
        summed_losses: which of the losses that layers add are sums over the batch.
        coupled_losses: ids of the losses in which examples depend on each other.
    """

    kinds: Sequence[Kind] = ()
    summed_losses: frozenset[int] = frozenset()
    coupled_losses: frozenset[int] = frozenset()


class ReplicaStep(abc.ABC):
    """One replica's part of one step; a class for each way to treat the gradients, chosen before tracing.

    Args:
        layout: how the replicas are spread.
        size: examples in this replica's part, int32 scalar; may be 0.
        total: examples of all replicas.
        training: whether gradients are computed.
        learnt: what is known of a user's own step.
        waits: where the waiting for other replicas is noted.

    Attributes:
        share: size over the examples of all replicas, float32 scalar.
        sees_everything: whether values are computed from all replicas' examples now.
        reduced: ids of the variables whose gradients are the whole batch's already.
        assigned: variables that this step has written to, by id.
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
    def whole_gradients(self, gradients: list[Any], target: Any) -> list[Any]:
        """What a step is to see of gradients that its tape gives.

        Args:
            gradients: of variables, each by this replica's weight; tensors, `tf.IndexedSlices` or None.
            target: what was differentiated.
        """

    @abc.abstractmethod
    def gradients_to_apply(self, optimizer: Any, gradients: list[Any], variables: list[Any]) -> Any:
        """What an optimizer is to apply of the gradients that it is given; None where it is to do nothing.

        Args:
            optimizer: it is built.
            gradients: tensors, `tf.IndexedSlices` or None.
            variables: what they are of.
        """

    updates_weights = True
    """Whether what an optimizer applies changes weights."""

    def next_point(self) -> Point:
        """The next point where the replicas are combined."""
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
        """One value a step, such as a loss, for all replicas: a mean, a sum or rows, as a trial has found.

        Args:
            value: numbers, this replica's; mostly a scalar.
            name: what it is called in messages.
            rows: whether it has a row for each example, where no trial has found out; None goes by its shape.
            gather: puts rows together; None is `gather_examples`.
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
        """One number a step, as a mean over this replica's examples: such parts, by shares, make the whole.

        Args:
            value: a float scalar, this replica's.
        """
        point = self.next_point()
        if point.known:
            return self.per_share(tf.math.multiply_no_nan(value, tf.cast(point.weight, value.dtype)))
        return value if self.never_empty() else tf.where(self.size > 0, value, tf.zeros_like(value))

    def mark_whole(self, values: Any) -> None:
        """Says of a nest of tensors that they are the same on every replica already."""
        self._whole.extend(tf.nest.flatten(values))

    @contextlib.contextmanager
    def seeing_everything(self) -> Iterator[None]:
        """While a replica computes from all replicas' examples, its values are whole."""
        outer, self.sees_everything = self.sees_everything, True
        try:
            yield
        finally:
            self.sees_everything = outer

    def additional_loss(self, value: Any) -> Any:
        """A loss that a layer added: a sum over the batch must count in full, a mean by its share."""
        return self.per_share(value) if next(self._additional) in self.learnt.summed_losses else value

    def never_empty(self) -> bool:
        """Whether the replica is known to have examples before the step runs."""
        known = tf.get_static_value(self.size)
        return known is not None and int(known) > 0

    def note_write(self, variable: Any) -> None:
        """Takes note of a variable that this replica writes to, of which each replica has a copy."""
        if not updating_locally():
            self.assigned[id(variable)] = variable

    def note_shared_write(self, variable: Any) -> None:
        """As `note_write`, of a variable that exists once: there is nothing to combine."""
        del variable

    def weighted(self, value: Any) -> Any:
        """`value` times the share; 0, not NaN, where the replica has no examples."""
        value = tf.convert_to_tensor(value)
        return tf.math.multiply_no_nan(value, tf.cast(self.share, value.dtype))

    def per_share(self, value: Any) -> Any:
        """`value` over the share: what becomes `value` again when shares are applied."""
        value = tf.convert_to_tensor(value)
        return tf.math.divide_no_nan(value, tf.cast(self.share, value.dtype))

    def mean(self, values: Any) -> Any:
        """The mean over all replicas, by shares, of a nest of float tensors; the same on every replica."""
        return self.sum(tf.nest.map_structure(self.weighted, values))

    def sum(self, values: Any) -> Any:
        """The sum over all replicas of a nest of tensors, the same on every replica."""
        return _all_reduced(values, self.waits)

    def gather(self, value: Any) -> Any:
        """The rows of all replicas of a tensor, ragged or sparse tensor, in the replicas' order."""
        return _gathered(value, self.waits)


class TrialStep(ReplicaStep):
    """A single replica tries a step out, to learn what its losses are: it talks to nobody.

    Attributes:
        taken: what stood at each point where the replicas are combined.
        names: what each of these points is called in messages.
        equal_everywhere: operations whose results are the same on all replicas.
    """

    def __init__(self, layout: ReplicaLayout, **known: Any) -> None:
        super().__init__(layout, **known)
        self.taken: list[list[Any]] = []
        self.names: list[str] = []
        self.equal_everywhere: set[Any] = set()

    def next_point(self) -> Point:
        """As it stands: what is noted must not be weighted."""
        return Point(tf.ones([], tf.float32))

    def whole_gradients(self, gradients: list[Any], target: Any) -> list[Any]:
        """The gradients, noted."""
        found: list[Any] = self._noted(gradients, "a loss that train_step differentiates")
        return found

    def gradients_to_apply(self, optimizer: Any, gradients: list[Any], variables: list[Any]) -> None:
        """Nothing: a trial keeps no change."""

    def whole_value(
        self,
        value: Any,
        name: str = "a number that train_step reports",
        *,
        rows: bool | None = None,
        gather: Callable[[Any], Any] | None = None,
    ) -> Any:
        """The value, noted."""
        if any(value is known for known in self._whole):
            return value
        return self._noted([value], name)[0]

    def part_of_value(self, value: Any) -> Any:
        """The value, noted."""
        self.taken.append([value])
        self.names.append("a number that a metric takes")
        return value

    def note_write(self, variable: Any) -> None:
        """As of every step, in an update too."""
        self.assigned[id(variable)] = variable

    note_shared_write = note_write

    def sum(self, values: Any) -> Any:
        """The values: in a trial there is one replica."""
        return self.common(values)

    def gather(self, value: Any) -> Any:
        """The rows: in a trial there is one replica."""
        return self.common(value)

    def common(self, values: Any) -> Any:
        """Values that all replicas would have in common, such as a sum over them."""

        def one(value: Any) -> Any:
            if value is None:
                return None
            found = tf.identity(value)
            leaves = tf.nest.flatten(found, expand_composites=True)
            self.equal_everywhere.update(leaf.op for leaf in leaves if not hasattr(leaf, "numpy"))
            return found

        return tf.nest.map_structure(one, values)

    def _noted(self, values: list[Any], name: str) -> Any:
        self.taken.append(values)
        self.names.append(name)
        return self.common(values)


def check_not_compiled() -> None:
    """Refuses to talk to other replicas inside a function that XLA compiles.

    Raises:
        CompilationError: saying what to compile instead.
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
    """What a function of floats gives for a tensor of any numbers, in the tensor's own type."""
    if value.dtype.is_floating:
        return function(value)
    return tf.cast(tf.round(function(tf.cast(value, tf.float64))), value.dtype)


def all_reduce_sum(values: Any) -> Any:
    """The sum over all replicas of a nest of tensors and `tf.IndexedSlices`, one packed reduction a dtype.

    Raises:
        CompilationError: inside a function that XLA compiles.
        RuntimeError: inside a nested tf.function, `cond` or loop, where replicas cannot be joined.
    """
    step = current_step()
    return _all_reduced(values, _NO_WAITS) if step is None else step.sum(values)


def _all_reduced(values: Any, waits: Waits | NoWaits) -> Any:
    check_not_compiled()
    # A reduction goes to the device of its values; a plain read of a variable names none.
    flat = [tf.identity(value) for value in tf.nest.flatten(values)]
    if not flat:
        return values
    context = tf.distribute.get_replica_context()
    begun = waits.begin(flat)
    reduced: dict[int, Any] = {}
    kinds = [(type(value), value.dtype) for value in flat]
    for kind in dict.fromkeys(kinds):
        alike = [i for i, other in enumerate(kinds) if other == kind]
        # MirroredStrategy takes integers of 32 bits one at a time.
        narrow = kind[1] == tf.int32 and not issubclass(kind[0], tf.IndexedSlices)
        given = [tf.cast(flat[i], tf.int64) if narrow else flat[i] for i in alike]
        totals = context.all_reduce(tf.distribute.ReduceOp.SUM, given)
        totals = [tf.cast(total, tf.int32) for total in totals] if narrow else totals
        reduced.update(zip(alike, totals, strict=True))
    waits.end(begun, [*reduced.values()])
    return tf.nest.pack_sequence_as(values, [reduced[i] for i in range(len(flat))])


def gather_examples(value: Any) -> Any:
    """Puts the rows of all replicas together, in the replicas' order; gradients flow to own rows only.

    Args:
        value: a tensor, ragged or sparse tensor of shape (own examples, ...), or None.

    Returns:
        The same kind of tensor, of shape (all examples, ...).
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
    """As `gather_examples`."""
    counts = gather_examples(tf.reshape(value.dense_shape[0], [1]))
    before = tf.reduce_sum(counts[: tf.distribute.get_replica_context().replica_id_in_sync_group])
    indices = value.indices + tf.pad(tf.reshape(before, [1, 1]), [[0, 0], [0, value.shape.rank - 1]])
    shape = tf.concat([[tf.reduce_sum(counts)], value.dense_shape[1:]], axis=0)
    whole = tf.SparseTensor(gather_examples(indices), gather_examples(value.values), shape)
    whole.set_shape([None, *value.shape[1:]])
    return whole


current_step: ThreadValue[ReplicaStep | None] = ThreadValue(None)
"""The step that this replica computes now; None outside of `fit`, `evaluate` and `predict`."""

updating_locally = ThreadValue(False)
"""Whether the code runs after the reduction, where each replica is a single device."""


def local_update() -> contextlib.AbstractContextManager[bool]:
    """Marks code that must not talk to other replicas: every one of them does the same."""
    return updating_locally.set(True)


class _ReplicaCount:
    """The number of replicas that the code in this thread is given.

    Attributes:
        number: so many; None for the true number.
        asked: whether it has asked.
    """

    def __init__(self, number: int | None) -> None:
        self.number = number
        self.asked = False


_reported: ThreadValue[_ReplicaCount | None] = ThreadValue(None)


def reporting_replicas(number: int | None) -> contextlib.AbstractContextManager[_ReplicaCount | None]:
    """While it is entered, notes whether `num_replicas_in_sync` is asked for, and answers with a number.

    Args:
        number: what it answers; None for the truth.
    """
    return _reported.set(_ReplicaCount(number))


def reported_replicas(number: int) -> int:
    """What `num_replicas_in_sync` answers where there are so many replicas."""
    reported = _reported()
    if reported is None:
        return number
    reported.asked = True
    return number if reported.number is None else reported.number


def variable_ids(variables: Sequence[Any]) -> set[int]:
    """Identities of variables that hold for the Keras object and the TensorFlow one alike."""
    return {id(underlying(v)) for v in variables}


def underlying(variable: Any) -> Any:
    """The TensorFlow variable behind a Keras one or behind one replica's component of it."""
    if isinstance(variable, tf.distribute.DistributedValues):
        return variable
    value = upstream_keras.value_of(variable)
    # One whose parts are summed up answers a question for what it has not by a talk between all workers.
    if isinstance(value, tf.distribute.DistributedValues):
        return value
    if getattr(value, "is_sharded_variable", False) is True:
        return value
    found = value if isinstance(value, tf.Variable) else variable
    if isinstance(found, tf.distribute.DistributedValues) or not isinstance(found, tf.Variable):
        return found
    return upstream_tf.container_of(found)
