"""Ways to hand examples to Keras, and batches that do not divide evenly."""

from __future__ import annotations

import math
from collections.abc import Iterator

import keras
import numpy as np
import tensorflow as tf

from dtrain.conformance.corpus import ProgramRun, Values, program
from dtrain.conformance.parts import classes, dataset, evaluated, network, regression, sgd, trained


@program()
def arrays(run: ProgramRun) -> Values:
    """`fit`, `evaluate` and `predict` with NumPy arrays."""
    x, y = regression()
    with run.strategy.scope():
        model = network()
        model.compile(sgd(), "mse", metrics=["mae"])
    record = model.fit(x, y, batch_size=16, epochs=3, shuffle=False, verbose=0)
    return trained(model, record) | evaluated(model, x, y)


@program()
def arrays_shuffled(run: ProgramRun) -> Values:
    """NumPy arrays in the order that Keras shuffles them to, by the seed."""
    x, y = regression(44)
    with run.strategy.scope():
        model = network()
        model.compile(sgd(), "mse")
    return trained(model, model.fit(x, y, batch_size=16, epochs=3, verbose=0))


@program()
def dataset_with_validation(run: ProgramRun) -> Values:
    """A `tf.data` dataset, with validation after each epoch."""
    x, y = classes()
    with run.strategy.scope():
        model = network(3, "softmax")
        model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    record = model.fit(dataset(x, y), validation_data=dataset(x[:20], y[:20]), epochs=3, verbose=0)
    return trained(model, record) | evaluated(model, x, y)


@program()
def dataset_of_unknown_size(run: ProgramRun) -> Values:
    """A `tf.data` dataset whose number of batches is found at its end."""
    x, y = regression(50)
    data = tf.data.Dataset.from_tensor_slices((x, y)).filter(lambda a, b: b[0] > 0.8).batch(12)
    with run.strategy.scope():
        model = network()
        model.compile(sgd(), "mse")
    return trained(model, model.fit(data, epochs=2, verbose=0))


@program()
def generator(run: ProgramRun) -> Values:
    """A Python generator of batches, with `steps_per_epoch`."""
    x, y = regression()

    def batches() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        while True:
            for begin in range(0, 48, 16):
                yield x[begin : begin + 16], y[begin : begin + 16]

    with run.strategy.scope():
        model = network()
        model.compile(sgd(), "mse")
    return trained(model, model.fit(batches(), steps_per_epoch=3, epochs=2, verbose=0))


@program()
def py_dataset(run: ProgramRun) -> Values:
    """A `keras.utils.PyDataset` whose last batch is short."""
    x, y = regression(44)

    class Batches(keras.utils.PyDataset):  # type: ignore[misc]
        def __len__(self) -> int:
            return math.ceil(len(x) / 16)

        def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
            part = slice(index * 16, index * 16 + 16)
            return x[part], y[part]

    with run.strategy.scope():
        model = network()
        model.compile(sgd(), "mse")
    return trained(model, model.fit(Batches(), epochs=2, shuffle=False, verbose=0))


@program()
def inputs_and_outputs_by_name(run: ProgramRun) -> Values:
    """Two inputs and two outputs, with a loss, a loss weight and a metric for each output."""
    x, y = regression(44)
    _, kinds = classes(44)
    with run.strategy.scope():
        left, right = keras.Input((2,), name="left"), keras.Input((2,), name="right")
        hidden = keras.layers.Dense(5, activation="tanh")(keras.layers.Concatenate()([left, right]))
        outputs = {
            "value": keras.layers.Dense(1, name="value")(hidden),
            "kind": keras.layers.Dense(3, activation="softmax", name="kind")(hidden),
        }
        model = keras.Model({"left": left, "right": right}, outputs)
        model.compile(
            sgd(),
            loss={"value": "mse", "kind": "sparse_categorical_crossentropy"},
            loss_weights={"value": 0.3, "kind": 2.0},
            metrics={"value": ["mae"], "kind": ["accuracy"]},
        )
    data = dataset({"left": x[:, :2], "right": x[:, 2:]}, {"value": y, "kind": kinds})
    return trained(model, model.fit(data, epochs=2, verbose=0))


@program()
def strings(run: ProgramRun) -> Values:
    """Strings as inputs, which a layer of the model looks up."""
    words = np.array(["red", "green", "blue", "black", "white"])
    picked = np.random.default_rng(0).integers(0, 5, size=(40, 1))
    with run.strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((1,), dtype="string"),
                keras.layers.StringLookup(vocabulary=list(words)),
                keras.layers.Embedding(6, 4),
                keras.layers.Flatten(),
                keras.layers.Dense(1),
            ]
        )
        model.compile(sgd(), "mse")
    data = dataset(words[picked], (picked / 2).astype("float32"))
    return trained(model, model.fit(data, epochs=2, verbose=0))


@program()
def last_batch_uneven(run: ProgramRun) -> Values:
    """The last batch has fewer examples than the others, and an odd number."""
    x, y = regression(43)
    with run.strategy.scope():
        model = network()
        model.compile(sgd(), "mse", metrics=["mae"])
    record = model.fit(dataset(x, y), epochs=2, verbose=0)
    return trained(model, record) | evaluated(model, x, y)


@program()
def last_batch_of_one(run: ProgramRun) -> Values:
    """The last batch has one example, so that one of two replicas has none."""
    x, y = regression(33)
    with run.strategy.scope():
        model = network()
        model.compile(sgd(), "mse", metrics=["mae"])
    record = model.fit(dataset(x, y), epochs=2, verbose=0)
    return trained(model, record) | evaluated(model, x, y)


@program()
def batch_by_batch(run: ProgramRun) -> Values:
    """`train_on_batch`, `test_on_batch` and `predict_on_batch`."""
    x, y = regression(40)
    with run.strategy.scope():
        model = network()
        model.compile(sgd(), "mse", metrics=["mae"])
    values: Values = {}
    for step in range(4):
        part = slice(step * 10, step * 10 + 10)
        values[f"train_{step}"] = np.asarray(model.train_on_batch(x[part], y[part]))
        values[f"test_{step}"] = np.asarray(model.test_on_batch(x[part], y[part]))
    return values | {"predict": model.predict_on_batch(x[:8])}
