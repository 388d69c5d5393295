"""What a program does around training: mistakes and what comes of them, predictions, files."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import dtrain
from dtrain.errors import ConfigurationError, DataError
from dtrain.strategies.parameter_server import ParameterServerStrategy

from .common import BATCH, ROWS, STEPS, assert_close, batches, classifier, data, iterations
from .registry import Job, case


@case
def a_strategy_is_made_as_tutorials_make_it(job: Job) -> None:
    """From a resolver and anew in the same chief; `fit` and the coordinator are used inside the scope."""
    strategy = dtrain.ParameterServerStrategy(dtrain.cluster_resolver.TFConfigClusterResolver())
    with strategy.scope():
        model = classifier(strategy, "adam")
        losses = model.fit(batches(), epochs=4, verbose=0).history["loss"]
        assert losses[-1] < losses[0] and iterations(model) == 4 * STEPS
        coordinator = dtrain.experimental.coordinator.ClusterCoordinator(strategy)
        iterator = iter(coordinator.create_per_worker_dataset(lambda: batches().repeat()))

        def train_step(inputs: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(model(inputs[0], training=True)))
            gradients = tape.gradient(loss, model.trainable_variables)
            model.optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
            return loss

        step = tf.function(lambda iterator: strategy.run(train_step, args=(next(iterator),)))
        before = model.get_weights()
        remote = [coordinator.schedule(step, args=(iterator,)) for _ in range(10)]
        coordinator.join()
    assert iterations(model) == 4 * STEPS + 10
    assert all(np.isfinite(value.fetch()) for value in remote)
    assert any(np.any(a != b) for a, b in zip(model.get_weights(), before, strict=True))


@case
def a_search_for_a_rate_leaves_everything_as_it_was(job: Job) -> None:
    """Weights, the optimizer's state on the servers, and its rate."""
    with job.strategy.scope():
        model = classifier(job.strategy, "adam")
        model.fit(batches(), epochs=1, verbose=0)
        before = [v.numpy() for v in [*model.variables, *model.optimizer.variables]]
        found = dtrain.find_learning_rate(model, batches(), steps=20)
    assert len(found.rates) > 10 and np.isfinite(found.losses).all()
    for variable, value in zip([*model.variables, *model.optimizer.variables], before, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value)


class Picky(keras.Model):
    """A model whose step refuses numbers above 100, in the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(3)

    def call(self, inputs: Any) -> Any:
        return self.dense(inputs)

    def train_step(self, batch: Any) -> Any:
        with tf.control_dependencies([tf.debugging.assert_less(batch[0], 100.0, message="far too large")]):
            return super().train_step(batch)


class Unready(Picky):
    """A model whose step cannot even be traced."""

    def train_step(self, batch: Any) -> Any:
        raise RuntimeError("not written yet")


@case
def an_error_shows_itself_and_the_next_fit_works(job: Job) -> None:
    x, y = data()
    bad = x.copy()
    bad[200] = 1000.0
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    with job.strategy.scope():
        model, unready = Picky(), Unready()
        model.compile("sgd", loss)
        unready.compile("sgd", loss)
    model.fit(x, y, batch_size=BATCH, verbose=0)
    endless = tf.data.Dataset.from_tensor_slices((bad, y)).batch(BATCH).repeat()
    with pytest.raises(tf.errors.InvalidArgumentError, match="far too large"):
        model.fit(endless, steps_per_epoch=10**9, verbose=0)
    with pytest.raises(RuntimeError, match="not written yet"):
        unready.fit(x, y, verbose=0)

    class Stops(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch == 3:
                raise KeyError("of the callback")

    with pytest.raises(KeyError, match="of the callback"):
        model.fit(x, y, batch_size=BATCH, callbacks=[Stops()], verbose=0)

    def broken() -> Any:
        yield from ((x[:BATCH], y[:BATCH]) for _ in range(5))
        raise ValueError("of the data")

    spec = (tf.TensorSpec([None, 10]), tf.TensorSpec([None], tf.int64))
    with pytest.raises(tf.errors.OpError, match="of the data"):
        model.fit(tf.data.Dataset.from_generator(broken, output_signature=spec), verbose=0)
    # Nothing of all that is still running, and nothing is in the way.
    before = iterations(model)
    history = model.fit(x, y, batch_size=BATCH, verbose=0).history
    assert iterations(model) == before + STEPS
    assert np.isfinite(history["loss"][0])


@case
def data_that_cannot_be_used_are_named(job: Job) -> None:
    model = classifier(job.strategy, "sgd")
    for call in (
        lambda: model.fit(lambda context: [1, 2]),
        lambda: model.fit(batches(), validation_data=lambda context: None),
        lambda: model.evaluate(lambda context: 3),
    ):
        with pytest.raises(DataError, match=r"is a function, and it returned a .*\nHint: return batches"):
            call()
    nothing = batches().take(0)
    with pytest.warns(UserWarning, match="ran out of data"):
        model.fit(nothing, verbose=0)
    assert iterations(model) == 0
    with pytest.raises(ConfigurationError, match="max_staleness is -1, not an integer of at least 0"):
        ParameterServerStrategy(max_staleness=-1)


@case
def predictions_come_in_order_from_any_model(job: Job) -> None:
    x, _ = data()
    with job.strategy.scope():
        inputs = keras.Input((10,))
        hidden = keras.layers.Dense(4, "tanh")(inputs)
        named = keras.Model(
            inputs, {"first": hidden, "second": keras.layers.Dense(2)(hidden), "same": inputs + 0.0}
        )
        listed = keras.Model(inputs, [hidden, inputs * 1.0])
    for data_in in (x, tf.data.Dataset.from_tensor_slices(x).batch(BATCH)):
        found = named.predict(data_in, batch_size=None if data_in is not x else 50, verbose=0)
        assert sorted(found) == ["first", "same", "second"]
        np.testing.assert_array_equal(found["same"], x)
        assert [found["first"].shape, found["second"].shape] == [(ROWS, 4), (ROWS, 2)]
    first, same = listed.predict(x, batch_size=7, verbose=0)
    np.testing.assert_array_equal(same, x)
    np.testing.assert_allclose(first, found["first"], rtol=1e-6, atol=1e-6)


class Saves(keras.callbacks.Callback):
    """Saves the model in the middle of an epoch."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path
        self.at = -1

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch == 4:
            self.model.save(self.path)
            self.at = iterations(self.model)


@case
def what_is_saved_is_the_model(job: Job) -> None:
    x, y = data()
    model = classifier(job.strategy, "adam")
    saves = Saves(str(job.folder / "middle.keras"))
    model.fit(x, y, batch_size=BATCH, callbacks=[saves], verbose=0)
    model.save(job.folder / "end.keras")
    middle = keras.models.load_model(saves.path, compile=False)  # on one device
    end = keras.models.load_model(job.folder / "end.keras", compile=False)
    np.testing.assert_allclose(end.predict(x, verbose=0), model.predict(x, verbose=0), rtol=1e-5, atol=1e-6)
    assert 4 <= saves.at < STEPS, saves.at  # of five steps, the other worker may be at one still
    assert any(np.any(a != b) for a, b in zip(middle.get_weights(), end.get_weights(), strict=True))


@case
def a_checkpoint_takes_the_training_back(job: Job) -> None:
    x, y = data()
    model = classifier(job.strategy, "adam")
    model.fit(x, y, batch_size=BATCH, verbose=0)
    checkpoint = tf.train.Checkpoint(model=model)
    path = checkpoint.save(str(job.folder / "checkpoint"))
    kept = [v.numpy() for v in (*model.variables, *model.optimizer.variables)]
    model.fit(x, y, batch_size=BATCH, epochs=2, verbose=0)
    assert iterations(model) == 3 * STEPS
    checkpoint.restore(path).expect_partial()
    assert iterations(model) == STEPS
    assert_close([v.numpy() for v in (*model.variables, *model.optimizer.variables)], kept, rtol=0, atol=0)
    model.fit(x, y, batch_size=BATCH, verbose=0)
    assert iterations(model) == 2 * STEPS
