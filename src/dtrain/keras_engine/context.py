"""What a replica knows while it computes a step: its share of the batch, and what it has done so far.

The rule of a step under `fit`: a replica computes as if its examples were the whole batch, and whatever
leaves it is combined by shares (its examples over all examples). It is not a place for model code.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from dtrain.errors import CompilationError
from dtrain.keras_engine.protocol import ReplicaLayout
from dtrain.keras_engine.waits import Waits
from dtrain.upstream import keras as upstream_keras
from dtrain.upstream import tensorflow as upstream_tf

_local = threading.local()


class ReplicaStep:
    """One replica's part of one step.

    Attributes:
        layout: how the replicas are spread.
        training: whether gradients are computed.
        size: examples in this replica's part, int32 scalar; may be 0.
        share: size over the examples of all replicas, float32 scalar.
        compiled: whether the step is being compiled by XLA, which knows no collectives.
        probing: whether a single replica tries the step out, to learn what its losses are (`probe.py`).
        phase: what the step is among the micro-batches of an update, if replicas sum these up for themselves
            (`accumulation.py`); None where gradients are reduced at once.
        weights: for each point where the replicas are combined (a call of `tape.gradient`, a number that a
            metric or the logs take), what this replica is weighted by; None for the share.
        rows_at: which of these points gather the replicas' rows rather than combine numbers.
        taken: while probing, what stood at each of these points.
        names: while probing, what each of these points is called in messages.
        coupled_losses: ids of the losses in which examples depend on each other.
        summed_losses: which of the losses that layers add are sums over the batch.
        sees_everything: whether values are computed from all replicas' examples now.
        captured: when compiled, what `optimizer.apply` was called with.
        reduced: ids of the variables whose gradients are the whole batch's already.
        assigned: variables that this step has written to, by id.
        equal_everywhere: while probing, operations whose results are the same on all replicas.
        waits: where the waiting for other replicas is noted, if somebody wants to know.
    """

    def __init__(
        self,
        layout: ReplicaLayout,
        *,
        size: Any,
        total: Any,
        training: bool,
        compiled: bool = False,
        probing: bool = False,
        phase: str | None = None,
        waits: Waits | None = None,
    ) -> None:
        self.layout = layout
        self.waits = waits
        self.training = training
        self.size = size
        self.share = tf.math.divide_no_nan(tf.cast(size, tf.float32), tf.cast(total, tf.float32))
        self.compiled = compiled
        self.probing = probing
        self.phase = phase
        self.weights: list[Any] | None = None
        self.rows_at: frozenset[int] = frozenset()
        self.coupled_losses: frozenset[int] = frozenset()
        self.summed_losses: frozenset[int] = frozenset()
        self.sees_everything = False
        self._points = 0
        self._additional = 0
        self._whole: list[Any] = []
        self.taken: list[list[Any]] = []
        self.names: list[str] = []
        self.equal_everywhere: set[Any] = set()
        self.captured: list[tuple[Any, list[Any], list[Any]]] = []
        self.reduced: set[int] = set()
        self.assigned: dict[int, Any] = {}

    def next_weight(self) -> Any:
        """What the replica's next loss is weighted by, so that the sum over replicas is the whole's."""
        number = self._points
        self._points += 1
        if self.probing:
            return tf.ones([], tf.float32)
        if self.weights is None or number >= len(self.weights):
            return self.share
        return self.weights[number]

    def whole_value(self, value: Any, name: str = "a number that train_step reports") -> Any:
        """One value a step, such as a loss, for all replicas: a mean, a sum or rows, as `probe.py` found.

        Args:
            value: a float tensor, this replica's; mostly a scalar.
            name: what it is called in messages.
        """
        if any(value is known for known in self._whole):
            return value
        number = self._points
        weight = tf.cast(self.next_weight(), value.dtype)
        if self.probing:
            self.note([value], name)
            return self.common(value)
        if number in self.rows_at or (self.weights is None and value.shape.rank and value.shape[0] is None):
            return gather_examples(value)
        return self.sum(tf.math.multiply_no_nan(value, weight))

    def note(self, values: list[Any], name: str) -> None:
        """While probing: what stands at a point where the replicas are combined."""
        self.taken.append(values)
        self.names.append(name)

    def common(self, values: Any) -> Any:
        """While probing: values that all replicas would have in common, such as a sum over them."""

        def one(value: Any) -> Any:
            if value is None:
                return None
            found = tf.identity(value)
            leaves = tf.nest.flatten(found, expand_composites=True)
            self.equal_everywhere.update(leaf.op for leaf in leaves if not hasattr(leaf, "numpy"))
            return found

        return tf.nest.map_structure(one, values)

    def whole_argument(self, value: Any, name: str, gather: Callable[[Any], Any], *, rows: bool) -> Any:
        """What a metric of the user's is given, for all replicas: rows, or numbers as `whole_value` has them.

        Args:
            value: a tensor, this replica's.
            name: what it is called in messages.
            gather: puts rows together.
            rows: whether it has rows, where `probe.py` has not found out.
        """
        if any(value is known for known in self._whole):
            return value
        number = self._points
        weight = self.next_weight()
        if self.probing:
            self.note([tf.cast(value, tf.float64)], name)
            return self.common(value)
        known = self.weights is not None and number < len(self.weights)
        if number in self.rows_at or (rows and not known):
            return gather(value)
        if value.dtype.is_floating:
            return self.sum(tf.math.multiply_no_nan(value, tf.cast(weight, value.dtype)))
        whole = self.sum(tf.math.multiply_no_nan(tf.cast(value, tf.float64), tf.cast(weight, tf.float64)))
        return tf.cast(tf.round(whole), value.dtype)

    def part_of_value(self, value: Any) -> Any:
        """One number a step, as a mean over this replica's examples: such parts, by shares, make the whole.

        Args:
            value: a float scalar, this replica's.
        """
        weight = tf.cast(self.next_weight(), value.dtype)
        if self.probing:
            self.note([value], "a number that a metric takes")
            return value
        if self.weights is None:
            return value if self.never_empty() else tf.where(self.size > 0, value, tf.zeros_like(value))
        return self.per_share(tf.math.multiply_no_nan(value, weight))

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
        number = self._additional
        self._additional += 1
        return self.per_share(value) if number in self.summed_losses else value

    def never_empty(self) -> bool:
        """Whether the replica is known to have examples before the step runs."""
        known = tf.get_static_value(self.size)
        return known is not None and int(known) > 0

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
        return all_reduce_sum(values)


def check_not_compiled(step: ReplicaStep | None) -> None:
    """Refuses to talk to other replicas inside a function that XLA compiles.

    Raises:
        CompilationError: saying what to compile instead.
    """
    if upstream_tf.in_xla_graph() or (step is not None and step.compiled):
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


def all_reduce_sum(values: Any) -> Any:
    """The sum over all replicas of a nest of tensors and `tf.IndexedSlices`, one packed reduction a dtype.

    Raises:
        CompilationError: inside a function that XLA compiles.
        RuntimeError: inside a nested tf.function, `cond` or loop, where replicas cannot be joined.
    """
    step = current_step()
    if step is not None and step.probing:
        return step.common(values)
    check_not_compiled(step)
    # A reduction goes to the device of its values; a plain read of a variable names none.
    flat = [tf.identity(value) for value in tf.nest.flatten(values)]
    if not flat:
        return values
    context = tf.distribute.get_replica_context()
    waits = None if step is None else step.waits
    begun = None if waits is None else waits.begin(flat)
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
    if waits is not None:
        waits.end(begun, [*reduced.values()])
    return tf.nest.pack_sequence_as(values, [reduced[i] for i in range(len(flat))])


def gather_examples(value: Any) -> Any:
    """Puts the rows of all replicas together, in the replicas' order; gradients flow to own rows only.

    Args:
        value: a tensor, ragged or sparse tensor of shape (own examples, ...).

    Returns:
        The same kind of tensor, of shape (all examples, ...).
    """
    step = current_step()
    if value is None:
        return value
    if step is not None and step.probing:
        return step.common(value)
    if isinstance(value, tf.RaggedTensor):
        lengths = gather_examples(value.row_lengths())
        return tf.RaggedTensor.from_row_lengths(gather_examples(value.values), lengths, validate=False)
    if isinstance(value, tf.SparseTensor):
        return _gather_sparse(value)
    check_not_compiled(step)
    context = tf.distribute.get_replica_context()
    value = tf.convert_to_tensor(value)
    rows = tf.shape(value)[0]
    waits = None if step is None else step.waits
    begun = None if waits is None else waits.begin(value)
    counts = context.all_gather(tf.reshape(rows, [1]), axis=0)
    everyone = tf.stop_gradient(context.all_gather(tf.stop_gradient(value), axis=0))
    if waits is not None:
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


def current_step() -> ReplicaStep | None:
    """The step that this replica computes now; None outside of `fit`, `evaluate` and `predict`."""
    return getattr(_local, "step", None)


@contextlib.contextmanager
def replica_step(step: ReplicaStep) -> Iterator[ReplicaStep]:
    """Makes `step` the current one of this replica's thread."""
    outer = current_step()
    _local.step = step
    try:
        yield step
    finally:
        _local.step = outer


def updating_locally() -> bool:
    """Whether the code runs after the reduction, where each replica is a single device."""
    return bool(getattr(_local, "updating", False))


@contextlib.contextmanager
def local_update() -> Iterator[None]:
    """Marks code that must not talk to other replicas: every one of them does the same."""
    outer = updating_locally()
    _local.updating = True
    try:
        yield
    finally:
        _local.updating = outer


class _Told:
    """How many replicas the code in this thread is told that there are.

    Attributes:
        number: so many; None for the true number.
        asked: whether it has asked.
    """

    def __init__(self, number: int | None) -> None:
        self.number = number
        self.asked = False


@contextlib.contextmanager
def replicas_are(number: int | None) -> Iterator[_Told]:
    """While it is entered, notes whether `num_replicas_in_sync` is asked for, and answers with a number.

    Args:
        number: what it answers; None for the truth.
    """
    outer = getattr(_local, "told", None)
    _local.told = told = _Told(number)
    try:
        yield told
    finally:
        _local.told = outer


def replicas_told(number: int) -> int:
    """What `num_replicas_in_sync` answers where there are so many replicas."""
    told: _Told | None = getattr(_local, "told", None)
    if told is None:
        return number
    told.asked = True
    return number if told.number is None else told.number


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
