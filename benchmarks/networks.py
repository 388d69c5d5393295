"""The models that are trained beside each other, described once and built for Keras and for PyTorch.

It knows neither strategies nor loops, and imports a library only to build for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

HEADS = 4


@dataclass(frozen=True, kw_only=True)
class Network:
    """A model, what it is trained with, and its made-up data.

    Attributes:
        about: one line for a table.
        batch: examples in a batch of one worker.
        shape: of an example.
        convolutions: channels of 3x3 convolutions, each but the last before a pooling.
        widths: of the hidden dense layers.
        blocks: of a transformer over a sequence of vectors; for Keras only.
        outputs: of the last layer.
        optimizer: "sgd" or "adam", with the default settings that Keras has.
        classes: whether it is trained to tell classes; else on the mean squared error.
        steps: that an epoch has.
    """

    about: str
    batch: int
    shape: tuple[int, ...]
    convolutions: tuple[int, ...] = ()
    widths: tuple[int, ...] = ()
    blocks: int = 0
    outputs: int = 1
    optimizer: str = "sgd"
    classes: bool = False
    steps: int

    def data(self, examples: int) -> tuple[np.ndarray, np.ndarray]:
        """Inputs and targets, the same every time."""
        random = np.random.default_rng(0)
        x = random.standard_normal((examples, *self.shape), dtype="float32")
        if self.classes:
            return x, random.integers(0, self.outputs, examples)
        return x, random.standard_normal((examples, self.outputs), dtype="float32")

    def keras(self) -> Any:
        """A Keras model, built, not compiled."""
        import keras

        keras.utils.set_random_seed(1)
        layers = keras.layers
        if self.blocks:
            return self._transformer()
        stack: list[Any] = [keras.Input(self.shape)]
        for number, channels in enumerate(self.convolutions, 1):
            stack.append(layers.Conv2D(channels, 3, padding="same", activation="relu"))
            if number < len(self.convolutions):
                stack.append(layers.MaxPooling2D())
        if self.convolutions:
            stack.append(layers.GlobalAveragePooling2D())
        stack += [layers.Dense(width, activation="relu") for width in self.widths]
        return keras.Sequential([*stack, layers.Dense(self.outputs)])

    def _transformer(self) -> Any:
        """Blocks of attention and two dense layers, each beside a connection that skips it."""
        import keras

        layers, width = keras.layers, self.shape[-1]
        x = inputs = keras.Input(self.shape)
        for _ in range(self.blocks):
            normal = layers.LayerNormalization()(x)
            x = layers.Add()([x, layers.MultiHeadAttention(HEADS, width // HEADS)(normal, normal)])
            wide = layers.Dense(4 * width, activation="gelu")(layers.LayerNormalization()(x))
            x = layers.Add()([x, layers.Dense(width)(wide)])
        return keras.Model(inputs, layers.Dense(self.outputs)(layers.GlobalAveragePooling1D()(x)))

    def keras_loss(self) -> Any:
        """What `compile` takes."""
        import keras

        return keras.losses.SparseCategoricalCrossentropy(from_logits=True) if self.classes else "mse"

    def keras_step(self) -> tuple[Any, Any]:
        """What a loop without `compile` needs, for a new model.

        Returns:
            A function of a batch's inputs and targets, which gives the mean loss and the gradients; and a
            function of gradients, which updates the model.
        """
        import keras
        import tensorflow as tf

        model = self.keras()
        variables = model.trainable_variables
        optimizer = keras.optimizers.get(self.optimizer)
        optimizer.build(variables)
        loss_of = keras.losses.get(self.keras_loss())

        def loss_and_gradients(x: Any, y: Any) -> tuple[Any, list[Any]]:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(loss_of(y, model(x, training=True)))
            return loss, tape.gradient(loss, [v.value for v in variables])

        return loss_and_gradients, lambda gradients: optimizer.apply(gradients, variables)

    def torch(self) -> Any:
        """The same for PyTorch."""
        from torch import nn

        if self.blocks:
            raise NotImplementedError("a transformer is built for Keras only")
        stack: list[Any] = []
        before = self.shape[-1]
        for number, channels in enumerate(self.convolutions, 1):
            stack += [nn.Conv2d(before, channels, 3, padding=1), nn.ReLU()]
            if number < len(self.convolutions):
                stack.append(nn.MaxPool2d(2))
            before = channels
        if self.convolutions:
            stack += [nn.AdaptiveAvgPool2d(1), nn.Flatten()]
        for width in self.widths:
            stack += [nn.Linear(before, width), nn.ReLU()]
            before = width
        return nn.Sequential(*stack, nn.Linear(before, self.outputs))


NETWORKS = {
    "tiny": Network(
        about="12-48-48-1, Adam, batch 32",
        batch=32, shape=(12,), widths=(48, 48), optimizer="adam", steps=2000,
    ),
    "small": Network(
        about="10-64-64-1, SGD, batch 32",
        batch=32, shape=(10,), widths=(64, 64), steps=240,
    ),
    "mid": Network(
        about="CNN on 32x32x3, 20,042 parameters, SGD, batch 64",
        batch=64, shape=(32, 32, 3), convolutions=(32, 64), outputs=10, classes=True, steps=240,
    ),
    "big": Network(
        about="9 dense layers, 7.6 million parameters (30 MB), SGD, batch 64",
        batch=64, shape=(974,), widths=(974,) * 8, outputs=10, steps=240,
    ),
    "transformer": Network(
        about="3 transformer blocks of width 128 on 32 vectors, 0.6 million parameters, Adam, batch 16",
        batch=16, shape=(32, 128), blocks=3, outputs=10, optimizer="adam", classes=True, steps=60,
    ),
}  # fmt: skip
