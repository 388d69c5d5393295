"""The names of `tf.distribute.experimental`, so that a program can use `dtrain` in place of `tf.distribute`.

Strategies are dtrain's; all other names are TensorFlow's own objects. Nothing is defined here.
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
