"""Keras' `fit`, `evaluate` and `predict` under a strategy of dtrain's or TensorFlow's: one process of a job.

A whole call is timed, from its call to its return; the round that is not counted warms up. Stock Keras is
measured in processes that never import dtrain.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import jobs
import workers
from networks import NETWORKS, Network


def dtrain_strategy(name: str, communication: str | None) -> Any:
    """A strategy of dtrain's; "default" is none but that dtrain is installed."""
    import dtrain

    if name == "multi_worker":
        return dtrain.MultiWorkerMirroredStrategy(communication=communication)
    if name == "mirrored":
        return dtrain.MirroredStrategy(["CPU:0", "CPU:1"])
    return dtrain.OneDeviceStrategy("/cpu:0") if name == "one_device" else dtrain.strategy(name)


def stock_strategy(name: str) -> Any:
    """One of TensorFlow's own; "default" is Keras without any."""
    import tensorflow as tf

    if name == "multi_worker":
        return tf.distribute.MultiWorkerMirroredStrategy()
    if name == "mirrored":
        return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    return tf.distribute.OneDeviceStrategy("/cpu:0") if name == "one_device" else tf.distribute.get_strategy()


class Calls:
    """Calls of one model, which is compiled once.

    Args:
        network: what is trained.
        strategy: under which.
    """

    def __init__(self, network: Network, strategy: Any) -> None:
        self._network = network
        self._replicas = strategy.num_replicas_in_sync
        with strategy.scope():
            self._model = network.keras()
            self._model.compile(optimizer=network.optimizer, loss=network.keras_loss())
        self._kept: dict[Any, Any] = {}

    def __call__(self, way: str, steps: int) -> float:
        """Seconds a step of a whole call, with all that it does before and after its steps.

        Args:
            way: `fit` of "arrays" or of "tf.data", a plain dataset; "evaluate" or "predict" of arrays.
            steps: of an epoch; the other calls make as many steps as all epochs together.
        """
        every = jobs.EPOCHS * steps
        if way in ("evaluate", "predict"):
            call, arguments = getattr(self._model, way), dict(self._arguments("arrays", every))
            if way == "predict":
                del arguments["y"]
        else:
            call, arguments = self._model.fit, {**self._arguments(way, steps), "epochs": jobs.EPOCHS}
        begun = time.perf_counter()
        call(**arguments, verbose=0)
        return (time.perf_counter() - begun) / every

    def _arguments(self, way: str, steps: int) -> dict[str, Any]:
        """The data of a call; the batch of a worker is the network's, the global one is for all of them."""
        if (way, steps) not in self._kept:
            batch = self._network.batch * self._replicas
            x, y = self._network.data(batch * steps)
            if way == "arrays":
                self._kept[way, steps] = {"x": x, "y": y, "batch_size": batch}
            else:
                import tensorflow as tf

                dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(batch).prefetch(tf.data.AUTOTUNE)
                self._kept[way, steps] = {"x": dataset}
        return self._kept[way, steps]


def main() -> None:
    """Serves until the benchmark hangs up."""
    parser = argparse.ArgumentParser()
    parser.add_argument("side", choices=["dtrain", "stock"])
    parser.add_argument("strategy")
    parser.add_argument("network", choices=NETWORKS)
    parser.add_argument("address")
    parser.add_argument("--communication")
    parser.add_argument("--pinned", action="store_true")
    parser.add_argument("--replica-batch", action="store_true", help="the network's batch is one replica's")
    asked = parser.parse_args()
    if asked.pinned:
        workers.pin()
        workers.one_thread_each()
    if asked.strategy == "mirrored":
        import tensorflow as tf

        cpu = tf.config.list_physical_devices("CPU")[0]
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    if asked.side == "dtrain":
        strategy = dtrain_strategy(asked.strategy, asked.communication)
    else:
        strategy = stock_strategy(asked.strategy)
    jobs.answer(asked.address, Calls(NETWORKS[asked.network], strategy))


if __name__ == "__main__":
    main()
