"""Many steps a call: the same bits as one a call, callbacks in time, and XLA by its rule."""

from __future__ import annotations

import copy
import pickle
import re
import threading
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import dtrain
from dtrain.engine import install
from dtrain.engine.execution import xla_steps
from dtrain.engine.loops import call_size, noted_function
from dtrain.engine.loops.call_size import CallSize
from dtrain.engine.loops.fit_session import FitSession
from dtrain.engine.loops.step_calls import Call, LastStep
from dtrain.engine.step import xla_rule
from dtrain.interfaces.replica_layout import ReplicaLayout
from dtrain.task import channel
from dtrain.telemetry import events
from dtrain.upstream import keras_models

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(1003, 6)).astype("float32")
Y = (X.sum(axis=1, keepdims=True) > 0).astype("float32")
BATCH = 10  # 101 steps an epoch, the last of 3 examples
STRATEGIES: dict[str, Callable[[], Any]] = {
    "one device": lambda: dtrain.OneDeviceStrategy("CPU:0"),
    "mirrored": lambda: dtrain.MirroredStrategy(["CPU:0", "CPU:1"]),
    "central storage": lambda: dtrain.CentralStorageStrategy(["CPU:0", "CPU:1"], "CPU:0"),
}


class Watcher(keras.callbacks.Callback):  # type: ignore[misc]
    """Looks at each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.seen.append(batch)


class TestWatcher(keras.callbacks.Callback):  # type: ignore[misc]
    """Looks at each batch of `evaluate` and `predict`."""

    __test__ = False

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        """Nothing."""

    def on_predict_batch_end(self, batch: int, logs: Any = None) -> None:
        """Nothing."""


class Calls(keras.callbacks.Callback):  # type: ignore[misc]
    """Notes how many steps were done when each call of a `fit` begins."""

    def __init__(self, room: int | None = None) -> None:
        super().__init__()
        self.done: list[int] = []
        self._room = room

    def dtrain_session(self, model: Any, arguments: dict[str, Any]) -> Any:
        calls = self

        class Session(FitSession):
            def between_steps(self, iterator: Any, done: int) -> None:
                calls.done.append(done)

            def max_steps(self) -> int | None:
                return calls._room

        return Session()


class OwnStep(keras.Sequential):  # type: ignore[misc]
    """A step that returns what no metric holds."""

    def train_step(self, data: Any) -> dict[str, Any]:
        return {**super().train_step(data), "twice": 2.0 * tf.cast(self.optimizer.iterations, tf.float32)}


def model_in(
    strategy: Any,
    *,
    kind: Any = keras.Sequential,
    optimizer: Callable[[], Any] = lambda: keras.optimizers.Adam(0.01),
    dropout: float = 0.3,
    normalised: bool = True,
    **options: Any,
) -> Any:
    keras.utils.set_random_seed(3)
    with strategy.scope():
        model = kind(
            [
                keras.layers.Input((6,)),
                keras.layers.Dense(16, activation="relu"),
                keras.layers.BatchNormalization() if normalised else keras.layers.Identity(),
                keras.layers.Dropout(dropout, seed=5),
                keras.layers.Dense(1, activation="sigmoid"),
            ]
        )
        model.compile(optimizer(), "binary_crossentropy", metrics=["accuracy"], **options)
    return model


def batches(*, counted: bool = True) -> tf.data.Dataset:
    rows = tf.data.Dataset.from_tensor_slices((X, Y))
    return (rows if counted else rows.filter(lambda x, y: True)).shuffle(100, seed=1).batch(BATCH)


def state_of(model: Any) -> list[np.ndarray[Any, Any]]:
    return [np.asarray(v) for v in [*model.variables, *model.optimizer.variables]]


def trained(model: Any, data: Any, **arguments: Any) -> tuple[Any, Any]:
    given = {"x": data} if isinstance(data, tf.data.Dataset) else {"x": X, "y": Y, "batch_size": BATCH}
    history = model.fit(**given, **{"epochs": 3, "verbose": 0, **arguments}).history
    return history, state_of(model)


def assert_same_bits(one: tuple[Any, Any], other: tuple[Any, Any]) -> None:
    assert one[0] == other[0]
    for a, b in zip(one[1], other[1], strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.fixture
def runs_in_xla(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rule for short trainings too."""
    monkeypatch.setattr(xla_rule, "LEAST_STEPS", 10)


DATA: dict[str, Callable[[], Any]] = {
    "arrays": lambda: None,
    "a dataset": batches,
    "a dataset of unknown length": lambda: batches(counted=False),
}


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("one device", "arrays"),
        ("one device", "a dataset of unknown length"),
        ("mirrored", "a dataset"),
        ("mirrored", "a dataset of unknown length"),
        ("central storage", "arrays"),
    ],
)
def test_one_step_a_call_gives_the_same_bits(name: str, data: str) -> None:
    strategy, watcher, calls = STRATEGIES[name](), Watcher(), Calls()
    # The same callbacks, but for one that looks at each batch.
    one = trained(model_in(strategy), DATA[data](), callbacks=[watcher])
    many = trained(model_in(strategy), DATA[data](), callbacks=[calls])
    assert_same_bits(one, many)
    assert watcher.seen == [*range(101)] * 3
    assert len(calls.done) < 3 * 60, "no call made several steps"


@pytest.mark.long
@pytest.mark.parametrize("name", ["mirrored"])
def test_the_numbers_of_a_step_of_ones_own_are_the_last_ones(name: str) -> None:
    strategy, watcher = STRATEGIES[name](), Watcher()
    one = trained(model_in(strategy, kind=OwnStep), batches(), callbacks=[watcher])
    many = trained(model_in(strategy, kind=OwnStep), batches())
    assert_same_bits(one, many)
    assert many[0]["twice"] == [202.0, 404.0, 606.0]


@pytest.mark.parametrize("name", ["one device", "mirrored"])
def test_arrays_and_datasets_by_turns(name: str) -> None:
    """Equal batches, read in another way: the step is the same, the loop around it is not."""
    x, y = X[:1000], Y[:1000]
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH, drop_remainder=True)
    ways = {
        "arrays": {"x": x, "y": y, "batch_size": BATCH, "shuffle": False, "verbose": 0},
        "a dataset": {"x": dataset, "verbose": 0},
    }
    found = []
    for order in (["arrays", "a dataset", "arrays"], ["a dataset"] * 3):
        model = model_in(STRATEGIES[name]())
        found.append(([model.fit(**ways[way]).history for way in order], state_of(model)))
    assert_same_bits(*found)


def test_micro_batches_are_grouped() -> None:
    def optimizer() -> Any:
        return keras.optimizers.Adam(0.01, gradient_accumulation_steps=4)

    strategy, calls = STRATEGIES["mirrored"](), Calls()
    # No layers whose replicas differ by design.
    plain = {"optimizer": optimizer, "dropout": 0.0, "normalised": False}
    expected = trained(model_in(STRATEGIES["one device"](), **plain), None)
    found = trained(model_in(strategy, **plain), None, callbacks=[calls])
    np.testing.assert_allclose(found[0]["loss"], expected[0]["loss"], rtol=2e-4)
    assert len(calls.done) < 3 * 60
    # Calls of any length: a sum that was begun in one is ended in another.
    again = trained(model_in(strategy, **plain), None, callbacks=[Calls(room=7)])
    assert_same_bits(again, found)


def test_somebody_else_may_want_a_call_to_end() -> None:
    calls = Calls(room=7)
    trained(model_in(STRATEGIES["one device"]()), None, callbacks=[calls], epochs=1)
    assert max(np.diff(calls.done)) == 7


@pytest.mark.parametrize("name", ["mirrored"])
def test_steps_per_execution_is_honoured(name: str) -> None:
    strategy, watcher = STRATEGIES[name](), Watcher()
    expected = trained(model_in(strategy), None)
    found = trained(model_in(strategy, steps_per_execution=7), None, callbacks=[watcher])
    assert_same_bits(expected, found)
    # Older versions of Keras give callbacks the first step of a call instead of the last.
    last = keras_models.calls_have_two_numbers()
    assert watcher.seen[:15] == ([*range(6, 101, 7), 104] if last else [*range(0, 101, 7)])


@pytest.mark.parametrize("counted", [True, False])
def test_the_bar_shows_how_many_steps_there_were(counted: bool, capsys: pytest.CaptureFixture[str]) -> None:
    model = model_in(STRATEGIES["one device"]())
    keras.config.enable_interactive_logging()
    model.fit(batches(counted=counted), epochs=2, verbose=1)
    shown = re.findall(r"(\d+)/(\d+|Unknown)", capsys.readouterr().out.replace("\x1b", ""))
    assert ("101", "101") in shown
    assert all(int(done) <= 102 for done, _ in shown)


def test_metrics_are_reset_and_read_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by a call for each variable and replica, unless a metric is more than its variables."""
    resets: list[str] = []
    original = keras.metrics.Mean.reset_state

    def reset_state(self: Any) -> None:
        resets.append(self.name)
        original(self)

    reset_state.__module__ = original.__module__
    monkeypatch.setattr(keras.metrics.Mean, "reset_state", reset_state)
    model = model_in(STRATEGIES["mirrored"]())
    trained(model, None, epochs=2)
    resets.clear()
    trained(model, None, epochs=4)
    assert not resets

    class Counted(keras.metrics.MeanAbsoluteError):  # type: ignore[misc]
        times = 0

        def reset_state(self) -> None:
            type(self).times += 1
            super().reset_state()

    with model.distribute_strategy.scope():
        model.compile("sgd", "binary_crossentropy", metrics=[Counted(name="counted")])
    trained(model, None, epochs=4)
    assert Counted.times >= 4


@pytest.mark.long
def test_evaluate_and_validation_are_those_of_single_steps() -> None:
    class TestWatcher(keras.callbacks.Callback):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[int] = []

        def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
            self.seen.append(batch)

    for name in STRATEGIES:
        model, watcher = model_in(STRATEGIES[name]()), TestWatcher()
        model.fit(X, Y, batch_size=BATCH, epochs=1, verbose=0)
        each = model.evaluate(X, Y, batch_size=BATCH, verbose=0, callbacks=[watcher])
        assert watcher.seen == [*range(101)]
        assert model.evaluate(X, Y, batch_size=BATCH, verbose=0) == each
        history = model.fit(X, Y, batch_size=BATCH, verbose=0, validation_data=(X, Y), epochs=2).history
        assert model.evaluate(X, Y, batch_size=BATCH, verbose=0)[0] == history["val_loss"][-1]


# --- XLA


def in_xla(model: Any) -> bool:
    return bool((model.train_function.findings or {}).get("xla"))


XLA_DATA: dict[str, Callable[[], Any]] = {
    "arrays": lambda: None,
    "prefetched": lambda: batches().prefetch(2),
    "mapped": lambda: batches().map(lambda x, y: (2 * x, y)),
    "without the rest, mapped": lambda: (
        tf.data.Dataset.from_tensor_slices((X, Y)).batch(BATCH, drop_remainder=True).map(lambda x, y: (x, y))
    ),
    "uneven batches": lambda: (
        batches().concatenate(batches().take(3)).apply(tf.data.experimental.assert_cardinality(104))
    ),
    "weighted": lambda: batches().map(lambda x, y: (x, y, tf.ones_like(y))),
}


@pytest.mark.parametrize("data", ["mapped", "uneven batches", "weighted"])
def test_batches_whose_size_is_not_known_stay_out_of_xla(data: str, runs_in_xla: None) -> None:
    model = model_in(STRATEGIES["one device"]())
    trained(model, XLA_DATA[data]())
    assert not in_xla(model)


@pytest.mark.parametrize("data", ["arrays", "prefetched", "without the rest, mapped"])
def test_xla_gives_the_numbers_of_tensorflow(data: str, runs_in_xla: None) -> None:
    strategy = STRATEGIES["one device"]()
    plain, model = model_in(strategy, jit_compile=False), model_in(strategy)
    expected = trained(plain, XLA_DATA[data]())
    found = trained(model, XLA_DATA[data]())
    # The masks of dropout are the same, or the losses would be far apart.
    assert in_xla(model)
    assert not in_xla(plain)
    np.testing.assert_allclose(found[0]["loss"], expected[0]["loss"], rtol=2e-4)
    for a, b in zip(found[1], expected[1], strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-3, atol=2e-5)


@pytest.mark.long
@pytest.mark.parametrize("data", ["arrays", "without the rest, mapped"])
def test_xla_gives_the_same_bits_one_by_one(data: str, runs_in_xla: None) -> None:
    strategy = STRATEGIES["one device"]()
    one, many = model_in(strategy), model_in(strategy)
    assert_same_bits(
        trained(one, XLA_DATA[data](), callbacks=[Watcher()]),
        trained(many, XLA_DATA[data](), callbacks=[Calls()]),
    )
    assert in_xla(one)
    assert in_xla(many)
    assert_same_bits(
        trained(model_in(strategy), XLA_DATA[data](), callbacks=[Calls(room=7)]),
        trained(model_in(strategy), XLA_DATA[data](), callbacks=[Calls(room=33)]),
    )


def test_epochs_of_steps_that_divide_no_group(runs_in_xla: None) -> None:
    strategy = STRATEGIES["one device"]()
    plain, model = model_in(strategy, jit_compile=False), model_in(strategy)
    expected = trained(plain, batches(), steps_per_epoch=41, epochs=2)
    found = trained(model, batches(), steps_per_epoch=41, epochs=2)
    assert in_xla(model)
    np.testing.assert_allclose(found[0]["loss"], expected[0]["loss"], rtol=2e-4)


def judged_in_xla(model: Any) -> bool:
    return bool((model.test_function.findings or {}).get("xla"))


def predicted_in_xla(model: Any) -> bool:
    return model.predict_function._xla.traced > 0  # type: ignore[no-any-return]


def inputs(data: str) -> Any:
    """Data without labels: arrays, or a dataset as `predict` accepts it."""
    if data == "arrays":
        return X
    rows = {"inputs alone": X, "inputs in a tuple": (X,), "with labels": (X, Y)}[data]
    return tf.data.Dataset.from_tensor_slices(rows).batch(BATCH).prefetch(2)


@pytest.mark.parametrize("data", ["arrays", "prefetched"])
def test_evaluations_in_xla_give_the_numbers_of_tensorflow(data: str, runs_in_xla: None) -> None:
    strategy = STRATEGIES["one device"]()
    plain, model, watched = model_in(strategy, jit_compile=False), model_in(strategy), model_in(strategy)

    def judged(model: Any, **arguments: Any) -> Any:
        given = XLA_DATA[data]()
        given = {"x": X, "y": Y, "batch_size": BATCH} if given is None else {"x": given}
        return model.evaluate(**given, verbose=0, **arguments)

    expected, found = judged(plain), judged(model)
    assert judged_in_xla(model)
    assert not judged_in_xla(plain)
    np.testing.assert_allclose(found, expected, rtol=2e-6)
    assert judged(model) == found
    assert judged(watched, callbacks=[keras.callbacks.LambdaCallback()]) == found
    assert judged(model_in(strategy), callbacks=[TestWatcher()]) == found


@pytest.mark.parametrize("data", ["arrays", "inputs alone", "inputs in a tuple", "with labels"])
def test_predictions_in_xla_are_those_of_tensorflow(data: str, runs_in_xla: None) -> None:
    strategy = STRATEGIES["one device"]()
    plain, model = model_in(strategy, jit_compile=False), model_in(strategy)
    size = {"batch_size": BATCH} if data == "arrays" else {}
    expected = plain.predict(inputs(data), verbose=0, **size)
    found = model.predict(inputs(data), verbose=0, **size)
    assert predicted_in_xla(model)
    assert not predicted_in_xla(plain)
    assert found.shape == expected.shape == (len(X), 1)
    np.testing.assert_allclose(found, expected, rtol=2e-6)
    np.testing.assert_array_equal(model.predict(inputs(data), verbose=0, **size), found)
    one_by_one = model.predict(inputs(data), verbose=0, callbacks=[TestWatcher()], **size)
    np.testing.assert_array_equal(one_by_one, found)
    some = model.predict(inputs(data), verbose=0, steps=12, **size)
    np.testing.assert_array_equal(some, found[: 12 * BATCH])


def test_a_model_of_several_inputs_and_outputs_predicts_in_xla(runs_in_xla: None) -> None:
    strategy = STRATEGIES["one device"]()

    def made(**options: Any) -> Any:
        keras.utils.set_random_seed(4)
        with strategy.scope():
            one, two = keras.Input((6,), name="one"), keras.Input((6,), name="two")
            whole = keras.layers.Concatenate()([one, two])
            outputs = {"wide": keras.layers.Dense(3)(whole), "narrow": keras.layers.Dense(1)(one)}
            model = keras.Model({"one": one, "two": two}, outputs)
            model.compile("sgd", {"wide": "mse", "narrow": "mae"}, **options)
        return model

    plain, model = made(jit_compile=False), made()
    data = {"one": X, "two": 2 * X}
    expected, found = (each.predict(data, batch_size=BATCH, verbose=0) for each in (plain, model))
    assert predicted_in_xla(model)
    assert found.keys() == expected.keys()
    for name, rows in found.items():
        assert len(rows) == len(X)
        np.testing.assert_allclose(rows, expected[name], rtol=2e-5, atol=1e-6)


def test_wide_outputs_make_small_groups(runs_in_xla: None) -> None:
    strategy = STRATEGIES["one device"]()
    with strategy.scope():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(20_000)])
        model.compile("sgd", "mse")
    assert model.predict(X[:304], batch_size=BATCH, verbose=0).shape == (304, 20_000)
    assert predicted_in_xla(model)
    # Ten batches of ten rows of 80 kB are 8 MB; the other program is that of the last, smaller batch.
    first, last = model.predict_function._xla._programs
    assert "TensorShape([100, 6])" in first
    assert last.endswith(" 4")


def test_the_evaluations_of_a_fit_count_together(monkeypatch: pytest.MonkeyPatch) -> None:
    strategy = STRATEGIES["one device"]()

    def validated(**arguments: Any) -> Any:
        model = model_in(strategy)
        data = (X[: 12 * BATCH], Y[: 12 * BATCH])
        history = model.fit(
            X[:50], Y[:50], batch_size=BATCH, verbose=0, validation_data=data, **arguments
        ).history
        return model, history["val_loss"]

    monkeypatch.setattr(xla_rule, "LEAST_STEPS", 36)
    model, losses = validated(epochs=3)
    assert judged_in_xla(model)
    assert not judged_in_xla(validated(epochs=2)[0])
    assert not judged_in_xla(validated(epochs=4, validation_freq=2)[0])
    assert judged_in_xla(validated(epochs=4, validation_freq=[1, 2, 4])[0])
    monkeypatch.setattr(xla_rule, "LEAST_STEPS", 1000)
    plain, expected = validated(epochs=3)
    assert not judged_in_xla(plain)
    np.testing.assert_allclose(losses, expected, rtol=2e-6)


class OwnLayer(keras.layers.Dense):  # type: ignore[misc]
    """A layer of the user's own."""


@pytest.mark.parametrize(
    "change",
    [
        {"jit_compile": False},
        {"run_eagerly": True},
        {"optimizer": lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)},
        {"kind": OwnStep},
        {"strategy": "mirrored"},
        {"epochs": 0},
        {"loss": lambda y, p: keras.ops.mean((y - p) ** 2)},
        {"layer": OwnLayer},
        {"layer": keras.layers.GaussianNoise},
    ],
    ids=lambda change: next(iter(change)),
)
def test_the_rule_says_no(change: dict[str, Any], runs_in_xla: None) -> None:
    strategy = STRATEGIES[change.pop("strategy", "one device")]()
    epochs, loss, layer = change.pop("epochs", 1), change.pop("loss", None), change.pop("layer", None)
    model = model_in(strategy, **change)
    with strategy.scope():
        if layer is not None:
            model.add(layer(1))
        if loss is not None or layer is not None:
            model.compile("sgd", loss or "mse")
    assert not xla_rule.runs_in_xla(model, "train_step", 11 if epochs else None, BATCH)
    model.fit(X[:40], Y[:40], batch_size=BATCH, epochs=3, verbose=0)
    assert change or not in_xla(model) or not epochs


@pytest.mark.long
def test_what_was_decided_goes_on(runs_in_xla: None, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that is begun again with other plans computes as before."""
    strategy = STRATEGIES["one device"]()

    class Stop(keras.callbacks.Callback):  # type: ignore[misc]
        def get_state(self) -> None:
            """It counts in this life alone."""

        def set_state(self, state: None) -> None:
            """Nothing."""

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            if epoch == 2:
                raise KeyboardInterrupt

    expected = trained(model_in(strategy), None)

    def backup() -> Any:
        return dtrain.BackupAndRestore(str(tmp_path / "backup"), save_freq=30)

    with pytest.raises(KeyboardInterrupt):
        trained(model_in(strategy), None, callbacks=[backup(), Stop()])
    monkeypatch.setattr(xla_rule, "LEAST_STEPS", 10_000)
    model = model_in(strategy)
    found = trained(model, None, callbacks=[backup()])
    assert in_xla(model)
    assert_same_bits(expected, found)


def test_random_numbers_are_the_same_under_xla() -> None:
    dtrain.OneDeviceStrategy("CPU:0")  # puts the engine in place

    def mask(x: Any) -> Any:
        return tf.nn.experimental.stateless_dropout(x, 0.4, seed=[3, 4])

    @tf.function(jit_compile=True)
    def under_xla(x: Any) -> Any:
        with xla_steps.same_random_numbers():
            return mask(x)

    x = tf.ones((301, 7))
    np.testing.assert_array_equal(under_xla(x), tf.function(mask)(x))


# --- how many steps a call makes


def test_calls_grow_to_the_target_and_shrink() -> None:
    size = CallSize(ReplicaLayout(), every_batch=False)

    def call(seconds_a_step: float) -> int:
        call = Call(None, size.steps())
        call.ran, call.seconds = call.steps, call.steps * seconds_a_step
        size.note(call)
        return call.steps

    assert [call(0.001) for _ in range(5)] == [1, 8, 64, 100, 100]
    assert [call(0.01) for _ in range(3)] == [100, 10, 10]
    assert [call(1.0) for _ in range(3)] == [10, 1, 1]
    first = Call(None, size.steps())
    first.ran = 1  # it traced: its time says nothing
    size.note(first)
    assert size.steps() == 1


def test_workers_that_train_alone_agree_on_calls_as_a_round_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def exchanged(layout: ReplicaLayout, value: int, *, what: str) -> list[int]:
        asked.append(value)
        return [value, 5]

    monkeypatch.setattr(call_size, "exchange", exchanged)
    size = CallSize(ReplicaLayout(workers=2), every_batch=False, alone=True)
    sizes = []
    for round_begins in (True, False, True, False, True):
        call = Call(None, size.steps(round_begins=round_begins))
        call.ran, call.seconds = call.steps, call.steps * 0.01
        size.note(call)
        sizes.append(call.steps)
    assert (sizes, asked) == ([1, 1, 5, 5, 5], [8, 10])


def test_calls_are_one_step_where_somebody_looks() -> None:
    size = CallSize(ReplicaLayout(), every_batch=True)
    call = Call(None, 1)
    call.ran, call.seconds = 1, 1e-6
    size.note(call)
    assert size.steps() == 1


def test_a_callback_may_keep_the_number_of_a_call() -> None:
    number = LastStep(3, lambda: 5)
    assert (number, number + 1) == (3, 6)
    for kept in (copy.deepcopy(number), pickle.loads(pickle.dumps(number))):
        assert type(kept) is int and kept == 3


def test_a_fit_in_a_callback_or_a_thread_runs_by_its_own_callbacks() -> None:
    strategy = STRATEGIES["one device"]()
    inner, outer, watcher, calls = model_in(strategy), model_in(strategy), Watcher(), Calls()

    def fit_inside(*_: Any) -> None:
        inner.fit(X, Y, batch_size=BATCH, verbose=0, callbacks=[watcher])

    def fit_in_thread(*_: Any) -> None:
        thread = threading.Thread(target=fit_inside)
        thread.start()
        thread.join()

    inside = [keras.callbacks.LambdaCallback(on_epoch_end=run) for run in (fit_inside, fit_in_thread)]
    outer.fit(X, Y, batch_size=BATCH, epochs=3, verbose=0, callbacks=[calls, *inside])
    assert watcher.seen == [*range(101)] * 6
    assert len([done for done in calls.done if done == 0]) >= 3 and len(calls.done) < 3 * 50


@pytest.mark.parametrize(
    ("a_call", "steps", "reads"), [(1, [1] * 10, 0), (4, [4, 4, 2], 6)], ids=["one", "several"]
)
def test_the_optimizers_count_is_read_only_where_a_call_has_several_steps(
    a_call: int, steps: list[int], reads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading it waits until the device has done the step."""
    read: list[int] = []

    def counted(model: Any) -> int:
        read.append(int(model.optimizer.iterations.numpy()))
        return read[-1]

    class Listener:
        def __init__(self) -> None:
            self.steps: list[int] = []

        def _handle_steps_end(self, event: events.StepsEnd) -> None:
            self.steps.append(event.steps)

    listener = Listener()
    monkeypatch.setattr(channel, "connected", lambda: True)
    monkeypatch.setattr(noted_function, "steps_counted", counted)
    monkeypatch.setattr(events, "_always", {})
    events.listen_always(listener)
    install.install()
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", steps_per_execution=a_call)
    model.fit(X[:100], Y[:100], batch_size=BATCH, verbose=0)
    assert (listener.steps, len(read)) == (steps, reads)
