"""Decides whether many steps on one replica run in one XLA program, with `jit_compile="auto"`.

XLA rounds differently from TensorFlow's own kernels, so the decision follows from the model, the batch and
the number of steps, never from a measured time: the same program always decides the same. On a GPU, where
"auto" compiles each step, the rule only decides how many steps one program runs. How steps run in XLA is not
decided here: `xla_steps.py` does.
"""

from __future__ import annotations

import math
import weakref
from typing import Any

import keras

from dtrain.engine.step.steps import step_is_stock
from dtrain.upstream import keras_models, keras_variables, tf_tracing

LEAST_STEPS = 1000
"""The least number of steps: compiling takes about the time that XLA saves in this many small steps."""

MOST_MULTIPLICATIONS = 30e6
"""The most multiplications of a step's forward pass; for more, TensorFlow's own kernels, which use all cores,
are as fast."""

# Layers that XLA can compile for a CPU, and that draw the same random numbers there (`xla_steps.py`).
_LAYERS = frozenset(
    (
        "Activation", "Add", "Average", "BatchNormalization", "Concatenate", "Dense", "Dot", "Dropout", "ELU",
        "Flatten", "Functional", "Identity", "InputLayer", "LayerNormalization", "LeakyReLU", "Maximum",
        "Minimum", "Multiply", "PReLU", "ReLU", "Rescaling", "Reshape", "Sequential", "Softmax", "Subtract",
        "UnitNormalization",
    )
)  # fmt: skip

# Name endings of the attributes in which a layer, loss, metric or optimizer keeps functions it was given.
_GIVEN = ("fn", "activation", "_regularizer", "_constraint", "_learning_rate")

_auto: weakref.WeakSet[Any] = weakref.WeakSet()


def note_compiled(model: Any, *, auto: bool) -> None:
    """Remembers whether a model was compiled with `jit_compile="auto"`."""
    _auto.discard(model)
    if auto:
        _auto.add(model)


def runs_in_xla(model: Any, name: str, steps: int | None, batch: int | None) -> bool:
    """Whether all steps of a `fit`, of its evaluations, or of an `evaluate` or `predict` run in XLA.

    Args:
        model: a compiled and built model.
        name: the model's method that makes a step: "train_step", "test_step" or "predict_step".
        steps: the number of planned steps; None if not known.
        batch: the examples in a batch; None if not known.
    """
    if steps is None or steps < LEAST_STEPS or batch is None or model not in _auto:
        return False
    if model.run_eagerly or not step_is_stock(model, name):
        return False
    if tf_tracing.deterministic_operations():
        return False
    if not _is_small(model, batch) or not _has_plain_layers(model):
        return False
    if name != "predict_step" and not _has_plain_losses(model):
        return False
    return name != "train_step" or _has_plain_optimizer(model)


def _is_small(model: Any, batch: int) -> bool:
    kernels = [v for v in model.trainable_variables if len(v.shape) == 2]
    others = [v for v in model.trainable_variables if len(v.shape) > 2]
    return not others and batch * sum(math.prod(v.shape) for v in kernels) <= MOST_MULTIPLICATIONS


def _has_plain_layers(model: Any) -> bool:
    """Whether the model's layers are Keras' own, in float32, on the CPU or where Keras compiles each step."""
    layers = [model, *keras_models.layers_of(model)]
    if not all(_is_keras(layer) and type(layer).__name__ in _LAYERS for layer in layers):
        return False
    if any(layer.dtype_policy.name != "float32" for layer in layers):
        return False
    # With "auto", Keras compiles on a GPU only. There, each step runs in XLA, on the same variables.
    if model.jit_compile:
        return True
    return all("GPU" not in device and "TPU" not in device for device in map(_device, model.variables))


def _has_plain_losses(model: Any) -> bool:
    """Whether the losses and metrics are Keras' own."""
    losses = [loss for _, loss in keras_models.compiled_losses(model)]
    return bool(losses) and all(map(_is_keras, [*losses, *model.metrics]))


def _has_plain_optimizer(model: Any) -> bool:
    """Whether the optimizer is Keras' own, and updates the weights in each step, without a loss scale."""
    optimizer = model.optimizer
    if not _is_keras(optimizer) or not isinstance(optimizer, keras.optimizers.Optimizer):
        return False
    scaled = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    return not scaled and not optimizer.gradient_accumulation_steps


def _is_keras(thing: Any) -> bool:
    """Whether an object, and every function that it was given, is Keras' own."""
    given = [value for name, value in vars(thing).items() if name.endswith(_GIVEN) and callable(value)]
    return all(map(keras_models.is_keras_own, [thing, *given]))


def _device(variable: Any) -> str:
    return str(getattr(keras_variables.value_of(variable), "device", "")).upper()
