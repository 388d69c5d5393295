"""Input of unusual kinds trains as on one device: threads that read, sparse and ragged parts, odd batches."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import dtrain
from dtrain.errors import CompilationError, DataError
from refusals import refused

Program = Callable[[], Any]


def same_on_two_replicas(program: Program, one_device: Any = None) -> None:
    """The program gives the same numbers on one device, in a scope or in none, and on two replicas."""
    found = []
    for scope in (one_device or contextlib.nullcontext(), dtrain.MirroredStrategy().scope()):
        keras.utils.set_random_seed(3)
        with scope:
            found.append([np.asarray(leaf, "float64").ravel() for leaf in keras.tree.flatten(program())])
    for one, two in zip(*found, strict=True):
        np.testing.assert_allclose(two, one, rtol=2e-4, atol=1e-6)


def compiled(*layers: Any, loss: Any = "mse", **options: Any) -> keras.Sequential:
    model = keras.Sequential(list(layers))
    model.compile("sgd", loss, **options)
    return model


class Endless(keras.utils.PyDataset):
    """Batches without end, read by two threads."""

    num_batches = None

    def __init__(self) -> None:
        super().__init__(workers=2)

    def __getitem__(self, number: int) -> Any:
        x = np.random.default_rng(number).normal(size=(6, 4)).astype("float32")
        return x, x.sum(1, keepdims=True)


def test_threads_that_read_rest_between_epochs() -> None:
    def program() -> Any:
        model = compiled(keras.layers.Dense(1))
        fitted = model.fit(
            Endless(), epochs=3, steps_per_epoch=3, validation_data=Endless(), validation_steps=2, verbose=0
        )
        return [fitted.history, model.get_weights()]

    same_on_two_replicas(program)


def test_sparse_input_is_predicted_by_a_model_that_was_not_built() -> None:
    rng = np.random.default_rng(0)
    dense = (rng.random((7, 5)) < 0.3) * rng.normal(size=(7, 5)).astype("float32")

    def program() -> Any:
        x = tf.sparse.from_dense(dense)
        model = compiled(keras.layers.Dense(3, "tanh"), keras.layers.Dense(1))
        return [model.predict(x, batch_size=3, verbose=0), model.predict_on_batch(x)]

    same_on_two_replicas(program)


@pytest.mark.parametrize("kind", ["each row", "one value", "ragged sums"])
def test_ragged_labels(kind: str) -> None:
    rng = np.random.default_rng(0)
    lengths = rng.integers(0, 5, size=11)
    values = rng.normal(size=lengths.sum()).astype("float32")

    def squares(labels: Any, outputs: Any) -> Any:
        return tf.square(labels - outputs)

    def loss(labels: Any, outputs: Any) -> Any:
        if kind == "ragged sums":
            return squares(labels, outputs)
        each = squares(labels.to_tensor(shape=[None, 4]), outputs)
        return tf.reduce_sum(each, axis=1) if kind == "each row" else tf.reduce_mean(each)

    class Own(keras.losses.Loss):
        def call(self, y_true: Any, y_pred: Any) -> Any:
            return loss(y_true, y_pred)

    def program() -> Any:
        model = compiled(
            keras.layers.Dense(1),
            loss=Own(reduction="sum" if kind == "ragged sums" else "sum_over_batch_size"),
            metrics=[] if kind == "ragged sums" else [loss],
        )
        labels = tf.RaggedTensor.from_row_lengths(values, lengths)
        x = np.arange(33, dtype="float32").reshape(11, 3) / 33
        data = tf.data.Dataset.from_tensor_slices((x, labels)).batch(5)
        history = model.fit(data, epochs=2, verbose=0).history
        return [history, model.evaluate(data, verbose=0), model.get_weights()]

    same_on_two_replicas(program)


def test_a_loop_of_ones_own_compiles_what_can_be_compiled() -> None:
    strategy = dtrain.MirroredStrategy()
    x = np.arange(24, dtype="float32").reshape(6, 4) / 24
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        optimizer = keras.optimizers.SGD(0.1)
        optimizer.build(model.trainable_variables)

    def gradients(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x)))
        return tape.gradient(loss, model.trainable_variables)

    def step(x: Any) -> None:
        optimizer.apply_gradients(zip(gradients(x), model.trainable_variables, strict=True))

    compiled_step = tf.function(step, jit_compile=True)
    with refused(CompilationError, "optimizer.apply_gradients"):
        tf.function(lambda: strategy.run(compiled_step, args=(x,)))()


def test_a_compiled_function_in_a_step_is_one_devices_or_an_error_that_says_so() -> None:
    class Model(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.dense = keras.layers.Dense(1)

        def call(self, x: Any) -> Any:
            return self.dense(x)

        @tf.function(jit_compile=True)
        def gradients(self, x: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(self(x)))
            return tape.gradient(loss, self.trainable_variables)

        def train_step(self, data: Any) -> Any:
            self.optimizer.apply(self.gradients(data[0]), self.trainable_variables)
            return {"mean": tf.reduce_mean(data[0])}

    x = np.arange(28, dtype="float32").reshape(7, 4) / 28

    def program() -> Any:
        model = Model()
        model.build((None, 4))
        model.compile("sgd")
        model.fit(x, x, batch_size=4, epochs=2, shuffle=False, verbose=0)
        return model.get_weights()

    same_on_two_replicas(program)


@pytest.mark.parametrize("call", ["fit", "evaluate", "predict", "train_on_batch"])
def test_a_batch_that_cannot_be_cut_names_its_parts(call: str) -> None:
    def batches() -> Any:
        yield (
            {"nodes": np.ones((5, 3), "float32"), "edges": np.ones((8, 2), "float32")},
            np.ones((5, 1), "float32"),
        )

    def model_of_graphs() -> keras.Model:
        nodes, edges = keras.Input((3,), name="nodes"), keras.Input((2,), name="edges")
        mean = keras.layers.Lambda(lambda e: keras.ops.mean(e) + 0.0 * keras.ops.sum(e))(edges)
        model = keras.Model({"nodes": nodes, "edges": edges}, keras.layers.Dense(1)(nodes) + mean)
        model.compile("sgd", "mse")
        return model

    def run(model: keras.Model) -> None:
        if call == "train_on_batch":
            model.train_on_batch(*next(batches()))
            return
        spec = (
            {"nodes": tf.TensorSpec([None, 3]), "edges": tf.TensorSpec([None, 2])},
            tf.TensorSpec([None, 1]),
        )
        data = tf.data.Dataset.from_generator(batches, output_signature=spec)
        data = data.map(lambda x, y: x) if call == "predict" else data
        getattr(model, call)(data, verbose=0)

    with dtrain.MirroredStrategy().scope():
        model = model_of_graphs()
    before = model.get_weights()
    with refused(DataError, "x['nodes']: 5", "x['edges']: 8"):
        run(model)
    for now, then in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(now, then)
    with dtrain.OneDeviceStrategy("CPU:0").scope():
        alone = model_of_graphs()
    run(alone)


class Pointwise(keras.layers.Layer):
    """Calls TensorFlow's convolution itself."""

    def build(self, shape: Any) -> None:
        self.kernel = self.add_weight(shape=(1, 1, shape[-1], 16))

    def call(self, x: Any) -> Any:
        return tf.nn.conv2d(x, self.kernel, 2, "SAME")


POINTWISE: dict[str, Callable[[], keras.layers.Layer]] = {
    "Conv2D": lambda: keras.layers.Conv2D(16, 1, strides=2, padding="same"),
    "Conv1D": lambda: keras.layers.Conv1D(16, 1, strides=2, padding="same"),
    "Conv2DTranspose": lambda: keras.layers.Conv2DTranspose(8, 1, strides=2, padding="same"),
    "tf.nn.conv2d": Pointwise,
}


@pytest.mark.parametrize("name", POINTWISE)
def test_odd_parts_of_a_strided_pointwise_convolution(name: str) -> None:
    """TensorFlow itself writes beyond its memory here, and the process ends."""
    shape = (1024, 8) if name == "Conv1D" else (28, 28, 8)
    x = np.random.default_rng(0).normal(size=(6, *shape)).astype("float32")

    def program() -> Any:
        model = compiled(
            keras.Input(shape),
            POINTWISE[name](),
            keras.layers.GlobalMaxPooling1D() if name == "Conv1D" else keras.layers.GlobalMaxPooling2D(),
            keras.layers.Dense(1),
        )
        y = x.reshape(6, -1).mean(axis=1, keepdims=True)
        return [model.fit(x, y, batch_size=6, epochs=3, verbose=0).history, model.get_weights()]

    # The transposed one ends TensorFlow's default strategy with even batches, too.
    same_on_two_replicas(program, dtrain.OneDeviceStrategy("CPU:0").scope())
