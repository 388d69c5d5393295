"""Numbers that do not depend on which worker was first: updates are whole, staleness is bounded."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

import dtrain

from .common import BATCH, ROWS, STEPS, assert_close, batches, classifier, data, iterations, sizes_by_counts
from .registry import Job, case


class Slope(keras.Model):
    """A model whose output is the sum of its weights: each of their gradients is 1, always."""

    def __init__(self) -> None:
        super().__init__()
        # The last two travel by themselves, the others together.
        shapes = ((), (7,), (3, 5), (4,), (70_001,), (300, 257))
        self.parts = [
            self.add_weight(shape=shape, initializer="zeros", name=f"part_{i}")
            for i, shape in enumerate(shapes)
        ]

    def call(self, inputs: Any) -> Any:
        total = sum(tf.reduce_sum(part) for part in self.parts)
        return inputs[:, :1] * 0.0 + tf.cast(total, inputs.dtype)


def slope(strategy: Any, optimizer: Any, **arguments: Any) -> Any:
    with strategy.scope():
        model = Slope()
        model.compile(optimizer=optimizer(), loss=lambda _, outputs: tf.reduce_mean(outputs), **arguments)
    return model


def state(model: Any) -> list[np.ndarray]:
    """Weights, then all that the optimizer holds."""
    return [v.numpy() for v in (*model.variables, *model.optimizer.variables)]


@case
def updates_are_never_torn(job: Job) -> None:
    """Any number of workers' steps with equal gradients are as many steps of one device."""
    x = np.ones((16 * 40, 2), "float32")
    kinds = {
        "adam": lambda: keras.optimizers.Adam(0.05),
        "averages": lambda: keras.optimizers.AdamW(
            0.05, use_ema=True, ema_momentum=0.9, ema_overwrite_frequency=7, clipnorm=0.5
        ),
        "schedule": lambda: keras.optimizers.SGD(
            keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9), momentum=0.9, nesterov=True
        ),
    }
    for name, optimizer in kinds.items():
        found = []
        for strategy in (tf.distribute.get_strategy(), job.strategy):
            model = slope(strategy, optimizer)
            model.fit(x, x, batch_size=16, epochs=2, verbose=0)
            found.append(state(model))
            assert iterations(model) == 80, name
        assert len(found[0]) == len(found[1]) > 8
        for one, other in zip(found[1], found[0], strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-7, err_msg=name)


@case
def accumulation_goes_on_from_what_was_left(job: Job) -> None:
    """Every third step is an update, whoever computes it and wherever epochs end."""
    model = slope(job.strategy, lambda: keras.optimizers.SGD(1.0, gradient_accumulation_steps=3))
    x = np.ones((11 * 4, 2), "float32")
    watcher = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: None)
    done = 0
    for rows, callbacks in ((44, []), (44, []), (4, []), (4, []), (44, [watcher]), (44, [])):
        model.fit(x[:rows], x[:rows], batch_size=4, epochs=2, callbacks=callbacks, verbose=0)
        done += 2 * rows // 4
        assert iterations(model) == done // 3, (done, iterations(model))  # Keras counts updates here
        for part in model.parts:
            np.testing.assert_array_equal(part.numpy(), np.full(part.shape, -(done // 3), "float32"))


@case
def staleness_is_bounded_and_reported(job: Job) -> None:
    x, y = data()
    arguments = {"x": x, "y": y, "batch_size": BATCH, "epochs": 3, "shuffle": False, "verbose": 0}
    made: dict[Any, tuple[Any, dict[str, list[float]]]] = {}
    strategies: dict[Any, Any] = {"one device": tf.distribute.get_strategy(), None: job.strategy}
    for bound in (0, 1):
        strategies[bound] = dtrain.ParameterServerStrategy(max_staleness=bound)
    for bound, strategy in strategies.items():
        keras.utils.set_random_seed(5)
        model = classifier(strategy, lambda: keras.optimizers.Adam(0.01))
        history = model.fit(**arguments)
        made[bound] = model, history.history
        assert iterations(model) == 3 * STEPS, bound
        if bound != "one device":  # the callback that reports is not counted as the user's
            assert [epoch["callbacks"] for epoch in history.time_report] == [{}] * 3, history.time_report
    device, expected = made["one device"]
    model, found = made[0]
    assert_close([v.numpy() for v in model.variables], [v.numpy() for v in device.variables])
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, rtol=2e-4, err_msg=name)
    assert found["staleness_max"] == [0, 0, 0] and found["staleness"] == [0.0, 0.0, 0.0]
    assert all(most <= 1 for most in made[1][1]["staleness_max"]), made[1][1]
    unbounded = made[None][1]
    for mean, most in zip(unbounded["staleness"], unbounded["staleness_max"], strict=True):
        assert 0 <= mean <= most < STEPS, unbounded
    assert "staleness" not in expected


@case
def a_loop_of_the_coordinators(job: Job) -> None:
    """Losses, optimizers and metrics are Keras', what is scheduled when is the program's."""
    strategy = job.strategy
    with strategy.scope():
        model = keras.Sequential([keras.layers.Input((10,)), keras.layers.Dense(3)])
        optimizer = keras.optimizers.Adam(0.01)
        optimizer.build(model.trainable_variables)
        accuracy = keras.metrics.SparseCategoricalAccuracy()
        mean = keras.metrics.Mean()
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)

    def per_worker() -> Any:
        return strategy.distribute_datasets_from_function(lambda context: batches().repeat())

    iterator = iter(coordinator.create_per_worker_dataset(per_worker))

    @tf.function
    def train(iterator: Any) -> Any:
        def step(batch: Any) -> Any:
            x, y = batch
            with tf.GradientTape() as tape:
                outputs = model(x, training=True)
                loss = loss_of(y, outputs)
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
            accuracy.update_state(y, outputs)
            mean.update_state(loss)
            return tf.shape(x)[0]

        return strategy.run(step, args=(next(iterator),))

    for epoch in range(1, 4):
        counted = [coordinator.schedule(train, args=(iterator,)) for _ in range(40)]
        coordinator.join()
        assert int(optimizer.iterations.numpy()) == 40 * epoch
        assert float(mean.count.numpy()) == 40, (epoch, float(mean.count.numpy()))
        examples = sum(int(value.fetch()) for value in counted)
        assert float(accuracy.count.numpy()) == examples, (epoch, float(accuracy.count.numpy()), examples)
        assert 0.0 < float(accuracy.result()) < 1.0
        assert np.isfinite(float(mean.result()))
        accuracy.reset_state()
        mean.reset_state()
    assert ROWS % BATCH


@case
def several_steps_in_a_turn_are_the_same_steps(job: Job) -> None:
    """A small model's loop takes several steps a turn once it has run for a while: one device's numbers."""
    x = np.random.default_rng(3).normal(size=(8 * 500, 10)).astype("float32")
    y = x[:, :2] ** 2
    models = []
    for strategy in (tf.distribute.get_strategy(), dtrain.ParameterServerStrategy(max_staleness=0)):
        keras.utils.set_random_seed(4)
        with strategy.scope():
            model = keras.Sequential([keras.layers.Input((10,)), keras.layers.Dense(6, "relu")])
            model.add(keras.layers.Dense(2))
            model.compile(keras.optimizers.SGD(0.01, momentum=0.9), "mse")
        with sizes_by_counts():
            history = model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0).history
        models.append((model, history["loss"]))
    (alone, expected), (model, losses) = models
    assert_close(losses, expected)
    assert_close(state(model), state(alone))
    assert model.train_function.turns == {1, 4}, "the loop never changed"
