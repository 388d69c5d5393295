"""The strategies as a user meets them: by class or name, one after another, beside TensorFlow's own."""

from __future__ import annotations

import inspect
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import dtrain
from dtrain.errors import ConfigurationError, DeviceError, StepError
from dtrain.strategies import devices, multi_worker
from refusals import refused

X = np.random.default_rng(0).normal(size=(24, 4)).astype("float32")
Y = (X.sum(axis=1, keepdims=True) + np.linspace(0, 2, 24)[:, None]).astype("float32")

MAKERS: dict[str, Callable[[], Any]] = {
    "default": dtrain.get_strategy,
    "one_device": lambda: dtrain.OneDeviceStrategy("/cpu:0"),
    "mirrored": dtrain.MirroredStrategy,
    "central_storage": lambda: dtrain.CentralStorageStrategy(["/cpu:0", "/cpu:1"], "/cpu:0"),
    "multi_worker": dtrain.MultiWorkerMirroredStrategy,
}


def train(strategy: Any) -> list[np.ndarray]:
    """Weights after two epochs; the last batch of each is uneven."""
    keras.utils.set_random_seed(3)
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((4,)), keras.layers.Dense(5, activation="tanh"), keras.layers.Dense(1)]
        )
        model.compile(optimizer=keras.optimizers.SGD(0.1, momentum=0.9), loss="mse", metrics=["mae"])
    model.fit(X, Y, batch_size=9, epochs=2, shuffle=False, verbose=0)
    return [*model.get_weights(), np.asarray(model.evaluate(X, Y, batch_size=9, verbose=0))]


@pytest.fixture(scope="module")
def one_device() -> list[np.ndarray]:
    return train(tf.distribute.get_strategy())


def assert_same(found: list[np.ndarray], expected: list[np.ndarray]) -> None:
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-4, atol=1e-6)


# Classes, arguments, devices


@pytest.mark.parametrize(
    ("made", "stock"),
    [
        (dtrain.OneDeviceStrategy, tf.distribute.OneDeviceStrategy),
        (dtrain.MirroredStrategy, tf.distribute.MirroredStrategy),
        (dtrain.MultiWorkerMirroredStrategy, tf.distribute.MultiWorkerMirroredStrategy),
        (dtrain.CentralStorageStrategy, tf.distribute.experimental.CentralStorageStrategy),
        (dtrain.TPUStrategy, tf.distribute.TPUStrategy),
    ],
)
def test_a_class_is_tensorflows_with_its_arguments(made: type, stock: type) -> None:
    assert isinstance(made, type)
    assert issubclass(made, stock)
    assert issubclass(made, tf.distribute.Strategy)
    public = stock._tf_api_names[0]  # what TensorFlow exports the class as
    assert made.__name__ == public.rpartition(".")[2]

    def arguments(found: type) -> dict[str, Any]:
        return {p.name: p.default for p in inspect.signature(found).parameters.values()}

    theirs, ours = arguments(stock), arguments(made)
    assert list(ours)[: len(theirs)] == list(theirs)
    assert {name: ours[name] for name in theirs} == theirs
    by_name = [p.name for p in inspect.signature(made).parameters.values() if p.kind is p.KEYWORD_ONLY]
    assert list(ours)[len(theirs) :] == by_name, "what is dtrain's own goes by name only"
    assert "memory_growth" in by_name
    assert inspect.getdoc(made)


@pytest.mark.parametrize(
    ("name", "stock", "replicas"),
    [
        ("default", tf.distribute.Strategy, 1),
        ("one_device", tf.distribute.OneDeviceStrategy, 1),
        ("mirrored", tf.distribute.MirroredStrategy, 2),
        ("central_storage", tf.distribute.experimental.CentralStorageStrategy, 2),
        ("multi_worker", tf.distribute.MultiWorkerMirroredStrategy, 2),
    ],
)
def test_a_strategy_is_tensorflows_and_accepted_as_such(name: str, stock: type, replicas: int) -> None:
    strategy = MAKERS[name]()
    assert isinstance(strategy, tf.distribute.Strategy)
    assert isinstance(strategy, stock)
    assert strategy.num_replicas_in_sync == replicas
    with strategy.scope():
        assert tf.distribute.get_strategy() is strategy
        assert dtrain.get_strategy() is strategy
    assert dtrain.get_strategy() is tf.distribute.get_strategy()
    ones = strategy.run(lambda: tf.ones([]))
    assert float(strategy.reduce("SUM", ones, axis=None)) == replicas


def test_names_make_the_classes() -> None:
    assert type(dtrain.strategy("mirrored")) is dtrain.MirroredStrategy
    assert type(dtrain.strategy("MirroredStrategy", devices=["CPU:1"])) is dtrain.MirroredStrategy
    assert dtrain.strategy("mirrored", devices=["CPU:1"]).extended.worker_devices[0].endswith("CPU:1")
    assert type(dtrain.strategy("one_device")) is dtrain.OneDeviceStrategy
    assert dtrain.strategy("one_device", device="/cpu:1").extended.worker_devices[0].endswith("CPU:1")
    assert type(dtrain.strategy("central_storage")) is dtrain.CentralStorageStrategy
    assert type(dtrain.strategy("multi_worker_mirrored")) is dtrain.MultiWorkerMirroredStrategy
    assert dtrain.strategy("off") is tf.distribute.get_strategy()
    ops = tf.distribute.ReductionToOneDevice()
    assert dtrain.strategy("mirrored", cross_device_ops=ops).extended._cross_device_ops is ops


@pytest.mark.parametrize("name", ["default", "one_device", "mirrored", "central_storage", "multi_worker"])
@pytest.mark.parametrize("memory_growth", [True, False])
def test_memory_growth_is_an_option_of_all(name: str, memory_growth: bool) -> None:
    assert isinstance(dtrain.strategy(name, memory_growth=memory_growth), tf.distribute.Strategy)


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        (
            "mirrored",
            {"device": ["CPU:0"]},
            ["'mirrored' does not take device", "devices", "cross_device_ops"],
        ),
        ("default", {"devices": []}, ["'default' does not take devices", "memory_growth"]),
        ("one_device", {"zone": 1, "area": 2}, ["'one_device' does not take area, zone", "device"]),
    ],
)
def test_an_option_that_a_strategy_does_not_take(
    name: str, options: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        dtrain.strategy(name, **options)
    assert all(word in str(caught.value) for word in words)


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["GPU:0"], ["'GPU:0' does not exist here", "this process has CPU:0, CPU:1"]),
        (["/gpu:3"], ["'/gpu:3' does not exist here"]),
        (["CPU:0", "CPU:7"], ["'CPU:7' does not exist here", "CPU:0, CPU:1", "--devices-per-worker"]),
        (["CPU:-1"], ["'CPU:-1' does not exist here"]),
        (["/job:worker/task:3/cpu:0"], ["'/job:worker/task:3/cpu:0' does not exist here"]),
        (["CPU:0", "/cpu:0"], ["'/cpu:0' is named twice"]),
        ([], ["list of devices is empty", "leave it out"]),
        (["nonsense"], ["'nonsense' is not a device name", "'CPU:0'"]),
        ([""], ["'' is not a device name"]),
        ([0, 1], ["0 is not a device name"]),
        (2, ["2 is not a list of device names"]),
    ],
)
def test_devices_that_cannot_be_used(names: Any, words: list[str]) -> None:
    for make in (lambda: dtrain.MirroredStrategy(names), lambda: dtrain.CentralStorageStrategy(names)):
        with pytest.raises(DeviceError) as caught:
            make()
        assert all(word in str(caught.value) for word in words)
        assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("device", ["GPU:0", "nonsense", None, 0])
def test_one_device_that_cannot_be_used(device: Any) -> None:
    with refused(DeviceError, device):
        dtrain.OneDeviceStrategy(device)
    with refused(DeviceError, device or "nonsense"):
        dtrain.CentralStorageStrategy(parameter_device=device or "nonsense")


# One after another


def test_strategies_one_after_another_in_one_process(one_device: list[np.ndarray]) -> None:
    order = ["mirrored", "central_storage", "mirrored", "one_device", "multi_worker", "default", "mirrored"]
    for name in order:
        assert_same(train(MAKERS[name]()), one_device)


@pytest.mark.long
def test_a_strategy_survives_a_cleared_session(one_device: list[np.ndarray]) -> None:
    strategies = [MAKERS[name]() for name in ("mirrored", "central_storage")]
    for _ in range(2):
        for strategy in strategies:
            assert_same(train(strategy), one_device)
            keras.utils.clear_session()


def test_two_strategies_that_take_turns(one_device: list[np.ndarray]) -> None:
    models = []
    for name in ("mirrored", "central_storage", "mirrored"):
        keras.utils.set_random_seed(3)
        strategy = MAKERS[name]()
        with strategy.scope():
            model = keras.Sequential(
                [keras.Input((4,)), keras.layers.Dense(5, activation="tanh"), keras.layers.Dense(1)]
            )
            model.compile(optimizer=keras.optimizers.SGD(0.1, momentum=0.9), loss="mse", metrics=["mae"])
        models.append(model)
    for _ in range(2):
        for model in models:
            model.fit(X, Y, batch_size=9, shuffle=False, verbose=0)
    for model in models:
        assert_same(model.get_weights(), one_device[:-1])


# Beside TensorFlow's own strategies

UNTOUCHED = """
import pickle, sys
import keras, numpy as np, tensorflow as tf
cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
tf.config.threading.set_intra_op_parallelism_threads(1)
if sys.argv[1] == "with":
    import dtrain
    dtrain.MirroredStrategy()
    dtrain.CentralStorageStrategy()
x = np.random.default_rng(0).normal(size=(30, 4)).astype("float32")
y = (x[:, :1] > 0).astype("float32")
results = {}
for name, strategy in (("plain", None), ("stock", tf.distribute.MirroredStrategy(["/cpu:0", "/cpu:1"]))):
    keras.utils.set_random_seed(5)
    with strategy.scope() if strategy else tf.name_scope("none"):
        model = keras.Sequential([
            keras.Input((4,)), keras.layers.Dense(6, activation="relu"), keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.3), keras.layers.Dense(1, activation="sigmoid"),
        ])
        model.compile(optimizer=keras.optimizers.Adam(0.01, clipnorm=1.0), loss="binary_crossentropy",
                      metrics=["accuracy", keras.metrics.AUC()])
    history = model.fit(x, y, batch_size=10, epochs=3, shuffle=False, verbose=0,
                        sample_weight=np.linspace(0.1, 1, 30))
    results[name] = [model.get_weights(), sorted(history.history.items()),
                     model.evaluate(x, y, batch_size=10, verbose=0), model.predict(x, verbose=0)]
with tf.GradientTape() as tape:
    loss = tf.reduce_sum(model(x) ** 2)
results["tape"] = [g.numpy() for g in tape.gradient(loss, model.trainable_variables)]
pickle.dump(results, sys.stdout.buffer)
"""


@pytest.mark.long
def test_models_that_are_not_dtrains_train_as_before() -> None:
    """To the bit: once in a process that knows no dtrain, once after strategies of dtrain's were made."""
    results = []
    for which in ("without", "with"):
        done = subprocess.run(
            [sys.executable, "-c", UNTOUCHED, which], capture_output=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stderr.decode()
        results.append(pickle.loads(done.stdout))
    before, after = results

    def equal(one: Any, other: Any) -> None:
        if isinstance(one, dict):
            assert one.keys() == other.keys()
            one, other = list(one.values()), list(other.values())
        if isinstance(one, list | tuple):
            assert len(one) == len(other)
            for a, b in zip(one, other, strict=True):
                equal(a, b)
        else:
            np.testing.assert_array_equal(one, other)

    equal(before, after)


def test_statistics_of_a_layer_in_a_condition_are_each_replicas_own_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    strategy = dtrain.MirroredStrategy()
    with strategy.scope():
        layer = keras.layers.BatchNormalization(name="in_a_condition")
        layer.build((None, 2))
    x = tf.ones((4, 2))

    @tf.function
    def step() -> None:
        strategy.run(lambda: tf.cond(tf.reduce_sum(x) > 0, lambda: layer(x, training=True), lambda: x))

    step()
    assert "'in_a_condition' are not averaged" in caplog.text
    assert "call the layer in the replica's function itself" in caplog.text
    assert float(layer.moving_mean.numpy()[0]) > 0


class _LooksAtDevices(tf.distribute.cluster_resolver.UnionResolver):  # type: ignore[misc]
    def num_accelerators(self, *args: Any, **options: Any) -> dict[str, int]:
        raise AssertionError("TensorFlow starts before its collectives are configured")


def test_only_resolvers_with_a_number_of_gpus_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "planned", lambda kind: {"GPU": 4, "CPU": 1}[kind])
    cluster = tf.train.ClusterSpec({"worker": ["127.0.0.1:1", "127.0.0.1:2"]})
    configured = tf.distribute.cluster_resolver.SimpleClusterResolver(cluster, num_accelerators={"GPU": 2})
    assert multi_worker._local_replicas(configured) == (2, True)
    assert multi_worker._local_replicas(_LooksAtDevices(configured)) == (4, True)


@pytest.mark.parametrize("name", ["one_device", "mirrored", "central_storage", "multi_worker"])
def test_entries_of_a_variable_are_written_in_all_copies(name: str) -> None:
    strategy = MAKERS[name]()
    with strategy.scope():
        variable = tf.Variable([[1.0, 2.0], [3.0, 4.0]])
    variable.scatter_nd_update([[0, 1]], [5.0])
    variable.scatter_nd_add([[1]], [[1.0, 1.0]])
    variable.scatter_nd_sub([[0, 0], [0, 0]], [0.25, 0.5])
    for copy in strategy.experimental_local_results(variable):
        np.testing.assert_array_equal(copy, [[0.25, 5.0], [4.0, 5.0]])
    np.testing.assert_array_equal(variable.gather_nd([[1, 0]]), [4.0])


def test_entries_that_replicas_write_are_not_aggregated() -> None:
    strategy = dtrain.MirroredStrategy()
    with strategy.scope():
        variable = tf.Variable([1.0, 2.0], aggregation=tf.VariableAggregation.MEAN)

    def write() -> None:
        variable.scatter_nd_add([[0]], [1.0])

    with pytest.raises(StepError, match=r"scatter_nd_add .* cannot be aggregated"):
        strategy.run(tf.function(write))
