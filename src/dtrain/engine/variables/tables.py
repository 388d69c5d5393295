"""Embedding tables on parameter servers: a lookup fetches the rows that a batch names, not the table.

How a table's gradients are applied is not decided here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from dtrain.engine.variables.split_variables import first_rows, is_split, parts_of, rows_of
from dtrain.upstream.tf_variables import underlying

ELEMENTS = 1 << 16
"""A table with fewer elements, if it is not split, is sent with the other weights, in one message."""


def tables_of(layers: list[Any]) -> list[Any]:
    """The Keras variables of the layers' embedding tables that stay on the servers."""
    tables = [
        layer._embeddings for layer in layers if isinstance(layer, keras.layers.Embedding) and layer.built
    ]
    return [variable for variable in tables if stays_on_servers(variable)]


def stays_on_servers(variable: Any) -> bool:
    """Whether rows of a table are looked up on the servers; else workers read the table whole."""
    raw = underlying(variable)
    if is_split(raw):
        return "/job:ps/" in parts_of(raw)[0].device
    on_server = "/job:ps/" in (getattr(raw, "device", None) or "")
    return on_server and int(raw.shape.num_elements() or 0) >= ELEMENTS


def embedding_call(original: Callable[..., Any], self: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
    """The replacement of `Embedding.call`, which a subclass' own `call` may reach by `super()`."""
    plain = not self.lora_enabled and self.quantization_mode is None
    if not plain or not isinstance(inputs, tf.Tensor) or not stays_on_servers(self._embeddings):
        return original(self, inputs, *args, **kwargs)
    ids = inputs if inputs.dtype in (tf.int32, tf.int64) else tf.cast(inputs, tf.int32)
    return tf.cast(lookup(underlying(self._embeddings), ids), self.compute_dtype)


def lookup(table: Any, ids: tf.Tensor) -> tf.Tensor:
    """Rows of a table, of shape `(*ids.shape, columns)`; negative ids count from the end, as in Keras.

    A row that is named twice is fetched twice, because its two gradients must stay separate: Keras'
    optimizers square each by itself.

    Args:
        table: a TensorFlow variable of shape `(rows, columns)`, split or not.
        ids: row numbers, an integer tensor of any shape.
    """
    ids = tf.where(ids < 0, ids + tf.cast(table.shape[0], ids.dtype), ids)
    rows = tf.reshape(ids, [-1])
    parts = parts_of(table)
    looked_up = tf.gather(parts[0], rows) if len(parts) == 1 else _from_parts(table, parts, rows)
    shape = tf.concat([tf.shape(ids), table.shape[1:]], axis=0)
    return tf.ensure_shape(tf.reshape(looked_up, shape), ids.shape.concatenate(table.shape[1:]))


def _from_parts(table: Any, parts: list[Any], rows: tf.Tensor) -> tf.Tensor:
    starts = first_rows(table)
    ends = tf.constant(
        [start + count for start, count in zip(starts, rows_of(table), strict=True)], rows.dtype
    )
    owner = tf.searchsorted(ends, rows, side="right", out_type=tf.int32)
    owned = tf.dynamic_partition(rows, owner, len(parts))
    places = tf.dynamic_partition(tf.range(tf.size(rows)), owner, len(parts))
    values = [
        tf.gather(part, own - tf.cast(start, own.dtype))
        for part, own, start in zip(parts, owned, starts, strict=True)
    ]
    return tf.dynamic_stitch(places, values)
