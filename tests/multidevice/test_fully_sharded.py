"""`FullyShardedStrategy` over devices of one process: one device's numbers, divided weights, and its plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from tests.fully_sharded_models import MODELS, differences, numbers

import dtrain
from dtrain.errors import StepError
from dtrain.partition.layouts import WeightRows
from dtrain.strategies.divided_variable import dim_to_divide
from dtrain.telemetry import events

L = keras.layers
X = np.random.default_rng(0).normal(size=(20, 6)).astype("float32")
FEW = (
    "dense_of_uneven_parts",
    "table_divided_by_rows",
    "table_divided_by_columns",
    "recurrent",
    "run_eagerly",
)


def sharded() -> Any:
    return dtrain.FullyShardedStrategy(smallest=1)


def trained(*, optimizer: str = "adam") -> Any:
    keras.utils.set_random_seed(1)
    with sharded().scope():
        layers = [L.Dense(8, "relu"), L.Dense(10, "relu"), L.Dense(4)]
        made = keras.Sequential([keras.Input((6,)), *layers])
        made.compile(optimizer, "mse")
    made.fit(X, X[:, :4], batch_size=20, verbose=0)
    return made


@pytest.mark.parametrize("name", MODELS)
def test_two_replicas_have_the_numbers_of_one_device(name: str) -> None:
    made, found = numbers(sharded(), MODELS[name])
    assert differences(found, numbers(tf.distribute.get_strategy(), MODELS[name])[1]) == ""
    for weight in made.weights:
        parts = [tuple(part.shape) for part in weight.value.values]
        whole = tuple(weight.shape)
        assert parts == [whole] * 2 if len(whole) < 2 else parts[0] != whole, weight.path


def of_several_devices(names: tuple[str, ...]) -> dict[str, str]:
    strategy = sharded()
    assert strategy.num_replicas_in_sync == 3
    one = tf.distribute.get_strategy()
    return {
        name: differences(numbers(strategy, MODELS[name])[1], numbers(one, MODELS[name])[1]) for name in names
    }


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(FEW, id="few"),
        pytest.param(tuple(name for name in MODELS if name not in FEW), id="others", marks=pytest.mark.long),
    ],
)
def test_three_replicas_have_the_numbers_of_one_device(names: tuple[str, ...]) -> None:
    (wrong,) = dtrain.spawn(of_several_devices, 1, args=(names,), devices_per_worker=3)
    assert wrong == dict.fromkeys(names, "")


def test_loss_scaling_follows_one_device() -> None:
    """The first steps overflow, so they change nothing and halve the scale; float16 rounds each part."""

    def make() -> Any:
        hidden = [L.Dense(8, "tanh", dtype="mixed_float16") for _ in range(2)]
        made = keras.Sequential([keras.Input((6,)), *hidden, L.Dense(1, dtype="float32")])
        scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.05), initial_scale=2.0**20)
        made.compile(scaled, "mse")
        return made

    made, found = numbers(sharded(), make)
    one, expected = numbers(tf.distribute.get_strategy(), make)
    assert float(made.optimizer.dynamic_scale.numpy()) == float(one.optimizer.dynamic_scale.numpy()) < 2.0**20
    assert int(made.optimizer.inner_optimizer.iterations) == int(one.optimizer.inner_optimizer.iterations) > 0
    for value, other in zip(found.values(), expected.values(), strict=True):
        np.testing.assert_allclose(value, other, rtol=2e-3, atol=1e-3)


def test_a_weight_is_gathered_where_it_is_needed_and_its_gradient_is_scattered() -> None:
    """A gather waits for what was computed before it, so that not all weights are whole at once."""
    seen: list[Any] = []

    class Plans(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_begin(self, logs: Any = None) -> None:
            events.listen(self)

        def _handle_step_divided(self, event: events.StepDivided) -> None:
            seen.append(event.describe())

    made = trained()
    made.train_function = None
    made.fit(X, X[:, :4], batch_size=20, verbose=0, callbacks=[Plans()])
    (plan,) = seen
    sizes = [4 * int(np.prod(weight.shape)) for weight in made.weights if len(weight.shape) == 2]
    of_kind = {
        kind: [each for each in plan["communications"] if each["kind"] == kind]
        for kind in ("gather", "scatter")
    }
    gathers = sorted(of_kind["gather"], key=lambda each: each["round"])
    # Forward, and backward without the first layer, whose inputs need no gradient.
    assert [each["bytes"] for each in gathers] == [*sizes, *sizes[:0:-1]]
    rounds = [each["round"] for each in gathers]
    assert rounds == sorted(set(rounds))
    assert not any("adam" in each["needed_by"] for each in gathers)
    assert sorted(each["bytes"] for each in of_kind["scatter"]) == sorted(sizes)
    assert plan["gathered"] == []
    assert {each["bytes"] for each in plan["communications"] if each["kind"] == "sum"} == {4, 16, 32, 40}


@pytest.mark.parametrize(
    ("number", "replicas", "sizes"),
    [(6, 2, [3, 3]), (7, 3, [3, 2, 2]), (3, 3, [1, 1, 1]), (5, 4, [2, 1, 1, 1])],
)
def test_rows_are_divided_as_evenly_as_they_can_be(number: int, replicas: int, sizes: list[int]) -> None:
    assert WeightRows(number).of_replicas(replicas) == sizes


@pytest.mark.parametrize(
    ("shape", "replicas", "dim"),
    [
        ((8, 8), 2, 0),
        ((7, 6), 2, 1),
        ((3, 3, 4, 8), 2, 2),
        ((3, 3, 2, 2), 3, 0),
        ((1, 7), 2, 1),
        ((100,), 2, None),
        ((), 2, None),
        ((1, 1), 2, None),
        ((2, 2), 2, None),
        ((2, 4), 3, 1),
    ],
)
def test_the_dimension_that_divides_a_weight_most_evenly(shape: Any, replicas: int, dim: int | None) -> None:
    assert dim_to_divide(shape, replicas, 5) == dim


def test_small_weights_stay_whole_by_default() -> None:
    with dtrain.FullyShardedStrategy().scope():
        small, large = (tf.Variable(tf.ones([64, rows])) for rows in (127, 128))
        whole_numbers = tf.Variable(tf.ones([64, 128], tf.int32))
    assert [tuple(each.values[1].shape) for each in (small, large, whole_numbers)] == [
        (64, 127),
        (32, 128),
        (64, 128),
    ]


def test_weights_are_read_and_written_as_wholes_outside_of_steps() -> None:
    made = trained()
    kernel = made.layers[0].kernel
    expected = kernel.numpy()
    assert expected.shape == (6, 8)
    np.testing.assert_array_equal(kernel.value[1:3, 2], expected[1:3, 2])
    np.testing.assert_array_equal(tf.gather_nd(kernel.value, [[5, 7]]), [expected[5, 7]])
    kernel.assign(kernel * 2.0)
    kernel.assign_add(np.ones((6, 8)))
    kernel.value.assign_sub(tf.ones([6, 8]))
    kernel.value.scatter_nd_add([[0, 0], [5, 7]], [1.0, 2.0])
    kernel.value.scatter_nd_update([[1]], [[7.0] * 8])
    kernel.value.scatter_sub(tf.IndexedSlices(tf.ones([1, 8]), [2]))
    expected *= 2.0
    expected[[0, 5], [0, 7]] += 1.0, 2.0
    expected[1], expected[2] = 7.0, expected[2] - 1.0
    np.testing.assert_allclose(kernel.numpy(), expected, rtol=1e-5)
    with pytest.raises(ValueError, match="has the shape"):
        kernel.value.assign(tf.ones([6, 1]))


def test_a_read_in_strategy_run_is_an_error() -> None:
    made = trained()
    with pytest.raises(StepError, match=r"The weight '.*kernel.*' is divided .* was read in strategy.run"):
        made.distribute_strategy.run(lambda: made(X))


def test_a_read_in_a_function_that_xla_compiles_is_an_error() -> None:
    made = trained()
    with pytest.raises(StepError, match=r"The weight '.*kernel.*' is divided .* function that XLA compiles"):
        tf.function(made, jit_compile=True)(X)


def test_models_are_saved_whole(tmp_path: Path) -> None:
    made = trained()
    weights, outputs = made.get_weights(), made.predict(X, verbose=0)
    made.save(tmp_path / "model.keras")
    made.save_weights(tmp_path / "model.weights.h5")
    made.export(tmp_path / "exported", verbose=False)
    written = tf.train.Checkpoint(model=made).save(str(tmp_path / "checkpoint"))
    for scope in (made.distribute_strategy.scope(), tf.distribute.get_strategy().scope()):
        with scope:
            loaded = keras.models.load_model(tmp_path / "model.keras")
            exported = tf.saved_model.load(tmp_path / "exported")
        np.testing.assert_allclose(exported.serve(X), outputs, rtol=1e-5, atol=1e-6)
        for one, other in zip(loaded.get_weights(), weights, strict=True):
            np.testing.assert_array_equal(one, other)
        assert loaded.fit(X, X[:, :4], verbose=0).history["loss"] == pytest.approx(
            [made.evaluate(X, X[:, :4], verbose=0)], rel=2e-4
        )
    for load in (
        lambda: made.load_weights(tmp_path / "model.weights.h5"),
        lambda: tf.train.Checkpoint(model=made).restore(written),
    ):
        made.set_weights([weight * 0 for weight in weights])
        load()
        for one, other in zip(made.get_weights(), weights, strict=True):
            np.testing.assert_array_equal(one, other)
