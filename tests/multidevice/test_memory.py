"""What a step is predicted to take of memory, held against what TensorFlow allocates when it runs."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import dtrain
from dtrain.diagnosis.layer_work import layer_work
from dtrain.diagnosis.model_profiles import model_of, profile_of_model, weights_by_layer
from dtrain.errors import ConfigurationError, DataError
from dtrain.optim import Memory, measure_memory, predict_memory, rematerialize
from dtrain.planning.cluster import WorkerPlacement
from dtrain.planning.compared_strategies import DATA_PARALLEL, FULLY_SHARDED
from dtrain.planning.device_memory import device_memory
from refusals import refused

layers = keras.layers
PARTS = ("parameters", "gradients", "optimizer", "activations")
RANDOM = np.random.default_rng(0)
SPARSE = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def cnn() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((20, 20, 3)),
            layers.Conv2D(16, 3, activation="relu"),
            layers.BatchNormalization(),
            layers.MaxPooling2D(2),
            layers.Conv2D(32, 3, activation="relu"),
            layers.GlobalAveragePooling2D(),
            layers.Dropout(0.5),
            layers.Dense(10),
        ]
    )


def transformer() -> keras.Model:
    words = keras.Input((24,), dtype="int32")
    x = layers.Embedding(500, 32)(words) + layers.Embedding(24, 32)(tf.range(24))
    x = layers.LayerNormalization()(x + layers.MultiHeadAttention(4, 8)(x, x))
    x = layers.LayerNormalization()(x + layers.Dense(32)(layers.Dense(64, activation="gelu")(x)))
    return keras.Model(words, layers.Dense(10)(layers.GlobalAveragePooling1D()(x)))


def mlp() -> keras.Model:
    return keras.Sequential(
        [keras.Input((100,)), layers.Dense(300, activation="relu"), layers.Dense(200), layers.Dense(10)]
    )


def batch_of(model: keras.Model, size: int) -> tuple[Any, Any]:
    shape = (size, *model.input_shape[1:])
    words = model.inputs[0].dtype == "int32"
    x = RANDOM.integers(0, 500, shape).astype("int32") if words else RANDOM.random(shape, dtype="float32")
    return x, RANDOM.integers(0, 10, size)


def compiled(
    make: Callable[[], keras.Model], optimizer: Any = "adam", policy: str = "float32", **options: Any
) -> keras.Model:
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(policy)
    try:
        model = make()
        model.compile(optimizer, SPARSE, metrics=["accuracy"], **options)
    finally:
        keras.config.set_dtype_policy(before)
    return model


def check(model: keras.Model, batch: Any) -> Memory:
    """Predicts, and compares with what is measured: within a tenth, or a few numbers of a byte-sized part."""
    predicted, measured = predict_memory(model, batch), measure_memory(model, batch)
    for part in PARTS:
        assert getattr(predicted, part) == pytest.approx(getattr(measured, part), rel=0.1), part
    return predicted


@pytest.mark.parametrize(
    ("make", "optimizer", "policy", "size"),
    [
        (cnn, "adam", "float32", 16),
        (cnn, "sgd", "mixed_float16", 7),
        (transformer, "adamw", "float32", 16),
        pytest.param(transformer, "sgd", "mixed_float16", 5, marks=pytest.mark.long),
        (mlp, "adamw", "float32", 64),
        (mlp, "sgd", "mixed_bfloat16", 9),
    ],
)
def test_what_is_predicted_is_measured(
    make: Callable[[], keras.Model], optimizer: str, policy: str, size: int
) -> None:
    model = compiled(make, optimizer, policy)
    check(model, batch_of(model, size))


def test_every_state_of_an_optimizer_is_counted() -> None:
    weights = 100 * 300 + 300 + 300 * 200 + 200 + 200 * 10 + 10
    optimizer = keras.optimizers.Adam(gradient_accumulation_steps=4, use_ema=True, global_clipnorm=1.0)
    model = compiled(mlp, optimizer)
    predicted = predict_memory(model, 8)
    assert not model.optimizer.built  # nothing was allocated for it
    assert predicted.parameters == predicted.gradients == 4 * weights
    # Two moments, the moving average and the accumulated gradients; the counters take some bytes.
    assert 0 <= predicted.optimizer - 4 * 4 * weights < 100
    check(model, batch_of(model, 8))


def test_nothing_changes_by_predicting_and_measuring() -> None:
    model = compiled(cnn)
    batch = batch_of(model, 4)
    before = [variable.numpy() for variable in model.variables]
    predict_memory(model, batch)
    measure_memory(model, batch)
    for variable, value in zip(model.variables, before, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value)
    assert int(model.optimizer.iterations) == 0
    model.fit(*batch, verbose=0)
    assert int(model.optimizer.iterations) == 1


def test_activations_grow_with_the_batch_and_shrink_by_recomputing() -> None:
    def deep() -> keras.Model:
        x = inputs = keras.Input((64,))
        for _ in range(4):
            x = layers.Dense(64, activation="gelu")(x)
        return keras.Model(inputs, layers.Dense(10)(x))

    def recomputed() -> keras.Model:
        with rematerialize():
            return deep()

    plain = compiled(deep)
    small, large = (predict_memory(plain, size).activations for size in (500, 1000))
    assert large == pytest.approx(2 * small, rel=0.05)
    model = compiled(recomputed)
    assert check(model, batch_of(model, 1000)).activations < 0.8 * large


def test_a_step_of_ones_own() -> None:
    class Twice(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.body = layers.Dense(50)
            self.second = keras.optimizers.SGD(momentum=0.9)

        def call(self, x: Any) -> Any:
            return self.body(x)

        def train_step(self, data: Any) -> Any:
            x, y = data
            for optimizer in (self.optimizer, self.second):
                with tf.GradientTape() as tape:
                    loss = tf.reduce_mean(tf.square(self(x) - y))
                optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
            return {"loss": loss}

    model = Twice()
    model.compile("adam")
    batch = (tf.TensorSpec((None, 30)), tf.TensorSpec((None, 50)))
    predicted = predict_memory(model, batch, batch_size=20)
    weights = 4 * (30 * 50 + 50)
    assert (predicted.parameters, predicted.gradients) == (weights, 2 * weights)
    assert 0 <= predicted.optimizer - 3 * weights < 100


def test_a_replica_takes_what_one_device_takes() -> None:
    alone = predict_memory(compiled(mlp), 16)
    with dtrain.MirroredStrategy().scope():
        model = compiled(mlp)
    assert predict_memory(model, 16).total == pytest.approx(alone.total, rel=0.01)
    with refused(ConfigurationError, "2 replicas"):
        measure_memory(model, 16)


@pytest.mark.parametrize("make", [mlp, transformer])
def test_a_replica_of_divided_weights_takes_what_it_holds(make: Callable[[], keras.Model]) -> None:
    """Predicted before the optimizer has variables, and held against those that training makes."""
    alone = predict_memory(compiled(make), 16)
    with dtrain.FullyShardedStrategy(smallest=1000).scope():
        model = compiled(make)
    predicted = predict_memory(model, 16)
    assert not model.optimizer.built
    model.fit(*batch_of(model, 32), batch_size=32, verbose=0)
    assert predicted.optimizer == held(model.optimizer.variables) < 0.6 * alone.optimizer
    assert predicted.parameters == held(model.variables) < 0.6 * alone.parameters
    assert predicted == predict_memory(model, 16)  # now that the optimizer has its variables
    if make is mlp:
        assert predicted.gradients == predicted.parameters
    else:  # the rows of a table that a batch names stay rows
        assert predicted.gradients < alone.gradients
    largest = max(4 * math.prod(weight.shape) for weight in model.weights)
    assert predicted.activations == pytest.approx(alone.activations + 2 * largest, rel=0.01)


@pytest.mark.parametrize("make", [mlp, transformer])
def test_a_plan_has_the_memory_that_is_predicted(make: Callable[[], keras.Model]) -> None:
    """Of one device, and of two that divide the weights."""
    profile = profile_of_model(compiled(make), 16)
    alone = predict_memory(compiled(make), 16)
    planned = device_memory(profile, DATA_PARALLEL, WorkerPlacement.on_one_host(2), 16)
    assert planned.known == pytest.approx(alone.total)
    assert (planned.weights, planned.gradients) == (alone.parameters, alone.gradients)
    with dtrain.FullyShardedStrategy(smallest=1).scope():
        divided = predict_memory(compiled(make), 16)
    planned = device_memory(profile, FULLY_SHARDED, WorkerPlacement.on_one_host(2), 16)
    assert planned.known == pytest.approx(divided.total, rel=0.1)


def test_a_model_is_a_saved_file_or_what_a_function_makes(tmp_path: Path) -> None:
    whole = compiled(mlp, "sgd")
    whole.save(tmp_path / "saved.keras")
    (tmp_path / "made.py").write_text(
        "import keras\n"
        "def make():\n"
        "    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3)])\n"
        "    model.compile('sgd', 'mse')\n"
        "    return model\n"
        "number = 5\n"
        "def broken():\n"
        "    raise ValueError('not well')\n"
    )
    saved = profile_of_model(model_of(str(tmp_path / "saved.keras")), 8)
    assert saved.gradient_bytes == 4 * whole.count_params() and saved.activation_bytes
    made = profile_of_model(model_of(f"{tmp_path / 'made.py'}:make"), 8)
    assert [layer.gradients for layer in made.layers] == [(24, 12)]
    for name, said in {
        "nowhere.keras": "nowhere.keras",
        "made.py": "made.py",
        f"{tmp_path / 'made.py'}:number": "number",
        f"{tmp_path / 'made.py'}:broken": "not well",
        "no_such_module:make": "no_such_module",
        "math:pi": "pi",
    }.items():
        with refused(ConfigurationError, said):
            model_of(name)


def test_the_work_of_layers_is_counted_in_operations_where_it_is_not_timed() -> None:
    model = compiled(mlp)
    names = [*weights_by_layer(model)]
    work = layer_work(model, batch_of(model, 16), names, timed=False)
    products = dict.fromkeys(names, 0)
    for weight in model.trainable_variables:
        if len(weight.shape) == 2:
            products[weight.path.rpartition("/")[0]] += 2 * 16 * math.prod(weight.shape)
    assert {*work.forward} == {*names}
    for number, name in enumerate(names):
        assert work.forward[name] == pytest.approx(products[name], rel=0.1)
        # The first layer has no gradient of its input.
        assert work.backward[name] == pytest.approx((2 if number else 1) * products[name], rel=0.1)


def held(variables: Any) -> int:
    """The bytes of the first device's parts."""
    parts = [getattr(variable.value, "values", (variable.value,))[0] for variable in variables]
    return sum(part.numpy().nbytes for part in parts)


def test_mistakes() -> None:
    with refused(ConfigurationError, "compiled"):
        predict_memory(mlp(), 4)
    with refused(ConfigurationError, batch_size=0):
        predict_memory(compiled(mlp), np.int64(0))
    with refused(ConfigurationError, "32 examples", batch_size=64):
        predict_memory(compiled(mlp), 32, batch_size=64)
    with refused(DataError, "(None, 100)"):
        predict_memory(compiled(mlp), (tf.TensorSpec((None, 100)), tf.TensorSpec((None,))))
    with refused(DataError, "not built"):
        predict_memory(compiled(lambda: keras.Sequential([layers.Dense(2)])), 4)
