"""Compares training steps of a small model with one device's, where the installed sources are new to dtrain.

It does not compare sources; `upstream/tested_versions.py` does this, and names what is new. In versions that
dtrain was tested with, nothing runs.
"""

from __future__ import annotations

import dataclasses
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from dtrain.base.log import logger
from dtrain.errors import PeerMissingError, UnsupportedVersionError
from dtrain.upstream import reach, tested_versions

_EXAMPLES, _STEPS, _TOLERANCE = 5, 2, 1e-3
# A worker that is gone says nothing about versions.
_PEER_ERRORS = (
    PeerMissingError,
    tf.errors.UnavailableError,
    tf.errors.AbortedError,
    tf.errors.CancelledError,
)

_compared: weakref.WeakSet[Any] = weakref.WeakSet()


def check_first_step(strategy: Any) -> None:
    """Compares steps under a strategy with those of one device, once for each strategy.

    All workers of the strategy must call it. The caller's seeds and names of layers are not changed.

    Raises:
        UnsupportedVersionError: the numbers differ, or a step fails.
    """
    names = reach.unproven()
    if not names or strategy in _compared:
        return
    versions = " and ".join(f"{name} {version}" for name, version in reach.installed_versions().items())
    try:
        # Keras and TensorFlow keep scopes by thread: in another thread, the caller's do not matter.
        with ThreadPoolExecutor(1) as other:
            expected = other.submit(_trained, tf.distribute.OneDeviceStrategy("/cpu:0")).result()
            actual = other.submit(_without_hook, strategy).result()
    except _PEER_ERRORS:
        raise
    except Exception as error:
        raise _untested(strategy, f"fails: {error}", versions, names) from error
    if not np.allclose(actual, expected, rtol=_TOLERANCE, atol=_TOLERANCE):
        worst = float(np.max(np.abs(actual - expected)))
        raise _untested(strategy, f"differs from one device's by {worst:.2g}", versions, names)
    _compared.add(strategy)
    logger.info("A training step with %s gives the numbers of one device.", versions)


def _untested(strategy: Any, what: str, versions: str, names: list[str]) -> UnsupportedVersionError:
    return UnsupportedVersionError(
        f"A training step of a small model under {type(strategy).__name__} {what}. dtrain was not tested "
        f"with {versions}, where the source of these names is new: {', '.join(names)}.",
        hint=f"install {tested_versions.newest_tested()}, which this version of dtrain was tested with",
    )


def _without_hook(strategy: Any) -> Any:
    """As `_trained`, without the strategy's gradient hook, which may change numbers on purpose."""
    engine = strategy.dtrain_managed
    layout = dataclasses.replace(engine.layout, gradient_hook=None)
    strategy.dtrain_managed = dataclasses.replace(engine, layout=layout)
    try:
        return _trained(strategy)
    finally:
        strategy.dtrain_managed = engine


def _trained(strategy: Any) -> Any:
    """The losses, metrics and weights of a few steps, as one array.

    The batches divide into uneven parts. The model has a mask, a regularizer, weighted examples and a clipped
    gradient, since losses, metrics and optimizers use most of the private names.
    """
    numbers = np.random.default_rng(1)
    words = numbers.integers(0, 4, (_EXAMPLES, 3))
    targets = numbers.normal(size=(_EXAMPLES, 2)).astype("float32")
    weights = numbers.uniform(0.5, 2.0, _EXAMPLES).astype("float32")
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((3,), dtype="int32"),
                keras.layers.Embedding(4, 3, mask_zero=True, embeddings_initializer="ones", dtype="float32"),
                keras.layers.GlobalAveragePooling1D(dtype="float32"),
                keras.layers.Dense(
                    2,
                    kernel_initializer=keras.initializers.Constant(0.3),
                    kernel_regularizer=keras.regularizers.L2(0.1),
                    dtype="float32",
                ),
            ]
        )
        model.compile(
            keras.optimizers.SGD(0.1, momentum=0.9, global_clipnorm=1.0),
            keras.losses.MeanSquaredError(),
            weighted_metrics=[keras.metrics.MeanAbsoluteError()],
        )
        logs = [
            value
            for _ in range(_STEPS)
            for value in model.train_on_batch(words, targets, sample_weight=weights)
        ]
    return np.concatenate([np.ravel(value) for value in [*logs, *model.get_weights()]])
