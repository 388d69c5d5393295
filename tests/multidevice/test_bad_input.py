"""Mistakes: each ends in an error that says what was set, what was found and what to do, or in a warning and
right numbers where training can go on.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import dtrain
from dtrain.errors import ConfigurationError, DataError, ScopeError
from dtrain.interfaces import scope_checks

X = np.random.default_rng(0).normal(size=(24, 4)).astype("float32")
Y = (X.sum(axis=1, keepdims=True) + np.linspace(0, 2, 24)[:, None]).astype("float32")

SEVERAL: dict[str, Callable[[], Any]] = {
    "mirrored": dtrain.MirroredStrategy,
    "central_storage": lambda: dtrain.CentralStorageStrategy(["/cpu:0", "/cpu:1"], "/cpu:0"),
    "multi_worker": dtrain.MultiWorkerMirroredStrategy,
}


OTHER = pytest.mark.soak("a mistake is found in the same way under mirrored and multi_worker")


@pytest.fixture(params=[pytest.param("central_storage", marks=OTHER), "mirrored", "multi_worker"])
def strategy(request: pytest.FixtureRequest) -> Any:
    return SEVERAL[request.param]()


def net() -> Any:
    keras.utils.set_random_seed(3)
    return keras.Sequential(
        [keras.Input((4,)), keras.layers.Dense(5, activation="tanh"), keras.layers.Dense(1)]
    )


def trained(strategy: Any = None, **fit: Any) -> tuple[list[Any], dict[str, Any]]:
    """Weights and history of the same training, under a strategy or on one device."""
    with (strategy or tf.distribute.get_strategy()).scope():
        model = net()
        model.compile(optimizer=keras.optimizers.SGD(0.1, momentum=0.9), loss="mse", metrics=["mae"])
    options = {"x": X, "y": Y, "epochs": 2, "shuffle": False, "verbose": 0} | fit
    history = model.fit(**options).history
    return model.get_weights(), history


def assert_same(found: tuple[Any, Any], expected: tuple[Any, Any]) -> None:
    for one, other in zip(found[0], expected[0], strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-4, atol=1e-6)
    assert found[1].keys() == expected[1].keys()
    for key in found[1]:
        np.testing.assert_allclose(found[1][key], expected[1][key], rtol=2e-4)


def refused(call: Callable[[], Any], *words: str) -> None:
    with pytest.raises(ScopeError) as caught:
        call()
    text = str(caught.value)
    missing = [word for word in words if word not in text]
    assert not missing, text
    assert "\nHint: " in text and "with strategy.scope():" in text
    assert isinstance(caught.value, ValueError)


# A distribution of Keras'


MESH = keras.distribution.DeviceMesh((1, 2), ("batch", "model"), ["cpu:0", "cpu:1"])
LAYOUTS = keras.distribution.LayoutMap(MESH)
DISTRIBUTIONS = {
    "DataParallel": (keras.distribution.DataParallel(device_mesh=None), ("mirrored", "multi_worker")),
    "ModelParallel": (keras.distribution.ModelParallel(layout_map=LAYOUTS), ("fully_sharded",)),
}


@pytest.mark.parametrize("kind", DISTRIBUTIONS)
def test_a_distribution_of_keras_is_refused_where_it_is_seen_first(kind: str) -> None:
    distribution, instead = DISTRIBUTIONS[kind]
    strategies = [dtrain.MirroredStrategy(), dtrain.OneDeviceStrategy("/cpu:0")]
    models = []
    for strategy in strategies:
        with strategy.scope():
            models.append(net())
            models[-1].compile("sgd", "mse")
    makes: list[Callable[[], Any]] = [
        lambda: dtrain.strategy("mirrored"),
        lambda: dtrain.OneDeviceStrategy("/cpu:0"),
        lambda: strategies[0].scope(),
        *(lambda model=model: model.fit(X, Y, verbose=0) for model in models),
        lambda: models[0].evaluate(X, Y, verbose=0),
    ]
    for make in makes:
        with distribution.scope(), pytest.raises(ConfigurationError) as caught:
            make()
        assert kind in caught.value.message
        assert all(f'"{name}"' in caught.value.hint for name in instead)
    assert models[0].fit(X, Y, verbose=0)  # once it is gone, training goes on


# Scopes


def test_an_optimizer_made_outside_the_scope(strategy: Any) -> None:
    optimizer = keras.optimizers.Adam()
    with strategy.scope():
        model = net()
        model.compile(optimizer=optimizer, loss="mse")
    name = type(strategy).__name__
    refused(
        lambda: model.fit(X, Y, verbose=0), "The optimizer 'adam", "outside of any strategy's scope", name
    )
    refused(
        lambda: model.train_on_batch(X, Y), "The optimizer 'adam", "outside of any strategy's scope", name
    )


def test_a_strategy_whose_scope_was_never_entered() -> None:
    strategy = dtrain.MirroredStrategy()
    model = net()
    model.compile(optimizer="sgd", loss="mse")
    assert strategy.num_replicas_in_sync == 2
    with pytest.warns(UserWarning, match="made outside of the scope of the MirroredStrategy"):
        model.fit(X, Y, verbose=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.fit(X, Y, verbose=0)  # said once
        trained(dtrain.MirroredStrategy())
        trained()  # beside models in the scope, it is meant


@pytest.mark.parametrize("call", ["fit", "train_on_batch"])
def test_a_model_that_was_trained_before_the_strategy_of_workers(
    call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = net()
    model.compile(optimizer="sgd", loss="mse")
    model.fit(X, Y, verbose=0)
    monkeypatch.setattr(scope_checks, "_with_workers", "a MultiWorkerMirroredStrategy of 2 workers")
    before = model.get_weights()
    refused(lambda: getattr(model, call)(X, Y), "made outside of any strategy's scope", "of 2 workers")
    for one, other in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(one, other)


def test_an_optimizer_that_has_its_variables_already(strategy: Any) -> None:
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    plain = net()
    optimizer.build(plain.trainable_variables)
    with strategy.scope():
        model = net()
        model.compile(optimizer=optimizer, loss="mse")
    refused(lambda: model.fit(X, Y, verbose=0), "The optimizer 'sgd", "outside of any strategy's scope")


def test_an_optimizer_of_another_strategy(strategy: Any) -> None:
    with dtrain.MirroredStrategy().scope():
        optimizer = keras.optimizers.Adam()
    with strategy.scope():
        model = net()
        model.compile(optimizer=optimizer, loss="mse")
    refused(
        lambda: model.fit(X, Y, verbose=0),
        "The optimizer 'adam",
        "under another MirroredStrategy",
        "2 replicas",
    )


def test_a_layer_of_another_strategy(strategy: Any) -> None:
    with dtrain.MirroredStrategy().scope():
        shared = keras.layers.Dense(5, name="shared")
        shared.build((None, 4))
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), shared, keras.layers.Dense(1)])
        model.compile(optimizer="sgd", loss="mse")
    refused(lambda: model.fit(X, Y, verbose=0), "shared/kernel", "under another MirroredStrategy")


def test_a_layer_made_outside(strategy: Any) -> None:
    shared = keras.layers.Dense(5, name="shared")
    shared.build((None, 4))
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), shared, keras.layers.Dense(1)])
        model.compile(optimizer="sgd", loss="mse")
    refused(lambda: model.fit(X, Y, verbose=0), "shared/kernel", "outside of any strategy's scope")


def test_a_model_made_outside_and_fitted_inside(strategy: Any) -> None:
    model = net()
    model.compile(optimizer="sgd", loss="mse")

    def fit() -> None:
        with strategy.scope():
            model.fit(X, Y, verbose=0)

    refused(fit, "fit was called inside the scope of a", type(strategy).__name__, "made outside of it")


def test_a_model_of_one_strategy_fitted_inside_another(strategy: Any) -> None:
    with dtrain.MirroredStrategy().scope():
        model = net()
        model.compile(optimizer="sgd", loss="mse")

    def fit() -> None:
        with strategy.scope():
            model.fit(X, Y, verbose=0)

    refused(fit, type(strategy).__name__, "MirroredStrategy")


def test_a_metric_made_outside_counts_right(strategy: Any) -> None:
    metric = keras.metrics.MeanAbsoluteError(name="mine")
    with strategy.scope():
        model = net()
        model.compile(optimizer="sgd", loss="mse", metrics=[metric, "mae"])
    history = model.fit(X, Y, batch_size=9, epochs=2, verbose=0).history
    np.testing.assert_allclose(history["mine"], history["mae"], rtol=2e-4)
    found = model.evaluate(X, Y, batch_size=9, verbose=0, return_dict=True)
    np.testing.assert_allclose(found["mine"], found["mae"], rtol=2e-4)


def test_a_custom_loop_with_an_optimizer_of_another_strategy(strategy: Any) -> None:
    with dtrain.MirroredStrategy().scope():
        optimizer = keras.optimizers.SGD(0.1)
    with strategy.scope():
        model = net()

    @tf.function
    def step() -> None:
        def replica() -> None:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(model(X[:4]) ** 2)
            optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

        strategy.run(replica)

    refused(step, "under another MirroredStrategy", type(strategy).__name__)


def test_compiling_outside_the_scope_by_name(strategy: Any) -> None:
    expected = trained()
    with strategy.scope():
        model = net()
    model.compile(
        optimizer={"class_name": "SGD", "config": {"learning_rate": 0.1, "momentum": 0.9}},
        loss="mse",
        metrics=["mae"],
    )
    history = model.fit(X, Y, epochs=2, shuffle=False, verbose=0).history
    assert_same((model.get_weights(), history), expected)
    model.compile(optimizer="adam", loss="mse")
    assert np.isfinite(model.fit(X, Y, verbose=0).history["loss"][0])


# Data


def test_a_global_batch_below_the_number_of_replicas(strategy: Any) -> None:
    expected = trained(x=X[:5], y=Y[:5], batch_size=1)
    with pytest.warns(
        UserWarning, match="batch_size=1 is the global batch, but there are 2 replicas"
    ) as caught:
        found = trained(strategy, x=X[:5], y=Y[:5], batch_size=1)
    assert "set batch_size to a multiple of 2" in str(caught[0].message)
    assert_same(found, expected)


def test_a_dataset_whose_batches_are_smaller_than_the_replicas_are_many(strategy: Any) -> None:
    data = tf.data.Dataset.from_tensor_slices((X[:5], Y[:5])).batch(1)
    assert_same(trained(strategy, x=data, y=None), trained(x=data, y=None))


def test_data_that_ends_early(strategy: Any) -> None:
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(8)
    for steps in (5, 7):  # in the middle of the second epoch, and of the third
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            expected = trained(x=data, y=None, steps_per_epoch=steps, epochs=3)
        with pytest.warns(UserWarning, match="ran out of data"):
            found = trained(strategy, x=data, y=None, steps_per_epoch=steps, epochs=3)
        assert_same(found, expected)


def test_a_generator_that_ends_early(strategy: Any) -> None:
    def batches() -> Any:
        for i in range(3):
            yield X[8 * i : 8 * i + 8], Y[8 * i : 8 * i + 8]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = trained(x=batches(), y=None, steps_per_epoch=2, epochs=3)
    with pytest.warns(UserWarning, match="ran out of data"):
        found = trained(strategy, x=batches(), y=None, steps_per_epoch=2, epochs=3)
    assert_same(found, expected)


def test_data_that_is_not_batched(strategy: Any) -> None:
    with strategy.scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile(optimizer="sgd", loss="mse")
    data = tf.data.Dataset.from_tensor_slices((X[:, 0], Y[:, 0]))
    for call in (model.fit, model.evaluate, model.predict):
        with pytest.raises(DataError) as caught:
            call(data, verbose=0)
        assert "The data yields scalars: there is no batch" in str(caught.value)
        assert "dataset.batch(global_batch_size)" in str(caught.value)


def test_a_model_that_is_not_compiled(strategy: Any) -> None:
    with strategy.scope():
        model = net()
    with pytest.raises(ValueError, match=r"compile\(\)"):
        model.fit(X, Y, verbose=0)


def test_data_without_an_example(strategy: Any) -> None:
    with pytest.warns(UserWarning, match="ran out of data"):
        expected = trained(x=X[:0], y=Y[:0])
    with pytest.warns(UserWarning, match="ran out of data"):
        assert_same(trained(strategy, x=X[:0], y=Y[:0]), expected)


def test_inputs_of_unequal_length(strategy: Any) -> None:
    with strategy.scope():
        model = net()
        model.compile(optimizer="sgd", loss="mse")
    with pytest.raises(ValueError, match="cardinality"):
        model.fit(X, Y[:-1], verbose=0)
    data = tf.data.Dataset.from_tensors((X, Y[:-2]))
    with pytest.raises((DataError, ValueError, tf.errors.InvalidArgumentError)):
        model.fit(data, verbose=0)


def test_a_loss_that_is_not_a_number_is_said_once(strategy: Any) -> None:
    y = Y.copy()
    y[20] = np.nan
    with pytest.warns(UserWarning) as caught:
        trained(strategy, y=y, epochs=3)
    said = [str(w.message) for w in caught if "The loss of epoch" in str(w.message)]
    assert len(said) == 1
    assert said[0].startswith("The loss of epoch 1 is nan")
    assert "learning rate" in said[0] and "TerminateOnNaN" in said[0]


def test_a_loss_that_stays_a_number_is_not_spoken_of(strategy: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trained(strategy)


def test_training_ends_at_the_first_nan_where_that_was_asked(strategy: Any) -> None:
    y = Y.copy()
    y[2] = np.nan
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _, history = trained(strategy, y=y, epochs=5, callbacks=[keras.callbacks.TerminateOnNaN()])
    assert len(history["loss"]) == 1


@pytest.mark.parametrize(
    ("call", "name", "value"),
    [
        ("fit", "batch_size", 0),
        ("fit", "batch_size", -1),
        ("fit", "batch_size", True),
        ("fit", "steps_per_epoch", float("nan")),
        ("fit", "epochs", 1.5),
        ("fit", "validation_batch_size", 0),
        ("evaluate", "batch_size", 0),
        ("evaluate", "steps", -1),
        ("predict", "batch_size", 0),
    ],
)
def test_numbers_that_cannot_be_counted_with(call: str, name: str, value: Any) -> None:
    with dtrain.MirroredStrategy().scope():
        model = net()
        model.compile(loss="mse")
    data = {"x": X} if call == "predict" else {"x": X, "y": Y}
    with pytest.raises(ConfigurationError, match=f"{name}=.*\n.*at least [01]"):
        getattr(model, call)(**data, **{name: value}, verbose=0)
