"""The simplest fast program of one device: an epoch in one XLA program, over arrays in memory.

One process of a job that answers. It knows no dtrain. As `fit` does, it takes the examples in another order
in each epoch, and returns the epoch's mean loss. It has no callbacks and no metrics.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import jobs
from networks import NETWORKS, Network


class XlaLoop:
    """A loop over shuffled arrays with Keras' optimizer, an epoch in a call.

    Args:
        network: what is trained.
    """

    def __init__(self, network: Network) -> None:
        import tensorflow as tf

        self._network = network
        batch = network.batch
        loss_and_gradients, update = network.keras_step()

        def step(x: Any, y: Any) -> Any:
            loss, gradients = loss_and_gradients(x, y)
            update(gradients)
            return loss

        @tf.function(jit_compile=True, autograph=False)
        def steps(x: Any, y: Any, count: Any) -> Any:
            x, y = (tf.reshape(array, [-1, batch, *array.shape[1:]]) for array in (x, y))

            def body(number: Any, total: Any) -> Any:
                return number + 1, total + step(tf.gather(x, number), tf.gather(y, number))

            start = (tf.constant(0), tf.constant(0.0))
            _, total = tf.while_loop(lambda number, _: number < count, body, start)
            return total / tf.cast(count, tf.float32)

        @tf.function(autograph=False)
        def epoch(x: Any, y: Any, count: Any) -> Any:
            order = tf.random.shuffle(tf.range(tf.shape(x)[0]))
            return steps(tf.gather(x, order), tf.gather(y, order), count)

        self._epoch = epoch
        self._arrays: dict[int, Any] = {}

    def __call__(self, way: str, steps: int) -> float:
        """Seconds a step, over as many as `fit` is measured on."""
        import tensorflow as tf

        if steps not in self._arrays:
            data = self._network.data(self._network.batch * steps)
            self._arrays[steps] = [tf.constant(array) for array in data]
        begun = time.perf_counter()
        for _ in range(jobs.EPOCHS):
            float(self._epoch(*self._arrays[steps], tf.constant(steps)))
        return (time.perf_counter() - begun) / (jobs.EPOCHS * steps)


def main() -> None:
    """Serves until the benchmark hangs up."""
    parser = argparse.ArgumentParser()
    parser.add_argument("network", choices=NETWORKS)
    parser.add_argument("address")
    asked = parser.parse_args()
    jobs.answer(asked.address, XlaLoop(NETWORKS[asked.network]))


if __name__ == "__main__":
    main()
