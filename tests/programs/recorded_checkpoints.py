"""Checkpoints that one commit wrote in the middle of an epoch, and another one goes on with.

`interrupted_X` leaves a checkpoint in its folder; `resumed_X` is given a copy of that folder.
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

import dtrain
from dtrain.data import Pipeline

from .common import Values
from .recorded_common import BATCH, everything, model_in, numbered, rows
from .registry import Env, recording

EPOCHS = 4
SAVE_EVERY = 3  # steps
STOP = 10  # steps: the second epoch of six had made three when the last checkpoint was taken


class Interrupt(Exception):
    """Ends a fit in the middle of an epoch."""


class InterruptAt(keras.callbacks.Callback):
    """Raises after so many steps of a fit."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.left = steps

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.left -= 1
        if not self.left:
            raise Interrupt


def callbacks(env: Env, interrupted: bool) -> list[keras.callbacks.Callback]:
    """Callbacks that remember something, the checkpoints, and what ends the fit."""
    found = [
        keras.callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=1, min_delta=10.0),
        keras.callbacks.EarlyStopping("loss", patience=3, min_delta=10.0, restore_best_weights=True),
        dtrain.BackupAndRestore(str(env.tmp / "backup"), save_freq=SAVE_EVERY, delete_checkpoint=False),
    ]
    return [*found, InterruptAt(STOP)] if interrupted else found


def data(kind: str) -> dict[str, Any]:
    if kind == "pipeline":
        return {"x": Pipeline(rows(), batch=BATCH, seed=5).dataset()}
    x, y = rows()
    return {"x": x, "y": y, "batch_size": BATCH}


def interrupted(env: Env, kind: str, **compiled: Any) -> Values:
    model = model_in(env, **compiled)
    try:
        model.fit(**data(kind), epochs=EPOCHS, verbose=0, callbacks=callbacks(env, interrupted=True))
    except Interrupt:
        return numbered("model", model.variables)
    raise AssertionError("the fit was not interrupted")


def resumed(env: Env, kind: str, **compiled: Any) -> Values:
    model = model_in(env, **compiled)
    record = model.fit(**data(kind), epochs=EPOCHS, verbose=0, callbacks=callbacks(env, interrupted=False))
    return everything(model, record)


def accumulating() -> keras.optimizers.Optimizer:
    return keras.optimizers.Adam(0.02, gradient_accumulation_steps=2)


@recording("interrupted_arrays")
def _(env: Env) -> Values:
    return interrupted(env, "arrays")


@recording("resumed_arrays")
def _(env: Env) -> Values:
    return resumed(env, "arrays")


@recording("interrupted_pipeline")
def _(env: Env) -> Values:
    return interrupted(env, "pipeline", optimizer=accumulating)


@recording("resumed_pipeline")
def _(env: Env) -> Values:
    return resumed(env, "pipeline", optimizer=accumulating)


# Without a global seed the order follows from a seed that only the checkpoint tells to both trees.


@recording("interrupted_unseeded")
def _(env: Env) -> Values:
    tf.random.set_seed(None)
    interrupted(env, "arrays")
    return {}


@recording("resumed_unseeded")
def _(env: Env) -> Values:
    tf.random.set_seed(None)
    return resumed(env, "arrays")
