"""Traces a replica's function once, for one replica alone, so that it can be run on different examples.

In a trial nothing talks: what reduces or gathers over the replicas gives back what it was given. Variables
are made in the strategy's scope, and their values are put back after each run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from dtrain.keras_engine.context import TrialStep, current_step, local_update, reporting_replicas
from dtrain.keras_engine.input import batch_spec, map_leaves
from dtrain.keras_engine.protocol import layout_of
from dtrain.upstream import tensorflow as upstream_tf


class Trial:
    """A function of a batch, traced for this process' first replica.

    Args:
        function: takes a batch; returns a nest of tensors.
        part: a batch of one replica, for its structure, dtypes and shapes.
        strategy: the model's.
        replicas: what `strategy.num_replicas_in_sync` tells the function; None for the true number.

    Attributes:
        asked: whether the function asked for the number of replicas.
        graph: what was traced.
        rows_known: whether the number of rows is fixed in the graph.
    """

    def __init__(
        self, function: Callable[[Any], Any], part: Any, strategy: Any, *, replicas: int | None = None
    ) -> None:
        self._function, self._strategy, self._replicas = function, strategy, replicas
        self.asked = False
        self.rows_known = False
        try:
            self._traced = self._trace(map_leaves(_any_rows, batch_spec(part)))
        except Exception:
            # A step may need to know the shape of its batch.
            self.rows_known = True
            self._traced = self._trace(batch_spec(part))

    @property
    def graph(self) -> Any:
        """What was traced."""
        return self._traced.graph

    @property
    def variables(self) -> list[Any]:
        """The variables that the function reads or writes: this replica's own."""
        found: dict[int, Any] = {}
        for variable in self._traced.graph.variables:
            for each in self._strategy.experimental_local_results(variable):
                found[id(each)] = each
        return list(found.values())

    def inputs(self) -> list[Any]:
        """The tensors of the graph that stand for the batch."""
        captured = {id(inner) for inner in self._traced.graph.internal_captures}
        return [each for each in self._traced.graph.inputs if id(each) not in captured]

    def run(self, part: Any, read: Sequence[Any] = ()) -> tuple[Any, list[Any]]:
        """What the function returns for a batch, and the values that it leaves in some of its variables."""
        if self.rows_known:
            self._traced = self._trace(batch_spec(part))
        with _kept(self.variables):
            found = self._traced(part)
            return found, [tf.identity(variable.read_value()) for variable in read]

    def _trace(self, spec: Any) -> Any:
        layout, device = layout_of(self._strategy), self._strategy.extended.worker_devices[0]

        def alone(part: Any) -> Any:
            with (
                _LoneReplica(self._strategy, 0 if layout is None else layout.first_replica),
                tf.device(device),
                local_update(),
                tf.variable_creator_scope(self._make),
                reporting_replicas(self._replicas) as asked,
            ):
                found = self._function(part)
            self.asked = self.asked or (asked is not None and asked.asked)
            return found

        # In the scope, so that what is made outside of the graph, as Keras' layers do, is made there.
        with self._strategy.scope():
            return tf.function(alone, autograph=False).get_concrete_function(spec)

    def _make(self, next_creator: Callable[..., Any], **kwargs: Any) -> Any:
        """Makes a variable before the step runs, as on one device, and as in the strategy's scope."""

        def made(strategy: Any) -> Any:
            with tf.init_scope():
                return next_creator(**kwargs)

        context = tf.distribute.get_replica_context()
        return context.across(made) if isinstance(context, _LoneReplica) else made(self._strategy)


class _LoneReplica(tf.distribute.ReplicaContext):  # type: ignore[misc]
    """A replica that nobody answers: sums and gatherings are its own values."""

    def all_reduce(self, reduce_op: Any, value: Any, options: Any = None) -> Any:
        """The value."""
        return _whole(value)

    def all_gather(self, value: Any, axis: Any, options: Any = None) -> Any:
        """The value."""
        return _whole(value)

    def across(self, function: Callable[[Any], Any]) -> Any:
        """What a function of the strategy gives outside of the replica."""
        return super()._merge_call(function, (), {})

    def _merge_call(self, merge_fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        with upstream_tf.reducing_nothing(self._strategy, _whole):
            return super()._merge_call(merge_fn, args, kwargs)


def _whole(value: Any) -> Any:
    step = current_step()
    return step.common(value) if isinstance(step, TrialStep) else value


@contextlib.contextmanager
def _kept(variables: Sequence[Any]) -> Iterator[None]:
    """Puts back the values of variables."""
    before = [(variable, tf.identity(variable.read_value())) for variable in variables]
    try:
        yield
    finally:
        for variable, value in before:
            variable.assign(value)


def _any_rows(spec: Any) -> Any:
    """A leaf's spec for any number of rows."""
    if spec is None or not spec.shape.rank:
        return spec
    shape = [None, *spec.shape[1:]]
    if isinstance(spec, tf.RaggedTensorSpec):
        return tf.RaggedTensorSpec(shape, spec.dtype, spec.ragged_rank, spec.row_splits_dtype)
    if isinstance(spec, tf.SparseTensorSpec):
        return tf.SparseTensorSpec(shape, spec.dtype)
    return tf.TensorSpec(shape, spec.dtype)


def some_rows_of(part: Any, start: int, end: int) -> Any:
    """Some rows of a batch; what has no rows stays as it is."""

    def one(leaf: Any) -> Any:
        if leaf is None or isinstance(leaf, tf.experimental.Optional):
            return None
        if isinstance(leaf, tf.SparseTensor):
            begin = [start] + [0] * (leaf.shape.rank - 1)
            return _of_width(leaf, tf.sparse.slice(leaf, begin, [end - start, *leaf.dense_shape[1:]]))
        return leaf if leaf.shape.rank == 0 else leaf[start:end]

    return map_leaves(one, part)


def twice(part: Any) -> Any:
    """A batch with all its rows once more."""

    def one(leaf: Any) -> Any:
        if leaf is None or leaf.shape.rank == 0:
            return leaf
        if isinstance(leaf, tf.SparseTensor):
            return _of_width(leaf, tf.sparse.concat(0, [leaf, leaf]))
        return tf.concat([leaf, leaf], axis=0)

    return map_leaves(one, part)


def _of_width(leaf: tf.SparseTensor, found: tf.SparseTensor) -> tf.SparseTensor:
    """A sparse tensor that is known to have the static shape of another, but for the rows."""
    if not tf.executing_eagerly():
        found.set_shape([None, *leaf.shape[1:]])
    return found
