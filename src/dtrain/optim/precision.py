"""Mixed precision by one word, with outputs that losses and metrics can count on.

Computing in 16 bits is Keras' own (dtype policies); so is the scaling of the loss, which `compile` adds for
float16 by itself and which bfloat16 does not need.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import keras

from dtrain.log import logger
from dtrain.upstream import keras as upstream_keras
from dtrain.words import PRECISIONS, SHORT_PRECISIONS, known_word

_HALVES = ("float16", "bfloat16")
# Layers that pass numbers on as they are: what matters is who computed them.
_PASSING = ("Concatenate", "Flatten", "Identity", "Permute", "RepeatVector", "Reshape")


def precision_policy(word: str) -> str:
    """The Keras policy of a word; weights are float32 with each of them.

    Raises:
        ConfigurationError: listing the known words and the nearest. Keras' "float16" and "bfloat16", which
            keep weights in 16 bits too, are none of them.
    """
    return known_word("precision", word, PRECISIONS, near=SHORT_PRECISIONS)


@contextmanager
def precision(word: str) -> Iterator[str]:
    """Layers and models that are made within it compute in the precision of the word.

    The policy stays with them: compile and fit may stand outside. `compile` wraps the optimizer of a float16
    model in Keras' `LossScaleOptimizer`; make the model itself within the context too, since compile looks
    at the model's own policy. Make its outputs float32 with `float32_outputs`.

    Args:
        word: "float32", "mixed_bfloat16" or "mixed_float16", as in Keras.

    Yields:
        The name of the policy.

    Raises:
        ConfigurationError: the word is not known.
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

    In a functional or Sequential model the layers that compute the outputs are given the policy float32, so
    that a softmax is not rounded to 16 bits; layers that only pass numbers on, such as `Reshape`, are gone
    through to those before them. This is saved with the model. Of a subclassed model it cannot be known
    which layer is the last: what its `call` returns is cast, which a loaded model needs again. (Give its
    last layer `dtype="float32"` to have the softmax computed so, too.)

    Returns:
        The same model. One that computes in float32 is not changed.
    """
    if not any(_computes_in_half(layer) for layer in upstream_keras.layers_of(model)):
        return model
    if isinstance(model, keras.Sequential):
        operations = _last_of_sequence(model)
    elif upstream_keras.is_functional(model):
        operations = _last_operations(model)
    else:
        operations = []
        _cast_outputs(model)
    for operation in operations:
        _make_float32(operation)
    # A function that was traced before computes as it did then.
    model.train_function = model.test_function = model.predict_function = None
    return model


def _computes_in_half(layer: Any) -> bool:
    return getattr(layer, "compute_dtype", None) in _HALVES


def _last_of_sequence(model: keras.Sequential) -> list[Any]:
    """The layers that compute a Sequential model's output, also before it is built."""
    found = []
    for layer in reversed(model.layers):
        found.append(layer)
        if not _passes_on(layer):
            break
    return found


def _last_operations(model: Any) -> list[Any]:
    """The layers that compute a functional model's outputs, each once."""
    found: dict[int, Any] = {}
    seen: set[int] = set()
    left = list(keras.tree.flatten(model.outputs))
    while left:
        tensor = left.pop()
        operation, producers = upstream_keras.made_by(tensor)
        if id(tensor) in seen or isinstance(operation, keras.layers.InputLayer):
            continue
        seen.add(id(tensor))
        if isinstance(operation, keras.layers.Layer):
            found[id(operation)] = operation
        if _passes_on(operation):
            left.extend(producers)
    return list(found.values())


def _passes_on(operation: Any) -> bool:
    """Whether an operation computes in the precision of what it is given."""
    return type(operation).__name__ in _PASSING or not isinstance(operation, keras.layers.Layer)


def _make_float32(layer: Any) -> None:
    if isinstance(layer, keras.Model):
        float32_outputs(layer)
        return
    if not any(_computes_in_half(each) for each in upstream_keras.layers_of(layer)):
        return
    inner = [each for each in upstream_keras.layers_of(layer) if each is not layer]
    if inner and not isinstance(layer, keras.layers.Wrapper):
        # A block of the user's own may be the whole network.
        _cast_outputs(layer)
        return
    for each in (layer, *inner):
        each.dtype_policy = "float32"


def _cast_outputs(layer: Any) -> None:
    """Has a layer's `call` return float32 in the place of 16 bits."""
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
