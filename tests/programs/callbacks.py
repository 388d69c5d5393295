"""Keras' callbacks, also those that write: every worker of a job runs them with the same paths."""

from __future__ import annotations

import csv
from typing import Any

import keras
import numpy as np

from .common import Values, classes, dataset, history, mlp, outcome, regression, sgd, weights
from .registry import Env, program

C = keras.callbacks


def fitted(env: Env, callbacks: list[C.Callback], *, epochs: int = 3, rate: Any = 0.1, **fit: Any) -> Values:
    x, y = regression(44)
    with env.strategy.scope():
        model = mlp()
        model.compile(sgd(rate), "mse", metrics=["mae"])
    data = dataset(x, y)
    record = model.fit(data, validation_data=data, epochs=epochs, verbose=0, callbacks=callbacks, **fit)
    return outcome(model, record)


@program("early_stopping")
def _(env: Env) -> Values:
    # The rate is too high on purpose: the loss rises, and the best weights are not the last.
    stop = C.EarlyStopping("val_loss", patience=1, restore_best_weights=True)
    values = fitted(env, [stop], epochs=8, rate=0.25)
    return values | {"stopped": stop.stopped_epoch, "best": float(stop.best)}


@program("early_stopping_never_stops")
def _(env: Env) -> Values:
    return fitted(env, [C.EarlyStopping("val_mae", patience=9, restore_best_weights=True)], epochs=3)


@program("reduce_rate_on_plateau")
def _(env: Env) -> Values:
    return fitted(env, [C.ReduceLROnPlateau("loss", factor=0.3, patience=1, min_delta=0.5)], epochs=5)


@program("learning_rate_scheduler")
def _(env: Env) -> Values:
    return fitted(env, [C.LearningRateScheduler(lambda epoch, rate: 0.1 / (1 + epoch))])


@program("model_checkpoint")
def _(env: Env) -> Values:
    values = fitted(
        env,
        [
            C.ModelCheckpoint(str(env.tmp / "epoch-{epoch:02d}.keras")),
            C.ModelCheckpoint(str(env.tmp / "best.weights.h5"), save_best_only=True, save_weights_only=True),
        ],
    )
    files = sorted(p.name for p in env.tmp.iterdir() if p.suffix in (".keras", ".h5"))
    best = mlp()
    best.load_weights(env.tmp / "best.weights.h5")
    second = keras.models.load_model(env.tmp / "epoch-02.keras")
    return values | weights(best, "best") | weights(second, "second") | {"files": np.asarray(files)}


@program("model_checkpoint_every_few_steps")
def _(env: Env) -> Values:
    values = fitted(env, [C.ModelCheckpoint(str(env.tmp / "last.keras"), save_freq=2)])
    return values | weights(keras.models.load_model(env.tmp / "last.keras"), "last")


@program("csv_logger")
def _(env: Env) -> Values:
    path = env.tmp / "log.csv"
    values = fitted(env, [C.CSVLogger(str(path))])
    with path.open() as file:
        rows = list(csv.DictReader(file))
    return values | {f"csv_{key}": np.asarray([float(row[key]) for row in rows]) for key in rows[0]}


@program("tensorboard_histograms_and_profile")
def _(env: Env) -> Values:
    board = C.TensorBoard(str(env.tmp / "logs"), histogram_freq=1, profile_batch=2, update_freq=1)
    values = fitted(env, [board])
    found = {part: any((env.tmp / "logs" / part).glob("events*")) for part in ("train", "validation")}
    return values | {f"events_{part}": there for part, there in found.items()}


@program("lambda_callback")
def _(env: Env) -> Values:
    seen: list[float] = []
    watch = C.LambdaCallback(
        on_train_batch_end=lambda batch, logs: seen.append(float(logs["loss"])),
        on_epoch_end=lambda epoch, logs: seen.append(float(logs["val_mae"])),
    )
    return fitted(env, [watch]) | {"seen": np.asarray(seen)}


@program("terminate_on_nan")
def _(env: Env) -> Values:
    x, y = regression(48)
    y[37] = np.nan
    steps: list[int] = []
    watch = C.LambdaCallback(on_train_batch_end=lambda batch, logs: steps.append(batch))
    with env.strategy.scope():
        model = mlp()
        model.compile(sgd(), "mse")
    record = model.fit(dataset(x, y), epochs=3, verbose=0, callbacks=[C.TerminateOnNaN(), watch])
    return history(record) | {"steps": np.asarray(steps), "nan": bool(np.isnan(model.get_weights()[0]).all())}


@program("swap_averaged_weights")
def _(env: Env) -> Values:
    x, y = regression(44)
    with env.strategy.scope():
        model = mlp()
        model.compile(sgd(0.1, use_ema=True, ema_momentum=0.7), "mse")
    data = dataset(x, y)
    swap = C.SwapEMAWeights(swap_on_epoch=True)
    return outcome(model, model.fit(data, validation_data=data, epochs=2, verbose=0, callbacks=[swap]))


@program("stop_training_in_the_middle")
def _(env: Env) -> Values:
    class Stop(C.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if self.model.optimizer.iterations.numpy() >= 4:
                self.model.stop_training = True

    return fitted(env, [Stop()], epochs=5)


@program("callback_sets_weights")
def _(env: Env) -> Values:
    class Shrink(C.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.model.set_weights([w * 0.9 for w in self.model.get_weights()])

    return fitted(env, [Shrink()])


@program("callbacks_of_evaluate_and_predict")
def _(env: Env) -> Values:
    x, y = classes(44)
    seen: list[float] = []
    outputs: list[np.ndarray] = []

    class Watch(C.Callback):
        def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
            seen.append(float(logs["accuracy"]))

        def on_predict_batch_end(self, batch: int, logs: Any = None) -> None:
            outputs.append(np.asarray(logs["outputs"]))

    with env.strategy.scope():
        model = mlp(outputs=3, activation="softmax")
        model.compile(loss="sparse_categorical_crossentropy", metrics=["accuracy"])
    model.evaluate(x, y, batch_size=16, verbose=0, callbacks=[Watch()])
    model.predict(x, batch_size=16, verbose=0, callbacks=[Watch()])
    return {"seen": np.asarray(seen), "outputs": np.concatenate(outputs)}


@program("callback_resets_metrics_and_evaluates")
def _(env: Env) -> Values:
    x, y = regression(44)
    seen: list[float] = []

    class Watch(C.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            seen.extend(float(logs[name]) for name in ("loss", "mae"))
            if batch == 1:
                seen.append(float(self.model.evaluate(x, y, batch_size=16, verbose=0)[0]))
            else:
                self.model.reset_metrics()

    return fitted(env, [Watch()]) | {"seen": np.asarray(seen)}


@program("rate_carried_over_between_fits")
def _(env: Env) -> Values:
    x, y = regression(44)
    with env.strategy.scope():
        model = mlp()
        model.compile(sgd(), "mse")
    scheduled = C.LearningRateScheduler(lambda epoch, rate: rate * 0.5)
    first = model.fit(dataset(x, y), epochs=2, verbose=0, callbacks=[scheduled])
    second = model.fit(dataset(x, y), epochs=2, verbose=0, callbacks=[scheduled])
    return outcome(model, second) | history(first, "first_")
