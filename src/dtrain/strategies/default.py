"""The default strategy: TensorFlow's own, on the best single device, without distribution.

If it is asked for by name, models under it train by the engine's fast `fit`.
"""

from __future__ import annotations

from typing import Any

from dtrain.strategies.interface import DistributionStrategy


def get_strategy(*, memory_growth: bool = True) -> DistributionStrategy:
    """The current `tf.distribute.Strategy`: that of the enclosing scope, or TensorFlow's default one.

    Args:
        memory_growth: whether GPUs allocate memory as needed instead of all at once.

    Raises:
        DeviceError: TensorFlow has started with another number of logical CPUs than was asked for.
        UnsupportedVersionError: TensorFlow or Keras is missing or not supported.
        BackendError: Keras does not run on TensorFlow.

    Example:
        ```python
        with dtrain.MirroredStrategy().scope():
            print(dtrain.get_strategy().num_replicas_in_sync)  # as many as there are devices
        ```
    """
    from dtrain.upstream.versions import check_versions

    check_versions()
    import tensorflow as tf

    from dtrain.strategies import devices

    # The process may create a strategy with several replicas later, when devices cannot be set up any more.
    devices.prepare(memory_growth=memory_growth, logical_cpus=True)
    strategy: DistributionStrategy = tf.distribute.get_strategy()
    return strategy


def default_strategy(*, memory_growth: bool = True) -> Any:
    """As `get_strategy`; from now on, models under TensorFlow's default strategy train by dtrain's `fit`.

    Raises:
        UnsupportedVersionError, BackendError, DeviceError: as `get_strategy`.
    """
    strategy: Any = get_strategy(memory_growth=memory_growth)
    import tensorflow as tf

    if not tf.distribute.has_strategy():
        from dtrain.engine.install import install
        from dtrain.interfaces.managed_strategy import ManagedStrategy
        from dtrain.interfaces.replica_layout import ReplicaLayout

        install()
        strategy.dtrain_managed = ManagedStrategy(layout=ReplicaLayout())
    return strategy
