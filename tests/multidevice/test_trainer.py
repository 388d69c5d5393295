"""`Trainer` gives what Keras gives with the same settings by hand, under every strategy of one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import dtrain
from dtrain.data.pipeline import Pipeline
from dtrain.errors import ConfigurationError, DataError, UnknownStrategyError
from refusals import refused

ROWS, CLASSES = 44, 3
RNG = np.random.default_rng(0)
X = RNG.normal(size=(ROWS, 6)).astype("float32")
Y = RNG.integers(0, CLASSES, ROWS)
LOSS = "sparse_categorical_crossentropy"


def model_fn() -> keras.Model:
    keras.utils.set_random_seed(5)
    layers = keras.layers
    return keras.Sequential(
        [keras.Input((6,)), layers.Dense(8, "tanh"), layers.Dense(CLASSES, activation="softmax")]
    )


def trainer(**settings: Any) -> dtrain.Trainer:
    return dtrain.Trainer(**{"strategy": "mirrored", "global_batch": 16, "seed": 3} | settings)


def compiled(**settings: Any) -> dtrain.Trainer:
    made = trainer(**settings)
    made.compile(model_fn, optimizer="adam", learning_rate=0.01, loss=LOSS, metrics=["accuracy"])
    return made


def same(found: keras.Model, expected: keras.Model, rtol: float = 0.0, atol: float = 0.0) -> None:
    for one, other in zip(found.get_weights(), expected.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=rtol, atol=atol)


# --- numbers

# In 16 bits a sum over another number of rows is rounded otherwise: relative and absolute.
TOLERANCE = {"float32": (2e-4, 1e-6), "mixed_float16": (5e-3, 5e-4), "mixed_bfloat16": (4e-2, 4e-3)}


@pytest.mark.parametrize(
    ("strategy", "accumulation", "precision"),
    [
        ("mirrored", 2, "float32"),
        ("mirrored", 1, "mixed_bfloat16"),
        ("mirrored", 2, "mixed_float16"),
        pytest.param("central_storage", 2, "float32", marks=pytest.mark.long),
    ],
)
def test_the_numbers_are_those_of_keras_on_one_device(
    strategy: str, accumulation: int, precision: str
) -> None:
    """With the very batches: the data is a dataset, so that its order is known."""
    micro = 16 // accumulation
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(micro)
    made = compiled(strategy=strategy, accumulation=accumulation, precision=precision)
    assert made.batches.micro_batch == micro
    history = made.fit(data, data, 2, verbose=0)

    keras.utils.set_random_seed(3)
    with dtrain.optim.precision(precision):
        alone = dtrain.optim.float32_outputs(model_fn())
        steps = accumulation if accumulation > 1 else None
        optimizer = keras.optimizers.Adam(0.01, gradient_accumulation_steps=steps)
        alone.compile(optimizer, LOSS, metrics=["accuracy"])
    expected = alone.fit(data, validation_data=data, epochs=2, verbose=0)

    rtol, atol = TOLERANCE[precision]
    same(made.model, alone, rtol, atol)
    assert set(history.history) == {"loss", "accuracy", "val_loss", "val_accuracy"}
    for name, values in expected.history.items():
        np.testing.assert_allclose(history.history[name], values, rtol=rtol)
    assert int(made.model.optimizer.iterations) == int(alone.optimizer.iterations)
    assert made.predict(X).dtype == np.float32


def test_arrays_are_seen_once_an_epoch_in_another_order_each() -> None:
    seen: list[np.ndarray] = []

    class Noting(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.dense = keras.layers.Dense(1)

        def call(self, x: Any) -> Any:
            tf.py_function(lambda rows: seen.append(rows.numpy().ravel()), [x], [])
            return self.dense(x)

    made = trainer(global_batch=8)
    made.compile(Noting, optimizer="sgd", loss="mse", run_eagerly=False)
    numbers = np.arange(21.0, dtype="float32")[:, None]
    made.fit((numbers, numbers), epochs=1, verbose=0)
    seen.clear()
    made.fit((numbers, numbers), epochs=2, verbose=0)
    rows = np.concatenate(seen)
    assert sorted(rows[:21]) == sorted(rows[21:]) == list(range(21))
    assert list(rows[:21]) != list(rows[21:])
    assert list(rows[:21]) != list(range(21))


def test_evaluate_and_predict_take_arrays_and_datasets() -> None:
    made = compiled()
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(16)
    by_arrays, by_dataset = made.evaluate((X, Y)), made.evaluate(data)
    assert set(by_arrays) == {"loss", "accuracy"}
    np.testing.assert_allclose(by_arrays["loss"], by_dataset["loss"], rtol=1e-5)
    np.testing.assert_allclose(made.predict(X), made.predict(data), rtol=1e-5)
    assert made.predict(X).shape == (ROWS, CLASSES)
    pipeline = Pipeline((X, Y), batch=16, shuffle=False)
    np.testing.assert_allclose(made.evaluate(pipeline)["loss"], by_arrays["loss"], rtol=1e-5)


def test_a_strategy_itself_is_taken_too() -> None:
    strategy = dtrain.MirroredStrategy()
    assert trainer(strategy=strategy).strategy is strategy


# --- rates


@pytest.mark.parametrize(("scaling", "rate"), [("none", 0.1), ("linear", 0.4), ("sqrt", 0.2)])
def test_the_rate_is_scaled_from_the_base_batch(scaling: str, rate: float) -> None:
    made = trainer(per_replica_batch=4, global_batch=16, scaling=scaling)
    made.compile(model_fn, optimizer="sgd", learning_rate=0.1, loss=LOSS)
    assert made.batches.accumulation == 2
    assert made.learning_rate == pytest.approx(rate)
    assert float(made.model.optimizer.learning_rate) == pytest.approx(rate)


def test_warm_up_rises_from_the_unscaled_rate_and_counts_updates() -> None:
    rates: list[float] = []
    note = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: rates.append(float(made.model.optimizer.learning_rate))
    )
    made = trainer(
        global_batch=16, per_replica_batch=4, scaling="linear", warmup_steps=2, base_batch=8, seed=1
    )
    made.compile(model_fn, optimizer=keras.optimizers.SGD(0.1, momentum=0.9), loss=LOSS)
    made.fit((X, Y), epochs=1, callbacks=[note], verbose=0)  # 6 micro-batches of 8, so 3 updates
    np.testing.assert_allclose(rates[:4], [0.125, 0.15, 0.175, 0.2], rtol=1e-5)
    assert rates[4:] == pytest.approx([0.2] * (len(rates) - 4))
    assert made.model.optimizer.get_config()["momentum"] == 0.9


@pytest.mark.parametrize(
    "optimizer",
    [
        "adamw",
        keras.optimizers.AdamW,
        lambda rate: keras.optimizers.AdamW(rate),
        keras.optimizers.AdamW(),
    ],
)
def test_an_optimizer_in_any_form(optimizer: Any) -> None:
    made = trainer(accumulation=2, per_replica_batch=4, global_batch=None)
    made.compile(model_fn, optimizer=optimizer, learning_rate=0.02, loss=LOSS)
    assert type(made.model.optimizer) is keras.optimizers.AdamW
    assert made.model.optimizer.gradient_accumulation_steps == 2
    assert float(made.model.optimizer.learning_rate) == pytest.approx(0.02)


# --- the run directory, and going on


def run(folder: Path, epochs: int, *, resume: bool = False, **settings: Any) -> tuple[Any, Any]:
    made = compiled(run_dir=folder, **settings)
    done = made.resume() if resume else 0
    history = made.fit((X, Y), (X, Y), epochs=epochs, verbose=0)
    return made, (done, history)


def test_a_run_leaves_its_files_and_refuses_another(tmp_path: Path) -> None:
    made, (_, history) = run(tmp_path / "run", 2)
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["status"] == "finished"
    assert (record["global_batch"], record["per_replica_batch"], record["replicas"]) == (16, 8, 2)
    assert record["final_metrics"]["val_loss"] == pytest.approx(history.history["val_loss"][-1])
    for name in ("model.keras", "metrics.csv", "curves.png", "tensorboard"):
        assert (tmp_path / "run" / name).exists(), name
    loaded = keras.models.load_model(tmp_path / "run" / "model.keras")
    same(loaded, made.model)

    before = (tmp_path / "run" / "run.json").read_bytes()
    with refused(ConfigurationError, tmp_path / "run", "another run"):
        run(tmp_path / "run", 1)
    assert (tmp_path / "run" / "run.json").read_bytes() == before


@pytest.mark.long
def test_a_resumed_run_ends_as_one_that_was_left_alone(tmp_path: Path) -> None:
    whole, (_, expected) = run(tmp_path / "whole", 4, accumulation=2)
    run(tmp_path / "parts", 2, accumulation=2, resume=True)  # there is nothing to go on from, so it begins
    assert len(list((tmp_path / "parts" / "backups" / "fit-0").iterdir())) == 2
    made, (done, history) = run(tmp_path / "parts", 4, accumulation=2, resume=True)
    assert done == 2
    same(made.model, whole.model)
    assert history.history.keys() >= expected.history.keys()
    for name in expected.history:
        if name != "examples_per_second":
            np.testing.assert_array_equal(history.history[name], expected.history[name])
    assert history.epoch == [0, 1, 2, 3]
    assert len((tmp_path / "parts" / "metrics.csv").read_text().splitlines()) == 5

    # A run that is done already has nothing left to train.
    again, (done, history) = run(tmp_path / "parts", 4, accumulation=2, resume=True)
    assert (done, len(history.history["loss"])) == (4, 4)
    same(again.model, whole.model)


def test_a_run_without_validation_that_stops_early_is_over(tmp_path: Path) -> None:
    def again(epochs: int) -> tuple[int, Any]:
        made = compiled(run_dir=tmp_path / "run")
        done = made.resume()
        stop = keras.callbacks.EarlyStopping("loss", patience=0, min_delta=100.0)
        return done, made.fit(
            ([list(map(float, row)) for row in X], Y), epochs=epochs, callbacks=[stop], verbose=0
        )

    done, history = again(5)
    assert (done, history.epoch) == (0, [0, 1])
    record = (tmp_path / "run" / "run.json").read_bytes()
    done, history = again(5)
    assert (done, history.epoch) == (2, [0, 1])
    assert set(history.history) == {"loss", "accuracy", "examples_per_second"}
    assert (tmp_path / "run" / "run.json").read_bytes() == record
    done, history = again(6)
    assert (done, history.epoch) == (2, [0, 1, 2, 3])
    assert len(history.history["loss"]) == 4


def test_what_is_no_run_of_a_trainer_is_not_gone_on_with(tmp_path: Path) -> None:
    for text, found in (
        ('{"recipe": "digits"}', "not written by a Trainer"),
        ("[]", "is not"),
        ("{", "cannot be read"),
    ):
        (tmp_path / "run.json").write_text(text)
        with refused(ConfigurationError, tmp_path, found):
            compiled(run_dir=tmp_path).resume()


def test_a_run_is_gone_on_with_as_what_it_was(tmp_path: Path) -> None:
    run(tmp_path / "run", 1)
    for settings, named in (
        ({"global_batch": 32}, ("global_batch 16", "32")),
        ({"precision": "mixed_bfloat16"}, ("precision 'float32'", "'mixed_bfloat16'")),
        ({"seed": 4}, ("seed 3", "4")),
        ({"accumulation": 2}, ("accumulation 1", "2")),
    ):
        made = compiled(run_dir=tmp_path / "run", **settings)
        with refused(ConfigurationError, *named):
            made.resume()


# --- bad input


@pytest.mark.parametrize(
    ("settings", "named", "error"),
    [
        ({"strategy": "mirored"}, "'mirrored'", UnknownStrategyError),
        ({"precision": "float8"}, "precision='float8'", ConfigurationError),
        ({"scaling": "cubic"}, "scaling='cubic'", ConfigurationError),
        ({"global_batch": 17}, "17", ConfigurationError),
        ({"warmup_steps": -1}, "warmup_steps=-1", ConfigurationError),
        ({"base_batch": 0}, "base_batch=0", ConfigurationError),
    ],
)
def test_settings_that_cannot_be_used(settings: dict[str, Any], named: str, error: type[Exception]) -> None:
    with refused(error, named):
        trainer(**settings)


def test_calls_that_cannot_work(tmp_path: Path) -> None:
    with refused(ConfigurationError, "trainer.compile(model_fn, loss=...)"):
        trainer().fit((X, Y))
    made = compiled()
    with refused(ConfigurationError, "no run directory"):
        made.resume()
    with refused(ConfigurationError, epochs=0):
        made.fit((X, Y), epochs=0)
    with refused(DataError, "single examples"):
        made.fit(tf.data.Dataset.from_tensor_slices((X, Y)))
    with refused(ConfigurationError, "batches of 11", "8 examples", "2 replicas", "16"):
        made.fit(tf.data.Dataset.from_tensor_slices((X, Y)).batch(11, drop_remainder=True))
    with refused(ConfigurationError, "batches of 4", "16"):
        made.fit(Pipeline((X, Y), batch=4))
    with refused(ConfigurationError, "'adamm'"):
        trainer().compile(model_fn, optimizer="adamm", loss=LOSS)
    with refused(ConfigurationError, "used"):
        trainer().compile(model_fn, optimizer=_used(), loss=LOSS)
    with refused(ConfigurationError, "CosineDecay", "scaling is 'linear'"):
        trainer(scaling="linear").compile(
            model_fn, learning_rate=keras.optimizers.schedules.CosineDecay(0.1, 10), loss=LOSS
        )
    with refused(ConfigurationError, "2 are set", gradient_accumulation_steps=3):
        trainer(accumulation=2).compile(
            model_fn, optimizer=keras.optimizers.SGD(gradient_accumulation_steps=3), loss=LOSS
        )


def test_a_model_without_an_input_is_gone_on_with_once_it_sees_data(tmp_path: Path) -> None:
    def train(folder: Path, epochs: int) -> Any:
        made = trainer(run_dir=folder)
        made.compile(lambda: keras.Sequential([keras.layers.Dense(1)]), loss="mse")
        done = made.resume()
        history = made.fit((X, Y[:, None].astype("float32")), epochs=epochs, verbose=0)
        assert len(history.epoch) == epochs
        return done, made.model

    assert train(tmp_path / "parts", 1)[0] == 0
    done, model = train(tmp_path / "parts", 2)
    assert done == 1
    same(model, train(tmp_path / "whole", 2)[1])


def test_a_run_that_was_interrupted_goes_on_within_its_epoch(tmp_path: Path) -> None:
    class Interrupt(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if self.model.optimizer.iterations >= 4:
                raise KeyboardInterrupt

    def train(folder: Path, callbacks: list[Any]) -> Any:
        made = compiled(run_dir=folder, save_freq=1, seed=None)
        keras.utils.set_random_seed(5)
        made.model.set_weights([np.full(w.shape, 0.1, w.dtype) for w in made.model.get_weights()])
        made.resume()
        return made, made.fit((X, Y), epochs=2, callbacks=callbacks, verbose=0)

    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "run", [Interrupt()])
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["status"] == "running"
    seed = record["order_seed"]  # of an order that nobody has set: kept, so that no example is seen twice
    made, history = train(tmp_path / "run", [])
    assert history.epoch == [0, 1]
    assert json.loads((tmp_path / "run" / "run.json").read_text())["order_seed"] == seed
    alone = compiled(seed=None)
    alone.model.set_weights([np.full(w.shape, 0.1, w.dtype) for w in alone.model.get_weights()])
    alone.model.fit(
        Pipeline((X, Y), batch=alone.batches.micro_batch, seed=seed).dataset(),
        epochs=2,
        shuffle=False,
        verbose=0,
    )
    same(made.model, alone.model)


def _used() -> keras.optimizers.Optimizer:
    optimizer = keras.optimizers.SGD()
    optimizer.build([keras.Variable(1.0)])
    return optimizer
