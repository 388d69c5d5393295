"""The state of one replica during a step, and the ways in which replicas combine their values.

The rule of a step under `fit`: a replica computes as if its examples were the whole batch. Every value that
leaves it is weighted by its share, which is its number of examples over that of all replicas. No model code
belongs here.
"""

from __future__ import annotations

import abc
import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import tensorflow as tf

from dtrain.keras_engine.protocol import ReplicaLayout
from dtrain.keras_engine.reductions import NoWaits, Waits, all_reduced, as_floats, gathered_rows
from dtrain.keras_engine.rows import map_leaves
from dtrain.upstream import layer_calls
from dtrain.upstream.tensorflow import underlying

Value = TypeVar("Value")
_NO_WAITS = NoWaits()


class ThreadValue(Generic[Value]):
    """A thread-local value; calling the object returns it.

    Args:
        default: the value outside of `set`.
    """

    def __init__(self, default: Value) -> None:
        self._default = default
        self._local = threading.local()

    def __call__(self) -> Value:
        """The value in this thread."""
        found: Value = getattr(self._local, "value", self._default)
        return found

    @contextlib.contextmanager
    def set(self, value: Value) -> Iterator[Value]:
        """A context in which this thread has another value; at its end, the previous value is restored."""
        outer = self()
        self._local.value = value
        try:
            yield value
        finally:
            self._local.value = outer


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
class TrialResults:
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
        trial_results: what is known about a user's own step.
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
        trial_results: TrialResults = TrialResults(),
        waits: Waits | NoWaits = _NO_WAITS,
    ) -> None:
        self.layout = layout
        self.training = training
        self.size = size
        self.share = tf.math.divide_no_nan(tf.cast(size, tf.float32), tf.cast(total, tf.float32))
        self.trial_results = trial_results
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

    def note_point(self, values: list[Any], name: str) -> None:
        """Called with the values that the replicas combine at a point; only a trial keeps them."""
        del values, name

    def next_point(self) -> Point:
        """Moves on to the next point where the replicas are combined, and returns it."""
        number = next(self._points)
        if number >= len(self.trial_results.kinds):
            return Point(self.share)
        kind = self.trial_results.kinds[number]
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
        self.note_point([value], name)
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
        self.note_point([value], "a number that a metric takes")
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

    def of_all_examples(self, function: Callable[..., Any], arguments: Any) -> Any:
        """What a function computes from its arguments' rows on all replicas; the same on each."""
        with self.seeing_everything():
            return function(*map_leaves(gathered, arguments))

    def loss_of_all(self, loss: Any) -> Any:
        """A loss of all examples; its gradient, which flows to this replica's rows only, counts in full."""
        fixed = tf.stop_gradient(loss)
        return fixed + self.per_share(loss - fixed)

    def additional_loss(self, value: Any) -> Any:
        """Corrects a loss that a layer added for the later weighting by the share.

        A mean over the examples needs no correction. A sum is divided by the share, to count in full.
        """
        return self.per_share(value) if next(self._additional) in self.trial_results.summed_losses else value

    def never_empty(self) -> bool:
        """Whether it is known while tracing that the replica has examples."""
        return int(tf.get_static_value(self.size) or 0) > 0

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
        return all_reduced(values, self.waits)

    def gather(self, value: Any) -> Any:
        """Concatenates the rows of all replicas, in the replicas' order; dense, ragged or sparse."""
        return gathered_rows(value, self.waits)


def all_reduce_sum(values: Any) -> Any:
    """All-reduces a nest of tensors and `tf.IndexedSlices` to their sums over all replicas.

    All tensors of one dtype go into one all-reduce. Must be called in a replica.

    Raises:
        CompilationError: inside a function that XLA compiles.
        RuntimeError: inside a nested tf.function, `cond` or loop, where TensorFlow cannot combine replicas.
    """
    step = current_step()
    return all_reduced(values, _NO_WAITS) if step is None else step.sum(values)


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
    return gathered_rows(value, _NO_WAITS) if step is None else step.gather(value)


def gathered(leaf: Any) -> Any:
    """The rows of a tensor on all replicas, concatenated, and its Keras mask likewise."""
    found = gather_examples(leaf)
    mask = None if leaf is None else layer_calls.mask_of(leaf)
    if mask is not None and found is not leaf:
        layer_calls.set_mask(found, tf.cast(gather_examples(tf.cast(mask, tf.int32)), tf.bool))
    return found


current_step: ThreadValue[ReplicaStep | None] = ThreadValue(None)
"""The step that this thread's replica computes now; None outside of a train or test step."""

single_program = ThreadValue(False)
"""Whether the code is traced as the program of one device, which is partitioned afterwards."""

updating_locally = ThreadValue(False)
"""Whether the code runs after the all-reduce, where each replica acts like a single device."""


def local_update() -> contextlib.AbstractContextManager[bool]:
    """Marks code that must not communicate with other replicas, because each of them does the same."""
    return updating_locally.set(True)


Apply = Callable[..., Any]
"""Keras' own `optimizer.apply`."""


class TracedBlock(Protocol):
    """What a thread traces for parameter servers: a block of steps, or a step to plan one.

    Attributes:
        mixed_into_seeds: an int64 scalar that is mixed into the seeds of random layers; None to leave them.
    """

    @property
    def mixed_into_seeds(self) -> tf.Tensor | None:  # noqa: D102
        ...

    def apply(self, original: Apply, optimizer: Any, grads: Sequence[Any], variables: Any) -> None:
        """Replaces `optimizer.apply` in a step; `original` is Keras' own `apply`."""


current_block: ThreadValue[TracedBlock | None] = ThreadValue(None)
"""The block whose train step this thread is tracing, or the planner of its step; None if there is none."""

block_workers = ThreadValue(0)
"""The workers that run the block, of any kind, which this thread is tracing; 0 outside of a block."""


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
    """Within it, `num_replicas_in_sync` gives `number`, or the true one for None; `asked` notes reads."""
    return _reported.set(_ReplicaCount(number))


def reported_replicas(number: int) -> int:
    """What `num_replicas_in_sync` gives: 1 in a single program. `number` is the true number of replicas."""
    reported = _reported()
    if reported is None:
        return 1 if single_program() else number
    reported.asked = True
    return number if reported.number is None else reported.number


def variable_ids(variables: Sequence[Any]) -> set[int]:
    """The ids of variables; a Keras variable and the TensorFlow variable behind it have the same id."""
    return {id(underlying(v)) for v in variables}
