"""Traces a replica's function once, for one replica alone, so that it can be run on different examples.

A trial does not communicate: an all-reduce or a gather returns its input. Variables are created in the
strategy's scope, and their values are restored after each run. What the results mean is not decided here, but
in `probe.py`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf

from dtrain.errors import StepError
from dtrain.keras_engine.context import Point, ReplicaStep, current_step, local_update, reporting_replicas
from dtrain.keras_engine.fixed_draws import example_numbers, fixed_draws
from dtrain.keras_engine.protocol import ReplicaLayout, layout_of
from dtrain.keras_engine.rows import (
    any_rows,
    batch_rows,
    batch_spec,
    joined_rows,
    map_leaves,
    some_rows,
    without_optionals,
)
from dtrain.log import logger
from dtrain.upstream import layer_calls
from dtrain.upstream import tensorflow as upstream_tf

Found = TypeVar("Found")

OF_ALL_ROWS = (
    "compute it from the rows of all replicas, tf.distribute.get_replica_context().all_gather(x, axis=0)."
)
"""The end of a hint."""

_ROWS = 8  # the most examples that a trial takes


class TrialStep(ReplicaStep):
    """A step that a single replica runs as a trial, to find out what its losses are.

    It does not communicate with other replicas.

    Attributes:
        taken: the values at each point where the replicas would be combined.
        names: the name of each of these points in messages.
        equal_everywhere: operations whose results would be the same on all replicas.
    """

    def __init__(self, layout: ReplicaLayout, **known: Any) -> None:
        super().__init__(layout, **known)
        self.taken: list[list[Any]] = []
        self.names: list[str] = []
        self.equal_everywhere: set[Any] = set()

    def next_point(self) -> Point:
        """A point of weight 1, because a trial has one replica."""
        return Point(tf.ones([], tf.float32))

    def whole_gradients(self, gradients: list[Any], variables: list[Any], target: Any) -> list[Any]:
        """Notes the gradients, and returns them."""
        self.note_point(gradients, "a loss that train_step differentiates")
        found: list[Any] = self.common(gradients)
        return found

    def gradients_to_apply(self, optimizer: Any, gradients: list[Any], variables: list[Any]) -> None:
        """None, because a trial applies no gradients."""

    def note_point(self, values: list[Any], name: str) -> None:
        """Keeps the values and their name in messages."""
        self.taken.append(values)
        self.names.append(name)

    def note_write(self, variable: Any) -> None:
        """Notes the write, also in an update: a whole trial runs inside `local_update`."""
        self.assigned[id(variable)] = variable

    note_shared_write = note_write

    def sum(self, values: Any) -> Any:
        """The values themselves, because a trial has one replica."""
        return self.common(values)

    def gather(self, value: Any) -> Any:
        """The rows themselves, because a trial has one replica."""
        return self.common(value)

    def of_all_examples(self, function: Callable[..., Any], arguments: Any) -> Any:
        """As of `ReplicaStep`. A trial that has each example twice uses it once here.

        The value of all replicas is one value, which does not grow with a replica's part.
        """
        once = tf.cast(tf.round(self.per_share(tf.cast(self.size, tf.float32))), tf.int32)
        return super().of_all_examples(function, map_leaves(lambda leaf: _first(leaf, once), arguments))

    def loss_of_all(self, loss: Any) -> Any:
        """The loss itself. It does not grow with a replica's part, so its gradient must not shrink."""
        return loss

    def common(self, values: Any) -> Any:
        """Marks values that would be the same on all replicas, such as a sum over them, and returns them."""

        def one(value: Any) -> Any:
            if value is None:
                return None
            found = tf.identity(value)
            leaves = tf.nest.flatten(found, expand_composites=True)
            self.equal_everywhere.update(leaf.op for leaf in leaves if not hasattr(leaf, "numpy"))
            return found

        return tf.nest.map_structure(one, values)


@dataclass(frozen=True, kw_only=True)
class TriedStep:
    """A step that is tried out on one replica.

    Attributes:
        part: a batch of one replica.
        model: the model.
        layout: the layout of the model's strategy.
        training: whether it is a train step.
    """

    part: Any
    model: Any
    layout: ReplicaLayout
    training: bool

    @property
    def rows(self) -> int:
        """The number of examples to try with."""
        with tf.init_scope():  # it may be asked for while the step is traced
            return min(_ROWS, int(batch_rows(self.part)))


def if_possible(trial: Callable[[], Found], otherwise: Found) -> Found:
    """The result of a trial; `otherwise` if it fails. A step that is refused is no failure.

    Raises:
        StepError: the trial has shown that the step cannot run on several replicas.
    """
    try:
        return trial()
    except StepError:
        raise
    except Exception as error:
        logger.debug("the step cannot be tried out: %s", error, exc_info=True)
        return otherwise


class Trial:
    """A function of a batch, traced for this process' first replica.

    Args:
        function: takes a batch; returns a nest of tensors.
        part: a batch of one replica, for its structure, dtypes and shapes.
        strategy: the model's strategy.
        replicas: the number that `strategy.num_replicas_in_sync` returns to the function; None for the true
            one.

    Attributes:
        asked: whether the function read the number of replicas.
        rows_known: whether the graph has a fixed number of rows; then every run traces anew.
    """

    def __init__(
        self, function: Callable[[Any], Any], part: Any, strategy: Any, *, replicas: int | None = None
    ) -> None:
        self._function, self._strategy, self._replicas = function, strategy, replicas
        self.asked = False
        self.rows_known = False
        try:
            self._traced = self._trace(map_leaves(any_rows, batch_spec(part)), None)
        except Exception:
            # Some steps need the static shape of the batch.
            self.rows_known = True
            self._traced = self._trace(batch_spec(part), int(batch_rows(part)))

    @property
    def graph(self) -> Any:
        """The traced graph."""
        return self._traced.graph

    @property
    def variables(self) -> list[Any]:
        """The variables that the function reads or writes, as components of this process' replicas."""
        found: dict[int, Any] = {}
        for variable in self._traced.graph.variables:
            for each in self._strategy.experimental_local_results(variable):
                found[id(each)] = each
        return list(found.values())

    def inputs(self) -> list[Any]:
        """The tensors of the graph that stand for the batch."""
        captured = {id(inner) for inner in self._traced.graph.internal_captures}
        *batch, _ = (each for each in self._traced.graph.inputs if id(each) not in captured)
        return batch

    def run(self, part: Any, read: Sequence[Any] = ()) -> tuple[Any, list[Any]]:
        """Runs the function on a batch, and restores all variables.

        Args:
            part: a batch of one replica.
            read: variables whose values to return.

        Returns:
            The function's result, and the values of the `read` variables before they are restored.
        """
        if self.rows_known:
            self._traced = self._trace(batch_spec(part), int(batch_rows(part)))
        with _kept(self.variables):
            found = self._traced(part, example_numbers(part))
            return found, [tf.identity(variable.read_value()) for variable in read]

    @contextlib.contextmanager
    def with_all_terms(self) -> Iterator[bool]:
        """A context in which no variable is 0: a weight that grows later hides no part of a loss.

        It gives whether one was.
        """
        zeros = [
            each
            for each in self.variables
            if each.dtype.is_floating
            and upstream_tf.container_of(each).synchronization != tf.VariableSynchronization.ON_READ
            and not np.any(each.read_value())
        ]
        with _kept(zeros):
            for variable in zeros:
                variable.assign(tf.zeros_like(variable) + (0.5 if variable.shape.rank else 1))
            yield bool(zeros)

    def _trace(self, spec: Any, rows: int | None) -> Any:
        layout, device = layout_of(self._strategy), self._strategy.extended.worker_devices[0]

        def alone(part: Any, examples: Any) -> Any:
            with (
                _SingleReplicaContext(self._strategy, 0 if layout is None else layout.first_replica),
                tf.device(device),
                local_update(),
                tf.variable_creator_scope(self._make),
                reporting_replicas(self._replicas) as asked,
                fixed_draws(examples),
            ):
                found = self._function(part)
            self.asked = self.asked or (asked is not None and asked.asked)
            return found

        # Traced in the scope, because Keras' layers create variables outside of the graph.
        with self._strategy.scope():
            examples = tf.TensorSpec([rows], tf.int32)
            return tf.function(alone, autograph=False).get_concrete_function(spec, examples)

    def _make(self, next_creator: Callable[..., Any], **kwargs: Any) -> Any:
        """Creates a variable outside of the graph and in the strategy's scope, as Keras does."""

        def made(strategy: Any) -> Any:
            with tf.init_scope():
                return next_creator(**kwargs)

        context = tf.distribute.get_replica_context()
        return context.across(made) if isinstance(context, _SingleReplicaContext) else made(self._strategy)


class _SingleReplicaContext(tf.distribute.ReplicaContext):  # type: ignore[misc]
    """The context of a replica that communicates with no other: sums and gathers return its own values."""

    def all_reduce(self, reduce_op: Any, value: Any, options: Any = None) -> Any:
        """The value itself."""
        return _whole(value)

    def all_gather(self, value: Any, axis: Any, options: Any = None) -> Any:
        """The value itself."""
        return _whole(value)

    def across(self, function: Callable[[Any], Any]) -> Any:
        """The result of a function of the strategy, called in the cross-replica context."""
        return super()._merge_call(function, (), {})

    def _merge_call(self, merge_fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        with upstream_tf.reducing_nothing(self._strategy, _whole):
            return super()._merge_call(merge_fn, args, kwargs)


def _first(leaf: Any, rows: Any) -> Any:
    if not isinstance(leaf, tf.Tensor) or leaf.shape.rank == 0:
        return leaf
    found = leaf[:rows]
    if (mask := layer_calls.mask_of(leaf)) is not None:
        layer_calls.set_mask(found, mask[:rows])
    return found


def _whole(value: Any) -> Any:
    step = current_step()
    return step.common(value) if isinstance(step, TrialStep) else value


@contextlib.contextmanager
def _kept(variables: Sequence[Any]) -> Iterator[None]:
    """A context at whose end the variables get their previous values back."""
    before = [(variable, tf.identity(variable.read_value())) for variable in variables]
    try:
        yield
    finally:
        for variable, value in before:
            variable.assign(value)


def some_rows_of(part: Any, start: int, end: int) -> Any:
    """The rows `start` to `end` of a batch; a scalar leaf is unchanged, an Optional becomes None."""
    return map_leaves(lambda leaf: some_rows(leaf, start, end - start), without_optionals(part))


def cut_rows(part: Any, cut: int, rows: int) -> tuple[Any, Any]:
    """The first `cut` rows of a batch, and those after them up to `rows`."""
    return some_rows_of(part, 0, cut), some_rows_of(part, cut, rows)


def twice(part: Any) -> Any:
    """A batch with all its rows repeated once, after the last row."""

    def one(leaf: Any) -> Any:
        return leaf if leaf is None or leaf.shape.rank == 0 else joined_rows([leaf, leaf])

    return map_leaves(one, part)
