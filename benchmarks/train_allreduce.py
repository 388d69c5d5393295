"""The simplest program of two workers over MPI: a loop in the graph, one all-reduce after the backward pass.

One process of a job that answers, started by the MPI's own starter. It knows no dtrain and no strategy, and
computes no metrics: what `fit` takes longer is what dtrain costs. It writes into no tensor of TensorFlow's.

With `--limit`, each worker trains by itself, and in each step MPI sums a fixed buffer of the gradients' size.
No gradient is copied, and none is waited for.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import jobs
import workers
from networks import NETWORKS, Network

from transports import by_mpi


class AllReduceLoop:
    """A loop over batches that lie ready in memory, with Keras' optimizer.

    Args:
        network: what is trained, on this worker's own examples.
        limit: whether each worker trains by itself, and MPI sums what lies ready.
    """

    def __init__(self, network: Network, *, limit: bool = False) -> None:
        import numpy as np
        import tensorflow as tf
        from mpi4py import MPI

        self._network = network
        world = MPI.COMM_WORLD
        loss_and_gradients, update = network.keras_step()

        def mean_over_workers(local: np.ndarray) -> np.ndarray:
            total = np.empty_like(local)
            world.Allreduce(local, total)
            total *= 1 / world.size
            return total

        weights = network.keras().trainable_weights if limit else []
        numbers = sum(int(np.prod(weight.shape)) for weight in weights)
        self._sums = by_mpi(numbers)

        def sum_what_is_ready() -> np.float32:
            self._sums(1)
            return np.float32(0)

        def means(gradients: list[Any]) -> list[Any]:
            flat = tf.concat([tf.reshape(gradient, [-1]) for gradient in gradients], 0)
            mean = tf.ensure_shape(tf.numpy_function(mean_over_workers, [flat], tf.float32), flat.shape)
            parts = tf.split(mean, [gradient.shape.num_elements() for gradient in gradients])
            return [tf.reshape(part, gradient.shape) for part, gradient in zip(parts, gradients, strict=True)]

        @tf.function
        def train(dataset: Any) -> Any:
            loss = tf.constant(0.0)
            for x, y in dataset:
                loss, gradients = loss_and_gradients(x, y)
                if limit:
                    update(gradients)
                    loss += tf.numpy_function(sum_what_is_ready, [], tf.float32)
                else:
                    update(means(gradients))
            return loss

        self._train = train
        self._datasets: dict[int, Any] = {}

    def __call__(self, way: str, steps: int) -> float:
        """Seconds a step, over as many as `fit` is measured on, an epoch a call; or of MPI's sum alone."""
        import tensorflow as tf

        every = jobs.EPOCHS * steps
        if way == "sum":
            begun = time.perf_counter()
            self._sums(every)
            return (time.perf_counter() - begun) / every
        if steps not in self._datasets:
            batch = self._network.batch
            x, y = self._network.data(batch * steps)
            batches = [array.reshape(-1, batch, *array.shape[1:]) for array in (x, y)]
            self._datasets[steps] = tf.data.Dataset.from_tensor_slices(tuple(batches))
        begun = time.perf_counter()
        for _ in range(jobs.EPOCHS):
            float(self._train(self._datasets[steps]))
        return (time.perf_counter() - begun) / every


def main() -> None:
    """Serves until the benchmark hangs up."""
    parser = argparse.ArgumentParser()
    parser.add_argument("network", choices=NETWORKS)
    parser.add_argument("address")
    parser.add_argument("--limit", action="store_true", help="train apart, and sum what lies ready")
    asked = parser.parse_args()
    workers.pin()
    workers.one_thread_each()
    jobs.answer(asked.address, AllReduceLoop(NETWORKS[asked.network], limit=asked.limit))


if __name__ == "__main__":
    main()
