"""Lets a replica without examples run a model, although CPU kernels fail on tensors without rows.

Without rows, convolutions give wrong shapes, the gradient of a pooling ends the process, and a maximum has
no values. So the outermost layer is given one row of zeros, and its outputs lose the row that belongs to it:
losses and metrics see no examples. Programs of XLA, which has kernels of its own, are left alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from dtrain.keras_engine.context import check_not_compiled, current_step
from dtrain.keras_engine.protocol import in_replica
from dtrain.keras_engine.replica_attributes import share_build, watch
from dtrain.keras_engine.state import averaged
from dtrain.keras_engine.thread_value import ThreadValue
from dtrain.keras_engine.trial_step import TrialStep
from dtrain.keras_engine.variables import holds_parts
from dtrain.upstream import keras as upstream_keras
from dtrain.upstream import keras_names
from dtrain.upstream import tensorflow as upstream_tf
from dtrain.upstream.reach import replaces, set_methods

# Whether the code runs inside the outermost layer that a replica calls; and a bool tensor, whether this layer
# was given a row of zeros, or None.
_inside = ThreadValue(False)
_empty: ThreadValue[Any] = ThreadValue(None)


@replaces(keras_names.LAYER_CALL)
def layer_call(original: Callable[..., Any], self: Any, /, *args: Any, **kwargs: Any) -> Any:
    """The replacement of `Layer.__call__`. It changes the outermost layer that a replica calls."""
    share_build(self)
    if upstream_keras.remat_mode_of(self) is not None:
        set_methods(self, keras_names.REMATERIALIZED_CALL)
    if _inside() or not in_replica():
        return original(self, *args, **kwargs)
    watch(self)
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
    args, kwargs = keras.tree.map_structure(lambda leaf: _with_row(leaf, empty), (args, kwargs))
    with _inside.set(True), _empty.set(empty), _uncounted(self, empty):
        found = original(self, *args, **kwargs)
    return keras.tree.map_structure(lambda leaf: _without_row(leaf, empty), found)


@replaces(keras_names.SYNCHRONIZED_MOMENTS)
def moments(original: Callable[..., Any], x: Any, axes: Any, keepdims: bool) -> Any:
    """The replacement of the moments of a synchronized BatchNormalization, without the row of zeros.

    Raises:
        CompilationError: inside a function that XLA compiles, where replicas cannot communicate.
    """
    if in_replica():
        check_not_compiled()
    empty = _empty()
    return original(x if empty is None else _cut(x, empty), axes, keepdims)


def in_layer() -> bool:
    """Whether the code runs inside a layer that a replica calls."""
    return _inside()


def without_row(leaf: Any) -> Any:
    """A tensor that a layer computed, without the row that belongs to the row of zeros, if there is one."""
    empty = _empty()
    return leaf if empty is None else _without_row(leaf, empty)


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
    """The leading dimension of the first tensor that has one, an int64 scalar; None if no tensor has one."""
    for leaf in keras.tree.flatten(nest):
        if isinstance(leaf, tf.RaggedTensor):
            return leaf.nrows(tf.int64)
        if isinstance(leaf, tf.SparseTensor):
            return leaf.dense_shape[0]
        if isinstance(leaf, tf.Tensor) and leaf.shape.rank != 0:
            static = leaf.shape[0] if leaf.shape.rank else None
            return tf.shape(leaf, tf.int64)[0] if static is None else tf.constant(static, tf.int64)
    return None


def _with_row(leaf: Any, empty: Any) -> Any:
    """Gives a tensor without rows one row of zeros, if `empty` is true; other leaves stay as they are."""
    if isinstance(leaf, tf.RaggedTensor):
        splits = leaf.row_splits
        longer = tf.cond(empty, lambda: tf.zeros([2], splits.dtype), lambda: splits)
        return tf.RaggedTensor.from_row_splits(leaf.values, longer, validate=False)
    if isinstance(leaf, tf.SparseTensor):
        least = tf.concat([tf.cast([empty], tf.int64), tf.zeros_like(leaf.dense_shape[1:])], axis=0)
        return _like(leaf, tf.SparseTensor(leaf.indices, leaf.values, tf.maximum(leaf.dense_shape, least)))
    if not isinstance(leaf, tf.Tensor) or not leaf.shape.rank or leaf.shape[0] not in (None, 0):
        return leaf
    one = tf.concat([[1], tf.shape(leaf)[1:]], axis=0)
    found = _like(leaf, tf.cond(empty, lambda: tf.zeros(one, leaf.dtype), lambda: leaf))
    if (mask := upstream_keras.mask_of(leaf)) is not None:
        upstream_keras.set_mask(found, _with_row(mask, empty))
    return found


def _without_row(leaf: Any, empty: Any) -> Any:
    """Removes the row that was computed from the row of zeros; leaves without rows stay as they are."""
    if isinstance(leaf, tf.RaggedTensor):
        splits = leaf.row_splits
        kept = tf.cond(empty, lambda: splits[:1], lambda: splits)
        return tf.RaggedTensor.from_row_splits(leaf.values[: kept[-1]], kept, validate=False)
    if isinstance(leaf, tf.SparseTensor):
        rows = tf.where(empty, tf.zeros([], tf.int64), leaf.dense_shape[0])
        cut = tf.sparse.slice(
            leaf, tf.zeros_like(leaf.dense_shape), tf.concat([[rows], leaf.dense_shape[1:]], 0)
        )
        return _like(leaf, cut)
    if not isinstance(leaf, tf.Tensor) or not leaf.shape.rank:
        return leaf
    if leaf.shape[0] is not None and not (leaf.shape[0] == 1 and _is_true(empty)):
        return leaf
    found = _like(leaf, _cut_probabilities(leaf, empty))
    if (logits := upstream_keras.logits_of(leaf)) is not None:
        upstream_keras.set_logits(found, _like(logits, _cut(logits, empty)))
    if (mask := upstream_keras.mask_of(leaf)) is not None:
        upstream_keras.set_mask(found, _cut(mask, empty))
    return found


def _cut(leaf: Any, empty: Any) -> Any:
    return tf.cond(empty, lambda: leaf[:0], lambda: leaf)


def _cut_probabilities(leaf: Any, empty: Any) -> Any:
    """`_cut` for a tensor that may be probabilities.

    The result of a softmax or sigmoid is again made by one, because Keras' cross-entropies use its logits.
    """
    if tf.executing_eagerly() or leaf.op.type not in ("Softmax", "Sigmoid"):
        return _cut(leaf, empty)
    logits = _like(leaf.op.inputs[0], _cut(leaf.op.inputs[0], empty))
    if leaf.op.type == "Softmax":
        return tf.raw_ops.Softmax(logits=logits)
    return tf.raw_ops.Sigmoid(x=logits)


def _is_true(empty: Any) -> bool:
    """Whether it is known while tracing that the replica has no examples."""
    return bool(tf.get_static_value(empty))


def _like(leaf: Any, found: Any) -> Any:
    """Gives `found` the static shape of `leaf`, except for the number of rows."""
    if not tf.executing_eagerly() and leaf.shape.rank is not None:
        found.set_shape([None, *leaf.shape[1:]])
    return found
