"""PowerSGD and top-k on one device, written by hand: the gradients of each replica, one after another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf


class PowerSGDByHand:
    """Reduces the gradients of all replicas with two thin matrices for each matrix.

    Args:
        rank: the columns of a thin matrix.
        seed: of the first ones.
    """

    def __init__(self, rank: int, seed: int = 0) -> None:
        self._rank, self._seed = rank, seed
        self._unsent: dict[tuple[int, int], np.ndarray] = {}
        self._factors: dict[int, np.ndarray] = {}

    def reduced(self, place: int, gradients: list[np.ndarray]) -> np.ndarray:
        """The reduced gradient of the weight of number `place`, from those of the replicas."""
        shape = gradients[0].shape
        rows, columns = int(np.prod(shape[:-1])), shape[-1]
        if len(shape) < 2 or self._rank * (rows + columns) >= rows * columns:
            return sum(gradients)  # type: ignore[return-value]
        matrices = [
            gradient.reshape(rows, columns) + self._unsent.get((place, replica), np.float32(0.0))
            for replica, gradient in enumerate(gradients)
        ]
        if place not in self._factors:
            normal = tf.random.stateless_normal([columns, self._rank], [self._seed, 0])
            self._factors[place] = normal.numpy()
        basis = np.linalg.qr(sum(matrix @ self._factors[place] for matrix in matrices)).Q
        parts = [matrix.T @ basis for matrix in matrices]
        for replica, (matrix, part) in enumerate(zip(matrices, parts, strict=True)):
            self._unsent[place, replica] = matrix - basis @ part.T
        self._factors[place] = sum(parts)
        return (basis @ self._factors[place].T).reshape(shape)


class TopKByHand:
    """Reduces the gradients of all replicas to the largest numbers of each."""

    def __init__(self, ratio: float) -> None:
        self._ratio = ratio
        self._unsent: dict[tuple[int, int], np.ndarray] = {}

    def reduced(self, place: int, gradients: list[np.ndarray]) -> np.ndarray:
        """The reduced gradient of the weight of number `place`, from those of the replicas."""
        size = gradients[0].size
        number = max(1, round(self._ratio * size))
        if size < 3 * number:
            return sum(gradients)  # type: ignore[return-value]
        total = np.zeros(size, np.float32)
        for replica, gradient in enumerate(gradients):
            whole = gradient.reshape(-1) + self._unsent.get((place, replica), np.float32(0.0))
            largest = np.argsort(-np.abs(whole), kind="stable")[:number]
            total[largest] += whole[largest]
            whole[largest] = 0.0
            self._unsent[place, replica] = whole
        return total.reshape(gradients[0].shape)


def by_hand(
    make: Callable[[], Any],
    optimizer: Any,
    hook: Any,
    x: np.ndarray,
    y: np.ndarray,
    *,
    batch: int,
    epochs: int,
    replicas: int,
) -> list[np.ndarray]:
    """The weights after training with a mean squared error on consecutive batches.

    Args:
        make: makes the model.
        optimizer: a Keras optimizer.
        hook: reduces gradients, as the classes above.
        x, y: the data.
        batch, epochs, replicas: as they say.
    """
    model = make()
    for _ in range(epochs):
        for begin in range(0, len(x), batch):
            each = []
            rows = np.arange(begin, min(begin + batch, len(x)))
            for part in np.array_split(rows, replicas):
                with tf.GradientTape() as tape:
                    error = tf.reduce_sum(tf.square(model(x[part]) - y[part])) / (len(rows) * y.shape[1])
                each.append([g.numpy() for g in tape.gradient(error, model.trainable_variables)])
            reduced = [hook.reduced(place, list(own)) for place, own in enumerate(zip(*each, strict=True))]
            optimizer.apply(list(map(tf.constant, reduced)), model.trainable_variables)
    return list(model.get_weights())
