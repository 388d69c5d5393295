"""Trades time for memory by one word: layers whose inside is computed again in the backward pass.

What is chosen by the word is Keras' `RematScope`; that the numbers stay the same is the engine's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import keras

from dtrain.errors import ConfigurationError
from dtrain.keras_engine.hook import install
from dtrain.keras_engine.rematerialization import OwnNames
from dtrain.words import known_word

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
    """Layers that are made within it keep their inputs only and are computed again in the backward pass.

    Gradient checkpointing (Chen et al., arXiv:1604.06174). The numbers are the same: the second time draws
    the same dropout masks, moving statistics are written once. It pays where a layer holds much between its
    input and its output: a block of one's own, a nested model, an attention. What lies between two layers is
    kept as before, and the model that `fit` trains is not taken as one layer itself; of layers within layers
    the outermost counts. An optimizer, losses and metrics are not concerned.

    Random numbers must be drawn through Keras (`keras.random`, Keras' layers): those of `tf.random` would
    differ the second time. The context belongs to the making of the layers, not to their calls.

    Args:
        mode: "full" for all layers, "activations" for activation functions of layers such as Dense,
            "larger_than" for layers whose output is larger than `size`, "layers" for those named in `layers`,
            "none" for none.
        size: numbers in an output, the batch counted as 1 where its size is not known.
        layers: names of layers.

    Raises:
        ConfigurationError: the mode is not known, or what it needs is missing. While training: a layer adds a
            loss or writes to its own weights within its call, or the strategy is ParameterServerStrategy.
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
    install()
    with keras.RematScope(word, output_size_threshold=size or 0, layer_names=OwnNames(layers)):
        yield
