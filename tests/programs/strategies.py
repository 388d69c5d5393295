"""The table of strategies that the contract is run for. A new strategy is one line of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Layout:
    """How many processes, how many logical CPUs in each, and how each makes its strategy.

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
    "default": Layout(1, 1, lambda dtrain: stock_default()),
    "one_device": Layout(1, 1, lambda dtrain: dtrain.OneDeviceStrategy("/cpu:0")),
    "mirrored": Layout(1, 2, lambda dtrain: dtrain.MirroredStrategy()),
    "central_storage": Layout(1, 2, lambda dtrain: dtrain.CentralStorageStrategy(CPUS, "/cpu:0")),
    "multi_worker": Layout(2, 1, lambda dtrain, **how: dtrain.MultiWorkerMirroredStrategy(**how)),
    "parameter_server": Layout(1, 1, lambda dtrain: dtrain.ParameterServerStrategy(), ONE_WORKER_TWO_SERVERS),
}

# Held by the contract, and not yet compared with an older commit.
DIVIDED = {
    "fully_sharded": Layout(2, 1, lambda dtrain, **how: dtrain.FullyShardedStrategy(smallest=1, **how)),
}
HELD = [*(name for name in STRATEGIES if name != "default"), *DIVIDED]

# What two replicas cannot show, such as the order of a sum; the contract is not run for these.
LAYOUTS: dict[str, Layout] = (
    STRATEGIES
    | DIVIDED
    | {
        "fully_sharded_devices": Layout(1, 2, lambda dtrain: dtrain.FullyShardedStrategy(smallest=1)),
        "three_devices": Layout(1, 3, lambda dtrain: dtrain.MirroredStrategy()),
        "four_devices": Layout(1, 4, lambda dtrain: dtrain.MirroredStrategy()),
        "two_of_two": Layout(2, 2, lambda dtrain, **how: dtrain.MultiWorkerMirroredStrategy(**how)),
        "three_workers": Layout(3, 1, lambda dtrain, **how: dtrain.MultiWorkerMirroredStrategy(**how)),
    }
)


def stock_default() -> Any:
    """TensorFlow's default strategy, without dtrain's engine: what all others are compared with."""
    import tensorflow as tf

    return tf.distribute.get_strategy()
