"""Rematerialization by one word: layers are computed again in the backward pass, which saves memory for time.

It only sets Keras' `RematScope`; the engine keeps the numbers the same under a strategy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import keras

from dtrain.base.words import known_word
from dtrain.engine.install import install
from dtrain.engine.replica.rematerialization import OwnNames
from dtrain.errors import ConfigurationError
from dtrain.upstream.versions import require_keras

MODES = {
    "none": "none",
    "full": "full",
    "activations": "activations",
    "larger_than": "larger_than",
    "layers": "list_of_layers",
    "list_of_layers": "list_of_layers",
}


@contextmanager
def rematerialize(
    mode: str = "full", *, size: int | None = None, layers: Sequence[str] = ()
) -> Iterator[None]:
    """A context for making layers that keep only their inputs, and are computed again in the backward pass.

    This is gradient checkpointing (Chen et al., arXiv:1604.06174). The numbers do not change: the second
    forward pass draws the same dropout masks, and moving statistics are written once. It saves memory in
    layers with large tensors between their input and their output: a custom block, a nested model, an
    attention layer. Tensors between two layers are kept as before. The model that `fit` trains is not itself
    rematerialized; of nested layers, the outermost is. Optimizers, losses and metrics are not affected.

    Random numbers must be drawn through Keras (`keras.random`, Keras' layers): those of `tf.random` would
    differ in the second pass. Make the layers in the context; they may be called outside of it.

    Args:
        mode: "full" for all layers, "activations" for activation functions of layers such as Dense,
            "larger_than" for layers whose output is larger than `size`, "layers" for those named in `layers`,
            "none" for no layer.
        size: number of elements in an output; an unknown batch size counts as 1.
        layers: names of layers.

    Raises:
        UnsupportedVersionError: Keras is older than 3.9.
        ConfigurationError: the mode is not known, an argument that it needs is missing, or an argument does
            not belong to it. During training: a layer adds a loss or writes to its own weights in its call,
            or the strategy is ParameterServerStrategy.

    Example:
        ```python
        with dtrain.optim.rematerialize("full"):
            attention = keras.layers.MultiHeadAttention(num_heads=2, key_dim=8)
        ```
    """
    word = MODES[known_word("mode", mode, MODES)]
    needs = {"larger_than": ("size", size is not None), "list_of_layers": ("layers", bool(layers))}
    name, given = needs.get(word, ("", True))
    if not given:
        raise ConfigurationError(f"mode={mode!r} was set without {name}.", hint=f"give {name}=... as well")
    for other, (argument, present) in needs.items():
        if present and other != word:
            raise ConfigurationError(
                f"{argument} was given, but mode={mode!r} does not use it.", hint=f"set mode={other!r}"
            )
    if isinstance(layers, str):
        raise ConfigurationError(f"layers={layers!r} is one string.", hint=f"a list: [{layers!r}]")
    if word == "none":
        yield
        return
    require_keras("3.9", "rematerialize")
    install()
    with keras.RematScope(word, output_size_threshold=size or 0, layer_names=OwnNames(layers)):
        yield
