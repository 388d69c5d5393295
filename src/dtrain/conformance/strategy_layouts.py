"""The strategies of a conformance run: their processes and devices, and how TensorFlow or dtrain makes them.

All run on CPUs, so that every machine can run them. TensorFlow is imported only in the functions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from dtrain.environments.topology import Task

STOCK, DTRAIN = "stock", "dtrain"
SIDES = (STOCK, DTRAIN)

REFERENCE = "reference"
"""The layout whose numbers are the expected ones: one device, without a strategy, without dtrain."""


class ConformanceLayout(NamedTuple):
    """How a strategy is run.

    Attributes:
        title: what it is called in tables.
        class_name: the name of the strategy's class, the same in TensorFlow and in dtrain.
        tasks: the tasks of its job; the programs run in the chief, or in all workers if there is no chief.
        devices: the number of logical CPUs in each process.
        make: makes the strategy, given the module that has its class.
    """

    title: str
    class_name: str
    tasks: tuple[Task, ...]
    devices: int
    make: Callable[[Any], Any]

    def trains(self, task: Task) -> bool:
        """Whether the programs run in a task; the other tasks serve it."""
        return task.job == self.tasks[0].job


_ONE = (Task("worker", 0),)
_CPUS = ["/cpu:0", "/cpu:1"]

LAYOUTS = {
    REFERENCE: ConformanceLayout("no strategy", "", _ONE, 1, lambda api: api.get_strategy()),
    "one_device": ConformanceLayout(
        "one device", "OneDeviceStrategy", _ONE, 1, lambda api: api.OneDeviceStrategy("/cpu:0")
    ),
    "mirrored": ConformanceLayout(
        "two replicas", "MirroredStrategy", _ONE, 2, lambda api: api.MirroredStrategy(_CPUS)
    ),
    "central_storage": ConformanceLayout(
        "two replicas",
        "CentralStorageStrategy",
        _ONE,
        2,
        lambda api: api.CentralStorageStrategy(_CPUS, "/cpu:0"),
    ),
    "multi_worker": ConformanceLayout(
        "two workers",
        "MultiWorkerMirroredStrategy",
        (Task("worker", 0), Task("worker", 1)),
        1,
        lambda api: api.MultiWorkerMirroredStrategy(),
    ),
    "parameter_server": ConformanceLayout(
        "one worker, two servers",
        "ParameterServerStrategy",
        (Task("chief", 0), Task("worker", 0), Task("ps", 0), Task("ps", 1)),
        1,
        lambda api: api.ParameterServerStrategy(),
    ),
}

STRATEGIES = tuple(name for name in LAYOUTS if name != REFERENCE)


def make_strategy(name: str, side: str) -> Any:
    """Split the CPU of this process, and make a strategy; in a parameter server or its worker, never returns.

    Raises:
        RuntimeError: the strategy has another number of replicas than its layout.
    """
    import tensorflow as tf

    layout = LAYOUTS[name]
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * layout.devices)
    # One thread an operation: the replicas share the cores, and sums have a fixed order.
    tf.config.threading.set_intra_op_parallelism_threads(1)
    if side == DTRAIN:
        import dtrain

        strategy = layout.make(dtrain)
    else:
        strategy = layout.make(_TensorFlow())
    replicas = layout.devices * len([task for task in layout.tasks if layout.trains(task)])
    if strategy.num_replicas_in_sync != replicas:
        raise RuntimeError(f"{name} has {strategy.num_replicas_in_sync} replicas instead of {replicas}")
    return strategy


class _TensorFlow:
    """The classes of `tf.distribute` under dtrain's names."""

    def __getattr__(self, name: str) -> Any:
        import tensorflow as tf

        experimental = {"CentralStorageStrategy": tf.distribute.experimental}
        return getattr(experimental.get(name, tf.distribute), name)

    def ParameterServerStrategy(self) -> Any:  # noqa: N802 - a class's name
        """TensorFlow's strategy in the chief; the other tasks serve until they are killed."""
        import tensorflow as tf

        resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
        if resolver.task_type != "chief":
            cluster = resolver.cluster_spec()
            tf.distribute.Server(cluster, job_name=resolver.task_type, task_index=resolver.task_id).join()
        return tf.distribute.ParameterServerStrategy(resolver)
