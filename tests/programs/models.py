"""Every way to write a model, and the layers whose variables or gradients are special."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from .common import Values, classes, dataset, images, mlp, outcome, regression, sgd, tokens
from .registry import Env, program

layers = keras.layers


@program("sequential_deferred_build")
def _(env: Env) -> Values:
    x, y = regression(44)
    with env.strategy.scope():
        model = keras.Sequential([layers.Dense(5, activation="tanh"), layers.Dense(1)])
        model.compile(sgd(), "mse", metrics=["mae"])
    return outcome(model, model.fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0), x, y)


@program("functional_with_shared_layer")
def _(env: Env) -> Values:
    x, y = regression(44)
    with env.strategy.scope():
        shared = layers.Dense(4, activation="tanh")
        inputs = keras.Input((4,))
        hidden = shared(inputs)
        hidden = layers.Add()([shared(hidden), hidden])
        model = keras.Model(inputs, layers.Dense(1)(layers.LayerNormalization()(hidden)))
        model.compile(sgd(), "mse")
    return outcome(model, model.fit(dataset(x, y), epochs=2, verbose=0))


@program("subclassed_model")
def _(env: Env) -> Values:
    x, y = classes(44)

    class Net(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.hidden = layers.Dense(6, activation="tanh")
            self.head = layers.Dense(3)

        def call(self, inputs: Any, training: bool = False) -> Any:
            return self.head(self.hidden(inputs)) * (1.0 if training else 0.9)

    with env.strategy.scope():
        model = Net()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(sgd(), loss, metrics=["accuracy"])
    return outcome(model, model.fit(dataset(x, y), epochs=2, verbose=0))


@program("layer_that_holds_a_traced_function")
def _(env: Env) -> Values:
    """What trains and what validates call the same traces, to which TensorFlow adds what gradients need."""
    x, y = regression(44)

    class Repeated(layers.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.squared = tf.function(lambda z: tf.tanh(z) * z)

        @tf.function
        def call(self, inputs: Any) -> Any:
            return tf.while_loop(lambda i, _: i < 3, lambda i, z: (i + 1, self.squared(z)), (0, inputs))[1]

    with env.strategy.scope():
        model = keras.Sequential([keras.Input((4,)), layers.Dense(5), Repeated(), layers.Dense(1)])
        model.compile(sgd(), "mse", metrics=["mae"])
    record = model.fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0, validation_data=(x, y))
    return outcome(model, record) | {"predict": model.predict(x, verbose=0)}


@program("nested_models")
def _(env: Env) -> Values:
    x, y = regression(40)
    with env.strategy.scope():
        inner = mlp(outputs=3, activation="tanh")
        inputs = keras.Input((4,))
        model = keras.Model(inputs, layers.Dense(1)(inner(inputs)))
        model.compile(sgd(), "mse")
    return outcome(model, model.fit(dataset(x, y, batch=10), epochs=2, verbose=0))


@program("embedding_sparse_gradients")
def _(env: Env) -> Values:
    x, y = tokens(40)
    with env.strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((6,), dtype="int32"),
                layers.Embedding(12, 4),
                layers.GlobalAveragePooling1D(),
                layers.Dense(3, activation="softmax"),
            ]
        )
        model.compile(sgd(0.5), "sparse_categorical_crossentropy", metrics=["accuracy"])
    return outcome(model, model.fit(dataset(x, y), epochs=3, verbose=0))


@program("embedding_adam_clipped")
def _(env: Env) -> Values:
    x, y = tokens(40)
    with env.strategy.scope():
        model = keras.Sequential(
            [layers.Embedding(12, 4), layers.Flatten(), layers.Dense(3, activation="softmax")]
        )
        model.compile(
            keras.optimizers.Adam(0.01, global_clipnorm=0.1, epsilon=1e-3), "sparse_categorical_crossentropy"
        )
    return outcome(model, model.fit(dataset(x, y), epochs=2, verbose=0))


@program("embedding_mask_lstm")
def _(env: Env) -> Values:
    x, y = tokens(40)
    with env.strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((6,), dtype="int32"),
                layers.Embedding(12, 4, mask_zero=True),
                layers.LSTM(4),
                layers.Dense(3, activation="softmax"),
            ]
        )
        model.compile(sgd(0.3), "sparse_categorical_crossentropy", metrics=["accuracy"])
    return outcome(model, model.fit(dataset(x, y), epochs=2, verbose=0), x, y)


@program("masked_sequence_targets")
def _(env: Env) -> Values:
    x, _ = tokens(40)
    y = ((x + np.roll(x, 1, axis=1)) % 3).astype("int32")
    with env.strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((6,), dtype="int32"),
                layers.Embedding(12, 4, mask_zero=True),
                layers.GRU(4, return_sequences=True),
                layers.Dense(3, activation="softmax"),
            ]
        )
        # The mask reaches loss and metric, so their weights differ from example to example.
        model.compile(
            sgd(0.3),
            "sparse_categorical_crossentropy",
            metrics=["accuracy"],
            weighted_metrics=[keras.metrics.SparseCategoricalCrossentropy(name="weighted")],
        )
    return outcome(model, model.fit(dataset(x, y, batch=15), epochs=2, verbose=0))


@program("masking_layer")
def _(env: Env) -> Values:
    rng = np.random.default_rng(3)
    x = rng.normal(size=(40, 5, 2)).astype("float32")
    for row, used in enumerate(rng.integers(1, 6, size=40)):
        x[row, used:] = 0
    y = x.sum(axis=(1, 2))[:, None] + 1
    with env.strategy.scope():
        model = keras.Sequential(
            [keras.Input((5, 2)), layers.Masking(0.0), layers.SimpleRNN(4), layers.Dense(1)]
        )
        model.compile(sgd(0.03), "mse")
    return outcome(model, model.fit(dataset(x, y), epochs=2, verbose=0))


@program("bidirectional_recurrent")
def _(env: Env) -> Values:
    rng = np.random.default_rng(4)
    x = rng.normal(size=(30, 4, 2)).astype("float32")
    y = x[:, -1, :1] + 1
    with env.strategy.scope():
        model = keras.Sequential([keras.Input((4, 2)), layers.Bidirectional(layers.GRU(3)), layers.Dense(1)])
        model.compile(sgd(0.05), "mse")
    return outcome(model, model.fit(dataset(x, y, batch=10), epochs=2, verbose=0))


@program("attention_block")
def _(env: Env) -> Values:
    x, y = tokens(40)
    with env.strategy.scope():
        inputs = keras.Input((6,), dtype="int32")
        hidden = layers.Embedding(12, 8)(inputs)
        attended = layers.MultiHeadAttention(num_heads=2, key_dim=4)(hidden, hidden)
        hidden = layers.LayerNormalization()(hidden + attended)
        outputs = layers.Dense(3, activation="softmax")(layers.GlobalAveragePooling1D()(hidden))
        model = keras.Model(inputs, outputs)
        model.compile(sgd(), "sparse_categorical_crossentropy", metrics=["accuracy"])
    return outcome(model, model.fit(dataset(x, y), epochs=2, verbose=0))


@program("convolutions")
def _(env: Env) -> Values:
    x, y = images(30)
    with env.strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((6, 6, 2)),
                layers.Conv2D(4, 3, padding="same", activation="tanh"),
                layers.AveragePooling2D(2),
                layers.SeparableConv2D(4, 2, activation="tanh"),
                layers.GlobalAveragePooling2D(),
                layers.Dense(3, activation="softmax"),
            ]
        )
        model.compile(sgd(), "sparse_categorical_crossentropy", metrics=["accuracy"])
    return outcome(model, model.fit(dataset(x, y, batch=8), epochs=2, verbose=0))


@program("synchronized_batch_normalization")
def _(env: Env) -> Values:
    x, y = images(24)
    with env.strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((6, 6, 2)),
                layers.Conv2D(3, 3),
                layers.BatchNormalization(synchronized=True, momentum=0.8),
                layers.Activation("tanh"),
                layers.Flatten(),
                layers.Dense(3, activation="softmax"),
            ]
        )
        model.compile(sgd(0.03), "sparse_categorical_crossentropy", metrics=["accuracy"])
    return outcome(model, model.fit(dataset(x, y, batch=8), epochs=2, verbose=0), x, y)


@program("frozen_batch_normalization")
def _(env: Env) -> Values:
    x, y = regression(40)
    with env.strategy.scope():
        model = keras.Sequential(
            [keras.Input((4,)), layers.Dense(4), layers.BatchNormalization(), layers.Dense(1)]
        )
        model.layers[1].trainable = False
        model.compile(sgd(), "mse")
    return outcome(model, model.fit(dataset(x, y, batch=10), epochs=2, verbose=0))


@program("normalization_adapted")
def _(env: Env) -> Values:
    x, y = regression(40)
    with env.strategy.scope():
        normalize = layers.Normalization()
        normalize.adapt(x * 3 + 2)
        model = keras.Sequential([keras.Input((4,)), normalize, layers.Dense(4, "tanh"), layers.Dense(1)])
        model.compile(sgd(), "mse")
    return outcome(model, model.fit(dataset(x, y, batch=10), epochs=2, verbose=0))


@program("weight_wrappers")
def _(env: Env) -> Values:
    x, y = regression(40)
    with env.strategy.scope():
        # Its power iteration assigns a variable in the forward pass, alike on every replica.
        spectral = layers.SpectralNormalization(layers.Dense(5, activation="tanh"))
        model = keras.Sequential([keras.Input((4,)), spectral, layers.GroupNormalization(5), layers.Dense(1)])
        model.compile(sgd(), "mse")
    return outcome(model, model.fit(dataset(x, y, batch=10), epochs=2, verbose=0))


@program("initial_weights")
def _(env: Env) -> Values:
    with env.strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((6,), dtype="int32"),
                layers.Embedding(12, 4),
                layers.LSTM(3),
                layers.Dense(4, kernel_initializer="he_normal", bias_initializer="uniform"),
                layers.Dense(4, kernel_initializer=keras.initializers.Orthogonal(seed=5)),
            ]
        )
        late = keras.Sequential([layers.Dense(3), layers.Dense(2, kernel_initializer="random_normal")])
        late.build((None, 4))
    return {f"w{i}": w for i, w in enumerate(model.get_weights() + late.get_weights())}


@program("state_written_in_the_forward_pass")
def _(env: Env) -> Values:
    x, y = regression(48)

    class Centered(layers.Layer):
        """Keeps a running mean of what it sees, the way BatchNormalization keeps its statistics."""

        def build(self, shape: Any) -> None:
            self.mean = self.add_weight(
                shape=(shape[-1],), initializer="zeros", trainable=False, aggregation="mean", name="mean"
            )

        def call(self, inputs: Any, training: bool = False) -> Any:
            if training:
                found = keras.ops.mean(inputs, axis=0)
                self.mean.assign(self.mean * 0.9 + found * 0.1)
            return inputs - self.mean if not training else inputs

    with env.strategy.scope():
        model = keras.Sequential(
            [keras.Input((4,)), Centered(), layers.Dense(4, activation="tanh"), layers.Dense(1)]
        )
        model.compile(sgd(), "mse")
    return outcome(model, model.fit(dataset(x, y, batch=8), epochs=2, verbose=0))
