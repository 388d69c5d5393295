"""The best loop that stock TensorFlow has: many steps a call, in the graph, over `strategy.run`.

One process of a job that answers. It knows no dtrain; it computes no metrics, and each worker reads its own
examples, so that it does less than `fit`. With `--arrays` it has the data of `fit`: each worker holds the
arrays of all, and TensorFlow distributes the dataset.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import jobs
import workers
from networks import NETWORKS, Network
from train_keras import stock_strategy


class Loop:
    """A custom training loop.

    Args:
        network: what is trained.
        strategy: TensorFlow's.
        arrays: whether each process holds the arrays of all.
    """

    def __init__(self, network: Network, strategy: Any, *, arrays: bool = False) -> None:
        import keras
        import tensorflow as tf

        self._network = network
        self._arrays = arrays
        self._strategy = strategy
        batch = network.batch * strategy.num_replicas_in_sync
        with strategy.scope():
            model = network.keras()
            optimizer = keras.optimizers.get(network.optimizer)
            optimizer.build(model.trainable_variables)

        def losses(y: Any, outputs: Any) -> Any:
            if network.classes:
                return keras.losses.sparse_categorical_crossentropy(y, outputs, from_logits=True)
            return keras.losses.mean_squared_error(y, outputs)

        def replica_step(inputs: Any) -> Any:
            x, y = inputs
            with tf.GradientTape() as tape:
                loss = tf.nn.compute_average_loss(losses(y, model(x, training=True)), global_batch_size=batch)
            variables = model.trainable_variables
            gradients = tape.gradient(loss, [v.value for v in variables])
            optimizer.apply(gradients, variables)
            return loss

        @tf.function
        def steps(iterator: Any, count: Any) -> Any:
            loss = tf.constant(0.0)
            for _ in tf.range(count):
                per_replica = strategy.run(replica_step, args=(next(iterator),))
                loss = strategy.experimental_local_results(per_replica)[0]
            return loss

        self._steps = steps
        self._iterators: dict[int, Any] = {}

    def __call__(self, way: str, steps: int) -> float:
        """Seconds a step, over as many as `fit` is measured on, an epoch a call."""
        import tensorflow as tf

        if steps not in self._iterators:
            self._iterators[steps] = iter(
                self._strategy.experimental_distribute_dataset(self._data_of_all(steps))
                if self._arrays
                else self._strategy.distribute_datasets_from_function(self._data(steps))
            )
        iterator = self._iterators[steps]
        begun = time.perf_counter()
        for _ in range(jobs.EPOCHS):
            float(self._steps(iterator, tf.constant(steps)))
        return (time.perf_counter() - begun) / (jobs.EPOCHS * steps)

    def _data_of_all(self, steps: int) -> Any:
        """Global batches of the arrays that `fit` is given."""
        import tensorflow as tf

        batch = self._network.batch * self._strategy.num_replicas_in_sync
        self._kept = self._network.data(batch * steps)  # as a user's program keeps its arrays
        options = tf.data.Options()
        options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
        return tf.data.Dataset.from_tensor_slices(self._kept).batch(batch).repeat().with_options(options)

    def _data(self, steps: int) -> Any:
        """Each replica's own examples, as slices of arrays: nothing is cheaper to read."""
        import tensorflow as tf

        network = self._network

        def dataset(context: Any) -> Any:
            replicas = self._strategy.num_replicas_in_sync // context.num_input_pipelines
            batch = network.batch
            x, y = network.data(batch * steps * replicas)
            whole = tf.data.Dataset.from_tensor_slices(
                (x.reshape(-1, batch, *x.shape[1:]), y.reshape(-1, batch, *y.shape[1:]))
            )
            return whole.repeat().prefetch(tf.data.AUTOTUNE)

        return dataset


def main() -> None:
    """Serves until the benchmark hangs up."""
    parser = argparse.ArgumentParser()
    parser.add_argument("strategy")
    parser.add_argument("network", choices=NETWORKS)
    parser.add_argument("address")
    parser.add_argument("--pinned", action="store_true")
    parser.add_argument("--arrays", action="store_true", help="each process holds the arrays of all")
    asked = parser.parse_args()
    if asked.pinned:
        workers.pin()
        workers.one_thread_each()
    loop = Loop(NETWORKS[asked.network], stock_strategy(asked.strategy), arrays=asked.arrays)
    jobs.answer(asked.address, loop)


if __name__ == "__main__":
    main()
