"""Every metric of Keras, whose states are sums over the global batch."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from .common import BatchLogs, Values, classes, dataset, mlp, outcome, regression, sgd
from .registry import Env, program

METRICS = keras.metrics


def train(env: Env, model: keras.Model, x: np.ndarray, y: np.ndarray) -> Values:
    """Fit with validation, with batch logs: a metric is read at every batch and every epoch."""
    logs = BatchLogs()
    record = model.fit(
        dataset(x, y, batch=12),
        validation_data=dataset(x, y, batch=20),
        epochs=2,
        verbose=0,
        callbacks=[logs],
    )
    return outcome(model, record) | logs.values()


@program("metrics_of_regression")
def _(env: Env) -> Values:
    x, y = regression(44)
    with env.strategy.scope():
        model = mlp(activation="softplus")
        model.compile(
            sgd(0.02),
            "mse",
            metrics=[
                METRICS.MeanSquaredError(),
                METRICS.RootMeanSquaredError(),
                METRICS.MeanAbsoluteError(),
                METRICS.MeanAbsolutePercentageError(),
                METRICS.MeanSquaredLogarithmicError(),
                METRICS.CosineSimilarity(),
                METRICS.LogCoshError(),
                METRICS.R2Score(),
                METRICS.Poisson(),
            ],
        )
    return train(env, model, x, y)


@program("metrics_correlation")
def _(env: Env) -> Values:
    x, _ = regression(44)
    y = np.stack([x[:, 0] + 1, x[:, 1] * 2, x[:, 2] - x[:, 3]], axis=1).astype("float32")
    with env.strategy.scope():
        model = mlp(outputs=3)
        model.compile(
            sgd(0.05), "mse", metrics=[METRICS.PearsonCorrelation(), METRICS.ConcordanceCorrelation()]
        )
    return train(env, model, x, y)


@program("metrics_of_binary_labels")
def _(env: Env) -> Values:
    x, _ = regression(44)
    y = (x[:, :1] + 0.5 * x[:, 1:2] > 0.1).astype("float32")
    with env.strategy.scope():
        model = mlp(activation="sigmoid")
        model.compile(
            sgd(),
            "binary_crossentropy",
            metrics=[
                METRICS.BinaryAccuracy(),
                METRICS.BinaryCrossentropy(),
                METRICS.AUC(num_thresholds=21, name="roc"),
                METRICS.AUC(num_thresholds=21, curve="PR", name="pr"),
                METRICS.Precision(),
                METRICS.Recall(),
                METRICS.TruePositives(),
                METRICS.TrueNegatives(),
                METRICS.FalsePositives(),
                METRICS.FalseNegatives(),
                METRICS.PrecisionAtRecall(0.6, num_thresholds=21),
                METRICS.RecallAtPrecision(0.6, num_thresholds=21),
                METRICS.SensitivityAtSpecificity(0.6, num_thresholds=21),
                METRICS.SpecificityAtSensitivity(0.6, num_thresholds=21),
                METRICS.BinaryIoU(target_class_ids=[0, 1], threshold=0.5),
                METRICS.Hinge(),
                METRICS.SquaredHinge(),
            ],
        )
    return train(env, model, x, y)


@program("metrics_of_one_hot_labels")
def _(env: Env) -> Values:
    x, kinds = classes(44)
    y = np.eye(3, dtype="float32")[kinds]
    with env.strategy.scope():
        model = mlp(outputs=3, activation="softmax")
        model.compile(
            sgd(),
            "categorical_crossentropy",
            metrics=[
                METRICS.CategoricalAccuracy(),
                METRICS.CategoricalCrossentropy(),
                METRICS.CategoricalHinge(),
                METRICS.KLDivergence(),
                METRICS.TopKCategoricalAccuracy(2),
                METRICS.F1Score(average="macro"),
                METRICS.FBetaScore(average="micro", beta=2.0),
                METRICS.OneHotIoU(3, target_class_ids=[0, 2]),
                METRICS.OneHotMeanIoU(3),
                METRICS.Precision(class_id=1, name="one"),
                METRICS.AUC(num_thresholds=21, multi_label=True, num_labels=3),
            ],
        )
    return train(env, model, x, y)


@program("metrics_of_class_indices")
def _(env: Env) -> Values:
    x, y = classes(44)
    with env.strategy.scope():
        model = mlp(outputs=3, activation="softmax")
        model.compile(
            sgd(),
            "sparse_categorical_crossentropy",
            metrics=[
                "accuracy",
                METRICS.SparseCategoricalAccuracy(name="sparse"),
                METRICS.SparseCategoricalCrossentropy(),
                METRICS.SparseTopKCategoricalAccuracy(2),
                METRICS.MeanIoU(3, sparse_y_pred=False),
                METRICS.IoU(3, target_class_ids=[1], sparse_y_pred=False),
            ],
        )
    return train(env, model, x, y)


@program("metric_class_and_function_of_own")
def _(env: Env) -> Values:
    class Largest(METRICS.Metric):
        """Weighted sum of the errors and count of examples, in variables of its own."""

        def __init__(self, name: str = "own", **kwargs: Any) -> None:
            super().__init__(name=name, **kwargs)
            self.total = self.add_weight(name="total", initializer="zeros")
            self.count = self.add_weight(name="count", initializer="zeros")

        def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
            error = keras.ops.abs(y_true - y_pred)
            self.total.assign_add(keras.ops.sum(error**3))
            self.count.assign(self.count + keras.ops.cast(keras.ops.shape(error)[0], "float32"))

        def result(self) -> Any:
            return self.total / (self.count + 1e-7)

    def within(y_true: Any, y_pred: Any) -> Any:
        return keras.ops.cast(keras.ops.abs(y_true - y_pred) < 0.7, "float32")

    x, y = regression(44)
    with env.strategy.scope():
        model = mlp()
        model.compile(sgd(), "mse", metrics=[Largest(), within])
    return train(env, model, x, y)
