"""Fits whose calls make many steps, as they do where nobody looks at each batch."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from .common import BatchLogs, Values
from .recorded_common import everything, model_in, rows
from .registry import Env, recording


class OwnStep(keras.Model):
    """A train step of the user's own, with a loss that it computes and reports by itself."""

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            error = self(x, training=True) - y
            loss = tf.reduce_mean(tf.square(error))
        gradients = tape.gradient(loss, self.trainable_variables)
        gradients, norm = tf.clip_by_global_norm(gradients, 1.0)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss, "norm": norm}


def trained(env: Env, kind: type[keras.Model] = keras.Model, **compiled: Any) -> Values:
    """Three epochs of 26 steps, the last of them short, with validation."""
    model = model_in(env, kind, **compiled)
    x, y = rows(203)
    validation = None if kind is OwnStep else rows(30)
    record = model.fit(x, y, batch_size=8, epochs=3, validation_data=validation, verbose=0)
    return everything(model, record)


@recording("many_steps_a_call")
def _(env: Env) -> Values:
    return trained(env)


@recording("each_steps_loss")
def _(env: Env) -> Values:
    model, logs = model_in(env), BatchLogs()
    record = model.fit(*rows(), batch_size=8, epochs=2, verbose=0, callbacks=[logs])
    return everything(model, record) | logs.values()


@recording("many_steps_of_an_own_step")
def _(env: Env) -> Values:
    return trained(env, OwnStep)


@recording("many_steps_accumulated")
def _(env: Env) -> Values:
    return trained(
        env, optimizer=lambda: keras.optimizers.AdamW(0.02, gradient_accumulation_steps=3, clipnorm=0.5)
    )


@recording("many_steps_in_float16")
def _(env: Env) -> Values:
    keras.config.set_dtype_policy("mixed_float16")
    return trained(env)


@recording("many_steps_in_bfloat16_accumulated")
def _(env: Env) -> Values:
    keras.config.set_dtype_policy("mixed_bfloat16")
    return trained(env, optimizer=lambda: keras.optimizers.Adam(0.02, gradient_accumulation_steps=2))


@recording("long_fit_in_xla_by_rule")
def _(env: Env) -> Values:
    # 1,200 steps: on one device the rule chooses XLA.
    model = model_in(env)
    record = model.fit(*rows(1600), batch_size=8, epochs=6, verbose=0)
    return everything(model, record)
