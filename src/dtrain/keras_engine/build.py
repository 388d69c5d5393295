"""Builds a model, its metrics and its optimizer before the first step, in its strategy's scope.

It uses the spec of the data only. It reads no batch, since that would consume data.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from dtrain.keras_engine.input import batch_spec, map_leaves, present_leaves
from dtrain.keras_engine.protocol import is_managed
from dtrain.keras_engine.scope import check_model
from dtrain.keras_engine.steps import step_is_stock, without_optionals
from dtrain.log import logger
from dtrain.upstream import keras as upstream_keras
from dtrain.upstream import keras_names
from dtrain.upstream import tensorflow as upstream_tf
from dtrain.upstream.reach import on_objects


@on_objects(keras_names.SYMBOLIC_BUILD)
def symbolic_build(
    original: Callable[..., Any], self: Any, iterator: Any = None, data_batch: Any = None
) -> Any:
    """The model's `_maybe_symbolic_build`."""
    strategy = self.distribute_strategy
    if not is_managed(strategy):
        return original(self, iterator, data_batch)
    spec = _global_spec(iterator.element_spec) if iterator is not None else batch_spec(data_batch)
    build(self, spec)
    return None


def build(model: Any, spec: Any) -> None:
    """Creates all variables that training on data of this spec needs: the model's and the optimizer's.

    Args:
        model: a compiled model.
        spec: a nest of `tf.TypeSpec`s, with the batch dimension.
    """
    if upstream_keras.strategy_of(model) is not None:
        check_model(model)
    with model.distribute_strategy.scope():
        # Created outside of a replica: random layers without a seed look this generator up inside one.
        upstream_keras.seed_generator_global()
        own = not step_is_stock(model, "train_step")
        try:
            with upstream_keras.built_or_untouched(model) if own else contextlib.nullcontext():
                _build_from(model, spec)
        except Exception as error:
            _build_otherwise(model, spec, error)
        if model.optimizer is not None and not model.optimizer.built and model.built:
            model.optimizer.build(model.trainable_variables)


def _build_from(model: Any, spec: Any) -> None:
    """Builds a model, its metrics and its losses on placeholders of the data's spec."""
    if any(isinstance(leaf, tf.RaggedTensorSpec | tf.SparseTensorSpec) for leaf in present_leaves(spec)):
        _trace(model, spec)
    else:
        upstream_keras.symbolic_build(model, map_leaves(_symbolic, spec))


def _trace(model: Any, spec: Any) -> None:
    """As `_build_from`, for ragged and sparse data.

    Keras' own symbolic build treats these as dense data of the same shape, so the step is traced instead.
    """

    def whole_step(batch: Any) -> None:
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(without_optionals(batch))
        y_pred = model(x, training=False) if upstream_keras.takes_training(model) else model(x)
        if not model.compiled or y is None:
            return
        model.compute_metrics(x, y, y_pred, sample_weight=sample_weight)
        upstream_keras.compute_loss(model, x, y, y_pred, sample_weight)

    # Keras initializes variables that are created in such a scope when it ends, outside of the function.
    with keras.StatelessScope():
        tf.function(whole_step, autograph=False).get_concrete_function(spec)


def _build_otherwise(model: Any, spec: Any, error: Exception) -> None:
    """Builds a model that cannot be built from the spec: calls it on blank data, then builds the metrics.

    A model with a custom `train_step` is left alone, because that step builds it.

    Args:
        model: the model.
        spec: of one replica's batch.
        error: the error of building from the spec; it is raised if all layers are built already.
    """
    if not step_is_stock(model, "train_step"):
        logger.debug("%s builds itself in its own step: %s", type(model).__name__, error)
        return
    if all(layer.built for layer in upstream_keras.layers_of(model)):
        raise error
    blank = map_leaves(_blank, spec)
    x, _, _ = keras.utils.unpack_x_y_sample_weight(blank)
    model(x)
    try:
        _build_from(model, spec)
    except Exception:
        logger.debug("metrics are built in the first step", exc_info=True)


def _global_spec(spec: Any) -> Any:
    """The spec of one replica's batch, from a dataset's spec: the first local replica's if they differ."""
    return map_leaves(lambda leaf: upstream_tf.replica_spec(leaf, 0), spec)


def _symbolic(spec: Any) -> Any:
    if spec is None or isinstance(spec, tf.OptionalSpec):
        return None
    return keras.KerasTensor(spec.shape, spec.dtype.name, sparse=isinstance(spec, tf.SparseTensorSpec))


def _blank(spec: Any) -> Any:
    if spec is None or isinstance(spec, tf.OptionalSpec):
        return None
    shape = [2 if n is None else n for n in spec.shape]
    dense = tf.fill(shape, "") if spec.dtype == tf.string else tf.zeros(shape, spec.dtype)
    if isinstance(spec, tf.RaggedTensorSpec):
        return tf.RaggedTensor.from_tensor(dense)
    if isinstance(spec, tf.SparseTensorSpec):
        return tf.sparse.from_dense(dense)
    return dense
