"""Schedules, losses, precision, rematerialization and divided state on two replicas, against one device."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import dtrain
from dtrain.engine.sharding.sharding_plan import owners_of
from dtrain.engine.synchronisation import accumulation
from dtrain.errors import ConfigurationError
from dtrain.optim import (
    SparseLabelSmoothing,
    cosine_restarts,
    float32_outputs,
    precision,
    rematerialize,
    scaled_rate,
    shard_state,
)
from dtrain.optim.optimizers import base_optimizer, rate_of, with_settings
from dtrain.optim.sharded_state import DIVISIBLE
from dtrain.partition import communication
from refusals import refused

RNG = np.random.default_rng(0)
X = RNG.normal(size=(28, 6)).astype("float32")  # the last batch is one of 4, after two of 12
LABELS = RNG.integers(0, 3, 28)
WEIGHTS = np.linspace(0.5, 2, 28)
Maker = Callable[[], Any]


@keras.saving.register_keras_serializable(package="test")
class Block(layers.Layer):  # type: ignore[misc]
    """Draws, keeps moving statistics, and relies on `training` being passed on to what is in it."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.parts = [layers.Dense(6, "tanh"), layers.BatchNormalization(), layers.Dropout(0.4, seed=1)]

    def call(self, x: Any) -> Any:
        inner = x
        for part in self.parts:
            inner = part(inner)
        return x + inner


class Subclassed(keras.Model):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.scores = layers.Dense(5, "tanh"), layers.Dense(3, "softmax")

    def call(self, x: Any, training: bool | None = None) -> Any:
        return self.scores(self.hidden(x))


def small() -> keras.Model:
    return keras.Sequential(
        [keras.Input((6,)), layers.Dense(5, "tanh"), layers.Dense(4, "tanh"), layers.Dense(3, "softmax")]
    )


def unbuilt() -> keras.Model:
    return keras.Sequential([layers.Dense(5, "tanh"), layers.Dense(3), layers.Softmax(), layers.Reshape([3])])


def functional() -> keras.Model:
    inputs = keras.Input((6,))
    scores = layers.Dense(3)(layers.Dense(5, "tanh")(inputs))
    return keras.Model(inputs, layers.Reshape([3])(keras.ops.softmax(scores + 0.5)))


def blocks() -> keras.Model:
    inputs = keras.Input((6,))
    nested = keras.Sequential([keras.Input((6,)), layers.Dense(6, "relu"), layers.Dropout(0.3, seed=2)])
    return keras.Model(inputs, layers.Dense(3, "softmax")(nested(Block()(inputs))))


def train(
    strategy: Any,
    model: Maker,
    optimizer: Maker,
    *,
    word: str = "float32",
    remat: dict[str, Any] | None = None,
    loss: Any = None,
    weighted: bool = False,
    **options: Any,
) -> tuple[keras.Model, list[Any]]:
    """A model that was trained for two epochs, and all that it became."""
    keras.utils.set_random_seed(3)
    with strategy.scope(), precision(word):
        with rematerialize(**(remat or {"mode": "none"})):
            made = float32_outputs(model())
        made.compile(optimizer(), loss or "sparse_categorical_crossentropy", metrics=["accuracy"], **options)
    history = made.fit(
        X,
        LABELS,
        sample_weight=WEIGHTS if weighted else None,
        batch_size=12,
        epochs=2,
        shuffle=False,
        verbose=0,
    ).history
    return made, [history["loss"], history["accuracy"], *made.get_weights()]


def alike(found: list[Any], expected: list[Any], **tolerance: float) -> None:
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, **({"rtol": 2e-4, "atol": 2e-6} | tolerance))


@pytest.fixture(scope="module")
def two() -> Any:
    strategy = dtrain.strategy("mirrored")
    assert strategy.num_replicas_in_sync == 2
    return strategy


ONE = tf.distribute.get_strategy()


def adam(**options: Any) -> keras.optimizers.Optimizer:
    return keras.optimizers.Adam(0.02, epsilon=1e-3, **options)


def sgd(**options: Any) -> keras.optimizers.Optimizer:
    return keras.optimizers.SGD(0.1, momentum=0.9, **options)


def restarts() -> Any:
    rate = scaled_rate(0.01, batch=24, base_batch=6)
    return cosine_restarts(rate, 2, growth=1.0, warmup=2, start=0.01)


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda: keras.optimizers.AdamW(restarts(), weight_decay=0.05, epsilon=1e-3),
        lambda: keras.optimizers.SGD(restarts(), momentum=0.9),
    ],
    ids=["adamw", "sgd"],
)
def test_warm_up_and_restarts_give_the_numbers_of_one_device(two: Any, optimizer: Maker) -> None:
    _, expected = train(ONE, small, optimizer)
    model, found = train(two, small, optimizer)
    alike(found, expected)
    assert float(model.optimizer.learning_rate) == pytest.approx(float(restarts()(6)))


def test_smoothed_labels_on_two_replicas(two: Any) -> None:
    _, expected = train(ONE, small, sgd, loss=SparseLabelSmoothing(0.2), weighted=True)
    alike(train(two, small, sgd, loss=SparseLabelSmoothing(0.2), weighted=True)[1], expected)
    one_hot = keras.losses.CategoricalCrossentropy(label_smoothing=0.2)
    loss = one_hot(np.eye(3)[LABELS], small()(X))
    assert float(SparseLabelSmoothing(0.2)(LABELS, small()(X))) != pytest.approx(float(loss), rel=1e-3)


@pytest.mark.parametrize(
    ("model", "computing"),
    [
        (unbuilt, ["float16", "float16", "float32", "float32"]),
        (functional, ["float16", "float32", "float32"]),
        (Subclassed, ["float16", "float16"]),
    ],
)
def test_half_precision_has_whole_outputs(model: Maker, computing: list[str]) -> None:
    before = keras.config.dtype_policy().name
    with precision("mixed_float16"):
        made = float32_outputs(model())
    assert keras.config.dtype_policy().name == before
    assert made(X[:2]).dtype == tf.float32
    kept = [layer.compute_dtype for layer in made.layers if not isinstance(layer, layers.InputLayer)]
    assert kept == computing
    assert {weight.dtype for weight in made.weights} == {"float32"}


def test_half_precision_on_two_replicas(two: Any) -> None:
    made, found = train(two, Subclassed, sgd, word="mixed_float16", loss=SparseLabelSmoothing(0.1))
    assert isinstance(made.optimizer, keras.optimizers.LossScaleOptimizer)
    assert made.predict(X[:2], verbose=0).dtype == np.float32
    expected = train(ONE, Subclassed, sgd, word="mixed_float16", loss=SparseLabelSmoothing(0.1))[1]
    # Three digits, of the largest term of a sum: weights near zero have fewer.
    alike(found, expected, rtol=1e-2, atol=5e-5)


def test_half_precision_without_scaling(tmp_path: Path) -> None:
    made, _ = train(ONE, small, sgd, word="mixed_bfloat16")
    assert isinstance(made.optimizer, keras.optimizers.SGD)
    made.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert [layer.compute_dtype for layer in loaded.layers] == ["bfloat16", "bfloat16", "float32"]
    np.testing.assert_array_equal(loaded.predict(X, verbose=0), made.predict(X, verbose=0))


def test_outputs_of_a_model_of_models_and_wrappers() -> None:
    with precision("mixed_float16"):
        inner = keras.Sequential([keras.Input((3, 6)), layers.TimeDistributed(layers.Dense(2))])
        inputs = keras.Input((3, 6))
        both = float32_outputs(keras.Model(inputs, [inner(inputs), Block()(inputs)]))
    found = both(RNG.normal(size=(2, 3, 6)))
    assert [value.dtype for value in found] == [tf.float32, tf.float32]
    assert inner.layers[-1].layer.compute_dtype == "float32"
    assert both.layers[-1].parts[0].compute_dtype == "float16"
    assert both.dtype_policy.name == "mixed_float16"


@pytest.mark.long
def test_layers_that_are_computed_again_give_the_same_numbers(two: Any) -> None:
    _, expected = train(two, blocks, sgd)
    alike(train(two, blocks, sgd, remat={"mode": "full"})[1], expected, rtol=1e-5)


def kept_tensors(mode: str) -> int:
    """How many of the forward pass' activations the backward pass takes."""
    keras.utils.set_random_seed(3)
    with rematerialize(mode):
        model = keras.Sequential([keras.Input((6,)), Block(), layers.Dense(1)])
    forward: list[int] = []

    @tf.function
    def gradients(x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(x, training=True))
        forward.append(len(x.graph.get_operations()))
        return tape.gradient(loss, model.trainable_variables)

    operations = gradients.get_concrete_function(tf.TensorSpec((4, 6))).graph.get_operations()
    made = {t.name for op in operations[: forward[0]] for t in op.outputs if t.shape == (4, 6)}
    return len(made & {t.name for op in operations[forward[0] :] for t in op.inputs})


def test_layers_that_are_computed_again_keep_nothing_of_their_inside() -> None:
    everything, little = kept_tensors("none"), kept_tensors("full")
    assert (everything, little) == (4, 2)  # of the block only what goes in and what comes out


def test_layers_that_cannot_be_computed_again_are_refused(two: Any) -> None:
    def writing() -> keras.Model:
        return keras.Sequential([layers.SpectralNormalization(layers.Dense(4)), layers.Dense(3, "softmax")])

    def adding() -> keras.Model:
        inner = keras.Sequential([keras.Input((6,)), layers.Dense(4, activity_regularizer="l2")])
        inputs = keras.Input((6,))
        return keras.Model(inputs, layers.Dense(3, "softmax")(inner(inputs)))

    with refused(ConfigurationError, "'spectral_normalization'", "writes", "kernel'"):
        train(two, writing, sgd, remat={"mode": "full"})
    with refused(ConfigurationError, "add_loss"):
        train(ONE, adding, sgd, remat={"mode": "full"})


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"mode": "fall"}, ("mode='fall'", "'full'")),
        ({"mode": "larger_than"}, ("mode='larger_than'", "size=")),
        ({"mode": "layers"}, ("mode='layers'", "layers=")),
        ({"mode": "layers", "layers": "dense"}, ("layers='dense'", "['dense']")),
        ({"mode": "full", "size": 3}, ("size", "mode='full'", "mode='larger_than'")),
    ],
)
def test_invalid_arguments_of_rematerialize(options: dict[str, Any], named: tuple[str, ...]) -> None:
    with refused(ConfigurationError, *named), rematerialize(**options):
        pass


def test_weights_are_given_out_evenly_and_always_alike() -> None:
    sizes = [400, 10, 300, 10, 100]
    owners = owners_of(sizes, 2)
    assert owners == [0, 0, 1, 1, 1]
    assert owners_of(sizes, 1) == [0] * 5
    assert owners_of([], 3) == []


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        pytest.param(
            lambda: keras.optimizers.AdamW(
                0.02, weight_decay=0.1, epsilon=1e-3, global_clipnorm=0.3, gradient_accumulation_steps=2
            ),
            {},
            marks=pytest.mark.long,
        ),
        (sgd, {"word": "mixed_float16"}),
    ],
    ids=["adamw", "sgd"],
)
def test_divided_state_gives_the_same_bits(two: Any, optimizer: Maker, options: dict[str, Any]) -> None:
    _, whole = train(two, small, optimizer, **options)
    model, found = train(two, small, lambda: shard_state(optimizer()), **options)
    for one, other in zip(found, whole, strict=True):
        np.testing.assert_array_equal(one, other)
    inner = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    slots = [v.value for v in inner.variables if "momentum" in v.name or "velocity" in v.name]
    assert not any(isinstance(slot, tf.distribute.DistributedValues) for slot in slots)
    assert {slot.device[-1] for slot in slots} == {"0", "1"}
    copies = [two.experimental_local_results(weight.value) for weight in model.trainable_variables]
    for first, second in copies:
        np.testing.assert_array_equal(first.numpy(), second.numpy())


def applied(strategy: Any, make: Maker) -> list[Any]:
    """Three weights after two updates with gradients of which each replica has its part."""
    with strategy.scope():
        optimizer = make()
        weights = [keras.Variable(np.linspace(0.5, 1.5, n).reshape(2, -1), name=f"w{n}") for n in (12, 6, 4)]
        optimizer.build(weights)
    part = 1.0 / strategy.num_replicas_in_sync

    def update() -> None:
        optimizer.apply([part * tf.reshape(tf.linspace(-1.0, 2.0, w.shape[1] * 2), w.shape) for w in weights])

    for _ in range(2):
        strategy.run(update)
    return [weight.numpy() for weight in weights]


class Counting(keras.optimizers.Adam):  # type: ignore[misc]
    """Writes to a variable, by all gradients, before Keras' method updates the weights."""

    def build(self, variables: list[Any]) -> None:
        super().build(variables)
        self.total = keras.Variable(0.0, name="total")

    def _backend_update_step(self, grads: Any, trainable_variables: Any, learning_rate: Any) -> None:
        self.assign(self.total, self.total + sum(tf.reduce_sum(each) for each in grads))
        super()._backend_update_step(grads, trainable_variables, learning_rate)


@pytest.mark.parametrize(
    ("make", "name"), [(keras.optimizers.Nadam, "_u_product"), (Counting, "total")], ids=["nadam", "own"]
)
@pytest.mark.parametrize("weights", [1, 2])
def test_a_replica_without_weights_holds_what_the_optimizer_writes(
    two: Any, make: Any, name: str, weights: int
) -> None:
    def updated(strategy: Any, optimizer: Any) -> list[Any]:
        trained = [keras.Variable(np.linspace(0.5, 1.5, 4), name=f"w{n}") for n in range(weights)]
        optimizer.build(trained)
        part = 1.0 / strategy.num_replicas_in_sync
        for _ in range(3):
            strategy.run(lambda: optimizer.apply([part * tf.linspace(-1.0, 2.0, 4) for _ in trained]))
        copies = strategy.experimental_local_results(getattr(optimizer, name).value)
        assert len(copies) == strategy.num_replicas_in_sync
        return [*copies, *(weight.numpy() for weight in trained)]

    with ONE.scope():
        expected, *same = updated(ONE, make(0.05))
    with two.scope():
        first, second, *found = updated(two, shard_state(make(0.05)))
    np.testing.assert_allclose(first, expected, rtol=1e-6)
    np.testing.assert_array_equal(first, second)
    alike(found, same, rtol=1e-5)


@pytest.mark.parametrize("name", DIVISIBLE)
def test_every_optimizer_that_may_be_divided(two: Any, name: str) -> None:
    make = functools.partial(getattr(keras.optimizers, name), 0.05)
    expected = applied(ONE, make)
    assert not np.array_equal(expected[0].ravel(), np.linspace(0.5, 1.5, 12, dtype="float32"))
    alike(applied(two, lambda: shard_state(make())), expected, rtol=1e-5)


def test_divided_state_is_saved_whole(two: Any, tmp_path: Path) -> None:
    sharded, _ = train(two, small, lambda: shard_state(adam()))
    sharded.save(tmp_path / "model.keras")
    sharded.save_weights(tmp_path / "model.weights.h5")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    alone, _ = train(ONE, small, adam)
    alike([v.numpy() for v in loaded.optimizer.variables], [v.numpy() for v in alone.optimizer.variables])
    sharded.optimizer.variables[2].assign(tf.zeros_like(sharded.optimizer.variables[2]))
    sharded.load_weights(tmp_path / "model.weights.h5")
    steps = {"batch_size": 12, "shuffle": False, "verbose": 0}
    expected = alone.fit(X, LABELS, **steps).history["loss"]
    for model in (loaded, sharded):
        alike([model.fit(X, LABELS, **steps).history["loss"]], [expected])


def test_state_that_cannot_be_divided(two: Any) -> None:
    with two.scope():
        used = adam()
        used.build(small().trainable_variables)
        for optimizer, said in (
            (keras.optimizers.Adafactor(0.1), "Adafactor"),
            (adam(use_ema=True), "use_ema=True"),
            (used, "already"),
        ):
            with refused(ConfigurationError, "shard_state", said):
                shard_state(optimizer)


def test_one_device_has_nothing_to_divide() -> None:
    optimizer = shard_state(adam())
    optimizer.build(small().trainable_variables)
    assert [len(tuple(slot.shape)) for slot in optimizer.variables[2:6]] == [2, 2, 1, 1]


def accumulating(steps: int = 4) -> keras.optimizers.Optimizer:
    return sgd(gradient_accumulation_steps=steps, clipvalue=0.1)


class EpochSums(keras.callbacks.Callback):  # type: ignore[misc]
    """What a callback finds in the optimizer's sums when an epoch has ended."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Any] = []

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.found += [each.numpy() for each in self.model.optimizer._accumulated_gradients]


class Watching(keras.callbacks.Callback):  # type: ignore[misc]
    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        pass


@pytest.fixture
def reductions(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The branch, "true" for the update, in which each gradient is summed while it is traced."""
    found: list[str] = []
    original = communication.sum_in_order

    def sum_in_order(values: Any) -> Any:
        graph = tf.compat.v1.get_default_graph().name
        if values[0].shape.rank:
            found.append("".join(re.findall("_(true|false)_", graph)))
        return original(values)

    monkeypatch.setattr(communication, "sum_in_order", sum_in_order)
    return found


def accumulated(strategy: Any, *callbacks: Any) -> tuple[keras.Model, list[Any]]:
    """Nine micro-batches, one outside of fit, and three more: neither fills the updates of four."""
    keras.utils.set_random_seed(3)
    sums = EpochSums()
    with strategy.scope():
        model = small()
        model.compile(accumulating(), "sparse_categorical_crossentropy")
    steps: dict[str, Any] = {
        "batch_size": 12,
        "shuffle": False,
        "verbose": 0,
        "callbacks": [sums, *callbacks],
    }
    losses = model.fit(X, LABELS, epochs=3, **steps).history["loss"]
    alone = model.train_on_batch(X[:10], LABELS[:10])
    losses += model.fit(X, LABELS, epochs=1, **steps).history["loss"]
    return model, [*losses, alone, *model.get_weights(), *sums.found]


def test_an_accumulated_update_takes_one_reduction(two: Any, reductions: list[str]) -> None:
    model, found = accumulated(two)
    # What `train_on_batch` traces, where no sums are open, comes after the first fit.
    assert reductions[:4] == ["true"] * 4, "one a weight while tracing the update, none in what only adds"
    _, expected = accumulated(ONE)
    alike(found, expected)
    assert int(model.optimizer.iterations) == 3


def test_sums_that_are_watched_are_reduced_at_every_batch(two: Any, reductions: list[str]) -> None:
    _, found = accumulated(two, Watching())
    assert {*reductions} == {"false", "true"}
    alike(found, accumulated(ONE)[1])


def test_a_fit_that_fails_leaves_whole_sums(two: Any) -> None:
    def broken() -> Any:
        yield X[:12], LABELS[:12]
        yield X[12:22], LABELS[12:22]
        raise RuntimeError("no more")

    signature = (tf.TensorSpec((None, 6)), tf.TensorSpec((None,), tf.int64))
    sums = []
    for strategy in (ONE, two):
        keras.utils.set_random_seed(3)
        with strategy.scope():
            model = small()
            model.compile(accumulating(), "sparse_categorical_crossentropy")
        with pytest.raises(Exception, match="no more"):
            model.fit(tf.data.Dataset.from_generator(broken, output_signature=signature), verbose=0)
        sums.append([each.value for each in model.optimizer._accumulated_gradients])
    for one, several in zip(*sums, strict=True):
        for each in two.experimental_local_results(several):
            np.testing.assert_allclose(each.numpy(), one.numpy(), rtol=2e-4, atol=2e-6)


class SumsThatFail(accumulation.MicroBatchSums):
    def abandon(self) -> None:
        raise ValueError("cannot tidy up")


def test_tidying_up_that_fails_hides_no_error(two: Any, caplog: pytest.LogCaptureFixture) -> None:
    accumulation.abandon(SumsThatFail(None, two, None))  # type: ignore[arg-type]
    assert "ValueError: cannot tidy up" in caplog.text


@pytest.mark.parametrize("scaled", [False, True])
def test_a_new_rate_keeps_what_does_not_decay(scaled: bool) -> None:
    weights = [keras.Variable([1.0], name=name) for name in ("kernel", "bias", "other")]
    by_name, by_variable = (keras.optimizers.AdamW(0.1, weight_decay=0.5) for _ in range(2))
    by_name.exclude_from_weight_decay(var_names=["bias"])
    by_variable.exclude_from_weight_decay(var_list=[weights[2]])
    for optimizer, kept in ((by_name, 1), (by_variable, 2)):
        given = keras.optimizers.LossScaleOptimizer(optimizer) if scaled else optimizer
        made = with_settings(given, learning_rate=0.01)
        for weight in weights:
            weight.assign([1.0])
        made.apply([tf.zeros(1)] * 3, weights)
        found = [float(weight.numpy()[0]) for weight in weights]
        expected = [1.0 if number == kept else 0.995 for number in range(3)]
        np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_an_optimizer_whose_rate_is_unknown() -> None:
    assert rate_of(base_optimizer(lambda: keras.optimizers.SGD(0.5))) == 0.5
    with refused(ConfigurationError, "learning_rate", "'rate'"):
        base_optimizer(lambda rate: keras.optimizers.SGD(rate))
    for rate in (lambda: 0.1, sgd, keras.ops.sin):
        with pytest.raises(ConfigurationError, match="neither a number nor a schedule"):
            rate_of(keras.optimizers.Adam(rate))
