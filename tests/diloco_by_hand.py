"""DiLoCo on one device: a copy of the model for each replica, trained one after another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf


def by_hand(
    model: Callable[[], Any],
    optimizer: Callable[[], Any],
    outer: Any,
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
    common = model()
    for replica in models:
        replica.set_weights(common.get_weights())

    def move() -> None:
        begun = common.trainable_variables
        changes = [
            begin.numpy() - sum(own.trainable_variables[place].numpy() for own in models) / replicas
            for place, begin in enumerate(begun)
        ]
        outer.apply([tf.constant(change) for change in changes], begun)
        for own in models:
            for weight, begin in zip(own.trainable_variables, begun, strict=True):
                weight.assign(begin)

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
                move()
                since = 0
        if since:
            move()
    weights: list[np.ndarray] = common.get_weights()
    return weights
