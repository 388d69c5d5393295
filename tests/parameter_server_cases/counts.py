"""Every step is applied once and every example counted once, whatever data, callbacks and optimizer."""

from __future__ import annotations

import warnings
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from .common import BATCH, ROWS, STEPS, batches, classifier, data, iterations
from .registry import Job, case


@case
def every_example_counts_once_from_any_input(job: Job) -> None:
    x, y = data()
    known = batches()
    unknown = known.filter(lambda features, classes: True)
    forever = batches(10 * BATCH).repeat()
    inputs: list[tuple[dict[str, Any], int]] = [
        ({"x": x, "y": y, "batch_size": BATCH}, ROWS),
        ({"x": known}, ROWS),
        ({"x": unknown}, ROWS),
        ({"x": lambda context: known}, ROWS),
        ({"x": forever, "steps_per_epoch": 7}, 7 * BATCH),
        ({"x": lambda context: forever, "steps_per_epoch": 7}, 7 * BATCH),
    ]
    model = classifier(job.strategy, "adam")
    done = 0
    for run in range(max(job.runs, len(inputs))):
        arguments, examples = inputs[run % len(inputs)]
        history = model.fit(**arguments, initial_epoch=1, epochs=3, verbose=0).history
        done += 2 * -(-examples // BATCH)
        assert iterations(model) == done, (run, iterations(model), done)
        assert history["examples"] == [examples, examples], (run, history)
        assert float(model.metrics[0].count) == examples, (run, float(model.metrics[0].count))
        assert sorted(history) == ["accuracy", "examples", "loss", "staleness", "staleness_max"]


@case
def evaluate_is_what_predict_says(job: Job) -> None:
    x, y = data()
    model = classifier(job.strategy, "sgd")
    outputs = model.predict(x, batch_size=50, verbose=0)
    loss = float(keras.losses.SparseCategoricalCrossentropy(from_logits=True)(y, outputs))
    accuracy = float(np.mean(np.argmax(outputs, axis=1) == y))
    for run in range(job.runs):
        found = model.evaluate(x, y, batch_size=7 + run, verbose=0, return_dict=True)
        assert found["examples"] == ROWS, (run, found)
        np.testing.assert_allclose([found["loss"], found["accuracy"]], [loss, accuracy], rtol=1e-6)


class Kept(keras.metrics.Metric):
    """The largest loss of an example, or the number of steps."""

    def __init__(self, name: str) -> None:
        super().__init__(name=name)
        self.kept = self.add_variable((), "zeros", name="kept")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        largest = keras.ops.maximum(self.kept, keras.ops.max(y_pred))
        self.kept.assign(largest if self.name == "largest" else self.kept + 1)

    def result(self) -> Any:
        return self.kept + 0


@case
def metrics_whose_changes_do_not_add_up_are_named(job: Job) -> None:
    with job.strategy.scope():
        kept = [Kept("largest"), Kept("steps")]
    model = classifier(job.strategy, "sgd", weighted_metrics=kept)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        history = model.fit(batches(), epochs=2, verbose=0).history
    assert history["steps"] == [STEPS, STEPS], history
    said = [str(each.message) for each in caught if "update_state" in str(each.message)]
    assert len(said) == 1, said
    assert "'largest'" in said[0], said


class Calls(keras.callbacks.Callback):
    """What a callback is told, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, int]] = []
        self.examples: list[int] = []

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.seen.append(("epoch", epoch))

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.seen.append(("begin", batch))

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.seen.append(("end", batch))
        self.examples.append(int(logs["examples"]))

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        self.seen.append(("test", batch))


@case
def callbacks_see_each_batch_once_in_order(job: Job) -> None:
    for arguments in ({}, {"steps_per_execution": 3}, {"run_eagerly": True}):
        seen = []
        for strategy in (tf.distribute.get_strategy(), job.strategy):
            model = classifier(strategy, "sgd", **arguments)
            calls = Calls()
            model.fit(batches(), epochs=2, validation_data=batches(70), callbacks=[calls], verbose=0)
            seen.append(calls)
        assert seen[1].seen == seen[0].seen
        assert iterations(model) == 2 * STEPS
        # Another worker may be a call behind: what it does comes with a later call, and nothing twice.
        assert all(mine <= other for mine, other in zip(seen[1].examples, seen[0].examples, strict=True))
        if "run_eagerly" in arguments:  # no worker runs a step
            assert seen[1].examples == seen[0].examples


@case
def class_weights_and_validation_are_one_devices(job: Job) -> None:
    """With a rate of 0 the numbers do not depend on who was first."""
    x, y = data()
    found = []
    for strategy in (tf.distribute.get_strategy(), job.strategy):
        keras.utils.set_random_seed(3)
        model = classifier(strategy, lambda: keras.optimizers.SGD(0.0))
        stop = keras.callbacks.EarlyStopping("val_loss", min_delta=1e-3, patience=1)
        history = model.fit(
            x,
            y,
            batch_size=BATCH,
            epochs=5,
            class_weight={0: 1.0, 1: 3.0, 2: 0.5},
            validation_split=0.2,
            callbacks=[stop],
            verbose=0,
        ).history
        found.append({name: values for name, values in history.items() if "staleness" not in name})
        assert len(history["loss"]) == 2  # nothing gets better
    assert sorted(found[0]) == sorted(found[1])
    for name, values in found[0].items():
        np.testing.assert_allclose(found[1][name], values, rtol=1e-6, err_msg=name)
    assert found[1]["examples"] == [264, 264] and found[1]["val_examples"] == [66, 66]


@case
def optimizers_of_every_kind_count_exactly(job: Job) -> None:
    x, y = data()
    kinds: dict[str, tuple[str, dict[str, Any]]] = {
        "bfloat16": ("mixed_bfloat16", {}),
        "float16": ("mixed_float16", {}),
        "averages": ("float32", {"use_ema": True, "ema_overwrite_frequency": 4, "clipnorm": 0.1}),
        "whole norm": ("float32", {"global_clipnorm": 0.5, "weight_decay": 0.01}),
    }
    for name, (policy, arguments) in kinds.items():
        keras.config.set_dtype_policy(policy)
        try:
            model = classifier(job.strategy, lambda given=arguments: keras.optimizers.Adam(0.01, **given))
            history = model.fit(x, y, batch_size=BATCH, epochs=2, verbose=0).history
        finally:
            keras.config.set_dtype_policy("float32")
        assert history["examples"] == [ROWS, ROWS], (name, history)
        assert np.all(np.isfinite(history["loss"])), (name, history)
        optimizer = model.optimizer
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        skipped = 0
        if inner is not optimizer:  # a step whose gradients overflow is not counted by the one inside
            skipped = round(np.log2(float(optimizer.initial_scale) / float(optimizer.dynamic_scale)))
        assert int(inner.iterations.numpy()) == 2 * STEPS - skipped, (name, int(inner.iterations.numpy()))
