"""Local SGD on one device: a copy of the model for each replica, trained and averaged one after another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

_KEPT = ("iteration", "learning_rate")  # variables of an optimizer that belong to no weight


def by_hand(
    model: Callable[[], Any],
    optimizer: Callable[[], Any],
    x: np.ndarray,
    y: np.ndarray,
    *,
    batch: int,
    epochs: int,
    every: int,
    replicas: int,
) -> list[np.ndarray]:
    """The weights after training with a mean squared error on consecutive batches."""
    models = [model() for _ in range(replicas)]
    optimizers = [optimizer() for _ in range(replicas)]
    states = []
    for replica, own in zip(models, optimizers, strict=True):
        own.build(replica.trainable_variables)
        kept = [v for v in own.variables if v.path.split("/")[-1] not in _KEPT]
        states.append([*replica.trainable_variables, *kept])

    def average() -> None:
        for variables in zip(*states, strict=True):
            mean = sum(v.numpy() for v in variables) / replicas
            for variable in variables:
                variable.assign(mean)

    for _ in range(epochs):
        since = 0
        for first in range(0, len(x), batch):
            rows = np.array_split(np.arange(first, min(first + batch, len(x))), replicas)
            for replica, own, mine in zip(models, optimizers, rows, strict=True):
                if not len(mine):
                    continue  # a replica without rows makes no step
                with tf.GradientTape() as tape:
                    loss = tf.reduce_mean((replica(x[mine]) - y[mine]) ** 2)
                own.apply(tape.gradient(loss, replica.trainable_variables), replica.trainable_variables)
            since += 1
            if since == every:
                average()
                since = 0
        if since:
            average()
    weights: list[np.ndarray] = models[0].get_weights()
    return weights
