"""Saving under the strategy and loading outside it, inside it, or without Keras."""

from __future__ import annotations

from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

from .common import Values, dataset, history, mlp, outcome, regression, sgd, weights
from .registry import Env, program


def trained(env: Env, x: np.ndarray, y: np.ndarray) -> keras.Model:
    with env.strategy.scope():
        model = mlp()
        model.compile(keras.optimizers.Adam(0.02, epsilon=1e-3), "mse", metrics=["mae"])
    model.fit(dataset(x, y), epochs=2, verbose=0)
    return model


@program("save_whole_model")
def _(env: Env) -> Values:
    x, y = regression(44)
    model = trained(env, x, y)
    path = env.tmp / "model.keras"
    model.save(path)
    outside = keras.models.load_model(path)
    values = weights(outside, "outside") | {"outside": outside.predict(x, verbose=0)}
    values["outside_steps"] = int(outside.optimizer.iterations.numpy())
    # Training goes on from the file as it would have without: the optimizer's state is in it too.
    with env.strategy.scope():
        inside = keras.models.load_model(path)
    values |= outcome(inside, inside.fit(dataset(x, y), epochs=1, verbose=0), x, y)
    on = model.fit(dataset(x, y), epochs=1, verbose=0)
    return values | {f"on_{k}": v for k, v in outcome(model, on).items()}


@program("save_in_scope_with_moving_average")
def _(env: Env) -> Values:
    x, y = regression(44)
    path = env.tmp / "model.keras"
    with env.strategy.scope():
        model = mlp()
        model.compile(sgd(0.1, use_ema=True, ema_momentum=0.8), "mse")
        model.fit(dataset(x, y), epochs=2, verbose=0)
        model.save(path)
    return weights(keras.models.load_model(path))


@program("save_weights")
def _(env: Env) -> Values:
    x, y = regression(44)
    model = trained(env, x, y)
    path = env.tmp / "model.weights.h5"
    model.save_weights(path)
    outside = mlp()
    outside.load_weights(path)
    with env.strategy.scope():
        inside = mlp()
        inside.load_weights(path)
        inside.compile(sgd(), "mse")
    record = inside.fit(dataset(x, y), epochs=1, verbose=0)
    return weights(outside, "outside") | outcome(inside, record)


@program("weights_of_one_device_loaded_inside")
def _(env: Env) -> Values:
    x, y = regression(44)
    outside = mlp()  # to train it here is an error where there are several workers
    with env.strategy.scope():
        model = mlp()
        model.compile(sgd(), "mse", metrics=["mae"])
    model.set_weights([0.5 * weight for weight in outside.get_weights()])
    return outcome(model, model.fit(dataset(x, y), epochs=2, verbose=0))


@program("tensorflow_checkpoint")
def _(env: Env) -> Values:
    x, y = regression(44)
    model = trained(env, x, y)
    checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
    path = checkpoint.save(str(env.tmp / f"checkpoint-{env.rank}"))
    with env.strategy.scope():
        again = mlp()
        again.compile(keras.optimizers.Adam(0.02, epsilon=1e-3), "mse", metrics=["mae"])
        again.optimizer.build(again.trainable_variables)
        restored = tf.train.Checkpoint(model=again, optimizer=again.optimizer)
        restored.restore(path)
    values = weights(again, "restored") | {"restored_steps": int(again.optimizer.iterations.numpy())}
    return values | outcome(again, again.fit(dataset(x, y), epochs=1, verbose=0))


@program("export_for_serving")
def _(env: Env) -> Values:
    x, y = regression(44)
    model = trained(env, x, y)
    path = env.tmp / "exported"
    model.export(str(path), verbose=False)
    served = tf.saved_model.load(str(path))
    values: Values = {"served": served.serve(tf.constant(x[:5])).numpy()}
    record = model.fit(dataset(x, y), epochs=1, verbose=0)
    return values | outcome(model, record)


@program("clone_and_config")
def _(env: Env) -> Values:
    x, y = regression(44)
    model = trained(env, x, y)
    with env.strategy.scope():
        clone = keras.models.clone_model(model)
        clone.set_weights(model.get_weights())
        clone.compile(keras.optimizers.Adam.from_config(model.optimizer.get_config()), "mse")
    return outcome(clone, clone.fit(dataset(x, y), epochs=1, verbose=0), x, y)


def resumed(env: Env, directory: Path) -> Values:
    """Stop in the second epoch, as a killed process would, and go on in a new model."""

    class Killed(Exception):
        pass

    class Kill(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: dict[str, float] | None = None) -> None:
            if epoch == 2:
                raise Killed

    x, y = regression(44)

    def fit(extra: list[keras.callbacks.Callback]) -> tuple[keras.Model, keras.callbacks.History]:
        with env.strategy.scope():
            model = mlp()
            model.compile(keras.optimizers.Adam(0.02, epsilon=1e-3), "mse")
        backup = keras.callbacks.BackupAndRestore(str(directory))
        return model, model.fit(dataset(x, y), epochs=4, verbose=0, callbacks=[backup, *extra])

    try:
        fit([Kill()])
    except Killed:
        model, record = fit([])
        return outcome(model, record)
    raise AssertionError("the first training was not stopped")


@program("backup_and_restore")
def _(env: Env) -> Values:
    return resumed(env, env.tmp / "backup")


@program("load_and_compile_anew")
def _(env: Env) -> Values:
    x, y = regression(44)
    model = trained(env, x, y)
    path = env.tmp / "model.keras"
    model.save(path)
    with env.strategy.scope():
        bare = keras.models.load_model(path, compile=False)
        bare.compile(sgd(), "mae")
    return outcome(bare, bare.fit(dataset(x, y), epochs=1, verbose=0)) | history(
        bare.fit(dataset(x, y), epochs=1, verbose=0), "second_"
    )
