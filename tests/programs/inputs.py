"""Every way to hand examples to Keras."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from .common import (
    BatchLogs,
    Values,
    classes,
    dataset,
    history,
    images,
    mlp,
    named,
    outcome,
    regression,
    sgd,
    tokens,
    weights,
)
from .registry import Env, program


@program("fit_numpy")
def _(env: Env) -> Values:
    x, y = regression(48)
    with env.strategy.scope():
        model = mlp()
        model.compile(sgd(), "mse", metrics=["mae"])
    logs = BatchLogs()
    record = model.fit(x, y, batch_size=16, epochs=3, shuffle=False, verbose=0, callbacks=[logs])
    return outcome(model, record, x, y) | logs.values()


@program("fit_numpy_shuffled")
def _(env: Env) -> Values:
    x, y = regression(44)
    with env.strategy.scope():
        model = mlp()
        model.compile(sgd(), "mse", metrics=["mae"])
    return outcome(model, model.fit(x, y, batch_size=16, epochs=3, shuffle=True, verbose=0))


@program("fit_dataset")
def _(env: Env) -> Values:
    x, y = classes(48)
    data = dataset(x, y)
    with env.strategy.scope():
        model = mlp(outputs=3, activation="softmax")
        model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    logs = BatchLogs()
    record = model.fit(data, validation_data=data.take(2), epochs=3, verbose=0, callbacks=[logs])
    values = outcome(model, record) | logs.values()
    values |= named(model.evaluate(data, verbose=0, return_dict=True), "evaluate_")
    return values | {"predict": model.predict(data, verbose=0)}


@program("fit_dataset_shuffled_repeated")
def _(env: Env) -> Values:
    x, y = regression(40)
    data = (
        tf.data.Dataset.from_tensor_slices((x, y))
        .shuffle(40, seed=7, reshuffle_each_iteration=False)
        .repeat()
        .batch(10)
        .prefetch(2)
    )
    with env.strategy.scope():
        model = mlp()
        model.compile(sgd(0.02), "mse")
    record = model.fit(data, steps_per_epoch=5, epochs=3, verbose=0)
    return outcome(model, record)


@program("fit_dataset_of_unknown_size")
def _(env: Env) -> Values:
    x, y = regression(50)
    data = tf.data.Dataset.from_tensor_slices((x, y)).filter(lambda a, b: b[0] > 0.8).batch(12)
    with env.strategy.scope():
        model = mlp()
        model.compile(sgd(), "mse", metrics=["mae"])
    record = model.fit(data, epochs=2, validation_data=data, verbose=0)
    return outcome(model, record)


@program("fit_dataset_from_generator")
def _(env: Env) -> Values:
    x, y = regression(36)

    def examples() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        yield from zip(x, y, strict=True)

    signature = (tf.TensorSpec((4,), tf.float32), tf.TensorSpec((1,), tf.float32))
    data = tf.data.Dataset.from_generator(examples, output_signature=signature).batch(12)
    with env.strategy.scope():
        model = mlp()
        model.compile(sgd(), "mse")
    return outcome(model, model.fit(data, epochs=2, verbose=0))


@program("fit_distributed_dataset")
def _(env: Env) -> Values:
    x, y = regression(48)
    data = env.strategy.experimental_distribute_dataset(dataset(x, y).repeat())
    with env.strategy.scope():
        model = mlp()
        model.compile(sgd(), "mse", metrics=["mae"])
    record = model.fit(data, epochs=2, steps_per_epoch=3, verbose=0)
    found = model.evaluate(data, steps=3, verbose=0, return_dict=True)
    return outcome(model, record) | named(found, "distributed_")


@program("fit_distributed_dataset_to_its_end")
def _(env: Env) -> Values:
    x, y = regression(44)
    data = env.strategy.experimental_distribute_dataset(dataset(x, y))
    with env.strategy.scope():
        model = mlp()
        model.compile(sgd(), "mse", metrics=["mae"])
    return outcome(model, model.fit(data, epochs=2, validation_data=data, verbose=0))


@program("fit_dataset_from_function")
def _(env: Env) -> Values:
    x, y = regression(48)

    def make(context: tf.distribute.InputContext) -> tf.data.Dataset:
        data = tf.data.Dataset.from_tensor_slices((x, y))
        data = data.shard(context.num_input_pipelines, context.input_pipeline_id)
        return data.batch(context.get_per_replica_batch_size(16)).repeat()

    data = env.strategy.distribute_datasets_from_function(make)
    with env.strategy.scope():
        model = mlp()
        model.compile(sgd(), "mse", metrics=["mae"])
    return outcome(model, model.fit(data, epochs=2, steps_per_epoch=3, verbose=0))


class Batches(keras.utils.PyDataset):
    """A PyDataset whose last batch is a short one."""

    def __init__(self, x: np.ndarray, y: np.ndarray, size: int) -> None:
        super().__init__()
        self.x, self.y, self.size = x, y, size

    def __len__(self) -> int:
        return math.ceil(len(self.x) / self.size)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        part = slice(index * self.size, (index + 1) * self.size)
        return self.x[part], self.y[part]


@program("fit_pydataset")
def _(env: Env) -> Values:
    x, y = regression(44)
    with env.strategy.scope():
        model = mlp()
        model.compile(sgd(), "mse", metrics=["mae"])
    record = model.fit(Batches(x, y, 16), epochs=2, shuffle=False, verbose=0)
    values = outcome(model, record)
    values |= named(model.evaluate(Batches(x, y, 16), verbose=0, return_dict=True), "evaluate_")
    return values | {"predict": model.predict(Batches(x, y, 16), verbose=0)}


@program("fit_generator")
def _(env: Env) -> Values:
    x, y = regression(48)

    def batches() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        while True:
            for begin in range(0, 48, 16):
                yield x[begin : begin + 16], y[begin : begin + 16]

    with env.strategy.scope():
        model = mlp()
        model.compile(sgd(), "mse", metrics=["mae"])
    record = model.fit(
        batches(), steps_per_epoch=3, epochs=2, validation_data=batches(), validation_steps=2, verbose=0
    )
    return outcome(model, record)


@program("fit_dict_features")
def _(env: Env) -> Values:
    x, y = regression(44)
    features = {"left": x[:, :2], "right": x[:, 2:]}
    with env.strategy.scope():
        left, right = keras.Input((2,), name="left"), keras.Input((2,), name="right")
        joined = keras.layers.Concatenate()([keras.layers.Dense(3, activation="tanh")(left), right])
        model = keras.Model({"left": left, "right": right}, keras.layers.Dense(1)(joined))
        model.compile(sgd(), "mse")
    record = model.fit(dataset((features, y)), epochs=2, verbose=0)
    return outcome(model, record) | {"predict": model.predict(features, batch_size=16, verbose=0)}


@program("fit_several_inputs_and_outputs")
def _(env: Env) -> Values:
    x, y = regression(44)
    _, kinds = classes(44)
    with env.strategy.scope():
        one, two = keras.Input((2,)), keras.Input((2,))
        joined = keras.layers.Dense(5, activation="tanh")(keras.layers.Concatenate()([one, two]))
        value = keras.layers.Dense(1, name="value")(joined)
        kind = keras.layers.Dense(3, activation="softmax", name="kind")(joined)
        model = keras.Model([one, two], {"value": value, "kind": kind})
        model.compile(
            sgd(),
            {"value": "mse", "kind": "sparse_categorical_crossentropy"},
            loss_weights={"value": 0.3, "kind": 2.0},
            metrics={"value": ["mae"], "kind": ["accuracy"]},
        )
    inputs, labels = (x[:, :2], x[:, 2:]), {"value": y, "kind": kinds}
    record = model.fit(dataset((inputs, labels)), epochs=2, verbose=0)
    values = outcome(model, record)
    values |= named(model.evaluate(dataset((inputs, labels)), verbose=0, return_dict=True), "evaluate_")
    for name, part in model.predict(list(inputs), batch_size=16, verbose=0).items():
        values[f"predict_{name}"] = part
    return values


WORDS = np.array(["red", "green", "blue", "black", "white"])


@program("fit_strings_in_model")
def _(env: Env) -> Values:
    rng = np.random.default_rng(0)
    picked = rng.integers(0, 5, size=40)
    text, y = WORDS[picked][:, None], (picked[:, None] / 2).astype("float32")
    with env.strategy.scope():
        lookup = keras.layers.StringLookup(vocabulary=list(WORDS))
        model = keras.Sequential(
            [
                keras.Input((1,), dtype="string"),
                lookup,
                keras.layers.Embedding(6, 4),
                keras.layers.Flatten(),
                keras.layers.Dense(1),
            ]
        )
        model.compile(sgd(), "mse")
    record = model.fit(dataset(text, y), epochs=2, verbose=0)
    return outcome(model, record) | {"predict": model.predict(dataset(text), verbose=0)}


@program("strings_in_and_out")
def _(env: Env) -> Values:
    """The lookup of one layer makes counts, that of the other text, whose rank its operation does not say."""
    text = WORDS[np.random.default_rng(0).integers(0, 5, size=40)][:, None]
    with env.strategy.scope():
        inputs = keras.Input((1,), dtype="string")
        counts = keras.layers.StringLookup(vocabulary=list(WORDS), output_mode="multi_hot")(inputs)
        model = keras.Model(inputs, keras.layers.Dense(5)(counts))
        model.compile(sgd(), "mse")
        named = keras.layers.StringLookup(vocabulary=list(WORDS), num_oov_indices=0, invert=True)
        best = keras.ops.argmax(model.output, axis=-1)
        names = keras.Model(inputs, named(best))
    y = np.eye(5, dtype="float32")[(np.arange(40) * 3) % 5]
    record = model.fit(dataset(text, y), epochs=2, verbose=0)
    found = names.predict(dataset(text), verbose=0).astype(str)
    return outcome(model, record) | {"names": np.array([list(WORDS).index(each) for each in found])}


@program("fit_text_vectorized_in_model")
def _(env: Env) -> Values:
    rng = np.random.default_rng(1)
    picked = rng.integers(0, 5, size=(40, 3))
    text = np.array([" ".join(row) for row in WORDS[picked]])[:, None]
    y = picked.mean(axis=1, keepdims=True).astype("float32")
    with env.strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((1,), dtype="string"),
                keras.layers.TextVectorization(vocabulary=list(WORDS), output_sequence_length=4),
                keras.layers.Embedding(8, 4, mask_zero=True),
                keras.layers.GlobalAveragePooling1D(),
                keras.layers.Dense(1),
            ]
        )
        model.compile(sgd(), "mse")
    return outcome(model, model.fit(dataset(text, y), epochs=2, verbose=0))


@program("fit_strings_vectorized_in_data")
def _(env: Env) -> Values:
    rng = np.random.default_rng(1)
    picked = rng.integers(0, 5, size=(40, 4))
    text = np.array([" ".join(row) for row in WORDS[picked]])
    y = picked.mean(axis=1, keepdims=True).astype("float32")
    vectorize = keras.layers.TextVectorization(max_tokens=8, output_sequence_length=4)
    vectorize.adapt(text)
    data = dataset(text, y).map(lambda t, label: (vectorize(t), label))
    with env.strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((4,), dtype="int32"),
                keras.layers.Embedding(8, 4),
                keras.layers.GlobalAveragePooling1D(),
                keras.layers.Dense(1),
            ]
        )
        model.compile(sgd(), "mse")
    return outcome(model, model.fit(data, epochs=2, verbose=0))


@program("fit_ragged", keras="3.9")  # before, an Input has no `ragged`
def _(env: Env) -> Values:
    x, y = tokens(40)
    ragged = tf.RaggedTensor.from_tensor(x, padding=0)
    data = tf.data.Dataset.from_tensor_slices((ragged, y)).batch(10)

    class FromRagged(keras.layers.Layer):
        """Averages the embeddings of as many tokens as there are."""

        def build(self, shape: Any) -> None:
            self.table = self.add_weight(shape=(12, 4), initializer="glorot_uniform", name="table")

        def call(self, inputs: Any) -> Any:
            used = inputs.to_tensor() if isinstance(inputs, tf.RaggedTensor) else inputs
            mask = keras.ops.cast(used > 0, "float32")[..., None]
            picked = keras.ops.take(self.table, keras.ops.cast(used, "int32"), axis=0) * mask
            return keras.ops.sum(picked, axis=1) / keras.ops.maximum(keras.ops.sum(mask, axis=1), 1.0)

        def compute_output_shape(self, shape: Any) -> Any:
            return (shape[0], 4)

    with env.strategy.scope():
        inputs = keras.Input((None,), dtype="int32", ragged=True)
        outputs = keras.layers.Dense(3, activation="softmax")(FromRagged()(inputs))
        model = keras.Model(inputs, outputs)
        model.compile(sgd(), "sparse_categorical_crossentropy", metrics=["accuracy"])
    return outcome(model, model.fit(data, epochs=2, verbose=0))


@program("fit_sparse")
def _(env: Env) -> Values:
    x, y = regression(40)
    x[np.abs(x) < 0.5] = 0
    data = tf.data.Dataset.from_tensor_slices((tf.sparse.from_dense(x), y)).batch(10)
    with env.strategy.scope():
        inputs = keras.Input((4,), sparse=True)
        hidden = keras.layers.Dense(5, activation="tanh")(inputs)
        model = keras.Model(inputs, keras.layers.Dense(1)(hidden))
        model.compile(sgd(), "mse")
    return outcome(model, model.fit(data, epochs=2, verbose=0))


@program("fit_without_labels")
def _(env: Env) -> Values:
    x, _ = regression(44)

    class Autoencoder(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.outer = keras.layers.Dense(2, activation="tanh"), keras.layers.Dense(4)

        def call(self, inputs: Any) -> Any:
            outputs = self.outer(self.inner(inputs))
            self.add_loss(keras.ops.mean(keras.ops.square(outputs - inputs)))
            return outputs

    with env.strategy.scope():
        model = Autoencoder()
        model.compile(sgd(0.3))
    record = model.fit(x, batch_size=11, epochs=2, shuffle=False, verbose=0)
    return outcome(model, record) | {"predict": model.predict(x, batch_size=11, verbose=0)}


@program("fit_float64_and_integers")
def _(env: Env) -> Values:
    x, y = regression(40)
    with env.strategy.scope():
        model = mlp()
        model.compile(sgd(), "mse", metrics=["mae"])
    whole = np.round(x * 3).astype("int64")
    record = model.fit(whole, y.astype("float64"), batch_size=10, epochs=2, shuffle=False, verbose=0)
    return outcome(model, record)


@program("on_batch_methods")
def _(env: Env) -> Values:
    x, y = regression(40)
    with env.strategy.scope():
        model = mlp()
        model.compile(sgd(), "mse", metrics=["mae"])
    values: Values = {}
    for step in range(4):
        part = slice(step * 10, step * 10 + 10)
        weight = np.linspace(0.5, 2.0, 10).astype("float32") if step == 2 else None
        values[f"train_{step}"] = model.train_on_batch(x[part], y[part], sample_weight=weight)
        values |= named(model.test_on_batch(x[part], y[part], return_dict=True), f"test_{step}_")
    values["predict"] = model.predict_on_batch(x[:7])
    return values | weights(model) | {"iterations": int(model.optimizer.iterations.numpy())}


@program("evaluate_and_predict_only")
def _(env: Env) -> Values:
    x, y = classes(45)
    with env.strategy.scope():
        model = mlp(outputs=3, activation="softmax")
        model.compile(
            loss="sparse_categorical_crossentropy", metrics=["accuracy"], weighted_metrics=["accuracy"]
        )
    weight = np.linspace(0.1, 3.0, 45).astype("float32")
    values = named(
        model.evaluate(x, y, sample_weight=weight, batch_size=16, verbose=0, return_dict=True), "numpy_"
    )
    values |= named(model.evaluate(dataset(x, y, batch=10), verbose=0, return_dict=True), "dataset_")
    values |= named(model.evaluate(dataset(x, y, batch=10), steps=2, verbose=0, return_dict=True), "steps_")
    values["predict"] = model.predict(x, batch_size=16, verbose=0)
    values["predict_dataset"] = model.predict(dataset(x, batch=10), verbose=0)
    return values | {"predict_steps": model.predict(dataset(x, batch=10), steps=3, verbose=0)}


@program("fit_image_pipeline")
def _(env: Env) -> Values:
    x, y = images(30)
    data = tf.data.Dataset.from_tensor_slices((x, y)).map(lambda a, b: (a * 0.5 + 0.1, b)).cache().batch(8)
    with env.strategy.scope():
        model = keras.Sequential(
            [keras.layers.Flatten(), keras.layers.Dense(3), keras.layers.Softmax()], name="pipeline"
        )
        model.compile(sgd(0.01), "sparse_categorical_crossentropy", metrics=["accuracy"])
    record = model.fit(data, epochs=2, verbose=0)
    return weights(model) | history(record)
