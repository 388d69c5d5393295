"""Models with a step or a loss of their own."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from dtrain.conformance.corpus import ProgramRun, Values, program
from dtrain.conformance.parts import dataset, history, regression, sgd, trained, weights

L = keras.layers
ops = keras.ops


@program()
def own_train_step(run: ProgramRun) -> Values:
    """A `train_step` with `compute_loss` and `optimizer.apply`, as Keras' guide has it."""

    class OwnStep(keras.Model):  # type: ignore[misc]
        def train_step(self, data: Any) -> dict[str, Any]:
            x, y = data
            with tf.GradientTape() as tape:
                y_pred = self(x, training=True)
                loss = self.compute_loss(y=y, y_pred=y_pred)
            self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
            for metric in self.metrics:
                if metric.name == "loss":
                    metric.update_state(loss)
                else:
                    metric.update_state(y, y_pred)
            return {metric.name: metric.result() for metric in self.metrics}

    x, y = regression()
    with run.strategy.scope():
        inputs = keras.Input((4,))
        model = OwnStep(inputs, L.Dense(1)(L.Dense(6, "tanh")(inputs)))
        model.compile(sgd(), "mse", metrics=["mae"])
    return trained(model, model.fit(dataset(x, y), epochs=3, verbose=0))


@program()
def own_mean_of_the_batch(run: ProgramRun) -> Values:
    """A `train_step` that writes its loss as a mean over the batch."""

    class OwnMean(keras.Model):  # type: ignore[misc]
        def train_step(self, data: Any) -> dict[str, Any]:
            x, y = data
            with tf.GradientTape() as tape:
                loss = ops.mean(ops.square(y - self(x, training=True)))
            self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
            return {"loss": loss}

    x, y = regression()
    with run.strategy.scope():
        inputs = keras.Input((4,))
        model = OwnMean(inputs, L.Dense(1)(L.Dense(6, "tanh")(inputs)))
        model.compile(sgd())
    return trained(model, model.fit(dataset(x, y), epochs=3, verbose=0))


@program()
def two_optimizers(run: ProgramRun) -> Values:
    """A generator and a critic with an optimizer each, trained in one `train_step`."""

    class Gan(keras.Model):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.maker, self.critic = _two_layers(4, 2), _two_layers(2, 1)
            self.judge = keras.losses.BinaryCrossentropy(from_logits=True)
            self.built = True

        def compile(self, maker: Any, critic: Any) -> None:
            super().compile()
            self.maker_optimizer, self.critic_optimizer = maker, critic

        def train_step(self, data: Any) -> dict[str, Any]:
            noise, real = data
            ones, zeros = ops.ones_like(real[:, :1]), ops.zeros_like(real[:, :1])
            with tf.GradientTape() as tape:
                seen = self.critic(ops.concatenate([self.maker(noise), real]))
                critic_loss = self.judge(ops.concatenate([ones, zeros]), seen)
            variables = self.critic.trainable_variables
            self.critic_optimizer.apply(tape.gradient(critic_loss, variables), variables)
            with tf.GradientTape() as tape:
                maker_loss = self.judge(zeros, self.critic(self.maker(noise)))
            variables = self.maker.trainable_variables
            self.maker_optimizer.apply(tape.gradient(maker_loss, variables), variables)
            return {"critic": critic_loss, "maker": maker_loss}

    noise, _ = regression(32)
    _, real = regression(32)
    with run.strategy.scope():
        model = Gan()
        model.compile(sgd(0.1), sgd(0.2))
    record = model.fit(dataset(noise, real.repeat(2, axis=1), batch=8), epochs=3, verbose=0)
    return weights(model.maker, "maker_") | weights(model.critic, "critic_") | history(record)


def _two_layers(inputs: int, outputs: int) -> keras.Model:
    return keras.Sequential([keras.Input((inputs,)), L.Dense(6, activation="tanh"), L.Dense(outputs)])


@program()
def own_compute_loss(run: ProgramRun) -> Values:
    """A `compute_loss` that adds a term to Keras' loss."""

    class OwnLoss(keras.Model):  # type: ignore[misc]
        def compute_loss(
            self,
            x: Any = None,
            y: Any = None,
            y_pred: Any = None,
            sample_weight: Any = None,
            training: Any = True,
        ) -> Any:
            loss = super().compute_loss(x, y, y_pred, sample_weight, training)
            return loss + 0.1 * ops.mean(ops.abs(y_pred))

    x, y = regression(44)
    with run.strategy.scope():
        inputs = keras.Input((4,))
        model = OwnLoss(inputs, L.Dense(1)(L.Dense(6, "tanh")(inputs)))
        model.compile(sgd(), "mse")
    return trained(model, model.fit(dataset(x, y), epochs=2, verbose=0))
