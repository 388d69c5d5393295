"""Kinds of layers and models."""

from __future__ import annotations

from typing import Any

import keras

from dtrain.conformance.corpus import ProgramRun, Values, program
from dtrain.conformance.parts import dataset, evaluated, images, regression, sgd, tokens, trained

L = keras.layers


@program()
def embedding(run: ProgramRun) -> Values:
    """An embedding, whose gradient names the rows that a batch uses."""
    x, y = tokens()
    with run.strategy.scope():
        layers = [L.Embedding(12, 4), L.GlobalAveragePooling1D(), L.Dense(3, activation="softmax")]
        model = keras.Sequential([keras.Input((6,), dtype="int32"), *layers])
        model.compile(keras.optimizers.Adagrad(0.1), "sparse_categorical_crossentropy")
    return trained(model, model.fit(dataset(x, y), epochs=2, verbose=0))


@program()
def recurrent(run: ProgramRun) -> Values:
    """Masked sequences through a bidirectional GRU."""
    x, y = tokens()
    with run.strategy.scope():
        layers = [
            L.Embedding(12, 4, mask_zero=True),
            L.Bidirectional(L.GRU(4)),
            L.Dense(3, activation="softmax"),
        ]
        model = keras.Sequential([keras.Input((6,), dtype="int32"), *layers])
        model.compile(sgd(), "sparse_categorical_crossentropy", metrics=["accuracy"])
    return trained(model, model.fit(dataset(x, y), epochs=2, verbose=0))


@program()
def attention(run: ProgramRun) -> Values:
    """A block of a transformer: attention, residual connection, layer normalization."""
    x, y = tokens()
    with run.strategy.scope():
        inputs = keras.Input((6,), dtype="int32")
        hidden = L.Embedding(12, 8)(inputs)
        hidden = L.LayerNormalization()(hidden + L.MultiHeadAttention(2, 4)(hidden, hidden))
        model = keras.Model(inputs, L.Dense(3, activation="softmax")(L.GlobalMaxPooling1D()(hidden)))
        model.compile(sgd(0.05), "sparse_categorical_crossentropy")
    return trained(model, model.fit(dataset(x, y), epochs=2, verbose=0))


@program()
def convolutions(run: ProgramRun) -> Values:
    """Convolutions and pooling."""
    x, y = images()
    with run.strategy.scope():
        layers = [
            L.Conv2D(4, 3, activation="tanh"),
            L.AveragePooling2D(2),
            L.Flatten(),
            L.Dense(3, "softmax"),
        ]
        model = keras.Sequential([keras.Input((6, 6, 2)), *layers])
        model.compile(sgd(0.05), "sparse_categorical_crossentropy", metrics=["accuracy"])
    record = model.fit(dataset(x, y, batch=10), epochs=2, verbose=0)
    return trained(model, record) | evaluated(model, x, y, batch=10)


@program()
def synchronized_batch_normalization(run: ProgramRun) -> Values:
    """`BatchNormalization(synchronized=True)`: the moments are those of the whole batch."""
    x, y = images()
    with run.strategy.scope():
        layers = [L.Conv2D(4, 3), L.BatchNormalization(synchronized=True), L.ReLU(), L.Flatten(), L.Dense(3)]
        model = keras.Sequential([keras.Input((6, 6, 2)), *layers])
        model.compile(sgd(0.02), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    record = model.fit(dataset(x, y, batch=10), epochs=2, verbose=0)
    return trained(model, record) | evaluated(model, x, y, batch=10)


@program()
def subclassed(run: ProgramRun) -> Values:
    """A subclass of `keras.Model`, built by its first batch."""

    class TwoLayers(keras.Model):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.hidden, self.head = L.Dense(6, activation="tanh"), L.Dense(1)

        def call(self, inputs: Any) -> Any:
            return self.head(self.hidden(inputs))

    x, y = regression(44)
    with run.strategy.scope():
        model = TwoLayers()
        model.compile(sgd(), "mse")
    return trained(model, model.fit(dataset(x, y), epochs=2, verbose=0))
