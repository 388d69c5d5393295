"""Reads and sets what has a private name around the calls of layers: their graph, state, masks, logits."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Iterator
from typing import Any

from dtrain.upstream.keras_models import layers_of


def is_functional(model: Any) -> bool:
    """Whether the graph of layers alone defines a model: it is functional, and its `call` is Keras' own."""
    from keras.src.models.functional import Functional

    return isinstance(model, Functional) and type(model).call is Functional.call


def made_by(tensor: Any) -> tuple[Any, list[Any]]:
    """The operation that produced a symbolic tensor of a functional model, and the operation's inputs."""
    history = tensor._keras_history
    node = history.operation._inbound_nodes[history.node_index]
    return history.operation, list(node.input_tensors)


def is_built(model: Any) -> bool:
    """Whether all layers, metrics, losses and the optimizer are built: `symbolic_build` would do nothing."""
    parts = model._compile_metrics, model._compile_loss, model.optimizer
    return all(part.built for part in (*layers_of(model), *parts) if part is not None)


@contextlib.contextmanager
def built_or_untouched(model: Any) -> Iterator[None]:
    """If the code inside the context fails, marks layers as not built whose inner layers were not built.

    If calling a layer to build it fails, Keras marks the layer as built, warns, and locks it against new
    variables.
    """
    before = {id(layer) for layer in layers_of(model) if layer.built}
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="(?s).*unbuilt state")
            yield
    except Exception:
        for layer in layers_of(model):
            inside = [inner for inner in layer._flatten_layers(include_self=False) if not inner.built]
            if id(layer) not in before and inside:
                layer.built = False
                layer._tracker.unlock()
        raise


def count_added_losses(layer: Any) -> int:
    """How many losses a layer and the layers inside it have added since the model was called last."""
    return sum(len(inner._losses) for inner in layer._flatten_layers())


def current_remat_mode() -> Any:
    """The settings of the innermost `RematScope`, with `mode` and `layer_names`; None outside of any."""
    from keras.src.backend.common.remat import get_current_remat_mode

    return get_current_remat_mode()


def called_first() -> Any:
    """The layer or model whose call is the outermost one now; None outside of any call."""
    from keras.src.backend.common import global_state

    context = global_state.get_global_attribute("current_call_ctx")
    return getattr(context, "entry_layer", None)


def call_surroundings() -> dict[str, Any]:
    """Copies of the global state that a layer's call depends on: the call context and the autocast scope."""
    from keras.src.backend.common import global_state

    names = ("current_call_ctx", "autocast_scope")
    return {name: copy.copy(global_state.get_global_attribute(name)) for name in names}


@contextlib.contextmanager
def in_surroundings(surroundings: dict[str, Any]) -> Iterator[None]:
    """Sets, inside the context, the global state that `call_surroundings` returned."""
    from keras.src.backend.common import global_state

    before = {name: global_state.get_global_attribute(name) for name in surroundings}
    for name, value in surroundings.items():
        global_state.set_global_attribute(name, copy.copy(value))
    try:
        yield
    finally:
        for name, value in before.items():
            global_state.set_global_attribute(name, value)


def mask_of(tensor: Any) -> Any:
    """The Keras mask that is attached to a tensor, or None."""
    from keras.src.backend.common.masking import get_keras_mask

    return get_keras_mask(tensor)


def set_mask(tensor: Any, mask: Any) -> None:
    """Attaches a mask to a tensor as Keras does; None attaches no mask."""
    from keras.src.backend.common.masking import set_keras_mask

    set_keras_mask(tensor, mask)


def logits_of(tensor: Any) -> Any:
    """The logits that Keras has attached to the result of its softmax or sigmoid; None if there are none.

    Keras' cross-entropies use the logits instead of the probabilities.
    """
    return getattr(tensor, "_keras_logits", None)


def set_logits(tensor: Any, logits: Any) -> None:
    """Attaches logits to a tensor as Keras does."""
    tensor._keras_logits = logits
