"""The table of strategies that the contract is run for. A new strategy is one line of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any


@dataclass(frozen=True)
class Layout:
    """How many processes, how many logical CPUs in each, and how the strategy is made in each.

    With `served`, the one process is a chief, and these tasks serve it.
    """

    workers: int
    devices: int
    make: Callable[..., Any]
    served: tuple[tuple[str, int], ...] = ()

    @property
    def replicas(self) -> int:
        return self.workers * self.devices


CPUS = ["/cpu:0", "/cpu:1"]
ONE_WORKER_TWO_SERVERS = (("worker", 0), ("ps", 0), ("ps", 1))

STRATEGIES: dict[str, Layout] = {
    "default": Layout(1, 1, lambda api: api.get_strategy()),
    "one_device": Layout(1, 1, lambda api: api.OneDeviceStrategy("/cpu:0")),
    "mirrored": Layout(1, 2, lambda api: api.MirroredStrategy()),
    "central_storage": Layout(1, 2, lambda api: api.CentralStorageStrategy(CPUS, "/cpu:0")),
    "multi_worker": Layout(2, 1, lambda api, **how: api.MultiWorkerMirroredStrategy(**how)),
    "parameter_server": Layout(1, 1, lambda api: api.ParameterServerStrategy(), ONE_WORKER_TWO_SERVERS),
}

# What two replicas cannot show, such as the order of a sum; the contract is not run for these.
LAYOUTS: dict[str, Layout] = STRATEGIES | {
    "three_devices": Layout(1, 3, lambda api: api.MirroredStrategy()),
    "four_devices": Layout(1, 4, lambda api: api.MirroredStrategy()),
    "two_of_two": Layout(2, 2, lambda api, **how: api.MultiWorkerMirroredStrategy(**how)),
    "fully_sharded": Layout(2, 1, lambda api, **how: api.FullyShardedStrategy(smallest=1, **how)),
    "fully_sharded_devices": Layout(1, 2, lambda api: api.FullyShardedStrategy(smallest=1)),
    "three_workers": Layout(3, 1, lambda api, **how: api.MultiWorkerMirroredStrategy(**how)),
}


def api(engine: str) -> Any:
    """Where the classes come from: ``stock`` is ``tf.distribute``, ``dtrain`` is the library under test."""
    if engine == "dtrain":
        import dtrain

        return dtrain
    if engine != "stock":
        raise ValueError(f"engine={engine!r}: it is 'stock' or 'dtrain'")
    import tensorflow as tf

    return SimpleNamespace(
        get_strategy=tf.distribute.get_strategy,
        OneDeviceStrategy=tf.distribute.OneDeviceStrategy,
        MirroredStrategy=tf.distribute.MirroredStrategy,
        CentralStorageStrategy=tf.distribute.experimental.CentralStorageStrategy,
        MultiWorkerMirroredStrategy=tf.distribute.MultiWorkerMirroredStrategy,
        ParameterServerStrategy=stock_parameter_servers,
    )


def stock_parameter_servers() -> Any:
    """TensorFlow's strategy on the chief; its workers and servers serve until they are killed."""
    import tensorflow as tf

    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    if resolver.task_type != "chief":
        tf.distribute.Server(
            resolver.cluster_spec(), job_name=resolver.task_type, task_index=resolver.task_id
        ).join()
    return tf.distribute.ParameterServerStrategy(resolver)
