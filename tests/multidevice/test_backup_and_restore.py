"""A `fit` that is interrupted and begun again ends with the bits of one that was left alone; so do own loops.

The interruption is an exception, and the program that is started again another model with the seeds set
anew: what a killed process does is asked in tests/faults.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import dtrain
from dtrain.checkpoint import Checkpoints
from dtrain.errors import CheckpointError, ConfigurationError
from refusals import refused

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(60, 6)).astype("float32")
Y = (X.sum(axis=1, keepdims=True) > 0).astype("float32")
BATCH = 8  # 8 steps an epoch, the last of 4 examples
STRATEGIES: dict[str, Callable[[], Any]] = {
    "no strategy": lambda: None,
    "one device": lambda: dtrain.OneDeviceStrategy("CPU:0"),
    "mirrored": lambda: dtrain.MirroredStrategy(["CPU:0", "CPU:1"]),
    "central storage": lambda: dtrain.CentralStorageStrategy(["CPU:0", "CPU:1"], "CPU:0"),
}


class Interrupt(keras.callbacks.Callback):  # type: ignore[misc]
    """Raises once so many steps are done, over all epochs of this `fit`."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self.left = step

    def get_state(self) -> None:
        """It counts the steps of this life alone."""

    def set_state(self, state: None) -> None:
        """Nothing."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt


class OwnLogs(keras.Sequential):  # type: ignore[misc]
    """A model whose step returns numbers that no metric holds."""

    def train_step(self, data: Any) -> dict[str, Any]:
        return {**super().train_step(data), "twice": 2.0 * self.optimizer.iterations}


def build(
    strategy: Any, *, kind: type[Any] = keras.Sequential, unbuilt: bool = False, **settings: Any
) -> Any:
    keras.utils.set_random_seed(11)
    with contextlib.nullcontext() if strategy is None else strategy.scope():
        layers = keras.layers
        model = kind(
            [
                *([] if unbuilt else [keras.Input((6,))]),
                layers.Dense(8, activation="relu"),
                layers.Dropout(0.4),
                layers.BatchNormalization(),
                layers.Dense(1, activation="sigmoid"),
            ]
        )
        optimizer = keras.optimizers.Adam(0.02, use_ema=True, **settings)
        model.compile(optimizer, "binary_crossentropy", metrics=["accuracy", keras.metrics.AUC(name="auc")])
    return model


def callbacks(folder: Path) -> list[Any]:
    return [
        keras.callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=0, min_delta=1.0, cooldown=1),
        keras.callbacks.EarlyStopping("loss", patience=9, restore_best_weights=True),
        keras.callbacks.CSVLogger(str(folder / "log.csv")),
    ]


def state(model: Any) -> list[np.ndarray]:
    return [v.numpy() for v in (*model.variables, *model.optimizer.variables)]


def same(model: Any, history: Any, other: Any, expected: Any) -> None:
    for one, two in zip(state(model), state(other), strict=True):
        np.testing.assert_array_equal(one, two)
    assert history.history == expected.history
    assert history.epoch == expected.epoch


class Runs:
    """Runs of one program in one folder."""

    def __init__(self, folder: Path, make: Callable[[], Any], data: Callable[[], dict[str, Any]]) -> None:
        self.folder, self._make, self._data = folder, make, data

    def train(self, *, stop: int = 0, epochs: int = 3, more: Any = (), **backup: Any) -> tuple[Any, Any]:
        """Train, or go on, until it is done or `stop` steps are."""
        self.folder.mkdir(exist_ok=True)
        model = self._make()
        given = [*callbacks(self.folder), *more]
        if backup:
            given.insert(1, dtrain.BackupAndRestore(self.folder / "backup", **backup))
        given.append(Interrupt(stop))
        history = model.fit(
            **self._data(), epochs=epochs, validation_data=(X[:20], Y[:20]), verbose=0, callbacks=given
        )
        return model, history

    def interrupted(self, stop: int, **arguments: Any) -> None:
        with pytest.raises(KeyboardInterrupt):
            self.train(stop=stop, **arguments)


def arrays() -> dict[str, Any]:
    return {"x": X, "y": Y, "batch_size": BATCH}


def unknown_length() -> dict[str, Any]:
    dataset = tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(60, seed=4).batch(BATCH)
    return {"x": dataset.filter(lambda x, y: True)}


# Within an epoch, at an epoch's last step, and once nothing is left of one.
STOPS = (2, 8, 9)
COMBINED = pytest.mark.soak("accumulation and this strategy are tested apart from each other")


@pytest.mark.parametrize(
    ("strategy", "settings", "data", "stops"),
    [
        ("no strategy", {}, arrays, STOPS),
        pytest.param("no strategy", {"unbuilt": True}, unknown_length, STOPS, marks=pytest.mark.long),
        pytest.param(
            "one device", {"gradient_accumulation_steps": 3}, arrays, STOPS[:1], marks=pytest.mark.long
        ),
        pytest.param("mirrored", {"gradient_accumulation_steps": 3}, arrays, STOPS, marks=COMBINED),
        pytest.param("mirrored", {"kind": OwnLogs}, arrays, STOPS[:1], marks=pytest.mark.long),
        pytest.param("mirrored", {}, unknown_length, STOPS, marks=pytest.mark.long),
        pytest.param("central storage", {}, arrays, STOPS[:1], marks=pytest.mark.long),
    ],
)
def test_an_interrupted_fit_ends_as_one_that_was_left_alone(
    tmp_path: Path, strategy: str, settings: dict[str, Any], data: Callable[[], dict[str, Any]], stops: Any
) -> None:
    made = STRATEGIES[strategy]()
    alone = Runs(tmp_path / "alone", lambda: build(made, **settings), data)
    whole, expected = alone.train(save_freq=1)
    runs = Runs(tmp_path / "parts", lambda: build(made, **settings), data)
    for stop in stops:
        runs.interrupted(stop, save_freq=1)
    model, history = runs.train(save_freq=1)
    same(model, history, whole, expected)
    assert (runs.folder / "log.csv").read_bytes() == (alone.folder / "log.csv").read_bytes()
    assert not (runs.folder / "backup").exists()
    # And the callback itself changes no bit.
    if "unbuilt" not in settings:
        same(*Runs(tmp_path / "without", lambda: build(made, **settings), data).train(), whole, expected)


class Seen(keras.callbacks.Callback):  # type: ignore[misc]
    """Its state has a set, and the same tuple in several places."""

    def __init__(self) -> None:
        super().__init__()
        self.shape = (60, 6)
        self.state: dict[str, Any] = {"batches": set(), "shapes": [self.shape, self.shape]}

    def get_state(self) -> dict[str, Any]:
        return self.state

    def set_state(self, state: dict[str, Any]) -> None:
        self.state = state

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.state["batches"].add((int(self.model.optimizer.iterations), self.shape))


def test_sets_and_shared_tuples_of_a_callback_are_restored(tmp_path: Path) -> None:
    runs = Runs(tmp_path / "parts", lambda: build(None), arrays)
    runs.interrupted(5, save_freq=1, more=[Seen()])
    seen = Seen()
    runs.train(save_freq=1, more=[seen])
    shape = (60, 6)
    assert seen.state == {"batches": {(step, shape) for step in range(1, 25)}, "shapes": [shape, shape]}


@pytest.mark.long
def test_saving_by_epochs_and_by_seconds(tmp_path: Path) -> None:
    make = lambda: build(None)  # noqa: E731
    whole, expected = Runs(tmp_path / "alone", make, arrays).train()
    for name, plan in (("epochs", {}), ("seconds", {"save_freq": False, "save_seconds": 0.001})):
        runs = Runs(tmp_path / name, make, arrays)
        runs.interrupted(13, delete_checkpoint=True, **plan)
        model, history = runs.train(delete_checkpoint=True, **plan)
        same(model, history, whole, expected)


@pytest.mark.long
def test_a_run_that_stays_is_gone_on_with_if_it_has_more_epochs(tmp_path: Path) -> None:
    make = lambda: build(None)  # noqa: E731
    whole, expected = Runs(tmp_path / "alone", make, arrays).train(epochs=4)
    runs = Runs(tmp_path / "parts", make, arrays)
    runs.train(epochs=2, delete_checkpoint=False)
    again, history = runs.train(epochs=2, delete_checkpoint=False)
    assert history.epoch == [0, 1]
    assert int(again.optimizer.iterations) == 16
    model, history = runs.train(epochs=4, delete_checkpoint=False)
    same(model, history, whole, expected)


@pytest.mark.long
def test_training_that_was_over_but_for_its_end_ends_as_it_would_have(tmp_path: Path) -> None:
    """EMA and the best weights are put into the model after the last epoch, so after its checkpoint."""

    class Interrupt(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_end(self, logs: Any = None) -> None:
            raise KeyboardInterrupt

    def best() -> list[Any]:
        return [keras.callbacks.EarlyStopping("accuracy", patience=9, restore_best_weights=True)]

    make = lambda: build(None)  # noqa: E731
    whole, expected = Runs(tmp_path / "alone", make, arrays).train(more=best())
    for name, keeps in (("deleted", False), ("kept", True)):
        runs = Runs(tmp_path / name, make, arrays)
        runs.interrupted(0, delete_checkpoint=not keeps, more=[*best(), Interrupt()])
        model, history = runs.train(delete_checkpoint=not keeps, more=best())
        same(model, history, whole, expected)
    _, expected = Runs(tmp_path / "longer", make, arrays).train(epochs=4)
    model, history = runs.train(epochs=4, delete_checkpoint=False, more=best())
    assert history.epoch == expected.epoch


def test_a_list_of_callbacks_stays_the_users(tmp_path: Path) -> None:
    model = build(None)
    given = keras.callbacks.CallbackList(
        [dtrain.BackupAndRestore(tmp_path / "backup")], add_history=True, model=model, epochs=1, verbose=0
    )
    before = list(given.callbacks)
    for _ in range(2):
        model.fit(X, Y, epochs=1, verbose=0, callbacks=given)
    assert given.callbacks == before


def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make = lambda: build(None)  # noqa: E731
    whole, expected = Runs(tmp_path / "alone", make, arrays).train(save_freq=2)
    runs = Runs(tmp_path / "parts", make, arrays)
    runs.interrupted(11, save_freq=2)
    newest = max((runs.folder / "backup" / "fit-0").iterdir())
    data = next(newest.glob("*.data"))
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    with caplog.at_level(logging.WARNING, logger="dtrain"):
        model, history = runs.train(save_freq=2)
    assert str(newest) in caplog.text and "The previous checkpoint is used" in caplog.text
    same(model, history, whole, expected)


def test_what_callbacks_remember(tmp_path: Path) -> None:
    class Own(keras.callbacks.Callback):  # type: ignore[misc]
        def __init__(self, name: str) -> None:
            super().__init__()
            self.name = name
            self.seen: list[int] = []
            self.best = {"loss": np.float32(np.inf)}

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.seen.append(batch)
            self.best["loss"] = min(self.best["loss"], np.float32(logs["loss"]))

    runs = Runs(tmp_path, lambda: build(None), arrays)
    runs.interrupted(11, epochs=2, save_freq=1, more=[Own("a")])
    after = Own("b")
    runs.train(epochs=2, save_freq=1, more=[after])
    assert after.seen == [*range(8), *range(8)]
    assert after.name == "b", "what the program sets is the program's to say"
    assert np.isfinite(after.best["loss"])


def test_another_model_is_refused_and_nothing_is_lost(tmp_path: Path) -> None:
    runs = Runs(tmp_path, lambda: build(None), arrays)
    runs.interrupted(5, save_freq=1)
    before = sorted((tmp_path / "backup").rglob("*"))

    def other() -> Any:
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])
        model.compile("adam", "mse")
        return model

    with refused(CheckpointError, "variables", "Give this run another"):
        Runs(tmp_path, other, arrays).train(save_freq=1)
    assert sorted((tmp_path / "backup").rglob("*")) == before


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"backup_dir": ""}, "backup_dir=''"),
        ({"backup_dir": "\udce9"}, r"backup_dir='\udce9'"),
        ({"backup_dir": "a\0b"}, r"backup_dir='a\x00b'"),
        ({"save_freq": 0}, "save_freq is 0"),
        ({"save_freq": True}, "save_freq is True"),
        ({"save_freq": "step"}, "save_freq is 'step'"),
        ({"save_seconds": 0}, "save_seconds is 0"),
        ({"keep": 0}, "keep is 0"),
    ],
)
def test_arguments_that_cannot_be_used(arguments: dict[str, Any], said: str) -> None:
    with refused(ConfigurationError, said):
        dtrain.BackupAndRestore(**{"backup_dir": "somewhere", **arguments})


def test_one_of_them_is_enough(tmp_path: Path) -> None:
    with refused(ConfigurationError, "2 callbacks"):
        build(None).fit(X, Y, callbacks=[dtrain.BackupAndRestore(tmp_path / name) for name in "ab"])


# --- loops of one's own


@pytest.mark.parametrize("strategy", ["no strategy", "mirrored"])
def test_a_loop_of_ones_own_goes_on(tmp_path: Path, strategy: str) -> None:
    made = STRATEGIES[strategy]()

    def train(folder: Path, steps: int) -> tuple[list[np.ndarray], Any]:
        model = build(made, gradient_accumulation_steps=2)
        with contextlib.nullcontext() if made is None else made.scope():
            model.optimizer.build(model.trainable_variables)
            seen = keras.metrics.Mean()

        def step(rows: tf.Tensor) -> None:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(
                    tf.square(model(tf.gather(X, rows), training=True) - tf.gather(Y, rows))
                )
            gradients = tape.gradient(loss, model.trainable_variables)
            model.optimizer.apply(gradients, model.trainable_variables)
            seen.update_state(loss)

        run = tf.function(step if made is None else lambda rows: made.run(step, (rows,)))
        checkpoints = Checkpoints(folder, model, metrics=[seen])
        begun = checkpoints.restore() or {"step": 0, "losses": []}
        losses = list(begun["losses"])
        for number in range(begun["step"], steps):
            run(tf.constant(np.random.choice(60, 8)))
            losses.append(float(seen.result()))
            if number % 3 == 2:
                checkpoints.save(number + 1, losses=losses)
        checkpoints.close()
        return [*state(model), *[v.numpy() for v in seen.variables]], losses

    whole, expected = train(tmp_path / "alone", 10)
    train(tmp_path / "parts", 7)  # one step more than is saved
    parts, losses = train(tmp_path / "parts", 10)
    assert losses == expected
    for one, other in zip(parts, whole, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_loop_says_what_cannot_be_saved(tmp_path: Path) -> None:
    model = build(None)
    with refused(ConfigurationError, "optimizer", "build(model.trainable_variables)"):
        Checkpoints(tmp_path, model)
    model.optimizer.build(model.trainable_variables)
    with refused(ConfigurationError, "keep is 0"):
        Checkpoints(tmp_path, model, keep=0)
    assert not list(tmp_path.iterdir()), "a refused one leaves neither a lock nor a folder"
    checkpoints = Checkpoints(tmp_path, model)
    assert checkpoints.restore() is None
    with refused(ConfigurationError, model=model):
        checkpoints.save(1, model=model)
    checkpoints.save(1, note="kept")
    assert checkpoints.restore() is None or checkpoints.restore() == {"note": "kept", "step": 1}
    checkpoints.close(delete=True)
    assert not list(tmp_path.glob("step-*"))
