"""Makes a user's own metric give the same result as on one device, whatever its `update_state` does.

If an update is additive over examples, each replica updates with its own examples, and reading a variable
sums the replicas' parts. Otherwise every replica updates with the examples of all replicas, and the variables
are equal on all replicas. Keras' own metrics are not handled here.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from dtrain.base.log import logger
from dtrain.engine.batches.batch_rows import as_tensor
from dtrain.engine.replica.context import gathered, in_replica
from dtrain.engine.replica.metric_arguments import Arguments, Number, Rows
from dtrain.engine.replica.metric_trial import calls_are_additive, is_additive
from dtrain.engine.replica.outermost_layer import without_row
from dtrain.engine.replica.replica_reductions import as_floats, check_not_compiled
from dtrain.engine.replica.replica_writes import combined_on_read
from dtrain.engine.replica.thread_state import thread_state
from dtrain.errors import CompilationError, StepError
from dtrain.interfaces.managed_strategy import current_layout, layout_of
from dtrain.upstream import graph_functions, keras_variables, tf_replicas, tf_variables
from dtrain.upstream.tf_variables import underlying

# An attribute of a graph. It maps a tensor's id to the tensor and the value that was made from it.
_MADE = "_dtrain_made"


class _Finding:
    """What is known about a metric.

    Attributes:
        is_additive: whether each replica updates it with its own examples; None if not known yet.
        kinds: the kinds of calls (`Arguments.key`) that were tried.
    """

    def __init__(self) -> None:
        self.is_additive: bool | None = None
        self.kinds: set[str] = set()


# Not an attribute of the metric: each replica has its own attributes (`replica_attributes.py`).
_known: weakref.WeakKeyDictionary[Any, _Finding] = weakref.WeakKeyDictionary()


def update(original: Callable[..., Any], metric: Any, args: Any, kwargs: Any) -> Any:
    """Updates a user's own metric; must be called in a replica.

    Args:
        original: the metric's `update_state`.
        metric: the metric.
        args, kwargs: the arguments of `update_state`.

    Raises:
        StepError: the metric needs the examples of all replicas where replicas cannot communicate.
        CompilationError: the metric needs them inside a function that XLA compiles.
    """
    arguments = Arguments.of(args, kwargs)
    if _is_additive(metric, arguments):
        with thread_state.having(inside_metric=True):
            return original(metric, *args, **kwargs)
    if arguments.have_rows or arguments.have_numbers:
        _check_place(metric)
    given: list[Any] = []
    arguments.visit(args, kwargs, lambda leaf, kind: given.append(_of_all(metric, leaf, kind)))
    args, kwargs = arguments.filled(given)
    if tf_replicas.local_replica_index() and not all(map(_is_each_replicas, metric.variables)):
        return None  # the replicas of this process share a variable: the first one writes it
    with thread_state.having(inside_metric=True):
        return original(metric, *args, **kwargs)


def make_update(original: Callable[..., Any]) -> Callable[..., Any]:
    """The replacement of the `update_state` of a user's class."""

    def update_state(self: Any, *args: Any, **kwargs: Any) -> Any:
        own = graph_functions.converted_as_caller(original)
        plain = not isinstance(self, keras.Metric)  # a mixin of a metric may be a base of other classes too
        if plain or thread_state.inside_metric or keras_variables.in_stateless_scope():
            return own(self, *args, **kwargs)
        if in_replica():
            return update(own, self, args, kwargs)
        if thread_state.single_program:
            _update_whole(self)
        if thread_state.block_workers > 1:
            _warn_of_workers(self, args, kwargs)
        with thread_state.having(inside_metric=True):
            return own(self, *args, **kwargs)

    return update_state


def _update_whole(metric: Any) -> None:
    """Notes that a metric is updated with the whole batch, so that all replicas hold its variables alike.

    One that a loop of the user's own has updated before may be held in parts, which is right, too.
    """
    known = _known.setdefault(metric, _Finding())
    if known.is_additive is None:
        known.is_additive = False
        for variable in metric.variables:
            _hold_alike(variable)


def _is_additive(metric: Any, arguments: Arguments) -> bool:
    """Whether each replica updates a metric with its own examples; decided at the metric's first update.

    Raises:
        StepError: earlier calls were additive, but a call with these arguments is not.
    """
    known = _known.setdefault(metric, _Finding())
    if known.is_additive is False or arguments.key in known.kinds:
        return bool(known.is_additive)
    additive = _may_be_tried(metric, arguments) and is_additive(metric, arguments)
    if known.is_additive and not additive:
        raise StepError(
            f"update_state of the metric {metric.name!r} was additive over examples in earlier calls, but "
            "in this one, with other arguments, it is not. Its variables hold each replica's part.",
            hint="use one metric object for each kind of call",
        )
    known.kinds.add(arguments.key)
    if known.is_additive is None:
        known.is_additive = additive
        for variable in metric.variables:
            _hold_parts(variable) if additive else _hold_alike(variable)
        if not additive:
            logger.info(
                "The metric %r is not additive over examples: every replica updates it with the examples of "
                "all replicas.",
                metric.name,
            )
    return additive


def _may_be_tried(metric: Any, arguments: Arguments) -> bool:
    """Whether a trial can decide."""
    layout = current_layout()
    if layout is None or not all(_can_hold_parts(v, shared=layout.workers == 1) for v in metric.variables):
        return False
    # Each replica's numbers are counted separately, as in TensorFlow.
    return arguments.have_rows != arguments.have_numbers


def _check_place(metric: Any) -> None:
    """Refuses an update that needs other replicas' examples where replicas cannot communicate.

    Raises:
        StepError: the update is inside a condition or a loop.
        CompilationError: the update is inside a function that XLA compiles.
    """
    what = (
        f"update_state of the metric {metric.name!r} is not additive over examples, so it needs the examples "
        "of all replicas"
    )
    try:
        check_not_compiled()
    except CompilationError:
        raise CompilationError(
            f"{what}, and XLA cannot compile communication between replicas.",
            hint="update it outside of the function with jit_compile=True, inside strategy.run",
        ) from None
    if not tf_replicas.merge_possible():
        raise StepError(
            f"{what}, and replicas cannot communicate inside a condition or a loop of their own.",
            hint="update it in the replica's function itself, or sum what each example gives, and "
            "divide in result",
        )


def _of_all(metric: Any, leaf: Any, kind: Any) -> Any:
    """An argument's value for the global batch: all replicas' rows, or their combined number."""
    if not isinstance(kind, Rows | Number):
        return leaf
    value = without_row(as_tensor(leaf))
    return _mean(metric, value) if isinstance(kind, Number) else _once(leaf, lambda: gathered(value))


def _once(leaf: Any, make: Callable[[], Any]) -> Any:
    """The result of `make` for a leaf, computed once a step because metrics get the same arguments."""
    if tf.executing_eagerly():
        return make()
    holder: Any = tf.compat.v1.get_default_graph()
    made: dict[int, tuple[Any, Any]] = getattr(holder, _MADE, {})
    setattr(holder, _MADE, made)
    if id(leaf) not in made:
        made[id(leaf)] = leaf, make()
    return made[id(leaf)][1]


def _mean(metric: Any, value: Any) -> Any:
    """The mean of the replicas' numbers."""
    warnings.warn(
        f"The metric {metric.name!r} is given a number by each replica, and its update_state is not "
        "additive: it gets the mean of the replicas' numbers. Hint: give it the number of the whole batch, "
        "such as tf.distribute.get_replica_context().all_reduce('mean', number).",
        stacklevel=2,
    )
    context = tf.distribute.get_replica_context()
    return as_floats(lambda number: context.all_reduce(tf.distribute.ReduceOp.MEAN, number), value)


def _warn_of_workers(metric: Any, args: Any, kwargs: Any) -> None:
    """Warns about a metric that is not additive, so that concurrent workers change its result."""
    if metric in _known:
        return
    arguments = Arguments.of(args, kwargs)
    known = _known[metric] = _Finding()
    known.is_additive = calls_are_additive(metric, arguments)
    if not known.is_additive:
        warnings.warn(
            f"What update_state of the metric {metric.name!r} changes depends on the values before, and "
            "several workers update it at the same time: their changes are summed, so the result differs "
            "from that of one device. Hint: sum what each batch gives, and divide in result.",
            stacklevel=2,
        )


def _is_each_replicas(variable: Any) -> bool:
    return isinstance(underlying(variable), tf.distribute.DistributedValues)


def _can_hold_parts(variable: Any, *, shared: bool) -> bool:
    """Whether replicas can update a variable independently: in parts that a read sums, or in one shared copy.

    Args:
        variable: a Keras variable.
        shared: whether a variable that exists once serves all replicas.
    """
    return combined_on_read(variable) is not None or (shared and not _is_each_replicas(variable))


def _hold_alike(variable: Any) -> None:
    """Makes every replica hold a variable's whole value; a read returns the first replica's."""
    tf_variable = combined_on_read(variable)
    if tf_variable is not None:
        tf_variables.set_aggregation(tf_variable, tf.VariableAggregation.ONLY_FIRST_REPLICA)


def _hold_parts(variable: Any) -> None:
    """Makes each replica hold a part of a variable: the first keeps the value, the others start at zero."""
    tf_variable = combined_on_read(variable)
    if tf_variable is None or tf_variable.aggregation == tf.VariableAggregation.SUM:
        return
    tf_variables.set_aggregation(tf_variable, tf.VariableAggregation.SUM)
    layout = layout_of(tf_variable.distribute_strategy)
    first = 0 if layout is None else layout.first_replica
    with tf.init_scope():
        for replica, part in enumerate(tf_variable.values, first):
            if replica:
                part.assign(tf.zeros_like(part))
