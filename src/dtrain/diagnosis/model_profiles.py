"""Makes the profile of a Keras model: its weights by layer, and its memory as `predict_memory` says it.

It trains nothing; `script_profile` adds what it measures. A model is a saved file, or a function makes it.
"""

from __future__ import annotations

import importlib
import math
import runpy
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tensorflow as tf

from dtrain.base import safe_files
from dtrain.diagnosis.user_script import described
from dtrain.errors import ConfigurationError, DtrainError
from dtrain.optim.memory import predict_memory
from dtrain.planning.model_profile import LayerProfile, ModelProfile

_FORMS = "Give a saved .keras file, or module:function or file.py:function, which makes a compiled model."


def model_of(name: str) -> Any:
    """The compiled model of a saved file, or one that a function makes.

    Args:
        name: a `.keras` file; or `module:function`, also of the current directory; or `file.py:function`.

    Raises:
        ConfigurationError: there is no such file or function, it cannot be used, or gives no Keras model.
    """
    import keras

    tf.config.set_visible_devices([], "GPU")  # a prediction needs none
    try:
        model = _loaded(name) if name.endswith(".keras") else _made(name)
    except DtrainError:
        raise
    except Exception as error:
        raise ConfigurationError(f"{name} gives no model: {described(error)}.", hint=_FORMS) from error
    if not isinstance(model, keras.Model):
        raise ConfigurationError(f"{name} gives a {type(model).__name__}, not a Keras model.", hint=_FORMS)
    return model


def _loaded(path: str) -> Any:
    import keras

    try:
        safe_files.check_regular(path)
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error.strerror or error}.", hint=_FORMS) from error
    return keras.saving.load_model(path)  # in Keras' safe mode: no code of the file's is run


def _made(name: str) -> Any:
    place, colon, function = name.rpartition(":")
    if not colon or not place or not function.isidentifier():
        raise ConfigurationError(f"{name!r} names no model.", hint=_FORMS)
    if place.endswith(".py"):
        sys.path.insert(0, str(Path(place).resolve().parent))
        names: Mapping[str, Any] = runpy.run_path(place)
    else:
        sys.path.insert(0, "")
        names = vars(importlib.import_module(place))
    if not callable(names.get(function)):
        raise ConfigurationError(f"{place} has no function {function!r}.", hint=_FORMS)
    return names[function]()


def weights_by_layer(model: Any) -> dict[str, list[int]]:
    """The bytes of the weights that are trained, by the path of their layer, in the model's order."""
    layers: dict[str, list[int]] = {}
    for variable in model.trainable_variables:
        layer = variable.path.rpartition("/")[0] or variable.path
        size = math.prod(variable.shape) * tf.as_dtype(variable.dtype).size
        layers.setdefault(layer, []).append(size)
    return layers


def profile_of_model(model: Any, batch: Any) -> ModelProfile:
    """A model's weights and memory as a profile; it says nothing of times, and all layers have the same work.

    Args:
        model: a compiled model.
        batch: as for `predict_memory`: the number of examples, or a batch.

    Raises:
        ConfigurationError, DataError: as `predict_memory`; or the model trains no weight.
    """
    memory = predict_memory(model, batch)
    layers = weights_by_layer(model)
    if not layers:
        raise ConfigurationError(
            f"{model.name!r} has no weights that are trained.", hint="Set trainable of a layer to True."
        )
    examples = batch if isinstance(batch, int) else examples_of(batch)
    trained = sum(map(sum, layers.values()))
    activations = memory.activations / examples / len(layers)
    return ModelProfile(
        name=model.name,
        source="memory: dtrain.optim.predict_memory",
        layers=tuple(
            LayerProfile(
                name=name, gradients=tuple(sizes), work=1.0, backward_work=1.0, activation_bytes=activations
            )
            for name, sizes in layers.items()
        ),
        rates=(),
        optimizer_slots=memory.optimizer / trained,
        frozen_bytes=max(memory.parameters - trained, 0),
        held_gradient_bytes=memory.gradients if memory.gradients != trained else None,
    )


def examples_of(batch: Any) -> int:
    """The examples of a batch, which is a nest of arrays, tensors or specs."""
    return next(int(leaf.shape[0]) for leaf in tf.nest.flatten(batch) if leaf is not None and len(leaf.shape))
