"""The names of `tf.distribute.experimental`, so that a program may say `dtrain` for `tf.distribute`.

Strategies are dtrain's; everything else is TensorFlow's own.
"""

from __future__ import annotations

from typing import Any

_STRATEGIES = (
    "CentralStorageStrategy",
    "MultiWorkerMirroredStrategy",
    "ParameterServerStrategy",
    "TPUStrategy",
)


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    if name in _STRATEGIES:
        import dtrain

        return getattr(dtrain, name)
    import tensorflow as tf

    return getattr(tf.distribute.experimental, name)
