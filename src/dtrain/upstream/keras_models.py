"""Reads and sets private names in Keras' models, layers, losses, metrics and callbacks.

What belongs to a call of a layer is in `layer_calls.py`. The names that are reached by a path stand in
`keras_names.py`.
"""

from __future__ import annotations

from typing import Any

from dtrain.upstream import keras_names
from dtrain.upstream.reach import keras_is_at_least


def trainer_class() -> Any:
    """The trainer class for TensorFlow that `keras.Model` inherits from."""
    return keras_names.TRAINER_INIT.holder()


def calls_have_two_numbers() -> bool:
    """Whether an epoch's iterator yields the first and the last step of a call, as since Keras 3.11."""
    return keras_is_at_least(3, 11)


def profiles_batches(tensorboard: Any) -> bool:
    """Whether Keras' `TensorBoard` callback is set to profile batches, for which it must count them."""
    return bool(getattr(tensorboard, "_start_batch", 0) or getattr(tensorboard, "_stop_batch", 0))


def strategy_of(model: Any) -> Any:
    """The strategy in whose scope a model was constructed, or None."""
    return getattr(model, "_distribute_strategy", None)


def set_first_epoch(model: Any, epoch: int | None) -> None:
    """Makes the running `fit` begin with another epoch than its `initial_epoch`; None undoes this."""
    model._initial_epoch = epoch


def layers_of(model: Any) -> list[Any]:
    """A model and all layers in it, at any depth."""
    return list(model._flatten_layers())


def layer_structure(layer: Any) -> tuple[Any, ...]:
    """A value that changes when a layer is built, or gets variables, layers or metrics."""
    lists = (layer._trainable_variables, layer._non_trainable_variables, layer._layers, layer._metrics)
    return (layer.built, *map(len, lists))


def compiled_parts(model: Any) -> list[Any]:
    """The `loss`, `metrics` and `weighted_metrics` arguments of `compile`; None for a missing one."""
    compiled = model._compile_loss
    parts = [getattr(compiled, "_user_loss", None), getattr(model._compile_metrics, "_user_metrics", None)]
    return [*parts, getattr(model._compile_metrics, "_user_weighted_metrics", None)]


def is_keras_own(thing: Any) -> bool:
    """Whether a class, its instance or a function is defined in Keras itself."""
    module = getattr(thing, "__module__", None) or type(thing).__module__
    return str(module).partition(".")[0] == "keras"


def remat_mode_of(layer: Any) -> Any:
    """The settings of the `RematScope` in which a layer was created; None if there was none."""
    return getattr(layer, "_remat_mode", None)  # Keras 3.8 has none


def symbolic_build(model: Any, batch: Any) -> None:
    """Builds a model, its metrics and its optimizer from a batch of symbolic tensors."""
    model._symbolic_build(data_batch=batch)


def compute_loss(model: Any, x: Any, y: Any, y_pred: Any, sample_weight: Any) -> Any:
    """Calls a model's `compute_loss` with `training=False`, if it has this argument."""
    return model._compute_loss(x, y, y_pred, sample_weight, training=False)


def takes_training(model: Any) -> bool:
    """Whether a model's `call` has the argument `training`."""
    return bool(model._call_has_training_arg)


def metric_function(metric: Any) -> Any:
    """The function that a `MeanMetricWrapper` wraps; None for other metrics."""
    return getattr(metric, "_fn", None)


def metrics_inside(metric: Any) -> list[Any]:
    """The metrics inside a metric, at any depth."""
    return [nested for inner in metric._metrics for nested in (inner, *metrics_inside(inner))]


def compiled_losses(model: Any) -> list[tuple[Any, Any]]:
    """The losses given to `compile`, each with the path of its output; [] before they are built."""
    compiled = model._compile_loss
    flat = compiled._flat_losses if compiled is not None and compiled.built else []
    return [(entry.path, entry.loss) for entry in flat]
