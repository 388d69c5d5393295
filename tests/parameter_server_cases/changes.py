"""What callbacks do between batches: it has the effect of one device where blocks run one after another.

Where several workers run blocks at the same time, nothing that a callback resets or adds is lost.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import dtrain
from dtrain.errors import ScopeError
from refusals import refused

from .common import BATCH, ROWS, Examples, assert_close, classifier, data, iterations
from .registry import Job, case

Found = dict[str, Any]
Action = Callable[[Any], "Found | None"]
X, Y = data(4 * BATCH)


class Peak(keras.metrics.Metric):
    """The largest output so far: no sum, so that only a value that starts from the right one is right."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(name="peak", **kwargs)
        self.peak = self.add_weight(name="peak", shape=(), initializer="zeros")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.peak.assign(tf.maximum(self.peak, tf.reduce_max(y_pred)))

    def result(self) -> Any:
        return self.peak + 0.0


class Acts(keras.callbacks.Callback):
    """Takes one of several actions after each batch, in turn, and records logs and what actions return."""

    def __init__(self, actions: list[Action]) -> None:
        super().__init__()
        self.actions = actions
        self.seen: list[Found] = []
        self.done = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        action = self.actions[self.done % len(self.actions)]
        self.done += 1
        self.seen += [numbers(logs), numbers(action(self.model))]

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.seen.append(numbers(logs))


def numbers(found: Found | None) -> Found:
    return {name: float(value) for name, value in (found or {}).items() if "staleness" not in name}


def under(strategy: Any, **optimizer: Any) -> Any:
    keras.utils.set_random_seed(4)
    with strategy.scope():
        layers = [keras.layers.Dense(8, "relu"), keras.layers.BatchNormalization(), keras.layers.Dense(3)]
        model = keras.Sequential([keras.layers.Input((10,)), *layers])
    compiled(model, momentum=0.9, **optimizer)
    return model


def compiled(model: Any, **optimizer: Any) -> None:
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    with model.distribute_strategy.scope():
        made = keras.optimizers.SGD(0.1, **optimizer)
        model.compile(made, loss, metrics=["accuracy", Examples(), Peak()])


def metric(model: Any, name: str) -> Any:
    compiled = next(each for each in model.metrics if each.name == "compile_metrics")
    return next(each for each in compiled.metrics if each.name == name)


def assert_as_on_one_device(actions: list[Action], steps_a_call: int = 1, **optimizer: Any) -> None:
    """Trains with these actions on one device, and on workers whose blocks run one after another."""
    found = []
    for strategy in (tf.distribute.get_strategy(), dtrain.ParameterServerStrategy(max_staleness=0)):
        model = under(strategy, **optimizer)
        model.steps_per_execution = steps_a_call
        acts = Acts(actions)
        history = model.fit(X, Y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0, callbacks=[acts])
        found.append((acts.seen, numbers_of(history), [v.numpy() for v in model.variables]))
    (expected, epochs, weights), (seen, those, others) = found
    assert len(seen) == len(expected) > 2
    for number, (one, other) in enumerate(zip(seen, expected, strict=True)):
        assert one.keys() == other.keys(), number
        for name, value in other.items():
            np.testing.assert_allclose(one[name], value, rtol=2e-4, err_msg=f"{number} {name}")
    assert sorted(those) == sorted(epochs)
    for name, values in epochs.items():
        np.testing.assert_allclose(those[name], values, rtol=2e-4, err_msg=name)
    assert_close(others, weights, atol=1e-5)


def numbers_of(history: Any) -> dict[str, list[float]]:
    return {name: values for name, values in history.history.items() if "staleness" not in name}


# --- the actions


def reset(model: Any) -> None:
    model.reset_metrics()


def change_one_metric(model: Any) -> None:
    metric(model, "peak").reset_state()
    metric(model, "examples").seen.assign(1000)


def update_one_metric(model: Any) -> None:
    metric(model, "peak").update_state(np.zeros(2, "float32"), np.full(2, 9.0, "float32"))


def evaluate(model: Any) -> Found:
    found: Found = model.evaluate(X[:80], Y[:80], batch_size=BATCH, verbose=0, return_dict=True)
    return found


def predict(model: Any) -> Found:
    return {"sum": float(np.abs(model.predict(X[:80], batch_size=BATCH, verbose=0)).sum())}


def one_more_batch(model: Any) -> Found:
    found: Found = model.train_on_batch(X[:20], Y[:20], return_dict=True)
    return found


def one_test(model: Any) -> Found:
    found: Found = model.test_on_batch(X[:20], Y[:20], return_dict=True)
    return found


def results(model: Any) -> Found:
    return {name: float(value) for name, value in model.get_metrics_result().items()}


def fit_in_between(model: Any) -> Found:
    history = model.fit(X[:80], Y[:80], batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
    return {name: values[-1] for name, values in numbers_of(history).items()}


def change_weights(model: Any) -> None:
    model.layers[1].moving_mean.assign(np.full(8, 0.5))
    model.optimizer.learning_rate = 0.7 * float(model.optimizer.learning_rate)


def freeze(model: Any) -> None:
    model.layers[0].trainable = False
    model.make_train_function(force=True)


def compile_anew(model: Any) -> None:
    model.layers[0].trainable = True
    compiled(model)
    model.make_train_function()


@case
def callbacks_change_metrics_as_on_one_device(job: Job) -> None:
    assert_as_on_one_device([reset])
    assert_as_on_one_device(
        [results, change_one_metric, evaluate, update_one_metric, one_test, predict, reset]
    )


@case
def callbacks_train_as_on_one_device(job: Job) -> None:
    assert_as_on_one_device(
        [change_weights, one_more_batch, freeze, results, fit_in_between, results, compile_anew]
    )
    assert_as_on_one_device([one_more_batch], steps_a_call=3, gradient_accumulation_steps=3)


@case
def an_optimizer_from_outside_of_the_scope_is_refused(job: Job) -> None:
    """As by the other strategies, also where a callback compiles."""
    model = under(job.strategy)

    def compile_outside(model: Any) -> None:
        model.compile(keras.optimizers.SGD(0.1), "sparse_categorical_crossentropy")
        model.make_train_function()

    with refused(ScopeError, "made outside of any strategy's scope", "inside `with strategy.scope():`"):
        model.fit(X, Y, batch_size=BATCH, verbose=0, callbacks=[Acts([compile_outside])])


@case
def several_workers_lose_no_batch_to_a_reset(job: Job) -> None:
    """Each batch counts once: before a reset if the logs before it have it, and otherwise after it."""
    x, y = data()
    model = classifier(job.strategy, "adam")
    counted: list[float] = []
    tested: list[float] = []

    class Resets(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            counted.append(logs["examples"])
            self.model.reset_metrics()
            if batch == 5:
                tested.append(
                    self.model.evaluate(x, y, batch_size=BATCH, verbose=0, return_dict=True)["examples"]
                )
                self.model.reset_metrics()

    for run in range(job.runs):
        history = model.fit(x, y, batch_size=BATCH, verbose=0, callbacks=[Resets()]).history
        # What workers had not finished at the last reset is in the epoch's logs.
        assert sum(counted) + history["examples"][0] == ROWS, (run, counted, history)
        assert tested == [ROWS]
        assert history["staleness_max"][0] <= iterations(model)
        counted.clear()
        tested.clear()
