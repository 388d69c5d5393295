"""DiLoCo on one device: a copy of the model for each replica, trained one after another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf


def by_hand(
    model: Callable[[], Any],
    optimizer: Callable[[], Any],
    outer: Callable[[], Any],
    x: np.ndarray,
    y: np.ndarray,
    *,
    batch: int,
    epochs: int,
    every: int,
    replicas: int,
    fragments: Sequence[Sequence[int]] | None = None,
    overlap: int = 0,
) -> list[np.ndarray]:
    """The weights after training with a mean squared error on consecutive batches.

    Args:
        model: makes the model.
        optimizer: makes the inner optimizer.
        outer: makes the outer one.
        x, y: the data.
        batch, epochs, every, replicas, overlap: as they say.
        fragments: the numbers of the weights of each fragment; all in one if there is None.
    """
    models = [model() for _ in range(replicas)]
    optimizers = [optimizer() for _ in range(replicas)]
    common = model()
    for own in models:
        own.set_weights(common.get_weights())
    weights = common.trainable_variables
    groups = [list(range(len(weights)))] if fragments is None else fragments
    outers = [outer() for _ in groups]
    waiting: dict[
        int, tuple[int, list[np.ndarray]]
    ] = {}  # when a fragment is due, and the mean of the changes

    def mean_change(group: Sequence[int]) -> list[np.ndarray]:
        return [
            weights[place].numpy() - sum(own.trainable_variables[place].numpy() for own in models) / replicas
            for place in group
        ]

    def move(number: int, changes: list[np.ndarray], kept: float) -> None:
        group = groups[number]
        outers[number].apply([tf.constant(change) for change in changes], [weights[place] for place in group])
        for own in models:
            for place in group:
                had = own.trainable_variables[place].numpy()
                own.trainable_variables[place].assign(kept * had + (1 - kept) * weights[place].numpy())

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
            for number in range(len(groups)):
                if number in waiting and waiting[number][0] == since:
                    move(number, waiting.pop(number)[1], 0.5)
            for number, group in enumerate(groups):
                if since % every == every * (number + 1) // len(groups) % every:
                    waiting[number] = since + overlap, mean_change(group)
                    if not overlap:
                        move(number, waiting.pop(number)[1], 0.0)
        if len(groups) > 1 or overlap or since % every:
            for number, group in enumerate(groups):
                began = since % every == every * (number + 1) // len(groups) % every  # after the last step
                if number in waiting:
                    move(number, waiting.pop(number)[1], 0.0 if began else 0.5)
                if not began:
                    move(number, mean_change(group), 0.0)
    final: list[np.ndarray] = common.get_weights()
    return final
