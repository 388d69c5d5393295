"""The default strategy: no distribution, on the best single device.

Asked for by name, it is TensorFlow's own, with the engine's fast `fit` for the models that are made under it.
"""

from __future__ import annotations

from typing import Any

from dtrain.strategies.interface import DistributionStrategy


def get_strategy(*, memory_growth: bool = True) -> DistributionStrategy:
    """The `tf.distribute.Strategy` in force here: that of the scope, or TensorFlow's default one.

    Raises:
        UnsupportedVersionError: TensorFlow or Keras is missing or not supported.
        BackendError: Keras does not run on TensorFlow.
    """
    from dtrain.upstream.versions import check_versions

    check_versions()
    import tensorflow as tf

    from dtrain.strategies import devices

    # A strategy with several replicas may follow in this process: its devices cannot be made later.
    devices.prepare(memory_growth=memory_growth, logical_cpus=True)
    found: DistributionStrategy = tf.distribute.get_strategy()
    return found


def default_strategy(*, memory_growth: bool = True) -> Any:
    """As `get_strategy`; models under TensorFlow's default strategy train by dtrain's `fit` from now on.

    Raises:
        UnsupportedVersionError, BackendError: as `get_strategy`.
    """
    found: Any = get_strategy(memory_growth=memory_growth)
    import tensorflow as tf

    if not tf.distribute.has_strategy():
        from dtrain.keras_engine.hook import install
        from dtrain.keras_engine.protocol import ReplicaLayout

        install()
        found.dtrain_layout = ReplicaLayout()
    return found
