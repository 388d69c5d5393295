"""Chooses mixed precision by one word, and makes a model's outputs float32 for losses and metrics.

It does not compute in 16 bits itself: Keras does, by dtype policies. Keras also scales the loss: `compile`
adds the scaling for float16, and bfloat16 does not need it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import keras

from dtrain.base.log import logger
from dtrain.base.words import PRECISIONS, SHORT_PRECISIONS, known_word
from dtrain.upstream import keras_models, layer_calls

_HALVES = ("float16", "bfloat16")
# Layers that do not change numbers: the precision is decided by the layer before them.
_PASSING = ("Concatenate", "Flatten", "Identity", "Permute", "RepeatVector", "Reshape")


def precision_policy(word: str) -> str:
    """The name of the Keras dtype policy for a word; weights are float32 in each of these policies.

    Raises:
        ConfigurationError: the word is not known; the message lists the known words. Keras' "float16" and
            "bfloat16" are not among them, because they also keep weights in 16 bits.

    Example:
        ```python
        layer = keras.layers.Dense(8, dtype=dtrain.optim.precision_policy("mixed_bfloat16"))
        ```
    """
    return known_word("precision", word, PRECISIONS, near=SHORT_PRECISIONS)


@contextmanager
def precision(word: str) -> Iterator[str]:
    """A context in which layers and models are made that compute in the chosen precision.

    Layers and models keep the policy, so `compile` and `fit` may be called outside of the context. `compile`
    wraps the optimizer of a float16 model in Keras' `LossScaleOptimizer`. It looks at the policy of the
    model, so make the model itself in the context, too. Make its outputs float32 with `float32_outputs`.

    Args:
        word: "float32", "mixed_bfloat16" or "mixed_float16", as in Keras.

    Yields:
        The name of the policy.

    Raises:
        ConfigurationError: the word is not known.

    Example:
        ```python
        with dtrain.optim.precision("mixed_bfloat16"):
            model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        print(model.layers[0].compute_dtype)  # bfloat16
        ```
    """
    policy = precision_policy(word)
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(policy)
    try:
        yield policy
    finally:
        keras.config.set_dtype_policy(before)


def float32_outputs(model: keras.Model) -> keras.Model:
    """Makes a model's outputs float32, whatever it computes in; call it before `compile`.

    In a functional or Sequential model, the layers that compute the outputs get the policy float32, so that a
    softmax is not rounded to 16 bits. If an output comes from a layer that does not change numbers, such as
    `Reshape`, the layer before it gets the policy, too. The policies are saved with the model.

    The last layer of a subclassed model cannot be found, so the result of its `call` is cast to float32. The
    cast is not saved: call this function again on a loaded model. To compute a softmax in float32 as well,
    give the last layer `dtype="float32"`.

    Returns:
        The same model. A model that computes in float32 is not changed.

    Example:
        ```python
        with dtrain.optim.precision("mixed_bfloat16"):
            model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8), keras.layers.Dense(1)])
        model = dtrain.optim.float32_outputs(model)
        print(model(np.ones((1, 4))).dtype)  # float32
        ```
    """
    if not any(_computes_in_half(layer) for layer in keras_models.layers_of(model)):
        return model
    if isinstance(model, keras.Sequential):
        operations = _last_of_sequence(model)
    elif layer_calls.is_functional(model):
        operations = _last_operations(model)
    else:
        operations = []
        _cast_outputs(model)
    for operation in operations:
        _make_float32(operation)
    # Functions that were traced before would keep the old precision.
    model.train_function = model.test_function = model.predict_function = None
    return model


def _computes_in_half(layer: Any) -> bool:
    return getattr(layer, "compute_dtype", None) in _HALVES


def _last_of_sequence(model: keras.Sequential) -> list[Any]:
    """The layers that compute a Sequential model's output; works before the model is built."""
    layers = []
    for layer in reversed(model.layers):
        layers.append(layer)
        if not _passes_on(layer):
            break
    return layers


def _last_operations(model: Any) -> list[Any]:
    """The layers that compute a functional model's outputs, without duplicates."""
    layers: dict[int, Any] = {}
    seen: set[int] = set()
    left = list(keras.tree.flatten(model.outputs))
    while left:
        tensor = left.pop()
        operation, producers = layer_calls.made_by(tensor)
        if id(tensor) in seen or isinstance(operation, keras.layers.InputLayer):
            continue
        seen.add(id(tensor))
        if isinstance(operation, keras.layers.Layer):
            layers[id(operation)] = operation
        if _passes_on(operation):
            left.extend(producers)
    return list(layers.values())


def _passes_on(operation: Any) -> bool:
    """Whether an operation computes in the precision of its inputs."""
    return type(operation).__name__ in _PASSING or not isinstance(operation, keras.layers.Layer)


def _make_float32(layer: Any) -> None:
    if isinstance(layer, keras.Model):
        float32_outputs(layer)
        return
    if not any(_computes_in_half(sublayer) for sublayer in keras_models.layers_of(layer)):
        return
    inner = [sublayer for sublayer in keras_models.layers_of(layer) if sublayer is not layer]
    if inner and not isinstance(layer, keras.layers.Wrapper):
        # A user's layer with inner layers may be the whole network, so only its outputs are cast.
        _cast_outputs(layer)
        return
    for sublayer in (layer, *inner):
        sublayer.dtype_policy = "float32"


def _cast_outputs(layer: Any) -> None:
    """Makes a layer's `call` return float32 instead of 16-bit values."""
    call: Callable[..., Any] = layer.call
    if getattr(call, "_dtrain_float32", False):
        return

    @functools.wraps(call)
    def in_float32(*args: Any, **kwargs: Any) -> Any:
        return keras.tree.map_structure(_widened, call(*args, **kwargs))

    in_float32._dtrain_float32 = True  # type: ignore[attr-defined]
    object.__setattr__(layer, "call", in_float32)
    logger.info("What %s returns is cast to float32.", layer.name)


def _widened(value: Any) -> Any:
    dtype = getattr(value, "dtype", None)
    return keras.ops.cast(value, "float32") if dtype is not None and _name(dtype) in _HALVES else value


def _name(dtype: Any) -> str:
    return str(getattr(dtype, "name", dtype))
