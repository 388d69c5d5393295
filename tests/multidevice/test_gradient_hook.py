"""Gradient hooks: what they are given, that the registered ones compress, and that the numbers stay close.

Local SGD is compared with the same algorithm written by hand on one device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import dtrain
from dtrain.engine.replica.context import all_reduce_sum
from dtrain.engine.synchronisation import accumulation, weight_averages
from dtrain.errors import ConfigurationError, StepError
from dtrain.gradient_hooks.hooks import HOOKS
from dtrain.gradient_hooks.local_sgd import LocalSGD
from dtrain.interfaces.gradient_hook import GradientHook
from dtrain.optim import shard_state
from given_clock import GivenClock
from local_sgd_by_hand import by_hand as locally_by_hand
from refusals import refused

_RANDOM = np.random.default_rng(0)
TOKENS = _RANDOM.integers(0, 7, size=(9, 3)).astype("int32")
INPUTS = _RANDOM.normal(size=(9, 4)).astype("float32")
TARGETS = _RANDOM.normal(size=(9, 2)).astype("float32")
STRATEGIES = [dtrain.MirroredStrategy, dtrain.CentralStorageStrategy]


class Clipped(keras.Model):
    """Clips by hand between the tape and the optimizer, as users do."""

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        variables = self.trainable_variables
        gradients, _ = tf.clip_by_global_norm(tape.gradient(loss, variables), 0.5)
        self.optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return {"loss": loss}


class TwoOptimizers(keras.Model):
    """Trains its first layer by the optimizer that it is compiled with, and the second one by another."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.second = keras.optimizers.SGD(0.1, momentum=0.5, name="second")

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        variables = self.trainable_variables
        gradients = tape.gradient(loss, variables)
        self.optimizer.apply(gradients[:2], variables[:2])
        self.second.apply(gradients[2:], variables[2:])
        return {"loss": loss}


def model(kind: type[keras.Model] = keras.Model) -> keras.Model:
    keras.utils.set_random_seed(3)
    inputs = keras.Input((4,))
    x = layers.Dense(8, activation="tanh", name="first")(inputs)
    return kind(inputs, layers.Dense(2, name="second")(x))


def fitted(
    strategy: tf.distribute.Strategy, kind: type[keras.Model] = keras.Model, **options: Any
) -> list[np.ndarray]:
    with strategy.scope():
        trained = model(kind)
        accumulated = options.pop("accumulated", None)
        optimizer = keras.optimizers.SGD(0.1, momentum=0.5, gradient_accumulation_steps=accumulated)
        trained.compile(optimizer, "mse", **options)
    # The last batch has one example, so that a replica has none.
    trained.fit(INPUTS, TARGETS, batch_size=4, epochs=4, shuffle=False, verbose=0)
    return list(trained.get_weights())


def by_hand(strategy: tf.distribute.Strategy) -> list[np.ndarray]:
    with strategy.scope():
        trained = model()
        optimizer = keras.optimizers.SGD(0.1)

    def in_replica(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum((trained(x) - y) ** 2) / 8
        optimizer.apply(tape.gradient(loss, trained.trainable_variables), trained.trainable_variables)

    data = tf.data.Dataset.from_tensor_slices((INPUTS[:8], TARGETS[:8])).batch(8)
    for x, y in strategy.experimental_distribute_dataset(data):
        tf.function(strategy.run)(in_replica, args=(x, y))
    return list(trained.get_weights())


def apart(some: list[np.ndarray], others: list[np.ndarray]) -> float:
    return max(float(np.abs(a - b).max()) for a, b in zip(some, others, strict=True))


RUNS: dict[str, Callable[[tf.distribute.Strategy], list[np.ndarray]]] = {
    "fit": fitted,
    "own step": lambda strategy: fitted(strategy, Clipped),
    "accumulation": lambda strategy: fitted(strategy, accumulated=2),
    "xla": lambda strategy: fitted(strategy, jit_compile=True),
    "own loop": by_hand,
}


PRECISION = {"float16": 2.0**-11, "bfloat16": 2.0**-8}


@pytest.fixture(scope="module")
def alone() -> dict[str, list[np.ndarray]]:
    """The weights of one device, by run."""
    return {}


@pytest.mark.parametrize(("run", "name"), [("fit", "float16"), *((run, "bfloat16") for run in RUNS)])
def test_compressed_gradients_train_as_one_device_does_within_the_types_precision(
    run: str, name: str, alone: dict[str, list[np.ndarray]]
) -> None:
    if run not in alone:
        alone[run] = RUNS[run](dtrain.OneDeviceStrategy("/cpu:0"))
    found = RUNS[run](dtrain.MirroredStrategy(gradient_hook=name))
    # It is rounded, and by no more than a few steps of gradients of about 1 can be.
    assert 1e-6 < apart(found, alone[run]) < 4 * PRECISION[name], name


class Recorded(GradientHook):
    """All-reduces, and notes what it is given; if asked, leaves out the biases."""

    def __init__(self, *, biases: bool = True) -> None:
        self.seen: list[list[tuple[str, tuple[int, ...]]]] = []
        self._biases = biases

    def reduce(self, gradients: Any, variables: Any, all_reduce: Any) -> Any:
        self.seen.append([(v.path, tuple(g.shape)) for g, v in zip(gradients, variables, strict=True)])
        sums = all_reduce(gradients)
        kept = [self._biases or "bias" not in v.path for v in variables]
        return [g if keep else tf.zeros_like(g) for g, keep in zip(sums, kept, strict=True)]


@pytest.mark.parametrize("kind", STRATEGIES)
def test_a_hook_is_given_each_gradient_with_its_variable(kind: Any) -> None:
    hook = Recorded(biases=False)
    before, after = model().get_weights(), fitted(kind(gradient_hook=hook))
    kernels = [
        ("first/kernel", (4, 8)),
        ("first/bias", (8,)),
        ("second/kernel", (8, 2)),
        ("second/bias", (2,)),
    ]
    assert hook.seen
    assert all(each == kernels for each in hook.seen)
    moved = [not np.array_equal(a, b) for a, b in zip(before, after, strict=True)]
    assert moved == [True, False, True, False]


class Short(GradientHook):
    """Leaves the last gradient out."""

    def reduce(self, gradients: Any, variables: Any, all_reduce: Any) -> Any:
        return all_reduce(gradients)[:-1]


def test_another_number_of_gradients_is_refused() -> None:
    with refused(StepError, "Short", "4 gradients", "returned 3", "one tensor for each gradient"):
        fitted(dtrain.MirroredStrategy(gradient_hook=Short()))


def test_with_local_accumulation_it_is_called_for_each_update() -> None:
    """A micro-batch that updates nothing is not reduced, so a hook does not see it."""
    hook = Recorded()
    fitted(dtrain.MirroredStrategy(gradient_hook=hook), accumulated=2)
    assert 0 < len(hook.seen) <= 4  # two replicas, traced once for each way in which an update may come


def test_sparse_gradients_are_all_reduced_without_the_hook() -> None:
    def trained(**options: Any) -> list[np.ndarray]:
        strategy = dtrain.MirroredStrategy(**options)
        with strategy.scope():
            keras.utils.set_random_seed(3)
            words = keras.Sequential(
                [keras.Input((3,), dtype="int32"), layers.Embedding(7, 2), layers.Flatten(), layers.Dense(2)]
            )
            words.compile("sgd", "mse")
        words.fit(TOKENS, TARGETS, batch_size=4, shuffle=False, verbose=0)
        return list(words.get_weights())

    hook = Recorded()
    plain, found = trained(), trained(gradient_hook=hook)
    assert [[shape for _, shape in call] for call in hook.seen] == [[(6, 2), (2,)]] * len(hook.seen)
    assert apart(plain, found) < 1e-8  # the rate is multiplied before the sum, and after it


def test_the_name_is_checked_and_the_registry_can_be_added_to(monkeypatch: pytest.MonkeyPatch) -> None:
    with refused(ConfigurationError, "'float16'", gradient_hook="flaot16"):
        dtrain.MirroredStrategy(gradient_hook="flaot16")
    monkeypatch.setitem(HOOKS, "recorded", Recorded)
    strategy = dtrain.strategy("mirrored", gradient_hook="recorded")
    fitted(strategy)
    assert strategy.dtrain_managed.layout.gradient_hook.seen


OPTIMIZERS: dict[str, Callable[[], keras.optimizers.Optimizer]] = {
    "sgd": lambda: keras.optimizers.SGD(0.1, momentum=0.5),
    "adam": lambda: keras.optimizers.Adam(0.02),
    "accumulation": lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=2),
}
ROWS = 30  # in batches of 4: the last has 2


def rows_of_local_sgd() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.normal(size=(ROWS, 4)).astype("float32"), rng.normal(size=(ROWS, 2)).astype("float32")


def locally(
    optimizer: str, every: int | None, kind: type[keras.Model] = keras.Model, callbacks: Any = (), **how: Any
) -> keras.Model:
    """A model that was fitted for three epochs; with plain all-reduces if `every` is None."""
    x, y = rows_of_local_sgd()
    strategy = dtrain.MirroredStrategy(gradient_hook=None if every is None else LocalSGD(every))
    with strategy.scope():
        trained = model(kind)
        trained.compile(OPTIMIZERS[optimizer](), "mse", **how)
    trained.fit(
        x, y, batch_size=4, epochs=3, shuffle=False, verbose=0, validation_data=(x, y), callbacks=[*callbacks]
    )
    return trained


@pytest.mark.parametrize(
    ("optimizer", "every", "how"),
    [
        ("sgd", 3, {}),
        ("adam", 3, {}),
        ("accumulation", 3, {}),
        ("sgd", 100, {"jit_compile": True}),
        pytest.param("adam", 2, {"run_eagerly": True}, marks=pytest.mark.long),
        pytest.param("adam", 3, {"steps_per_execution": 5}, marks=pytest.mark.long),
    ],
)
def test_local_sgd_is_the_algorithm_that_is_written_by_hand(
    optimizer: str, every: int, how: dict[str, Any]
) -> None:
    found = locally(optimizer, every, **how)
    wanted = locally_by_hand(
        model, OPTIMIZERS[optimizer], *rows_of_local_sgd(), batch=4, epochs=3, every=every, replicas=2
    )
    assert apart(found.get_weights(), wanted) < 1e-5
    # At the end of an epoch all replicas are equal, in the optimizer too.
    for variable in [*found.variables, *found.optimizer.variables]:
        first, second = found.distribute_strategy.experimental_local_results(variable.value)
        np.testing.assert_array_equal(first, second)


def test_local_sgd_takes_one_devices_step_on_each_replica_and_averages_statistics() -> None:
    """A batch of five rows is divided unevenly, and the last one leaves a replica without rows."""

    def made() -> keras.Model:
        keras.utils.set_random_seed(3)
        body = [keras.Input((4,)), layers.Dense(8, "tanh"), layers.BatchNormalization(), layers.Dense(2)]
        trained = keras.Sequential(body)
        trained.compile(keras.optimizers.SGD(0.1), "mse")
        return trained

    x, y = INPUTS[:6], TARGETS[:6]
    with dtrain.MirroredStrategy(gradient_hook=LocalSGD(10)).scope():
        found = made()
    found.fit(x, y, batch_size=5, shuffle=False, verbose=0)
    alone = [made(), made()]
    for each, rows in zip(alone, ([slice(0, 3), slice(5, 6)], [slice(3, 5)]), strict=True):
        for part in rows:
            each.train_on_batch(x[part], y[part])
    means = [(a + b) / 2 for a, b in zip(*(each.get_weights() for each in alone), strict=True)]
    assert apart(found.get_weights(), means) < 1e-5


def test_local_sgd_that_averages_after_each_step_is_synchronous_training_with_sgd() -> None:
    assert apart(locally("sgd", 1).get_weights(), locally("sgd", None).get_weights()) < 1e-6
    assert apart(locally("sgd", 1, Clipped).get_weights(), locally("sgd", 1).get_weights()) > 1e-3


class Stops(keras.callbacks.Callback):
    """Ends the program's `fit` by an error, in the second epoch."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if int(self.model.optimizer.iterations) == 14:
            raise InterruptedError


def test_a_checkpoint_waits_for_the_averaging_and_changes_no_number(tmp_path: Any) -> None:
    """The checkpoints that are due after 5 and 10 steps are saved after 6 and 11; training resumes at 11."""

    def backup() -> Any:
        return dtrain.BackupAndRestore(str(tmp_path), save_freq=5, delete_checkpoint=False)

    with pytest.raises(InterruptedError):
        locally("adam", 3, callbacks=[backup(), Stops()])
    resumed = locally("adam", 3, callbacks=[backup()])
    whole = locally("adam", 3)
    assert apart(resumed.get_weights(), whole.get_weights()) == 0
    assert int(resumed.optimizer.iterations) == 24


def copies_are_equal(trained: keras.Model) -> bool:
    strategy = trained.distribute_strategy
    copies = [
        strategy.experimental_local_results(v.value)
        for v in [*trained.variables, *trained.optimizer.variables]
    ]
    return all(np.array_equal(first, second) for first, second in copies)


class FitsInside(keras.callbacks.Callback):
    """Fits its model again after the second step; notes whether the replicas are equal before and after."""

    def __init__(self) -> None:
        super().__init__()
        self.equal: list[bool] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if int(self.model.optimizer.iterations) != 2:
            return
        x, y = rows_of_local_sgd()
        self.equal.append(copies_are_equal(self.model))
        begins = keras.callbacks.LambdaCallback(
            on_train_begin=lambda logs: self.equal.append(copies_are_equal(self.model))
        )
        self.model.fit(x, y, batch_size=4, shuffle=False, verbose=0, callbacks=[begins])
        self.equal.append(copies_are_equal(self.model))


def test_a_fit_in_a_callback_begins_with_averaged_weights() -> None:
    inner = FitsInside()
    trained = locally("adam", 100, callbacks=[inner])
    assert inner.equal == [False, True, True]
    assert int(trained.optimizer.iterations) == 4 * 8
    assert copies_are_equal(trained)


@pytest.mark.parametrize(
    ("module", "hook", "accumulated"),
    [(weight_averages, LocalSGD(100), None), (weight_averages, LocalSGD(3), None), (accumulation, None, 3)],
)
def test_all_reduces_at_the_end_of_an_epoch_are_communication_and_traced_once(
    module: Any,
    hook: GradientHook | None,
    accumulated: int | None,
    monkeypatch: pytest.MonkeyPatch,
    training_time: GivenClock,
) -> None:
    traces: list[Any] = []

    def slow(values: Any) -> Any:
        traces.append(values)
        training_time.pass_by(1.0)
        with tf.control_dependencies([tf.py_function(lambda: training_time.pass_by(0.25), [], [])]):
            return all_reduce_sum(tf.nest.map_structure(tf.identity, values))

    monkeypatch.setattr(module, "all_reduce_sum", slow)
    x, y = rows_of_local_sgd()
    with dtrain.MirroredStrategy(gradient_hook=hook).scope():
        trained = model()
        trained.compile(keras.optimizers.SGD(0.1, gradient_accumulation_steps=accumulated), "mse")
    for traced in (2, 0):  # by both replicas, one after the other
        history = trained.fit(x, y, batch_size=4, shuffle=False, verbose=0)
        parts = history.time_report[0]["parts"]
        assert parts["communication"] == 2 * 0.25 and parts["callbacks"] == 0.0
        # What is averaged between two steps of an epoch takes another half a second.
        assert traced <= parts["start"] + parts["compute"] <= traced + 1.0 and parts["compute"] <= 1.0
        assert len(traces) == 2


def test_local_sgd_is_refused_where_it_cannot_be_had(tmp_path: Any) -> None:
    def refused(call: Callable[[], Any], said: str) -> None:
        with pytest.raises(ConfigurationError, match=said) as caught:
            call()
        assert caught.value.hint

    refused(lambda: dtrain.CentralStorageStrategy(gradient_hook="local_sgd"), "exist once, for all replicas")
    refused(lambda: LocalSGD(0), "average_every is 0")
    for every in (-1, 2.5, True):
        hook = GradientHook()
        hook.average_every = every  # type: ignore[assignment]
        refused(lambda hook=hook: dtrain.MirroredStrategy(gradient_hook=hook), f"average_every is {every}")
    refused(lambda: by_hand(dtrain.MirroredStrategy(gradient_hook="local_sgd")), "in another loop")
    saves = keras.callbacks.ModelCheckpoint(str(tmp_path / "model.keras"), save_freq=2)
    refused(lambda: locally("sgd", 3, callbacks=[saves]), "saves between two rounds")
    for how in ({}, {"jit_compile": True}):
        refused(lambda how=how: locally("sgd", 3, TwoOptimizers, **how), "applies another one, 'second'")
    strategy = dtrain.MirroredStrategy(gradient_hook="local_sgd")
    with strategy.scope():
        trained = model()
        trained.compile("sgd", "mse")
    refused(lambda: trained.train_on_batch(INPUTS, TARGETS), "train_on_batch was called")
    for made, said in (
        (keras.optimizers.LossScaleOptimizer, "change the loss scale"),
        (shard_state, "divided over the replicas"),
    ):
        with strategy.scope():
            trained = model()
            trained.compile(made(keras.optimizers.Adam(0.1)), "mse")
        refused(lambda trained=trained: trained.fit(INPUTS, TARGETS, verbose=0), said)
