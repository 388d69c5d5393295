"""Metrics, whose numbers are those of the whole batch and of every example once."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from dtrain.conformance.corpus import ProgramRun, Values, program
from dtrain.conformance.parts import binary, classes, dataset, evaluated, network, regression, sgd, trained

M = keras.metrics


@program()
def metrics_of_binary_labels(run: ProgramRun) -> Values:
    """Accuracy, AUC, precision, recall and counts."""
    x, y = binary()
    with run.strategy.scope():
        model = network(activation="sigmoid")
        metrics = [
            M.BinaryAccuracy(),
            M.AUC(num_thresholds=21),
            M.Precision(),
            M.Recall(),
            M.FalsePositives(),
        ]
        model.compile(sgd(), "binary_crossentropy", metrics=metrics)
    record = model.fit(dataset(x, y), epochs=2, verbose=0)
    return trained(model, record) | evaluated(model, x, y)


@program()
def metrics_of_classes(run: ProgramRun) -> Values:
    """F1 score, top-k accuracy and mean intersection over union."""
    x, kinds = classes(44)
    y = np.eye(3, dtype="float32")[kinds]
    with run.strategy.scope():
        model = network(3, "softmax")
        metrics = [M.F1Score(average="macro"), M.TopKCategoricalAccuracy(2), M.OneHotMeanIoU(3)]
        model.compile(sgd(), "categorical_crossentropy", metrics=metrics)
    record = model.fit(dataset(x, y), epochs=2, verbose=0)
    return trained(model, record) | evaluated(model, x, y)


@program()
def metrics_of_regression(run: ProgramRun) -> Values:
    """Root mean square, R2 score and cosine similarity."""
    x, y = regression(44)
    with run.strategy.scope():
        model = network()
        model.compile(sgd(0.05), "mse", metrics=[M.RootMeanSquaredError(), M.R2Score(), M.CosineSimilarity()])
    record = model.fit(dataset(x, y), epochs=2, verbose=0)
    return trained(model, record) | evaluated(model, x, y)


@program()
def metric_of_the_user(run: ProgramRun) -> Values:
    """A metric class of the user's, with variables for a sum and a count."""

    class MeanCube(keras.metrics.Metric):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(name="cube")
            self.total = self.add_weight(name="total", initializer="zeros")
            self.count = self.add_weight(name="count", initializer="zeros")

        def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
            cubes = keras.ops.abs(y_true - y_pred) ** 3
            self.total.assign_add(keras.ops.sum(cubes))
            self.count.assign_add(keras.ops.cast(keras.ops.size(cubes), "float32"))

        def result(self) -> Any:
            return self.total / (self.count + 1e-7)

    x, y = regression(44)
    with run.strategy.scope():
        model = network()
        model.compile(sgd(), "mse", metrics=[MeanCube()])
    record = model.fit(dataset(x, y), epochs=2, verbose=0)
    return trained(model, record) | evaluated(model, x, y)


@program()
def evaluation_alone(run: ProgramRun) -> Values:
    """`evaluate` with sample weights and `predict`, without training."""
    x, y = classes(45)
    weight = np.linspace(0.1, 3.0, 45).astype("float32")
    with run.strategy.scope():
        model = network(3, "softmax")
        model.compile(loss="sparse_categorical_crossentropy", weighted_metrics=["accuracy"])
    return evaluated(model, x, y, weight)
