"""The default strategy: no distribution. Keras and TensorFlow as they are, on the best single device."""

from __future__ import annotations

from typing import Any


def get_strategy(*, memory_growth: bool = True) -> Any:
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
    return tf.distribute.get_strategy()
