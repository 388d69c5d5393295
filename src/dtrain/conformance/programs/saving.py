"""Callbacks and files. Every worker of a job uses the same paths."""

from __future__ import annotations

import csv
from typing import Any

import keras
import numpy as np

from dtrain.conformance.corpus import ProgramRun, Values, program
from dtrain.conformance.parts import dataset, network, regression, sgd, trained, weights

C = keras.callbacks


def _fit(run: ProgramRun, *callbacks: Any, epochs: int = 3, rate: float = 0.1) -> Values:
    """A training with callbacks, and with validation after each epoch."""
    x, y = regression(44)
    with run.strategy.scope():
        model = network()
        model.compile(sgd(rate), "mse", metrics=["mae"])
    data = dataset(x, y)
    record = model.fit(data, validation_data=data, epochs=epochs, callbacks=list(callbacks), verbose=0)
    return trained(model, record)


@program()
def saved_and_loaded(run: ProgramRun) -> Values:
    """A saved model, loaded without a strategy, and trained on under the strategy."""
    x, y = regression(44)
    with run.strategy.scope():
        model = network()
        model.compile(keras.optimizers.Adam(0.02, epsilon=1e-3), "mse")
    model.fit(dataset(x, y), epochs=2, verbose=0)
    path = run.folder / "model.keras"
    model.save(path)
    values = weights(keras.models.load_model(path), "loaded_")
    with run.strategy.scope():
        again = keras.models.load_model(path)
    return values | trained(again, again.fit(dataset(x, y), epochs=1, verbose=0))


@program()
def model_checkpoint(run: ProgramRun) -> Values:
    """`ModelCheckpoint`, which all workers give the same path."""
    values = _fit(run, C.ModelCheckpoint(str(run.folder / "epoch-{epoch}.keras")))
    return values | weights(keras.models.load_model(run.folder / "epoch-2.keras"), "second_")


@program()
def early_stopping(run: ProgramRun) -> Values:
    """`EarlyStopping` that restores the best weights."""
    # The rate is too high on purpose, so that the best weights are not the last.
    return _fit(run, C.EarlyStopping("val_loss", patience=1, restore_best_weights=True), epochs=8, rate=0.25)


@program()
def rate_falls_on_a_plateau(run: ProgramRun) -> Values:
    """`ReduceLROnPlateau`, which decides by the reported loss."""
    return _fit(run, C.ReduceLROnPlateau("loss", factor=0.3, patience=1, min_delta=0.5), epochs=5)


@program()
def log_of_epochs(run: ProgramRun) -> Values:
    """`CSVLogger`: the file has the numbers of the whole job."""
    path = run.folder / "log.csv"
    values = _fit(run, C.CSVLogger(str(path)))
    with path.open() as file:
        rows = list(csv.DictReader(file))
    return values | {f"csv_{key}": np.asarray([float(row[key]) for row in rows]) for key in rows[0]}


@program()
def watched_batches(run: ProgramRun) -> Values:
    """A callback that reads the loss after each batch."""
    seen: list[float] = []
    watch = C.LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append(float(logs["loss"])))
    return _fit(run, watch) | {"seen": np.asarray(seen)}
