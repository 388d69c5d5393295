"""Models with a train_step, test_step, compute_loss or compute_metrics of their own."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from .common import Values, classes, dataset, history, mlp, named, outcome, regression, sgd, weights
from .registry import Env, program

ops = keras.ops


def build(kind: type[keras.Model], outputs: int = 1, activation: str | None = None) -> keras.Model:
    inputs = keras.Input((4,))
    hidden = keras.layers.Dense(6, activation="tanh")(inputs)
    return kind(inputs, keras.layers.Dense(outputs, activation=activation)(hidden))


@program("train_step_compute_loss_and_metrics_loop")
def _(env: Env) -> Values:
    class Net(keras.Model):
        def train_step(self, data: Any) -> dict[str, Any]:
            x, y = data
            with tf.GradientTape() as tape:
                y_pred = self(x, training=True)
                loss = self.compute_loss(y=y, y_pred=y_pred)
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply(gradients, self.trainable_variables)
            for metric in self.metrics:
                if metric.name == "loss":
                    metric.update_state(loss)
                else:
                    metric.update_state(y, y_pred)
            return {metric.name: metric.result() for metric in self.metrics}

    x, y = regression(48)
    with env.strategy.scope():
        model = build(Net)
        model.compile(sgd(), "mse", metrics=["mae"])
    return outcome(model, model.fit(dataset(x, y), epochs=3, verbose=0))


@program("train_step_that_keeps_outputs_in_a_bank")
def _(env: Env) -> Values:
    class Net(keras.Model):
        def train_step(self, data: Any) -> dict[str, Any]:
            x, y = data
            with tf.GradientTape() as tape:
                y_pred = self(x, training=True)
                loss = self.compute_loss(y=y, y_pred=y_pred + 0.1 * self.bank.gather_nd([[3]])[0])
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply(gradients, self.trainable_variables)
            count = tf.shape(y_pred)[0]
            places = ((self.next + tf.range(count)) % 20)[:, tf.newaxis]
            self.bank.scatter_nd_update(places, y_pred)
            self.bank.scatter_nd_add(places, 0.5 * y_pred)
            self.bank.scatter_nd_sub([[1]], tf.reduce_mean(y_pred, 0, keepdims=True))
            self.next.assign((self.next + count) % 20)
            return {"objective": loss}

    x, y = regression(27)
    with env.strategy.scope():
        model = build(Net)
        model.bank = tf.Variable(tf.zeros([20, 1]), trainable=False)
        model.next = tf.Variable(0, trainable=False)
        model.compile(sgd(), "mse")
    model.bank.assign(tf.one_hot([5], 20, axis=0))
    record = model.fit(x, y, batch_size=8, epochs=3, verbose=0)
    return {**outcome(model, record), "bank": model.bank.numpy(), "next": model.next.numpy()}


@program("train_step_with_loss_fn_and_own_trackers")
def _(env: Env) -> Values:
    class Net(keras.Model):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.loss_tracker = keras.metrics.Mean(name="loss")
            self.mae_metric = keras.metrics.MeanAbsoluteError(name="mae")
            self.loss_fn = keras.losses.MeanSquaredError()

        def train_step(self, data: Any) -> dict[str, Any]:
            x, y = data
            with tf.GradientTape() as tape:
                y_pred = self(x, training=True)
                loss = self.loss_fn(y, y_pred)
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply(gradients, self.trainable_variables)
            self.loss_tracker.update_state(loss)
            self.mae_metric.update_state(y, y_pred)
            return {"loss": self.loss_tracker.result(), "mae": self.mae_metric.result()}

        @property
        def metrics(self) -> list[keras.metrics.Metric]:
            return [self.loss_tracker, self.mae_metric]

    x, y = regression(48)
    with env.strategy.scope():
        model = build(Net)
        model.compile(optimizer=sgd())
    record = model.fit(dataset(x, y), epochs=3, verbose=0)
    return outcome(model, record)


@program("train_step_hand_written_mean_loss")
def _(env: Env) -> Values:
    class Net(keras.Model):
        def train_step(self, data: Any) -> dict[str, Any]:
            x, y = data
            with tf.GradientTape() as tape:
                loss = ops.mean(ops.square(y - self(x, training=True)))
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
            return {"loss": loss}

    x, y = regression(48)
    with env.strategy.scope():
        model = build(Net)
        model.compile(optimizer=sgd())
    record = model.fit(dataset(x, y), epochs=3, verbose=0)
    return outcome(model, record)


@program("train_step_tf_reduce_mean_and_minimum_api")
def _(env: Env) -> Values:
    class Net(keras.Model):
        def train_step(self, data: Any) -> dict[str, Any]:
            x, y = data
            with tf.GradientTape() as tape:
                each = keras.losses.mean_squared_error(y, self(x, training=True))
                loss = tf.reduce_mean(each)
            variables = self.trainable_variables
            self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
            return {"loss": loss, "largest": tf.reduce_mean(each) * 2.0}

    x, y = regression(48)
    with env.strategy.scope():
        model = build(Net)
        model.compile(optimizer=sgd())
    return outcome(model, model.fit(x, y, batch_size=16, shuffle=False, epochs=2, verbose=0))


@program("train_step_clips_by_hand")
def _(env: Env) -> Values:
    class Net(keras.Model):
        def train_step(self, data: Any) -> dict[str, Any]:
            x, y = data
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x=x, y=y, y_pred=self(x, training=True))
            gradients = tape.gradient(loss, self.trainable_variables)
            # By value at a bound that no gradient reaches on any replica: hand-written clipping sees the
            # replica's own gradients, so only then is one device's result defined for it.
            gradients = [tf.clip_by_value(g, -50.0, 50.0) for g in gradients]
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
            return {"loss": loss}

    x, y = regression(48)
    with env.strategy.scope():
        model = build(Net)
        model.compile(sgd(), "mse")
    return outcome(model, model.fit(dataset(x, y), epochs=2, verbose=0))


@program("train_step_gradient_penalty")
def _(env: Env) -> Values:
    class Net(keras.Model):
        def train_step(self, data: Any) -> dict[str, Any]:
            x, y = data
            with tf.GradientTape() as tape:
                with tf.GradientTape() as inner:
                    inner.watch(x)
                    y_pred = self(x, training=True)
                slopes = inner.gradient(y_pred, x)
                norms = ops.sqrt(ops.sum(ops.square(slopes), axis=1) + 1e-6)
                penalty = ops.mean(ops.square(norms - 1.0))
                loss = self.compute_loss(y=y, y_pred=y_pred) + 0.5 * penalty
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
            return {"loss": loss, "penalty": penalty}

    x, y = regression(48)
    with env.strategy.scope():
        model = build(Net)
        model.compile(sgd(0.03), "mse")
    return outcome(model, model.fit(dataset(x, y), epochs=2, verbose=0))


@program("train_step_sample_weight")
def _(env: Env) -> Values:
    class Net(keras.Model):
        def train_step(self, data: Any) -> dict[str, Any]:
            x, y, sample_weight = data if len(data) == 3 else (*data, None)
            with tf.GradientTape() as tape:
                y_pred = self(x, training=True)
                loss = self.compute_loss(y=y, y_pred=y_pred, sample_weight=sample_weight)
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply(gradients, self.trainable_variables)
            for metric in self.metrics:
                if metric.name == "loss":
                    metric.update_state(loss)
                else:
                    metric.update_state(y, y_pred, sample_weight=sample_weight)
            return {metric.name: metric.result() for metric in self.metrics}

    x, y = regression(48)
    weight = np.linspace(0.2, 2.0, 48).astype("float32")
    with env.strategy.scope():
        model = build(Net)
        model.compile(sgd(), "mse", metrics=["mae"])
    record = model.fit(x, y, sample_weight=weight, batch_size=16, shuffle=False, epochs=2, verbose=0)
    return outcome(model, record)


@program("gan_two_optimizers")
def _(env: Env) -> Values:
    class Gan(keras.Model):
        """A generator of points from given noise, so that the program has no random numbers of its own."""

        def __init__(self) -> None:
            super().__init__()
            self.generator, self.critic = mlp(4, 2), mlp(2, 1)
            self.d_tracker = keras.metrics.Mean(name="d_loss")
            self.g_tracker = keras.metrics.Mean(name="g_loss")
            self.built = True

        def compile(self, d_optimizer: Any, g_optimizer: Any, loss_fn: Any) -> None:
            super().compile()
            self.d_optimizer, self.g_optimizer, self.loss_fn = d_optimizer, g_optimizer, loss_fn

        @property
        def metrics(self) -> list[keras.metrics.Metric]:
            return [self.d_tracker, self.g_tracker]

        def train_step(self, data: Any) -> dict[str, Any]:
            noise, real = data
            count = ops.shape(real)[0]
            both = ops.concatenate([self.generator(noise), real], axis=0)
            labels = ops.concatenate([ops.ones((count, 1)), ops.zeros((count, 1))], axis=0)
            with tf.GradientTape() as tape:
                d_loss = self.loss_fn(labels, self.critic(both))
            gradients = tape.gradient(d_loss, self.critic.trainable_weights)
            self.d_optimizer.apply(gradients, self.critic.trainable_weights)
            with tf.GradientTape() as tape:
                g_loss = self.loss_fn(ops.zeros((count, 1)), self.critic(self.generator(noise)))
            gradients = tape.gradient(g_loss, self.generator.trainable_weights)
            self.g_optimizer.apply(gradients, self.generator.trainable_weights)
            self.d_tracker.update_state(d_loss)
            self.g_tracker.update_state(g_loss)
            return {"d_loss": self.d_tracker.result(), "g_loss": self.g_tracker.result()}

    noise, _ = regression(32, seed=2)
    real, _ = regression(32, features=2, seed=3)
    with env.strategy.scope():
        model = Gan()
        model.compile(sgd(0.2), sgd(0.1), keras.losses.BinaryCrossentropy(from_logits=True))
    record = model.fit(dataset(noise, real + 1.0, batch=8), epochs=3, verbose=0)
    values = weights(model.generator, "g") | weights(model.critic, "d") | history(record)
    return values | {
        "d_iterations": int(model.d_optimizer.iterations.numpy()),
        "g_iterations": int(model.g_optimizer.iterations.numpy()),
    }


@program("test_step_override")
def _(env: Env) -> Values:
    class Net(keras.Model):
        def test_step(self, data: Any) -> dict[str, Any]:
            x, y = data
            y_pred = self(x, training=False)
            loss = self.compute_loss(y=y, y_pred=y_pred)
            for metric in self.metrics:
                if metric.name == "loss":
                    metric.update_state(loss)
                else:
                    metric.update_state(y, y_pred)
            return {metric.name: metric.result() for metric in self.metrics}

    x, y = regression(48)
    with env.strategy.scope():
        model = build(Net)
        model.compile(sgd(), "mse", metrics=["mae"])
    record = model.fit(dataset(x, y), validation_data=dataset(x, y, batch=12), epochs=2, verbose=0)
    return outcome(model, record, x, y)


@program("predict_step_override")
def _(env: Env) -> Values:
    class Net(keras.Model):
        def predict_step(self, data: Any) -> Any:
            x = data[0] if isinstance(data, tuple) else data
            y_pred = self(x, training=False)
            return {"value": y_pred, "label": ops.cast(y_pred > 1.0, "int32")}

    x, y = regression(45)
    with env.strategy.scope():
        model = build(Net)
        model.compile(sgd(), "mse")
    record = model.fit(dataset(x, y), epochs=1, verbose=0)
    values = outcome(model, record)
    return values | {f"p_{k}": v for k, v in model.predict(x, batch_size=16, verbose=0).items()}


@program("compute_loss_override")
def _(env: Env) -> Values:
    class Net(keras.Model):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.own_tracker = keras.metrics.Mean(name="own")

        def compute_loss(
            self,
            x: Any = None,
            y: Any = None,
            y_pred: Any = None,
            sample_weight: Any = None,
            training: bool = True,
        ) -> Any:
            loss = ops.mean(ops.square(y_pred - y)) + ops.mean(ops.abs(y_pred)) * 0.1
            loss = loss + sum(self.losses)
            self.own_tracker.update_state(loss)
            return loss

        def reset_metrics(self) -> None:
            self.own_tracker.reset_state()

        @property
        def metrics(self) -> list[keras.metrics.Metric]:
            return [self.own_tracker]

    x, y = regression(48)
    with env.strategy.scope():
        inputs = keras.Input((4,))
        hidden = keras.layers.Dense(5, activation="tanh", kernel_regularizer="l2")(inputs)
        model = Net(inputs, keras.layers.Dense(1)(hidden))
        model.compile(optimizer=sgd())
    record = model.fit(dataset(x, y), epochs=2, verbose=0)
    values = outcome(model, record)
    return values | named(model.evaluate(dataset(x, y), verbose=0, return_dict=True), "evaluate_")


@program("compute_metrics_override")
def _(env: Env) -> Values:
    class Net(keras.Model):
        def compute_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> dict[str, Any]:
            results = super().compute_metrics(x, y, y_pred, sample_weight)
            self.own.update_state(ops.mean(y_pred, axis=-1))
            return results | {"own": self.own.result()}

    x, y = classes(48)
    with env.strategy.scope():
        model = build(Net, 3, "softmax")
        model.own = keras.metrics.Sum(name="own")
        model.compile(sgd(), "sparse_categorical_crossentropy", metrics=["accuracy"])
    return outcome(model, model.fit(dataset(x, y), epochs=2, verbose=0))


@program("train_step_updates_a_second_model")
def _(env: Env) -> Values:
    class Distiller(keras.Model):
        """A student that learns from a frozen teacher, and a slow average of the student."""

        def __init__(self, student: keras.Model, teacher: keras.Model, slow: keras.Model) -> None:
            super().__init__()
            self.student, self.teacher, self.slow = student, teacher, slow

        def call(self, x: Any) -> Any:
            return self.student(x)

        def train_step(self, data: Any) -> dict[str, Any]:
            x, y = data
            target = self.teacher(x, training=False)
            with tf.GradientTape() as tape:
                y_pred = self.student(x, training=True)
                loss = self.compute_loss(x=x, y=0.5 * y + 0.5 * target, y_pred=y_pred)
            variables = self.student.trainable_variables
            self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
            return self.compute_metrics(x, y, y_pred) | {"loss": loss}

    class Follow(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            for fast, slow in zip(self.model.student.weights, self.model.slow.weights, strict=True):
                slow.assign(0.8 * slow.numpy() + 0.2 * fast.numpy())

    x, y = regression(48)
    with env.strategy.scope():
        model = Distiller(mlp(), mlp(), mlp())
        model.compile(sgd(), "mse", metrics=["mae"])
    record = model.fit(dataset(x, y), epochs=2, verbose=0, callbacks=[Follow()])
    return weights(model.student, "student") | weights(model.slow, "slow") | history(record)
