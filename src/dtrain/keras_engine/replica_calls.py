"""Steps in where the code of a replica calls a layer or a `tf.function`, or stops for other replicas.

- Replicas of a process run in threads that take turns with the same objects, so each has its own Python
  attributes of them (`replica_attributes.py`).
- CPU kernels fail on tensors without rows: convolutions give wrong shapes, the gradient of a pooling ends the
  process, and a maximum has no values. So a replica without examples gives its outermost layer one row of
  zeros, and the outputs lose the row that belongs to it: losses and metrics see no examples. Programs of XLA,
  which has kernels of its own, are left alone.
- A user's `tf.function` is inlined into the step that calls it. Replicas cannot communicate inside a nested
  function, and the step does not see what it looks up, writes or builds. Under parameter servers, such a
  function would keep variables of one block, which later blocks lack.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from dtrain.keras_engine.context import ThreadValue, block_workers, current_step
from dtrain.keras_engine.protocol import in_replica, layout_of
from dtrain.keras_engine.reductions import check_not_compiled
from dtrain.keras_engine.replica_attributes import Members, OwnAttributes
from dtrain.keras_engine.rows import is_dense, row_count, with_zero_row, without_zero_row
from dtrain.keras_engine.trial import TrialStep
from dtrain.keras_engine.variables import averaged, holds_parts
from dtrain.upstream import keras as upstream_keras
from dtrain.upstream import keras_names, tensorflow_names
from dtrain.upstream import tensorflow as upstream_tf
from dtrain.upstream.reach import on_objects, replaces, set_methods

_own: ThreadValue[OwnAttributes | None] = ThreadValue(None)
"""The attributes of the replica that this thread runs; None if a process has one replica."""

# Whether the code runs inside the outermost layer that a replica calls; and a bool tensor, whether this layer
# was given a row of zeros, or None.
_inside = ThreadValue(False)
_empty: ThreadValue[Any] = ThreadValue(None)


def with_own_attributes(fn: Callable[..., Any], local_replicas: int) -> Callable[..., Any]:
    """A function that calls `fn` in a replica's thread, with attributes of the replica's own.

    Args:
        fn: a replica's function, as TensorFlow would call it; AutoGraph converts it no more.
        local_replicas: the number of replicas of this process.
    """
    members = Members()
    members.add(fn)

    def one_replica(*args: Any, **kwargs: Any) -> Any:
        set_methods(tf.distribute.get_replica_context(), tensorflow_names.MERGE_CALL)
        own = OwnAttributes(members)
        with _own.set(own):
            own.begin_turn()
            found = fn(*args, **kwargs)
        # The last replica's attributes stay on the objects, as the last call's do on one device.
        if upstream_tf.local_replica_index() < local_replicas - 1:
            own.end_turn()
        return found

    upstream_tf.mark_converted(one_replica)
    return one_replica


@on_objects(tensorflow_names.MERGE_CALL)
def merge_call(original: Callable[..., Any], self: Any, fn: Any, args: Any, kwargs: Any) -> Any:
    """The `merge_call` of a replica's context, where a replica's thread waits for the others."""
    own = _own()
    if own is None:
        return original(self, fn, args, kwargs)
    own.end_turn()
    found = original(self, fn, args, kwargs)
    own.begin_turn()
    return found


def share_build(layer: Any) -> None:
    """Makes the attributes that a layer is given while it is built those of all replicas."""
    if _own() is not None and not layer.built:
        set_methods(layer, keras_names.MAYBE_BUILD)


@on_objects(keras_names.MAYBE_BUILD)
def maybe_build(original: Callable[..., Any], self: Any, call_spec: Any) -> Any:
    """A layer's method that builds it at its first call."""
    own = None if self.built else _own()
    found = original(self, call_spec)
    if own is not None:
        own.share(self)
    return found


def watch(root: Any) -> None:
    """From here on, gives this replica its own attributes of an object and of all reachable from it."""
    own = _own()
    if own is not None:
        own.watch(root)


@replaces(keras_names.LAYER_CALL)
def layer_call(original: Callable[..., Any], self: Any, /, *args: Any, **kwargs: Any) -> Any:
    """The replacement of `Layer.__call__`. It changes the outermost layer that a replica calls."""
    share_build(self)
    if upstream_keras.remat_mode_of(self) is not None:
        set_methods(self, keras_names.REMATERIALIZED_CALL)
    if _inside() or not in_replica():
        return original(self, *args, **kwargs)
    watch(self)
    set_methods(tf.distribute.get_replica_context(), tensorflow_names.ALL_REDUCE)
    step = current_step()
    if isinstance(step, TrialStep):  # a trial has examples
        return original(self, *args, **kwargs)
    rows = _rows_of_first((args, kwargs))
    with contextlib.nullcontext() if step is not None else averaged(self, rows):
        return _with_rows(original, self, rows, args, kwargs)


def _with_rows(original: Callable[..., Any], self: Any, rows: Any, args: Any, kwargs: Any) -> Any:
    """Calls the outermost layer, with a row of zeros if the replica has no examples."""
    # XLA has kernels of its own, and knows all shapes while it compiles.
    known = None if rows is None else tf.get_static_value(rows)
    if rows is None or upstream_tf.in_xla_graph() or (known is not None and int(known) > 0):
        with _inside.set(True):
            return original(self, *args, **kwargs)
    empty = tf.equal(rows, 0)
    args, kwargs = keras.tree.map_structure(lambda leaf: with_zero_row(leaf, empty), (args, kwargs))
    with _inside.set(True), _empty.set(empty), _uncounted(self, empty):
        found = original(self, *args, **kwargs)
    return keras.tree.map_structure(lambda leaf: without_zero_row(leaf, empty), found)


@on_objects(tensorflow_names.ALL_REDUCE)
def all_reduce(
    original: Callable[..., Any], self: Any, reduce_op: Any, value: Any, options: Any = None
) -> Any:
    """The `all_reduce` of a replica's context; inside a layer, the row of zeros adds nothing to a sum.

    So the moments of a synchronized BatchNormalization count examples only.

    Raises:
        CompilationError: inside a layer that XLA compiles, where replicas cannot communicate.
    """
    if _inside():
        check_not_compiled()
    empty = _empty()
    if empty is not None and reduce_op in (tf.distribute.ReduceOp.SUM, "sum", "SUM"):
        value = tf.nest.map_structure(lambda part: tf.where(empty, tf.zeros_like(part), part), value)
    return original(self, reduce_op, value, options)


def in_layer() -> bool:
    """Whether the code runs inside a layer that a replica calls."""
    return _inside()


def without_row(leaf: Any) -> Any:
    """A tensor that a layer computed, without the row that belongs to the row of zeros, if there is one."""
    empty = _empty()
    return leaf if empty is None else without_zero_row(leaf, empty)


@contextlib.contextmanager
def _uncounted(layer: Any, empty: Any) -> Iterator[None]:
    """Within it, the metrics that layers hold and update do not count the row of zeros."""
    # `Model.metrics` would add the compiled metrics, which are updated outside of the layer.
    variables = [v for metric in keras.layers.Layer.metrics.fget(layer) for v in metric.variables]
    before = [tf.identity(v.value) for v in variables]
    yield
    for variable, value in zip(variables, before, strict=True):
        if not holds_parts(variable):
            continue  # the metric was updated with the examples of all replicas
        variable.assign(tf.where(empty, value, variable.value))


def _rows_of_first(nest: Any) -> Any:
    """The number of rows of the first tensor that has rows, an int64 scalar; None if no tensor has any."""
    tensors = (each for each in keras.tree.flatten(nest) if isinstance(each, tf.Tensor) or not is_dense(each))
    return next((rows for rows in map(row_count, tensors) if rows is not None), None)


@replaces(tensorflow_names.FUNCTION_CALL)
def function_call(original: Callable[..., Any], self: Any, /, *args: Any, **kwds: Any) -> Any:
    """The replacement of `tf.function`'s `__call__`."""
    eager = tf.executing_eagerly()
    block = not eager and block_workers() > 0
    in_step = current_step() is not None if eager else block or _in_any_replica()
    if not in_step:
        return original(self, *args, **kwds)
    if not upstream_tf.compiled_by_xla(self):
        return upstream_tf.call_inline(self, original, args, kwds)
    # XLA compiles whole functions. A block traces the function again: an earlier block's variables are gone.
    return original(upstream_tf.same_function_untraced(self) if block else self, *args, **kwds)


def _in_any_replica() -> bool:
    """Whether the code runs in a replica context under a strategy of dtrain's."""
    if not tf.distribute.has_strategy() or tf.distribute.get_replica_context() is None:
        return False
    return layout_of(tf.distribute.get_strategy()) is not None
